#!/usr/bin/python3
"""Random dumps, loads, evictions, kills and restarts by engines whose tiers differ in other ways, against a model of what may be found.
UCM_SEED repeats a run, UCM_STEPS makes it longer."""

import faulthandler
import os
import random
import sys
import unittest

from encoding_case import BLOCK, SUITE_TIMEOUT_S
from second_client import EXISTS, IN_PROGRESS, MISS, NO_ROOM, OK, Daemon, keys
from test_tiers import CODED_BELOW, PLAIN_BELOW, Tiers

STEPS = int(os.environ.get("UCM_STEPS", "250"))
KEYS = 240
WAYS = [("fp8", CODED_BELOW), ("fp8", PLAIN_BELOW), ("lossless", CODED_BELOW), ("lossless", PLAIN_BELOW), ("fp8", {}),
        ("lossless", {"dram": "plain", "disk": "plain"})]
# All plain blocks take 5.6 MiB: more than DRAM has, so they come and go. Segments are many: a start begins new ones.
OPTIONS = {"nvme.segment": "1MiB", "arena.size": "4MiB", "arena.extent": "1MiB", "nvme.pressure": "slow", "nvme.pressure_wait": "5s"}


class Model:
    """What must be found, by what was answered. STORED: unless the daemon is killed. DURABLE: then, too. MAYBE: nobody knows. GONE: no form
    of it is anywhere."""

    STORED, DURABLE, MAYBE, GONE = range(4)

    def __init__(self):
        self.state = {name: Model.GONE for name in range(KEYS)}

    def dumped(self, name, status, durable):
        if status in (OK, EXISTS, 8) and self.state[name] != Model.DURABLE:
            self.state[name] = Model.DURABLE if durable and status != 8 else Model.STORED
        elif status not in (OK, EXISTS) and self.state[name] == Model.GONE:
            self.state[name] = Model.MAYBE

    def killed(self):
        """An eviction is not on stable storage either."""
        self.state = {name: state if state == Model.DURABLE else Model.MAYBE for name, state in self.state.items()}

    def must(self, name):
        return self.state[name] in (Model.STORED, Model.DURABLE)


