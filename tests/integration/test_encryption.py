#!/usr/bin/python3
"""Encryption at rest on NVMe (docs/security.md): what a thief of the disk finds, and the effects of
damage, replays and kills."""

import faulthandler
import os
import secrets
import shutil
import subprocess
import unittest

import daemon
from daemon import UCMCTL, UCMD
from encryption_case import BLOCKS, FIRST_SEGMENT, KILLED, LAYERS, MISSING, ON_NVME, PAGE, LAYER, STRIDE, Encrypted, name_at
from second_client import DEMO, FAILED, MISS, OK, OTHER_UID, Client, Closed, Pool, Refused, Region, keys

SUITE_TIMEOUT_S = 300


class Thief(Encrypted):
    def test_finds_nothing(self):
        """The disk alone does not reveal the text, and after a purge not even with the tenant's key."""
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
        secrets = {secret for _, secret in self.secrets()}
        self.client.call("namespace.purge", ns=self.ns)
        self.assertFalse(secrets & {secret for _, secret in self.secrets()} - {bytes(16)}, "the secret is overwritten")
        self.assertEqual(self.daemon.stop(), 0)
        # A thief with today's list and yesterday's disk, and even the keys.
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "r+b") as file:
            file.write(stolen)
        self.start()
        self.assertEqual(self.load(list(kv)), [MISS] * BLOCKS)


    def test_finds_nothing_after_blocks_of_others(self):
        """A part goes to disk with its slot's padding, and the slot was this tenant's before."""
        self.start([f"uid:0 file:{self.key_file}"], identity=dict(DEMO, layers=[LAYERS], layer_bytes=PAGE))
        self.store()
        self.client.call("evict", ns=self.ns)
        other, identity = Client(self.daemon, uid=OTHER_UID), dict(DEMO, layers=[1], layer_bytes=(LAYERS - 1) * PAGE + 1)
        ns = other.open(identity)
        self.assertEqual(Region(other, ns, identity, BLOCKS).dump(range(BLOCKS), range(BLOCKS)), [OK] * BLOCKS)
        self.settled(other, ns)
        self.assertNotIn(b"known to me", self.disk())

    def test_what_is_leased_while_it_is_purged_is_a_miss_and_no_damage(self):
        """A tenant purges its own blocks, and reads those that it had leased. That costs nobody a
        segment."""
        self.start()
        kv = self.store()
        self.forget_dram()
        self.assertEqual(self.client.call("lookup", ns=self.ns, keys=keys(*kv), lease_ms=60000)["hits"], BLOCKS)
        self.assertEqual(self.client.call("namespace.purge", ns=self.ns)["busy"], BLOCKS)
        self.assertEqual(self.load(list(kv)), [MISS] * BLOCKS)
        metrics = self.metrics()
        self.assertEqual((metrics["nvme_corrupt"], metrics["nvme_quarantined_bytes"]), (0, 0))
        self.assertNotIn("quarantined", self.daemon.log())

    def test_plain_tenants_are_as_before(self):
        self.start(tenants=[f"other file:{self.key_file}"])
        kv = self.store()
        self.restart(tenants=[f"other file:{self.key_file}"])
        self.loads(kv)
        self.assertIn(b"is known to me", self.disk())
        self.assertEqual({secret for _, secret in self.secrets()}, {bytes(16)})

    def test_small_parts_and_single_layers(self):
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
        pool = Pool(self.client, self.ns, LAYER, 64)
        before = self.metrics()
        self.assertEqual(pool.gather([(0, 4, 0), (1, 0, 1), (2, 5, 2)], keys=keys(*range(BLOCKS))), [OK] * 3)
        for slot, (block, layer) in enumerate([(0, 4), (1, 0), (2, 5)]):
            self.assertEqual(pool.bytes(slot), kv[block][layer * LAYER:(layer + 1) * LAYER])
        after = self.metrics()
        self.assertEqual(after["gather_reads_partial"] - before["gather_reads_partial"], 3)
        self.flip(self.records()[3] + PAGE + 2 * LAYER + 77)
        self.assertEqual(pool.gather([(3, 1, 0), (3, 2, 1)], keys=keys(*range(BLOCKS))), [FAILED, FAILED])
        self.assertEqual(self.client.tiers(self.ns, 3), [MISSING])


