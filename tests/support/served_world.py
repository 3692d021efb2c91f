"""A server as vLLM with the plugin is one, and a policy that thinks five tokens and answers 5.

As a program it takes the command line that an evaluation starts vLLM with.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Of the ledger's tokenizer: `</think>`, `<answer>`, `</answer>`, the digit 5 and the letter a.
CLOSE, OPEN, END, FIVE, WORD = 3, 4, 5, 11, 19
THOUGHT, BUDGETS_TO = 5, 32767


def continuation(prompt, start):
    """What follows: thinking, its tag, and after the tag that opens the answer `5</answer>`."""
    written = prompt[start:]
    if OPEN in written:
        return [FIVE, END][len(written) - written.index(OPEN) - 1 :]
    return ([WORD] * THOUGHT + [CLOSE])[len(written) :]


class Served:
    """A server in a thread; `with` starts and stops it.

    Attributes:
      asked: bodies of the requests so far, those of `connect` left out.
      plugin: reads budgets.
      dies_after: requests that are answered; None: all.
    """

    def __init__(self, folder="", plugin=True, length=64, dies_after=None, port=0, models=None):
        self.folder, self.plugin, self.length = folder, plugin, length
        self.dies_after, self.asked, self.models = dies_after, [], models
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                one = {"id": "policy", "max_model_len": outer.length}
                self.send(200, {"data": [one]} if outer.models is None else outer.models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*outer.completion(body))

            def send(self, status, found):
                if found is None:
                    self.connection.close()
                    return
                raw = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def completion(self, body):
        extra = body["vllm_xargs"]
        if self.plugin:
            if not isinstance(extra["budget"], int) and extra["budget"] != "none":
                return 400, {"error": {"message": f"budget: found {extra['budget']!r}; write"}}
            if extra.get("folder") != self.folder:
                return 400, {"error": {"message": f"folder: found {extra.get('folder')!r}"}}
        if "response_from" not in extra:
            return 200, {"choices": [{"token_ids": [WORD]}]}
        self.asked.append(body)
        if self.dies_after is not None and len(self.asked) > self.dies_after:
            return 500, None
        found = continuation(body["prompt"], extra["response_from"])[: body["max_tokens"]]
        return 200, {"choices": [{"token_ids": found}]}

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("-m", "--model", "--port", "--host", "--dtype", "--served-model-name", "--fail"):
        parser.add_argument(name)
    parser.add_argument("--max-num-seqs", type=int)
    given = parser.parse_args()
    if given.fail:
        raise RuntimeError(given.fail)
    from pathlib import Path

    from bacr_held.fingerprint import fingerprint

    served = Served(fingerprint(Path(given.model)), port=int(given.port))
    served.server.serve_forever()
