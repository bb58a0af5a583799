#!/usr/bin/python3
"""gather of single layers that lie on NVMe, after a restart too: what is read, and the effects of damage and kills."""

import faulthandler
import random
import signal
import unittest

import encoding_case as encoded
from daemon import Daemon
from second_client import CANCELLED, DEMO, FAILED, OK, Case, Client, OwnDaemons, Pool, Region, keys

SUITE_TIMEOUT_S = 300
LAYERS, LAYER, BLOCKS, PAGE = 12, 9000, 16, 4096
IDENTITY = dict(DEMO, layers=[LAYERS], layer_bytes=LAYER)


def room(first, n=1):
    """Bytes that a read of n layers moves: their pages and the header's."""
    return PAGE + -(-(first + n) * LAYER // PAGE) * PAGE - first * LAYER // PAGE * PAGE


class Layers(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.daemon = None
        self.addCleanup(lambda: self.daemon and self.daemon.stop())

    def start(self, **options):
        self.daemon = Daemon(directory=self.directory, **{"arena.size": "16MiB", "nvme.size": "64MiB", **options})
        self.client = Client(self.daemon)
        self.daemon.clients.append(self.client)
        self.ns = self.client.open(IDENTITY)
        self.pool = Pool(self.client, self.ns, LAYER, 8 * BLOCKS)

    def stored(self, **options):
        """Stores blocks 0 to n by an earlier daemon, so that they are on NVMe alone. Returns what
        they hold."""
        self.start(**options)
        region = Region(self.client, self.ns, IDENTITY, BLOCKS)
        kv = [region.fill(block) for block in range(BLOCKS)]
        self.assertEqual(set(region.dump(range(BLOCKS), range(BLOCKS))), {OK})
        self.settled(self.client, self.ns)
        self.restart(**options)
        return kv

    def restart(self, **options):
        self.daemon.stop()  # and its client
        self.start(**options)

    def gather(self, *items):
        """(block, layer) each, into slots 0, 1, ...: the statuses."""
        return self.pool.gather([(block, layer, slot) for slot, (block, layer) in enumerate(items)], keys=keys(*range(BLOCKS)))

    def nothing_is_held(self):
        self.client.call("evict", ns=self.ns, tier=1)
        return self.client.metrics()["arena_bytes_used"] == 0

    def right(self, kv, *items):
        for slot, (block, layer) in enumerate(items):
            self.assertEqual(self.pool.bytes(slot), kv[block][layer * LAYER:(layer + 1) * LAYER], (block, layer))

    def grown(self, call):
        before = self.client.metrics()
        result, after = call(), self.client.metrics()
        return result, {name: after[name] - before[name] for name in after if isinstance(after[name], int)}

    def test_only_these_layers_are_read(self):
        kv = self.stored()
        for items in ([(3, 0)], [(3, 11)], [(5, 4), (6, 4), (7, 4)], [(8, 3), (8, 5)], [(random.randrange(9, 14), 7)]):
            self.pool.clear()
            status, grown = self.grown(lambda: self.gather(*items))  # noqa: B023
            self.assertEqual(status, [OK] * len(items))
            self.right(kv, *items)
            blocks = {block for block, _ in items}
            first, last = min(layer for _, layer in items), max(layer for _, layer in items)
            self.assertEqual([grown[name] for name in ("gather_reads", "gather_reads_partial", "nvme_reads")], [len(blocks)] * 3)
            known = PAGE if items == [(3, 11)] else 0  # its header was read before
            self.assertEqual(grown["nvme_read_bytes"], len(blocks) * (room(first, last - first + 1) - known))
            self.assertEqual(self.client.tiers(self.ns, *blocks), [2] * len(blocks), "no part came to DRAM")
        most = [(15, layer) for layer in range(7)]
        status, grown = self.grown(lambda: self.gather(*most))
        self.right(kv, *most)
        self.assertEqual((grown["gather_reads"], grown["gather_reads_partial"], grown["nvme_read_bytes"]), (1, 0, LAYERS * LAYER))
        self.assertEqual(self.client.tiers(self.ns, 15), [1])
        status, grown = self.grown(lambda: self.gather((15, 9)))
        self.assertEqual((status, grown["nvme_read_bytes"]), ([OK], 0))
        self.assertEqual(self.client.metrics()["nvme_corrupt"], 0)

    def test_who_comes_again_gets_the_part_into_dram(self):
        kv = self.stored()
        whole = 0
        for layer in range(LAYERS):
            status, grown = self.grown(lambda: self.gather((2, layer)))  # noqa: B023
            self.assertEqual(status, [OK])
            self.right(kv, (2, layer))
            whole += grown["gather_reads"] - grown["gather_reads_partial"]
        self.assertEqual((whole, self.client.tiers(self.ns, 2)), (1, [1]))

    def test_a_damaged_layer_fails_and_others_do_not(self):
        kv = self.stored()
        self.spoil(kv[4][:512], 6 * LAYER + 100)
        self.spoil(kv[9][:512], 6 * LAYER + 100)
        self.assertEqual(self.gather((4, 2), (5, 6)), [OK, OK])
        self.right(kv, (4, 2), (5, 6))
        status, grown = self.grown(lambda: self.gather((4, 6), (5, 6), (9, 11)))
        self.assertEqual(status, [FAILED, OK, OK])
        self.assertEqual(self.pool.bytes(1), kv[5][6 * LAYER:7 * LAYER])
        self.assertEqual(self.pool.bytes(2), kv[9][11 * LAYER:12 * LAYER])
        self.assertEqual(grown["nvme_corrupt"], 1)
        self.assertEqual(self.client.tiers(self.ns, 4), [0], "the copy is dropped")

    def test_a_damaged_header_costs_a_whole_read(self):
        kv = self.stored()
        self.spoil(kv[4][:512], -200)
        status, grown = self.grown(lambda: self.gather((4, 6)))
        self.assertEqual(status, [OK])
        self.right(kv, (4, 6))
        self.assertEqual((grown["gather_reads"], grown["gather_reads_partial"], grown["nvme_corrupt"]), (1, 0, 0))

    def test_headers_are_right_with_and_without(self):
        """A part of an earlier run counts as durable once its headers have been checked."""
        kv = self.stored()
        region = Region(self.client, self.ns, IDENTITY, BLOCKS)
        region.memory[:] = b"".join(kv)
        _, grown = self.grown(lambda: region.dump(range(BLOCKS), range(BLOCKS), durability=1))
        self.assertEqual((grown["nvme_bad_headers"], grown["nvme_writes"]), (0, 0))
        status, grown = self.grown(lambda: self.gather((4, 6)))
        self.assertEqual((status, grown["gather_reads_partial"]), ([OK], 1))

    def test_encoded_layers(self):
        """An encoded layer is read, and decoded on its way."""
        self.start()
        identity = dict(encoded.IDENTITY, layers=[LAYERS])
        opened = self.client.call("encoding.open", ns=self.client.open(identity), encoding="fp8", **encoded.SIZES)
        reference = encoded.Reference("fp8", **encoded.SIZES)
        pages = encoded.Pages(self.client, opened["ns"], 4, layers=LAYERS)
        blocks = [pages.fill(i) for i in range(4)]
        self.assertEqual(pages.dump(range(4), range(4)), [OK] * 4)
        self.settled(self.client, opened["ns"])
        self.client.call("evict", ns=opened["ns"], tier=1)
        pool = Pool(self.client, opened["ns"], encoded.LAYER, 4, tensors=2)
        items = [(i, 3 * i + 1, i) for i in range(4)]
        status, grown = self.grown(lambda: pool.gather(items, keys=keys(*range(4))))
        self.assertEqual((status, grown["gather_reads_partial"]), ([OK] * 4, 4))
        for index, layer, slot in items:
            data = blocks[index][layer * encoded.LAYER:(layer + 1) * encoded.LAYER]
            self.assertEqual(pool.bytes(slot), reference.decode(reference.encode(data)))

    def test_killed_while_it_gathers(self):
        """Acknowledged blocks are there, layer by layer, however often the daemon dies."""
        kv = self.stored()
        for _ in range(4):
            for first in range(0, 8 * BLOCKS, BLOCKS):
                self.pool.begin([(block, random.randrange(LAYERS), first + block) for block in range(BLOCKS)], keys=keys(*range(BLOCKS)))
            self.daemon.process.send_signal(signal.SIGKILL)
            self.daemon.process.wait()
            self.client.close()
            self.start()
        items = [(block, random.randrange(LAYERS)) for block in range(BLOCKS)]
        self.assertEqual(self.gather(*items), [OK] * BLOCKS)
        self.right(kv, *items)

    def test_many_at_once_want_more_than_the_arena(self):
        """Each gather waits for slots that others hold, or is cancelled meanwhile."""
        kv, everything = self.stored(**{"arena.size": "1MiB"}), keys(*range(BLOCKS))
        for cancelled in (range(0), range(0, BLOCKS, 2)) * 3:
            self.client.call("evict", ns=self.ns, tier=1)
            gathers = [self.pool.begin([(block, layer, 8 * block + layer % 2) for layer in (0, LAYERS - 1)], keys=everything)
                       for block in range(BLOCKS)]
            for block in cancelled:
                self.client.call("cancel", msgid=gathers[block])
            for block, gather in enumerate(gathers):
                status = list(self.client.wait(gather)["status"])
                self.assertIn(status, ([OK, OK], [CANCELLED] * 2) if block in cancelled else ([OK, OK],))
                if status == [OK, OK]:
                    self.assertEqual(self.pool.bytes(8 * block), kv[block][:LAYER])
                    self.assertEqual(self.pool.bytes(8 * block + 1), kv[block][-LAYER:])
        self.until(self.nothing_is_held, "the end of what was cancelled")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