class Damage(Encrypted):
    def test_a_flipped_bit_is_a_miss(self):
        """In each kind of byte of a record: fields, key id, salt, tags, the page's checksum, payload."""
        self.start()
        self.store()
        self.restart()
        places = [100, 130, 150, 170, 200, 4090, PAGE, PAGE + LAYERS * LAYER - 1]
        records = self.records()
        for name, at in enumerate(places):
            self.flip(records[name] + at)
        self.assertEqual(set(self.load(list(range(BLOCKS)))), {FAILED})
        self.assertEqual(self.client.tiers(self.ns, *range(BLOCKS)), [MISSING] * BLOCKS)
        self.assertEqual(self.metrics()["nvme_corrupt"], BLOCKS)

    def test_a_replayed_slot_is_a_miss(self):
        """An older record of the same place, and another record of this disk, each whole and encrypted with the right key."""
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


class Restored(Encrypted):
    def test_a_backup_that_is_restored_repeats_no_nonce(self):
        """Disk, secrets and counters are put back, and the daemon writes the same blocks again,
        with the same numbers, but under other keys."""
        self.start()
        self.store(range(2))
        self.assertEqual(self.daemon.stop(), 0)
        backup, written = os.path.join(self.directory, "backup"), []
        shutil.copytree(self.daemon.store, backup)
        for _ in range(3):
            shutil.rmtree(self.daemon.store)
            shutil.copytree(backup, self.daemon.store)
            self.start()
            kv = self.store(range(2, 8))
            self.loads(kv)
            self.assertEqual(self.daemon.stop(), 0)
            data = self.disk()
            written.append({name: data[at:at + STRIDE] for name, at in self.records().items() if name >= 2})
        self.start()
        numbers = [{name: record[120:128] for name, record in run.items()} for run in written]
        self.assertEqual(numbers[0], numbers[1], "the same sequences: nothing but the salt tells them apart")
        for name in range(2, 8):
            self.assertEqual(len({run[name][144:168] for run in written}), 3, "a salt each")
            self.assertEqual(len({run[name][PAGE:PAGE + 64] for run in written}), 3, "other bytes for the same text")
            pads = [bytes(a ^ b for a, b in zip(run[name][PAGE:PAGE + LAYER], kv[name])) for run in written]
            self.assertEqual(len(set(pads)), 3, "and of no common key stream")


