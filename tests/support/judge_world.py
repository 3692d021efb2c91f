"""Runs a local HTTP server as an LLM judge, whose behavior a test determines for each answer."""

import contextlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Handles a request to the judge as `server.behaviour` determines (see `judge`)."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        answer = text.split("<<<ANSWER\n")[1].split("\nANSWER>>>")[0]
        self.server.asked[answer] += 1
        behaviour = self.server.behaviour(answer, self.server.asked[answer])
        if behaviour == "hang":
            time.sleep(self.server.hang)
            return
        status = 200
        if isinstance(behaviour, int):
            status, behaviour = behaviour, "sorry"
        reply = json.dumps({"choices": [{"message": {"content": behaviour}}]}).encode()
        if behaviour == "garbage":
            reply = b"<html>"
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    def log_message(self, *_):
        """Disables the log of requests."""


@contextlib.contextmanager
def judge(behaviour, hang=30.0):
    """Context manager that runs a judge and yields its server.

    Args:
      behaviour: (answer, number of requests for this answer so far) -> text of the reply, an HTTP
        status, "hang" to send no reply, or "garbage" to send invalid JSON.
      hang: seconds until the connection is closed if the behavior is "hang".
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads, server.block_on_close = True, False
    server.behaviour, server.hang, server.asked = behaviour, hang, Counter()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def point_at(server, monkeypatch, folder, **settings):
    """Sets the environment variables of examples/verify_with_judge.py.

    Args:
      server: server of a judge.
      folder: folder in which the example counts its calls.
      settings: further variables, without the prefix JUDGE_.
    """
    settings = {"CALLS": 1000, "SECONDS": 5, "PAUSE": 0.01, "BUDGET": folder, **settings}
    settings["URL"] = f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions"
    for name, value in settings.items():
        monkeypatch.setenv(f"JUDGE_{name}", str(value))