class Random(Tiers):
    def begin(self):
        self.daemon = Daemon(folder=self.folder, **OPTIONS)
        self.engines = [self.engine(encoding, tiers=tiers, blocks=8) for encoding, tiers in WAYS]

    def data(self, name):
        """The same at each dump. Every eighth can't be held by `lossless`."""
        if name not in self.bytes:
            rng = random.Random(f"{self.seed} {name}")
            data = bytearray(rng.randbytes(BLOCK))
            if name % 8:
                data[1::2] = bytes(b & 0x81 | 0x3e for b in data[1::2])
            self.bytes[name] = bytes(data)
        return self.bytes[name]

    def right(self, name):
        """What a load may give: as it was dumped, or through an encoding that it fits."""
        if name not in self.rights:
            self.rights[name] = {self.data(name), self.engines[0].through(self.data(name))}
        return self.rights[name]

    def some(self, most=8):
        return self.rng.sample(range(KEYS), self.rng.randint(1, most))

    def dump(self):
        engine, names, durable = self.rng.choice(self.engines), self.some(), self.rng.random() < 0.2
        for at, name in enumerate(names):
            engine.pages.put(at, self.data(name))
        more = {"durability": 1} if durable else {}
        plain = self.rng.random() < 0.1
        for name, status in zip(names, engine.dump(names, range(len(names)), plain=plain, **more)):
            self.assertIn(status, (OK, EXISTS, IN_PROGRESS, NO_ROOM, 9, 8), (name, status))
            if status == 9:  # UNFIT: of an engine that stores coded blocks only
                status = NO_ROOM
            self.model.dumped(name, status, durable)
            self.history.setdefault(name, []).append((self.step, WAYS[self.engines.index(engine)], plain, durable, status))

    def lost(self):
        m = self.engines[0].metrics()
        return m["arena_evicted_lost"] + m["nvme_write_dropped"] + m["dump_blocks_dropped"] + m["nvme_reclaimed_blocks"]

    def load(self):
        engine, names = self.rng.choice(self.engines), self.some()
        engine.pages.clear()
        for at, (name, status) in enumerate(zip(names, engine.load(names, range(len(names))))):
            self.looked(engine, name, status == OK, at if status == OK else None)
            self.assertIn(status, (OK, MISS, NO_ROOM))

    def looked(self, engine, name, found, at=None):
        if at is not None:
            self.assertIn(engine.pages.bytes(at), self.right(name), name)
        if not found:
            self.assertFalse(self.findable(engine, name) and self.model.must(name) and self.lost() == 0, self.told(engine, name))

    def findable(self, engine, name):
        """Coded blocks of another encoding are not this engine's to find."""
        return any(self.where_is(ns, name) for ns in {engine.base, engine.ns})

    def where_is(self, ns, name):
        return self.where(self.engines[0], ns).get(keys(name))

    def told(self, engine, name):
        return (f"seed {self.seed}: {name} of {WAYS[self.engines.index(engine)]} is {self.model.state[name]}: "
                f"{[self.where_is(ns, name) for ns in sorted({engine.base} | {e.ns for e in self.engines})]}, step {self.step}, "
                f"dumps {self.history.get(name)}")

    def evict(self):
        """By name, in all forms or in one."""
        names, forms = self.some(4), sorted({engine.ns for engine in self.engines} | {self.engines[0].base})
        self.rng.shuffle(forms)
        if self.rng.random() < 0.5:
            for ns in forms:
                self.engines[0].client.call("evict", ns=ns, keys=keys(*names))
            for name in names:
                self.model.state[name] = Model.GONE
                self.history[name] = []
        else:
            self.engines[0].client.call("evict", ns=forms[0], keys=keys(*names))
            for name in names:
                self.model.state[name] = Model.MAYBE

    def leave_dram(self):
        self.engines[0].client.call("evict", ns=self.rng.choice(self.engines).ns, tier=1)
        self.engines[0].client.call("evict", ns=self.engines[0].base, tier=1)

    def kill(self):
        self.daemon.kill()
        self.model.killed()
        self.begin()

    def restart(self):
        self.assertEqual(self.daemon.stop(), 0, self.daemon.log()[-3000:])
        self.begin()

    def check(self):
        """Each key in each form: what must be found is, in some engine's eyes; what is gone is nowhere."""
        for name in range(KEYS):
            found = any(engine.each(name)[0] for engine in self.engines)
            if self.model.must(name) and not found:
                self.assertNotEqual(self.lost(), 0, self.told(self.engines[0], name))
                self.model.state[name] = Model.MAYBE
        gone = [name for name, state in self.model.state.items() if state == Model.GONE]
        self.until(lambda: not any(engine.hits(name) for engine in self.engines for name in gone), "what was evicted")

    def test_random(self):
        self.seed = os.environ.get("UCM_SEED") or str(random.SystemRandom().randrange(1 << 32))
        self.rng, self.model, self.bytes, self.rights = random.Random(self.seed), Model(), {}, {}
        self.history, self.step = {}, 0
        self.begin()
        acts = [self.dump] * 12 + [self.load] * 8 + [self.evict] * 2 + [self.leave_dram]
        try:
            for step in range(STEPS):
                self.step = step
                self.rng.choice(acts)()
                if step % 50 == 25:
                    self.check()
                    self.kill()
                    self.check()
                elif step % 50 == 49:
                    self.check()
                    self.restart()
                    self.check()
            m = self.engines[0].metrics()
            self.assertEqual(m["transcode_failed"], 0)
        except BaseException:
            print(f"UCM_SEED={self.seed} repeats this", file=sys.stderr)
            raise
        self.assertEqual(self.daemon.stop(), 0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
