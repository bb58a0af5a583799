#!/usr/bin/python3
"""The example proxy for separate prefill and decode, between a client and two instances that only
note what they get."""

import http.client
import json
import os
import sys
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "client/python/examples"))

import prefill_decode_proxy as proxy  # noqa: E402


class Instance(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        if self.server.status != 200:
            return self.reply(self.server.status, b'{"error": "no"}')
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for i in range(3):
                self.wfile.write(b"data: %d\n\n" % i)
                self.wfile.flush()
                if i == 0:  # the rest comes only when the client has this
                    self.server.go.wait(10)
            return None
        return self.reply(200, json.dumps({"from": self.server.label, "kv_transfer_params": {"ucmd_blocks": 7}}).encode())

    def do_GET(self):
        self.server.seen.append((self.path, None, None))
        self.reply(200, b'{"data": []}')

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Test(unittest.TestCase):
    def instance(self, label):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Instance)
        server.label, server.seen, server.status, server.go = label, [], 200, threading.Event()
        return self.run_server(server)

    def run_server(self, server):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        return server

    def setUp(self):
        self.prefill, self.decode = self.instance("prefill"), self.instance("decode")
        self.proxy = self.run_server(proxy.serve("127.0.0.1:0", [self.prefill.url], [self.decode.url], timeout_s=10))

    def connection(self):
        c = http.client.HTTPConnection("127.0.0.1", self.proxy.server_address[1], timeout=10)
        self.addCleanup(c.close)
        return c

    def post(self, body, path="/v1/completions"):
        c = self.connection()
        c.request("POST", path, body if isinstance(body, bytes) else json.dumps(body),
                  {"Content-Type": "application/json", "Authorization": "Bearer key"})
        return c.getresponse()

    def test_a_completion_is_prefilled_and_handed_over(self):
        answer = self.post({"prompt": "long", "max_tokens": 50, "n": 2})
        self.assertEqual((answer.status, json.loads(answer.read())["from"]), (200, "decode"))
        (path, first, key), = self.prefill.seen
        self.assertEqual((path, first, key), ("/v1/completions", {
            "prompt": "long", "max_tokens": 1, "stream": False, "kv_transfer_params": {"ucmd_prefill": True}}, "Bearer key"))
        (path, second, key), = self.decode.seen
        self.assertEqual(second, {"prompt": "long", "max_tokens": 50, "n": 2, "kv_transfer_params": {"ucmd_blocks": 7}})

    def test_chats_end_by_their_own_limit(self):
        self.post({"messages": [], "max_completion_tokens": 9}, "/v1/chat/completions").read()
        self.assertEqual(self.prefill.seen[0][1]["max_completion_tokens"], 1)
        self.assertEqual(self.decode.seen[0][1]["max_completion_tokens"], 9)

    def test_a_stream_comes_piece_by_piece(self):
        answer = self.post({"prompt": "x", "stream": True})
        self.assertEqual(answer.getheader("Content-Type"), "text/event-stream")
        self.assertEqual(answer.read1(100), b"data: 0\n\n")
        self.decode.go.set()
        self.assertEqual(answer.read(), b"data: 1\n\ndata: 2\n\n")

    def test_decode_computes_when_prefill_fails(self):
        self.prefill.status = 503
        self.assertEqual(json.loads(self.post({"prompt": "x"}).read())["from"], "decode")
        self.prefill.shutdown()
        self.prefill.server_close()
        self.assertEqual(json.loads(self.post({"prompt": "x"}).read())["from"], "decode")
        self.assertNotIn("kv_transfer_params", self.decode.seen[1][1])

    def test_errors_reach_the_client(self):
        self.decode.status = 400
        self.assertEqual(self.post({"prompt": "x"}).status, 400)
        self.assertEqual(self.post(b"{").status, 400)
        self.decode.shutdown()
        self.decode.server_close()
        self.assertEqual(self.post({"prompt": "x"}).status, 502)

    def test_everything_else_goes_to_decode(self):
        c = self.connection()
        c.request("GET", "/v1/models")
        self.assertEqual(c.getresponse().read(), b'{"data": []}')
        self.assertEqual(self.prefill.seen, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
