#!/usr/bin/python3
"""Tiers that differ: DRAM holds a block in one form and the tiers below in another. Each test through daemons with files of their own."""

import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "client/python"))
os.environ.setdefault("UCMCLIENT_LIB", os.path.join(TOP, "build/libucmclient.so"))

from encoding_case import BLOCK, ENCODINGS, IDENTITY, LAYERS, SECTION, SIZES, SUITE_TIMEOUT_S, EncodingCase, random_kv
from second_client import EXISTS, FAILED, INVALID, MISS, OK, Daemon, keys
import ucmclient  # noqa: E402

IN_DRAM, ON_NVME, ON_SHARE = 1, 2, 3
CODED_BELOW = {"dram": "plain", "disk": "coded"}
PLAIN_BELOW = {"dram": "coded", "disk": "plain"}
POLICIES = {"coded below": CODED_BELOW, "plain below": PLAIN_BELOW}
SHARE = {"share.negative": "50ms", "share.lookup_deadline": "10s", "share.deadline": "30s"}


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

    def on_nvme(self, engine, names):
        """How many of these have a form there."""
        there = {key for ns in {engine.base, engine.ns} for key, tiers in self.where(engine, ns).items() if "nvme" in tiers}
        return sum(keys(name) in there for name in names)

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

    def test_plain_readers_of_what_is_coded_in_dram(self):
        """What they read back stays, so that a prefetch is one."""
        self.start()
        engine, old = self.engine("fp8", tiers=PLAIN_BELOW), self.engine(None)
        plain = self.stored(engine, ["a", "b"])
        self.settled(engine, plain, {"nvme"}, {"dram"})
        old.client.call("prefetch", ns=old.base, keys=keys("a"))
        self.settled(engine, ["a"], {"dram", "nvme"}, {"dram"})
        for _ in range(3):
            self.assert_loaded(old, plain)
        self.assertEqual(old.metrics()["load_blocks_nvme"], 1)
        self.evict_dram(engine)
        self.settled(engine, plain, {"nvme"}, ())
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


@contextlib.contextmanager
def full(folder):
    """The file system of a folder has no room within, and some again behind it."""
    ballast = os.path.join(folder, "ballast")
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    os.remove(ballast)


class Full(Tiers):
    """Below there is a file system of its own, 40 MiB large."""

    def setUp(self):
        super().setUp()
        self.below = os.path.join(self.folder, "below")
        os.mkdir(self.below)
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", self.below], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest(f"nothing can be mounted here: {made.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "--lazy", self.below], check=True)

    def root(self, engine):
        return engine.client.call("stats")["shares"][0]["health"]

    def test_a_full_root(self):
        """Nothing is lost, in either form; what is dumped once there is room goes below as it should."""
        for name, (policy, tiers) in {"coded below": (CODED_BELOW, ({"dram"}, {"shared"})),
                                      "plain below": (PLAIN_BELOW, ({"shared"}, {"dram"}))}.items():
            with self.subTest(name):
                self.start(nvme=False, **{"share.roots": self.below, **SHARE})
                engine = self.engine("fp8", tiers=policy)
                plain = self.stored(engine, [f"{name} {i}" for i in range(4)])
                self.settled(engine, plain, *tiers)
                with full(self.below):
                    plain.update(self.stored(engine, [f"{name}, no room {i}" for i in range(4)]))
                    self.until(lambda: self.root(engine) == "full", "a full root")
                    self.assert_either_form(engine, plain)
                numbers = iter(range(1000))

                def taken():
                    self.stored(engine, [f"{name}, room {next(numbers)}"])
                    return self.root(engine) == "up"
                self.until(taken, "writes")
                self.assert_either_form(engine, plain)
                self.settled(engine, self.stored(engine, [f"{name}, late"]), *tiers)
                self.assertEqual(self.daemon.stop(), 0)

    def test_a_full_disk(self):
        """NVMe's file has its room from the start; the records of the two namespaces have none."""
        for name, (policy, tiers) in {"coded below": (CODED_BELOW, ({"dram"}, {"nvme"})), "plain below": (PLAIN_BELOW, ({"nvme"}, {"dram"}))}.items():
            with self.subTest(name):
                self.start(**{"nvme.paths": self.below, "nvme.size": "32MiB", "nvme.segment": "1MiB"})
                engine = self.engine("fp8", tiers=policy, identity={"model": name})
                with full(self.below):
                    plain = self.stored(engine, [f"{name} {i}" for i in range(4)])
                    self.until(lambda: "ns-record-not-written" in self.daemon.log(), "a record that had no room")
                    self.settled(engine, plain, *tiers)
                    self.assert_either_form(engine, plain)
                    self.evict_dram(engine)
                    self.assert_either_form(engine, plain)
                self.assertEqual(self.daemon.stop(), 0)

    def assert_either_form(self, engine, plain):
        engine.pages.clear()
        self.assertEqual(engine.load(list(plain), range(len(plain))), [OK] * len(plain))
        for at, (name, data) in enumerate(plain.items()):
            self.assertIn(engine.pages.bytes(at), (data, engine.through(data)), name)


