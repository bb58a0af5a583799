#!/usr/bin/python3
"""Connections of two tenants make random requests with summaries, sequences, selections and
gathers. Meanwhile blocks are evicted and purged, disks fill and lie, connections end and the daemon
is killed.

The oracle: a block's bytes follow from its name, so numpy (tests/reference/sparse/methods.py) knows
every summary and every choice. A selection is the one that numpy makes, without blocks that were
evicted by name. Or it was refused for a reason that the test caused. When the connections have
ended, nothing of them is left in the daemon.

UCM_RETRIEVAL_SECONDS=600 makes it ten minutes, UCM_SEED makes other choices: 0 means random ones.
"""

import faulthandler
import mmap
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import unittest

import numpy as np
TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(TOP, "reference/sparse"), os.path.join(TOP, "integration")]
import methods
from daemon import until
from retrieval_oracle import (BASE, HEAD_DIM, K_BYTES, KV_HEADS, LAYERS, METHODS, MODELS, NAMES, ROUNDED, SHAPE, Oracle,
                              choice, settle)
from second_client import (BUSY, CANCELLED, DEADLINE, EXISTS, FAILED, IN_PROGRESS, MISS, NO_ROOM, NOT_FOUND, OK,
                           OTHER_UID, TIMEOUT_S, UCMD, Client, Daemon, Pool, Refused, Region, keys, u32)

PLAIN = os.environ.get("UCM_PHASE", "plain") == "plain"
SECONDS = float(os.environ.get("UCM_RETRIEVAL_SECONDS", "5" if PLAIN else "4"))
SEED = int(os.environ.get("UCM_SEED", "1")) or random.SystemRandom().randrange(1, 1 << 32)
ROUND_S, PENDING, SLOTS = 4, 24, 48
NO_MEMORY, CANCELLED_CODE = 10, 7
HELD = 4
OPTIONS = {"arena.size": "4MiB", "nvme.size": "16MiB", "nvme.segment": "1MiB", "nvme.on_write_stall": "drop",
           "shared.negative": "200ms", "shared.lookup_timeout": "100ms", "shutdown.drain": "2s", "request.timeout": "10min"}
GAUGES = ("sequences", "sequence_blocks", "summaries_held_bytes", "requests_active", "leases", "blocks_pinned")


class BlockSequence:
    def __init__(self, number, model, part, method):
        self.number, self.model, self.part, self.method = number, model, part, method
        self.blocks = []            # (name, has summary)
        self.lengths = [0]          # after each append that was answered
        self.appends = []           # those begun and not answered yet
        self.deleting, self.may_be_deleting = set(), set()


