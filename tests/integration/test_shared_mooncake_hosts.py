#!/usr/bin/python3
"""Roots that are Mooncake stores, through real daemons. Hosts find each other's blocks. Ends,
evictions and harm cost hits, and never bring a wrong byte. With UCM_MOONCAKE_PYTHON, a Python that
has Mooncake's client, the store is real; otherwise the client is played."""

import faulthandler
import http.client
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.parse

from second_client import DEMO, TIMEOUT_S, TOP, Case, OwnDaemons
from shared_case import SMALL, Host

HERE = os.path.join(TOP, "tests/integration")
REAL = os.environ.get("UCM_MOONCAKE_PYTHON")
PYTHON = REAL or os.path.join(HERE, "mooncake_played/python")
BLOCKS = 4
store = {}


def setUpModule():
    store["directory"] = tempfile.mkdtemp(prefix="ucm-mooncake-")
    os.chmod(store["directory"], 0o777)
    store["process"] = subprocess.Popen([PYTHON, "-B", os.path.join(HERE, "mooncake_server.py"), store["directory"], *([REAL] if REAL else [])],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "UCM_MOONCAKE_TTL_S": "3"})
    port, store["target"], store["options"] = store["process"].stdout.readline().decode().split()
    store["port"] = int(port)


def tearDownModule():
    store["process"].stdin.close()
    store["process"].wait(TIMEOUT_S)
    store["process"].stdout.close()
    shutil.rmtree(store["directory"], ignore_errors=True)


def ask(method, path, data=None):
    """Returns the status and the bytes."""
    server = http.client.HTTPConnection("127.0.0.1", store["port"], timeout=TIMEOUT_S)
    try:
        server.request(method, f"/{path}", body=data)
        with server.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        server.close()


