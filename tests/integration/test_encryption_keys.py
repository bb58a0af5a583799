#!/usr/bin/python3
"""Tenants' keys (docs/security.md): where they come from, rotation, which blocks are there without
them, and what is stored in the clear."""

import faulthandler
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import threading
import unittest

import daemon
from daemon import UCMD
from encryption_case import BLOCKS, MISSING, ON_NVME, STRIDE, Encrypted
from second_client import DEMO, FAILED, MISS, NO_ROOM, OK, TOP, Client, keys

SUITE_TIMEOUT_S = 300
LEASE_MS = 600000


class Keys(Encrypted):
    def ctl(self, *words, status=0):
        done = self.daemon.ctl(*words)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def listed(self):
        return self.client.call("encryption_key.list")["keys"][0]

    def test_a_wrong_or_missing_key_is_a_miss_and_deletes_nothing(self):
        self.start()
        kv = self.store()
        right = list(self.keys)
        for lines in ([secrets.token_hex(32)], ["12ab"], None):
            if lines:
                self.write_keys(*lines)
            else:
                os.unlink(self.key_file)
            told = self.daemon.log().count("key-missing")
            self.restart()
            self.assertEqual(self.client.tiers(self.ns, 0), [ON_NVME])
            self.assertEqual(set(self.load(list(kv))), {FAILED})
            self.assertEqual(self.client.tiers(self.ns, *kv), [MISSING] * BLOCKS, "engines do not ask again")
            self.assertEqual((self.metrics()["nvme_corrupt"], self.metrics()["nvme_quarantined_bytes"]), (0, 0))
            self.assertGreaterEqual(self.metrics()["encryption_key_missing"], BLOCKS)
            self.assertEqual(self.daemon.log().count("key-missing"), self.daemon.log().count("key-missing tenant=*"))
            self.assertLess(self.daemon.log().count("key-missing") - told, BLOCKS, "lines: one in 10 s")
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
        self.assertIn("rotated", self.ctl("encryption-key", "rotate", "*"))
        ids = self.listed()["ids"]
        self.assertEqual((len(ids), ids[0]), (2, old[0]))
        second = self.store(range(4, 8))
        self.forget_dram()
        self.loads({**first, **second})
        used = {name: self.disk()[at + 128:at + 136].hex() for name, at in self.records().items()}
        self.assertEqual([used[name] for name in range(8)], [ids[0]] * 4 + [ids[1]] * 4)
        self.assertIn("is still there", self.ctl("encryption-key", "forget", "*", ids[0], status=1))
        self.restart()
        self.loads({**first, **second})
        self.write_keys(self.keys[1])
        self.ctl("encryption-key", "forget", "*", ids[0])
        self.assertEqual(self.listed()["ids"], [ids[1]])
        self.forget_dram()
        self.assertEqual(self.load(list(range(8))), [FAILED] * 4 + [OK] * 4)
        self.assertIn("is the one that was current", self.ctl("encryption-key", "rotate", "*", status=1))
        self.assertIn(ids[1], self.ctl("encryption-key", "list"))

    def test_what_an_operator_sees(self):
        """Keys that are there, keys whose source has failed since, missing keys, and keys that come
        back."""
        self.start()
        self.store()

        def findings():
            done = self.daemon.ctl("doctor", "--quick", "--json")
            return [(one["verdict"], one["text"]) for one in json.loads(done.stdout)["findings"] if one["check"] == "keys"]

        self.assertEqual(findings(), [("ok", "tenant *: 1, the last is current")])
        right = self.keys[0]
        os.unlink(self.key_file)
        self.assertIn("No such file", self.ctl("encryption-key", "reload", "*", status=1))
        (verdict, text), = findings()
        self.assertEqual(verdict, "warn")
        self.assertIn("the keys of before are used", text)
        self.restart()
        (verdict, text), = [one for one in findings() if "has none" in one[1]]
        self.assertEqual(verdict, "fail")
        self.assertTrue([text for verdict, text in findings() if verdict == "warn" and "no source has" in text])
        self.write_keys(right)
        self.assertIn("read: 1 keys", self.ctl("encryption-key", "reload", "*"))
        self.assertEqual(findings(), [("ok", "tenant *: 1, the last is current")])

    def encrypted(self):
        """Counts parts that each key has encrypted; the metrics agree."""
        listed, metrics = self.listed(), self.metrics()
        self.assertEqual(metrics["encryption_bytes_current"], listed["nvme_bytes"][-1])
        self.assertEqual(metrics["encryption_bytes_older"], sum(listed["nvme_bytes"][:-1]))
        self.assertEqual(listed["nvme_bytes"], [parts * STRIDE for parts in listed["nvme_parts"]])
        return listed["nvme_parts"]

    def test_what_a_key_still_seals(self):
        """Through a rotation, a restart, a kill and an eviction, an operator knows when the old key
        may go."""
        self.start()
        self.assertEqual(self.encrypted(), [0])
        self.store(range(5))
        self.assertEqual(self.encrypted(), [5])
        self.keys.append(secrets.token_hex(32))
        self.write_keys()
        self.ctl("encryption-key", "rotate", "*")
        self.store(range(5, 8))
        self.assertEqual(self.encrypted(), [5, 3])
        self.restart()
        self.until(lambda: not self.metrics()["nvme_recovering"], "recovery")
        self.assertEqual(self.encrypted(), [5, 3], "out of the checkpoint")
        self.client.close()
        self.daemon.kill()
        os.unlink(os.path.join(self.daemon.store, "ucmd.index"))
        self.start()
        self.until(lambda: sum(self.encrypted()) == 8, "recovery")
        self.assertEqual(self.encrypted(), [5, 3], "out of the headers")
        self.assertRegex(self.ctl("encryption-key"), rf" 3 +{STRIDE * 3 / 1024:.0f}(\.\d)? KiB")
        self.write_keys(self.keys[1])
        self.restart()
        self.until(lambda: self.listed()["nvme_parts"] == [3], "recovery")
        self.until(lambda: self.metrics()["encryption_bytes_unknown"] == 5 * STRIDE, "the rest of it")
        self.assertEqual(self.load([0]), [FAILED])
        self.assertEqual(self.metrics()["encryption_bytes_unknown"], 5 * STRIDE, "it waits for its key")
        self.write_keys()
        self.restart()
        self.until(lambda: sum(self.encrypted()) == 8, "recovery")
        self.client.call("evict", ns=self.ns, keys=keys(*range(5)), tier=0)
        self.until(lambda: self.encrypted() == [0, 3], "the eviction")
        self.client.call("namespace.purge", ns=self.ns)
        self.assertEqual(self.encrypted(), [0, 0])

    def test_what_waits_for_a_key_outlives_its_namespace_s_place(self):
        """Nobody has the namespace open, others take its place, and the list of namespaces is
        written again. Its secret stays."""
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
                if self.daemon.ctl("encryption-key", "rotate", "*").returncode:
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

    def test_what_is_moved_is_encrypted_again(self):
        """Parts that were read outlive their segment with their bytes, also after a rotation and a
        restart."""
        options = {"nvme.size": "9MiB", "nvme.segment": "1MiB"}
        self.start(**options)
        kv, names = {}, iter(range(0, 256, 8))
        while self.metrics()["nvme_rewritten"] < 8:
            first = next(names)
            some = {name: self.fill(place, name) for place, name in enumerate(range(first, first + BLOCKS))}
            # Not before all lie on NVMe. There are so few segments that the newest, from which
            # least was read, may be emptied first.
            self.assertEqual(self.region.dump(some, range(BLOCKS), durability=1), [OK] * BLOCKS)
            self.forget_dram()
            for place, (status, right) in enumerate(zip(self.load(list(some)), some.values())):
                self.assertIn(status, (OK, MISS))
                self.assertEqual(self.region.bytes(place), right if status == OK else bytes(self.region.size))
            self.forget_dram()
            kv.update(some)
            if first == 8:
                self.keys.append(secrets.token_hex(32))
                self.write_keys()
                self.reload()
        for _ in range(2):
            # The daemon may be about to drop the rest of a segment: a lease keeps what a lookup has found.
            there = [name for name in kv if self.client.call("lookup", ns=self.ns, keys=keys(name), lease_ms=LEASE_MS)["hits"]
                     and self.client.tiers(self.ns, name) == [ON_NVME]]
            self.assertGreater(len(there), 16)
            for at in range(0, len(there), BLOCKS):
                self.loads({name: kv[name] for name in there[at:at + BLOCKS]})
            self.assertEqual(self.metrics()["nvme_corrupt"], 0)
            self.restart(**options)

    def test_a_command_and_one_that_hangs(self):
        """A key from a command. A command that hangs, fails, or never stops writing costs only that
        tenant's encrypted blocks."""
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
        self.restart(tenants=["* command:/bin/sleep 1000"], more={"timeout": "20ms"})
        self.until(lambda: not self.listed()["reading"], "the command's deadline")
        self.assertIn("did not end within 20 ms", self.listed()["error"])
        self.restart()
        self.loads(kv)

    def hung(self):
        """From now on, opening the file of keys waits until the returned object is closed, as on a
        mount that hangs."""
        held = os.open(self.key_file, os.O_RDWR)
        before = signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGIO, before)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return held

    def test_a_file_that_hangs(self):
        """At the start and at a rotation: whatever the command does, the daemon serves, and says
        what is wrong."""
        self.start()
        kv = self.store()
        held = self.hung()
        self.restart(more={"timeout": "5s"})  # it waits 2 s for it
        self.assertTrue(self.listed()["reading"])
        self.assertEqual(set(self.load(list(kv))), {NO_ROOM})
        self.until(lambda: not self.listed()["reading"], "its deadline")
        self.assertIn("did not answer within 5000 ms", self.listed()["error"])
        self.assertIn("did not answer", self.daemon.health())
        self.assertIn("keys-not-read", self.daemon.log())
        self.assertEqual(set(self.load(list(kv))), {FAILED})
        self.client.call("encryption_key.reload")
        self.assertIn("has not been answered yet", self.listed()["error"])
        os.close(held)

        def answered():
            self.reload()
            return self.listed()["ids"]

        self.until(answered, "the mount's answer to be over")
        self.assertNotIn("keys of tenant", self.daemon.health())
        held = self.hung()
        self.client.call("encryption_key.reload")
        self.assertTrue(self.listed()["reading"])
        self.fill(0, 51)
        self.assertEqual(self.region.dump([51], [0]), [OK], "with the keys of before")
        self.settled(self.client, self.ns)
        self.assertEqual(self.daemon.stop(), 0, "an orderly end alongside a thread that hangs")
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
        os.environ["CREDENTIALS_DIRECTORY"] = self.directory
        self.addCleanup(os.environ.pop, "CREDENTIALS_DIRECTORY")
        self.start(tenants=["* credential:keys"])
        kv = self.store()
        self.restart(tenants=["* credential:keys"])
        self.loads(kv)

    def test_a_command_that_takes_its_time_after_a_start_loses_nothing(self):
        fifo = os.path.join(self.directory, "fifo")
        os.mkfifo(fifo)
        tenants, more = [f"* command:/bin/cat {fifo}"], {"timeout": "1min"}

        def keys_come():
            with open(fifo, "w", encoding="ascii") as file:
                file.write(self.keys[0] + "\n")
            self.until(lambda: self.client.call("encryption_key.list")["keys"][0]["ids"], "the keys")

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
        migrating = {"read_plaintext": "true"}
        self.restart(more=migrating)
        encrypted = self.store(range(4, 8))
        self.forget_dram()
        self.loads({**plain, **encrypted})
        self.restart(more=migrating)
        self.loads({**plain, **encrypted})
        self.restart()
        self.assertEqual(self.load(list(range(8))), [MISS] * 4 + [OK] * 4)
        self.assertIn("plaintext-left-out parts=4", self.daemon.log())
        self.restart(tenants=[])
        self.assertEqual(self.load(list(range(8)))[4:], [FAILED] * 4)

    def test_files_that_others_could_have_are_refused(self):
        self.start()
        for mode, owner, reason in ((0o620, 0, "chmod go-w"), (0o644, 0, "chmod o-r"), (0o600, 65534, "root or the daemon's user")):
            os.chmod(self.key_file, mode)
            os.chown(self.key_file, owner or os.geteuid(), -1)
            self.reload()
            self.assertIn(reason, self.daemon.health())
        for lines, reason in ((["# " + 62 * "x"] * 64 + self.keys, "longer than 4 KiB"), ([secrets.token_hex(32) for _ in range(17)], r"\b16\b")):
            self.write_keys(*lines)
            self.reload()
            self.assertRegex(self.daemon.health(), reason)
        self.write_keys()
        self.reload()
        self.assertNotIn("keys of tenant", self.daemon.health())

    @unittest.skipUnless(os.geteuid() == 0, "takes other uids")
    def test_health_says_nothing_of_another_tenant_s_keys(self):
        lost = os.path.join(self.directory, "keys-of-project-x")
        self.start(tenants=[f"uid:1001 file:{self.key_file}", f"uid:1002 file:{lost}"])

        def told(**who):
            client = Client(self.daemon, **who)
            self.addCleanup(client.close)
            answer = client.call("health")
            self.assertEqual(answer["status"], "degraded")
            return "\n".join(answer["reasons"])

        other = told(uid=1001)
        self.assertIn("keys of another tenant can't be read", other)
        for name in ("1002", lost):
            self.assertIn(name, told())
            self.assertIn(name, told(uid=1002))
            self.assertNotIn(name, other)

    @unittest.skipIf("san-" in UCMD, "sanitizers dump no core")
    def test_a_core_dump_has_neither_keys_nor_the_arena(self):
        """And what the daemon has of keys is locked in memory."""
        with open("/proc/sys/kernel/core_pattern", encoding="ascii") as file:
            pattern = file.read().strip()
        if not re.fullmatch(r"core(\.%p)?", pattern):
            self.skipTest(f"core dumps go to {pattern}")
        self.key_file = os.path.abspath(self.key_file)
        program, daemon.UCMD, here = daemon.UCMD, os.path.abspath(daemon.UCMD), os.getcwd()
        os.chdir(self.directory)
        try:
            self.start(before=("prlimit", "--core=unlimited"), nvme=False)
        finally:
            os.chdir(here)
            daemon.UCMD = program
        names = range(BLOCKS)
        for place, name in enumerate(names):
            self.fill(place, name)
        self.assertEqual(set(self.region.dump(names, names)), {OK})
        with open(f"/proc/{self.daemon.process.pid}/smaps", encoding="ascii") as file:
            flags = [line.split()[1:] for line in file if line.startswith("VmFlags")]
        self.assertTrue(any({"lo", "dd"} <= set(each) for each in flags), "locked, and left out of dumps")
        self.client.close()
        self.region.memory.close()
        self.daemon.process.send_signal(signal.SIGABRT)
        self.daemon.process.wait(60)
        (core,) = [name for name in os.listdir(self.directory) if name.startswith("core")]
        with open(os.path.join(self.directory, core), "rb") as file:
            data = file.read()
        self.assertIn(b"uid:", data, "it is a dump of the heap")
        for what in (bytes.fromhex(self.keys[0]), self.keys[0].encode(), *self.marks):
            self.assertNotIn(what, data)

    def test_keys_that_can_not_be_locked_are_told_of(self):
        self.start(before=("prlimit", "--memlock=65536", "setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"))
        self.assertIn("keys-not-locked", self.daemon.log())
        self.loads(self.store())

    def test_the_unit_dumps_no_core_and_lets_memory_be_locked(self):
        with open(os.path.join(TOP, "systemd/ucmd.service"), encoding="utf-8") as file:
            unit = file.read().splitlines()
        self.assertIn("LimitCORE=0", unit)
        self.assertIn("LimitMEMLOCK=infinity", unit)

    def test_kept_dram_is_refused_unless_it_is_allowed(self):
        """What arena.persist_dir keeps is in the clear."""
        kept = os.path.join("/dev/shm", os.path.basename(self.directory))
        os.mkdir(kept)
        self.addCleanup(shutil.rmtree, kept)
        with self.assertRaisesRegex(RuntimeError, "encryption.allow_persistent_arena: true"):
            self.start(**{"arena.persist_dir": kept})
        self.start(more={"allow_persistent_arena": "true"}, **{"arena.persist_dir": kept})
        kv = self.store()
        self.restart(more={"allow_persistent_arena": "true"}, **{"arena.persist_dir": kept})
        self.loads(kv)

    def test_a_thief_plants_nothing_in_the_clear(self):
        """A daemon without keys has written a whole cache file of the same blocks. It takes the
        place of the encrypted one."""
        self.start(tenants=[])
        kv = self.store()
        self.assertEqual(self.daemon.stop(), 0)
        plain = self.disk()
        for name in os.listdir(self.daemon.store):
            os.unlink(os.path.join(self.daemon.store, name))
        self.start()
        self.assertEqual(self.store(), kv)
        self.assertEqual(self.daemon.stop(), 0)
        for allowed, status in (("false", MISS), ("true", OK)):
            with open(os.path.join(self.daemon.store, "ucmd.cache"), "wb") as file:
                file.write(plain)
            os.unlink(os.path.join(self.daemon.store, "ucmd.index"))
            self.start(more={"read_plaintext": allowed})
            self.assertEqual(self.load(list(kv)), [status] * BLOCKS)
            self.assertEqual(f"plaintext-left-out parts={BLOCKS}" in self.daemon.log().rsplit("serving", 1)[1], allowed == "false")
            self.assertEqual(self.daemon.stop(), 0)
        self.start()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
