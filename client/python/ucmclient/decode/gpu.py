"""A sparse decoder whose entries are on a GPU: Supply around cuda.Steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import abc
from collections.abc import Callable, Iterable
from typing import Any, Optional

from ..client import Namespace, Plane, Region
from ..errors import UcmError
from ..memory import cuda_allocation
from ..sparse.sequence import BlockSequence, SummaryNamespace
from ..sparse.summary import Summary
from ..sparse.mapping import Referenced, SharedMapping
from .cuda import Flag, Key, Result, Steps
from .supply import AT_ONCE, URGENT, Item, Sequence, Source, Supply

#: Registers a tensor's memory with the daemon. Arguments: the namespace, planes counted from the tensor's first byte, blocks, whether it is a pool
#: for gathers, the part, and a timeout.
Register = Callable[[Namespace, Any, abc.Sequence[Plane], int, bool, int, float], Region]


class GpuDecoder(Supply):
    """For one rank of one engine. A step, with the stream at rest outside of run():

        for i, sequence in enumerate(step):  # once
            decoder.extend(sequence, keys, pages)
            decoder.keep(sequence, keys)
            decoder.write(table[i], sequence)
        decoder.update()
        run()  # steps.begin(), each layer's selection over decoder.summaries[layer] and steps.layer(), steps.end(); or a graph of it
        while not decoder.counted():
            lost = decoder.serve()
            # without the lost ones, and if there are crowded ones, without some of them:
            run()

    Block numbers of `steps` are rows. torch makes the tensors."""

    def __init__(
        self,
        source: Source,
        summary: Summary,
        steps: Steps,
        *,
        layer_bytes: int,
        landing: int = 128,
        build: Optional[Callable[[abc.Sequence[Any], abc.Sequence[int]], None]] = None,
        register: Optional[Register] = None,
        mapping: bool = True,
        beside: bool = False,
        part: int = 0,
        summarised: Optional[Iterable[int]] = None,
        gather_timeout: float = 2.0,
        timeout: float = 1.0,
    ):
        """steps: no request has entered it. landing: layers of blocks that are gathered at once. summarised: layers that choose (Choices.choosing),
        since others need no summaries; None: all. build(pages, rows): by cuda.Builder, makes summaries of blocks that extend() finds in the
        engine's pages, into self.summaries of these layers. register: by default the daemon maps the memory, and no copy agent helps. mapping: read
        from the daemon's mapping, if it has one. beside: extend() does not wait for blocks to come there; the caller has keep_beside() called while
        steps run."""
        import torch

        #: Rows that now stand for other blocks, which the entries don't know yet.
        self._forgotten: list[int] = []
        #: Held while another thread takes references, and while the mapping is closed.
        self._referencing = threading.Lock()
        super().__init__(
            source, summary, steps, steps.layers, range(steps.layers) if summarised is None else summarised, steps.numbers, steps.requests, part,
            gather_timeout, timeout,
        )
        self.steps, self.layer_bytes, self._build, self._maps, self._beside = steps, layer_bytes, build, mapping, beside
        self._register = register or _register
        self._tensor = torch.tensor
        #: [summarised][rows][bytes of a summary], for the daemon
        self._summaries = torch.zeros((len(self.summarised), steps.numbers, summary.bytes), dtype=torch.uint8, device=steps.device)
        #: For each layer [rows][bytes of a summary], or None.
        self.summaries: list[Any] = [None] * self.layers
        for i, layer in enumerate(self.summarised):
            self.summaries[layer] = self._summaries[i]
        self._landing = torch.empty((landing, layer_bytes), dtype=torch.uint8, device=steps.device)
        #: Set by serve(): sequences of a step that needs more entries than there are.
        self.crowded: set[Sequence] = set()
        self._missed = 0
        self._full = self._late = False

    # ---- what the supply asks ----

    def _registered(self, ns: Namespace, summaries: SummaryNamespace) -> bool:
        with self._referencing:
            self.steps.leave_mapping()  # of a client before
            self._mapping = None
        size, n = self.summary.bytes, self.steps.numbers
        planes = [Plane(0, i * n * size, size, size, layer) for i, layer in enumerate(self.summarised)]
        whole = [Plane(0, 0, self.layer_bytes, self.layer_bytes, 0)]
        ask, part, timeout = self.source.ask, self.part, self.timeout
        self._landing_region = ask(self._register, ns, self._landing, whole, len(self._landing), True, part, timeout)
        self._summary_region = ask(self._register, summaries, self._summaries, planes, n, False, part, timeout)
        if self._landing_region is None or self._summary_region is None:
            return False
        if self._maps:
            self._mapping = ask(SharedMapping, ns, part, addresses=True, timeout=timeout)
        return True

    def _compute(self, wanted: abc.Sequence[tuple[int, Any]]) -> None:
        if self._build is None:
            raise ValueError("extend() got pages, and this decoder has no build to make summaries of them")
        self._build([page for _, page in wanted], [row for row, _ in wanted])

    def _placed(self, rows: abc.Sequence[int], referenced: Referenced, mapping: SharedMapping) -> None:
        self._forget_all()  # it takes places away

        def places() -> bool:
            self.steps.places(rows, referenced, mapping)
            return True

        if not self.source.ask(places):  # the driver can't register it: what misses is gathered
            with self._referencing:
                self.steps.leave_mapping()
                self._mapping = None
                mapping.close()

    def _forget(self, row: int) -> None:
        self._forgotten.append(row)

    def _forget_all(self) -> None:
        if self._forgotten:
            self.steps.forget(self._forgotten)
            self._forgotten = []  # now that the entries know it

    def _cut(self) -> None:
        self.steps.leave_mapping()  # while it is mapped
        self.source.cut()

    # ---- a step ----

    def extend(self, sequence: Sequence, keys: abc.Sequence[bytes], pages: Callable[[int], Any]) -> None:
        try:
            super().extend(sequence, keys, pages)
        finally:
            self._forget_all()

    def bind(self, sequence: Sequence, keys: abc.Sequence[bytes]) -> None:
        try:
            super().bind(sequence, keys)
        finally:
            self._forget_all()

    def write(self, table: Any, sequence: Sequence, first: int = 0) -> None:
        """The rows of the sequence's blocks from `first` on into its table, int32 on the GPU."""
        rows = self._tensor(sequence.rows[first:], dtype=table.dtype)
        table[first : first + len(rows)].copy_(rows)

    def ref_beside(self, registered: BlockSequence, first: int, n: int, wait: float) -> Optional[Referenced]:
        """For another thread than that of the steps. Has these blocks brought into the mapping, for so long, and its memory registered with the
        driver. For that time it may keep the steps' thread from the mapping. None: there is no mapping, or no daemon."""
        with self._referencing:
            if self._mapping is None:
                return None
            referenced = self.source.ask(self._mapping.ref, registered, first, n, priority=URGENT, daemon_timeout=wait, timeout=self.gather_timeout)
        while self._register_beside():
            pass
        return referenced

    def _register_beside(self) -> bool:
        """The driver takes milliseconds to pin a slab's memory, and more than a second for all of a long prompt's. In one step, all requests would
        wait for it."""
        with self._referencing:
            return self._mapping is not None and bool(self.source.ask(self.steps.register_mapping, self._mapping))

    @property
    def mapped(self) -> bool:
        """Whether it reads from a mapping now, which has the blocks that are referenced."""
        return self._mapping is not None

    def update(self, keep: bool = True) -> None:
        """Between steps: gives the daemon what it wants back of the mapping, and takes what keep_beside() has found there. keep: also references
        again what left the mapping, and has the daemon keep what is new. The daemon may have to copy first, and the caller waits. Otherwise
        keep_beside() does that while a step runs."""
        mapping = self._mapping
        if mapping is not None and (mapping.client is None or mapping.client.closed):
            with self._referencing:
                self.steps.leave_mapping()
                self._mapping = self._ns = None
        if not self._connected():
            self._give_back()
            return
        if self._mapping is not None:
            self.source.ask(self._mapping.client.process)
            if self.source.ask(self.steps.update_mapping):
                self._ref_later()
        self._come()
        if keep:
            self._keep_all()
        else:
            self._ref_again()

    def _give_back(self) -> None:
        """Gives memory back while no other calls are made, since the daemon would end the connection of a client that keeps it."""
        with contextlib.suppress(UcmError):
            if self._mapping is not None and self.steps.update_mapping():
                self._ref_later()

    def counted(self) -> bool:
        """Whether the step that ran last counts. Its end has run."""
        result = self.steps.result()
        self._count(result)
        mistakes = result.flags & (Flag.STRAY | Flag.NO_PAGE)
        late = bool(result.flags & Flag.NO_ENTRY and not result.flags & Flag.UNSERVED)
        if mistakes or (late and self._late):  # once, its copy may have taken too long: another run finds it
            raise RuntimeError(f"the step's lists or pages are wrong: {mistakes or result.flags!r}")
        self._late = late
        if not result.flags:
            self._full = False
        return not result.flags

    def _count(self, result: Result) -> None:
        missed, self._missed = result.missed - self._missed, result.missed
        self.counts.misses += missed
        self.counts.mapped += max(0, missed - result.unserved)

    def serve(self) -> set[Sequence]:
        """Gathers what the step did not get, for another run. Returns the sequences whose blocks did not come: close them and compute them again.
        If two runs after each other found too few entries, all sequences are `crowded`: run without some of them."""
        full = bool(self.steps.result().flags & Flag.FULL)
        self.crowded, self._full = (set(self.sequences.values()) if full and self._full else set()), full
        self.counts.full += full
        wanted = self._wanted(self.steps.unserved(first_layer=self.steps.result().unserved > AT_ONCE * len(self._landing)))
        if self._mapping is not None:
            self._ref_later()
        users = self._users({row for _, row in wanted})
        lost: set[Sequence] = set()
        rest, until = list(wanted), time.monotonic() + self.gather_timeout
        for at in range(0, len(rest), len(self._landing)):
            items = [(layer, row, i) for i, (layer, row) in enumerate(rest[at : at + len(self._landing)])]
            in_time = at == 0 or time.monotonic() < until
            late = set(self._gather(items, lambda: self._landing_region) if in_time else items)
            lost.update(sequence for _, row, _ in late for sequence in users.get(row, ()))
            self._put([item for item in items if item not in late], wanted, users)
        return lost

    @staticmethod
    def _wanted(keys: Iterable[Key]) -> dict[tuple[int, int], list[Key]]:
        """By layer and row, which are gathered as a whole."""
        wanted: dict[tuple[int, int], list[Key]] = {}
        for key in keys:
            wanted.setdefault((key.layer, key.number), []).append(key)
        return wanted

    def _users(self, rows: set[int]) -> dict[int, list[Sequence]]:
        users: dict[int, list[Sequence]] = {}
        for sequence in self.sequences.values():
            for row in rows.intersection(sequence.rows):
                users.setdefault(row, []).append(sequence)
        return users

    def _put(
        self, items: abc.Sequence[Item], wanted: dict[tuple[int, int], list[Key]], users: dict[int, list[Sequence]]
    ) -> None:
        begin = self._landing.data_ptr()
        known = [
            (key, users[row][0].number if row in users else 0, begin + i * self.layer_bytes)
            for layer, row, i in items
            for key in wanted[layer, row]
        ]
        if known:
            self.counts.gathered += self.steps.put(known)
            self._missed += len(known)  # put() counts them again

    def end(self) -> None:
        """Ends decoding here. The stream must be at rest; the caller closes steps."""
        self.steps.leave_mapping()
        super().end()


def _register(
    ns: Namespace, tensor: Any, planes: abc.Sequence[Plane], blocks: int, block_pool: bool, part: int, timeout: float
) -> Region:
    memory, base, gpu = cuda_allocation(tensor.data_ptr())
    first = tensor.data_ptr() - base
    at = [Plane(0, first + p.offset, p.stride, p.block_bytes, p.layer) for p in planes]
    return ns.register([memory], at, blocks=blocks, part=part, gpu=gpu, block_pool=block_pool, timeout=timeout)
