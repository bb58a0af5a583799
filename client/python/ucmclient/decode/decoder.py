"""A worker's half of sparse decoding: slots, rows of digests, and the daemon behind them."""

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
from .choices import Choices, Room
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
#: Layer, row, slot.
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
    """Which slot holds which layer of which row, as kernels/slots/slots.h defines it. A request is a small number."""

    def enter(self, request: int, floor: int) -> None: ...

    def leave(self, request: int) -> None: ...

    def forget(self, row: int) -> None: ...

    def begin(self) -> None:
        """A step, or another run of it."""

    def use(self, layer: int, row: int, request: int) -> Optional[int]:
        """Its slot; None: a miss."""

    def take(self, wanted: abc.Sequence[tuple[int, int, int]]) -> list[Optional[int]]:
        """After a run: slots for its misses, (layer, row, request) each; None: all slots are this run's."""

    def publish(self, arrived: abc.Sequence[bool]) -> None:
        """Of those that were taken last: whether the bytes are there."""


class Lost(Exception):
    """Blocks of a sequence can't be had from the daemon: compute the sequence again."""


@dataclass
class Counts:
    """hits, misses: of slots. fetched: layers of blocks that came into slots, streamed: that prefill read. computed, loaded: digests
    of blocks, by this worker or from the daemon. failed: layers of blocks, and digests of blocks, that did not come."""

    hits: int = 0
    misses: int = 0
    fetched: int = 0
    streamed: int = 0
    computed: int = 0
    loaded: int = 0
    failed: int = 0
    full: int = 0


@dataclass(eq=False)
class Sequence:
    """Of one request. number: for Slots. keys, rows: of its candidates from the first block on. kept: so many of its first
    blocks are in the daemon, and stay there."""

    name: str
    number: int
    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    chain: Optional[Chain] = None
    kept: int = 0

    def forsake(self) -> None:
        """The daemon keeps nothing for it any more."""
        chain, self.chain, self.kept = self.chain, None, 0
        if chain is not None:
            chain.close()


class Decoder:
    """For one rank of one engine. A step goes so:

        for sequence in step:  # once
            decoder.extend(sequence, keys, shards)
        decoder.begin()
        for each layer and sequence:
            lists = decoder.choose(sequence, layer, candidates, q)
            slots = decoder.resolve(sequence, layer, blocks)  # and attend what is in slots
        if decoder.missing:
            lost = decoder.serve()
            # throw away what the step computed, and repeat it from begin() on without the lost ones

    A repeated step finds everything that it chose in its first layers, so it is repeated as often as it has layers at the most."""

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
        deadline: float = 2.0,
        timeout: float = 1.0,
    ):
        """slots: empty, for as many layers, rows, slots and requests. deadline: for blocks and digests to come, in seconds.
        timeout: of calls that only name them."""
        self.source, self.digest, self.choices, self.room = source, digest, choices, room
        self.part, self.deadline, self.timeout = part, deadline, timeout
        self.layers, self.shard_bytes = len(choices.layers), shard_bytes
        self.counts = Counts()
        self.slots, self._numbers = slots, list(range(requests))
        self.rows = Rows(room.rows, slots.forget)
        self.pool = SharedMemory((room.slots + room.stream) * shard_bytes)
        self._digests = SharedMemory(room.rows * self.layers * digest.bytes)
        self._ns: Optional[Namespace] = None
        self._generation = 0
        self._pool_region: Optional[Region] = None
        self._digest_region: Optional[Region] = None
        self.sequences: dict[str, Sequence] = {}
        #: What this step chose and is in no slot, with who chose it.
        self.missing: dict[tuple[int, int], list[Sequence]] = {}

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
            self._ns, self._pool_region, self._digest_region = None, None, None
            plane = Plane(0, 0, self.shard_bytes, self.shard_bytes, 0)
            self._pool_region = self.source.ask(
                ns.register, [self.pool.memory()], [plane], blocks=self.room.slots + self.room.stream, part=self.part,
                pool=True, timeout=self.timeout,
            )
            size, n = self.digest.bytes, self.room.rows
            planes = [Plane(0, layer * n * size, size, size, layer) for layer in range(self.layers)]
            self._digest_region = self.source.ask(
                digests.register, [self._digests.memory()], planes, blocks=n, part=self.part, timeout=self.timeout
            )
            self._ns = ns if self._pool_region and self._digest_region else None
        return self._ns is not None

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
        if not self._connected() or sequence.kept >= len(keys):
            return sequence.kept
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
        return sequence.kept

    # ---- a step ----

    def begin(self) -> None:
        self.missing.clear()
        self.slots.begin()

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

    def resolve(self, sequence: Sequence, layer: int, blocks: abc.Sequence[int]) -> dict[int, int]:
        """The slots of those that are in one. The others are `missing`."""
        slots = {}
        for block in blocks:
            row = sequence.rows[block]
            slot = self.slots.use(layer, row, sequence.number)
            if slot is not None:
                slots[block] = slot
                self.counts.hits += 1
            else:
                self.missing.setdefault((layer, row), []).append(sequence)
                self.counts.misses += 1
        return slots

    def serve(self) -> set[Sequence]:
        """Fetches what is missing. Those whose blocks did not come: compute them again. They are closed by the caller."""
        slots = self.slots.take([(layer, row, by[0].number) for (layer, row), by in self.missing.items()])
        items = [(layer, row, slot) for (layer, row), slot in zip(self.missing, slots) if slot is not None]
        landed = set(items).difference(self._fetch(items))
        arrived = [(layer, row, slot) in landed for (layer, row), slot in zip(self.missing, slots)]
        self.slots.publish(arrived)
        self.counts.fetched += len(landed)
        self.counts.full += slots.count(None)
        return {sequence for by, came in zip(self.missing.values(), arrived) if not came for sequence in by}

    def _fetch(self, items: abc.Sequence[_Item]) -> list[_Item]:
        """Those that did not come."""

        def begin(some: abc.Sequence[_Item], left: float) -> Optional[Task]:
            keys = {row: i for i, row in enumerate(dict.fromkeys(row for _, row, _ in some))}
            assert self._pool_region is not None
            return self.source.ask(
                self._pool_region.fetch, b"".join(map(self.rows.key, keys)),
                [(keys[row], layer, slot) for layer, row, slot in some], priority=_URGENT, deadline=left, timeout=self.timeout,
            )

        failed = []
        for at in range(0, len(items), _MAX_ITEMS):
            failed += self._bring(items[at : at + _MAX_ITEMS], begin, lambda item: None)
        self.counts.failed += len(failed)
        return failed

    def stream(self, sequence: Sequence, layer: int, blocks: abc.Sequence[int]) -> Iterator[dict[int, int]]:
        """For a dense reader: slots of some of these blocks at a time, valid until the next ones are asked for."""
        first, n = self.room.slots, self.room.stream
        for at in range(0, len(blocks), n):
            some = blocks[at : at + n]
            slots = {block: first + i for i, block in enumerate(some)}
            items = [(layer, sequence.rows[block], slot) for block, slot in slots.items()]
            if self._fetch(items):
                raise Lost("blocks did not come")
            self.counts.streamed += len(items)
            yield slots

    def shard(self, slot: int) -> memoryview:
        return self.pool.buffer[slot * self.shard_bytes : (slot + 1) * self.shard_bytes]
