#!/usr/bin/python3
"""A thread brings what a hit without pages waits for. The engine's thread never waits, and the
request goes on when all blocks that will come are there. No daemon."""

import threading
import unittest
from types import SimpleNamespace

from vllm_paths import TOP  # noqa: F401  sets the paths of the others

from ucmclient.engine.vllm import sparse_ahead
from ucmclient.engine.vllm.sparse_ahead import Ahead


class BlockSequence:
    made = []

    def __init__(self, summaries, part, timeout):
        self.client, self.keys, self.closed = summaries.client, b"", False
        BlockSequence.made.append(self)

    def append(self, keys, **_):
        self.keys += keys
        return SimpleNamespace(missing=0)

    def close(self):
        self.closed = True


class Daemon:
    """It has room for so many blocks in its mapping. A reference brings `each` of them, when `go`
    is set."""

    away = False

    def __init__(self, room=10**6, each=10**6):
        self.summaries = SimpleNamespace(client=SimpleNamespace(connection_epoch=3), identity=SimpleNamespace(key_bytes=1))
        self.room, self.each, self.go, self.there, self.refs = room, each, threading.Event(), {}, 0

    def ask(self, call, *args, **named):
        return call(*args, **named)

    def ref(self, sequence, first, n, wait):
        if not self.go.wait(60):
            raise AssertionError("a thread that nobody waits for, and that nobody ends")
        self.refs += 1
        there = self.there.setdefault(sequence, set())
        coming = [i for i in range(first, first + n) if i not in there][: max(0, min(self.each, self.room - len(there)))]
        there.update(coming)
        return SimpleNamespace(placed=len(there.intersection(range(first, first + n))), missing=0)


class Thread(unittest.TestCase):
    def setUp(self):
        BlockSequence.made = []
        real, sparse_ahead.BlockSequence = sparse_ahead.BlockSequence, BlockSequence
        self.addCleanup(setattr, sparse_ahead, "BlockSequence", real)

    def ahead(self, daemon, deadline=1e6):
        self.daemon = daemon
        ahead = Ahead(daemon, daemon.ref, 0, deadline)
        self.addCleanup(ahead.end)
        self.addCleanup(daemon.go.set)
        return ahead

    def until(self, ahead, wanted, names=frozenset()):
        got = ahead.arrived(set(names))
        while not wanted <= got:
            threading.Event().wait(0.001)
            got |= ahead.arrived(set())
        self.assertEqual(got, wanted)

    def test_a_load_is_reported_when_the_mapping_has_its_blocks(self):
        ahead = self.ahead(Daemon(each=700))
        ahead.begin("a", bytes(3000))
        self.assertEqual(ahead.arrived({"a", "dense"}), {"dense"}, "others go on meanwhile")
        self.assertEqual(ahead.arrived(set()), set())
        self.daemon.go.set()
        self.until(ahead, {"a"})
        sequence, connection_epoch = ahead.take("a")
        self.assertEqual((len(self.daemon.there[sequence]), connection_epoch, sequence.closed), (3000, 3, False))
        self.assertIsNone(ahead.take("a"))

    def test_a_mapping_that_is_too_small_keeps_nobody(self):
        ahead = self.ahead(Daemon(room=100))
        self.daemon.go.set()
        ahead.begin("a", bytes(3000))
        self.until(ahead, {"a"}, {"a"})
        self.assertEqual(len(self.daemon.there[ahead.take("a")[0]]), 100)

    def test_blocks_that_come_slowly_are_waited_for(self):
        """Longer than for the sequence, as only the request waits. Steps would miss blocks that
        have not come."""
        ahead = self.ahead(Daemon(each=100), deadline=0)
        self.daemon.go.set()
        ahead.begin("a", bytes(3000))
        self.until(ahead, {"a"}, {"a"})
        self.assertEqual(len(self.daemon.there[ahead.take("a")[0]]), 3000)

    def test_no_daemon_keeps_nobody(self):
        ahead = self.ahead(Daemon())
        self.daemon.summaries = None
        ahead.begin("a", bytes(10))
        self.until(ahead, {"a"}, {"a"})
        self.assertIsNone(ahead.take("a"))

    def test_a_mistake_keeps_nobody(self):
        ahead = self.ahead(Daemon())
        BlockSequence.append, append = None, BlockSequence.append
        self.addCleanup(setattr, BlockSequence, "append", append)
        with self.assertLogs("ucmclient.engine.vllm"):
            ahead.begin("a", bytes(10))
            self.until(ahead, {"a"}, {"a"})
        self.assertEqual([sequence.closed for sequence in BlockSequence.made], [True])

    def test_a_mistake_after_the_sequence_keeps_no_block(self):
        """A sequence that stayed open would keep its blocks in the daemon: evicted or purged, they could not be stored again."""
        daemon = Daemon()
        daemon.ref = None
        ahead = self.ahead(daemon)
        with self.assertLogs("ucmclient.engine.vllm"):
            ahead.begin("a", bytes(10))
            self.until(ahead, {"a"}, {"a"})
        self.assertEqual([sequence.closed for sequence in BlockSequence.made], [True])
        self.assertIsNone(ahead.take("a"))

    def test_one_that_ends_meanwhile(self):
        ahead = self.ahead(Daemon())
        ahead.begin("a", bytes(10))
        while not BlockSequence.made:
            threading.Event().wait(0.001)
        ahead.drop("a")
        self.until(ahead, {"a"}, {"a"})
        ahead.begin("b", bytes(10))
        self.daemon.go.set()
        self.until(ahead, {"b"}, {"b"})
        self.assertEqual([sequence.closed for sequence in BlockSequence.made], [True, False])
        ahead.end()
        self.assertEqual([sequence.closed for sequence in BlockSequence.made], [True, True])


if __name__ == "__main__":
    unittest.main(verbosity=2)
