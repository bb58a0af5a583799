#!/usr/bin/env python3
"""Tiers that differ: DRAM holds a block in one form and the tiers below in another. Each test through daemons with files of their own."""

import faulthandler
import os
import shutil
import sys
import tempfile
import unittest

try:
    from encoding_case import BLOCK, ENCODINGS, LAYERS, SECTION, SUITE_TIMEOUT_S, EncodingCase, random_kv
    from second_client import EXISTS, FAILED, INVALID, MISS, OK, Daemon, keys
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

IN_DRAM, ON_NVME, ON_SHARE = 1, 2, 3
CODED_BELOW = {"dram": "plain", "disk": "coded"}
PLAIN_BELOW = {"dram": "coded", "disk": "plain"}
POLICIES = {"coded below": CODED_BELOW, "plain below": PLAIN_BELOW}
SHARE = {"share.negative": "50ms", "share.lookup_deadline": "2s"}


def noise(size):
    """Bytes that `lossless` can't hold."""
    return os.urandom(size)


class Tiers(EncodingCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="tiers.")
        self.addCleanup(shutil.rmtree, self.folder, True)

    @classmethod
    def setUpClass(cls):
        pass

    @classmethod
    def tearDownClass(cls):
        pass

    def start(self, **options):
        self.daemon = Daemon(folder=self.folder, **options)
        return self.daemon

    def where(self, engine, ns):
        """Key: the tiers that hold its block of ns."""
        blocks = engine.client.call("ls", ns=ns, limit=4096)["blocks"]
        return {bytes(b["key"]): {tier for tier in ("dram", "nvme", "shared") if b[tier]} for b in blocks}

    def form_of(self, engine, name):
        """The tiers that hold its plain block, and its coded one."""
        key = keys(name)
        return [self.where(engine, ns).get(key, set()) for ns in (engine.base, engine.ns)]

    def settled(self, engine, names, plain, coded):
        """Until each block lies in these tiers."""
        self.until(lambda: all(self.form_of(engine, name) == [set(plain), set(coded)] for name in names),
                   lambda: {name: self.form_of(engine, name) for name in names})

    def until(self, true, what="it"):
        try:
            super().until(true)
        except AssertionError as error:
            raise AssertionError(f"{error}: {what() if callable(what) else what}\n{self.daemon.log()[-2000:]}") from None

    def stored(self, engine, names, data=random_kv):
        plain = {}
        for at, name in enumerate(names):
            plain[name] = data(BLOCK)
            engine.pages.put(at, plain[name])
        self.assertEqual(engine.dump(list(names), range(len(names))), [OK] * len(names))
        return plain

    def assert_loaded(self, engine, right):
        engine.pages.clear()
        self.assertEqual(engine.load(list(right), range(len(right))), [OK] * len(right))
        for at, (name, data) in enumerate(right.items()):
            self.assertEqual(engine.pages.bytes(at), data, name)

    def through(self, engine, plain):
        return {name: engine.through(data) for name, data in plain.items()}

    def evict_dram(self, engine):
        """What has a copy below leaves DRAM."""
        for ns in (engine.base, engine.ns):
            engine.client.call("evict", ns=ns, tier=1)


