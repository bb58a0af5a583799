#!/usr/bin/python3
"""Blocks acknowledged as durable, over many starts on a small tier. As long as there is room, all
are there. Then the oldest go first."""

import faulthandler
import unittest

from second_client import DEMO, EXISTS, OK, Case, Client, Daemon, OwnDaemons, Region, keys

SUITE_TIMEOUT_S = 240
SIZES = (4096, 10000, 20000, 50000, 32768)  # of blocks: each has segments of its own
BLOCKS = 8
SMALL = {"nvme.size": "25MiB", "nvme.segment": "1MiB", "arena.size": "8MiB", "nvme.scrub": "0B"}


class Age(OwnDaemons, Case):
    def begun(self, **more):
        self.daemon = Daemon(directory=self.directory, **SMALL, **more)
        self.addCleanup(self.daemon.stop)
        client = Client(self.daemon)
        spaces = []
        for size in SIZES:
            identity = dict(DEMO, model=f"blocks of {size}", layers=[1], layer_bytes=size)
            spaces.append((client.open(identity), identity))
        return client, spaces

    def round(self, number, client, spaces, evicted):
        """Dumps durable blocks of each size, evicts some of them by name, as a scheduler may, then
        kills the daemon."""
        names = [f"{number} {i}" for i in range(BLOCKS)]
        for ns, identity in spaces:
            region = Region(client, ns, identity, BLOCKS)
            for block in range(BLOCKS):
                region.fill(block)
            self.assertLessEqual(set(region.dump(names, range(BLOCKS), durability=1)), {OK, EXISTS})
            if evicted:
                client.call("evict", ns=ns, keys=keys(*names[:evicted]))
        self.daemon.kill()

    def left(self, client, spaces, number, evicted):
        """How many of the round's blocks are there, of those that were not evicted by name."""
        return sum(client.call("lookup", ns=ns, keys=keys(*(f"{number} {i}" for i in range(evicted, BLOCKS))), per_key=True)["hits"] for ns, _ in spaces)

    def rounds(self, n, evicted=0, **more):
        for number in range(n):
            self.round(number, *self.begun(**more), evicted)
        client, spaces = self.begun(**more)
        left = [self.left(client, spaces, number, evicted) for number in range(n)]
        tier = client.call("stats")["tiers"][0]
        return left, tier["used_bytes"] / tier["capacity_bytes"]

    def test_while_there_is_room_all_stays(self):
        """Each start begins a segment for each of five sizes, and fills it by half at most. The
        tier brings such blocks together, so that 24 segments suffice."""
        left, used = self.rounds(8)
        self.assertLess(used, 0.75)
        self.assertEqual(left, [len(SIZES) * BLOCKS] * 8)

    def test_evictions_by_name_cost_nothing_else(self):
        left, _ = self.rounds(8, evicted=BLOCKS // 2)
        self.assertEqual(left, [len(SIZES) * BLOCKS // 2] * 8)

    def test_the_oldest_goes_first(self):
        left, used = self.rounds(30)
        self.assertGreater(used, 0.4)
        whole = len(SIZES) * BLOCKS
        self.assertEqual(left[-8:], [whole] * 8, left)
        self.assertLess(sum(left), 30 * whole, "more was dumped than there is room for")
        self.assertLess(sum(left[:10]), sum(left[-10:]), left)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
