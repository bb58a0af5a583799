"""A worker's half of sparse decoding: entries, rows of summaries, and what it asks of the daemon.

What a token takes and is in no entry comes in one of two ways. The worker itself reads the *shared mapping* in the middle of a layer, and the
step goes on. What the mapping doesn't have, the daemon gathers when the step is over; then the step is repeated."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from typing import Any, Optional, Protocol

from ..client import Namespace, Plane, Region
from ..errors import UcmError
from ..memory import SharedMemory
from ..sparse.sequence import SummaryNamespace
from ..sparse.summary import Summary, Summaries
from ..sparse.mapping import Referenced, SharedMapping
from .choices import Choices, Room
from .heads import HeadBytes
from .supply import AT_ONCE, Item, Lost, Sequence, Source, Supply

#: Layer head, row.
_Key = tuple[int, int]


class Entries(Protocol):
    """Which entry holds which layer head of which row, as kernels/entries/entries.h defines it. A request is a small number. The order in a
    layer is resolve, take, copies, publish."""

    def enter(self, request: int, floor: int) -> None: ...

    def leave(self, request: int) -> None: ...

    def forget(self, row: int) -> None: ...

    def begin(self) -> None:
        """Begins a step, or another run of it."""

    def resolve(self, layer_head: int, sequences: abc.Sequence[Chosen], apart: bool) -> None:
        """apart: the l-th list of each sequence is of layer_head + l; else all are of layer_head."""

    def want(self, wanted: abc.Sequence[tuple[int, int, int]]) -> None:
        """Between two runs: as if a list had chosen these. Each has a layer head, a row and a request."""

    def take(self) -> list[tuple[int, int, Optional[int]]]:
        """Layer head, row and entry of all misses. One without an entry found all entries in use by this run."""

    def publish(self, arrived: abc.Sequence[bool]) -> None:
        """For each of take()'s entries, whether its bytes are there."""

    def entry(self, layer_head: int, row: int) -> Optional[int]:
        """None: it is in no entry."""


#: A request, the row of each of its blocks, and blocks by lists.
Chosen = tuple[int, abc.Sequence[int], abc.Sequence[abc.Sequence[int]]]


