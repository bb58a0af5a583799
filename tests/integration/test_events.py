#!/usr/bin/python3
"""Events for routers, against a real daemon: the events of each step of a block's life, replay, slow readers, and permissions."""

import json
import unittest

from second_client import (BUSY, DEMO, DENIED, INVALID, NOT_FOUND, OK, TIMEOUT_S, UNSUPPORTED, Case, Daemon,
                           OwnDaemons, Region, keys, u32)

MISS, DRAM, NVME = range(3)
WAIT = 1000 * TIMEOUT_S
END = 2 ** 64 - 1


def tokens(*names):
    """Tokens of blocks of 16 tokens."""
    return b"".join(u32(*range(100 * name, 100 * name + 16)) for name in names)


class Events(Case):
    options = {"events.memory": "1MiB", "tenants": "pair uid:1001 uid:1002,far uid:1003"}

    def setUp(self):
        self.reader = self.client()
        self.begun = self.reader.call("events", since=END)["next"]

    def read(self, n, since=None, **more):
        """The next n events of this test, in however many answers they come."""
        events, since = [], self.begun if since is None else since
        while len(events) < n:
            page = self.reader.call("events", since=since, wait_ms=WAIT, **more)
            events += page["events"]
            since = page["next"]
        self.assertEqual([event["number"] for event in events], list(range(self.begun + 1, self.begun + 1 + len(events))))
        return events

    def changes(self, n, **more):
        return [(event["key"], event["was"], event["is"]) for event in self.read(n, **more)]

    def test_the_life_of_a_block(self):
        client, ns, region = self.worker()
        self.assertEqual(region.dump(["a"], [0]), [OK])
        self.assertEqual(self.changes(1), [(keys("a"), MISS, DRAM)])
        self.settled(client, ns)
        self.assertEqual(client.call("evict", ns=ns, keys=keys("a"), tier=1)["blocks"], 1)
        self.assertEqual(region.load(["a"], [1]), [OK])
        self.assertEqual(client.call("evict", ns=ns, keys=keys("a"))["blocks"], 1)
        events = self.read(5)
        self.assertEqual([(event["was"], event["is"]) for event in events],
                         [(MISS, DRAM), (DRAM, NVME), (NVME, DRAM), (DRAM, NVME), (NVME, MISS)])
        self.assertEqual({(event["ns"], event["key"]) for event in events}, {(ns, keys("a"))})

    def test_a_block_that_is_evicted_while_in_use_is_gone_at_once_and_once(self):
        client, ns, region = self.worker()
        region.dump(["a"], [0])
        lease = client.call("lookup", ns=ns, keys=keys("a"), lease_ms=WAIT)["lease"]
        self.assertEqual(client.call("evict", ns=ns, keys=keys("a"))["busy"], 1)
        self.assertEqual(self.changes(2)[1], (keys("a"), DRAM, MISS))
        client.call("release", lease=lease)
        region.dump(["b"], [0])
        self.assertEqual(self.changes(3)[2], (keys("b"), MISS, DRAM))

    def test_who_waits_is_answered_by_what_happens(self):
        _, _, region = self.worker()
        waits = self.reader.begin("events", since=self.begun, wait_ms=WAIT)
        self.refused(BUSY, self.reader.call, "events", since=self.begun, wait_ms=WAIT)
        region.dump(["a"], [0])
        self.assertEqual([event["key"] for event in self.reader.wait(waits)["events"]], [keys("a")])
        waits = self.reader.begin("events", since=self.begun + 1, wait_ms=WAIT)
        self.assertTrue(self.reader.call("cancel", msgid=waits)["cancelled"])
        self.assertEqual(self.reader.wait(waits)["events"], [])
        self.assertEqual(self.reader.call("events", since=self.begun + 1, wait_ms=1)["next"], self.begun + 1)

    def test_a_slow_reader_loses_events_and_is_told_how_many(self):
        client, ns, region = self.worker()
        names = list(range(16))
        waits = self.reader.begin("events", since=self.begun + 1, wait_ms=WAIT)
        region.dump(["first"], [0])
        while (last := client.call("events", since=END)["last"]) < self.begun + 3000:
            region.dump(names, names)
            client.call("evict", ns=ns, keys=keys(*names))
        page = client.call("events", since=self.begun + 1, limit=2048)
        self.assertEqual((page["lost"], page["events"][0]["number"]), (last - 1024 - self.begun - 1, last - 1023))
        self.assertEqual((len(page["events"]), page["next"]), (1024, last))
        self.assertEqual(self.reader.wait(waits)["lost"], 0, "it was answered at once, and has not read that")
        self.assertGreaterEqual(client.metrics()["events_lost"], page["lost"])

    def test_metadata_before_and_after_the_block(self):
        client, ns, region = self.worker()
        client.call("events.metadata", ns=ns, keys=keys("a", "b"), tokens=tokens(1, 2), lora="tuned")
        region.dump(["a", "b"], [0, 1])
        region.dump(["c"], [2])
        client.call("events.metadata", ns=ns, keys=keys("c"), tokens=tokens(3), parent=keys("b"))
        known = {event["key"]: event for event in self.read(4, tokens=True)}
        self.assertEqual([(known[keys(name)]["parent"], known[keys(name)]["tokens"], known[keys(name)]["lora"]) for name in "abc"],
                         [(b"", tokens(1), "tuned"), (keys("a"), tokens(2), "tuned"), (keys("b"), tokens(3), "")])
        self.assertEqual(self.changes(4)[2:], [(keys("c"), MISS, DRAM), (keys("c"), DRAM, DRAM)])
        self.assertNotIn("tokens", self.read(4)[0], "nobody asked for them")

    def test_a_blocks_metadata_goes_with_it(self):
        client, ns, region = self.worker()
        before = client.metrics()["events_metadata"]
        client.call("events.metadata", ns=ns, keys=keys("a", "b"), tokens=tokens(1, 2))
        region.dump(["a", "b"], [0, 1])
        self.assertEqual(client.metrics()["events_metadata"], before + 2)
        client.call("evict", ns=ns, keys=keys("a"))
        self.assertEqual(client.metrics()["events_metadata"], before + 1)

    def test_the_list_has_what_lookups_find(self):
        client, ns, region = self.worker()
        region.dump(list("abcdefg"), range(7))
        client.call("events.metadata", ns=ns, keys=keys("c"), tokens=tokens(3), parent=keys("b"))
        client.call("evict", ns=ns, keys=keys("g"))
        blocks = {block["key"]: block for block in self.pages(client, "events.list", "blocks", ns=ns)}
        self.assertEqual(set(blocks), {keys(name) for name in "abcdef"})
        self.assertEqual({block["is"] for block in blocks.values()}, {DRAM})
        self.assertEqual([key for key, block in blocks.items() if "tokens" in block], [keys("c")])

    def test_memory_for_metadata_ends_with_the_oldest(self):
        client, ns, region = self.worker()
        region.dump(["old"], [0])
        client.call("events.metadata", ns=ns, keys=keys("old"), tokens=tokens(1))
        for at in range(0, 8192, 1024):
            client.call("events.metadata", ns=ns, keys=keys(*range(at, at + 1024)), tokens=tokens(*range(1024)))
        metrics = client.metrics()
        self.assertGreater(metrics["events_metadata_dropped"], 0)
        self.assertLessEqual(metrics["events_bytes"], 1 << 20)
        self.assertNotIn("tokens", client.call("events.list", ns=ns)["blocks"][0])

    def test_tenants_see_their_own(self):
        def tenant(uid):
            client = self.client(uid=uid)
            ns = client.open(dict(DEMO, model=self.id()))
            return client, ns, Region(client, ns, DEMO, 1)
        (one, ns, region), (two, _, _), (other, _, far) = tenant(1001), tenant(1002), tenant(1003)
        begun = one.call("events", since=END)["next"]
        waits = other.begin("events", since=other.call("events", since=END)["next"], wait_ms=WAIT)
        region.dump(["a"], [0])
        for client, more in ((one, {}), (two, {}), (self.client(), {"tenant": "pair"})):
            page = client.call("events", since=begun, wait_ms=WAIT, **more)
            self.assertEqual([event["key"] for event in page["events"]], [keys("a")])
        far.dump(["b"], [0])
        self.assertEqual([event["key"] for event in other.wait(waits)["events"]], [keys("b")])
        self.refused(DENIED, other.call, "events", tenant="pair")
        self.refused(NOT_FOUND, other.call, "events.list", ns=ns)
        self.refused(NOT_FOUND, self.client().call, "events", tenant="nobody")

    def test_what_is_refused(self):
        client, ns, _ = self.worker()
        self.refused(INVALID, client.call, "events.metadata", ns=ns, keys=keys("a"), tokens=tokens(1, 2))
        self.refused(INVALID, client.call, "events.metadata", ns=ns, keys=keys("a"), tokens=tokens(1), parent=b"short")
        self.refused(INVALID, client.call, "events.metadata", ns=ns, keys=keys(*range(1025)), tokens=tokens(*range(1025)))

    def test_ucmctl_shows_them(self):
        client, ns, region = self.worker()
        client.call("events.metadata", ns=ns, keys=keys("a"), tokens=tokens(1))
        region.dump(["a"], [0])
        self.settled(client, ns)
        client.call("evict", ns=ns, keys=keys("a"))
        words = ["events", "--since", self.begun]
        run = self.daemon.ctl(*words, "--follow", "--count", 3, "--json", "--tokens")
        shown = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual([(event["key"], event["is"]) for event in shown], [(keys("a").hex(), now) for now in (DRAM, NVME, MISS)])
        run = self.daemon.ctl(*words)
        self.assertEqual(run.stdout.splitlines()[0], f"{self.begun + 1}  {ns}  {keys('a').hex()}  none -> dram")


