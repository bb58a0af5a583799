#!/usr/bin/python3
"""What it costs when the process of a shared root is killed every second: backend_kills.py nfs|s3|folder.py|folder [SECONDS [FOLDER]].

Half of SECONDS (60) without kills, SECONDS with them, half without: how long hits in DRAM take (a load of one block of 64 KiB, by a
process that does nothing else), with kills and without. All the while blocks are stored, and some that are on the root are evicted
from DRAM and loaded again. In the end a new daemon loads all that the first one called stored. A process is started again by the
daemon's back-off, so there are fewer kills than seconds."""

import contextlib
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests/integration"))

import hosts  # noqa: E402
from second_client import DEMO, OK, Client, Daemon, Region, keys  # noqa: E402
from swift_case import Swift, key_write  # noqa: E402

KIND = sys.argv[1] if len(sys.argv) > 1 else "nfs"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 60
BYTES, HOT, ROOM = 65536, 64, 8
IDENTITY = dict(DEMO, model="kills", shards=[1], shard_bytes=BYTES)
OPTIONS = {"nvme": False, "arena.size": "256MiB", "share.negative": "50ms", "share.lookup_deadline": "2s", "share.deadline": "10s"}


def content(name):
    return hashlib.sha512(str(name).encode()).digest() * (BYTES // 64)


@contextlib.contextmanager
def root():
    """The words of share.roots, and what stands before a daemon's command."""
    folder = tempfile.mkdtemp(prefix="kills.", dir=sys.argv[3] if len(sys.argv) > 3 else None)
    os.chmod(folder, 0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, True)
        if KIND == "nfs":
            if hosts.why_not():
                sys.exit(hosts.why_not())
            network = hosts.Network(1)
            stack.callback(network.close)
            server = hosts.Server(network, folder)
            stack.callback(server.close)
            yield server.url(), network.inside(1)
        elif KIND == "s3":
            server = Swift()
            stack.callback(server.close)
            key_write(folder)
            if server.bucket("kv-hosts") != 200:
                sys.exit("Swift makes no bucket")
            yield f"s3://kv-hosts?endpoint=http://127.0.0.1:{server.port}&credentials={folder}/credentials read={folder}", ()
        else:
            program = os.path.join(TOP, "daemon/backend/folder.py") if KIND == "folder.py" else os.path.join(TOP, "build/ucmd-backend-folder")
            yield f"process:cold write={folder} -- {program} {folder}", ()


def hit(daemon, ended, out):
    """Each hit's time and duration, and how many were misses or wrong."""
    client, took, bad, chance = Client(daemon), [], 0, random.Random(1)
    region = Region(client, client.open(IDENTITY), IDENTITY, 1)
    while not ended.is_set():
        name = f"hot {chance.randrange(HOT)}"
        began = time.monotonic()
        status = region.load([name], [0])
        took.append((began, time.monotonic() - began))
        bad += status != [OK] or region.bytes(0) != content(name)
        time.sleep(0.002)
    out.send((took, bad))


class Work:
    """Stores, loads, and the oracle: what a block holds follows from its name."""

    def __init__(self, daemon):
        self.client = Client(daemon)
        self.ns = self.client.open(IDENTITY)
        self.region = Region(self.client, self.ns, IDENTITY, ROOM)
        self.number = self.loaded = self.missed = self.wrong = self.kills = self.last = 0
        self.waiting, self.stored, self.chance = [], [], random.Random(2)

    def dump(self, names):
        for i, name in enumerate(names):
            self.region.memory[i * BYTES:(i + 1) * BYTES] = content(name)
        return self.region.dump(names, range(len(names)))

    def ready(self, name):
        return all(part["shared"] == "ready" for part in self.client.call("inspect", ns=self.ns, key=keys(name))["parts"])

    def load(self, name):
        """True: it came. What came is compared."""
        self.client.call("lookup", ns=self.ns, keys=keys(name), shared=True)
        self.region.memory[:BYTES] = bytes(BYTES)
        if self.region.load([name], [0]) != [OK]:
            return False
        self.wrong += self.region.bytes(0) != content(name)
        return True

    def turn(self):
        names = [f"cold {self.number + i}" for i in range(2)]
        self.number += len(names)
        if self.dump(names) == [OK] * len(names):
            self.waiting.extend(names)
        self.waiting, waited = [], self.waiting[-256:]
        for name in waited:
            (self.stored if self.ready(name) else self.waiting).append(name)
        if self.stored:
            name = self.chance.choice(self.stored)
            self.client.call("evict", ns=self.ns, keys=keys(name), tier=1)
            came = self.load(name)
            self.loaded += came
            self.missed += not came

    def kill(self):
        pid = self.client.call("stats")["shares"][0]["pid"]
        if pid not in (0, self.last):
            os.kill(pid, signal.SIGKILL)
            self.kills, self.last = self.kills + 1, pid

    def phase(self, seconds, kills):
        began = time.monotonic()
        second = 0
        while time.monotonic() < began + seconds:
            self.turn()
            if kills and time.monotonic() > began + second:
                self.kill()
                second += 1
            time.sleep(0.05)
        return began, time.monotonic()


def quantile(took, phases, q):
    times = sorted(t for at, t in took if any(a <= at < b for a, b in phases))
    return times[min(len(times) - 1, int(len(times) * q))] * 1e6, len(times)


def main():
    context = multiprocessing.get_context("fork")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of a time limit: what was made goes
    with root() as (words, before):
        daemon = Daemon(before=before, **{"share.roots": words, **OPTIONS})
        work, ended = Work(daemon), context.Event()
        for i in range(0, HOT, ROOM):
            assert work.dump([f"hot {j}" for j in range(i, i + ROOM)]) == [OK] * ROOM
        receive, send = context.Pipe(False)
        hits = context.Process(target=hit, args=(daemon, ended, send))
        hits.start()
        work.phase(2, False)
        quiet = [work.phase(SECONDS / 2, False)]
        kills = [work.phase(SECONDS, True)]
        # Until the root is back nothing is quiet: its process starts, and what waited is written.
        until = time.monotonic() + 60
        while work.client.call("stats")["shares"][0]["health"] != "up" and time.monotonic() < until:
            work.turn()
            time.sleep(0.05)
        work.phase(2, False)
        quiet.append(work.phase(SECONDS / 2, False))
        ended.set()
        took, bad = receive.recv()
        hits.join()
        stopped = daemon.stop()
        other = Daemon(before=before, **{"share.roots": words, **OPTIONS})
        reader = Work(other)
        missing, until = work.stored, time.monotonic() + 60
        while missing and time.monotonic() < until:  # its process starts meanwhile
            missing = [name for name in missing if not reader.load(name)]
            time.sleep(0.1)
        other.stop()
    report(work, reader, took, bad, len(missing), quiet, kills)
    sys.exit(bool(stopped or missing or bad or work.wrong or reader.wrong or not work.stored or not work.loaded))


def report(work, reader, took, bad, lost, quiet, kills):
    print(f"{KIND}: {work.kills} kills in {SECONDS:.0f} s; {len(work.stored)} blocks stored, of these lost {lost}, wrong {reader.wrong}; "
          f"{work.loaded} loaded from the root meanwhile, {work.missed} missed, wrong {work.wrong}; hits in DRAM missed or wrong {bad}; "
          f"load {os.getloadavg()[0]:.1f}")
    for q in (0.5, 0.99, 0.999):
        (without, n), (with_kills, m) = quantile(took, quiet, q), quantile(took, kills, q)
        print(f"  DRAM hits, p{q * 100:g}: {without:.0f} us without kills ({n} hits), {with_kills:.0f} us with ({m}): {with_kills / without:.2f} x")


if __name__ == "__main__":
    main()
