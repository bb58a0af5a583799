#!/usr/bin/python3
"""The daemon ends while a directory hangs: in time, and with everything else saved. Then the next
daemon starts."""

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile
import unittest

from daemon import TIMEOUT_S, halt
from hung_mount import HungMount
from second_client import BUSY, DEMO, MISS, OK, Case, Client, Daemon, OwnDaemons, Region, keys

SUITE_TIMEOUT_S = 240
BLOCKS = 16


class Hangs(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.root = tempfile.mkdtemp(suffix=".hangs")
        self.addCleanup(shutil.rmtree, self.root, True)
        self.kept = tempfile.mkdtemp(dir="/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        if self.kept:
            self.addCleanup(shutil.rmtree, self.kept, True)

    def start(self, **more):
        if self.kept:
            more["arena.persist_dir"] = self.kept
        daemon = Daemon(directory=self.directory, **{"shared.roots": self.root, "shared.timeout": "1s", "shared.threads": "2",
                                               "shutdown.drain": "600s"} | more)
        self.addCleanup(daemon.stop)
        client = Client(daemon)
        identity = dict(DEMO, model=self.id())
        ns = client.open(identity)
        return daemon, client, ns, Region(client, ns, identity, BLOCKS)

    def dumped(self, region, first):
        names = range(first, first + 8)
        for block in range(8):
            region.fill(block)
        self.assertEqual(region.dump(names, range(8), durability=1), [OK] * 8)
        return {name: region.bytes(block) for block, name in enumerate(names)}

    def root_of(self, client):
        return client.call("stats")["shared_roots"][0]

    def well(self, client):
        """Waits until the first health check is over: if it hung, the root would just be down.
        Returns how many operations were late so far."""

        def idle():
            root = self.root_of(client)
            return (root["health"], root["in_flight"], root["queued"]) == ("up", 0, 0)

        self.until(idle, "a root that is well")
        return self.root_of(client)["timeouts"]

    def hung(self, client, region, before):
        """Waits for operations that do not come back. `before`: what well() returned."""
        bytes_of = self.dumped(region, 8)

        def late():
            client.call("lookup", ns=self.ns, keys=keys("elsewhere"), shared=True)
            return self.root_of(client)["timeouts"] > before + 1

        self.until(late, "the first deadlines")
        return bytes_of

    def all_is_there(self, bytes_of):
        daemon, client, ns, region = self.start(**{"shared.roots": self.directory})  # a root that is well
        self.assertEqual(client.hits(ns, *bytes_of), len(bytes_of))
        self.assertEqual(region.load(list(bytes_of), range(len(bytes_of))), [OK] * len(bytes_of))
        self.assertEqual([region.bytes(i) for i in range(len(bytes_of))], list(bytes_of.values()))
        if self.kept:
            self.assertEqual(client.metrics()["arena_kept_parts"], len(bytes_of), "DRAM was kept")

    @contextlib.contextmanager
    def hanging(self, client):
        """While this lasts, the root's process does not run."""
        pid = self.root_of(client)["pid"]
        halt(pid)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def test_more_requests_than_a_connection_may_have_are_refused(self):
        _daemon, client, ns, region = self.start(**{"shared.timeout": "600s", "limits.requests_per_connection": "8"})
        self.well(client)
        with self.hanging(client):
            asked = [client.begin("lookup", ns=ns, keys=keys(name), wait_ms=600000) for name in range(8)]
            self.refused(BUSY, region.load, [8], [0])
        self.assertEqual([client.wait(msgid)["hits"] for msgid in asked], [0] * 8)
        self.assertEqual(region.load([8], [0]), [MISS])

    def ends(self, daemon, bytes_of):
        """It ends in time, with everything elsewhere saved. shutdown.drain is longer than this
        waits."""
        daemon.process.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)
        self.all_is_there(bytes_of)

    def test_it_ends_at_once(self):
        daemon, client, self.ns, region = self.start()
        bytes_of = self.dumped(region, 0)
        timeouts = self.well(client)
        with self.hanging(client):
            bytes_of.update(self.hung(client, region, timeouts))
            self.ends(daemon, bytes_of)

    def test_what_waits_longer_than_the_drain_is_given_up(self):
        daemon, client, self.ns, region = self.start(**{"shared.timeout": "600s", "shutdown.drain": "1s"})
        self.well(client)
        with self.hanging(client):
            bytes_of = self.dumped(region, 0)
            self.until(lambda: self.root_of(client)["in_flight"] > 0, "a write")
            self.ends(daemon, bytes_of)

    def test_what_no_kill_ends_keeps_nobody_from_starting(self):
        daemon, client, self.ns, region = self.start()
        bytes_of = self.dumped(region, 0)
        timeouts = self.well(client)
        HungMount.within(self, self.root)
        bytes_of.update(self.hung(client, region, timeouts))
        self.ends(daemon, bytes_of)
        self.assertIn("backend-left", daemon.log())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
