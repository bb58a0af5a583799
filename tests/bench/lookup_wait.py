#!/usr/bin/env python3
"""How long a scheduler in Python waits for a lookup: by asking the daemon, by its table of hints, and to tell the daemon of a lookup
that hints have answered; with an idle daemon, and beside two clients that look 8192 keys up with a lease, one after the other.

Usage: lookup_wait.py [--calls N]    UCMD, UCMCLIENT_LIB: other programs than those of build/
"""

import argparse
import os
import pathlib
import sys
import threading
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/integration"), str(TOP / "client/python")]
os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))
from daemon import Daemon  # noqa: E402
from ucmclient import Client, Identity, Plane, SharedMemory  # noqa: E402

BLOCK, STORED, BATCH = 4096, 8192, 1024
IDENTITY = Identity("lookup-wait", "f16", "bench/1", 16, BLOCK, shards=(1,))


def keys(first, n):
    return b"".join((first + i).to_bytes(32, "little") for i in range(n))


def timed(call, calls):
    """Median and 99th percentile, us."""
    took = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - began) / 1000)
    took.sort()
    return took[calls // 2], took[calls * 99 // 100]


def store(ns):
    shared = SharedMemory(BLOCK * BATCH)
    with ns.register([shared.memory()], [Plane(0, 0, BLOCK, BLOCK, 0)], blocks=BATCH) as region:
        for first in range(0, STORED, BATCH):
            assert region.dump(keys(first, BATCH), range(BATCH)).wait().all_ok
    ns.hints_open()
    while ns.lookup_hint(keys(0, 1)) is None:
        time.sleep(0.01)


def look_up(daemon, stop):
    with Client(socket=daemon.socket, name="beside") as client:
        ns, every = client.namespace(IDENTITY), keys(0, STORED)
        while not stop.is_set():
            client.release(ns.lookup_prefix(every, lease=10.0).lease)


def table(ns, beside, calls):
    for n in (125, 2000):
        for name, wanted in (("hit", keys(0, n)), ("miss", keys(1 << 40, n))):
            ask = timed(lambda: ns.lookup_prefix(wanted), calls)
            hint = timed(lambda: ns.lookup_hint(wanted), calls)
            note = timed(lambda: ns.lookup_note(wanted), min(calls, 100))
            ns.lookup_prefix(wanted)  # until the daemon has read what it was told
            print(f"| {beside} | {n} | {name} | " + " | ".join(f"{a:.1f} | {b:.0f}" for a, b in (ask, hint, note)) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    daemon = Daemon(nvme=False)
    try:
        with Client(socket=daemon.socket, name="scheduler") as client:
            ns = client.namespace(IDENTITY)
            store(ns)
            print("| daemon | keys | | asking, us | p99 | hint, us | p99 | telling, us | p99 |\n|---|---|---|---|---|---|---|---|---|")
            table(ns, "idle", calls)
            stop = threading.Event()
            threads = [threading.Thread(target=look_up, args=(daemon, stop)) for _ in range(2)]
            for thread in threads:
                thread.start()
            table(ns, "busy", calls)
            stop.set()
            for thread in threads:
                thread.join()
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
