#!/usr/bin/python3
"""ucmd-backend-mooncake TARGET: keeps blocks as objects of a Mooncake store (docs/shared-tier.md).

Three workers: for finds, removals and checks, for reads, for writes. Each takes all that waits, up to a bound, and makes one call of
Mooncake's client of it: several threads inside the client at once are slower than that.
"""

import ctypes
import mmap
import os
import queue
import re
import socket
import sys
import threading
import time
import urllib.parse

USAGE = "mooncake://MASTER:PORT[/PREFIX][?protocol=tcp|rdma&devices=NAMES&metadata=URL&host=ADDRESS&replicas=N&tenant=NAME&python=PATH]"
OPTIONS = {"protocol", "devices", "metadata", "host", "replicas", "tenant", "python"}
PYTHON = "/opt/mooncake/bin/python"  # where docs/shared-tier.md has the client installed
INSTALL = "no Mooncake client for %s: pip install mooncake-transfer-engine (docs/shared-tier.md)"
# The client's timeouts, in milliseconds and seconds: it has none for a single call. They are below the time after which the daemon kills this process.
ENVIRONMENT = {"MC_RPC_TIMEOUT_MS": "3000", "MC_RPC_CONNECT_TIMEOUT_MS": "2000", "MC_TCP_STATUS_TIMEOUT_SEC": "5",
               "MC_STORE_CLIENT_SETUP_RETRIES": "1", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
BATCH_REQUESTS, BATCH_BYTES = 64, 32 << 20
SETUP_PAUSES_S = 0.25, 8
PAGE = 4096

# Mooncake's error codes, as its own header numbers them.
NO_SPACE, INVALID, LEASE_EXPIRED, GONE, TIMEOUT, NO_MASTER = -200, -600, -707, {-703, -704, -710, -712}, -901, -900
REASONS = {NO_SPACE: ("full", "no process of the store has room"), TIMEOUT: ("timeout", "the master does not answer"),
           NO_MASTER: ("unreachable", "the master can't be reached"), LEASE_EXPIRED: ("failed", "the lease ended before all was read"),
           -800: ("failed", "a process of the store can't be reached, or ended"),
           -801: ("failed", "Mooncake's checksum is wrong")}


class Wrong(Exception):
    """The target is wrong."""


class Target:
    def __init__(self, text):
        match = re.fullmatch(r"mooncake://(\[[0-9a-fA-F:.]+\]|[^/?:\[\]]+):(\d{1,5})(?:/([^?]*))?(?:\?(.*))?", text)
        if not match or not 0 < int(match[2]) < 65536:
            raise Wrong(f"write {USAGE}")
        self.master, self.port = match[1], int(match[2])
        self.prefix = (match[3] or "").strip("/") or "ucmd"
        if not re.fullmatch(r"[A-Za-z0-9._/-]{1,128}", self.prefix):
            raise Wrong("PREFIX is 1 to 128 letters, digits, dots, dashes, _ and /")
        given = [word.partition("=") for word in (match[4] or "").split("&") if word]
        names = [name for name, _, _ in given]
        for name in names:
            if name not in OPTIONS or names.count(name) > 1:
                raise Wrong(f"{name}= is no option, or there twice: {USAGE}")
        value = {name: urllib.parse.unquote(text) for name, _, text in given}
        self.protocol = value.get("protocol", "tcp")
        if not re.fullmatch("[a-z0-9_]{1,32}", self.protocol):
            raise Wrong("protocol= is tcp, rdma or another one that Mooncake knows")
        self.devices, self.metadata = value.get("devices", ""), value.get("metadata", "P2PHANDSHAKE")
        self.host, self.tenant, self.python = value.get("host", ""), value.get("tenant", "default"), value.get("python", "")
        if not re.fullmatch("[1-9][0-9]?", value.get("replicas", "1")):
            raise Wrong("replicas= is 1 to 99")
        self.replicas = int(value.get("replicas", "1"))
        if self.python and not self.python.startswith("/"):
            raise Wrong("python= is an absolute path")


def log(text):
    print(f"ucmd-backend-mooncake: {text}", file=sys.stderr, flush=True)


def own_address(target):
    """That which this host has towards the master. Nothing is sent."""
    where = socket.getaddrinfo(target.master.strip("[]"), target.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(where[0], socket.SOCK_DGRAM) as s:
        s.connect(where[4])
        address = s.getsockname()[0]
    return f"[{address}]" if ":" in address else address


def memory_at(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Store:
    """Mooncake's client, set up by a thread of its own that tries until it is. Until then `why` says what is missing."""

    def __init__(self, target, buffer):
        self.target, self.buffer, self.page = target, buffer, mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.at, self.page_at = memory_at(buffer), memory_at(self.page)
        self.client, self.config, self.why = None, None, "not connected yet"
        self.tried = threading.Event()  # once, with whatever outcome
        threading.Thread(target=self.open, daemon=True).start()

    def open(self):
        pause, most = SETUP_PAUSES_S
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as e:
            log(f"{sys.executable}: {e}")
            self.why = INSTALL % sys.executable
            self.tried.set()
            return
        while True:
            try:
                why = self.setup(MooncakeDistributedStore, ReplicateConfig)
            except Exception as e:  # as below
                why = f"{type(e).__name__}: {e}"
            if why and why != self.why:
                self.why = why
                log(why)
            self.tried.set()
            if not why:
                return
            time.sleep(pause)
            pause = min(2 * pause, most)

    def setup(self, make, config):
        t = self.target
        try:
            host = t.host or own_address(t)
        except OSError as e:
            return f"{t.master}: {e.strerror or e}"
        client = make()
        rc = client.setup({"local_hostname": host, "metadata_server": t.metadata, "global_segment_size": "0", "local_buffer_size": "0",
                           "protocol": t.protocol, "rdma_devices": t.devices, "master_server_addr": f"{t.master}:{t.port}",
                           "tenant_id": t.tenant})
        if rc == 0 and client.is_exist(f"{t.prefix}/none") < 0:
            rc = NO_MASTER
        if rc != 0:
            client.close()
            return f"no Mooncake master at {t.master}:{t.port} (error {rc}), or no {t.protocol} here"
        for at, size in ((self.at, len(self.buffer)), (self.page_at, PAGE)):
            rc = client.register_buffer(at, size)
            if rc != 0:
                client.close()
                return f"{t.protocol} can't register {size} bytes of memory (error {rc}): is LimitMEMLOCK high enough?"
        self.config = config()
        self.config.replica_num = t.replicas
        self.why, self.client = "", client
        return ""


def failure(code):
    status, reason = REASONS.get(code, ("failed", "Mooncake's client failed"))
    return {"status": status, "reason": f"{reason} (error {code})"}


def sizes(c, keys):
    """Sizes of complete objects; or an error, for a missing object one of GONE."""
    if len(keys) == 1:
        return [c.get_size(keys[0])]
    there = c.batch_is_exist(keys)
    known = [key for key, found in zip(keys, there) if found == 1]
    described = c.batch_get_replica_desc(known) if known else {}
    out = []
    for key, found in zip(keys, there):
        memory = [r for r in described.get(key, ()) if r.is_memory_replica()]
        if found == 0:
            out.append(-704)
        elif found < 0:
            out.append(found)
        else:  # what lies on a disk, or went meanwhile, is asked for by itself
            out.append(memory[0].get_memory_descriptor().buffer_descriptor.size if memory else c.get_size(key))
    return out


def found(size):
    if size >= 0:
        return {"status": "ok", "bytes": size}
    return {"status": "missing"} if size in GONE else failure(size)


def finds(s, batch):
    return [found(size) for size in sizes(s.client, [r["object"] for r in batch])]


def read_once(s, batch):
    return s.client.batch_get_into([r["object"] for r in batch], [s.at + r["offset"] for r in batch], [r["bytes"] for r in batch])


def read_answer(s, r, got):
    if got == LEASE_EXPIRED and time.monotonic() < r["until"]:
        got = read_once(s, [r])[0]  # what was read may be of another object by now
    if got == INVALID:  # among others, for an object that the span has no room for
        got = s.client.get_size(r["object"])
        if got == r["bytes"]:
            got = INVALID
    if got == r["bytes"]:
        return {"status": "ok", "bytes": got}
    return {"status": "other"} if got >= 0 else found(got)


def reads(s, batch):
    return [read_answer(s, r, got) for r, got in zip(batch, read_once(s, batch))]


def written(put, there):
    """A put of an object that another process is writing returns success, too; that process may have died."""
    if put == 0 and there == 1:
        return {"status": "ok"}
    if put < 0:
        return failure(put)
    return failure(there) if there < 0 else {"status": "failed", "reason": "another host's write of it is not done, or it was evicted at once"}


def writes(s, batch):
    out, new = [None] * len(batch), []
    for i, size in enumerate(sizes(s.client, [r["object"] for r in batch])):
        if size == batch[i]["bytes"]:
            out[i] = {"status": "exists"}
        elif size < 0 and size not in GONE:
            out[i] = failure(size)
        else:
            if size >= 0:
                s.client.remove(batch[i]["object"], True)  # a put would leave it as it is
            new.append(i)
    if new:
        keys = [batch[i]["object"] for i in new]
        puts = s.client.batch_put_from(keys, [s.at + batch[i]["offset"] for i in new], [batch[i]["bytes"] for i in new], s.config)
        for i, put, there in zip(new, puts, s.client.batch_is_exist(keys)):
            out[i] = written(put, there)
    return out


def remove(s, r):
    rc = s.client.remove(r["object"], True)  # also while it has a lease: each read is verified
    return {"status": "ok"} if rc == 0 else found(rc)


def check(s, r):
    """Not by the client's health_check(), which calls a dead master healthy for seconds."""
    rc = s.client.is_exist(r["object"])
    if rc >= 0 and r["sync"]:
        rc = s.client.batch_put_from([r["object"]], [s.page_at], [1], s.config)[0]
        if rc == 0:
            s.client.remove(r["object"], True)
    return {"status": "ok", "now": time.time_ns()} if rc >= 0 else failure(rc)


ONE = {"remove": remove, "check": check}
MANY = {"find": finds, "read": reads, "write": writes}
WORKER = {"find": 0, "remove": 0, "check": 0, "read": 1, "write": 2}


def answers(s, batch):
    """One for each; what is late by now is not begun."""
    s.tried.wait(max(0, min(r["until"] for r in batch) - time.monotonic()))
    if not s.client:
        return [{"status": "failed" if s.why.startswith("no Mooncake client") else "unreachable", "reason": s.why}] * len(batch)
    now, verb = time.monotonic(), batch[0]["verb"]
    due = [r for r in batch if now <= r["until"]]
    try:
        done = (MANY[verb](s, due) if verb in MANY else [ONE[verb](s, r) for r in due]) if due else []
    except Exception as e:  # the client's: what it throws is not documented
        done = [{"status": "failed", "reason": f"{type(e).__name__}: {e}"}] * len(due)
    by_id = {r["id"]: a for r, a in zip(due, done)}
    return [by_id.get(r["id"], {"status": "timeout"}) for r in batch]


def printable(answer):
    if "reason" in answer:
        answer = {**answer, "reason": re.sub("[^ -~]", "?", answer["reason"])[:120]}
    return answer


class Backend:
    def __init__(self, target, sock, pack, unpack):
        self.target, self.sock, self.pack, self.unpack = target, sock, pack, unpack
        self.waiting = [queue.SimpleQueue() for _ in range(3)]

    def send(self, messages):
        self.sock.send(self.pack(messages))  # one packet; any thread

    def batch(self, waiting, first):
        """What waits and fits, of one verb, each object once; and what comes next."""
        batch, objects, size = [first], {first["object"]}, first.get("bytes", 0)
        while len(batch) < BATCH_REQUESTS and not waiting.empty():
            r = waiting.get()
            size += r.get("bytes", 0)
            if r["verb"] != first["verb"] or r["object"] in objects or size > BATCH_BYTES:
                return batch, r
            batch.append(r)
            objects.add(r["object"])
        return batch, None

    def work(self, waiting):
        after = None
        while True:
            batch, after = self.batch(waiting, after or waiting.get())
            try:
                self.send([{"id": r["id"], **printable(a)} for r, a in zip(batch, answers(self.store, batch))])
            except OSError:
                os._exit(0)  # the daemon is gone

    def take(self, r):
        verb = r["verb"]
        r["until"] = time.monotonic() + r["ms"] / 1000
        if "bytes" in r and "offset" in r and not 0 <= r["offset"] <= r["offset"] + r["bytes"] <= self.size:
            raise ValueError("a span outside of the buffer")
        name = r["key"] if verb != "check" else r["temp"] if r["sync"] else "none"
        r["object"] = f"{self.target.prefix}/{name}"
        self.waiting[WORKER[verb]].put(r)

    def run(self):
        packet, fds, _, _ = socket.recv_fds(self.sock, 65536, 1)
        hello = self.unpack(packet)[0]
        self.size = hello["buffer"]
        buffer = mmap.mmap(fds[0], self.size)
        os.close(fds[0])
        self.send([{"hello": "mooncake", "version": 1, "depth": hello["depth"], "abilities": []}])
        self.store = Store(self.target, buffer)
        for waiting in self.waiting:
            threading.Thread(target=self.work, args=(waiting,), daemon=True).start()
        while packet := self.sock.recv(65536):
            for r in self.unpack(packet):
                self.take(r)


def main():
    if len(sys.argv) != 2:
        sys.exit(f"Usage: ucmd-backend-mooncake {USAGE}, which ucmd starts: see docs/shared-tier.md")
    try:
        target = Target(sys.argv[1])
    except Wrong as e:
        log(e)
        sys.exit(2)
    python = target.python or (PYTHON if os.access(PYTHON, os.X_OK) else "")
    if python and not os.environ.get("UCM_BACKEND_PYTHON"):
        os.environ["UCM_BACKEND_PYTHON"] = python
        try:
            os.execv(python, [python, "-I", "-B", os.path.realpath(__file__), sys.argv[1]])
        except OSError as e:
            log(f"python={python}: {e.strerror}: is it below /usr, /opt or read=?")
            sys.exit(2)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    try:
        import msgpack
    except ImportError:
        log(f"{sys.executable} has no msgpack: install python3-msgpack, or give the Mooncake client's Python by python=PATH")
        sys.exit(2)
    sock = socket.socket(fileno=int(os.environ["UCM_BACKEND_FD"]))
    Backend(target, sock, msgpack.packb, msgpack.unpackb).run()
    os._exit(0)  # the client's threads are not waited for: they may be in a call


if __name__ == "__main__":
    main()