class Policies(Tiers):
    def test_coded_below(self):
        self.start()
        for encoding in ENCODINGS:
            engine = self.engine(encoding, tiers=CODED_BELOW)
            self.assertEqual((engine.opened["dram"], engine.opened["disk"]), ("plain", "coded"))
            names = [f"{encoding} {i}" for i in range(6)]
            plain = self.stored(engine, names)
            self.settled(engine, names, {"dram"}, {"nvme"})
            self.assertEqual(engine.each(*names), [IN_DRAM] * 6)
            self.assert_loaded(engine, plain)
            self.evict_dram(engine)
            self.settled(engine, names, (), {"nvme"})
            self.assertEqual(engine.each(*names), [ON_NVME] * 6)
            self.assert_loaded(engine, self.through(engine, plain))
            self.settled(engine, names, (), {"dram", "nvme"})
        m = engine.metrics()
        parts = 6 * len(ENCODINGS)
        self.assertEqual((m["transcode_parts"], m["transcode_plain_bytes"]), (parts, parts * BLOCK))
        self.assertGreater(m["transcode_bytes"], 0)
        self.assertEqual([m["transcode_" + why] for why in ("unfit", "no_room", "failed")], [0] * 3)
        self.assertEqual(m["arena_evicted_lost"], 0)
        self.assertEqual(self.daemon.stop(), 0)

    def test_plain_below(self):
        self.start()
        for encoding in ENCODINGS:
            engine = self.engine(encoding, tiers=PLAIN_BELOW)
            self.assertEqual((engine.opened["dram"], engine.opened["disk"]), ("coded", "plain"))
            names = [f"{encoding} {i}" for i in range(6)]
            plain = self.stored(engine, names)
            self.settled(engine, names, {"nvme"}, {"dram"})
            self.assertEqual(engine.each(*names), [IN_DRAM] * 6)
            self.assert_loaded(engine, self.through(engine, plain))
            self.evict_dram(engine)
            self.settled(engine, names, {"nvme"}, ())
            self.assert_loaded(engine, plain)
        self.assertEqual(engine.metrics()["arena_evicted_lost"], 0)
        self.assertEqual(self.daemon.stop(), 0)

    def test_plain_everywhere_and_coded_everywhere(self):
        self.start()
        both = {form: self.engine("fp8", tiers={"dram": form, "disk": form}) for form in ("plain", "coded")}
        plain = self.stored(both["plain"], ["a", "b"])
        self.settled(both["plain"], ["a", "b"], {"dram", "nvme"}, ())
        self.assert_loaded(both["coded"], plain)
        coded = self.stored(both["coded"], ["c"])
        self.settled(both["plain"], ["c"], (), {"dram", "nvme"})
        self.assert_loaded(both["plain"], self.through(both["coded"], coded))
        self.assertEqual(both["plain"].metrics()["transcode_parts"], 0)
        self.assertEqual(self.daemon.stop(), 0)

    def test_without_a_tier_below(self):
        self.start(nvme=False)
        plain = self.engine("fp8", tiers=CODED_BELOW)
        self.assertEqual((plain.opened["dram"], plain.opened["disk"]), ("plain", "plain"))
        self.stored(plain, ["a"])
        self.assertEqual(self.form_of(plain, "a"), [{"dram"}, set()])
        coded = self.engine("fp8", tiers=PLAIN_BELOW)
        self.assertEqual((coded.opened["dram"], coded.opened["disk"]), ("coded", "coded"))
        self.stored(coded, ["b"])
        self.assertEqual(self.form_of(coded, "b"), [set(), {"dram"}])
        self.assertEqual(self.daemon.stop(), 0)

    def test_a_dump_of_layers(self):
        """Parts that come in pieces are encoded when they are whole."""
        self.start()
        for encoding in ENCODINGS:
            engine = self.engine(encoding, tiers=CODED_BELOW)
            data = engine.pages.fill(0)
            for layer in range(LAYERS):
                self.assertEqual(engine.dump([encoding], [0], shard=layer, shards=1), [OK])
            self.settled(engine, [encoding], {"dram"}, {"nvme"})
            self.assert_loaded(engine, {encoding: data})
        self.assertEqual(self.daemon.stop(), 0)

    def test_a_plain_dump_stays_plain(self):
        self.start()
        for name, policy in POLICIES.items():
            engine = self.engine("fp8", tiers=policy)
            data = engine.pages.fill(0)
            self.assertEqual(engine.dump([name], [0], plain=True), [OK])
            self.settled(engine, [name], {"dram", "nvme"}, ())
            self.assert_loaded(engine, {name: data})
        self.assertEqual(self.daemon.stop(), 0)

    def test_refused(self):
        self.start()
        for field in ("dram", "disk"):
            self.refused(INVALID, self.engine, "fp8", tiers={field: "zstd"})
        self.assertEqual(self.daemon.stop(), 0)

    def test_unfit(self):
        """What the encoding can't hold is stored as it is, in the tier of either form."""
        self.start()
        for name, policy in POLICIES.items():
            engine = self.engine("lossless", tiers=policy)
            plain = self.stored(engine, [name, name + " too"], noise)
            self.settled(engine, plain, {"dram", "nvme"}, ())
            self.assert_loaded(engine, plain)
        m = engine.metrics()
        self.assertEqual((m["transcode_unfit"], m["encode_unfit"]), (4, 0))
        self.assertEqual(self.daemon.stop(), 0)

    def test_two_engines_of_different_policies(self):
        """On one base, with one encoding and with another, and a client that knows no encodings."""
        self.start()
        engines = {"coded below": self.engine("fp8", tiers=CODED_BELOW), "plain below": self.engine("fp8", tiers=PLAIN_BELOW),
                   "other": self.engine("int8", tiers=CODED_BELOW), "coded": self.engine("fp8"), "old": self.engine(None)}
        self.assertEqual(len({engine.base for engine in engines.values()}), 1)
        plain = {}
        for name, engine in engines.items():
            plain.update(self.stored(engine, [name]))
        for name, tiers in {"coded below": ({"dram"}, {"nvme"}), "plain below": ({"nvme"}, {"dram"}),
                            "other": ({"dram"}, {"nvme"}), "coded": ((), {"dram", "nvme"})}.items():
            self.settled(engines[name], [name], *tiers)
        old, coded = engines["old"], engines["coded"]
        self.assertEqual(old.each(*engines), [IN_DRAM, ON_NVME, IN_DRAM, 0, IN_DRAM])
        self.assert_loaded(old, {name: plain[name] for name in ("coded below", "plain below", "other", "old")})
        through = self.through(coded, plain)
        self.assert_loaded(coded, {"coded below": plain["coded below"], "plain below": through["plain below"],
                                   "other": plain["other"], "coded": through["coded"], "old": plain["old"]})
        self.assertEqual(self.daemon.stop(), 0)

    def test_two_dump_the_same_block(self):
        self.start()
        one, two = self.engine("fp8", tiers=CODED_BELOW), self.engine("fp8", tiers=PLAIN_BELOW)
        plain = self.stored(one, range(8))
        for i in range(8):
            two.pages.put(i, plain[i])
        self.assertEqual(two.dump(range(8), range(8)), [EXISTS] * 8)
        self.settled(one, range(8), {"dram"}, {"nvme"})
        coded = self.engine("fp8")
        for i in range(8):
            coded.pages.put(i, plain[i])
        self.assertEqual(coded.dump(range(8), range(8)), [EXISTS] * 8)
        self.assertEqual(self.daemon.stop(), 0)

    def test_several_parts(self):
        """A block is encoded when all its parts are there, and only if all of them want that."""
        self.start()
        identity = {"parts": 2}
        ranks = [self.engine("lossless", tiers=CODED_BELOW, part=part, identity=identity) for part in range(2)]
        for unfit, name in ((None, "both"), (1, "one")):
            for part, rank in enumerate(ranks):
                rank.pages.put(part, (noise if part == unfit else random_kv)(BLOCK))
                self.assertEqual(rank.dump([name], [part]), [OK])
        self.settled(ranks[0], ["both"], {"dram"}, {"nvme"})
        self.settled(ranks[0], ["one"], {"dram", "nvme"}, ())
        other = self.engine("lossless", part=1, identity=identity)
        for part, rank in enumerate((ranks[0], other)):
            rank.pages.put(part, random_kv(BLOCK))
        self.assertEqual(ranks[0].dump(["mixed"], [0]), [OK])
        self.assertEqual(other.dump(["mixed"], [1], plain=True), [OK])
        self.settled(ranks[0], ["mixed"], {"dram", "nvme"}, ())
        self.assertEqual(self.daemon.stop(), 0)

    def test_shared_tier(self):
        """Below is the shared tier, too: another host finds the form that the first one's policy put there."""
        options = {"nvme": False, "share.roots": self.folder, **SHARE}
        one, two = self.start(**options), Daemon(**options)
        for name, (policy, tiers) in {"coded below": (CODED_BELOW, ({"dram"}, {"shared"})),
                                      "plain below": (PLAIN_BELOW, ({"shared"}, {"dram"}))}.items():
            engine = self.engine("fp8", daemon=one, tiers=policy)
            plain = self.stored(engine, [f"{name} {i}" for i in range(4)])
            self.settled(engine, plain, *tiers)
            reader = self.engine("fp8", daemon=two)
            self.assertEqual(reader.each(*plain, shared=True), [ON_SHARE] * 4)
            self.assert_loaded(reader, self.through(engine, plain) if policy is CODED_BELOW else plain)
        self.assertEqual([two.stop(), one.stop()], [0, 0])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
