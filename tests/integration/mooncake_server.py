"""A Mooncake store for tests: mooncake_server.py DIRECTORY [PYTHON]. Prints the backend's target,
without its prefix, and an HTTP port. There another client than the backend's can see and change the
objects. Ends with its standard input.

PYTHON is a Python that has Mooncake's client. With it, there are a real master and a process that
gives 512 MiB to the store. Without it, the client is played (mooncake_played/). The caller must
then give this program the played client, too.
"""

import ctypes
import http.server
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

from daemon import halt

HERE = os.path.dirname(os.path.abspath(__file__))
SEGMENT, LEASE_MS, WAIT_S = 512 << 20, 2000, 30
LEND = """
import sys, mooncake.store as m
s = m.MooncakeDistributedStore()
rc = s.setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": sys.argv[2], "local_buffer_size": "0",
              "protocol": "tcp", "rdma_devices": "", "master_server_addr": sys.argv[1]})
print(rc, flush=True)
sys.stdin.read()
"""


def held_port():
    """A socket that keeps its port for a server that binds it with SO_REUSEADDR, so that no other
    process gets it by chance."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    return s


class Real:
    """A master, and a process whose memory it hands out. `python` has Mooncake's client."""

    def __init__(self, directory, python, segment=SEGMENT, lease_ms=LEASE_MS, client_ttl_s=int(os.environ.get("UCM_MOONCAKE_TTL_S", "60"))):
        self.directory, self.python, self.segment, self.lease_ms, self.client_ttl_s = directory, python, segment, lease_ms, client_ttl_s
        self.held = held_port(), held_port()
        self.port, self.admin = (s.getsockname()[1] for s in self.held)
        self.metadata = "P2PHANDSHAKE"
        self.start_master()
        self.lender = self.lend()

    def start_master(self):
        where = subprocess.run([self.python, "-c", "import mooncake; print(mooncake.__path__[0])"], capture_output=True, text=True,
                               check=True, timeout=WAIT_S).stdout.strip()
        argv = [self.python, "--exec", f"{where}/mooncake_master", f"-rpc_port={self.port}", f"-metrics_port={self.admin}",
                "-rpc_address=127.0.0.1", f"-default_kv_lease_ttl={self.lease_ms}", f"-client_ttl={self.client_ttl_s}"]
        with open(os.path.join(self.directory, "master.log"), "a", encoding="utf-8") as log:
            self.master = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and self.master.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the master does not start: see master.log")

    def lend(self):
        with open(os.path.join(self.directory, "lender.log"), "a", encoding="utf-8") as log:
            lender = subprocess.Popen([self.python, "-c", LEND, f"127.0.0.1:{self.port}", str(self.segment)], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=log, text=True)
        if lender.stdout.readline().strip() != "0":
            raise RuntimeError("no process lends memory to the store: see lender.log")
        return lender

    def lenders(self):
        """The pids of the wrapper of its Python, and of that Python."""
        path = f"/proc/{self.lender.pid}/task/{self.lender.pid}/children"
        with open(path, encoding="ascii") as f:
            return [self.lender.pid, *map(int, f.read().split())]

    def away(self, _):
        halt(self.master.pid)

    def back(self, _):
        self.master.send_signal(signal.SIGCONT)

    def hang_lender(self, _):
        for pid in self.lenders():
            halt(pid)

    def wake_lender(self, _):
        for pid in self.lenders():
            os.kill(pid, signal.SIGCONT)

    def end_master(self, _):
        self.end(self.master)

    def begin_master(self, _):
        self.start_master()

    def end_lender(self, _):
        self.end(self.lender)

    def begin_lender(self, _):
        self.lender = self.lend()

    @staticmethod
    def end(process):
        process.kill()
        process.wait()

    def keys(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/get_all_keys", timeout=WAIT_S) as answer:
            return answer.read().decode().split()

    def close(self):
        for process in (self.lender, self.master):
            self.end(process)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        for s in self.held:
            s.close()


class Played:
    port = 1

    def __init__(self, directory):
        self.directory = self.metadata = directory

    def away(self, prefix):
        with open(os.path.join(self.directory, f"away-{prefix}"), "w", encoding="ascii"):
            pass

    def back(self, prefix):
        os.unlink(os.path.join(self.directory, f"away-{prefix}"))

    def keys(self):
        directory = os.path.join(self.directory, "objects")
        return [name.replace("%", "/") for name in os.listdir(directory)] if os.path.isdir(directory) else []

    def close(self):
        pass


class Objects:
    """Another client than the backend's, one call at a time."""

    def __init__(self, server):
        from mooncake.store import MooncakeDistributedStore

        self.lock, self.memory, self.client = threading.Lock(), mmap.mmap(-1, 32 << 20), MooncakeDistributedStore()
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        rc = self.client.setup({"local_hostname": "127.0.0.1", "metadata_server": server.metadata, "global_segment_size": "0",
                                "local_buffer_size": "0", "protocol": "tcp", "rdma_devices": "",
                                "master_server_addr": f"127.0.0.1:{server.port}"})
        if rc != 0 or self.client.register_buffer(self.at, len(self.memory)) != 0:
            raise RuntimeError(f"another client: error {rc}")

    def get(self, key):
        with self.lock:
            n = self.client.get_into(key, self.at, len(self.memory))
            return self.memory[:n] if n >= 0 else None

    def put(self, key, data):
        with self.lock:
            self.client.remove(key, True)
            self.memory[: len(data)] = data
            return self.client.put_from(key, self.at, len(data))

    def remove_matching(self, pattern):
        with self.lock:
            return self.client.remove_by_regex(pattern, True)

    def remove(self, key):
        with self.lock:
            return self.client.remove(key, True)


def handler(server, objects):
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, status, data=b""):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            key = self.path[1:]
            if key == "?keys":
                self.answer(200, json.dumps(server.keys()).encode())
                return
            if key.startswith("?count="):
                prefix = key.partition("=")[2] + "/"
                self.answer(200, json.dumps(sum(k.startswith(prefix) for k in server.keys())).encode())
                return
            data = objects.get(key)
            self.answer(404 if data is None else 200, data or b"")

        def do_PUT(self):
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200 if objects.put(self.path[1:], data) == 0 else 500)

        def do_DELETE(self):
            if self.path.startswith("/?matching="):
                self.answer(200, str(objects.remove_matching(urllib.parse.unquote(self.path.partition("=")[2]))).encode())
                return
            self.answer(204 if objects.remove(self.path[1:]) == 0 else 404)

        def do_POST(self):
            what, _, prefix = self.path[1:].partition("/")
            getattr(server, what.replace("-", "_"))(prefix)
            self.answer(204)

    return Handler


def main():
    directory, python = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    server = Real(directory, python) if python else Played(directory)
    try:
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(server, Objects(server)))
        threading.Thread(target=web.serve_forever, daemon=True).start()
        used = python or os.path.join(HERE, "mooncake_played/python")
        line = f"{web.server_address[1]} mooncake://127.0.0.1:{server.port} metadata={server.metadata}&host=127.0.0.1&python={used}\n"
        os.write(1, line.encode())  # at once: the caller reads once
        sys.stdin.read()
    finally:
        server.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # the client's threads are not waited for
