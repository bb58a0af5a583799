#!/usr/bin/python3
"""Tenants that load at the same time, against a real daemon. While others wait, too, each gets the
bytes that its weight entitles it to. A tenant that loads little waits for work under way, not for
others' queues. That is counted in requests, by the order in which a trace says that they ended.
"""

import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import unittest

from daemon import halt
from second_client import BIG, DEMO, OK, TIMEOUT_S, Case, Daemon, Region, keys

MIB = 1 << 20
FIRST_UID = 61000
WIDE = dict(BIG, layers=[16], layer_bytes=512 << 10)  # two are a burst
COPIED = dict(BIG, layers=[4], layer_bytes=512 << 10)
READ = dict(BIG, layer_bytes=128 << 10)


def weight(number):
    return 100 * (1 + number % 3)


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Tenants(Case):
    tenants = 10

    @classmethod
    def setUpClass(cls):
        weights = ",".join(f"uid:{FIRST_UID + i} weight={weight(i)}" for i in range(cls.tenants))
        cls.daemon = Daemon(**{"arena.size": "400MiB", "arena.slab": "8MiB", "nvme.size": "640MiB", "nvme.queue_depth": "2", "device.cpu_threads": "1",
                               "tenant_settings": weights})

    def setUp(self):
        self.operator = self.client()

    def stored(self, number, identity, blocks, names):
        client = self.client(uid=FIRST_UID + number)
        ns = client.open(dict(identity, model=self.id()))
        region = Region(client, ns, identity, blocks)
        for at in range(0, len(names), blocks):
            some = names[at:at + blocks]
            self.assertEqual(set(region.dump(some, range(len(some)))), {OK})
        return client, ns, region

    def flood(self, workers, requests, names_of):
        """All send `requests` loads while the daemon stands still, and then get all answers."""
        halt(self.daemon.process.pid)
        for _client, _, region in workers:
            for i in range(requests):
                region.begin("load", names_of(i), range(len(names_of(i))), _more=i + 1 < requests)
        self.daemon.process.send_signal(signal.SIGCONT)
        for client, _, _ in workers:
            for msgid in range(client.msgid - requests + 1, client.msgid + 1):
                self.assertEqual(set(client.wait(msgid)["status"]), {OK})

    def told(self, tenants, resource):
        """For each tenant, the bytes that it got while others waited, too, and the bytes that it
        was entitled to."""
        told = {tenant["name"]: tenant for tenant in self.operator.call("stats")["tenants"]}
        mine = [told.get(f"uid:{FIRST_UID + i}", {}) for i in range(tenants)]
        return [(each.get(resource + "_contended_bytes", 0), each.get(resource + "_fair_share_bytes", 0)) for each in mine]

    def check_shares(self, resource, before, total, slack):
        """slack: by how many bytes a tenant may exceed or miss its share: bursts, and one part."""
        after = self.told(len(before), resource)
        got = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before)]
        listed = {tenant["tenant"]: tenant for tenant in self.operator.call("tenant.list")["tenants"]}
        self.assertEqual([listed[f"uid:{FIRST_UID + i}"][resource + "_fair_share_bytes"] for i in range(len(after))], [due for _, due in after])
        rows = self.daemon.ctl("tenant", "list", check=True).stdout
        for i, (had, due) in enumerate(after):
            shown = re.search(rf"(?m)^uid:{FIRST_UID + i} .* (\S+) +(\S+) +\S+$", rows)
            self.assertEqual(shown[1 if resource == "bus" else 2], f"{had / due:.2f}" if due else "-", rows)
        self.assertGreater(sum(had for had, _ in got), total / 4, "hardly two tenants ever waited at the same time")
        for i, (had, due) in enumerate(got):
            self.assertLessEqual(abs(had - due), 0.1 * due + slack, f"tenant {i} of weight {weight(i)}: {got}")

    def below(self, workers, names):
        """Evicts the blocks from DRAM."""
        for client, ns, _ in workers:
            self.settled(client, ns)
            client.call("evict", ns=ns, keys=keys(*names), tier=1)
            self.assertNotIn(1, client.tiers(ns, *names))

    def copies(self, tenants):
        workers = [self.stored(i, COPIED, 1, ["a"]) for i in range(tenants)]
        before = self.told(tenants, "bus")
        self.flood(workers, 100, lambda i: ["a"])
        self.check_shares("bus", before, tenants * 200 * MIB, 24 * MIB)

    def reads(self, tenants):
        names = list(range(100))
        workers = [self.stored(i, READ, 8, names) for i in range(tenants)]
        self.below(workers, names)
        before = self.told(tenants, "nvme")
        self.flood(workers, 100, lambda i: [i])
        self.check_shares("nvme", before, tenants * 25 * MIB, 4 * MIB)

    def test_two_share_the_copies_of_a_busy_host(self):
        """The daemon does not take a copier that waits for a processor for one that a tenant's
        memory holds up."""
        for _ in range(2 * os.cpu_count()):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            self.addCleanup(busy.wait)
            self.addCleanup(busy.kill)
        self.copies(2)

    def test_ten_share_the_copies(self):
        self.copies(10)

    def test_ten_share_a_disk(self):
        self.reads(10)

    def test_a_small_load_goes_before_what_another_has_queued(self):
        noisy, _, flood = self.stored(0, WIDE, 1, ["a"])
        quiet, _, region = self.stored(1, DEMO, 1, ["b"])
        self.operator.call("trace", op=1)
        halt(self.daemon.process.pid)  # when it goes on, all of them are there
        for i in range(100):
            flood.begin("load", ["a"], [0], _more=i < 99)
        loads = [region.begin("load", ["b"], [0]) for _ in range(20)]
        self.daemon.process.send_signal(signal.SIGCONT)
        for msgid in loads:
            self.assertEqual(list(quiet.wait(msgid)["status"]), [OK])
        for msgid in range(noisy.msgid - 99, noisy.msgid + 1):
            noisy.wait(msgid)
        records = self.operator.call("trace", op=2)["records"]
        ends = [r["start_us"] + r["us"] for r in records if r["uid"] == FIRST_UID]
        beside = [r for r in records if r["uid"] == FIRST_UID + 1 and r["start_us"] + r["us"] < max(ends)]
        self.assertEqual((len(ends), len(beside)), (100, 20))
        passed = sorted(sum(r["start_us"] < end < r["start_us"] + r["us"] for end in ends) for r in beside)
        self.assertLessEqual(statistics.median(passed), 2, passed)


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Hundred(Case):
    """A hundred tenants of unequal weights, half of them with requests four times as large. After
    each has paid for its burst, answers are counted: what each got, against its weight's share of
    what all got meanwhile. The daemon stands still while they are counted. If this program was so
    slow that a tenant had all that it asked for, counting begins again."""
    tenants, in_flight, large, burst = 100, 36, 2 * MIB, 16 * MIB

    @classmethod
    def setUpClass(cls):
        cls.weights = [100 + 50 * (i % 3) for i in range(cls.tenants)]
        settings = ",".join(f"uid:{FIRST_UID + i} weight={weight}" for i, weight in enumerate(cls.weights))
        cls.daemon = Daemon(**{"arena.size": "256MiB", "arena.slab": "8MiB", "device.cpu_threads": "1", "request.timeout": "10min",
                               "tenant_settings": settings})

    def setUp(self):
        self.regions, self.had = [self.region(i) for i in range(self.tenants)], [0] * self.tenants
        self.ready = selectors.DefaultSelector()
        self.addCleanup(self.ready.close)
        for i, region in enumerate(self.regions):
            self.ready.register(region.client.socket, selectors.EVENT_READ, i)

    def region(self, number):
        """A tenant's, of one block that is stored."""
        size = self.large if number // 3 % 2 else self.large // 4
        identity = dict(DEMO, model=self.id(), layer_bytes=size // 2)
        client = self.client(uid=FIRST_UID + number)
        region = Region(client, client.open(identity), identity, 1)
        self.assertEqual(region.dump(["a"], [0]), [OK])
        return region

    def ask(self, region, loads):
        for k in range(loads):
            region.begin("load", ["a"], [0], _more=k + 1 < loads)

    def stands_still(self, still):
        if still:
            halt(self.daemon.process.pid)
        else:
            self.daemon.process.send_signal(signal.SIGCONT)

    def count(self, timeout_s=TIMEOUT_S):
        """Counts answers, and asks for as much again. Returns whether there were any, and whether a
        tenant had all its answers."""
        ready, dry = self.ready.select(timeout_s), False
        for key, _ in ready:
            region = self.regions[key.data]
            answers = region.client.drain()
            self.assertEqual({status for answer in answers for status in answer["status"]}, {OK})
            self.had[key.data] += region.size * len(answers)
            dry |= len(answers) == self.in_flight
            self.ask(region, len(answers))
        return bool(ready), dry

    def served(self, since, bytes_each):
        """Counts until each tenant has got so much more, then all that is answered at one moment.
        None: a tenant had nothing to wait for."""
        while any(had - then < each for had, then, each in zip(self.had, since, bytes_each)):
            some, dry = self.count()
            self.assertTrue(some, "nothing was answered")
            if dry:
                return None
        self.stands_still(True)
        some, dry = True, False
        while some:
            some, more_dry = self.count(0)
            dry |= more_dry
        self.stands_still(False)
        return None if dry else list(self.had)

    def test_a_hundred_share_the_copies(self):
        even = [(self.burst + self.large) * weight / min(self.weights) for weight in self.weights]  # then nobody is ahead by a burst
        self.stands_still(True)
        for region in self.regions:
            self.ask(region, self.in_flight)
        self.stands_still(False)
        before = after = None
        for _ in range(20):
            before = self.served(list(self.had), even)
            after = before and self.served(before, [10 * self.large] * self.tenants)
            if after:
                break
        if not after:
            self.skipTest("this program never kept all queues filled for long enough")
        got = [a - b for a, b in zip(after, before)]
        for i, (had, weight, region) in enumerate(zip(got, self.weights, self.regions)):
            due = sum(got) * weight / sum(self.weights)
            self.assertLessEqual(abs(had - due), 0.1 * due + region.size, f"tenant {i} of weight {weight}: {got}")


if __name__ == "__main__":
    unittest.main()
