#!/usr/bin/env python3
"""How long one tenant waits beside another that floods: the bystander's lookup of one key, or its load of 4 blocks of 128 KiB, while so many
connections of another uid send one method without pause. Wants root.

  tests/studies/beside.py [--flooders 1,4,250] [--seconds 3] [--tenants 1] [METHOD...]

Each line: median, p99 and longest of the bystander's requests in ms, quiet and beside the flood, and how much the flood had answered. `call` is what one request of the flood takes alone (median), round trip included."""

import argparse
import multiprocessing
import os
import selectors
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))
from daemon import Daemon  # noqa: E402
from second_client import BIG, DEMO, Client, Region, frame, keys, u32  # noqa: E402

SMALL = dict(DEMO, model="small", shards=[1], shard_bytes=1024)
WIDE = dict(DEMO, model="wide", shards=[1], shard_bytes=1 << 20)
FLOOD_UID, NAMES = 1001, 16384
STORED = keys(*range(NAMES))


class Flooder:
    """A connection, and the requests that it sends."""

    def __init__(self, daemon, uid, method, number):
        self.client = Client(daemon, uid=uid)
        self.ns = self.client.open(SMALL)
        self.number, self.sent = number, 0
        if method in ("load", "load_prefix", "dump", "dump.new"):
            self.region = Region(self.client, self.ns, SMALL, 8192)
        if method in ("load.big", "dump.big"):
            self.region = Region(self.client, self.client.open(WIDE), WIDE, 16)
        self.make = getattr(self, method.replace(".", "_"))
        self.same = None
        self.left = b""

    def next(self):
        body = self.same
        if body is None:
            name, params, same = self.make()
            body = frame([0, 7, name, params])
            self.same = body if same else None
        return body * max(1, min(64, 65536 // len(body))) if self.same else body

    def hello(self):
        return "hello", {"version_min": 1, "version_max": 1, "client": "flood"}, True

    def namespace_open(self):
        self.sent += 1
        return "namespace.open", {**DEMO, "model": f"{self.number}-{self.sent}", "parts": 256}, False

    def namespace_list(self):
        return "namespace.list", {"limit": 4096}, True

    def lookup(self):
        return "lookup", {"ns": self.ns, "keys": STORED}, True

    def lookup_each(self):
        return "lookup", {"ns": self.ns, "keys": STORED, "each": True}, True

    def lookup_lease(self):
        return "lookup", {"ns": self.ns, "keys": STORED, "lease_ms": 1}, True

    def lookup_new(self):
        return "lookup", {"ns": self.ns, "keys": os.urandom(16 * NAMES), "each": True}, True

    def load(self):
        return "load", {"region": self.region.number, "keys": STORED[:16 * 8192], "blocks": u32(*range(8192))}, True

    def load_prefix(self):
        return "load_prefix", {"region": self.region.number, "keys": STORED[:16 * 8192], "blocks": u32(*range(8192))}, True

    def dump(self):
        return "dump", {"region": self.region.number, "keys": STORED[:16 * 8192], "blocks": u32(*range(8192))}, True

    def dump_new(self):
        return "dump", {"region": self.region.number, "keys": os.urandom(16 * 8192), "blocks": u32(*range(8192))}, False

    def load_big(self):
        return "load", {"region": self.region.number, "keys": STORED[:16 * 16], "blocks": u32(*range(16))}, True

    def dump_big(self):
        return "dump", {"region": self.region.number, "keys": os.urandom(16 * 16), "blocks": u32(*range(16))}, False

    def prefetch(self):
        return "prefetch", {"ns": self.ns, "keys": STORED}, True

    def ls(self):
        return "ls", {"ns": self.ns, "limit": 4096}, True

    def inspect(self):
        return "inspect", {"ns": self.ns, "key": STORED[:16]}, True

    def verify(self):
        return "verify", {"ns": self.ns, "limit": 4096}, True

    def evict(self):
        return "evict", {"ns": self.ns, "keys": os.urandom(16 * NAMES)}, True

    def evict_all(self):
        return "evict", {"ns": self.ns, "tier": 2}, True

    def purge(self):
        return "namespace.purge", {"ns": self.ns, "keys": os.urandom(16 * NAMES)}, True

    def stats(self):
        return "stats", {}, True

    def health(self):
        return "health", {}, True

    def events(self):
        return "events", {"limit": 2048}, True

    def events_list(self):
        return "events.list", {"ns": self.ns, "limit": 4096}, True

    def hints_open(self):
        return "hints.open", {"ns": self.ns}, True

    def tenant_list(self):
        return "tenant.list", {"limit": 4096}, True


METHODS = [name.replace("_", ".") for name in vars(Flooder) if name not in ("next",) and not name.startswith("__")]
NAMED = {"load.prefix": "load_prefix"}


def flood(daemon, method, connections, tenants, begun, ended, answered):
    daemon.clients = []
    flooders = [Flooder(daemon, FLOOD_UID + i % tenants, method, i) for i in range(connections)]
    selector = selectors.DefaultSelector()
    for each in flooders:
        each.client.socket.setblocking(False)
        selector.register(each.client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, each)
    begun.set()
    while not ended.is_set():
        for key, what in selector.select(0.1):
            each = key.data
            try:
                if what & selectors.EVENT_READ:
                    n = len(each.client.socket.recv(1 << 20))
                    if n == 0:
                        selector.unregister(each.client.socket)
                        continue
                    answered.value += n
                if what & selectors.EVENT_WRITE:
                    each.left = each.left or each.next()
                    each.left = each.left[each.client.socket.send(each.left):]
            except BlockingIOError:
                pass
            except OSError:
                selector.unregister(each.client.socket)


def watch(act, seconds):
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        act()
        took.append((time.monotonic() - began) * 1e3)
    took.sort()
    return statistics.median(took), took[len(took) * 99 // 100], took[-1]


def alone(daemon, method):
    """ms of one request, by itself."""
    one = Flooder(daemon, FLOOD_UID, method, "alone")
    took = []
    for _ in range(8):
        name, params, _ = one.make()
        began = time.monotonic()
        try:
            one.client.call(name, **params)
        except Exception as e:  # noqa: BLE001  refused is an answer, too
            if not took:
                print("#", method, str(e)[:150])
        took.append((time.monotonic() - began) * 1e3)
    one.client.close()
    return statistics.median(took)


def run(method, connections, args):
    daemon = Daemon(nvme=args.nvme, **{"events.memory": "16MiB", "arena.size": "512MiB"})
    try:
        owner = Client(daemon, uid=FLOOD_UID)
        region = Region(owner, owner.open(SMALL), SMALL, NAMES)
        region.dump(range(NAMES), range(NAMES))
        if method == "load.big":
            region = Region(owner, owner.open(WIDE), WIDE, 16)
            region.dump(range(16), range(16))
        by = Client(daemon, uid=1000)
        ns = by.open(BIG)
        mine = Region(by, ns, BIG, 4)
        mine.dump(range(4), range(4))
        acts = [lambda: by.call("lookup", ns=ns, keys=keys(1)), lambda: mine.load(range(4), range(4))]
        quiet = [watch(act, 1) for act in acts]
        call = alone(daemon, method)
        begun, ended, answered = multiprocessing.Event(), multiprocessing.Event(), multiprocessing.Value("Q", 0)
        child = multiprocessing.Process(target=flood, args=(daemon, method, connections, args.tenants, begun, ended, answered))
        child.start()
        begun.wait(60)
        beside = [watch(act, args.seconds) for act in acts]
        ended.set()
        child.join(10)
        child.kill()
        for what, q, b in zip(("lookup", "load"), quiet, beside):
            print(f"{method:22} {connections:4} {what:6} quiet {q[0]:7.2f} {q[1]:7.2f} {q[2]:7.1f}  beside {b[0]:7.2f} {b[1]:7.2f} {b[2]:7.1f}  "
                  f"call {call:6.2f}  answered {answered.value >> 20} MiB", flush=True)
    finally:
        daemon.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flooders", default="1,4,250")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--nvme", action="store_true")
    parser.add_argument("methods", nargs="*")
    args = parser.parse_args()
    for method in args.methods or METHODS:
        for connections in args.flooders.split(","):
            run(NAMED.get(method, method), int(connections), args)


if __name__ == "__main__":
    main()
