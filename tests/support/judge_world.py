"""A judge on this machine that does what the answer it reads tells it to."""

import contextlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Replies with what stands behind SAY in the answer; misbehaves on other words."""

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
        """Says nothing."""


@contextlib.contextmanager
def judge(behaviour, hang=30.0):
    """Serves until it is left.

    Args:
      behaviour: (answer, how often it was asked about) -> the reply, a status, "hang" or "garbage".
      hang: seconds.
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
    """Tells the example where the judge is, and its limits."""
    settings = {"CALLS": 1000, "SECONDS": 5, "PAUSE": 0.01, "BUDGET": folder, **settings}
    settings["URL"] = f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions"
    for name, value in settings.items():
        monkeypatch.setenv(f"JUDGE_{name}", str(value))
