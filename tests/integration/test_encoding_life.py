#!/usr/bin/python3
"""Encoded namespaces through restarts and kills of the daemon, damage on NVMe, from host to host, with another encoding configured, and
through the client library."""

import faulthandler
import os
import sys
import tempfile
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "client/python"))
if os.path.exists(os.path.join(TOP, "build/libucmclient.so")):
    os.environ.setdefault("UCMCLIENT_LIB", os.path.join(TOP, "build/libucmclient.so"))

from encoding_case import (BLOCK, ENCODINGS, IDENTITY, LAYERS, TENSOR, LAYER, SUITE_TIMEOUT_S, EncodingCase, Reference, SIZES,
                           random_kv)
from second_client import EXISTS, FAILED, MISS, OK, Daemon, OwnDaemons, keys
import ucmclient  # noqa: E402

IN_DRAM, ON_NVME, ON_SHARED = 1, 2, 3
SHARE = {"shared.negative": "50ms", "shared.lookup_timeout": "10s", "shared.timeout": "30s"}


class Life(OwnDaemons, EncodingCase):
    """Daemons of each test's own."""

    def settled(self, engine, tier):
        for ns in {engine.base, engine.ns}:
            self.until(lambda ns=ns: all(block[tier] for block in engine.client.call("ls", ns=ns)["blocks"]), tier)

    def stored(self, encoding):
        """Blocks 0 to 3 encoded, 4 and 5 raw; and what a load makes of each."""
        engine = self.engine(encoding)
        plain = [engine.pages.fill(i) for i in range(6)]
        self.assertEqual(engine.dump(range(4), range(4)), [OK] * 4)
        self.assertTrue(set(engine.dump([4, 5], [4, 5], raw=True)) <= {OK, EXISTS})
        return engine, [engine.through(p) for p in plain[:4]] + plain[4:]

    def assert_loaded(self, engine, right):
        engine.pages.clear()
        self.assertEqual(engine.load(range(6), range(6)), [OK] * 6)
        self.assertEqual([engine.pages.bytes(i) for i in range(6)], right)


class Restart(Life):
    def run_twice(self, how, **options):
        first = self.daemon = Daemon(directory=self.directory, **options)
        right = {}
        for name in ENCODINGS:
            engine, right[name] = self.stored(name)
            if options.get("nvme", True):
                self.settled(engine, "nvme")
        if how == "kill":
            first.kill()
        else:
            self.assertEqual(first.stop(), 0)
        again = self.daemon = Daemon(directory=self.directory, **options)
        operator = self.client()
        listed = {e["encoding"]: e for e in operator.call("namespace.list", limit=4096)["namespaces"]}
        self.assertEqual(set(listed), {"", *ENCODINGS}, "before anybody opens one")
        for name in ENCODINGS:
            self.assertEqual((listed[name]["base"], listed[name]["raw_layer_bytes"]), (listed[""]["ns"], LAYER))
            engine = self.engine(name)
            self.until(lambda engine=engine: engine.hits(*range(6)) == 6)
            engine.pages.clear()
            self.assertEqual(engine.load(range(4), range(4)), [OK] * 4)
            self.assertEqual([engine.pages.bytes(i) for i in range(4)], right[name][:4])
        self.assertEqual(again.stop(), 0)

    def test_stop(self):
        self.run_twice("stop")

    def test_kill(self):
        self.run_twice("kill")

    @unittest.skipUnless(os.path.isdir("/dev/shm"), "needs /dev/shm")
    def test_in_persistent_dram(self):
        with tempfile.TemporaryDirectory(prefix="encoding.", dir="/dev/shm") as keep:
            self.run_twice("stop", nvme=False, **{"arena.persist_dir": keep})

    def test_with_another_encoding_configured(self):
        """An engine that had fp8 comes back with int8. It finds the raw blocks, and none of fp8."""
        self.daemon = Daemon(directory=self.directory)
        engine, right = self.stored("fp8")
        self.settled(engine, "nvme")
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory)
        other = self.engine("int8")
        self.until(lambda: other.each(*range(6)) == [0, 0, 0, 0, ON_NVME, ON_NVME])
        self.assertEqual(other.load([0, 4], [0, 4]), [MISS, OK])
        self.assertEqual(other.pages.bytes(4), right[4])
        plain = other.pages.fill(0)
        self.assertEqual(other.dump([0], [0]), [OK])
        self.assertEqual(other.load([0], [1]), [OK])
        self.assertEqual(other.pages.bytes(1), other.through(plain))
        self.assert_loaded(self.engine("fp8"), right)
        self.assertEqual(self.daemon.stop(), 0)


