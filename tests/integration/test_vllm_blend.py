#!/usr/bin/python3
"""Chunks in the small engine of tests/engines/vllm: reused at any position, alongside prefix hits, in steps, with preemptions, across a restart of
the daemon."""

import shutil
import tempfile
import unittest

from vllm_case import MODEL, expected, prompt
from engine import BLOCK
from daemon import Daemon

import numpy

from blend_engine import BlendEngine, BlendRequest
from ucmclient import Client, blend
from ucmclient.blend import First, Hkvd, Nothing, Span

A, C = prompt(1, 50), prompt(2, 80)  # 3 and 5 whole blocks
SYSTEM, QUESTION = prompt(3, 32), prompt(4, 9)
MIXED = SYSTEM + A + prompt(5, 14) + C + prompt(6, 16) + A + QUESTION  # A at two positions
SPANS = [Span(32, 82), Span(96, 176), Span(192, 242)]


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="blend.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.daemon = Daemon(directory=self.directory)
        self.addCleanup(lambda: self.daemon.stop())
        self.client = Client(socket=self.daemon.socket, name="mini")
        first = self.engine()
        for chunk in (A, C):
            self.assertTrue(first.store(chunk).all_ok)
        first.close()

    def engine(self, **options):
        return BlendEngine(MODEL, self.client, **{"budget": 512, **options})

    def run_all(self, engine, *requests):
        for request in requests:
            engine.add(request)
        while engine.requests:
            engine.step()
            self.assertLess(engine.steps, 2000)
        self.assertTrue(engine.pool.idle())
        return [request.logits for request in requests]

    def alone(self, *request, **options):
        engine = self.engine(**options)
        logits, = self.run_all(engine, BlendRequest("alone", *request))
        engine.close()
        return logits, engine

    def same(self, logits, other):
        self.assertEqual(len(logits), len(other))
        for a, b in zip(logits, other):
            numpy.testing.assert_array_equal(a, b)

    def test_what_is_computed_in_full_is_the_model_bit_for_bit(self):
        for spans, policy in (([], Nothing()), (SPANS, First(80)), (SPANS, Hkvd(1.0))):
            logits, engine = self.alone(MIXED, spans, policy)
            self.same(logits, expected(MIXED, 8))

    def test_reuse_computes_less_and_is_near(self):
        right, off = expected(MIXED, 8)[0], {}
        for name, policy in (("none", Nothing()), ("first", First(16)), ("hkvd", Hkvd(0.5))):
            logits, engine = self.alone(MIXED, SPANS, policy)
            off[name] = float(numpy.abs(logits[0] - right).max())
            self.assertLess(engine.computed, 3 * len(MIXED))
        self.assertEqual(engine.shifted, 11)
        self.assertGreater(off["none"], 0)
        self.assertLess(off["hkvd"], off["none"])

    def test_steps_and_preemptions_change_no_bit(self):
        for policy in (Nothing(), First(5), First(16)):
            once, _ = self.alone(MIXED, SPANS, policy)
            for budget in (7, 16, 33):
                self.same(self.alone(MIXED, SPANS, policy, budget=budget)[0], once)
            # Two requests that don't fit side by side.
            engine = self.engine(budget=40, blocks=30)
            other = C + QUESTION + A + prompt(7, 60)
            spans = [Span(0, 80), Span(len(C + QUESTION) + 7, len(C + QUESTION) + 50)]
            first, second = BlendRequest("first", MIXED, SPANS, policy, outputs=40), BlendRequest("second", other, spans[:1], policy, outputs=40)
            logits = self.run_all(engine, first, second)
            self.assertGreater(engine.preemptions, 0)
            self.same(logits[0][:8], once)
            self.same(logits[1][:8], expected(other, 8))  # its chunk is its beginning: exact
            engine.close()

    def test_blended_blocks_are_nobodys_prefix(self):
        engine = self.engine(blocks=128)
        blended, = self.run_all(engine, BlendRequest("blended", MIXED, SPANS, Nothing()))
        full, = self.run_all(engine, BlendRequest("full", MIXED))
        self.same(full, expected(MIXED, 8))
        # Now all of it is cached, exactly: a prefix hit goes before chunks.
        shifted = engine.shifted
        again, = self.run_all(engine, BlendRequest("again", MIXED, SPANS, Nothing()))
        self.same(again, full)
        self.assertEqual(engine.shifted, shifted)
        # Another question comes after the first 5 blocks. The chunk in them is exact; the others
        # are re-rotated.
        tail = MIXED[:80] + prompt(9, 16) + MIXED[96:]
        self.run_all(engine, BlendRequest("tail", tail, SPANS, Nothing()))
        self.assertEqual(engine.shifted, shifted + 5 + 3)
        engine.close()

    def test_across_a_restart_of_the_daemon(self):
        before, _ = self.alone(MIXED, SPANS, First(5))
        self.client.close()
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory)
        self.client = Client(socket=self.daemon.socket, name="mini")
        after, engine = self.alone(MIXED, SPANS, First(5))
        self.assertEqual(engine.shifted, 11)
        self.same(before, after)

    def test_a_restart_in_the_middle_registers_the_pages_again(self):
        engine = self.engine(budget=40)
        request = BlendRequest("middle", MIXED, SPANS, First(5))
        engine.add(request)
        engine.step()
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory)
        request.lease = 0  # leases end with the daemon
        while engine.requests:
            engine.step()
        self.same(request.logits, self.alone(MIXED, SPANS, First(5))[0])
        engine.close()

    def test_blocks_that_are_gone_are_computed(self):
        engine = self.engine()
        request = BlendRequest("gone", MIXED, [SPANS[1]], Nothing())
        lookup = engine.chunks.lookup

        def loses(*args, **more):
            found = lookup(*args, **{**more, "lease": 0})
            # Blocks that are being written to NVMe go a moment later.
            self.daemon.until(lambda: engine.chunks._ns.evict()[1] == 0, "keeps blocks")
            return found

        engine.chunks.lookup = loses
        logits, = self.run_all(engine, request)
        self.assertEqual(engine.shifted, 0)
        self.same(logits, expected(MIXED, 8))
        engine.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
