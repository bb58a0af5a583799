#!/usr/bin/env python3
"""ucmclient.sparse.Prefetcher over played sequences: its order, its bounds and its counts.
test_sparse_python.py has it over a daemon."""

import os
import random
import sys
import threading
import types
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "client/python"))

from ucmclient import Status, UcmError  # noqa: E402
from ucmclient.region import BlockResult, TaskResult  # noqa: E402
from ucmclient.sparse import Prefetcher  # noqa: E402
from ucmclient.sparse.prefetch import Priority  # noqa: E402

BLOCK = 100


class Task:
    def __init__(self, sequence, n):
        self.sequence, self.n, self.cancelled, self.closed = sequence, n, False, False
        self.answer = None if sequence.held else BlockResult.OK

    def check(self):
        if self.answer is None:
            return None
        if isinstance(self.answer, UcmError):
            raise self.answer
        return TaskResult(self.n * BLOCK, self.n * (self.answer == BlockResult.OK), bytes([self.answer]) * self.n)

    def wait(self, timeout):
        if (result := self.check()) is None:
            raise UcmError(Status.DEADLINE, "not yet")
        return result

    def cancel(self, timeout):
        self.cancelled, self.answer = True, BlockResult.CANCELLED

    def close(self):
        self.closed = True


class BlockSequence:
    """A sequence of five blocks. sent: tasks, and the priority of each. held: tasks don't end by
    themselves."""

    def __init__(self):
        self.client, self.part, self.closed, self.held, self.failure = object(), 0, False, False, None
        self.ns = types.SimpleNamespace(base=types.SimpleNamespace(identity=types.SimpleNamespace(layer_bytes=BLOCK, layers=(1,))))
        self.sent, self.priorities, self.deadlines = [], [], []

    def __len__(self):
        return 5

    def prefetch(self, index, *, priority, daemon_timeout, timeout):
        if self.failure:
            raise self.failure
        self.sent.append(Task(self, len(index)))
        self.priorities.append(priority)
        self.deadlines.append(daemon_timeout)
        return self.sent[-1]


