"""Runs fake vLLM servers with the plugin bacr-vllm.

The policy of a server generates five thinking tokens, the closing tag, and the answer `5`.
"""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Token ids of the ledger's tokenizer: `</think>`, `<answer>`, `</answer>`, the digit 5 and the
# letter a.
CLOSE, OPEN, END, FIVE, WORD = 3, 4, 5, 11, 19
THOUGHT, BUDGETS_TO = 5, 32767


def continuation(prompt, start):
    """Returns the tokens that the policy generates after a prompt.

    These are the rest of the thinking and the closing tag, or the rest of `5</answer>` if the
    response already contains `<answer>`.

    Args:
      prompt: token ids of the prompt and of the response so far.
      start: index in `prompt` at which the response starts.
    """
    written = prompt[start:]
    if OPEN in written:
        return [FIVE, END][len(written) - written.index(OPEN) - 1 :]
    return ([WORD] * THOUGHT + [CLOSE])[len(written) :]


@contextlib.contextmanager
def answering(answers):
    """Context manager that runs a server which sends prepared bytes.

    Args:
      answers: for each connection, a list of the pieces to send. None instead of a piece keeps the
        connection open without sending anything more.

    Yields:
      The URL of the server, and a list to which the server appends the bytes of each request.
    """
    asked, left = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            for pieces in answers:
                try:
                    line, _ = listening.accept()
                except OSError:
                    return  # The socket was closed.
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
    """Server in a thread. A `with` statement starts and stops it.

    Attributes:
      folder: fingerprint of the served folder, which requests must contain.
      plugin: True if the server has the plugin, which checks the budgets of requests.
      length: maximum number of tokens of prompt and response.
      dies_after: number of requests after which connections are closed without a reply. None to
        reply to all requests.
      models: reply to a request for the list of models. None for a list with one model.
      lie: choice that every completion contains in place of the policy's response, or None.
      asked: bodies of the requests for completions, without the test requests of `Server.connect`.
      url: URL of the server.
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
        # Ignore errors, because a client may close its connection early.
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def completion(self, body):
        """Returns HTTP status and reply for a request. The reply is None to close the connection.

        Args:
          body: parsed body of the request.
        """
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
    """Server that can load new weights. While it is paused, completions wait for up to 10 s.

    Attributes:
      routes: routes of all POST requests except completions, in order.
      fails: HTTP statuses of routes that fail, by route. None closes the connection without a
        reply.
      hangs: route whose reply is delayed by 10 s, or None.
      holds: version of the weights that the server reports. None for the version that was loaded
        last.
      version: version of the weights that was loaded last.
      running: event that is set while the server is not paused.
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
        """Returns the reply to a GET request, or None if `Served` handles the route."""
        return {"weight_version": self.holds or self.version} if path == "/weight_info" else None


class Streaming(Served):
    """Server that streams completions with two tokens per event.

    Attributes:
      left: number of streams whose client closed the connection before the end.
      more: number of tokens that are added to the end of every completion.
      hangs: seconds between two events.
      events: maximum number of events with tokens.
      ends: bytes at the end of a stream.
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
        """Yields the events of a completion as bytes."""
        tokens = choice["token_ids"] + [WORD] * self.more
        for start in range(0, len(tokens), 2)[: self.events]:
            part = {"choices": [{"index": 0, "token_ids": tokens[start : start + 2]}]}
            yield f"data: {json.dumps(part)}\n\n".encode()
        yield b'data: {"choices": [], "usage": {}}\n\n'
        yield self.ends