class Trouble(Tiers):
    """Restarts, kills, damage, evictions while blocks wait to be encoded."""

    def again(self, how):
        if how == "kill":
            self.daemon.kill()
        else:
            self.assertEqual(self.daemon.stop(), 0)
        self.start()

    def test_a_restart_finds_what_was_below(self):
        for how in ("stop", "kill"):
            self.start()
            for name, policy in POLICIES.items():
                with self.subTest(how=how, policy=name):
                    names = [f"{how} {name} {i}" for i in range(4)]
                    engine = self.engine("fp8", tiers=policy)
                    plain = self.stored(engine, names)
                    if how == "kill":
                        self.settled(engine, names, *(({"dram"}, {"nvme"}) if policy is CODED_BELOW else ({"nvme"}, {"dram"})))
                    self.again(how)
                    engine = self.engine("fp8", tiers=policy)
                    self.until(lambda engine=engine, names=names: engine.each(*names) == [ON_NVME] * 4)
                    self.assert_loaded(engine, self.through(engine, plain) if policy is CODED_BELOW else plain)
                    self.assertEqual(engine.metrics()["transcode_parts"], 0)
            self.assertEqual(self.daemon.stop(), 0)

    def test_durable(self):
        """What was answered survives a kill, in the form that goes below."""
        self.start()
        for name, policy in POLICIES.items():
            engine = self.engine("fp8", tiers=policy)
            plain = {i: engine.pages.fill(i) for i in range(8)}
            names = {i: f"{name} {i}" for i in plain}
            self.assertEqual(engine.dump(names.values(), names, durability=1), [OK] * 8)
            self.again("kill")
            engine = self.engine("fp8", tiers=policy)
            self.assertEqual(engine.each(*names.values()), [ON_NVME] * 8)
            right = {names[i]: engine.through(data) if policy is CODED_BELOW else data for i, data in plain.items()}
            self.assert_loaded(engine, right)
            engine.pages.put(0, noise(BLOCK))
        engine = self.engine("lossless", tiers=CODED_BELOW)
        data = noise(BLOCK)
        engine.pages.put(0, data)
        self.assertEqual(engine.dump(["unfit"], [0], durability=1), [OK])
        self.again("kill")
        self.assert_loaded(self.engine("lossless", tiers=CODED_BELOW), {"unfit": data})
        self.assertEqual(self.daemon.stop(), 0)

    @unittest.skipUnless(os.path.isdir("/dev/shm"), "needs /dev/shm")
    def test_persistent_dram(self):
        """The plain form comes back in DRAM, and is not written beside the coded one."""
        with tempfile.TemporaryDirectory(prefix="tiers.", dir="/dev/shm") as keep:
            self.start(**{"arena.keep": keep})
            engine = self.engine("fp8", tiers=CODED_BELOW)
            plain = self.stored(engine, range(8))
            self.settled(engine, range(8), {"dram"}, {"nvme"})
            self.assertEqual(self.daemon.stop(), 0)
            self.start(**{"arena.keep": keep})
            engine = self.engine("fp8", tiers=CODED_BELOW)
            self.until(lambda: engine.each(*range(8)) == [IN_DRAM] * 8)
            self.assert_loaded(engine, plain)
            self.settled(engine, range(8), {"dram"}, {"nvme"})
            self.assertEqual(self.daemon.stop(), 0)

    def test_a_damaged_coded_block(self):
        """While DRAM has the plain form nobody sees it; later it fails its checksum, and is a miss."""
        self.start()
        engine = self.engine("fp8", tiers=CODED_BELOW)
        plain = self.stored(engine, ["a", "b"])
        self.settled(engine, plain, {"dram"}, {"nvme"})
        for data in plain.values():
            self.spoil(engine.reference.encode(data))
        self.assert_loaded(engine, plain)
        engine.client.call("evict", ns=engine.base, keys=keys("a"), tier=1)
        self.assertEqual(engine.load(["a"], [0]), [FAILED])
        self.assertEqual(engine.load(["a"], [0]), [MISS])
        self.assertEqual(engine.client.call("verify", ns=engine.ns)["corrupt"], 1)
        self.settled(engine, ["b"], {"dram"}, {"nvme"})
        self.evict_dram(engine)
        self.assert_loaded(engine, {"b": engine.through(plain["b"])})
        self.assertEqual(self.daemon.stop(), 0)

    def test_purges_while_blocks_wait(self):
        """In either order nothing is left, and what comes afterwards has its forms."""
        self.start(**{"device.cpu_threads": "1"})
        engine = self.engine("q4", tiers=CODED_BELOW, blocks=64)
        operator = self.client()
        for order in (("ns", "base"), ("base", "ns")):
            for i in range(64):
                engine.pages.put(i, random_kv(BLOCK))
            self.assertEqual(engine.dump(range(64), range(64)), [OK] * 64)
            for which in order:
                operator.call("namespace.purge", ns=getattr(engine, which))
            self.until(lambda: not self.where(engine, engine.base) and not self.where(engine, engine.ns),
                       lambda: (self.where(engine, engine.base), self.where(engine, engine.ns)))
            plain = self.stored(engine, [f"after {order}"])
            self.settled(engine, plain, {"dram"}, {"nvme"})
            self.assertEqual(engine.hits(*range(64)), 0)
            operator.call("evict", ns=engine.base, keys=keys(*plain))
            operator.call("evict", ns=engine.ns, keys=keys(*plain))
        self.assertEqual(self.daemon.stop(), 0)

    def test_eviction_by_name(self):
        """Of the base's blocks ends what waits; of the coded ones leaves the plain, which are then stored as they are."""
        self.start(**{"device.cpu_threads": "1"})
        engine = self.engine("fp8", tiers=CODED_BELOW, blocks=64)
        for i in range(64):
            engine.pages.put(i, random_kv(BLOCK))
        self.assertEqual(engine.dump(range(64), range(64)), [OK] * 64)
        engine.client.call("evict", ns=engine.base, keys=keys(*range(64)))
        engine.client.call("evict", ns=engine.ns, keys=keys(*range(64)))
        self.until(lambda: not self.where(engine, engine.base) and not self.where(engine, engine.ns))
        plain = self.stored(engine, ["a", "b"])
        self.settled(engine, plain, {"dram"}, {"nvme"})
        engine.client.call("evict", ns=engine.ns, keys=keys("a"))
        self.settled(engine, ["a"], {"dram", "nvme"}, ())
        engine.client.call("evict", ns=engine.base, keys=keys("b"))
        self.settled(engine, ["b"], (), {"nvme"})
        self.assert_loaded(engine, {"a": plain["a"], "b": engine.through(plain["b"])})
        self.assertEqual(self.daemon.stop(), 0)

    def test_the_engine_leaves(self):
        """What it has stored is encoded all the same, and by a daemon that stops."""
        self.start(**{"device.cpu_threads": "1"})
        engine = self.engine("fp8", tiers=CODED_BELOW, blocks=64)
        plain = {i: engine.pages.fill(i) for i in range(64)}
        self.assertEqual(engine.dump(range(64), range(64)), [OK] * 64)
        engine.client.close()
        self.assertEqual(self.daemon.stop(), 0)
        self.start()
        engine = self.engine("fp8", tiers=CODED_BELOW, blocks=64)
        self.until(lambda: engine.each(*range(64)) == [ON_NVME] * 64)
        self.assert_loaded(engine, self.through(engine, plain))
        self.assertEqual(self.where(engine, engine.base), {})
        self.assertEqual(self.daemon.stop(), 0)

    def test_dram_for_few_blocks(self):
        """More blocks than DRAM has room for in either form: none is lost."""
        for name, policy in POLICIES.items():
            with self.subTest(policy=name):
                self.start(**{"arena.size": "6MiB", "arena.extent": "1MiB", "nvme.pressure": "slow", "nvme.pressure_wait": "10s"})
                engine, plain = self.engine("fp8", tiers=policy, blocks=16), {}
                for first in range(0, 512, 16):
                    plain.update(self.stored(engine, [f"{name} {i}" for i in range(first, first + 16)]))
                self.until(lambda engine=engine, plain=plain: self.on_nvme(engine, plain) == 512)
                m = engine.metrics()
                self.assertEqual([m[what] for what in ("nvme_write_dropped", "arena_evicted_lost", "transcode_failed")], [0] * 3)
                self.assertEqual(engine.hits(*plain), 512)
                for first in range(0, 512, 16):
                    names = list(plain)[first:first + 16]
                    self.assertEqual(engine.load(names, range(16)), [OK] * 16)
                    for at, key in enumerate(names):
                        self.assertIn(engine.pages.bytes(at), (plain[key], engine.through(plain[key])))
                self.assertEqual(self.daemon.stop(), 0)

    def test_nvme_smaller_than_dram(self):
        """What leaves NVMe for newer blocks is not written again, which would take the place of others without end."""
        for name, policy in POLICIES.items():
            with self.subTest(policy=name):
                self.start(**{"arena.size": "16MiB", "arena.extent": "1MiB", "nvme.size": "4MiB", "nvme.segment": "1MiB"})
                engine, plain = self.engine("fp8", tiers=policy, blocks=16), {}
                for first in range(0, 320, 16):
                    plain.update(self.stored(engine, [f"{name} {i}" for i in range(first, first + 16)]))
                still = []
                self.until(lambda engine=engine, still=still: self.still(engine, still))
                m = engine.metrics()
                self.assertLessEqual(m["nvme_written_bytes"], 3 * 320 * BLOCK)
                self.assertEqual((m["transcode_parts"], engine.hits(*plain)), (320, 320))
                self.assertEqual(self.daemon.stop(), 0)

    def still(self, engine, seen):
        """All blocks were encoded, and nothing was written for a while."""
        m = engine.metrics()
        seen.append(m["nvme_written_bytes"])
        return m["transcode_parts"] >= 320 and len(seen) > 10 and len(set(seen[-10:])) == 1


