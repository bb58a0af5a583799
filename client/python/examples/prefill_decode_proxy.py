#!/usr/bin/env python3
"""A proxy for prefill and decode instances that share a ucmd.

    prefill_decode_proxy.py --listen 127.0.0.1:8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It sends a completion first to a prefill instance for one token. That instance stores the prompt's KV in ucmd. Then it
sends the completion to a decode instance, which loads the KV. The client gets the decode instance's answer, streamed
on request. All other requests go to the decode instance. Repeat --prefill and --decode to name several instances,
which take turns. If prefill fails, the decode instance computes the prompt.

This is an example, with the standard library only: no TLS, no authentication, one thread a connection.
"""

import argparse
import http.client
import itertools
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 64 << 20
log = logging.getLogger("proxy")


class Turns:
    """Instances in turn. Thread-safe."""

    def __init__(self, urls):
        self._next = itertools.cycle([urlsplit(url) for url in urls])
        self._lock = threading.Lock()

    def connect(self, timeout):
        with self._lock:
            url = next(self._next)
        return http.client.HTTPConnection(url.hostname, url.port or 80, timeout=timeout)


def prefill_request(body):
    """The same prompt, one token, no stream."""
    one = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "max_completion_tokens", "n", "best_of")}
    one["max_tokens"] = 1
    one["stream"] = False
    if "max_completion_tokens" in body:
        one["max_completion_tokens"] = 1
    one["kv_transfer_params"] = {"ucmd_prefill": True}
    return one


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.forward(self.body())

    def do_POST(self):
        raw = self.body()
        if raw is None:
            return
        if self.path in COMPLETIONS:
            try:
                body = json.loads(raw)
            except ValueError as error:
                self.send_error(400, f"the body is no JSON: {error}")
                return
            handover = self.prefill(body) if isinstance(body, dict) else None
            if handover is not None:
                raw = json.dumps({**body, "kv_transfer_params": handover}).encode()
        self.forward(raw)

    def body(self):
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MAX_BODY:
            self.send_error(413)
            return None
        return self.rfile.read(length)

    def prefill(self, body):
        """The kv_transfer_params for decode, from prefill's answer; None if there are none."""
        connection = self.server.prefill.connect(self.server.timeout_s)
        try:
            connection.request("POST", self.path, json.dumps(prefill_request(body)), self.pass_headers())
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status != 200:
                log.warning("prefill answered %d: %s", response.status, answer)
                return None
            return answer.get("kv_transfer_params")
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.warning("prefill failed: %s", error)
            return None
        finally:
            connection.close()

    def pass_headers(self):
        return {name: self.headers[name] for name in ("Content-Type", "Authorization", "X-Request-Id", "Accept")
                if name in self.headers}

    def forward(self, raw):
        if raw is None:
            return
        connection = self.server.decode.connect(self.server.timeout_s)
        try:
            connection.request(self.command, self.path, raw or None, self.pass_headers())
            self.answer(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            log.warning("decode failed: %s", error)
            self.close_connection = True
            if not self.answered:
                self.send_error(502, "the decode instance did not answer")
        finally:
            connection.close()

    answered = False

    def answer(self, response):
        """Passes the answer on piece by piece, so that a stream stays a stream."""
        self.answered = True
        self.send_response(response.status)
        self.send_header("Content-Type", response.getheader("Content-Type", "application/json"))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while piece := response.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, format, *args):
        log.info(format, *args)


def serve(listen, prefill, decode, timeout_s=600):
    host, _, port = listen.rpartition(":")
    server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Proxy)
    server.daemon_threads = True
    server.prefill, server.decode, server.timeout_s = Turns(prefill), Turns(decode), timeout_s
    return server


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that an instance may be silent")
    words = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    serve(words.listen, words.prefill, words.decode, words.timeout).serve_forever()


if __name__ == "__main__":
    main()
