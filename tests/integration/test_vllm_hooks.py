#!/usr/bin/python3
"""What the vLLM connector reports: which tokens blocks stand for, statistics, and KV events for
vLLM's publisher."""

import struct
import threading
import unittest
from unittest import mock

from vllm_case import BLOCK, Case, Request, daemon, prompt, watch  # sets the paths
from ucmclient import Client, Identity
from ucmclient.engine.vllm.events import EventFeed, ask, listed
from ucmclient.engine.vllm.stats import COUNTED, Counts, UcmPromMetrics, UcmStats


class Kept(Case):
    """With a daemon that keeps events."""

    def setUp(self):
        self.daemon = daemon(**{"events.memory": "16MiB"})
        self.addCleanup(self.stop)
        self.reader = Client(self.daemon.socket)
        self.addCleanup(lambda: self.reader.close())

    def blocks(self):
        """All of the engines' blocks, by key."""
        spaces = [space["ns"] for space in ask(self.reader, "namespace.list")["namespaces"] if space["dtype"] != "summary"]
        return {block["key"]: block for ns in spaces for block in listed(self.reader, ns)}

    def with_metadata(self):
        return {key: block for key, block in self.blocks().items() if "tokens" in block}

    def tokens_of(self, request, block):
        return struct.pack(f"<{BLOCK}I", *request.tokens[block * BLOCK : (block + 1) * BLOCK])

    def right(self, request, first=0):
        """Every whole block that the request stored says which tokens it stands for."""
        told = self.with_metadata()
        for i in range(first, (request.prompt_tokens - 1) // BLOCK):
            block = told[request.block_hashes[i]]
            self.assertEqual(block["tokens"], self.tokens_of(request, i))
            self.assertEqual(block["parent"], request.block_hashes[i - 1] if i else b"")

    def test_stored_blocks_say_what_they_stand_for(self):
        e, one, two = self.engine(), Request("one", prompt(1, 90, shared=48), outputs=20), Request("two", prompt(2, 90, shared=48))
        self.check(e, one, two)
        self.eventually(lambda: len(self.with_metadata()) == len(self.blocks()) > 0)
        self.right(one)
        self.right(two)

    def test_hits_bring_metadata_to_a_daemon_that_lacks_it(self):
        e, one = self.engine(), Request("one", prompt(1, 90))
        self.check(e, one)
        self.eventually(lambda: all(block["is"] != 1 or "tokens" in block for block in self.blocks().values()) and self.stats()["nvme_writes"] >= len(self.blocks()))
        directory = self.daemon
        self.reader.close()
        directory.kept = True
        directory.stop()
        self.daemon = daemon(directory=directory.directory, socket=directory.socket, **{"events.memory": "16MiB"})
        self.daemon.kept = False
        self.reader = Client(self.daemon.socket)
        self.assertEqual(self.with_metadata(), {})
        self.eventually(lambda: self.loads(e, one.tokens))
        self.eventually(lambda: len(self.with_metadata()) >= (one.prompt_tokens - 1) // BLOCK)
        self.right(one)

    def test_what_tokens_alone_do_not_stand_for_gets_no_metadata(self):
        e, plain, salted = self.engine(), Request("plain", prompt(1, 60)), Request("salted", prompt(1, 60), salt="s")
        salted.cache_salt = "s"
        self.check(e, salted)
        self.check(e, plain)
        self.eventually(lambda: plain.block_hashes[0] in self.with_metadata())
        self.assertFalse(set(salted.block_hashes) & set(self.with_metadata()))

    def test_vllm_is_handed_what_becomes_of_blocks(self):
        class Make:
            stored = staticmethod(lambda key, medium, block: ("stored", key, medium, len(block.get("tokens", b"")) // 4))
            removed = staticmethod(lambda key, medium: ("removed", key, medium))
        e = self.engine()
        one, two = Request("one", prompt(1, 90)), Request("two", prompt(2, 90))
        self.check(e, one)
        self.eventually(lambda: len(self.with_metadata()) == len(self.blocks()) > 0)
        feed = EventFeed(e.connector._settings, "feed", e.connector._namespace, Make)
        self.addCleanup(feed.close)
        taken = []

        def told(request, number=BLOCK):
            taken.extend(feed.take())
            wanted = request.block_hashes[: (request.prompt_tokens - 1) // BLOCK]
            return all(any(event[:2] == ("stored", key) and event[3] == number for event in taken) for key in wanted)
        self.eventually(lambda: told(one))
        order = [event[1] for event in taken if event[0] == "stored"]
        self.assertLess(order.index(one.block_hashes[0]), order.index(one.block_hashes[1]), "parents come first")
        self.check(e, two)
        self.eventually(lambda: told(two))
        # Another daemon, which has nothing: the events of the first are revoked.
        self.reader.close()
        self.restart(**{"events.memory": "16MiB"})
        self.reader = Client(self.daemon.socket)
        self.eventually(lambda: self.loads(e, two.tokens) or e.connector._scheduler.link.ns is not None)

        def taken_back():
            taken.extend(feed.take())
            last = {event[1]: event for event in taken}
            return all(last[key][0] == "removed" for key in one.block_hashes[: (one.prompt_tokens - 1) // BLOCK])
        self.eventually(taken_back)


    def test_another_daemon_numbers_namespaces_again(self):
        """The events' connection need not notice that, if it had nothing under way."""
        class Make:
            stored = staticmethod(lambda key, medium, block: key)
            removed = staticmethod(lambda key, medium: None)
        e, one, two, taken = self.engine(), Request("one", prompt(1, 90)), Request("two", prompt(2, 90)), []
        self.check(e, one)
        between, go = threading.Event(), threading.Event()
        go.set()

        def held(*args, **more):
            if threading.current_thread().name == "ucm-events" and not go.is_set():
                between.set()
                go.wait()
            return ask(*args, **more)

        def told(request):
            taken.extend(feed.take())
            return set(request.block_hashes[: (request.prompt_tokens - 1) // BLOCK]) <= set(taken)
        with mock.patch("ucmclient.engine.vllm.events.ask", held):
            feed = EventFeed(e.connector._settings, "feed", e.connector._namespace, Make)
            self.addCleanup(feed.close)
            self.addCleanup(go.set)
            self.eventually(lambda: told(one))
            go.clear()
            between.wait(60)
            self.reader.close()
            self.restart(**{"events.memory": "16MiB"})
            self.reader = Client(self.daemon.socket)
            # this daemon's first namespace
            self.reader.namespace(Identity("another", "bf16", "nhd/1", 16, 4096, (1,)))
            self.eventually(lambda: self.loads(e, one.tokens) or e.connector._scheduler.link.ns is not None)
            self.check(e, two)
            self.eventually(lambda: set(two.block_hashes[: (two.prompt_tokens - 1) // BLOCK]) <= set(self.blocks()))
            go.set()
            self.eventually(lambda: told(two))


class Off(Case):
    def test_a_daemon_without_events_is_asked_once(self):
        e = self.engine()
        for i in range(3):
            self.check(e, Request(f"r{i}", prompt(i, 60), outputs=20))
        self.eventually(lambda: e.connector._scheduler.metadata_sender._not_before > 0)
        before = self.stats()["requests_failed"]
        self.check(e, Request("more", prompt(9, 60), outputs=20))
        self.assertEqual(self.stats()["requests_failed"], before)


class Statistics(Case):
    def counted(self, e):
        """Since the last time, of all ranks, as vLLM adds them up."""
        total = UcmStats()
        for rank in e.ranks:
            mine = rank.connector.get_kv_connector_stats()
            if mine is not None:
                total = total.aggregate(rank.connector.build_kv_connector_stats(mine.data))
        return total

    def test_loads_and_stores_are_counted_by_rank(self):
        e, one = self.engine(ranks=2), Request("one", prompt(1, 90))
        self.check(e, one)
        stats = self.counted(e)
        self.assertEqual(stats.data["store_blocks"] % 2, 0)
        self.assertGreaterEqual(stats.data["store_blocks"], 2 * ((one.prompt_tokens - 1) // BLOCK))
        self.assertNotIn("loads", stats.data)
        self.assertTrue(self.loads(e, one.tokens))
        stats = self.counted(e)
        self.assertEqual((stats.data["loads"], stats.data["load_failed_blocks"]), (2, 0))
        self.assertGreater(stats.data["load_seconds"], 0)
        self.assertTrue(self.counted(e).is_empty(), "each is reported once")

    def test_they_are_shown(self):
        class Metric:
            made = {}

            def __init__(self, name, documentation, labelnames):
                self.values, Metric.made[name] = {}, self

            def labels(self, *values):
                one = type("Child", (), {"inc": lambda child, by: self.values.__setitem__(values, self.values.get(values, 0) + by)})
                return one()
        prom = UcmPromMetrics.__new__(UcmPromMetrics)
        prom._counter_cls, prom.per_engine_labelvalues = Metric, {0: ["m", "0"]}
        prom._make(["model", "engine"], {0: ["m", "0"]})
        counts = Counts()
        counts.load(8, 3, 0.0)
        counts.store(4, 1)
        prom.observe(counts.take(), 0)
        prom.observe({"of another version": 1}, 0)
        self.assertEqual(len(Metric.made), len(COUNTED))
        self.assertEqual(Metric.made["vllm:ucm_load_failed_blocks"].values, {("m", "0"): 3})
        self.assertIsNone(counts.take())
        self.assertEqual(UcmStats({"loads": 2, "other": 1}).reduce(), {"loads": 2})


if __name__ == "__main__":
    watch()
    unittest.main()