class Library(Tiers):
    """libucmclient, by its Python binding."""

    def test_keywords(self):
        self.start()
        client = ucmclient.Client(socket=self.daemon.socket, name="tiers")
        self.addCleanup(client.close)
        base = client.namespace(ucmclient.Identity(**{**IDENTITY, "model": self.id(), "shards": tuple(IDENTITY["shards"])}))
        coded = base.encoded("fp8", k=SIZES["k"], v=SIZES["v"], dram="plain", disk="coded")
        self.assertEqual(coded.tiers, ("plain", "coded"))
        self.assertEqual(base.encoded("fp8", k=SIZES["k"], v=SIZES["v"]).tiers, ("coded", "coded"))
        coded = base.encoded("fp8", k=SIZES["k"], v=SIZES["v"], dram="plain")
        with self.assertRaises(ValueError):
            base.encoded("fp8", k=SIZES["k"], v=SIZES["v"], dram="zstd")
        shared = ucmclient.SharedMemory(BLOCK)
        planes = [ucmclient.Plane(0, at * SECTION, BLOCK, SECTION, at // 2) for at in range(2 * LAYERS)]
        region = coded.register([shared.memory()], planes, blocks=1)
        watcher = self.engine("fp8")
        for name in ("before", "after a kill"):
            shared.buffer[:BLOCK] = random_kv(BLOCK)
            self.until(lambda name=name: self.dumped(region, name), name)
            self.settled(watcher, [name], {"dram"}, {"nvme"})
            if name == "before":
                self.daemon.kill()
                self.start()
                watcher = self.engine("fp8")
        region.close()
        coded.close()
        base.close()
        self.assertEqual(self.daemon.stop(), 0)

    def dumped(self, region, name):
        try:
            return region.dump(keys(name), [0]).wait().all_ok
        except ucmclient.UcmError as error:
            self.assertTrue(error.away, error)
            return False


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