class TwoDisks(Encrypted):
    def test_a_purge_that_one_disk_refuses_costs_nothing_that_is_stored_later(self):
        second = os.path.join(self.directory, "second")
        os.mkdir(second)
        paths = os.path.join(self.directory, "nvme") + "," + second
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
        """The daemon was started to be killed at that point. It is gone after the call, and another
        one serves."""
        try:
            call()
        except Closed:
            pass
        self.assertEqual(self.daemon.process.wait(60), -9, point)
        self.client.close()
        os.environ.pop("UCMD_KILL_AT", None)
        self.start()

    def start_for(self, point, **options):
        os.environ["UCMD_KILL_AT"] = point
        self.addCleanup(os.environ.pop, "UCMD_KILL_AT", None)
        daemon.UCMD = KILLED
        try:
            self.start(**options)
        finally:
            daemon.UCMD = UCMD

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_at_every_step_of_a_purge(self):
        """Either the old secret is there with all blocks, or neither is there."""
        self.start()
        for point in ("ns-append-begin:1", "ns-append-torn:1", "ns-append-done:1", "ns-wipe-begin:1", "ns-wipe-torn:1", "ns-wipe-done:2"):
            kv = self.store()
            before = {secret for _, secret in self.secrets()} - {bytes(16)}
            self.assertEqual(self.daemon.stop(), 0)
            self.start_for(point)
            self.killed_at(point, lambda: self.client.call("namespace.purge", ns=self.ns))
            status = set(self.load(list(kv)))
            self.assertIn(status, ({OK}, {MISS}), point)
            self.assertEqual(status == {OK}, bool(before & {secret for _, secret in self.secrets()}), point)

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_at_every_step_of_a_rotation(self):
        """Kills after each step: the source is read, the keys are taken, blocks are written with
        the new key, the checkpoint says so."""
        self.start()
        kv = self.store(range(4))
        points = ("keys-read:2", "keys-taken:2", "write-begin:1", "write-torn:1", "write-done:1", "write-reported:1",
                  "checkpoint-begin:1", "checkpoint-written:1", "checkpoint-named:1")
        for step, point in enumerate(points):
            self.assertEqual(self.daemon.stop(), 0)
            self.start_for(point)
            self.keys.append(secrets.token_hex(32))
            self.write_keys()

            def rotate():
                self.reload()
                self.store([10 + step])  # noqa: B023
                self.daemon.process.terminate()

            self.killed_at(point, rotate)
            self.loads(kv)
            if point.startswith("checkpoint"):
                self.assertEqual(self.client.call("encryption_key.list")["keys"][0]["nvme_parts"][-1], 1)
                self.assertEqual(self.load([10 + step]), [OK])
            elif self.client.tiers(self.ns, 10 + step) != [MISSING]:
                self.assertIn(self.load([10 + step]), ([OK], [FAILED]), "of a write that was cut off")
        self.assertEqual(len(self.client.call("encryption_key.list")["keys"][0]["ids"]), 1 + len(points))
        self.assertNotIn(b"is known to me", self.disk())

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_at_every_step_of_dropping_a_key(self):
        """A block under the old key is a miss, and comes back with the key's line. A block under
        the new key is there."""
        self.start()
        old = self.store(range(4))
        both = self.keys + [secrets.token_hex(32)]
        self.write_keys(*both)
        self.reload()
        fresh = self.store(range(4, 8))
        for point in ("keys-read:2", "keys-taken:2"):
            self.write_keys(*both)
            self.assertEqual(self.daemon.stop(), 0)
            self.start_for(point)
            self.write_keys(both[1])
            self.killed_at(point, self.reload)
            self.assertEqual(self.load(list(old)), [FAILED] * 4)
            self.loads(fresh)
            self.write_keys(*both)
            self.restart()
            self.loads({**old, **fresh})

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_while_records_are_encrypted_again(self):
        """The log moves blocks under the old key. At every step one of the two copies is whole."""
        options = {"nvme.size": "9MiB", "nvme.segment": "1MiB"}
        for point in ("move-read:1", "move-written:1", "move-synced:1"):
            self.keys = [secrets.token_hex(32)]
            self.write_keys()
            self.start_for(point, **options)
            kv, wrong = {}, False
            try:
                for first in range(0, 256, 8):
                    some = self.store(range(first, first + 8))
                    self.forget_dram()
                    self.loads(some)
                    self.forget_dram()
                    kv.update(some)
                    if first == 8:
                        self.keys.append(secrets.token_hex(32))
                        self.write_keys()
                        self.reload()
            except Closed:
                wrong = True
            self.assertTrue(wrong, point)
            self.assertEqual(self.daemon.process.wait(60), -9, point)
            os.environ.pop("UCMD_KILL_AT", None)
            self.start(**options)
            there = [name for name in kv if self.client.tiers(self.ns, name) == [ON_NVME]]
            self.assertGreater(len(there), 16)
            for at in range(0, len(there), BLOCKS):
                self.loads({name: kv[name] for name in there[at:at + BLOCKS]})
            self.assertEqual(self.metrics()["nvme_corrupt"], 0)
            self.assertEqual(self.daemon.stop(), 0)
            shutil.rmtree(self.daemon.store)
        self.daemon = None


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
