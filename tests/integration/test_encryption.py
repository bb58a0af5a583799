#!/usr/bin/env python3
"""Encryption at rest on NVMe (docs/security.md): what a thief of the disk finds, what damage and replays do, and what becomes of keys."""

import faulthandler
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import threading
import unittest

try:
    import daemon
    from daemon import UCMCTL, UCMD, Daemon
    from second_client import DEMO, EXISTS, FAILED, MISS, NO_ROOM, OK, Case, Client, Closed, OwnDaemons, Pool, Refused, Region, keys
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

KILLED = os.path.join(os.path.dirname(UCMD), "ucmd-kill")
SUITE_TIMEOUT_S = 300
LAYERS, SHARD, BLOCKS, PAGE = 6, 9000, 8, 4096
LAYERED = dict(DEMO, shards=[LAYERS], shard_bytes=SHARD)
STRIDE = PAGE + -(-LAYERS * SHARD // PAGE) * PAGE
MISSING, IN_DRAM, ON_NVME = 0, 1, 2
FIRST_SEGMENT = 1 << 20


def config(*tenants, **more):
    text = "encryption:\n  tenants: [" + ", ".join(f'"{tenant}"' for tenant in tenants) + "]\n"
    return text + "".join(f"  {key}: {value}\n" for key, value in more.items())


NAMES = {keys(name): name for name in range(256)}


def name_at(data, at):
    return NAMES[data[at + 64:at + 80]]


class Encrypted(OwnDaemons, Case):
    """A daemon whose tenants have their keys in a file of the test's folder."""

    identity = LAYERED

    def setUp(self):
        super().setUp()
        os.chmod(self.folder, 0o755)
        self.daemon, self.marks = None, []
        self.addCleanup(lambda: self.daemon and self.daemon.stop())
        self.key_file = os.path.join(self.folder, "keys")
        self.keys = [secrets.token_hex(32)]
        self.write_keys()

    def write_keys(self, *lines):
        fresh = self.key_file + ".new"
        with open(fresh, "w", encoding="ascii") as file:
            file.write("".join(line + "\n" for line in lines or self.keys))
        os.rename(fresh, self.key_file)

    def start(self, tenants=None, more=None, **options):
        tenants = [f"* file:{self.key_file}"] if tenants is None else tenants
        self.daemon = Daemon(folder=self.folder, config=config(*tenants, **(more or {})),
                             **{"arena.size": "16MiB", "nvme.size": "64MiB", **options})
        self.client = Client(self.daemon)
        self.ns = self.client.open(self.identity)
        self.region = Region(self.client, self.ns, self.identity, BLOCKS)

    def restart(self, *args, **options):
        self.assertEqual(self.daemon.stop(), 0)
        self.start(*args, **options)

    def store(self, names=range(BLOCKS)):
        """Dumps blocks with these names; what they hold."""
        kv = {name: self.fill(place, name) for place, name in enumerate(names)}
        self.assertLessEqual(set(self.region.dump(kv, range(len(kv)))), {OK, EXISTS})
        self.settled(self.client, self.ns)
        return kv

    def fill(self, place, name):
        """A text that a thief would know, in every 64 bytes of a block."""
        mark = b"the prompt of block %d is known to me " % name
        size = self.region.size
        self.region.memory[place * size:(place + 1) * size] = (mark.ljust(64, b".") * (size // 64 + 1))[:size]
        self.marks.append(mark)
        return self.region.bytes(place)

    def load(self, names):
        self.region.memory[:] = bytes(len(self.region.memory))
        return self.region.load(names, range(len(names)))

    def loads(self, kv):
        self.assertEqual(self.load(list(kv)), [OK] * len(kv))
        for place, bytes_ in enumerate(kv.values()):
            self.assertEqual(self.region.bytes(place), bytes_, place)

    def forget_dram(self):
        self.client.call("evict", ns=self.ns, keys=keys(*range(256)), tier=1)

    def metrics(self):
        return self.client.call("stats")["metrics"]

    def disk(self):
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "rb") as file:
            return file.read()

    def seeds(self):
        """Of ucmd.namespaces: each page's fingerprint and seed."""
        with open(os.path.join(self.daemon.store, "ucmd.namespaces"), "rb") as file:
            data = file.read()
        return [(data[at + 32:at + 64], data[at + 4072:at + 4088]) for at in range(0, len(data), PAGE)]

    def reload(self):
        self.client.call("key.reload")
        self.until(lambda: not any(one["reading"] for one in self.client.call("key.list")["keys"]), "the keys' reading")

    def records(self):
        """Where the headers of records lie, by the block's name."""
        data = self.disk()
        return {name_at(data, at): at for at in range(0, len(data), PAGE) if data[at:at + 4] in (b"UCME", b"UCMS")}

    def change(self, at, change):
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(change(old))

    def flip(self, at):
        self.change(at, lambda old: bytes([old[0] ^ 16]))


class Thief(Encrypted):
    def test_finds_nothing(self):
        """The issue's test: who has the disk has neither the text nor, after a purge, a way back with the tenant's key."""
        self.start()
        kv = self.store()
        self.loads(kv)
        self.forget_dram()
        self.loads(kv)
        self.restart()
        self.loads(kv)
        self.assertEqual(self.daemon.stop(), 0)
        for at, _, names in os.walk(self.daemon.store):
            for name in names:
                with open(os.path.join(at, name), "rb") as file:
                    data = file.read()
                for mark in (b"the prompt of block", b"is known to me", bytes.fromhex(self.keys[0]), self.keys[0].encode()):
                    self.assertNotIn(mark, data, name)
        data = self.disk()
        self.assertEqual(data.count(b"UCMS"), 0)
        salts = [data[at + 144:at + 168] for at in self.records().values()]
        self.assertEqual(len(set(salts)), len(salts), "a salt each")
        done = subprocess.run([UCMCTL, "verify", "--offline", self.daemon.store], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(f"{BLOCKS} records live are encrypted", done.stdout)
        stolen = self.disk()
        self.start()
        seeds = {seed for _, seed in self.seeds()}
        self.client.call("namespace.purge", ns=self.ns)
        self.assertFalse(seeds & {seed for _, seed in self.seeds()} - {bytes(16)}, "the seed is overwritten")
        self.assertEqual(self.daemon.stop(), 0)
        # A thief with today's list and yesterday's disk, and even the keys.
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "r+b") as file:
            file.write(stolen)
        self.start()
        self.assertEqual(self.load(list(kv)), [MISS] * BLOCKS)

    def test_what_is_leased_while_it_is_purged_is_a_miss_and_no_damage(self):
        """Whoever purges his own blocks, and reads those that he had leased, costs nobody a segment."""
        self.start()
        kv = self.store()
        self.forget_dram()
        self.assertEqual(self.client.call("lookup", ns=self.ns, keys=keys(*kv), lease_ms=60000)["hits"], BLOCKS)
        self.assertEqual(self.client.call("namespace.purge", ns=self.ns)["busy"], BLOCKS)
        self.assertEqual(self.load(list(kv)), [FAILED] * BLOCKS)
        metrics = self.metrics()
        self.assertEqual((metrics["nvme_corrupt"], metrics["nvme_quarantined_bytes"]), (0, 0))
        self.assertNotIn("quarantined", self.daemon.log())

    def test_plain_tenants_are_as_before(self):
        self.start(tenants=[f"other file:{self.key_file}"])
        kv = self.store()
        self.restart(tenants=[f"other file:{self.key_file}"])
        self.loads(kv)
        self.assertIn(b"is known to me", self.disk())
        self.assertEqual({seed for _, seed in self.seeds()}, {bytes(16)})

    def test_small_parts_and_single_shards(self):
        self.identity = DEMO
        self.start()
        kv = self.store()
        self.restart()
        self.loads(kv)
        self.assertNotIn(b"is known to me", self.disk())
        self.assertEqual(self.metrics()["nvme_corrupt"], 0)


class Layers(Encrypted):
    def test_layers_are_read_alone(self):
        self.start()
        kv = self.store()
        self.restart()
        pool = Pool(self.client, self.ns, SHARD, 64)
        before = self.metrics()
        self.assertEqual(pool.fetch([(0, 4, 0), (1, 0, 1), (2, 5, 2)], keys=keys(*range(BLOCKS))), [OK] * 3)
        for slot, (block, layer) in enumerate([(0, 4), (1, 0), (2, 5)]):
            self.assertEqual(pool.bytes(slot), kv[block][layer * SHARD:(layer + 1) * SHARD])
        after = self.metrics()
        self.assertEqual(after["fetch_reads_partial"] - before["fetch_reads_partial"], 3)
        self.flip(self.records()[3] + PAGE + 2 * SHARD + 77)
        self.assertEqual(pool.fetch([(3, 1, 0), (3, 2, 1)], keys=keys(*range(BLOCKS))), [FAILED, FAILED])
        self.assertEqual(self.client.tiers(self.ns, 3), [MISSING])


class Damage(Encrypted):
    def test_a_flipped_bit_is_a_miss(self):
        """In each kind of byte of a record: fields, key id, salt, tags, the page's checksum, payload."""
        self.start()
        self.store()
        self.restart()
        places = [100, 130, 150, 170, 200, 4090, PAGE, PAGE + LAYERS * SHARD - 1]
        records = self.records()
        for name, at in enumerate(places):
            self.flip(records[name] + at)
        self.assertEqual(set(self.load(list(range(BLOCKS)))), {FAILED})
        self.assertEqual(self.client.tiers(self.ns, *range(BLOCKS)), [MISSING] * BLOCKS)
        self.assertEqual(self.metrics()["nvme_corrupt"], BLOCKS)

    def test_a_replayed_slot_is_a_miss(self):
        """An older record of the same place, and another record of this disk, each whole and sealed with the right key."""
        options = {"nvme.size": "5MiB", "nvme.segment": "1MiB", "nvme.rewrite": "0"}
        self.start(**options)
        self.store(range(8))
        old = self.disk()
        for first in range(8, 120, 8):
            self.forget_dram()
            self.store(range(first, first + 8))
        new, names = self.disk(), {}
        for at in range(FIRST_SEGMENT + PAGE, len(new) - STRIDE, PAGE):
            if new[at:at + 4] == b"UCME" == old[at:at + 4] and new[at + 64:at + 96] != old[at + 64:at + 96]:
                names[at] = name_at(new, at)
        self.assertGreater(len(names), 0, "places that were written twice")
        at, name = next(iter(names.items()))
        other = next(place for place, key in names.items() if key != name) if len(names) > 1 else None
        self.forget_dram()
        self.assertEqual(self.client.tiers(self.ns, name), [ON_NVME])
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "r+b") as file:
            file.seek(at)
            file.write(old[at:at + STRIDE])
            if other:
                file.seek(other)
                file.write(new[at:at + STRIDE])
        self.assertEqual(self.load([name]), [FAILED])
        if other:
            self.assertIn(self.load([names[other]]), ([FAILED], [MISS]))
        self.restart(**options)
        self.assertEqual(self.client.tiers(self.ns, name_at(old, at)), [MISSING], "nor does the next start find the old one")
        self.assertEqual(self.load([name]), [MISS])


class TwoDisks(Encrypted):
    def test_a_purge_that_one_disk_refuses_costs_nothing_that_is_stored_later(self):
        second = os.path.join(self.folder, "second")
        os.mkdir(second)
        paths = os.path.join(self.folder, "nvme") + "," + second
        self.start(**{"nvme.paths": paths})
        before = self.store(range(4))
        names = os.path.join(second, "ucmd.namespaces")
        os.rename(names, names + ".away")
        os.mkdir(names)
        with self.assertRaises(Refused):
            self.client.call("namespace.purge", ns=self.ns)
        os.rmdir(names)
        os.rename(names + ".away", names)
        later = self.store(range(4, 8))
        self.forget_dram()
        self.loads(later)
        self.restart(**{"nvme.paths": paths})
        self.loads(later)
        self.assertEqual(self.load(list(before)), [MISS] * 4)


class Killed(Encrypted):
    def killed_at(self, point, call):
        """The daemon, which was started to be killed there, is gone after the call; another one serves."""
        try:
            call()
        except Closed:
            pass
        self.assertEqual(self.daemon.process.wait(60), -9, point)
        self.client.close()
        os.environ.pop("UCMD_KILL_AT", None)
        self.start()

    def start_for(self, point):
        os.environ["UCMD_KILL_AT"] = point
        self.addCleanup(os.environ.pop, "UCMD_KILL_AT", None)
        daemon.UCMD = KILLED
        try:
            self.start()
        finally:
            daemon.UCMD = UCMD

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_at_every_step_of_a_purge(self):
        """The seed of before is there with all blocks, or there is none of either."""
        self.start()
        for point in ("ns-append-begin:1", "ns-append-torn:1", "ns-append-done:1", "ns-wipe-begin:1", "ns-wipe-torn:1", "ns-wipe-done:2"):
            kv = self.store()
            before = {seed for _, seed in self.seeds()} - {bytes(16)}
            self.assertEqual(self.daemon.stop(), 0)
            self.start_for(point)
            self.killed_at(point, lambda: self.client.call("namespace.purge", ns=self.ns))
            status = set(self.load(list(kv)))
            self.assertIn(status, ({OK}, {MISS}), point)
            self.assertEqual(status == {OK}, bool(before & {seed for _, seed in self.seeds()}), point)

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_at_every_step_of_a_rotation(self):
        self.start()
        kv = self.store(range(4))
        for step, point in enumerate(("keys-read:2", "keys-taken:2", "write-begin:1", "write-torn:1", "write-done:1")):
            self.assertEqual(self.daemon.stop(), 0)
            self.start_for(point)
            self.keys.append(secrets.token_hex(32))
            self.write_keys()

            def rotate():
                self.reload()
                self.store([10 + step])  # noqa: B023

            self.killed_at(point, rotate)
            self.loads(kv)
            if self.client.tiers(self.ns, 10 + step) != [MISSING]:
                self.assertIn(self.load([10 + step]), ([OK], [FAILED]), "of a write that was cut off")
        self.assertEqual(len(self.client.call("key.list")["keys"][0]["ids"]), 6)


class Keys(Encrypted):
    def ctl(self, *words, status=0):
        done = subprocess.run([UCMCTL, "--socket", self.daemon.socket, *words], capture_output=True, text=True, timeout=60,
                              check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def listed(self):
        return self.client.call("key.list")["keys"][0]

    def test_a_wrong_or_missing_key_is_a_miss_and_deletes_nothing(self):
        self.start()
        kv = self.store()
        right = list(self.keys)
        for lines in ([secrets.token_hex(32)], ["12ab"], None):
            if lines:
                self.write_keys(*lines)
            else:
                os.unlink(self.key_file)
            self.restart()
            self.assertEqual(self.client.tiers(self.ns, 0), [ON_NVME])
            self.assertEqual(set(self.load(list(kv))), {FAILED})
            self.assertEqual(self.client.tiers(self.ns, *kv), [MISSING] * BLOCKS, "engines do not ask again")
            self.assertEqual((self.metrics()["nvme_corrupt"], self.metrics()["nvme_quarantined_bytes"]), (0, 0))
            self.assertGreaterEqual(self.metrics()["seal_key_missing"], BLOCKS)
            self.assertEqual(self.daemon.log().count("key-missing"), self.daemon.log().count("key-missing tenant=*"))
        self.assertIn("No such file", self.daemon.health())
        self.assertIn("degraded", self.daemon.health())
        # Nothing is stored in the clear meanwhile.
        self.fill(0, 50)
        self.assertEqual(self.region.dump([50], [0]), [OK])
        self.assertEqual(self.region.load([50], [0]), [OK])
        self.write_keys(*right)
        self.restart()
        self.loads(kv)
        self.assertNotIn("keys of tenant", self.daemon.health())
        self.assertEqual(self.client.tiers(self.ns, 50), [MISSING])
        self.assertNotIn(b"is known to me", self.disk())

    def test_rotation_and_forgetting(self):
        self.start()
        first = self.store(range(4))
        old = self.listed()["ids"]
        self.keys.append(secrets.token_hex(32))
        self.write_keys()
        self.assertIn("rotated", self.ctl("key", "rotate", "*"))
        ids = self.listed()["ids"]
        self.assertEqual((len(ids), ids[0]), (2, old[0]))
        second = self.store(range(4, 8))
        self.forget_dram()
        self.loads({**first, **second})
        used = {name: self.disk()[at + 128:at + 136].hex() for name, at in self.records().items()}
        self.assertEqual([used[name] for name in range(8)], [ids[0]] * 4 + [ids[1]] * 4)
        self.assertIn("is still there", self.ctl("key", "forget", "*", ids[0], status=1))
        self.restart()
        self.loads({**first, **second})
        self.write_keys(self.keys[1])
        self.ctl("key", "forget", "*", ids[0])
        self.assertEqual(self.listed()["ids"], [ids[1]])
        self.forget_dram()
        self.assertEqual(self.load(list(range(8))), [FAILED] * 4 + [OK] * 4)
        self.assertIn("is the one that was current", self.ctl("key", "rotate", "*", status=1))
        self.assertIn(ids[1], self.ctl("key", "list"))

    def sealed(self):
        """Parts that each key has sealed, the metrics agreeing."""
        listed, metrics = self.listed(), self.metrics()
        self.assertEqual(metrics["seal_bytes_current"], listed["nvme_bytes"][-1])
        self.assertEqual(metrics["seal_bytes_older"], sum(listed["nvme_bytes"][:-1]))
        self.assertEqual(listed["nvme_bytes"], [parts * STRIDE for parts in listed["nvme_parts"]])
        return listed["nvme_parts"]

    def test_what_a_key_still_seals(self):
        """Through a rotation, a restart, a kill and an eviction: an operator knows when the old key may go."""
        self.start()
        self.assertEqual(self.sealed(), [0])
        self.store(range(5))
        self.assertEqual(self.sealed(), [5])
        self.keys.append(secrets.token_hex(32))
        self.write_keys()
        self.ctl("key", "rotate", "*")
        self.store(range(5, 8))
        self.assertEqual(self.sealed(), [5, 3])
        self.restart()
        self.until(lambda: not self.metrics()["nvme_recovering"], "recovery")
        self.assertEqual(self.sealed(), [5, 3], "out of the checkpoint")
        self.client.close()
        self.daemon.kill()
        os.unlink(os.path.join(self.daemon.store, "ucmd.index"))
        self.start()
        self.until(lambda: sum(self.sealed()) == 8, "recovery")
        self.assertEqual(self.sealed(), [5, 3], "out of the headers")
        self.assertRegex(self.ctl("key"), rf" 3 +{STRIDE * 3 / 1024:.0f}(\.\d)? KiB")
        self.write_keys(self.keys[1])
        self.restart()
        self.until(lambda: self.listed()["nvme_parts"] == [3], "recovery")
        self.until(lambda: self.metrics()["seal_bytes_unknown"] == 5 * STRIDE, "the rest of it")
        self.assertEqual(self.load([0]), [FAILED])
        self.assertEqual(self.metrics()["seal_bytes_unknown"], 5 * STRIDE, "it waits for its key")
        self.write_keys()
        self.restart()
        self.until(lambda: sum(self.sealed()) == 8, "recovery")
        self.client.call("evict", ns=self.ns, keys=keys(*range(5)), tier=0)
        self.until(lambda: self.sealed() == [0, 3], "the eviction")
        self.client.call("namespace.purge", ns=self.ns)
        self.assertEqual(self.sealed(), [0, 0])

    def test_what_waits_for_a_key_outlives_its_namespace_s_place(self):
        """Nobody has the namespace open, others take its place, the list of namespaces is written anew: its seed stays."""
        few = {"limits.namespaces": 4, "limits.namespaces_per_tenant": 4}
        self.start(**few)
        kv = self.store()
        right = list(self.keys)
        self.write_keys(secrets.token_hex(32))
        self.restart(**few)
        self.assertEqual(set(self.load(list(kv))), {FAILED})
        self.client.close()
        self.client = Client(self.daemon)
        for other in range(4):
            ns = self.client.open(dict(DEMO, model=f"other {other}"))
            for _ in range(40):
                self.client.call("namespace.purge", ns=ns)
        self.assertIn("ns-records-rewritten", self.daemon.log())
        self.write_keys(*right)
        self.restart()
        self.loads(kv)

    def test_rotation_under_load(self):
        self.start()
        kv, stop, wrong = {}, threading.Event(), []

        def rotate():
            while not stop.is_set() and len(self.keys) < 16:
                self.keys.append(secrets.token_hex(32))
                self.write_keys()
                if subprocess.run([UCMCTL, "--socket", self.daemon.socket, "key", "rotate", "*"], capture_output=True,
                                  check=False).returncode:
                    wrong.append(self.keys[-1])

        thread = threading.Thread(target=rotate)
        thread.start()
        try:
            for round_ in range(25):
                kv = self.store(range(round_ * 8 % 200, round_ * 8 % 200 + 8))
                self.client.call("evict", ns=self.ns, keys=keys(*kv), tier=1)
                self.loads(kv)
        finally:
            stop.set()
            thread.join()
        self.assertEqual(wrong, [])
        self.restart()
        self.loads(kv)
        self.assertEqual(self.metrics()["nvme_corrupt"], 0)

    def test_what_is_moved_is_sealed_again(self):
        """Parts that were read outlive their segment, and are what they were, also after a rotation and a restart."""
        options = {"nvme.size": "9MiB", "nvme.segment": "1MiB"}
        self.start(**options)
        kv, names = {}, iter(range(0, 256, 8))
        while self.metrics()["nvme_rewritten"] < 8:
            first = next(names)
            some = self.store(range(first, first + 8))
            self.forget_dram()
            self.loads(some)
            self.forget_dram()
            kv.update(some)
            if first == 8:
                self.keys.append(secrets.token_hex(32))
                self.write_keys()
                self.reload()
        for _ in range(2):
            there = [name for name in kv if self.client.tiers(self.ns, name) == [ON_NVME]]
            self.assertGreater(len(there), 16)
            for at in range(0, len(there), BLOCKS):
                self.loads({name: kv[name] for name in there[at:at + BLOCKS]})
            self.assertEqual(self.metrics()["nvme_corrupt"], 0)
            self.restart(**options)

    def test_a_command_and_one_that_hangs(self):
        """A key from a command; one that hangs, fails, or never stops writing costs that tenant's encrypted blocks alone."""
        self.start(tenants=[f"* command:/bin/cat {self.key_file}"])
        self.until(lambda: self.listed()["ids"], "the command's key")
        kv = self.store()
        for command, reason in (("/bin/false", "ended with status 1"), ("/usr/bin/yes", "more than 4 KiB"),
                                ("/usr/bin/head -c 4096 /dev/zero", "line 1 has 4096 bytes"),
                                ("/usr/bin/head -c 4097 /dev/zero", "more than 4 KiB"),
                                ("/nowhere/at-all", "No such file"), ("/bin/echo" + " x" * 32, "more than 32 words")):
            self.restart(tenants=[f"* command:{command}"])
            self.until(lambda: not self.listed()["reading"], "the command's end")
            self.assertIn(reason, self.listed()["error"])
        self.restart(tenants=["* command:/bin/sleep 1000", f"team file:{self.key_file}"])
        self.assertTrue(self.listed()["reading"])
        self.assertEqual(set(self.load(list(kv))), {NO_ROOM})
        self.assertIn("being read", self.daemon.health())
        self.restart(tenants=["* command:/bin/sleep 1000"], more={"deadline": "20ms"})
        self.until(lambda: not self.listed()["reading"], "the command's deadline")
        self.assertIn("did not end within 20 ms", self.listed()["error"])
        self.restart()
        self.loads(kv)

    def hung(self):
        """From now on whoever opens the file of keys waits until what this returns is closed: a mount that hangs does the same."""
        os.chmod(self.key_file, 0o600)
        held = os.open(self.key_file, os.O_RDWR)
        before = signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGIO, before)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return held

    def test_a_file_that_hangs(self):
        """At the start and at a rotation: whatever it does, the daemon serves, and says what is the matter."""
        self.start()
        kv = self.store()
        held = self.hung()
        self.restart(more={"deadline": "5s"})  # it waits 2 s for it
        self.assertTrue(self.listed()["reading"])
        self.assertEqual(set(self.load(list(kv))), {NO_ROOM})
        self.until(lambda: not self.listed()["reading"], "its deadline")
        self.assertIn("did not answer within 5000 ms", self.listed()["error"])
        self.assertIn("did not answer", self.daemon.health())
        self.assertIn("keys-not-read", self.daemon.log())
        self.assertEqual(set(self.load(list(kv))), {FAILED})
        self.client.call("key.reload")
        self.assertIn("has not been answered yet", self.listed()["error"])
        os.close(held)

        def answered():
            self.reload()
            return self.listed()["ids"]

        self.until(answered, "the mount's answer to be over")
        self.assertNotIn("keys of tenant", self.daemon.health())
        held = self.hung()
        self.client.call("key.reload")
        self.assertTrue(self.listed()["reading"])
        self.fill(0, 51)
        self.assertEqual(self.region.dump([51], [0]), [OK], "with the keys of before")
        self.settled(self.client, self.ns)
        self.assertEqual(self.daemon.stop(), 0, "an orderly end beside a thread that hangs")
        os.close(held)
        self.start()
        self.loads(kv)
        self.assertEqual(self.load([51]), [OK])

    def test_a_fifo_is_refused(self):
        os.unlink(self.key_file)
        os.mkfifo(self.key_file, 0o600)
        self.start()
        self.assertIn("regular file", self.daemon.health())

    def test_a_credential(self):
        os.environ["CREDENTIALS_DIRECTORY"] = self.folder
        self.addCleanup(os.environ.pop, "CREDENTIALS_DIRECTORY")
        self.start(tenants=["* credential:keys"])
        kv = self.store()
        self.restart(tenants=["* credential:keys"])
        self.loads(kv)

    def test_a_command_that_takes_its_time_after_a_start_loses_nothing(self):
        fifo = os.path.join(self.folder, "fifo")
        os.mkfifo(fifo)
        tenants, more = [f"* command:/bin/cat {fifo}"], {"deadline": "1min"}

        def keys_come():
            with open(fifo, "w", encoding="ascii") as file:
                file.write(self.keys[0] + "\n")
            self.until(lambda: self.client.call("key.list")["keys"][0]["ids"], "the keys")

        self.start(tenants=tenants, more=more)
        keys_come()
        kv = self.store()
        self.restart(tenants=tenants, more=more)
        self.assertEqual(self.load(list(kv)), [NO_ROOM] * BLOCKS)
        keys_come()
        self.loads(kv)

    def test_a_tenant_that_gets_keys_keeps_what_it_has(self):
        self.start(tenants=[])
        plain = self.store(range(4))
        self.restart()
        sealed = self.store(range(4, 8))
        self.forget_dram()
        self.loads({**plain, **sealed})
        self.restart()
        self.loads({**plain, **sealed})
        self.restart(more={"plain": "false"})
        self.assertEqual(self.load(list(range(8))), [MISS] * 4 + [OK] * 4)
        self.restart(tenants=[])
        self.assertEqual(self.load(list(range(8)))[4:], [FAILED] * 4)

    def test_files_that_others_may_write_are_refused(self):
        os.chmod(self.key_file, 0o666)
        self.start()
        self.assertIn("chmod go-w", self.daemon.health())

    def test_a_kill_is_survived(self):
        self.start()
        kv = self.store()
        self.client.close()
        self.daemon.kill()
        self.start()
        self.loads(kv)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
