#!/usr/bin/python3
"""The vLLM connector when things go wrong: preemption, eviction, late loads, aborts, a daemon that stalls, is killed or
reads damaged blocks. Outputs are the same bit for bit as without a cache."""

import itertools
import os
import shutil
import signal
import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, Case, Request, daemon, engine, finish, prompt, watch  # sets the paths
from daemon import halt
from ucmclient.client import Task
from ucmclient.errors import Status, UcmError
from ucmclient.region import Region
from ucmclient.engine.vllm import connector, link as link_module, worker
from ucmclient.engine.vllm.worker import WorkerHalf


class Trouble(Case):
    """Things go wrong; outputs never do."""

    ROUND = 8  # requests whose blocks are more than 1 MiB

    def test_a_reset_while_blocks_are_stored(self):
        """The engine resets its cache although a store still reads pages of a finished request. It
        may give them to others at once. The store ends, or is stopped, before anything is written
        to them."""
        for more in ({}, {"ranks": 2}, {"async_load": False}, {"layout": "packed", "layer_stores": 16}):
            with self.subTest(**more):
                e, first = self.engine(blocks=16, salt=str(more), **more), Request("first", prompt(41, 150), 1)
                with mock.patch.object(Task, "check", return_value=None), mock.patch.object(worker, "_STOP", 0.05):
                    finish(e, first)
                    self.assertGreater(e.pool.held, 0)
                    self.assertTrue(e.reset_prefix_cache())
                    self.assertEqual(e.pool.held, 0)
                    second = Request("second", prompt(42, 200), 2)
                    finish(e, second)
                    self.assertTrue(e.reset_prefix_cache())
                self.same({"first": first, "second": second})
                b = self.engine(salt=str(more), **more)
                self.check(b, Request("first again", prompt(41, 150)), Request("second again", prompt(42, 200)))

    def test_a_reset_that_the_engine_refuses(self):
        """The engine refuses because requests run. Stores go on."""
        e, first, second = self.engine(), Request("first", prompt(46, 150), 1), Request("second", prompt(47, 40), 20)
        with mock.patch.object(Task, "check", return_value=None):
            e.add(second)
            finish(e, first)
            held = e.pool.held
            self.assertGreater(held, 0)
            self.assertFalse(e.pool.reset_prefix_cache())
            self.assertEqual(e.pool.held, held)
        self.check(e)
        self.same({"first": first, "second": second})
        b = self.engine()
        self.check(b, Request("another", prompt(46, 150)))
        self.assertEqual(b.loaded_tokens, 144)

    def test_blocks_stay_that_were_being_stored_when_the_weights_changed(self):
        e, request = self.engine(), Request("r", prompt(45, 150), 4)
        with mock.patch.object(Task, "check", return_value=None):
            e.add(request)
            while not e.ranks[0].being_read():
                e.step()
            e.connector.reset_cache()
            while request.status != "finished":
                e.step()
            self.assertLessEqual(len(e.ranks[0].being_read()), e.pool.held)
        self.check(e)
        self.same({"r": request})

    def test_a_reset_loses_nothing_that_is_stored_in_time(self):
        """As between rounds of a benchmark."""
        e, tokens = self.engine(), prompt(43, 150)
        for name, loaded in (("cold", 0), ("warm", 144)):
            request, before = Request(name, tokens, 1), e.loaded_tokens
            finish(e, request)
            self.assertTrue(e.reset_prefix_cache())
            self.check(e, Request(f"between {name}", prompt(44 + loaded, 20)))
            self.assertEqual(e.loaded_tokens - before, loaded)

    def test_preemption(self):
        tight = self.engine(blocks=24)
        requests = [Request(f"r{i}", prompt(30 + i, 90), outputs=70) for i in range(4)]
        self.check(tight, *requests)
        self.assertGreater(tight.preemptions, 0)
        self.assertGreater(tight.loaded_tokens, 0)

    def test_preemption_of_ranks_with_loads_in_the_step(self):
        tight = self.engine(blocks=24, ranks=2, async_load=False)
        self.check(tight, *(Request(f"r{i}", prompt(30 + i, 90), outputs=70) for i in range(4)))
        self.assertGreater(tight.preemptions, 0)

    def test_reset_while_requests_run(self):
        for settings_ in ({}, {"async_load": False}):
            e, b = self.engine(**settings_), self.engine()
            resets = []

            def between(e):
                if len(resets) < 6 and len(e.pool.requests) == len(e.running) > 0 and e.steps % 5 == 4:
                    resets.append(e.reset_prefix_cache())
            requests = [Request(f"r{i}", prompt(120 + i, 90), outputs=20) for i in range(3)]
            self.check(e, *requests, between=between)
            self.assertGreater(len(resets), 2)
            self.check(b, *(Request(r.request_id, r.tokens) for r in requests))
            self.assertGreater(b.loaded_tokens, 0)

    def test_the_daemon_evicts(self):
        self.daemon.stop()
        self.daemon = daemon(nvme=False, **{"arena.size": "1MiB", "arena.slab": "1MiB"})
        a, b = self.engine(blocks=128), self.engine(blocks=128)
        for e in (a, b, a, b):
            e.pool = engine.Pool(e.blocks)
            self.check(e, *(Request(f"r{i}", prompt(40 + i, 112, shared=16), outputs=2) for i in range(self.ROUND)))
        self.assertGreater(b.loaded_tokens, 0)
        self.assertGreater(self.stats()["arena_evicted_blocks"], 0)

    def paused(self, pid, seconds):
        halt(pid)
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()

    def test_late_loads_hold_nobody_else_up(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(50, 150)
        self.check(a, Request("cold", tokens))
        late = {}

        def between(e):
            r = e.requests.get("late")
            if r and r.status == "loading" and not late:
                late["steps"] = e.steps
                self.paused(self.daemon.process.pid, 0.4)
                e.add(Request("quick", prompt(51, 12), outputs=30))
            if r and r.status == "running" and "after" not in late:
                late["after"] = e.steps
        # The pause begins after the load's request, so what is left of the load comes late.
        self.check(b, Request("late", tokens), between=between)
        self.assertIn("steps", late)

    def test_a_step_waits_for_a_daemon_that_is_stopped(self):
        """Until the daemon runs again, it may be in the middle of a copy into blocks that the step
        computes."""
        a, b, tokens, order = self.engine(), self.engine(async_load=False, transfer_timeout=1.0), prompt(57, 150), []
        self.check(a, Request("cold", tokens))
        load, drop, give_up, pid = Region.load, link_module.Link._drop, WorkerHalf._give_up, self.daemon.process.pid

        def stopped(*args, **more):
            if not order:
                halt(pid)
            return load(*args, **more)

        def go_on():
            order.append("runs")
            os.kill(pid, signal.SIGCONT)

        def dropped(link):
            drop(link)
            if not order:
                order.append("cut")
                threading.Timer(0.3, go_on).start()

        def given_back(*args):
            give_up(*args)
            order.append("given back")
        with mock.patch.object(Region, "load", stopped), mock.patch.object(link_module.Link, "_drop", dropped), \
                mock.patch.object(WorkerHalf, "_give_up", given_back):
            self.check(b, Request("late", tokens))
        self.assertEqual(order[:3], ["cut", "runs", "given back"])

    def test_a_connection_that_is_cut_as_soon_as_it_is_there(self):
        link = self.engine(ranks=1).ranks[0].connector._worker.link
        found, go_on = threading.Event(), threading.Event()

        def held(text, *_):
            if text == "ucmd is there":
                found.set()
                go_on.wait(10)
        with mock.patch.object(link_module.logger, "info", held):
            link.cut()
            self.assertTrue(found.wait(10))
            link.cut()
            go_on.set()
            self.eventually(lambda: link.region is not None)

    def test_a_daemon_that_is_busy_at_the_start(self):
        register, busy = WorkerHalf._register, 3

        def late(*args):
            nonlocal busy
            busy -= 1
            if busy >= 0:
                raise UcmError(Status.BUSY, "the GPUs are starting")
            return register(*args)
        with mock.patch.object(WorkerHalf, "_register", late):
            e = self.engine(ranks=1, required=True)
            self.assertIsNotNone(e.ranks[0].connector._worker.link.region)
            busy = 1000
            with self.assertRaises(UcmError) as caught:
                self.engine(ranks=1, required=True, connect_timeout=0.3)
            self.assertEqual(caught.exception.status, Status.BUSY)

    def test_a_daemon_that_stops_answering(self):
        e = self.engine(lookup_timeout=0.02)
        self.check(e, Request("before", prompt(52, 60)))
        halt(self.daemon.process.pid)
        try:
            began = time.monotonic()
            e.add(Request("meanwhile", prompt(53, 60), outputs=6))
            while e.requests.get("meanwhile", SimpleNamespace(status="finished")).status != "finished":
                e.step()
                if time.monotonic() - began > 60:
                    break
            self.assertEqual(e.requests.get("meanwhile", SimpleNamespace(status="finished")).status, "finished")
        finally:
            os.kill(self.daemon.process.pid, signal.SIGCONT)
        self.check(e, Request("after", prompt(54, 60)))

    def test_killed_in_mid_load_and_started_again(self):
        a, b = self.engine(), self.engine(lookup_timeout=0.05)
        tokens = prompt(60, 200)
        self.check(a, Request("cold", tokens))
        killed = []

        def between(e):
            if not killed and any(r.status == "loading" for r in e.requests.values()):
                killed.append(self.daemon.process.kill())

        e = b
        self.check(e, Request("r0", tokens), Request("r1", prompt(61, 80)), between=between)
        self.assertTrue(killed)
        self.check(e, Request("without", prompt(62, 80)))
        self.restart()
        self.connected(e)
        e.pool = engine.Pool(e.blocks)
        again = prompt(63, 100)
        self.check(e, Request("stored again", again))
        e.pool = engine.Pool(e.blocks)
        self.eventually(lambda: self.loads(e, again))

    def test_killed_again_and_again(self):
        e, steps = self.engine(blocks=40, lookup_timeout=0.05), itertools.count(1)
        requests = [Request(f"r{i}", prompt(70 + i % 4, 100 + i, shared=64), outputs=10) for i in range(24)]

        def between(e):
            if next(steps) % 12 == 0:
                self.restart()

        self.check(e, *requests, between=between)
        self.assertGreater(next(steps), 4 * 12)

    def test_an_engine_that_starts_before_the_daemon(self):
        socket = self.daemon.socket
        self.daemon.stop()
        e = self.engine(socket=socket, connect_timeout=0.2)
        self.check(e, Request("alone", prompt(80, 60)))
        os.makedirs(os.path.dirname(socket), exist_ok=True)
        self.addCleanup(shutil.rmtree, os.path.dirname(socket), ignore_errors=True)
        self.daemon = daemon(socket=socket, nvme=False)
        tokens = prompt(81, 60)
        self.eventually(lambda: self.loads(e, tokens))
        with self.assertRaises(Exception):
            self.engine(socket=socket + ".not", required=True, connect_timeout=0.2)

    def started_again(self, between=lambda store: None):
        """An orderly stop, and another daemon over what the first one stored."""
        store = self.daemon.store
        self.addCleanup(shutil.rmtree, self.daemon.directory, ignore_errors=True)
        self.daemon.process.terminate()
        self.assertEqual(self.daemon.process.wait(), 0)
        between(store)
        self.daemon = daemon(nvme=False, **{"nvme.paths": store, "nvme.size": "256MiB", "nvme.segment": "4MiB"})
        self.addCleanup(self.daemon.stop)  # ahead of the removal of its store
        self.eventually(lambda: self.stats()["nvme_recovering"] == 0)

    def corrupted(self, asynchronous, ranks=1):
        a = self.engine(ranks=ranks)
        tokens = prompt(90, 200)
        self.check(a, Request("cold", tokens))
        payloads = [a.ranks[0].read(0, [b])[0].tobytes()[:256] for b in sorted(a.pool.hash_of)]
        a.close()
        self.eventually(lambda: self.stats()["nvme_writes"] >= 200 // BLOCK * ranks)
        self.started_again(lambda store: self.corrupt(os.path.join(store, "ucmd.cache"), payloads[5:]))
        e, other = self.engine(async_load=asynchronous, ranks=ranks), self.engine(ranks=ranks)
        longer = tokens + prompt(91, 90)
        self.check(e, Request("warm", longer), Request("beside", tokens + prompt(92, 40)))
        self.assertGreater(e.recomputed, 0)
        self.assertGreater(self.stats()["nvme_corrupt"], 0)
        # Nobody gets KV that was computed with missing blocks.
        self.check(other, Request("later", longer), Request("beside", tokens + prompt(92, 40)))
        self.assertGreater(other.loaded_tokens, 5 * BLOCK)

    def test_a_corrupt_block_is_computed(self):
        self.corrupted(True)

    def test_a_corrupt_block_is_computed_within_the_step(self):
        self.corrupted(False)

    def test_a_corrupt_block_of_one_rank_is_computed_within_the_step(self):
        self.corrupted(False, ranks=2)

    def test_loads_within_the_step_are_given_up(self):
        for layerwise in (False, True):
            a, b = self.engine(), self.engine(async_load=False, layerwise=layerwise, transfer_timeout=0.2)
            tokens = prompt(93 + layerwise, 150)
            self.check(a, Request("cold", tokens))
            pid, start = self.daemon.process.pid, b.ranks[0].connector.start_load_kv

            def stopped(context):
                if b.steps < 50 and b.ranks[0].connector._plan().loads:
                    halt(pid)
                start(context)
            b.ranks[0].connector.start_load_kv = stopped
            began = time.monotonic()
            b.add(Request("warm", tokens, outputs=1))
            while "warm" in b.requests and b.requests["warm"].status != "finished" and time.monotonic() - began < 60:
                b.step()
            os.kill(pid, signal.SIGCONT)
            self.assertLess(time.monotonic() - began, 60)
            self.check(b)

    def test_slow_disks_are_not_waited_for(self):
        a = self.engine()
        tokens = [prompt(130 + i, 300) for i in range(3)]
        for i, t in enumerate(tokens):
            self.check(a, Request(f"cold{i}", t, outputs=1))
        a.close()
        self.eventually(lambda: self.stats()["nvme_writes"] >= 3 * (300 // BLOCK))
        self.started_again()
        e = self.engine(prefill_rate=1e9)
        loaded = []
        for i in (0, 0, 1, 1):
            e.pool = engine.Pool(e.blocks)
            before = e.loaded_tokens
            self.check(e, Request(f"warm{len(loaded)}", tokens[i], outputs=1))
            loaded.append(e.loaded_tokens - before > 0)
            if i == 1:
                self.eventually(lambda: self.stats()["prefetch_blocks"] >= 300 // BLOCK)
        if hasattr(connector._base, "CacheHitSource"):  # older ones don't ask
            request = Request("shown", tokens[1], outputs=1)
            e.connector._scheduler._tracked(request).slow = 96
            shown = e.connector.get_external_cache_hit_sources(request, 288)
            self.assertEqual({tier.name: n for tier, n in shown.items()}, {"HOST": 192, "DISK": 96})
        # First measured; then in DRAM; then not worth it, but prefetched meanwhile; so at last it
        # is there.
        self.assertEqual(loaded, [True, True, False, True])

    def corrupt(self, path, payloads):
        """One bit of each of these."""
        with open(path, "r+b") as f:
            data = f.read(16 << 20)
            for payload in payloads:
                at = data.index(payload)
                f.seek(at + 100)
                f.write(bytes([data[at + 100] ^ 4]))

    def test_aborts_at_every_point(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(100, 150)
        self.check(a, Request("cold", tokens))
        for steps in range(6):
            b.pool = engine.Pool(b.blocks)
            b.add(Request(f"gone{steps}", tokens, outputs=4))
            for _ in range(steps):
                b.step()
            if f"gone{steps}" in b.requests and b.requests[f"gone{steps}"].status != "finished":
                b.abort(f"gone{steps}")
            self.check(b, Request(f"stays{steps}", prompt(101 + steps, 40)), but=(f"gone{steps}",))


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