class Actor:
    """One connection, and what it has under way."""

    def __init__(self, play, uid):
        self.play, self.random = play, play.random
        self.client = Client(play.daemon, uid=uid, timeout_s=TIMEOUT_S)
        self.uid, self.pending, self.sequences, self.regions, self.pools = uid, [], [], {}, {}
        self.ns, self.derived, self.cancelled, self.closed = {}, {}, set(), []
        for model, parts in MODELS.items():
            self.ns[model] = self.client.open(dict(BASE, model=model, parts=parts))

    # ---- requests ----

    def begin(self, method, check, **params):
        """check(result or None, code) runs when the answer is looked at."""
        if self.random.random() < 0.08 and method in ("load", "dump", "prefetch", "summary.build", "sequence.append", "select",
                                                      "sequence.prefetch", "gather"):
            params["timeout_ms"] = self.random.choice((1, 1, 2, 5, 20))
        msgid = self.client.begin(method, **params)
        self.pending.append((msgid, method, params, check))
        self.play.count(method)
        return msgid

    def finish(self, at=0):
        msgid, method, params, check = self.pending.pop(at)
        try:
            result, code = self.client.wait(msgid), 0
        except Refused as refused:
            result, code = None, refused.code
            self.play.count(f"{method}: {refused.code}")
            allowed = {BUSY, NO_MEMORY}
            if msgid in self.cancelled:
                allowed.add(CANCELLED_CODE)
            if "timeout_ms" in params:
                allowed.add(DEADLINE)
            if method in ("namespace.purge", "evict"):
                allowed |= {9, NOT_FOUND}
            assert code in allowed, (method, refused, params)
        check(result, code)

    def finish_all(self):
        while self.pending:
            self.finish()

    def wait_for(self, msgids):
        for msgid in msgids:
            for at, pending in enumerate(self.pending):
                if pending[0] == msgid:
                    self.finish(at)
                    break

    # ---- what it does ----

    def region(self, model, part):
        at = model, part
        if at not in self.regions:
            identity = {"layers": [LAYERS] * MODELS[model], "layer_bytes": 2 * K_BYTES}
            self.regions[at] = [Region(self.client, self.ns[model], identity, 2 * SLOTS, part), 0]
        return self.regions[at][0]

    def names(self, most=SLOTS):
        first, n = self.random.randrange(NAMES), self.random.randint(1, most)
        return [(first + i) % NAMES for i in range(n)]

    def some_model(self):
        model = self.random.choice(list(MODELS))
        return model, self.random.randrange(MODELS[model])

    def some_derived(self):
        return self.random.choice(list(self.derived.items())) if self.derived else (None, None)

    def dump(self):
        model, part = self.some_model()
        region, names = self.region(model, part), self.names()
        if any(p[1] == "dump" for p in self.pending):
            self.finish_all()
        kv = self.play.oracle.blocks(model, part)
        for slot, name in enumerate(names):
            region.memory[slot * region.size:(slot + 1) * region.size] = kv[name].tobytes()
        self.begin("dump", lambda r, code: None, region=region.number, keys=keys(*names), blocks=u32(*range(len(names))))

    def load(self):
        model, part = self.some_model()
        region, names = self.region(model, part), self.names()
        if any(p[1] == "load" for p in self.pending):
            self.finish_all()
        kv = self.play.oracle.blocks(model, part)

        def check(result, code):
            for i, status in enumerate(result["status"] if result else ()):
                right = kv[names[i]].tobytes()
                assert status != OK or region.bytes(SLOTS + i) == right, f"wrong bytes of {model}/{part}/{names[i]}"
        self.begin("load", check, region=region.number, keys=keys(*names), blocks=u32(*range(SLOTS, SLOTS + len(names))))

    def open_summaries(self):
        model = self.random.choice(list(MODELS))
        method = self.random.choice(list(METHODS))
        if self.random.random() < 0.3:
            self.client.begin("summary.open", ns=self.ns[model], **dict(SHAPE, method=9))  # its answer is never looked at
        opened = self.client.call("summary.open", ns=self.ns[model], build=self.random.random() < 0.3,
                                  **METHODS[method][0], **SHAPE)
        assert opened["layer_bytes"] == methods.summary_bytes(METHODS[method][1])
        assert self.play.prints.setdefault((self.uid, model, method), opened["fingerprint"]) == opened["fingerprint"]
        self.derived[model, method] = opened["ns"]

    def build(self):
        (at, ns) = self.some_derived()
        if not ns:
            return
        names = self.names(NAMES)

        def check(result, code):
            allowed = {OK, EXISTS, MISS, FAILED, NO_ROOM, IN_PROGRESS, CANCELLED}
            assert result is None or set(result["status"]) <= allowed, result
        self.begin("summary.build", check, ns=ns, keys=keys(*names), part=self.random.randrange(MODELS[at[0]]), parts=self.random.randint(0, 1))

    def summary_bytes(self):
        """Summaries that are loaded are right, no matter who made them."""
        at, ns = self.some_derived()
        if not ns:
            return
        (model, method), part = at, self.random.randrange(MODELS[at[0]])
        right, names = self.play.oracle.packed(model, part, method), self.names()
        region = Region(self.client, ns, {"layers": [LAYERS] * MODELS[model], "layer_bytes": right.shape[2]}, SLOTS, part)
        if self.random.random() < 0.4:
            for slot, name in enumerate(names):
                region.memory[slot * region.size:(slot + 1) * region.size] = right[name].tobytes()
            region.dump(names, range(len(names)))
        else:
            for i, status in enumerate(region.load(names, range(len(names)))):
                assert status != OK or region.bytes(i) == right[names[i]].tobytes(), f"wrong summary {at} {part} {names[i]}"
        self.client.call("region.unregister", region=region.number)

    def open_sequence(self):
        at, ns = self.some_derived()
        if not ns or len(self.sequences) > 8:
            return
        part = self.random.randrange(MODELS[at[0]])
        number = self.client.call("sequence.open", ns=ns, part=part)["sequence"]
        self.sequences.append(BlockSequence(number, at[0], part, at[1]))

    def append(self):
        sequence = self.random.choice(self.sequences)
        names, began, before = self.names(NAMES), self.play.tick(), list(sequence.appends)

        def check(result, code):
            self.wait_for(before)
            sequence.appends.remove(msgid)
            if result:
                appended(result)
            sequence.lengths.append(len(sequence.blocks))

        def appended(result):
            found = [status for status in result["status"] if status]
            n, first = len(found), len(sequence.blocks)
            assert not any(result["status"][n:]) and result.get("missing", 0) == len(names) - n, result
            assert result["blocks"] == first + n, (result, first)
            assert result.get("summaries", 0) == sum(status & HELD != 0 for status in found)
            for tier, field in enumerate(("dram", "nvme", "shared"), 1):
                assert result.get(field, 0) == sum(status & 3 == tier for status in found)
            sequence.blocks += [(name, status & HELD != 0) for name, status in zip(names, found)]
            for at in range(first, first + n):
                if any(model == sequence.model and (end is None or end > began)
                       for _, end, uid, model in self.play.evictions if uid == self.uid):
                    sequence.may_be_deleting.add(at)
        msgid = self.begin("sequence.append", check, sequence=sequence.number, keys=keys(*names), build=self.random.random() < 0.7)
        sequence.appends.append(msgid)

    def ask(self):
        top_k = self.random.random() < 0.7
        some = lambda *values: self.random.choice(values)  # noqa: E731
        return {"metric": 0, "reduce": some(0, 1), "heads": some(0, 1, 2), "policy": 0 if top_k else 1,
                "sparse_ratio": some(0.0, 0.1, 0.3, 1.0), "topk_tokens": some(0, 0, 100), "min_blocks": some(0, 4, 1000),
                "eps": some(0.0, 0.5, 0.9, 1.0), "beta_m": some(0.0, 0.25, 2.0), "limit": some(0, 0, 1, 7, 100),
                "sink_blocks": some(0, 1, 3), "recent_blocks": some(0, 2, 5)}

    def select(self):
        model = self.random.choice(self.sequences)
        sequences = [c for c in self.sequences if (c.model, c.method) == (model.model, model.method)]
        rows = [self.random.choice(sequences) for _ in range(self.random.randint(1, 5))]
        layers = [self.random.randrange(LAYERS) for _ in rows]
        ask, queries, heads = self.ask(), self.random.choice((1, 1, 3)), KV_HEADS * self.random.choice((1, 3))
        if model.method in ("mean", "submean", "tokens") and self.random.random() < 0.3:
            ask["metric"] = 1
        if model.method in ("stats", "rest") and ask["beta_m"] == 0:
            ask["beta_m"] = 1.0
        q = np.random.default_rng(self.random.getrandbits(32)).standard_normal((len(rows), queries, heads, HEAD_DIM))
        dtype = self.random.choice((0, 1))
        q = q.astype((np.float32, np.float16)[dtype])
        seen = [(len(c.lengths) - 1, list(c.appends), set(c.deleting)) for c in rows]

        def check(result, code):
            for row, (_, appends, _) in zip(rows, seen):
                self.wait_for(appends)
            if result:
                self.check_select(rows, layers, ask, q, seen, result)
        self.begin("select", check, sequences=[c.number for c in rows], layers=layers, q=q.tobytes(), q_dtype=dtype, q_heads=heads,
                   rows=queries, scores=True, prefetch=self.random.choice((0, 0, 1, 8)), **ask)

    def check_select(self, rows, layers, ask, q, seen, result):
        counts = struct.unpack(f"<{len(result['counts']) // 4}I", result["counts"])
        index, scores = np.frombuffer(result["index"], "<u4"), np.frombuffer(result.get("scores", b""), "<f4")
        lists = 1 if ask["heads"] else KV_HEADS
        assert len(counts) == len(rows) * lists and sum(counts) == len(index) == len(scores)
        at, least, most = 0, 0, 0  # of the blocks that were left out
        for row, sequence in enumerate(rows):
            mine = []
            for count in counts[row * lists:(row + 1) * lists]:
                mine.append((index[at:at + count].tolist(), scores[at:at + count]))
                at += count
            first, appends, deleting = seen[row]
            lengths = sequence.lengths[first:first + len(appends) + 1]
            said = [self.row_wrong(sequence, n, layers[row], ask, q[row].astype(np.float32), mine, deleting)
                    for n in dict.fromkeys(lengths)]
            gone = [number for number in said if isinstance(number, int)]
            assert gone, (sequence.model, sequence.method, sequence.part, sequence.number, ask, q.shape, lengths, said)
            least, most = least + min(gone), most + max(gone)
        slack = ask["policy"] * len(counts)  # see near()
        assert least - slack <= result.get("evicted", 0) <= most + slack, (result.get("evicted", 0), least, most, ask)
        self.play.count("rows checked", len(rows))

    def row_wrong(self, sequence, n, layer, ask, q, mine, deleting):
        """Returns how many blocks were left out, or what is wrong."""
        blocks = sequence.blocks[:n]
        if n == 0:
            return 0 if not any(chosen for chosen, _ in mine) else "chosen from nothing"
        right, gone = self.play.oracle.lists(sequence, blocks, layer, ask, q), 0
        for (chosen, scores), row in zip(mine, right):
            best = choice(row, ask)
            if sequence.method == "rest":
                best = settle(chosen, best, row)
            left_out = set(best) - set(chosen)
            if ask["policy"] == 0:
                if set(chosen) - set(best) or chosen != sorted(chosen):
                    return f"{chosen} instead of {best}"
                if left_out - sequence.may_be_deleting:
                    return f"{left_out} left out"
            elif chosen and max(chosen) >= n or not self.near(chosen, best, row, left_out & sequence.may_be_deleting):
                return f"{chosen} instead of about {best}"
            if deleting & set(chosen):
                return f"{deleting & set(chosen)} are purged"
            if sequence.method == "rest":
                same = np.allclose(row[chosen], scores, ROUNDED, ROUNDED)
            else:
                same = np.array_equal(np.where(row == 0, 0, row)[chosen], np.where(scores == 0, 0, scores))
            if not same:
                return f"scores {scores} instead of {row[chosen]}"
            gone += len(left_out)
        return gone

    @staticmethod
    def near(chosen, best, row, gone):
        """Numpy's exp differs, so a mass may end one block earlier or later."""
        return len(set(chosen) ^ (set(best) - gone)) <= 1

    def prefetch(self):
        sequence = self.random.choice(self.sequences)
        if not sequence.blocks:
            return
        index = [self.random.randrange(len(sequence.blocks)) for _ in range(self.random.randint(1, 60))]

        def check(result, code):
            assert result is None or len(result["status"]) == len(index)
        self.begin("sequence.prefetch", check, sequence=sequence.number, index=u32(*index), priority=self.random.randrange(8))

    def gather(self):
        sequence = self.random.choice(self.sequences)
        if not sequence.blocks:
            return
        if any(p[1] == "gather" for p in self.pending):  # its slots are still written
            self.finish_all()
        at, names = (sequence.model, sequence.part), [name for name, _ in sequence.blocks]
        if at not in self.pools:
            self.pools[at] = Pool(self.client, self.ns[sequence.model], 2 * K_BYTES, SLOTS, sequence.part)
        pool, kv = self.pools[at], self.play.oracle.blocks(*at)
        items = [(self.random.randrange(len(names)), self.random.randrange(LAYERS), slot)
                 for slot in self.random.sample(range(SLOTS), self.random.randint(1, SLOTS))]

        def check(result, code):
            for status, (index, layer, slot) in zip(result["status"] if result else (), items):
                self.play.count("layers gathered", status == OK)
                assert status != OK or pool.bytes(slot) == kv[names[index], layer].tobytes(), (at, names[index], layer)
        self.begin("gather", check, region=pool.number, items=u32(*(n for item in items for n in item)), priority=self.random.randrange(8),
                   **({"sequence": sequence.number} if self.random.random() < 0.7 else {"keys": keys(*names)}))

    def close_sequence(self):
        sequence = self.sequences.pop(self.random.randrange(len(self.sequences)))
        self.closed.append(sequence)  # selections of it may be under way
        self.begin("sequence.close", lambda r, code: None, sequence=sequence.number)
        used = [p for p in self.pending if p[1] in ("select", "sequence.append")]
        if self.random.random() < 0.5 and used:
            self.cancel()

    def cancel(self):
        if self.pending:
            msgid = self.random.choice(self.pending)[0]
            self.cancelled.add(msgid)
            self.client.call("cancel", msgid=msgid)

    def lookup(self):
        model, _ = self.some_model()
        self.begin("lookup", lambda r, code: None, ns=self.ns[model], keys=keys(*self.names(NAMES)),
                   lease_ms=self.random.choice((0, 1, 1000)))

    def evict(self):
        derived = self.some_derived()[1]
        if derived and self.random.random() < 0.4:
            self.begin("evict", lambda r, code: None, ns=derived, tier=self.random.randrange(4),
                       **({} if self.random.random() < 0.5 else {"keys": keys(*self.names())}))
            return
        model, tier = self.some_model()[0], self.random.choice((0, 1, 1, 1, 2, 2, 3))
        purge = tier == 0 and self.random.random() < 0.5
        all_of_it = self.random.random() < 0.3
        names = list(range(NAMES)) if all_of_it else self.names()
        eviction = [self.play.tick(), None, self.uid, model]
        if tier == 0:
            self.play.evictions.append(eviction)
            touched = []
            for sequence in self.play.sequences_of(self.uid, model):
                hit = {at for at, (name, _) in enumerate(sequence.blocks) if name in names}
                sequence.may_be_deleting |= hit
                touched.append((sequence, hit))

        def check(result, code):
            eviction[1] = self.play.tick()
            # A block that lost its copies is missing, and may be stored again.
            if purge and result is not None and not all_of_it and not result.get("missing", 0):
                for sequence, hit in touched:
                    sequence.deleting |= hit
        params = {} if all_of_it else {"keys": keys(*names)}
        if purge:
            self.begin("namespace.purge", check, ns=self.ns[model], **params)
        else:
            self.begin("evict", check, ns=self.ns[model], tier=tier, **params)

    def pin(self):
        if self.uid is None:
            model, _ = self.some_model()
            self.begin(self.random.choice(("pin", "unpin", "unpin")), lambda r, code: None, ns=self.ns[model],
                       keys=keys(*self.names(20)))

    def step(self):
        acts = [(self.dump, 10), (self.load, 6), (self.open_summaries, 3), (self.build, 4), (self.summary_bytes, 2),
                (self.open_sequence, 6), (self.cancel, 3), (self.lookup, 3), (self.evict, 3), (self.pin, 1)]
        if self.sequences:
            acts += [(self.append, 16), (self.select, 30), (self.prefetch, 4), (self.gather, 6), (self.close_sequence, 3)]
        self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
        while len(self.pending) > PENDING or (self.pending and self.random.random() < 0.4):
            self.finish(self.random.randrange(len(self.pending)))


