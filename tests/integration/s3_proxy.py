"""A proxy between a backend and an S3 server: it sees each request, and may do harm to it or to its
answer."""

import http.client
import re
import socketserver
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>by the proxy</Message></Error>"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def say(self, status, body, headers=(), length=None):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, headers=()):
        self.say(status, ERROR.format(code).encode(), (("Content-Type", "application/xml"), *headers))

    def forward(self, body):
        """Headers, the name of the host among them, are signed, so they stay as they are."""
        server = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding", "content-length")]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            return answer.status, headers, answer.read(), length
        finally:
            server.close()

    def keep(self, body):
        """Acts as a server that takes conditions on PUT, which Swift does not. Returns its answer,
        like forward()."""
        kept, now = self.server.objects.get(self.path), (("Date", self.date_time_string()),)
        xml = (*now, ("Content-Type", "application/xml"))
        if self.command == "PUT" and kept is not None and self.headers.get("If-None-Match") == "*":
            return 412, xml, ERROR.format("PreconditionFailed").encode(), None
        if self.command == "PUT":
            self.server.objects[self.path] = body
            return 200, now, b"", None
        if self.command == "DELETE":
            self.server.objects.pop(self.path, None)
            return 204, now, b"", None
        if "list-type=2" in self.path:  # a garbage collection's, of each of 256 directories; it has no work here
            return 200, xml, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>", None
        if kept is None:
            return 404, xml, ERROR.format("NoSuchKey").encode(), None
        return 200, now, kept, None

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        harm = self.server.harm_of(self.command, self.path, key and key[1])
        if harm == "503":
            return self.refuse(503, "SlowDown", (("Retry-After", "1"),))
        if harm == "expired":
            return self.refuse(400, "ExpiredToken")
        if harm == "drop":
            return self.connection.close()
        if harm == "slow":
            time.sleep(1)
        kept = self.server.objects is not None and re.search("/blocks/|%2Fblocks%2F", self.path)
        status, headers, data, length = self.keep(body) if kept else self.forward(body)
        if harm == "wrong bytes" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if harm == "wrong length":
            data = data[:-1]
        self.say(status, data[:len(data) // 2] if harm == "cut" else data, headers, length if length else len(data))
        if harm == "cut":
            self.close_connection = True
        return None

    do_GET = do_PUT = do_HEAD = do_DELETE = handle_any

    def handle(self):
        try:
            super().handle()
        except (ConnectionError, ssl.SSLError, ValueError):
            pass  # the other side left, or the socket was closed above


class Proxy(ThreadingHTTPServer):
    """A proxy in front of the port `behind`. harm: what to do to the next `times` requests about
    blocks by these methods. objects: a dictionary that keeps blocks in place of that server."""
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, behind, certificate=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind, self.lock, self.keys, self.expired, self.done = behind, threading.Lock(), set(), set(), 0
        self.kind, self.methods, self.times, self.asked = None, (), 0, []
        self.objects = None
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # without a look at the host's name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, *_):
        pass

    def harm(self, kind, methods=(), times=0):
        with self.lock:
            self.kind, self.methods, self.times, self.done = kind, methods, times, 0

    def harm_of(self, method, path, key):
        with self.lock:
            self.keys.add(key)
            if key in self.expired:
                self.done += 1
                return "expired"
            if not re.search(r"/blocks/../(?!0{32}|\.)", path):
                return None  # only blocks: neither listings nor the notes of garbage collection
            self.asked.append(method)
            if method not in self.methods or self.times <= 0:
                return None
            self.times -= 1
            self.done += 1
            return self.kind

    def close(self):
        self.shutdown()
        self.server_close()
