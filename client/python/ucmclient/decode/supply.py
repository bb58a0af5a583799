"""What a worker that decodes sparsely gets from the daemon, wherever its entries are. That is sequences with their references, rows of summaries, and layers of
blocks, which it gathers with timeouts."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

from ..client import BlockResult, Namespace, Region, Task
from ..errors import Status, UcmError
from ..sparse.sequence import BlockSequence, SummaryNamespace
from ..sparse.summary import Summary
from ..sparse.mapping import Referenced, SharedMapping
from .rows import Rows

#: Pause before asking a daemon again that is away, or has no room now.
PAUSE = 0.005
#: When the daemon goes away during a copy, its last bytes may land within this time.
_GRACE = 0.5
#: A later try may find the block.
_PASSING = frozenset((BlockResult.NO_ROOM, BlockResult.IN_PROGRESS, BlockResult.CANCELLED))
URGENT = 7
#: If a step lacks more than this many gathers bring, it is served layer by layer, because its later layers would choose differently. If it lacks less, most of
#: what layers attend is there, and their choices hardly change.
AT_ONCE = 16
#: Items of one gather, and keys of one load (proto/limits.h).
_MAX_ITEMS = 16384
#: How long keep() waits before it references again what has left the mapping.
_REF_AGAIN = 0.25
#: How long a reference waits at first, to see whether blocks have to be read from below DRAM.
_LOOK = 0.25
#: Such blocks come alongside the steps, which gather what they need meanwhile. How many a reference asks for, how long its step waits for it, and how long
#: after one the next begins at the earliest.
_BESIDE, _BESIDE_WAIT, _BESIDE_PAUSE = 256, 0.01, 0.05
#: How many keys keep_beside() asks for in one call; and the shortest wait of a reference, which the daemon counts in ms.
_APPENDED, GLANCE = 2048, 0.001
_ALL = 1 << 20
#: A layer or layer head, a row, and an entry.
Item = tuple[int, int, int]


class Source(Protocol):
    """The connection, as ucmclient.engine.vllm.link.Link has it. While the daemon is away, the namespaces are None; afterwards they may be other objects. away:
    no daemon is there, so nothing that it is asked for will come soon. ask() returns the call's result, or None if it failed."""

    @property
    def ns(self) -> Optional[Namespace]: ...

    @property
    def summaries(self) -> Optional[SummaryNamespace]: ...

    @property
    def away(self) -> bool: ...

    def ask(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any: ...

    def cut(self) -> None: ...


class Lost(Exception):
    """Blocks of a sequence are no longer available from the daemon: compute the sequence again."""


@dataclass
class Counts:
    """hits, misses: of entries. mapped: misses that were read from the mapping. evicted: reads of the mapping that found the block gone. gathered: entries that
    the daemon filled. streamed: layers of blocks that prefill read, in either way. computed, loaded: summaries of blocks, by this worker or from the daemon.
    failed: what the daemon was asked for and did not bring. full: misses that found no entry."""

    hits: int = 0
    misses: int = 0
    mapped: int = 0
    evicted: int = 0
    gathered: int = 0
    streamed: int = 0
    computed: int = 0
    loaded: int = 0
    failed: int = 0
    full: int = 0


@dataclass(eq=False)
class Sequence:
    """The state of one request. number: for Entries. keys, rows: of its candidates from the first block on. kept: how many of its first blocks are in the
    daemon, and stay there; asked: how many the daemon was asked for. referenced: how many it was asked to have in the mapping. coming: what keep_beside() was
    told of the blocks after these, and update() has not seen yet. It asks nothing before `again`. That is `pause` after an answer that brought nothing. taken:
    entries that the last run of a step used for it."""

    name: str
    number: int
    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    registered: Optional[BlockSequence] = None
    kept: int = 0
    asked: int = 0
    referenced: int = 0
    below: bool = False
    coming: Optional[tuple[SharedMapping, Referenced]] = None
    again: float = 0.0
    pause: float = 0.0
    taken: int = 0

    def forsake(self) -> None:
        """From now on the daemon keeps nothing for it."""
        registered, self.registered, self.kept, self.asked, self.referenced, self.below = self.registered, None, 0, 0, 0, False
        self.coming, self.again, self.pause = None, 0.0, 0.0
        if registered is not None:
            registered.close()


def _runs(layers: abc.Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive layers: the first, and how many."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and sum(runs[-1]) == layer:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return runs


class Supply:
    """Base of the classes that own the memory. In them `_registered` says where the daemon finds it, `_compute` makes summaries of blocks that have pages, and
    `_placed` takes places in the mapping, and `_forget` goes to the entries."""

    def __init__(
        self, source: Source, summary: Summary, entries: Any, layers: int, summarised: abc.Iterable[int], rows: int, requests: int, part: int,
        gather_timeout: float, timeout: float
    ):
        """entries: what requests enter and leave. summarised: layers whose summaries are held. gather_timeout: for blocks and summaries to come, in seconds. timeout: of calls that only
        name them."""
        self.source, self.summary, self._entries, self.layers, self.part = source, summary, entries, layers, part
        self.summarised = tuple(sorted(set(summarised)))
        if not self.summarised or self.summarised[0] < 0 or self.summarised[-1] >= layers:
            raise ValueError(f"summarised: layers {self.summarised} of {layers}; at least one, each below that, is right")
        self.gather_timeout, self.timeout = gather_timeout, timeout
        self.counts = Counts()
        self.rows, self._numbers = Rows(rows, self._forget), list(range(requests))
        self.sequences: dict[str, Sequence] = {}
        self._ns: Optional[Namespace] = None
        self._connection_epoch = 0
        self._landing_region: Optional[Region] = None
        self._summary_region: Optional[Region] = None
        self._mapping: Optional[SharedMapping] = None
        #: extend() does not wait for blocks to come into the mapping: its caller runs keep_beside() during steps.
        self._beside = False
        self._ref_again_at = self._beside_at = 0.0

    def _registered(self, ns: Namespace, summaries: SummaryNamespace) -> bool:
        """Sets the regions and the mapping, of a connection that has none of them yet."""
        raise NotImplementedError

    def _regions(self) -> list[Optional[Region]]:
        return [self._landing_region, self._summary_region]

    def _compute(self, wanted: abc.Sequence[tuple[int, Any]]) -> None:
        """Computes summaries of blocks into rows. Each item: the row, and what extend() got for the block."""
        raise NotImplementedError

    def _placed(self, rows: abc.Sequence[int], referenced: Referenced, mapping: SharedMapping) -> None:
        """Where the blocks of these rows lie in the mapping."""
        raise NotImplementedError

    def _forget(self, row: int) -> None:
        raise NotImplementedError

    # ---- the daemon ----

    def _connected(self) -> bool:
        """Registers the memory with each new client, and drops what an old connection registered: keep() makes new ones. Entries
        and rows keep what they hold: keys name contents."""
        ns, summaries = self.source.ns, self.source.summaries
        if ns is None or summaries is None:
            return False
        if ns is not self._ns or ns.client.connection_epoch != self._connection_epoch:
            for sequence in self.sequences.values():
                sequence.forsake()
            self._connection_epoch = ns.client.connection_epoch
        if ns is not self._ns:
            self._landing_region = self._summary_region = self._mapping = None
            self._ns = ns if self._registered(ns, summaries) else None
            if self._ns is None:
                self._unregister()  # the next call registers all of them
        return self._ns is not None

    def _unregister(self) -> None:
        """The daemon unmaps the memory, if it still has it."""
        for region in self._regions():
            if region is not None and not region.closed and not region.client.closed:
                self.source.ask(region.unregister, timeout=self.timeout)

    def _bring(
        self,
        what: abc.Sequence[Any],
        begin: Callable[[abc.Sequence[Any], float], Optional[Task]],
        landed: Callable[[Any], None],
        until: float = 0.0,
    ) -> list[Any]:
        """Waits until all have come, or the timeout is over, or the daemon is away. Returns what did not come. begin(what, seconds) starts the transfer of all;
        landed(one) runs for each that has come."""
        until, failed = until or time.monotonic() + self.gather_timeout, []
        while what:
            left = until - time.monotonic()
            if left <= 0:
                return failed + list(what)
            results = self._transferred(begin(what, left) if self._connected() else None, left)
            if results is None:
                if self.source.away:  # the engine computes sooner what is lost than a daemon comes back
                    return failed + list(what)
                time.sleep(min(PAUSE, left))
                continue
            again = []
            for one, result in zip(what, results):
                if result == BlockResult.OK:
                    landed(one)
                else:
                    (again if result in _PASSING else failed).append(one)
            if again:
                time.sleep(min(PAUSE, left))
            what = again
        return failed

    def _transferred(self, task: Optional[Task], left: float) -> Optional[bytes]:
        if task is None:
            return None
        try:
            return task.wait(left + PAUSE).blocks
        except UcmError as error:
            if error.status == Status.DEADLINE:  # nothing may still write to these entries
                self._cut()
            time.sleep(_GRACE)
            return None
        finally:
            task.close()

    def _cut(self) -> None:
        self.source.cut()

    # ---- sequences ----

    def open(self, name: str, floor: int = 0) -> Sequence:
        """floor: entries that it keeps against others."""
        if name not in self.sequences:
            self._entries.enter(self._numbers[-1], floor)  # if it raises, nothing was opened
            self.sequences[name] = Sequence(name, self._numbers.pop())
        return self.sequences[name]

    def close(self, name: str) -> None:
        """The request is over, or is computed again."""
        sequence = self.sequences.pop(name, None)
        if sequence is None:
            return
        self._entries.leave(sequence.number)
        self._numbers.append(sequence.number)
        for row in sequence.rows:
            self.rows.release(row)
        sequence.forsake()

    def adopt(self, sequence: Sequence, registered: BlockSequence, connection_epoch: int) -> None:
        """The sequence is new, and `registered` has its first blocks; the sequence owns it from now on. connection_epoch: the client's when `registered` was
        made. If that was an older connection, it is closed."""
        ns = self._ns if self._connected() else None
        if ns is None or registered.client is not ns.client or connection_epoch != self._connection_epoch:
            registered.close()
            return
        sequence.registered, sequence.kept, sequence.asked = registered, len(registered), len(registered)

    def extend(self, sequence: Sequence, keys: abc.Sequence[bytes], pages: Callable[[int], Any]) -> None:
        """Makes candidates of the blocks of these keys, from the sequence's end on. pages(i): where block i of the sequence is,
        for what computes summaries; None: it has no pages, and its summaries are loaded."""
        load, compute, room = [], [], True
        for key in keys:
            row = self.rows.bind(key)
            room = row is not None
            if row is None:
                break
            sequence.keys.append(key)
            sequence.rows.append(row)
            if self.rows.filled(row):
                continue
            at = pages(len(sequence.rows) - 1)
            if at is None:
                load.append((key, row))
            else:
                compute.append((row, at))
        if compute:
            self._compute(compute)
            self.counts.computed += len(compute)
        for row, _ in compute:
            self.rows.fill(row)
        if not room:
            raise Lost("all rows of summaries are in use")
        if load:
            self._load_summaries(sequence, load)

    def bind(self, sequence: Sequence, keys: abc.Sequence[bytes]) -> None:
        """Makes candidates of blocks that the step under way fills. The caller makes their summaries, layer by layer, and calls rows.fill() when they have
        all."""
        for key in keys:
            row = self.rows.bind(key)
            if row is None:
                raise Lost("all rows of summaries are in use")
            sequence.keys.append(key)
            sequence.rows.append(row)

    def _load_summaries(self, sequence: Sequence, wanted: list[tuple[bytes, int]]) -> None:
        if self._beside and self._connected():
            self._append(sequence, sequence.keys, True)
            self._take(sequence)
        else:
            self.keep(sequence, sequence.keys, build=True)
        failed = 0
        for at in range(0, len(wanted), _MAX_ITEMS):
            failed += self._load_some(wanted[at : at + _MAX_ITEMS])
        if failed:
            self.counts.failed += failed
            raise Lost(f"summaries of {failed} blocks did not come")

    def _load_some(self, wanted: abc.Sequence[tuple[bytes, int]]) -> int:
        """Loads one run of layers after the other. Returns how many did not come."""
        coming, until = dict.fromkeys(wanted), time.monotonic() + self.gather_timeout
        for first, layers in _runs(self.summarised):

            def begin(some: abc.Sequence[tuple[bytes, int]], left: float) -> Optional[Task]:
                region, keys = self._summary_region, b"".join(key for key, _ in some)
                assert region is not None
                return self.source.ask(
                    region.load, keys, [row for _, row in some], layer=first, layers=layers, priority=URGENT, daemon_timeout=left,
                    timeout=self.timeout,
                )

            for one in self._bring(list(coming), begin, lambda one: None, until):
                del coming[one]
        for _, row in coming:
            self.rows.fill(row)
        self.counts.loaded += len(coming)
        return len(wanted) - len(coming)

    def keep(self, sequence: Sequence, keys: abc.Sequence[bytes], build: bool = False) -> int:
        """Has the daemon keep the sequence's first blocks, which these keys name, as far as it has them. Returns how many: their pages may be given back.
        build: the daemon computes their summaries where it has none."""
        if not self._connected():
            return sequence.kept
        if sequence.kept < len(keys):
            self._append(sequence, keys, build)
        self._ref_again()
        self._ref(sequence)
        return sequence.kept

    def _keep_all(self) -> None:
        """For each sequence, asks what the daemon was not asked yet, or may answer differently now. In most steps that is nothing."""
        self._ref_again()
        for sequence in self.sequences.values():
            if self._unreferenced(sequence) or sequence.asked < len(sequence.keys):
                self.keep(sequence, sequence.keys)

    def _unreferenced(self, sequence: Sequence) -> bool:
        return self._mapping is not None and sequence.referenced < min(sequence.kept, len(sequence.rows))

    def keep_beside(self, seconds: float) -> bool:
        """Asks what keep() asks, for all sequences, while a step runs. It takes about so long, and nothing that a step reads changes before the next _come().
        Returns whether it asked for anything."""
        until, ns, asked = time.monotonic() + seconds, self.source.ns, False
        if ns is None or ns is not self._ns or ns.client.connection_epoch != self._connection_epoch:
            return False
        for sequence in sorted(self.sequences.values(), key=lambda sequence: sequence.again):
            now = time.monotonic()
            if until - now < GLANCE:
                break
            wants = self._unreferenced(sequence) or sequence.kept < len(sequence.keys)
            if wants and sequence.coming is None and sequence.again <= now:
                self._ask_beside(sequence, until)
                asked = True
        return asked

    def _ask_beside(self, sequence: Sequence, until: float) -> None:
        """After an answer that brought nothing it pauses, each time twice as long. Blocks are not stored yet, or the mapping is full."""
        mapping, kept = self._mapping, sequence.kept
        if kept < len(sequence.keys):
            self._append(sequence, sequence.keys[: kept + _APPENDED], False)
        end = min(sequence.kept, len(sequence.rows), sequence.referenced + _BESIDE)
        referenced = self._ask_mapping(sequence, end, 0, max(GLANCE, until - time.monotonic()))
        if mapping is not None and referenced is not None:
            sequence.coming = mapping, referenced
        if sequence.kept > kept or (referenced is not None and next(iter(referenced)) is not None):
            sequence.again = sequence.pause = 0.0
        else:
            sequence.pause = min(max(_BESIDE_PAUSE, 2 * sequence.pause), _REF_AGAIN)
            sequence.again = time.monotonic() + sequence.pause

    def _come(self) -> None:
        """What keep_beside() has found counts from now on."""
        for sequence in self.sequences.values():
            coming, sequence.coming = sequence.coming, None
            if coming is not None and coming[0] is self._mapping:
                self._came(sequence, *coming)

    def _came(self, sequence: Sequence, mapping: SharedMapping, referenced: Referenced) -> None:
        first = sequence.referenced
        self._placed(sequence.rows[first : first + len(referenced)], referenced, mapping)
        all_of_it = referenced.placed + referenced.missing == len(referenced)
        sequence.referenced = first + (len(referenced) if all_of_it else self._placeless(referenced))

    def _take(self, sequence: Sequence) -> None:
        """Takes what of it lies in the mapping already. The rest comes alongside steps."""
        mapping = self._mapping
        referenced = self._ask_mapping(sequence, min(sequence.kept, len(sequence.rows)), URGENT, GLANCE)
        if mapping is not None and referenced is not None:
            self._came(sequence, mapping, referenced)

    def _append(self, sequence: Sequence, keys: abc.Sequence[bytes], build: bool) -> None:
        if sequence.registered is None:
            sequence.registered = self.source.ask(BlockSequence, self.source.summaries, self.part, timeout=self.timeout)
        registered = sequence.registered
        if registered is not None:
            more = b"".join(keys[len(registered) :])
            appended = self.source.ask(
                registered.append, more, build=build, priority=URGENT, daemon_timeout=self.gather_timeout, timeout=self.gather_timeout
            )
            if appended is not None:
                sequence.kept, sequence.asked = appended.blocks, len(keys)

    def _ref_again(self) -> None:
        """When it is time for what has left the mapping."""
        if self._ref_again_at and time.monotonic() >= self._ref_again_at:
            self._ref_again_at = 0.0
            for sequence in self.sequences.values():
                if not sequence.below:
                    sequence.referenced, sequence.coming = 0, None

    def _ref(self, sequence: Sequence) -> None:
        """Asks the daemon to bring the sequence's blocks into the mapping. For a block that is referenced already it answers the place again.
        This waits while blocks are copied within DRAM. Blocks of lower tiers are read a few at a time, between decoding steps."""
        left, until = self.gather_timeout, time.monotonic() + self.gather_timeout
        while left > 0 and not sequence.below and self._ref_some(sequence, _ALL, URGENT, min(_LOOK, left)):
            left = until - time.monotonic()
        if sequence.below and time.monotonic() >= self._beside_at:
            self._ref_some(sequence, _BESIDE, 0, _BESIDE_WAIT)
            self._beside_at = time.monotonic() + _BESIDE_PAUSE

    def _ref_some(self, sequence: Sequence, most: int, priority: int, wait: float) -> bool:
        """References so many of those that are not referenced. False: asking for more at once would be in vain."""
        mapping, first, kept = self._mapping, sequence.referenced, min(sequence.kept, len(sequence.rows))
        end = min(kept, first + most)
        referenced = self._ask_mapping(sequence, end, priority, wait)
        if mapping is None or referenced is None:
            return False
        self._placed(sequence.rows[first:end], referenced, mapping)
        late = referenced.moved + referenced.read > 0 and referenced.placed + referenced.missing < end - first
        if late:  # those that came are referenced; more come
            end = first + self._placeless(referenced)
        sequence.referenced, sequence.below = end, (sequence.below or (late and referenced.read > 0)) and end < kept
        return late

    def _ask_mapping(self, sequence: Sequence, end: int, priority: int, wait: float) -> Optional[Referenced]:
        """References its blocks up to `end` that are not referenced. Returns the places of those that came in so many seconds."""
        first = sequence.referenced
        if self._mapping is None or sequence.registered is None or first >= end:
            return None
        referenced: Optional[Referenced] = self.source.ask(
            self._mapping.ref, sequence.registered, first, end - first, priority=priority, daemon_timeout=wait, timeout=self.gather_timeout
        )
        return referenced

    @staticmethod
    def _placeless(referenced: Referenced) -> int:
        """The first block that has no place."""
        return next(i for i, place in enumerate(referenced) if place is None)

    def _ref_later(self) -> None:
        """After a pause, the next keep() references again what has left the mapping."""
        self._ref_again_at = self._ref_again_at or time.monotonic() + _REF_AGAIN

    def _gather(self, items: abc.Sequence[Item], region: Callable[[], Optional[Region]]) -> list[Item]:
        """Gathers layers of rows into entries of a pool. Returns those that did not come. region: the pool, on the present connection."""

        def begin(some: abc.Sequence[Item], left: float) -> Optional[Task]:
            keys = {row: i for i, row in enumerate(dict.fromkeys(row for _, row, _ in some))}
            pool = region()
            assert pool is not None
            return self.source.ask(
                pool.gather, b"".join(map(self.rows.key, keys)),
                [(keys[row], layer, entry) for layer, row, entry in some], priority=URGENT, daemon_timeout=left, timeout=self.timeout,
            )

        failed = []
        for at in range(0, len(items), _MAX_ITEMS):
            failed += self._bring(items[at : at + _MAX_ITEMS], begin, lambda item: None)
        self.counts.failed += len(failed)
        return failed

    def end(self) -> None:
        """Ends decoding here. The memory may go afterwards."""
        for name in list(self.sequences):
            self.close(name)
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
        self._unregister()
