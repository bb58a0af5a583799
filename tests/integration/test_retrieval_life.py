#!/usr/bin/python3
"""Summaries and sequences through restarts of the daemon, from host to host, and while DRAM is short."""

import faulthandler
import os
import tempfile
import unittest

from retrieval_case import CANCELLED_CODE, HELD, ON_SHARED, SUITE_TIMEOUT_S, Retrieval, lists_of
from second_client import OK, SHUTDOWN, TIMEOUT_S, Daemon, OwnDaemons, keys, u32


class Restart(OwnDaemons, Retrieval):
    def run_twice(self, how, **options):
        first = Daemon(directory=self.directory, **options)
        self.daemon = first
        client, ns, _, _ = self.stored()
        derived = self.summaries(client, ns)
        self.assertEqual(self.build(client, derived, range(self.blocks)), [OK] * self.blocks)
        sequence, _ = self.sequence(client, derived, range(self.blocks))
        before = lists_of(self.select(client, sequence, self.query(), min_blocks=8))
        if options.get("nvme", True):
            self.settled(client, ns)
            self.settled(client, derived)
        if how == "kill":
            first.kill()
        else:
            self.assertEqual(first.stop(), 0)
        again = self.daemon = Daemon(directory=self.directory, **options)
        client, ns = self.again()
        derived = self.summaries(client, ns)
        self.until(lambda: client.hits(derived, *range(self.blocks)) == self.blocks)
        sequence, answer = self.sequence(client, derived, range(self.blocks), build=True)
        self.assertEqual((answer["summaries"], answer.get("built", 0)), (self.blocks, 0))
        self.assertEqual(client.metrics()["summaries_built"], 0)
        self.assertEqual(lists_of(self.select(client, sequence, self.query(), min_blocks=8)), before)
        self.assertEqual(again.stop(), 0)

    def test_stop(self):
        self.run_twice("stop")

    def test_kill(self):
        self.run_twice("kill")

    @unittest.skipUnless(os.path.isdir("/dev/shm"), "needs /dev/shm")
    def test_summaries_that_sequences_hold_survive_in_dram(self):
        with tempfile.TemporaryDirectory(prefix="retrieval.", dir="/dev/shm") as keep:
            self.run_twice("stop", nvme=False, **{"arena.persist_dir": keep})

    def test_drain_with_sequences_selections_and_builds(self):
        daemon = self.daemon = Daemon(directory=self.directory)
        client, ns, _, _ = self.stored()
        derived = self.summaries(client, ns, build=True)
        sequence, _ = self.sequence(client, derived, range(self.blocks), build=True)
        begun = [client.begin("select", sequences=[sequence], layers=[0], q=self.query().tobytes(), q_dtype=1, q_heads=4, min_blocks=2)
                 for _ in range(50)]
        begun += [client.begin("summary.build", ns=self.summaries(client, ns, "box"), keys=keys(*range(self.blocks)))]
        daemon.process.terminate()
        for msgid in begun:
            try:
                client.wait(msgid)
            except Exception as ended:
                self.assertIn(getattr(ended, "code", SHUTDOWN), (SHUTDOWN, CANCELLED_CODE))
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)


class Share(Retrieval):
    options = {"nvme": False}

    def test_another_host_finds_the_summaries(self):
        with tempfile.TemporaryDirectory(prefix="shared.") as directory:
            hosts = [Daemon(nvme=False, **{"shared.roots": directory, "shared.negative": "50ms", "shared.lookup_timeout": "10s", "shared.timeout": "30s"})
                     for _ in range(2)]
            try:
                self.two_hosts(*hosts)
            finally:
                statuses = [host.stop() for host in hosts]
            self.assertEqual(statuses, [0, 0])

    def shared(self, client, ns):
        def written():
            return all(block["shared"] == 1 for block in client.call("ls", ns=ns, limit=4096)["blocks"])
        self.until(written, "every block on the shared tier")

    def two_hosts(self, one, other):
        self.daemon = one
        client, ns, _, _ = self.stored(20)
        derived = self.summaries(client, ns)
        self.assertEqual(self.build(client, derived, range(20)), [OK] * 20)
        self.shared(client, ns)
        self.shared(client, derived)
        sequence, _ = self.sequence(client, derived, range(20))
        best = lists_of(self.select(client, sequence, self.query(), min_blocks=5))
        far, far_ns = self.again(other)
        sequence, answer = self.sequence(far, self.summaries(far, far_ns), range(25), build=True)
        self.assertEqual(answer["status"], bytes([ON_SHARED | HELD] * 20 + [0] * 5))
        self.assertEqual((answer["shared"], answer["summaries"], answer.get("built", 0), answer["missing"]), (20, 20, 0, 5))
        self.assertEqual(lists_of(self.select(far, sequence, self.query(), min_blocks=5)), best)
        self.assertEqual(far.metrics()["summaries_built"], 0)
        box = self.summaries(far, far_ns, "box")
        self.assertEqual(self.build(far, box, range(20)), [OK] * 20, "bases are read from the shared tier")


class Pressure(Retrieval):
    options = {"arena.size": "4MiB", "nvme": True}

    def test_sequences_under_arena_pressure(self):
        """Blocks that sequences hold stay, while all others come and go."""
        client, ns, region, _ = self.stored(60)
        derived = self.summaries(client, ns)
        sequence, answer = self.sequence(client, derived, range(60), build=True)
        self.assertEqual((answer["blocks"], answer["summaries"]), (60, 60))
        best = lists_of(self.select(client, sequence, self.query(), min_blocks=9))
        for turn in range(10):
            names = [f"{turn}.{i}" for i in range(60)]
            self.assertTrue(set(region.dump(names, range(60))) <= {OK, 3})
            self.assertEqual(lists_of(self.select(client, sequence, self.query(), min_blocks=9)), best)
        self.assertEqual(set(region.load(range(60), range(60))), {OK}, "leased blocks are in some tier")
        answer = client.call("sequence.prefetch", sequence=sequence, index=u32(*range(60)))
        self.assertTrue(set(answer["status"]) <= {OK, 3})


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
