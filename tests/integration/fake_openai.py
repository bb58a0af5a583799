"""An OpenAI-compatible endpoint that computes nothing: it answers streamed /v1/completions with delays that a test
chose, and remembers the prompts. Standard library only."""

import http.server
import json
import threading
import time


class FakeOpenAI:
    """first(n): seconds until the first token of the n-th request, from 0. gap: seconds between
    tokens. behave(n): None, or how that request goes wrong: "status", "error", "cut", "no-done",
    "garbage", "empty" or "hang"."""

    def __init__(self, first=lambda n: 0.0, gap=0.0, behave=lambda n: None, usage=True):
        self.first, self.gap, self.behave, self.usage = first, gap, behave, usage
        self.prompts, self.lock, self.most, self.now, self.end = [], threading.Lock(), 0, 0, threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def do_GET(self):
                data = json.dumps({"data": [{"id": "fake \"model\""}]}).encode()
                self.send_response(200 if self.path == "/v1/models" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions" and body["stream"], (self.path, body)
                with fake.lock:
                    n = len(fake.prompts)
                    fake.prompts.append(body["prompt"])
                    fake.now += 1
                    fake.most = max(fake.most, fake.now)
                try:
                    fake.answer(self, n, body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with fake.lock:
                        fake.now -= 1

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self):
        self.end.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, handler, n, body):
        wrong = self.behave(n)
        if wrong == "status":
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()

        def send(data):
            data = data.encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            handler.wfile.flush()

        def event(**fields):
            send("data: " + json.dumps(fields) + "\n\n")
        time.sleep(self.first(n))
        for token in range(body["max_tokens"] if wrong != "empty" else 0):
            if token > 0:
                time.sleep(self.gap)
            if token == 2 and wrong is not None:
                break
            event(choices=[{"text": "x", "finish_reason": None}])
        if wrong == "hang":
            self.end.wait()
        elif wrong == "cut":
            handler.close_connection = True
            return
        elif wrong == "error":
            event(error={"message": "the engine died"})
        elif wrong == "garbage":
            send("data: {\"choices\": [\n\n")
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            event(choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]})
        if wrong != "no-done":
            # In two pieces, and with \r\n, as some proxies do.
            send("data: [DO")
            send("NE]\r\n\r\n")
        handler.wfile.write(b"0\r\n\r\n")
        handler.wfile.flush()
