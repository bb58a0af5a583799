#!/usr/bin/python3
"""Two daemons over one directory that they share, through second_client.py. Each finds and loads
what the other stores. A file that is gone, or is not what it should be, is a miss. The other host
is a second daemon here.
"""

import faulthandler
import os
import unittest

from second_client import EXISTS, MISS, OK, keys
from shared_case import ABSENT, IN_DRAM, ON_NVME, ON_SHARED, SharedCase

SUITE_TIMEOUT_S = 300


class Halves:
    """Blocks of which a root has lost a part."""

    def part_file(self, name, part):
        (path,) = [path for path in self.files() if os.path.basename(path).startswith(keys(name).hex()) and path.endswith(f"-{part:02x}")]
        return path

    def mended(self, host, lost):
        """A dump stores the part that a root has lost, and a third host loads all."""
        bytes_of = [[region.fill(block) for block in range(6)] for region in host.regions]
        for region in host.regions:
            self.assertLessEqual(set(region.dump(range(6), range(6))), {OK, EXISTS})
        self.until(lambda: len(self.files()) == 18, f"the writing of {lost}")
        third = self.host()
        self.assertEqual(third.look(*range(6)), {"hits": 6, "shared": 6})
        for region in third.regions:
            self.assertEqual(region.load(range(6), range(6)), [OK] * 6)
        return bytes_of

    def test_a_block_that_lacks_a_part_is_no_hit_and_is_mended(self):
        self.identity.update(parts=3, layers=[2, 1, 2])
        one = self.host()
        self.stored(one, 6)
        self.assertEqual(one.daemon.stop(), 0)
        self.hosts.remove(one)
        lost = [self.part_file(block, block % 3) for block in range(1, 6)]
        for path in lost:
            os.remove(path)
        other = self.host()
        self.assertEqual(other.tiers(*range(6)), [ON_SHARED] + [ABSENT] * 5)
        self.assertEqual(other.look(*range(6)), {"hits": 1, "shared": 1})
        self.assertEqual(other.look(*range(1, 6))["hits"], 0)
        for region in other.regions:
            self.assertEqual(region.load(range(1, 6), range(5)), [MISS] * 5)
        self.mended(other, lost)

    def test_a_load_that_failed_is_not_promised_again(self):
        self.identity.update(parts=3, layers=[2, 1, 2])
        one, other = self.host(), self.host()
        self.stored(one, 6)
        self.assertEqual(one.daemon.stop(), 0)
        self.hosts.remove(one)
        self.assertEqual(other.look(*range(6))["hits"], 6)
        lost = [self.part_file(block, block % 2) for block in range(6)]
        for path in lost:
            os.remove(path)
        self.assertEqual(other.regions[2].load(range(6), range(6)), [OK] * 6)  # the part that lookups ask for first
        for part in (0, 1):
            self.assertEqual(other.regions[part].load(range(part, 6, 2), range(3)), [MISS] * 3)
        for _ in range(3):
            self.assertEqual(other.look(*range(6))["hits"], 0)
            self.assertEqual(other.tiers(*range(6)), [ABSENT] * 6)
        self.mended(other, lost)


class Share(Halves, SharedCase):
    def test_what_one_host_stores_the_other_loads(self):
        one, other = self.host(), self.host()
        bytes_of = self.stored(one, 8)
        self.assertEqual(other.look(*range(12)), {"hits": 8, "shared": 8})
        self.assertEqual(other.look(*range(12))["hits"], 8)
        self.loaded(other, 8, bytes_of)
        self.assertEqual(other.look(*range(8)), {"hits": 8, "dram": 8})
        self.assertEqual(other.metrics()["load_blocks_shared"], 8)
        self.assertEqual(other.metrics()["shared_writes"], 0, "they are there")
        self.assertGreater(other.metrics()["lookups_waited"], 0)

    def test_a_block_of_two_ranks_counts_when_both_are_there(self):
        self.identity.update(parts=2, layers=[2, 3])
        one, other = self.host(), self.host()
        one.regions[0].fill(0)
        self.assertEqual(one.regions[0].dump("x", [0]), [OK])
        self.assertEqual(other.look("x")["hits"], 0)
        bytes_of = self.stored(one, 4)
        self.assertEqual(other.look(*range(4)), {"hits": 4, "shared": 4})
        self.loaded(other, 4, bytes_of)

    def test_each_key_is_told_by_where_it_lies(self):
        one, other = self.host(), self.host()
        self.stored(one, 2)
        other.regions[0].fill(5)
        other.regions[0].dump("x", [5])
        self.assertEqual(other.tiers("x", 0, "y", 1), [IN_DRAM, ON_SHARED, ABSENT, ON_SHARED])
        plain = other.client.call("lookup", ns=other.ns, keys=keys(0), per_key=True)
        self.assertEqual(plain, {"hits": 1, "status": bytes([ON_NVME])}, "a client that does not ask gets no figure")
        self.assertEqual(other.parts(0)[0]["shared"], "ready")
        self.assertEqual(other.parts(0)[0]["root"], 1)

    def test_evicted_by_name_they_go_from_the_directory(self):
        one, other = self.host(), self.host()
        self.stored(one, 3)
        other.client.call("evict", ns=other.ns, keys=keys(0), tier=3)
        self.until(lambda: len(self.files()) == 2, "the first file's end")
        one.client.call("evict", ns=one.ns, keys=keys(1))
        self.until(lambda: len(self.files()) == 1, "the second file's end")
        one.client.call("evict", ns=one.ns, keys=keys(2), tier=1)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(one.tiers(0, 2), [IN_DRAM, ON_SHARED])

    def test_a_purge_takes_the_files_of_its_namespace_only(self):
        one = self.host()
        self.stored(one, 3)
        self.identity["salt"] = b"other"
        other = self.host()
        self.assertEqual(other.regions[0].dump(range(2), range(2)), [OK] * 2)
        self.until(lambda: len(self.files()) == 5, "their writing")
        other.client.call("namespace.purge", ns=other.ns)
        self.assertEqual(len(self.files()), 3)
        self.assertEqual(one.look(*range(3)), {"hits": 3, "dram": 3})

    def test_stats_tell_of_the_roots(self):
        one = self.host()
        self.stored(one, 2)
        roots = one.client.call("stats")["shared_roots"]
        self.assertEqual([(root["name"], root["backend"], root["health"]) for root in roots],
                         [(self.directory, "directory", "up")])
        self.assertEqual(roots[0]["writes"], 2)
        listed = one.client.call("namespace.list")["namespaces"][0]
        self.assertEqual(listed["shared_bytes"], 2 * one.regions[0].size)
        self.assertEqual(one.client.call("health")["status"], "ok")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