class Damage(Life):
    def test_a_flipped_bit_is_a_miss_and_falls_through_after(self):
        self.daemon = Daemon(directory=self.directory)
        engine = self.engine("fp8")
        plain = [engine.pages.fill(i) for i in range(2)]
        self.assertEqual(engine.dump([0, 1], [0, 1]), [OK] * 2)
        self.assertEqual(engine.dump([0], [0], raw=True), [OK])
        self.settled(engine, "nvme")
        for ns in (engine.base, engine.ns):
            engine.client.call("evict", ns=ns, tier=1)
        for data in plain:
            self.spoil(engine.reference.encode(data))
        engine.pages.clear()
        self.assertEqual(engine.load([0, 1], [0, 1]), [FAILED] * 2)
        self.assertEqual(engine.pages.bytes(0), bytes(BLOCK), "nothing was decoded")
        self.assertEqual(engine.each(0, 1), [ON_NVME, 0])
        self.assertEqual(engine.load([0, 1], [0, 1]), [OK, MISS])
        self.assertEqual(engine.pages.bytes(0), plain[0], "the base's")
        self.assertEqual(self.daemon.stop(), 0)


class Share(Life):
    def test_another_host_finds_either_form(self):
        """A sequence whose head and tail are raw."""
        options = {"nvme": False, "shared.roots": self.directory, **SHARE}
        one, other, third = self.daemon, _, _ = [Daemon(**options) for _ in range(3)]
        engine = self.engine("fp8")
        plain = [engine.pages.fill(i) for i in range(9)]
        self.assertEqual(engine.dump([0, 1, 7, 8], [0, 1, 7, 8], raw=True), [OK] * 4)
        self.assertEqual(engine.dump(range(2, 7), range(2, 7)), [OK] * 5)
        self.settled(engine, "shared")
        right = [engine.through(p) if 2 <= i < 7 else p for i, p in enumerate(plain)]
        reader = self.engine("fp8", daemon=other)
        self.assertEqual(reader.hits(*range(12)), 9)
        self.assertEqual(reader.each(*range(10), shared=True), [ON_SHARED] * 9 + [0])
        self.assertEqual(reader.load(range(9), range(9)), [OK] * 9)
        self.assertEqual([reader.pages.bytes(i) for i in range(9)], right)
        fetched = self.engine("fp8", daemon=third)
        answer = fetched.client.call("prefetch", ns=fetched.ns, keys=keys(*range(12)))
        self.assertEqual(list(answer["status"]), [OK] * 9 + [MISS] * 3)
        self.assertEqual(fetched.each(*range(9)), [IN_DRAM] * 9)
        whole = self.engine("int8", daemon=third)
        self.assertEqual(whole.each(*range(9), shared=True)[2:7], [0] * 5, "no fp8 for int8")
        self.assertEqual([daemon.stop() for daemon in (one, other, third)], [0, 0, 0])


class Library(Life):
    """libucmclient, by its Python binding."""

    def worker(self, encoding):
        client = ucmclient.Client(socket=self.daemon.socket, name="encoded")
        self.addCleanup(client.close)
        identity = dict(IDENTITY, model=self.id())
        identity["layers"] = tuple(identity["layers"])
        base = client.namespace(ucmclient.Identity(**identity))
        encoded = base.encoded(encoding, k=SIZES["k"], v=SIZES["v"])
        shared = ucmclient.SharedMemory(16 * BLOCK)
        planes = [ucmclient.Plane(0, at * TENSOR, BLOCK, TENSOR, at // 2) for at in range(2 * LAYERS)]
        return base, encoded, shared, encoded.register([shared.memory()], planes, blocks=16)

    def test_the_client_goes_on_after_a_kill(self):
        self.daemon = Daemon(directory=self.directory)
        base, encoded, shared, region = self.worker("fp8")
        reference, key = Reference("fp8", **SIZES), keys("x", size=16)
        self.assertEqual(encoded.block_bytes, (BLOCK, LAYERS * sum(reference.encoded)))
        self.assertNotEqual(encoded.fingerprint, base.fingerprint)
        plain = random_kv(2 * BLOCK)
        shared.buffer[:2 * BLOCK] = plain
        self.assertTrue(region.dump(key, [0], durable=True).wait().all_ok)
        self.assertTrue(region.dump(keys("y"), [1], durable=True, raw=True).wait().all_ok)
        self.assertEqual(base.lookup_prefix(key).blocks, 0)
        self.assertEqual(base.lookup_prefix(keys("y")).blocks, 1)
        self.daemon.kill()
        again = Daemon(directory=self.directory)
        self.until(lambda: self.looked(encoded) == 2)
        self.assertTrue(region.load(keys("y", "x"), [5, 4]).wait().all_ok)
        self.assertEqual(bytes(shared.buffer[4 * BLOCK:6 * BLOCK]), reference.decode(reference.encode(plain[:BLOCK])) + plain[BLOCK:])
        region.close()
        encoded.close()
        base.close()
        self.assertEqual(again.stop(), 0)

    def looked(self, encoded):
        try:
            return encoded.lookup_prefix(keys("x", "y")).blocks
        except ucmclient.UcmError as error:
            self.assertTrue(error.away, error)
            return 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
