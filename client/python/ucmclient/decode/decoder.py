"""A worker's half of sparse decoding: slots, rows of digests, and the daemon behind them.

What a token takes and is in no slot comes on one of two lanes. The *window* is read by the worker itself, in the middle of a
layer, so that the step goes on with it. What the window doesn't have is fetched by the daemon when the step is over, and the step is
repeated."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

from ..client import BlockResult, Namespace, Plane, Region, Task
from ..errors import Status, UcmError
from ..memory import SharedMemory
from ..sparse.chain import Chain, DigestNamespace
from ..sparse.digest import Digest, Digests
from ..sparse.window import Window
from .choices import Choices, Room
from .heads import HeadBytes
from .rows import Rows

#: Pause before asking a daemon again that is away, or has no room now.
_PAUSE = 0.005
#: When the daemon goes away during a copy, its last bytes may land within this time.
_GRACE = 0.5
#: A later try may find the block.
_PASSING = frozenset((BlockResult.NO_ROOM, BlockResult.IN_PROGRESS, BlockResult.CANCELLED))
_URGENT = 7
#: Of one fetch, and keys of one load (proto/limits.h).
_MAX_ITEMS = 16384
#: Pause before what has left the window is pinned again.
_REPIN = 0.25
#: Strand, row; and with the slot.
_Key = tuple[int, int]
_Item = tuple[int, int, int]


class Source(Protocol):
    """The connection, as ucmclient.vllm.link.Link has it. While the daemon is away, the namespaces are None; after it they may be
    other objects. ask() returns the call's result, or None if it failed."""

    @property
    def ns(self) -> Optional[Namespace]: ...

    @property
    def digests(self) -> Optional[DigestNamespace]: ...

    def ask(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any: ...

    def cut(self) -> None: ...


class Slots(Protocol):
    """Which slot holds which strand of which row, as kernels/slots/slots.h defines it. A request is a small number. So a layer goes:
    resolve, take, copies, publish."""

    def enter(self, request: int, floor: int) -> None: ...

    def leave(self, request: int) -> None: ...

    def forget(self, row: int) -> None: ...

    def begin(self) -> None:
        """A step, or another run of it."""

    def resolve(self, strand: int, chains: abc.Sequence[Chosen], apart: bool) -> None:
        """apart: the l-th list of each chain is of strand + l; else all are of this one."""

    def want(self, wanted: abc.Sequence[tuple[int, int, int]]) -> None:
        """Between two runs: as if a list had chosen them; strand, row and request of each."""

    def take(self) -> list[tuple[int, int, Optional[int]]]:
        """Strand, row and slot of all misses; without a slot: all slots are this run's."""

    def publish(self, arrived: abc.Sequence[bool]) -> None:
        """Of those of take(), whether the bytes are there."""

    def slot(self, strand: int, row: int) -> Optional[int]:
        """None: it is in no slot."""


#: A request, the row of each of its blocks, and blocks by lists.
Chosen = tuple[int, abc.Sequence[int], abc.Sequence[abc.Sequence[int]]]


class Lost(Exception):
    """Blocks of a sequence can't be had from the daemon: compute the sequence again."""


@dataclass
class Counts:
    """hits, misses: of slots. windowed: of the misses, those that were read from the window. gone: reads of the window that found
    the block not there any more. fetched: slots that the daemon filled. streamed: layers of blocks that prefill
    read, on either lane. computed, loaded: digests of blocks, by this worker or from the daemon. failed: what the daemon was asked for and did not
    come. full: found no slot."""

    hits: int = 0
    misses: int = 0
    windowed: int = 0
    gone: int = 0
    fetched: int = 0
    streamed: int = 0
    computed: int = 0
    loaded: int = 0
    failed: int = 0
    full: int = 0


@dataclass(eq=False)
class Sequence:
    """Of one request. number: for Slots. keys, rows: of its candidates from the first block on. kept: so many of its first
    blocks are in the daemon, and stay there. pinned: of so many it was asked to have them in the window. taken: slots that the last run
    of a step used for it."""

    name: str
    number: int
    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    chain: Optional[Chain] = None
    kept: int = 0
    pinned: int = 0
    taken: int = 0

    def forsake(self) -> None:
        """The daemon keeps nothing for it any more."""
        chain, self.chain, self.kept, self.pinned = self.chain, None, 0, 0
        if chain is not None:
            chain.close()


class Decoder:
    """For one rank of one engine. A step goes so:

        for sequence in step:  # once
            decoder.extend(sequence, keys, shards)
        decoder.begin()
        for each layer:
            lists = decoder.choose(sequence, layer, candidates, q)  # of each sequence
            slots = decoder.resolve(layer, [(sequence, lists), ...])  # and attend what is in slots
        if decoder.missing:
            lost = decoder.serve()
            # throw away what the step computed, and repeat it from begin() on without the lost ones

    A repeated step finds everything that it chose in its first layers, so it is repeated as often as it has layers at the most.
    With `apart`, a slot holds one KV head of a layer of a block, else a layer of it."""

    def __init__(
        self,
        source: Source,
        digest: Digest,
        choices: Choices,
        room: Room,
        slots: Slots,
        *,
        requests: int,
        shard_bytes: int,
        part: int = 0,
        apart: bool = False,
        window: bool = False,
        deadline: float = 2.0,
        timeout: float = 1.0,
    ):
        """slots: empty, for as many strands, rows, slots and requests. window: read from the daemon's window, if it has one. deadline:
        for blocks and digests to come, in seconds. timeout: of calls that only name them."""
        self.source, self.digest, self.choices, self.room = source, digest, choices, room
        self.part, self.deadline, self.timeout = part, deadline, timeout
        self.layers, self.shard_bytes = len(choices.layers), shard_bytes
        self.counts = Counts()
        self.slots, self._numbers = slots, list(range(requests))
        self.rows = Rows(room.rows, self._forget)
        self._heads = HeadBytes(digest.shape) if apart else None
        self.strands, self.slot_bytes = (digest.shape.kv_heads, self._heads.bytes) if self._heads else (1, shard_bytes)
        self.pool = SharedMemory(room.slots * self.slot_bytes)
        #: Whole layers of blocks on their way.
        self.landing = SharedMemory(room.stream * shard_bytes)
        self._digests = SharedMemory(room.rows * self.layers * digest.bytes)
        self._ns: Optional[Namespace] = None
        self._generation = 0
        self._pool_region: Optional[Region] = None
        self._landing_region: Optional[Region] = None
        self._digest_region: Optional[Region] = None
        self._windows = window
        self._window: Optional[Window] = None
        self._places: dict[int, Any] = {}
        self._repin_at = 0.0
        self.sequences: dict[str, Sequence] = {}
        #: Strands of rows that this run chose and that are in no slot, with who chose them.
        self.missing: dict[_Key, list[Sequence]] = {}
        #: Of serve(): sequences for whose blocks there were too few slots.
        self.crowded: set[Sequence] = set()
        #: What is behind a layer that misses blocks gets no slots: its choices are worthless.
        self._careful = False

    def _forget(self, row: int) -> None:
        self.slots.forget(row)
        self._places.pop(row, None)

    # ---- the daemon ----

    def _connected(self) -> bool:
        """Registers the memory with each new client, and drops the chains of an old connection: keep() makes new ones. Slots
        and rows keep what they hold: keys name contents."""
        ns, digests = self.source.ns, self.source.digests
        if ns is None or digests is None:
            return False
        if ns is not self._ns or ns.client.generation != self._generation:
            for sequence in self.sequences.values():
                sequence.forsake()
            self._generation = ns.client.generation
        if ns is not self._ns:
            self._ns = ns if self._registered(ns, digests) else None
        return self._ns is not None

    def _registered(self, ns: Namespace, digests: DigestNamespace) -> bool:
        self._pool_region = self._landing_region = self._digest_region = self._window = None
        self._places.clear()  # they mean something to one window
        plane = Plane(0, 0, self.shard_bytes, self.shard_bytes, 0)
        for name, memory, n in (("_pool_region", self.pool, self.room.slots), ("_landing_region", self.landing, self.room.stream)):
            if memory is self.pool and self._heads:
                continue  # the daemon writes whole layers
            region = self.source.ask(
                ns.register, [memory.memory()], [plane], blocks=n, part=self.part, pool=True, timeout=self.timeout
            )
            setattr(self, name, region)
            if region is None:
                return False
        size, n = self.digest.bytes, self.room.rows
        planes = [Plane(0, layer * n * size, size, size, layer) for layer in range(self.layers)]
        self._digest_region = self.source.ask(
            digests.register, [self._digests.memory()], planes, blocks=n, part=self.part, timeout=self.timeout
        )
        if self._windows and self._digest_region is not None:
            self._window = self.source.ask(Window, ns, self.part, timeout=self.timeout)
        return self._digest_region is not None

    def _bring(
        self,
        what: abc.Sequence[Any],
        begin: Callable[[abc.Sequence[Any], float], Optional[Task]],
        landed: Callable[[Any], None],
    ) -> list[Any]:
        """Until all have come, or the deadline: what did not. begin(what, seconds) starts the transfer of all, landed(one) runs
        for each that has come."""
        until, failed = time.monotonic() + self.deadline, []
        while what:
            left = until - time.monotonic()
            if left <= 0:
                return failed + list(what)
            results = self._transferred(begin(what, left) if self._connected() else None, left)
            if results is None:
                time.sleep(min(_PAUSE, left))
                continue
            again = []
            for one, result in zip(what, results):
                if result == BlockResult.OK:
                    landed(one)
                else:
                    (again if result in _PASSING else failed).append(one)
            if again:
                time.sleep(min(_PAUSE, left))
            what = again
        return failed

    def _transferred(self, task: Optional[Task], left: float) -> Optional[bytes]:
        if task is None:
            return None
        try:
            return task.wait(left + _PAUSE).blocks
        except UcmError as error:
            if error.status == Status.DEADLINE:  # nothing may write to these slots any more
                self.source.cut()
            time.sleep(_GRACE)
            return None
        finally:
            task.close()

    # ---- sequences ----

    def open(self, name: str, floor: int = 0) -> Sequence:
        """floor: slots that it keeps against others."""
        if name not in self.sequences:
            self.sequences[name] = Sequence(name, self._numbers.pop())
            self.slots.enter(self.sequences[name].number, floor)
        return self.sequences[name]

    def close(self, name: str) -> None:
        """The request is over, or is computed again."""
        sequence = self.sequences.pop(name, None)
        if sequence is None:
            return
        self.slots.leave(sequence.number)
        self._numbers.append(sequence.number)
        for row in sequence.rows:
            self.rows.release(row)
        sequence.forsake()

    def extend(
        self, sequence: Sequence, keys: abc.Sequence[bytes], shards: Callable[[int], Optional[abc.Sequence[Any]]]
    ) -> None:
        """Makes candidates of the blocks of these keys, from the sequence's end on. shards(i): of block i of the sequence
        the bytes of all layers, from which digests are computed; None: it has no pages, and its digests are loaded."""
        wanted = []
        for key in keys:
            row = self.rows.bind(key)
            if row is None:
                raise Lost("all rows of digests are in use")
            sequence.keys.append(key)
            sequence.rows.append(row)
            if self.rows.filled(row):
                continue
            at = shards(len(sequence.rows) - 1)
            if at is None:
                wanted.append((key, row))
            else:
                self._compute(row, at)
        if wanted:
            self._load_digests(sequence, wanted)

    def _at(self, layer: int, row: int) -> slice:
        begin = (layer * self.room.rows + row) * self.digest.bytes
        return slice(begin, begin + self.digest.bytes)

    def _compute(self, row: int, shards: abc.Sequence[Any]) -> None:
        for layer, shard in enumerate(shards):
            self._digests.buffer[self._at(layer, row)] = self.digest.compute(shard, 1).data.cast("B")
        self.rows.fill(row)
        self.counts.computed += 1

    def _load_digests(self, sequence: Sequence, wanted: list[tuple[bytes, int]]) -> None:
        self.keep(sequence, sequence.keys, build=True)

        def begin(some: abc.Sequence[tuple[bytes, int]], left: float) -> Optional[Task]:
            region, keys = self._digest_region, b"".join(key for key, _ in some)
            assert region is not None
            return self.source.ask(
                region.load, keys, [row for _, row in some], priority=_URGENT, deadline=left, timeout=self.timeout
            )

        def landed(one: tuple[bytes, int]) -> None:
            self.rows.fill(one[1])
            self.counts.loaded += 1

        failed = []
        for at in range(0, len(wanted), _MAX_ITEMS):
            failed += self._bring(wanted[at : at + _MAX_ITEMS], begin, landed)
        if failed:
            self.counts.failed += len(failed)
            raise Lost(f"digests of {len(failed)} blocks did not come")

    def keep(self, sequence: Sequence, keys: abc.Sequence[bytes], build: bool = False) -> int:
        """Has the daemon keep the sequence's first blocks, which these keys name, as far as it has them: the pages of so
        many may be given back. build: it computes their digests where it has none."""
        if not self._connected():
            return sequence.kept
        if sequence.kept < len(keys):
            self._append(sequence, keys, build)
        self._pin(sequence)
        return sequence.kept

    def _append(self, sequence: Sequence, keys: abc.Sequence[bytes], build: bool) -> None:
        if sequence.chain is None:
            sequence.chain = self.source.ask(Chain, self.source.digests, self.part, timeout=self.timeout)
        chain = sequence.chain
        if chain is not None:
            more = b"".join(keys[len(chain) :])
            appended = self.source.ask(
                chain.append, more, build=build, priority=_URGENT, deadline=self.deadline, timeout=self.deadline
            )
            if appended is not None:
                sequence.kept = appended.blocks

    def _pin(self, sequence: Sequence) -> None:
        """Has what the daemon keeps brought into the window. A pin that stands tells its place again."""
        if self._repin_at and time.monotonic() >= self._repin_at:
            self._repin_at = 0.0
            for other in self.sequences.values():
                other.pinned = 0
        window, first, end = self._window, sequence.pinned, min(sequence.kept, len(sequence.rows))
        if window is None or sequence.chain is None or first >= end:
            return
        pinned = self.source.ask(
            window.pin, sequence.chain, first, end - first, priority=_URGENT, deadline=self.deadline, timeout=self.deadline
        )
        if pinned is not None:
            sequence.pinned = end
            self._places.update({row: place for row, place in zip(sequence.rows[first:end], pinned) if place is not None})

    # ---- a step ----

    def begin(self, again: bool = False) -> None:
        """again: a repeated run of the step."""
        self._careful = again and self._careful
        self.missing.clear()
        for sequence in self.sequences.values():
            sequence.taken = 0
        self.slots.begin()
        if self._window is not None and self._connected():  # the daemon may want some of the window back
            self.source.ask(self._window.client.process)

    def choose(self, sequence: Sequence, layer: int, candidates: int, q: Any, dtype: Any = None) -> list[list[int]]:
        """Of the first `candidates` blocks, lists as Digests.select has them."""
        lists = self.digest.shape.kv_heads if self.choices.score.heads == "each" else 1
        if candidates == 0:
            return [[] for _ in range(lists)]
        rows = sequence.rows[:candidates]
        assert len(rows) == candidates
        of_rows = b"".join(self._digests.buffer[self._at(layer, row)] for row in rows)
        chosen = Digests(self.digest, of_rows).select(q, self.choices.of_candidates(layer, candidates), self.choices.score, dtype)
        return [list(one) for one in chosen.lists]

    def resolve(
        self, layer: int, chosen: abc.Sequence[tuple[Sequence, abc.Sequence[abc.Sequence[int]]]]
    ) -> list[list[dict[int, int]]]:
        """Of each list of each sequence, the slots of those blocks that are in one, after reading from the window what is there. The
        others are `missing`. With `apart` there is a list for each KV head."""
        if self._careful and self.missing:
            return [[{} for _ in lists] for _, lists in chosen]
        first, apart = layer * self.strands, self._heads is not None
        self.slots.resolve(first, [(sequence.number, sequence.rows, lists) for sequence, lists in chosen], apart)
        misses = self.slots.take()
        arrived = self._from_window(misses)
        self.slots.publish(arrived)
        found, keys = [], set()
        for sequence, lists in chosen:
            own = {(first + apart * l, sequence.rows[block]) for l, blocks in enumerate(lists) for block in blocks}
            sequence.taken += len(own)
            keys |= own
            for strand, row in own:
                if self.slots.slot(strand, row) is None:
                    self.missing.setdefault((strand, row), []).append(sequence)
            at = [{block: self.slots.slot(first + apart * l, sequence.rows[block]) for block in blocks} for l, blocks in enumerate(lists)]
            found.append([{block: slot for block, slot in of.items() if slot is not None} for of in at])
        self.counts.hits += len(keys) - len(misses)
        self.counts.misses += len(misses)
        self.counts.windowed += sum(arrived)
        return found

    def _from_window(self, misses: abc.Sequence[tuple[int, int, Optional[int]]]) -> list[bool]:
        """Of each, whether its slot has its bytes now."""
        read: dict[_Key, Optional[bytearray]] = {}
        arrived = []
        for strand, row, slot in misses:
            layer, head = divmod(strand, self.strands)
            if slot is not None and (layer, row) not in read:
                read[layer, row] = self._window_bytes(layer, row)
            shard = read.get((layer, row)) if slot is not None else None
            if shard is not None:
                self._fill(slot, head, shard)
            arrived.append(shard is not None)
        return arrived

    def _window_bytes(self, layer: int, row: int) -> Optional[bytearray]:
        place, window = self._places.get(row), self._window
        if place is None or window is None:
            return None
        try:
            shard = window.read(place, layer * self.shard_bytes, self.shard_bytes)
        except UcmError:  # the client was closed
            shard = None
        if shard is None:
            del self._places[row]
            self.counts.gone += 1
            self._repin_at = self._repin_at or time.monotonic() + _REPIN
        return shard

    def _fill(self, slot: int, head: int, shard: Any) -> None:
        """Copies what the slot holds of a layer of a block."""
        self.shard(slot)[:] = self._heads.of(head, shard) if self._heads else shard

    def serve(self) -> set[Sequence]:
        """Fetches what is missing. Those whose blocks did not come: compute them again. They are closed by the caller. `crowded`
        are others, for which a step has too few slots: repeat it without some sequence."""
        self.slots.want([(strand, row, by[0].number) for (strand, row), by in self.missing.items()])
        taken = self.slots.take()
        items = [(strand, row, slot) for strand, row, slot in taken if slot is not None]
        landed = set(items).difference(self._fetch_slots(items))
        self.slots.publish([item in landed for item in taken])
        self.counts.fetched += len(landed)
        self.counts.full += len(taken) - len(items)
        full = {sequence for strand, row, slot in taken if slot is None for sequence in self.missing[strand, row]}
        self.crowded, self._careful = (full if self._careful else set()), self._careful or bool(full)
        return {sequence for strand, row, slot in set(items) - landed for sequence in self.missing[strand, row]}

    def _fetch_slots(self, items: abc.Sequence[_Item]) -> list[_Item]:
        """Those that did not come."""
        if self._heads is None:
            return self._fetch(items, lambda: self._pool_region)
        slots: dict[_Key, list[_Item]] = {}
        for item in items:
            slots.setdefault((item[0] // self.strands, item[1]), []).append(item)
        failed, shards = [], list(slots)
        for at in range(0, len(shards), self.room.stream):
            some = [(layer, row, i) for i, (layer, row) in enumerate(shards[at : at + self.room.stream])]
            late = set(self._fetch(some, lambda: self._landing_region))
            for layer, row, i in some:
                for strand, _, slot in slots[layer, row]:
                    if (layer, row, i) in late:
                        failed.append((strand, row, slot))
                    else:
                        self._fill(slot, strand % self.strands, self.landed(i))
        return failed

    def _fetch(self, items: abc.Sequence[_Item], region: Callable[[], Optional[Region]]) -> list[_Item]:
        """Layers of rows into slots of a pool; those that did not come. region: the pool, on the connection that there is."""

        def begin(some: abc.Sequence[_Item], left: float) -> Optional[Task]:
            keys = {row: i for i, row in enumerate(dict.fromkeys(row for _, row, _ in some))}
            pool = region()
            assert pool is not None
            return self.source.ask(
                pool.fetch, b"".join(map(self.rows.key, keys)),
                [(keys[row], layer, slot) for layer, row, slot in some], priority=_URGENT, deadline=left, timeout=self.timeout,
            )

        failed = []
        for at in range(0, len(items), _MAX_ITEMS):
            failed += self._bring(items[at : at + _MAX_ITEMS], begin, lambda item: None)
        self.counts.failed += len(failed)
        return failed

    def stream(self, sequence: Sequence, layer: int, blocks: abc.Sequence[int]) -> Iterator[dict[int, Any]]:
        """For a dense reader: this layer of some of these blocks at a time, as bytes that are valid until the next ones are asked
        for."""
        for at in range(0, len(blocks), self.room.stream):
            some = blocks[at : at + self.room.stream]
            shards: dict[int, Any] = {block: self._window_bytes(layer, sequence.rows[block]) for block in some}
            away = [block for block in some if shards[block] is None]
            if self._fetch([(layer, sequence.rows[block], i) for i, block in enumerate(away)], lambda: self._landing_region):
                raise Lost("blocks did not come")
            shards.update({block: self.landed(i) for i, block in enumerate(away)})
            self.counts.streamed += len(some)
            yield shards

    def shard(self, slot: int) -> memoryview:
        return self.pool.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def landed(self, i: int) -> memoryview:
        return self.landing.buffer[i * self.shard_bytes : (i + 1) * self.shard_bytes]

    def end(self) -> None:
        """Nothing is decoded here any more."""
        for name in list(self.sequences):
            self.close(name)
        window, self._window = self._window, None
        if window is not None:
            window.close()
