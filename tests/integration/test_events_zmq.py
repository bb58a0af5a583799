#!/usr/bin/python3
"""ucmevents between a real daemon and subscribers: what it publishes when, in vLLM's format. tests/engines/routers has routers themselves."""

import os
import signal
import subprocess
import unittest

from daemon import halt
from second_client import DEMO, OK, TIMEOUT_S, TOP, Case, Daemon, OwnDaemons, Region, keys, u32
import msgpack

try:
    import zmq
except ImportError:
    zmq = None

UCMEVENTS = os.environ.get("UCMEVENTS", os.path.join(TOP, "build/ucmevents"))


def number(key):
    """As vLLM derives it from a hash."""
    return int.from_bytes(key, "big") & ((1 << 64) - 1)


def tokens(name):
    return list(range(100 * name, 100 * name + 16))


@unittest.skipUnless(zmq and os.path.exists(UCMEVENTS), "needs python3-zmq and a build with libzmq3-dev")
class Publisher(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.context = zmq.Context()
        self.addCleanup(self.context.destroy, 0)
        self.start()
        self.worker_of(self.id())

    def start(self, **more):
        self.daemon = Daemon(directory=self.directory, **{"events.memory": "4MiB"}, **more)
        self.addCleanup(self.daemon.stop)

    def worker_of(self, model):
        self.engine = self.client()
        self.ns = self.engine.open(dict(DEMO, model=model))
        self.region = Region(self.engine, self.ns, DEMO, 16)

    def endpoint(self, name):
        return f"ipc://{self.directory}/{name}"

    def publish(self, *words):
        argv = [UCMEVENTS, "publish", "--socket", self.daemon.socket, "--endpoint", self.endpoint("pub"), "--replay", self.endpoint("replay")]
        process = subprocess.Popen([*argv, *words], stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.addCleanup(process.stderr.close)
        return process

    def subscribe(self, topic=""):
        socket = self.context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVTIMEO, 1000 * TIMEOUT_S)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.addCleanup(socket.close, 0)
        socket.connect(self.endpoint("pub"))
        return socket

    def events(self, socket):
        """As they come; the numbers of their batches have no gap."""
        last = None
        while True:
            topic, at, payload = socket.recv_multipart()
            at = int.from_bytes(at, "big")
            self.assertIn(last, (None, at - 1))
            last, (_, some, rank) = at, msgpack.unpackb(payload)
            self.assertEqual(rank, 0)
            for event in some:
                yield dict(event, topic=topic.decode()) if isinstance(event, dict) else event

    def expect(self, events, *wanted):
        """These events come in this order. Between them, a new subscription may tell all blocks
        again."""
        for event in wanted:
            while (got := next(events)) != event:
                self.assertEqual(got["type"] if isinstance(got, dict) else got[0], "BlockStored", f"{got} before {event}")

    def joined(self, *words):
        """Events of a subscriber that is there, and has been told of block 0."""
        self.store(0)
        events = self.events(self.subscribe())
        self.process = self.publish("--topic", "kv@here@{model}", *words)
        while self.stored(0) != next(events):
            pass
        return events

    def store(self, *names, parent=None):
        """Blocks of one sequence, with metadata, dumped."""
        more = {"parent": keys(parent)} if parent is not None else {}
        self.engine.call("events.metadata", ns=self.ns, keys=keys(*names), tokens=b"".join(u32(*tokens(name)) for name in names), **more)
        self.assertEqual(set(self.region.dump(names, range(len(names)))), {OK})

    def stored(self, *names, parent=None, medium="CPU"):
        return {"type": "BlockStored", "block_hashes": [number(keys(name)) for name in names],
                "parent_block_hash": None if parent is None else number(keys(parent)),
                "token_ids": [token for name in names for token in tokens(name)], "block_size": 16, "lora_id": None,
                "medium": medium, "lora_name": None, "topic": "kv@here@" + self.id()}

    def removed(self, name, medium):
        return {"type": "BlockRemoved", "block_hashes": [number(keys(name))], "medium": medium, "topic": "kv@here@" + self.id()}

    def cleared(self):
        return {"type": "AllBlocksCleared", "topic": "kv@here@" + self.id()}

    def test_what_happens_is_published_as_vllm_does(self):
        events = self.joined()
        self.store(1, 2, 3)
        self.expect(events, self.stored(1, 2, 3))
        self.settled(self.engine, self.ns)
        self.engine.call("evict", ns=self.ns, keys=keys(3), tier=1)
        self.expect(events, self.stored(3, parent=2, medium="STORAGE"), self.removed(3, "CPU"))
        self.assertEqual(self.region.load([3], [0]), [OK])
        self.expect(events, self.stored(3, parent=2), self.removed(3, "STORAGE"))
        self.region.dump([9], [0])
        self.expect(events, dict(self.stored(9), token_ids=[], block_size=0))  # nobody sent its metadata

    def test_a_subscriber_that_comes_late_is_told_all_parents_first(self):
        self.store(1, 2, 3)
        self.store(4, 5, parent=2)
        self.joined()
        events, known = self.events(self.subscribe()), {None}
        while len(known) < 7:
            event = next(events)
            self.assertIn(event["parent_block_hash"], known)
            known.update(event["block_hashes"])

    def test_who_missed_batches_asks_for_them(self):
        events = self.joined()
        self.store(1, 2)
        self.expect(events, self.stored(1, 2))
        asks = self.context.socket(zmq.DEALER)
        self.addCleanup(asks.close, 0)
        asks.setsockopt(zmq.RCVTIMEO, 1000 * TIMEOUT_S)
        asks.connect(self.endpoint("replay"))
        asks.send_multipart([b"", b"short"])  # passed over
        asks.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while (frames := asks.recv_multipart())[2] != b"\xff" * 8:
            self.assertEqual((len(frames), frames[0], frames[1]), (4, b"", f"kv@here@{self.id()}".encode()))
            batches.append((int.from_bytes(frames[2], "big"), msgpack.unpackb(frames[3])[1]))
        self.assertEqual([number for number, _ in batches], list(range(batches[0][0], batches[0][0] + len(batches))))
        self.assertEqual(batches[0][1], [{"type": "AllBlocksCleared"}])
        self.assertIn([dict(self.stored(1, 2))], [[dict(event, topic=self.cleared()["topic"]) for event in some] for _, some in batches])

    def test_who_misses_batches_again_asks_again(self):
        """On one socket: libzmq takes half a replay for unread, although the subscriber has read
        it."""
        events, steps = self.joined("--steps", "50"), 50
        for name in range(1, steps + 10):
            self.region.dump([name], [0])
            while number(keys(name)) not in next(events)["block_hashes"]:
                pass
        asks = self.context.socket(zmq.DEALER)
        self.addCleanup(asks.close, 0)
        asks.setsockopt(zmq.RCVTIMEO, 1000 * TIMEOUT_S)
        asks.connect(self.endpoint("replay"))
        for _ in range(4):
            asks.send_multipart([b"", (0).to_bytes(8, "big")])
            batches = 0
            while asks.recv_multipart()[2] != b"\xff" * 8:
                batches += 1
            self.assertEqual(batches, steps)

    def test_arrays_and_whole_keys(self):
        self.store(1, 2)
        subscriber = self.subscribe("b")
        self.publish("--format", "array", "--hashes", "bytes", "--media", "dram=CPU_PINNED,nvme=DISK,shared=EXTERNAL", "--topic", "a,b")
        topic, _, payload = subscriber.recv_multipart()
        events = msgpack.unpackb(payload)[1]
        if events == [["AllBlocksCleared"]]:
            topic, _, payload = subscriber.recv_multipart()
            events = msgpack.unpackb(payload)[1]
        medium = events[0][6]  # by now it may lie on NVMe only
        self.assertIn(medium, ("CPU_PINNED", "DISK"))
        self.assertEqual((topic, events), (b"b", [["BlockStored", [keys(1), keys(2)], None, tokens(1) + tokens(2), 16, None, medium, None]]))

    def test_another_daemon_and_events_that_are_lost(self):
        events = self.joined()
        self.settled(self.engine, self.ns)
        self.assertEqual(self.daemon.stop(), 0)
        self.start()
        self.assertEqual(next(events), self.cleared())
        while (event := next(events)) == self.cleared():
            pass  # a daemon that is slow at its start is connected to more than once
        self.assertEqual(event, dict(self.stored(0, medium="STORAGE"), token_ids=[], block_size=0))
        self.worker_of(self.id())
        halt(self.process.pid)
        names, ring, page, begun = range(100, 116), 4096, 1024, self.engine.call("events", since=2 ** 64 - 1)["last"]
        while self.engine.call("events", since=2 ** 64 - 1)["last"] <= begun + page + ring:  # its request under way still brings a page
            self.region.dump(names, range(16))
            self.engine.call("evict", ns=self.ns, keys=keys(*names))
        self.process.send_signal(signal.SIGCONT)
        while next(events) != self.cleared():
            pass
        self.expect(events, dict(self.stored(0, medium="STORAGE"), token_ids=[], block_size=0))

    def test_another_daemon_that_has_nothing(self):
        """When a daemon that kept blocks in DRAM only is gone, subscribers forget them before an
        engine opens a namespace again, or if none does."""
        events = self.joined()
        self.daemon.kill()
        self.start(nvme=False)
        self.expect(events, self.cleared())
        self.worker_of(self.id())
        self.store(1)
        self.expect(events, self.cleared(), self.stored(1))

    def test_a_topic_that_comes_late(self):
        """An earlier publisher, of which this one knows nothing, may have told of blocks under it."""
        events = self.joined()
        self.worker_of("late")
        self.store(5)
        late = {"topic": "kv@here@late"}
        self.expect(events, self.cleared(), dict(self.cleared(), **late), self.stored(0), dict(self.stored(5), **late))

    def test_it_ends_with_a_sentence(self):
        off = Daemon()
        self.addCleanup(off.stop)
        run = subprocess.run([UCMEVENTS, "publish", "--socket", off.socket, "--endpoint", self.endpoint("x"), "--replay", ""],
                             capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual(run.returncode, 1)
        self.assertIn("events.memory", run.stderr)
        run = subprocess.run([UCMEVENTS, "publish", "--endpoint", "nonsense"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertIn("can't listen on nonsense", run.stderr)
        self.joined()
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.process.wait(TIMEOUT_S), 0)


if __name__ == "__main__":
    unittest.main()
