"""A server like vLLM's with the plugin, whose policy thinks five tokens and answers 5."""

import contextlib
import json
import socket
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


@contextlib.contextmanager
def answering(answers):
    """A server that sends these bytes, an answer a request, piece by piece; None: nothing more.

    Gives its address, and a list that grows by what is asked.
    """
    asked, left = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            for pieces in answers:
                try:
                    line, _ = listening.accept()
                except OSError:
                    return  # Nobody asks any more.
                with line, contextlib.suppress(OSError):
                    asked.append(line.recv(1 << 16))
                    for piece in pieces:
                        if piece is None:
                            left.wait(10)
                            break
                        line.sendall(piece)
                        left.wait(0.02)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        left.set()


class Served:
    """A server in a thread; `with` starts and stops it.

    Attributes:
      asked: bodies of the requests so far, those of `connect` left out.
      plugin: reads budgets.
      dies_after: requests that are answered; None: all.
      lie: what every completion says instead.
    """

    def __init__(
        self, folder="", plugin=True, length=64, dies_after=None, port=0, models=None, lie=None
    ):
        self.folder, self.plugin, self.length = folder, plugin, length
        self.dies_after, self.asked, self.models = dies_after, [], models
        self.lie = lie
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                one = {"id": "policy", "max_model_len": outer.length}
                self.send(200, {"data": [one]} if outer.models is None else outer.models)

            def do_POST(self):
                self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*outer.completion(self.body))

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
        # A client that leaves is no error of ours.
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def completion(self, body):
        extra = body["vllm_xargs"]
        if self.plugin:
            if not isinstance(extra["budget"], int) and extra["budget"] != "none":
                return 400, {"error": {"message": f"budget: found {extra['budget']!r}; use"}}
            if extra.get("folder", "") != self.folder:
                return 400, {"error": {"message": f"folder: found {extra.get('folder')!r}"}}
        if "response_from" not in extra:
            return 200, {"choices": [{"token_ids": [WORD]}]}
        self.asked.append(body)
        if self.dies_after is not None and len(self.asked) > self.dies_after:
            return 500, None
        if self.lie is not None:
            return 200, {"choices": [self.lie]}
        found = continuation(body["prompt"], extra["response_from"])[: body["max_tokens"]]
        return 200, {"choices": [{"token_ids": found}]}

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Reloading(Served):
    """One to which weights can be sent; it answers nothing while it is paused.

    Attributes:
      routes: what it was told, in order.
      fails: a route that is answered by this status instead, or by nothing (None).
      hangs: a route that is never answered.
      holds: version that it says to hold; None: that which it was told.
    """

    def __init__(self, folder="", paused=False, fails=None, holds=None, hangs=None):
        super().__init__(folder)
        self.routes, self.fails, self.holds, self.hangs = [], fails or {}, holds, hangs
        self.running, self.version = threading.Event(), "default"
        if not paused:
            self.running.set()
        outer, plain = self, self.server.RequestHandlerClass

        class Handler(plain):
            def do_GET(self):
                found = outer.says(self.path)
                if found is None:
                    super().do_GET()
                else:
                    self.send(200, found)

            def do_POST(self):
                route = self.path.partition("?")[0]
                if route == "/v1/completions":
                    outer.running.wait(10)
                    super().do_POST()
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.routes.append(route)
                if route == outer.hangs:
                    threading.Event().wait(10)
                if route in outer.fails:
                    status = outer.fails[route]
                    self.send(status or 200, None if status is None else {})
                    return
                if route == "/pause":
                    outer.running.clear()
                if route == "/resume":
                    outer.running.set()
                outer.version = body.get("new_version", outer.version)
                self.send(200, {})

        self.server.RequestHandlerClass = Handler

    def says(self, path):
        """What it answers on a route of its own; None: there is none."""
        return {"weight_version": self.holds or self.version} if path == "/weight_info" else None


class Streaming(Served):
    """One that streams completions, two tokens an event.

    Attributes:
      left: number of streams whose client left before the end.
      more: tokens that every thinking has too many.
      hangs: seconds between two events.
      events: number of events with tokens that it sends at most.
      ends: what a stream ends with.
    """

    def __init__(self, *args, more=0, hangs=0.0, events=99, ends=b"data: [DONE]\n\n", **settings):
        super().__init__(*args, **settings)
        self.left, self.more, self.hangs = 0, more, hangs
        self.events, self.ends = events, ends
        outer, plain = self, self.server.RequestHandlerClass

        class Handler(plain):
            def send(self, status, found):
                if status != 200 or not getattr(self, "body", {}).get("stream"):
                    return super().send(status, found)
                self.send_response(200)
                self.end_headers()
                try:
                    for event in outer.stream_of(found["choices"][0]):
                        self.wfile.write(event)
                        self.wfile.flush()
                        threading.Event().wait(outer.hangs)
                except OSError:
                    outer.left += 1
                self.close_connection = True
                return None

        self.server.RequestHandlerClass = Handler

    def stream_of(self, choice):
        tokens = choice["token_ids"] + [WORD] * self.more
        for start in range(0, len(tokens), 2)[: self.events]:
            part = {"choices": [{"index": 0, "token_ids": tokens[start : start + 2]}]}
            yield f"data: {json.dumps(part)}\n\n".encode()
        yield b'data: {"choices": [], "usage": {}}\n\n'
        yield self.ends