class Daemons(OwnDaemons, Case):
    def start(self, **more):
        self.daemon = Daemon(directory=self.directory, **more)
        self.addCleanup(self.daemon.stop)
        return self.client()

    def test_without_memory_there_are_none(self):
        client = self.start()
        ns = client.open(DEMO)
        for method, params in (("events", {}), ("events.list", {"ns": ns}), ("events.metadata", {"ns": ns, "keys": keys(1), "tokens": tokens(1)})):
            self.assertIn("events.memory", self.refused(UNSUPPORTED, client.call, method, **params).args[2])

    def test_another_start_lists_what_is_there_and_numbers_again(self):
        client = self.start(**{"events.memory": "1MiB"})
        ns = client.open(DEMO)
        first = client.call("events", since=END)
        Region(client, ns, DEMO, 4).dump(range(4), range(4))
        self.settled(client, ns)
        self.assertEqual(client.call("events")["last"], 4)
        waits = client.begin("events", since=4, wait_ms=WAIT)
        self.assertEqual(self.daemon.stop(), 0, "one that waits holds up no stop")
        del waits
        client = self.start(**{"events.memory": "1MiB"})
        again = client.call("events", since=4, wait_ms=WAIT)
        self.assertEqual((again["last"], again["events"]), (0, []))
        self.assertNotEqual(again["instance"], first["instance"])
        self.assertEqual({block["is"] for block in client.call("events.list", ns=client.open(DEMO))["blocks"]}, {NVME})


if __name__ == "__main__":
    unittest.main()