class Stores(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.prefix = "kv-%x" % time.time_ns()
        self.identity = dict(DEMO, model=self.id(), parts=1, layers=DEMO["layers"][:1])

    def host(self, options=None, **settings):
        reads = os.path.dirname(os.path.dirname(PYTHON)) if REAL else os.path.dirname(PYTHON)
        words = f"read={reads} buffer=4MiB" + ("" if REAL else f" write={store['directory']}")
        root = f"{store['target']}/{self.prefix}?{options or store['options']} {words}"
        host = Host(root, self.identity, 16, **{**SMALL, **settings})
        self.addCleanup(lambda: self.assertEqual(host.daemon.stop(), 0))
        return host

    def dumped(self, host, first=0):
        return host.dumped(range(first, first + BLOCKS))

    def written(self, host, first=0):
        return host.written(range(first, first + BLOCKS))

    def written_anew(self, host):
        """Blocks that a store takes again after it took none. The daemon gives up the earlier
        writes, and others follow."""
        first, right = itertools.count(BLOCKS, BLOCKS), {}

        def given_up():
            return host.metrics()["shared_write_dropped"]

        def ready():
            return all(host.shared(name) == "ready" for name in right)

        def taken():
            before = given_up()
            right.clear()
            right.update(self.dumped(host, next(first)))
            self.until(lambda: ready() or given_up() > before, "the end of their writing")
            return ready()
        self.until(taken, "a store that takes blocks")
        return right

    def test_another_host_reads_what_one_wrote(self):
        right = self.written(self.host())
        other = self.host()
        self.assertEqual(other.loaded(right), BLOCKS)
        root = other.root()
        self.assertEqual((root["backend"], root["program"], root["health"], root["backend_ends"], root["failures"]), ("mooncake", "mooncake", "up", 0, 0))
        self.assertIn(f"{store['target']}/{self.prefix}", other.daemon.ctl("shared").stdout)
        self.assertGreaterEqual(int(ask("GET", f"?count={self.prefix}")[1]), BLOCKS)

    def test_a_purge_says_that_objects_are_left(self):
        """The steps that docs/shared-tier.md then tells an operator remove only the namespace's
        objects."""
        host = self.host()
        right = self.written(host)
        self.identity = dict(self.identity, model="another")
        others = self.written(self.host())
        purged = host.daemon.ctl("purge", str(host.ns), "--yes")
        self.assertEqual(purged.returncode, 1)
        self.assertRegex(purged.stderr, "gone from this host.*lists no files.*remove them at the store")
        self.until(lambda: host.loaded(right) == BLOCKS, "their return")
        listed = json.loads(host.daemon.ctl("namespace", "list", "--json").stdout)["namespaces"]
        fingerprint = next(ns["fingerprint"] for ns in listed if ns["ns"] == host.ns)
        pattern = f"^{self.prefix}/blocks/../[0-9a-f]+-{fingerprint[:32]}-..$"
        self.assertEqual(ask("DELETE", f"?matching={urllib.parse.quote(pattern)}"), (200, str(BLOCKS).encode()))
        self.assertEqual(self.host().loaded(others), BLOCKS)
        self.identity = dict(self.identity, model=self.id())
        self.assertEqual(self.host().loaded(right), 0)

    def test_no_client_is_said(self):
        host = self.host(options="host=127.0.0.1&python=/usr/bin/python3")
        self.until(lambda: host.root()["health"] == "down", "its failure")
        self.assertRegex(host.root()["reason"], "no Mooncake client for .*: pip install mooncake-transfer-engine")
        self.assertRegex(host.daemon.ctl("shared").stdout, "pip install mooncake-transfer-engine")
        self.dumped(host)

    def test_a_wrong_target_is_said(self):
        host = self.host(options="protocl=tcp")
        self.until(lambda: host.root()["health"] == "down", "its failure")
        self.until(lambda: "protocl= is no option, or there twice" in host.daemon.log(), "its line")

    def keys_of(self):
        """The parts of this test in the directory of a played store. The directory also has a
        marker, with a name of zeros, and notes."""
        directory = os.path.join(store["directory"], "objects")
        return sorted(name.replace("%", "/") for name in os.listdir(directory)
                      if name.startswith(self.prefix) and name.rpartition("%")[2].strip("0-") and "%." not in name)

    @unittest.skipIf(REAL, "it looks into the directory of a played store")
    def test_what_is_evicted_or_damaged_is_a_miss(self):
        right = self.written(self.host())
        host = self.host()
        gone, damaged, short, *_ = self.keys_of()
        self.assertEqual(ask("DELETE", gone)[0], 204)
        data = bytearray(ask("GET", damaged)[1])
        data[-1] ^= 1
        self.assertEqual(ask("PUT", damaged, bytes(data))[0], 200)
        self.assertEqual(ask("PUT", short, bytes(data[:1000]))[0], 200)
        self.assertEqual(host.loaded(right), BLOCKS - 3)
        self.assertEqual((host.root()["health"], host.root()["failures"]), ("up", 0))
        self.until(lambda: len(self.keys_of()) == BLOCKS - 3 + (ask("GET", short)[0] == 200), "the removal of what was damaged")

    def harm(self, name):
        with open(os.path.join(store["directory"], f"{name}-{self.prefix}"), "w", encoding="ascii"):
            pass

    def heal(self, name):
        os.unlink(os.path.join(store["directory"], f"{name}-{self.prefix}"))

    @unittest.skipIf(REAL, "it does not throw")
    def test_a_client_that_throws_is_tried_again(self):
        self.harm("throws")
        host = self.host()
        self.until(lambda: "the client throws" in host.root()["reason"], "its failure")
        self.heal("throws")
        self.until(lambda: host.root()["health"] == "up", "the next try")
        self.written_anew(host)

    @unittest.skipIf(REAL, "its leases are long")
    def test_a_lease_that_ends_amid_a_read(self):
        right = self.written(self.host())
        host = self.host()
        self.harm("lease")
        self.assertEqual(host.loaded(right), BLOCKS)
        self.assertFalse(os.path.exists(os.path.join(store["directory"], f"lease-{self.prefix}")))

    @unittest.skipIf(REAL, "its store has room")
    def test_what_was_not_stored_is_not_told_as_stored(self):
        for name in ("half", "full"):
            with self.subTest(name):
                host = self.host()
                self.harm(name)
                self.dumped(host)
                self.until(lambda: host.root()["failures"] > 0 or host.root()["health"] != "up", "a failure")
                self.assertNotIn("ready", [host.shared(n) for n in range(BLOCKS)])
                self.heal(name)

    @unittest.skipUnless(REAL, "a real master")
    def test_a_master_that_is_killed(self):
        host = self.host()
        right = self.written(host)
        ask("POST", "end-master")
        self.until(lambda: host.look(time.time_ns() % 10**9, per_key=True) and host.root()["health"] == "down", "its end")
        self.assertEqual(host.loaded(right), BLOCKS, "DRAM serves meanwhile")
        ask("POST", "begin-master")
        self.until(lambda: host.root()["health"] == "up", "its return")
        right = self.written_anew(host)  # once the store's process has given its memory again
        self.assertEqual(self.host().loaded(right), BLOCKS)
        self.assertEqual(host.root()["backend_kills"], 0)

    @unittest.skipUnless(REAL, "a real store")
    def test_a_process_of_the_store_that_is_killed(self):
        host, right = self.host(), None
        right = self.written(host)
        ask("POST", "end-lender")
        self.assertEqual(self.host().loaded(right), 0)
        ask("POST", "begin-lender")
        reader = self.host()
        self.assertEqual(reader.loaded(self.written_anew(host)), BLOCKS)

    @unittest.skipUnless(REAL, "a real store")
    def test_a_process_of_the_store_that_hangs(self):
        """Calls of processes that have spoken to it end by MC_TCP_STATUS_TIMEOUT_SEC, before the daemon takes the backend for hung."""
        right = self.written(self.host())
        host = self.host()
        self.assertEqual(host.loaded({0: right.pop(0)}), 1)
        ask("POST", "hang-lender")
        try:
            self.assertEqual(host.loaded(right), 0)
            self.assertGreater(host.root()["failures"], 0)
        finally:
            ask("POST", "wake-lender")
        self.assertEqual((host.root()["backend_ends"], host.root()["backend_kills"], host.root()["timeouts"]), (0, 0, 0))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280, exit=True)
    unittest.main()