class Decoder(Supply):
    """For one rank of one engine. A step:

        for sequence in step:  # once
            decoder.extend(sequence, keys, pages)
        decoder.begin()
        for each layer:
            lists = decoder.choose(sequence, layer, candidates, q)  # of each sequence
            entries = decoder.resolve(layer, [(sequence, lists), ...])  # and attend what is in entries
        if decoder.missing:
            lost = decoder.serve()
            # throw away what the step computed, and repeat it from begin() on without the lost ones

    A repeated step finds everything that it chose in its first layers, so it is repeated at most as often as it has layers. With `apart`, an
    entry holds one KV head of a layer of a block, else a layer of it."""

    def __init__(
        self,
        source: Source,
        summary: Summary,
        choices: Choices,
        room: Room,
        entries: Entries,
        *,
        requests: int,
        layer_bytes: int,
        part: int = 0,
        apart: bool = False,
        mapping: bool = False,
        gather_timeout: float = 2.0,
        timeout: float = 1.0,
    ):
        """entries: empty, for the same numbers of layer heads, rows, entries and requests. mapping: read from the daemon's mapping, if it has
        one."""
        self.entries = entries
        self._places: dict[int, Any] = {}
        super().__init__(source, summary, entries, len(choices.layers), choices.choosing, room.rows, requests, part, gather_timeout, timeout)
        self._summary_of = {layer: i for i, layer in enumerate(self.summarised)}
        self.choices, self.room, self.layer_bytes, self._maps = choices, room, layer_bytes, mapping
        self._heads = HeadBytes(summary.shape) if apart else None
        self.layer_heads, self.entry_bytes = (summary.shape.kv_heads, self._heads.bytes) if self._heads else (1, layer_bytes)
        self.pool = SharedMemory(room.entries * self.entry_bytes)
        #: Whole layers of blocks on their way.
        self.landing = SharedMemory(room.stream * layer_bytes)
        self._summaries = SharedMemory(room.rows * len(self.summarised) * summary.bytes)
        self._pool_region: Optional[Region] = None
        #: Layer heads of rows that this run chose and that are in no entry, each with the sequences that chose it.
        self.missing: dict[_Key, list[Sequence]] = {}
        #: Set by serve(): sequences for whose blocks there were too few entries.
        self.crowded: set[Sequence] = set()
        #: Layers after one that misses blocks get no entries, since their choices are worthless.
        self._careful = False

    # ---- what the supply asks ----

    def _forget(self, row: int) -> None:
        self.entries.forget(row)
        self._places.pop(row, None)

    def _placed(self, rows: abc.Sequence[int], referenced: Referenced, mapping: SharedMapping) -> None:
        self._places.update({row: place for row, place in zip(rows, referenced) if place is not None})

    def _registered(self, ns: Namespace, summaries: SummaryNamespace) -> bool:
        self._pool_region = None
        self._places.clear()  # they mean something to one mapping
        plane = Plane(0, 0, self.layer_bytes, self.layer_bytes, 0)
        for name, memory, n in (("_pool_region", self.pool, self.room.entries), ("_landing_region", self.landing, self.room.stream)):
            if memory is self.pool and self._heads:
                continue  # the daemon writes whole layers
            region = self.source.ask(
                ns.register, [memory.memory()], [plane], blocks=n, part=self.part, block_pool=True, timeout=self.timeout
            )
            setattr(self, name, region)
            if region is None:
                return False
        size, n = self.summary.bytes, self.room.rows
        planes = [Plane(0, i * n * size, size, size, layer) for i, layer in enumerate(self.summarised)]
        self._summary_region = self.source.ask(
            summaries.register, [self._summaries.memory()], planes, blocks=n, part=self.part, timeout=self.timeout
        )
        if self._maps and self._summary_region is not None:
            self._mapping = self.source.ask(SharedMapping, ns, self.part, timeout=self.timeout)
        return self._summary_region is not None

    def _regions(self) -> list[Optional[Region]]:
        return [self._pool_region, *super()._regions()]

    def _at(self, layer: int, row: int) -> slice:
        begin = (self._summary_of[layer] * self.room.rows + row) * self.summary.bytes
        return slice(begin, begin + self.summary.bytes)

    def _compute(self, wanted: abc.Sequence[tuple[int, Any]]) -> None:
        """extend()'s pages are the bytes of all layers."""
        for row, layers in wanted:
            for layer in self.summarised:
                self._summaries.buffer[self._at(layer, row)] = self.summary.compute(layers[layer], 1).data.cast("B")

    # ---- a step ----

    def begin(self, again: bool = False) -> None:
        """again: a repeated run of the step."""
        self._careful = again and self._careful
        self.missing.clear()
        for sequence in self.sequences.values():
            sequence.taken = 0
        self.entries.begin()
        if self._mapping is not None and self._connected():  # the daemon may want some of the mapping back
            self.source.ask(self._mapping.client.process)

    def choose(self, sequence: Sequence, layer: int, candidates: int, q: Any, dtype: Any = None) -> list[list[int]]:
        """Chooses among the first `candidates` blocks; lists as Summaries.select returns them."""
        lists = self.summary.shape.kv_heads if self.choices.score.heads == "each" else 1
        if candidates == 0:
            return [[] for _ in range(lists)]
        rows = sequence.rows[:candidates]
        assert len(rows) == candidates
        of_rows = b"".join(self._summaries.buffer[self._at(layer, row)] for row in rows)
        chosen = Summaries(self.summary, of_rows).select(q, self.choices.of_candidates(layer, candidates), self.choices.score, dtype)
        return [list(one) for one in chosen.lists]

    def resolve(
        self, layer: int, chosen: abc.Sequence[tuple[Sequence, abc.Sequence[abc.Sequence[int]]]]
    ) -> list[list[dict[int, int]]]:
        """For each list of each sequence, the entries of its blocks, after reading available blocks from the mapping. Blocks without one are
        `missing`. With `apart` there is a list for each KV head."""
        if self._careful and self.missing:
            return [[{} for _ in lists] for _, lists in chosen]
        first, apart = layer * self.layer_heads, self._heads is not None
        self.entries.resolve(first, [(sequence.number, sequence.rows, lists) for sequence, lists in chosen], apart)
        misses = self.entries.take()
        arrived = self._from_mapping(misses)
        self.entries.publish(arrived)
        found, keys = [], set()
        for sequence, lists in chosen:
            own = {(first + apart * l, sequence.rows[block]) for l, blocks in enumerate(lists) for block in blocks}
            sequence.taken += len(own)
            keys |= own
            for layer_head, row in own:
                if self.entries.entry(layer_head, row) is None:
                    self.missing.setdefault((layer_head, row), []).append(sequence)
            at = [{block: self.entries.entry(first + apart * l, sequence.rows[block]) for block in blocks} for l, blocks in enumerate(lists)]
            found.append([{block: entry for block, entry in of.items() if entry is not None} for of in at])
        self.counts.hits += len(keys) - len(misses)
        self.counts.misses += len(misses)
        self.counts.mapped += sum(arrived)
        return found

    def _from_mapping(self, misses: abc.Sequence[tuple[int, int, Optional[int]]]) -> list[bool]:
        """For each miss, whether its entry has its bytes now."""
        read: dict[_Key, Optional[bytearray]] = {}
        arrived = []
        for layer_head, row, entry in misses:
            layer, head = divmod(layer_head, self.layer_heads)
            if entry is not None and (layer, row) not in read:
                read[layer, row] = self._mapping_bytes(layer, row)
            data = read.get((layer, row)) if entry is not None else None
            if data is not None:
                self._fill(entry, head, data)
            arrived.append(data is not None)
        return arrived

    def _mapping_bytes(self, layer: int, row: int) -> Optional[bytearray]:
        place, mapping = self._places.get(row), self._mapping
        if place is None or mapping is None:
            return None
        try:
            data = mapping.read(place, layer * self.layer_bytes, self.layer_bytes)
        except UcmError:  # the client was closed
            data = None
        if data is None:
            del self._places[row]
            self.counts.evicted += 1
            self._ref_later()
        return data

    def _fill(self, entry: int, head: int, data: Any) -> None:
        """Copies what the entry holds of a layer of a block."""
        self.bytes_of(entry)[:] = self._heads.of(head, data) if self._heads else data

    def serve(self) -> set[Sequence]:
        """Gathers what is missing. Returns the sequences whose blocks did not come: close them and compute them again. `crowded` are others,
        for which a step has too few entries. If there are any, repeat the step without some sequence."""
        missing = self.missing
        if len(missing) > AT_ONCE * self.room.stream:
            first = min(missing)[0] // self.layer_heads
            missing = {key: by for key, by in missing.items() if key[0] // self.layer_heads == first}
        self.entries.want([(layer_head, row, by[0].number) for (layer_head, row), by in missing.items()])
        taken = self.entries.take()
        items = [(layer_head, row, entry) for layer_head, row, entry in taken if entry is not None]
        landed = set(items).difference(self._gather_entries(items))
        self.entries.publish([item in landed for item in taken])
        self.counts.gathered += len(landed)
        self.counts.full += len(taken) - len(items)
        full = {sequence for layer_head, row, entry in taken if entry is None for sequence in self.missing[layer_head, row]}
        self.crowded, self._careful = (full if self._careful else set()), self._careful or bool(full)
        return {sequence for layer_head, row, entry in set(items) - landed for sequence in self.missing[layer_head, row]}

    def _gather_entries(self, items: abc.Sequence[Item]) -> list[Item]:
        """Those that did not come."""
        if self._heads is None:
            return self._gather(items, lambda: self._pool_region)
        entries: dict[_Key, list[Item]] = {}
        for item in items:
            entries.setdefault((item[0] // self.layer_heads, item[1]), []).append(item)
        failed, wanted = [], list(entries)
        for at in range(0, len(wanted), self.room.stream):
            some = [(layer, row, i) for i, (layer, row) in enumerate(wanted[at : at + self.room.stream])]
            late = set(self._gather(some, lambda: self._landing_region))
            for layer, row, i in some:
                for layer_head, _, entry in entries[layer, row]:
                    if (layer, row, i) in late:
                        failed.append((layer_head, row, entry))
                    else:
                        self._fill(entry, layer_head % self.layer_heads, self.landed(i))
        return failed

    def stream(self, sequence: Sequence, layer: int, blocks: abc.Sequence[int]) -> Iterator[dict[int, Any]]:
        """For a dense reader: this layer of some of these blocks at a time, as bytes. They are valid until the reader asks for the next."""
        for at in range(0, len(blocks), self.room.stream):
            some = blocks[at : at + self.room.stream]
            found: dict[int, Any] = {block: self._mapping_bytes(layer, sequence.rows[block]) for block in some}
            away = [block for block in some if found[block] is None]
            if self._gather([(layer, sequence.rows[block], i) for i, block in enumerate(away)], lambda: self._landing_region):
                raise Lost("blocks did not come")
            found.update({block: self.landed(i) for i, block in enumerate(away)})
            self.counts.streamed += len(some)
            yield found

    def bytes_of(self, entry: int) -> memoryview:
        return self.pool.buffer[entry * self.entry_bytes : (entry + 1) * self.entry_bytes]

    def landed(self, i: int) -> memoryview:
        return self.landing.buffer[i * self.layer_bytes : (i + 1) * self.layer_bytes]
