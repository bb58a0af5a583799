#!/usr/bin/python3
"""Hosts and what they share die at random under load, and every byte that anybody loads is right.

UCM_HOSTS_KIND is what they share: nfs, directory, s3 or mooncake (hosts_roots.py). UCM_HOSTS_SECONDS=600 makes it ten minutes (`make check-hosts`), UCM_SEED
repeats a run's choices. The oracle: a
block's bytes follow from its key, so that any host can tell whether what another stored came back whole.
"""

import contextlib
import hashlib
import os
import random
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "integration"))

import hosts  # noqa: E402
import hosts_roots  # noqa: E402
from second_client import DEMO, EXISTS, OK, Closed, Refused, Region, keys  # noqa: E402

KIND = os.environ.get("UCM_HOSTS_KIND", "nfs")
SECONDS = float(os.environ.get("UCM_HOSTS_SECONDS", "3"))
SEED = int(os.environ.get("UCM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
WINDOW, CHAINS_A_SECOND, BLOCKS = 40, 4, 24
IDENTITY = dict(DEMO, model="hosts", layers=[2], layer_bytes=32768)
BYTES = IDENTITY["layers"][0] * IDENTITY["layer_bytes"]
OPTIONS = {"nvme.size": "64MiB", "nvme.segment": "4MiB", "arena.size": "24MiB", "shared.timeout": "2s",
           "shared.negative": "500ms", "shutdown.drain": "2s"}
if KIND == "s3":  # Swift, in Python, takes tens of milliseconds for a request: what waits for it must be little
    WINDOW, CHAINS_A_SECOND, BLOCKS = 40, 0.5, 8
    OPTIONS.update({"arena.size": "4MiB", "nvme.size": "8MiB", "nvme.segment": "2MiB", "shared.queue_depth": "8", "shared.timeout": "20s", "shared.lookup_timeout": "8s"})
if KIND == "mooncake":
    OPTIONS.update({"shared.timeout": "8s"})
STORED_S = {"s3": 15, "mooncake": 15}.get(KIND, 3)
PAUSE_S = {"s3": (3, 10)}.get(KIND, (0.3, 1.5))  # between accidents: a root is left alone for a while after each


def content(name):
    return hashlib.sha512(name.encode()).digest() * (BYTES // 64)


def names(chain):
    return [f"{SEED}/{chain}/{i}" for i in range(BLOCKS)]


def newest(began):
    """Sequences come and go, so that hosts always have blocks of each other to find."""
    return int((time.monotonic() - began) * CHAINS_A_SECOND)


class Engine(threading.Thread):
    """What an engine does on one host, over and over: it looks a sequence up, loads the blocks that
    are there, and dumps the others."""

    def __init__(self, host, seed):
        super().__init__(daemon=True)
        self.host, self.random, self.ended = host, random.Random(seed), threading.Event()
        self.began, self.steps = time.monotonic(), 0
        self.loaded = self.dumped = self.missed = self.reconnects = self.shared = self.shared_now = 0
        self.wrong, self.broken = [], None

    def run(self):
        try:
            while not self.ended.is_set():
                try:
                    self.session()
                except (Closed, Refused, OSError, AssertionError) as e:
                    if isinstance(e, AssertionError):
                        raise
                    self.reconnects += 1
                    self.ended.wait(0.1)
        except Exception as e:  # noqa: BLE001  the main thread tells it
            self.broken = e

    def session(self):
        client = self.host.client()
        try:
            ns = client.open(IDENTITY)
            region = Region(client, ns, IDENTITY, BLOCKS)
            while not self.ended.is_set():
                self.step(client, ns, region)
        finally:
            client.close()

    def step(self, client, ns, region):
        self.steps += 1
        if self.steps % 32 == 0:
            now = metrics(client)["load_blocks_shared"]
            self.shared += now - self.shared_now if now >= self.shared_now else now
            self.shared_now = now
        chain = names(newest(self.began) - min(int(self.random.expovariate(0.1)), WINDOW))
        found = client.call("lookup", ns=ns, keys=keys(*chain), lease_ms=10000)
        hits = found["hits"]
        if hits:
            region.memory[:hits * BYTES] = bytes(hits * BYTES)
            status = region.load(chain[:hits], range(hits))
            for i, got in enumerate(status):
                if got != OK:
                    self.missed += 1
                elif region.bytes(i) != content(chain[i]):
                    self.wrong.append(chain[i])
                else:
                    self.loaded += 1
        if found.get("lease"):
            client.call("release", lease=found["lease"])
        self.dump(region, chain, hits)

    def dump(self, region, chain, first):
        for i in range(first, BLOCKS):
            region.memory[i * BYTES:(i + 1) * BYTES] = content(chain[i])
        if first < BLOCKS:
            status = region.dump(chain[first:], range(first, BLOCKS))
            self.dumped += sum(code in (OK, EXISTS) for code in status)


def metrics(client):
    return client.call("stats")["metrics"]


def damage(export, chance):
    """Other software, or the server's disk, changes or cuts a file."""
    files = [os.path.join(directory, name) for directory, _, found in os.walk(export) for name in found
             if not name.startswith(".")]
    for path in chance.sample(files, min(3, len(files))):
        try:
            with open(path, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if chance.random() < 0.3:
                    file.truncate(chance.randrange(size))
                else:
                    file.seek(chance.randrange(size))
                    file.write(bytes([chance.randrange(256)]))
        except (FileNotFoundError, ValueError):
            pass


@unittest.skipIf(hosts_roots.why_not(KIND), f"{KIND}: {hosts_roots.why_not(KIND)}")
class Hosts(unittest.TestCase):
    def setUp(self):
        self.fleet = hosts_roots.KINDS[KIND](3, **OPTIONS)
        self.addCleanup(self.fleet.close)
        self.chance = random.Random(SEED)
        self.told = [f"UCM_SEED={SEED}"]

    def harm(self):
        """One accident, which is over when this returns."""
        fleet, chance = self.fleet, self.chance
        host = chance.choice(fleet.hosts)
        files = ["files damaged", "files removed"] if fleet.files else []
        what = chance.choice(["host killed", "host restarted", "disk lost", *files, *fleet.accidents])
        self.told.append(f"{what} {host.number}")
        if what in ("host killed", "disk lost"):
            host.kill()
            if what == "disk lost":
                host.forget()
            host.start()
        elif what == "host restarted":
            self.assertEqual(host.stop(), 0, "a host that was told to stop")
            host.start()
        elif what == "files damaged":
            damage(fleet.files, chance)
        elif what == "files removed":
            for directory, _, found in os.walk(fleet.files):
                for name in chance.sample(found, len(found) // 8):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(directory, name))
        else:
            fleet.accidents[what](host, chance)

    def test_every_byte_is_right_whoever_dies(self):
        engines = [Engine(host, SEED + i) for i, host in enumerate(self.fleet.hosts)]
        for engine in engines:
            engine.start()
        end = time.monotonic() + SECONDS
        last = end + hosts.TIMEOUT_S
        while (now := time.monotonic()) < end or (now < last and not any(engine.shared for engine in engines)):
            time.sleep(self.chance.uniform(*PAUSE_S))
            self.harm()
            self.assertFalse([name for engine in engines for name in engine.wrong], self.told)
        for engine in engines:
            engine.ended.set()
        for engine in engines:
            engine.join(hosts.TIMEOUT_S)
            self.assertFalse(engine.is_alive(), ("an engine hangs", self.told))
            self.assertIsNone(engine.broken, (engine.broken, self.told))
            self.assertFalse(engine.wrong, self.told)
            print(f"host {engine.host.number}: {engine.loaded} loaded ({engine.shared} of them from the shared tier), "
                  f"{engine.missed} promised and missed, "
                  f"{engine.dumped} dumped, {engine.reconnects} times without its daemon", file=sys.stderr)
        print(f"{KIND}, {SECONDS:.0f} s, seed {SEED}, {len(self.told) - 1} accidents", file=sys.stderr)
        self.assertGreater(sum(engine.shared for engine in engines), 0, "nothing was loaded from the shared tier")
        self.newcomer_finds_what_others_stored()

    def newcomer_finds_what_others_stored(self):
        """When all is well again, a host with nothing of its own loads from the shared tier,
        without help."""
        old, chains = self.fleet.hosts[0], [names(-1000 - i) for i in range(20)]
        # Blocks dumped before the server is found again are not written to it later.
        chain = next((chain for chain in chains if self.dumped(old, chain)), None)
        self.assertIsNotNone(chain, f"no sequence came to the server: {self.told}")
        old.kill()
        old.forget()
        old.start()
        deadline = time.monotonic() + 40
        while not self.loaded(old, chain):
            self.assertLess(time.monotonic(), deadline,
                            f"a sequence was not loaded from the shared tier: {self.told}")
            time.sleep(0.3)

    def dumped(self, host, chain):
        engine, deadline = Engine(host, SEED), time.monotonic() + STORED_S
        with contextlib.suppress(Closed, Refused, OSError), contextlib.closing(host.client()) as client:
            ns = client.open(IDENTITY)
            engine.dump(Region(client, ns, IDENTITY, BLOCKS), chain, 0)
            while not self.fleet.stored(client, ns, chain):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
            return True
        return False

    def loaded(self, host, chain):
        with contextlib.suppress(Closed, Refused, OSError), contextlib.closing(host.client()) as client:
            ns = client.open(IDENTITY)
            region = Region(client, ns, IDENTITY, BLOCKS)
            found = client.call("lookup", ns=ns, keys=keys(*chain))["hits"]
            status = region.load(chain[:found], range(found)) if found else []
            self.assertFalse([i for i, got in enumerate(status) if got == OK
                              and region.bytes(i) != content(chain[i])], "wrong bytes")
            return status == [OK] * BLOCKS
        return False


if __name__ == "__main__":
    unittest.main()