class Play:
    """One daemon after the other on the same disks, and its clients."""

    def __init__(self, case, seed):
        self.random, self.case = random.Random(seed), case
        self.oracle, self.prints, self.counts, self.ticks = Oracle(), {}, {}, 0
        self.directory = tempfile.mkdtemp(prefix="retrieval.")
        self.shared = os.path.join(self.directory, "shared")
        os.makedirs(self.shared)
        os.chmod(self.shared, 0o777)
        self.fault_file = os.path.join(self.directory, "faults")
        with open(self.fault_file, "wb") as file:
            file.truncate(4096)
            self.faults = mmap.mmap(os.open(self.fault_file, os.O_RDWR), 4096)
        self.daemon, self.evictions, self.actors = None, [], []
        self.uids = [None, OTHER_UID] if os.geteuid() == 0 else [None]

    def count(self, what, by=1):
        self.counts[what] = self.counts.get(what, 0) + by

    def tick(self):
        self.ticks += 1
        return self.ticks

    def sequences_of(self, uid, model):
        return [sequence for actor in self.actors if actor.uid == uid for sequence in actor.sequences + actor.closed
                if sequence.model == model]

    def start(self):
        library = UCMD + "-inject.so"
        asan = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        before = ("env", f"LD_PRELOAD={library}", f"UCM_INJECT={self.fault_file}", f"ASAN_OPTIONS={asan}")
        self.daemon = Daemon(directory=self.directory, before=before, recovered=False, **OPTIONS, **{"shared.roots": self.shared})
        self.evictions, self.actors = [], []

    def inject(self, read=0, write=0, reads=0, writes=0, no_room=0):
        self.faults[:4 * 11] = bytes(44)
        self.faults[:20] = struct.pack("<5i", read, write, 0, reads, writes)
        at = 32 + 4 + 4 + 4  # after read_from (8 bytes, aligned), short_by, setup_error, ring_error
        self.faults[at:at + 4] = struct.pack("<i", no_room)

    def damage(self):
        """Bytes of the cache file, or of a file of the shared tier, flip."""
        files = [os.path.join(at, name) for top in (self.daemon.store, self.shared) for at, _, names in os.walk(top)
                 for name in names]
        for path in self.random.sample(files, min(3, len(files))):
            try:
                with open(path, "r+b") as file:
                    size = file.seek(0, 2)
                    for _ in range(20 if size > 1 << 20 else 1):
                        at = self.random.randrange(max(size, 1))
                        file.seek(at)
                        byte = file.read(1)
                        if byte and byte != b"\0":
                            file.seek(at)
                            file.write(bytes([byte[0] ^ 1 << self.random.randrange(8)]))
                            self.count("bytes damaged")
            except FileNotFoundError:
                pass

    def trouble(self):
        what = self.random.random()
        if what < 0.3:
            self.damage()
        elif what < 0.4:
            self.inject(write=28, writes=self.random.randint(1, 40))
        elif what < 0.5:
            self.inject(read=5, reads=self.random.randint(1, 10))
        elif what < 0.6:
            self.inject()
        elif what < 0.75 and len(self.actors) > 1:
            actor = self.actors.pop(self.random.randrange(len(self.actors)))
            actor.client.close()
            self.count("connections cut")

    def round(self, end_s):
        """True: the daemon was killed."""
        kill = self.random.random() < 0.4
        while time.monotonic() < end_s:
            if len(self.actors) < 4 and self.random.random() < 0.2 or not self.actors:
                self.actors.append(Actor(self, self.random.choice(self.uids)))
            if self.random.random() < 0.02:
                self.trouble()
            self.random.choice(self.actors).step()
        self.inject()
        if kill:
            self.daemon.kill()
            self.count("daemons killed")
        cut = self.random.random() < 0.5
        for actor in self.actors:
            if not kill and not cut:
                actor.finish_all()
            actor.client.close()
        self.actors = []
        if not kill:
            self.settle()
        return kill

    def settle(self):
        """Nothing is left of the connections: nothing that they held, and nothing that would keep
        blocks in DRAM."""
        client = Client(self.daemon)
        for entry in client.call("namespace.list", limit=4096)["namespaces"]:
            client.call("unpin", ns=entry["ns"])

        def left():
            metrics = client.call("stats")["metrics"]
            return {name: metrics[name] for name in GAUGES if metrics[name]}
        self.until(lambda: not left(), left)

        def purged():
            names = client.call("namespace.list", limit=4096)["namespaces"]
            for entry in names:
                client.call("namespace.purge", ns=entry["ns"])
            return {entry["model"] + "/" + entry["layout"]: entry["blocks"] for entry in names if entry["blocks"]}
        if self.random.random() < 0.3:
            self.until(lambda: not purged(), purged)
            self.count("purges of all")
        assert client.call("health")["status"] != "failing"
        client.close()

    until = staticmethod(until)

    def enough(self):
        return all(self.counts.get(what, 0) > 10 for what in ("rows checked", "layers gathered"))

    def run(self, seconds):
        """Runs for so long; on a busy host until enough was checked, at most 120 s longer."""
        end = time.monotonic() + seconds
        last = end + 120
        self.start()
        while (now := time.monotonic()) < end or (now < last and not self.enough()):
            killed = self.round(min(now + ROUND_S, end if now < end else last))
            if killed:
                self.start()
            elif self.random.random() < 0.3:
                self.case.assertEqual(self.daemon.stop(), 0)
                self.start()
        self.settle()
        self.case.assertEqual(self.daemon.stop(), 0)

    def log(self):
        with open(os.path.join(self.directory, "log"), errors="replace") as file:
            return file.read()


class RetrievalRandom(unittest.TestCase):
    def test_whatever_comes_to_mind(self):
        play = Play(self, SEED)
        try:
            play.run(SECONDS)
            self.assertTrue(play.enough(), play.counts)
        except BaseException as broken:
            if play.daemon:
                play.daemon.kill()
            sys.stderr.write(f"UCM_SEED={SEED}\n{play.log()[-8000:]}\n")
            raise broken
        finally:
            shutil.rmtree(play.directory, ignore_errors=True)
            if os.environ.get("UCM_RETRIEVAL_COUNTS"):
                sys.stderr.write("".join(f"{what} {n}\n" for what, n in sorted(play.counts.items())))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS * 2 + 240, exit=True)
    unittest.main()
