"""Stores and loads of ucmd-backend-mooncake beside Mooncake's own Python client: mooncake_bench.py BACKEND PYTHON [TURNS].

PYTHON has Mooncake's client (tests/setup/mooncake.sh) and runs this. 32 under way, 128 MiB a turn, by turns: the backend is asked over its socket as
the daemon asks it; the client gets the same buffers as one call of 32, and again until all are moved. No daemon: its copy is not in here.
"""

import array
import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import msgpack

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))
from mooncake_server import Real  # noqa: E402

from mooncake.store import MooncakeDistributedStore  # noqa: E402

BYTES, DEPTH, MS = 128 << 20, 32, 60000


def memory(size):
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, size)
    at = mmap.mmap(fd, size)
    for i in range(0, size, 4096):
        at[i] = i >> 12 & 255
    return fd, at


class Backend:
    def __init__(self, program, python, server, size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd, self.memory = memory(size)
        target = f"mooncake://127.0.0.1:{server.port}/bench?host=127.0.0.1&python={python}"
        self.process = subprocess.Popen([program, target], pass_fds=(theirs.fileno(),),
                                        env={"PATH": os.environ["PATH"], "UCM_BACKEND_FD": str(theirs.fileno())})
        theirs.close()
        self.sock = ours
        hello = {"hello": "ucmd", "version_min": 1, "version_max": 1, "buffer": size, "depth": DEPTH, "root": "b", "host": "h", "read_only": False}
        ours.sendmsg([msgpack.packb([hello])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        ours.recv(65536)
        self.ids = 0

    def move(self, verb, keys, size):
        """All of them, DEPTH under way."""
        free, left, under_way = list(range(DEPTH)), list(keys), {}
        while left or under_way:
            asks = []
            while left and free:
                self.ids += 1
                slot = free.pop()
                under_way[self.ids] = slot
                asks.append({"id": self.ids, "verb": verb, "ms": MS, "key": left.pop(0), "bytes": size, "offset": slot * size,
                             **({"temp": "blocks/00/t", "sync": False} if verb == "write" else {})})
            if asks:
                self.sock.send(msgpack.packb(asks))
            for answer in msgpack.unpackb(self.sock.recv(65536)):
                assert answer["status"] == "ok", answer
                free.append(under_way.pop(answer["id"]))

    def close(self):
        self.sock.close()
        self.process.wait()


class Client:
    def __init__(self, server, size):
        _, self.memory = memory(size)
        self.at, self.client = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), MooncakeDistributedStore()
        assert self.client.setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "0", "local_buffer_size": "0",
                                  "protocol": "tcp", "rdma_devices": "", "master_server_addr": f"127.0.0.1:{server.port}"}) == 0
        assert self.client.register_buffer(self.at, size) == 0

    def move(self, verb, keys, size):
        for i in range(0, len(keys), DEPTH):
            some = keys[i : i + DEPTH]
            at, sizes = [self.at + n * size for n in range(len(some))], [size] * len(some)
            done = self.client.batch_put_from(some, at, sizes) if verb == "write" else self.client.batch_get_into(some, at, sizes)
            assert done == ([0] if verb == "write" else [size]) * len(some), done


def main():
    program, python, turns = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 7
    with tempfile.TemporaryDirectory() as folder:
        server = Real(folder, python, segment=1 << 30)
        for mib in (1, 4):
            size = mib << 20
            backend, client = Backend(program, python, server, DEPTH * size), Client(server, DEPTH * size)
            taken = {}
            for turn in range(turns + 1):
                for name, mover in sorted((("backend", backend), ("client", client)), reverse=turn % 2 == 1):
                    keys = [f"blocks/00/{name}-{mib}-{turn}-{i}" for i in range(BYTES // size)]
                    for verb in ("write", "read"):
                        began = time.perf_counter()
                        mover.move(verb, keys, size)
                        if turn:  # the first is to warm up
                            taken.setdefault((verb, name), []).append(time.perf_counter() - began)
                    for key in keys:
                        client.client.remove(f"bench/{key}" if name == "backend" else key, True)
            for verb in ("write", "read"):
                ours, theirs = taken[verb, "backend"], taken[verb, "client"]
                ratio = statistics.median(b / a for a, b in zip(ours, theirs))
                print(f"{verb:5} {mib} MiB: client {BYTES / statistics.median(theirs) / 1e9:.2f} GB/s, backend {BYTES / statistics.median(ours) / 1e9:.2f} GB/s, ratio {ratio:.2f}", flush=True)
            backend.close()
            client.client.close()
        server.close()
    os._exit(0)


main()