class PrefetcherTest(unittest.TestCase):
    def setUp(self):
        self.sequence = BlockSequence()

    def prefetcher(self, *bounds):
        return Prefetcher(self.sequence.client, *bounds)

    def refused(self, status, call, *words, **more):
        with self.assertRaises(UcmError) as caught:
            call(*words, **more)
        self.assertEqual(caught.exception.status, status)

    def test_what_came_and_the_accounts(self):
        f = self.prefetcher()
        p = f.submit(self.sequence, [0, 2, 3], place=3)
        got = p.wait()
        self.assertEqual((got.n, got.came, got.missing, got.bytes), (3, 3, 0, 300))
        self.assertEqual((self.sequence.priorities, round(self.sequence.deadlines[0])), ([2], 10))
        self.assertEqual(p.check(), got, "again")
        self.assertEqual((f.stats().held_bytes, f.stats().pending), (300, 0))
        p.close(used=2)
        p.close()
        stats = f.stats()
        self.assertEqual((stats.submitted, stats.ended, stats.came, stats.useful, stats.useless, stats.bytes, stats.held_bytes), (1, 1, 3, 2, 1, 300, 0))
        self.refused(Status.INVALID, p.check)

    def test_bytes_hold_one_back_until_one_is_closed(self):
        f = self.prefetcher(0, 0, 5 * BLOCK)
        first, second, small = f.submit(self.sequence, [0, 1, 2]), f.submit(self.sequence, [0, 1, 2]), f.submit(self.sequence, [0], place=9)
        first.wait()
        self.assertIsNone(second.check())
        self.assertIsNone(small.check(), "less urgent, so it waits although it would fit")
        self.refused(Status.DEADLINE, second.wait, 0.01)
        first.close(used=3)
        self.assertEqual((second.wait().came, small.wait().came), (3, 1))

    def test_batches_leave_in_time_or_not_at_all(self):
        f = self.prefetcher(0, 1)
        near, later = f.submit(self.sequence, [0], batch=1), f.submit(self.sequence, [0], batch=3)
        self.assertEqual((near.wait().came, later.check()), (1, None))
        f.advance(2)
        self.assertEqual(later.wait().came, 1)
        later = f.submit(self.sequence, [0, 1, 2], batch=9)
        f.advance(10)
        self.assertEqual(later.check().blocks, bytes([BlockResult.CANCELLED] * 3))
        self.assertEqual(f.stats().late, 1)
        self.refused(Status.INVALID, f.advance, 9)
        self.assertEqual(f.submit(self.sequence, [0], batch=19, daemon_timeout=0.02).wait().missing, 1)
        self.assertEqual(len(self.sequence.sent), 2)

    def test_a_batch_too_far_ahead_holds_nobody_up(self):
        f = self.prefetcher(0, 1)
        far, near = f.submit(self.sequence, [0, 1], batch=2), f.submit(self.sequence, [0], place=30, batch=1)
        self.assertEqual((near.check().came, far.check()), (1, None))
        f.advance(1)
        self.assertEqual([task.n for task in self.sequence.sent], [1, 2])

    def test_what_was_sent_expires_with_the_daemon_only(self):
        f, self.sequence.held = self.prefetcher(0, 1), True
        sent, waits = f.submit(self.sequence, [0], daemon_timeout=0.01), f.submit(self.sequence, [0], batch=2, daemon_timeout=0.01)
        self.assertEqual(waits.wait().missing, 1)
        f.advance(9)
        self.assertEqual((sent.check(), f.stats().late, f.stats().pending), (None, 1, 1))
        self.sequence.sent[0].answer = BlockResult.OK
        self.assertEqual(sent.check().came, 1)

    def test_places_have_priorities(self):
        for place, priority in ((0, Priority.URGENT), (1, Priority.HIGH), (4, Priority.HIGH), (5, Priority.NORMAL), (16, Priority.NORMAL),
                                (17, Priority.LOW), (1 << 40, Priority.LOW)):
            self.assertEqual(Priority.of(place), priority, place)

    def test_of_one_priority_the_oldest_goes_first_and_the_newest_makes_way(self):
        f, self.sequence.held = self.prefetcher(4, 1), True
        waits = [f.submit(self.sequence, range(n), place=place, batch=2) for n, place in ((1, 30), (2, 3), (3, 40), (4, 4))]
        urgent = f.submit(self.sequence, range(5), batch=2)
        self.assertEqual([p.check() is None for p in waits], [True, True, False, True], "the newest of the least urgent")
        f.advance(1)
        self.assertEqual([task.n for task in self.sequence.sent], [5, 2, 4, 1])
        self.assertIsNone(urgent.check())

    def test_the_most_urgent_first_and_moves(self):
        f = self.prefetcher(0, 1)
        low, high, moved = (f.submit(self.sequence, [0], place=place, batch=4) for place in (30, 3, 30))
        moved.move(0)
        low.move(4)
        f.advance(3)
        self.assertEqual(self.sequence.priorities, [3, 2, 2])
        self.assertEqual([p.wait().came for p in (low, high, moved)], [1, 1, 1])
        low.move(0)  # it was sent: no effect

    def test_a_full_queue_lets_the_urgent_in(self):
        f, self.sequence.held = self.prefetcher(2, 0, 3 * BLOCK), True
        sent, guess = f.submit(self.sequence, [0, 1, 2]), f.submit(self.sequence, [0, 1, 2], place=20)
        self.refused(Status.BUSY, f.submit, self.sequence, [0], place=30)
        urgent = f.submit(self.sequence, [0, 1, 2])
        self.assertEqual(guess.check().came, 0)
        self.assertEqual((f.stats().displaced, f.stats().pending), (1, 2))
        self.refused(Status.BUSY, f.submit, self.sequence, [0], place=0)
        self.sequence.sent[0].answer, self.sequence.held = BlockResult.MISS, False
        self.assertEqual(sent.wait().missing, 3)
        sent.close()
        self.assertEqual(urgent.wait().came, 3)

    def test_cancel_and_close_before_the_end(self):
        f, self.sequence.held = self.prefetcher(0, 1), True
        waits, sent, closed = f.submit(self.sequence, [0], batch=9), f.submit(self.sequence, [0]), f.submit(self.sequence, [0])
        for p in (waits, sent):
            p.cancel()
            self.assertEqual(p.wait().missing, 1)
            p.cancel()
        closed.close(used=7)
        self.assertEqual([task.cancelled for task in self.sequence.sent], [True, False])
        self.assertTrue(self.sequence.sent[1].closed)
        stats = f.stats()
        self.assertEqual((stats.pending, stats.ended, stats.held_bytes), (0, 3, BLOCK))
        f.submit(self.sequence, [0], batch=9)
        f.close()
        self.assertEqual((f.stats().pending, f.stats().held_bytes), (0, 0))
        self.refused(Status.INVALID, f.submit, self.sequence, [0])

    def test_failures(self):
        f, self.sequence.held = self.prefetcher(0, 1), True
        sent, waits = f.submit(self.sequence, [0]), f.submit(self.sequence, [0], batch=4)
        self.sequence.sent[0].answer = self.sequence.failure = UcmError(Status.DISCONNECTED, "gone")
        self.refused(Status.DISCONNECTED, sent.wait)
        self.refused(Status.DISCONNECTED, f.submit, self.sequence, [0])
        f.advance(4)
        self.refused(Status.DISCONNECTED, waits.check)
        self.sequence.failure = UcmError(Status.DEADLINE, "no room in the socket")
        again = f.submit(self.sequence, [0], batch=4)
        self.assertIsNone(again.check())
        self.sequence.failure, self.sequence.held = None, False
        self.assertEqual(again.wait().came, 1)
        last = f.submit(self.sequence, [0], batch=9)
        self.sequence.closed = True
        f.advance(9)
        self.assertEqual(last.wait().missing, 1)

    def test_wrong_prefetches(self):
        f = self.prefetcher(0, 0, 2 * BLOCK)
        for index in ([], [5], [0, 1, 2]):
            self.refused(Status.INVALID, f.submit, self.sequence, index)
        self.refused(Status.INVALID, f.submit, BlockSequence(), [0])
        self.refused(Status.INVALID, self.prefetcher, 65)

    def test_bounds_hold_whatever_threads_call(self):
        f, wrong = self.prefetcher(8, 2, 9 * BLOCK), []

        def work(seed):
            draw = random.Random(seed)
            for i in range(300):
                try:
                    p = f.submit(self.sequence, range(1 + i % 3), place=draw.randrange(20), batch=draw.randrange(4), daemon_timeout=0.001 * draw.randrange(1, 30))
                    draw.choice((p.cancel, p.check, lambda p=p: p.move(draw.randrange(20)), lambda p=p: p.wait(0.05)))()
                    p.close(used=1)
                except UcmError as error:
                    if error.status not in (Status.BUSY, Status.DEADLINE):
                        wrong.append(error)
                    elif error.status == Status.DEADLINE:
                        p.close()
                stats = f.stats()
                if stats.pending > 8 or stats.held_bytes > 9 * BLOCK:
                    wrong.append(stats)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = f.stats()
        self.assertEqual((wrong, stats.pending, stats.held_bytes, stats.ended), ([], 0, 0, stats.submitted))
        self.assertEqual(stats.useful + stats.useless, stats.came)


if __name__ == "__main__":
    unittest.main()
