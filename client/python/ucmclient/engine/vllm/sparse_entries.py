"""Which entry of a pool in host memory holds what: for workers without a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Optional

from ...decode import Chosen

#: Layer head, row.
_Key = tuple[int, int]


class HostEntries:
    """ucmclient.decode.Entries. It never gives up an entry that this step has used. Of the others it gives up the longest unused,
    unless the entry's request would then have fewer than its floor."""

    def __init__(self, layer_heads: int, entries: int):
        self._layer_heads = layer_heads
        self._free = list(range(entries))
        #: The longest unused first.
        self._entry: OrderedDict[_Key, int] = OrderedDict()
        self._used: dict[_Key, int] = {}
        #: Whose entries these are, if it still runs.
        self._owner: dict[_Key, int] = {}
        self._floor: dict[int, int] = {}
        self._owned: dict[int, int] = {}
        self._step = 0
        #: The missing layer heads, with the requests that want them.
        self._missed: dict[_Key, int] = {}
        self._taken: list[Optional[_Key]] = []

    def enter(self, request: int, floor: int) -> None:
        self._floor[request], self._owned[request] = floor, 0

    def leave(self, request: int) -> None:
        for key in [key for key, owner in self._owner.items() if owner == request]:
            del self._owner[key]
        del self._floor[request], self._owned[request]

    def forget(self, row: int) -> None:
        for layer_head in range(self._layer_heads):
            if (layer_head, row) in self._entry:
                self._free.append(self._drop((layer_head, row)))

    def _drop(self, key: _Key) -> int:
        owner = self._owner.pop(key, None)
        if owner is not None:
            self._owned[owner] -= 1
        del self._used[key]
        return self._entry.pop(key)

    def begin(self) -> None:
        self._step += 1
        self._missed.clear()

    def resolve(self, layer_head: int, sequences: Sequence[Chosen], apart: bool) -> None:
        for request, rows, lists in sequences:
            for i, blocks in enumerate(lists):
                self.want([(layer_head + i * apart, rows[block], request) for block in blocks])

    def want(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        for layer_head, row, request in wanted:
            key = (layer_head, row)
            if key in self._entry:
                self._used[key] = self._step
                self._entry.move_to_end(key)
            else:
                self._missed.setdefault(key, request)

    def take(self) -> list[tuple[int, int, Optional[int]]]:
        missed, self._taken = list(self._missed.items()), []
        self._missed.clear()
        entries = []
        for key, request in missed:
            entry = self._free.pop() if self._free else self._give_up(request)
            entries.append((*key, entry))
            self._taken.append(None if entry is None else key)
            if entry is not None:
                self._entry[key], self._used[key], self._owner[key] = entry, self._step, request
                self._owned[request] += 1
        return entries

    def _give_up(self, taker: int) -> Optional[int]:
        for key in self._entry:
            owner = self._owner.get(key)
            keeps = owner is not None and owner != taker and self._owned[owner] <= self._floor[owner]
            if self._used[key] != self._step and not keeps:
                return self._drop(key)
        return None

    def publish(self, arrived: Sequence[bool]) -> None:
        for key, there in zip(self._taken, arrived):
            if key is not None and not there:
                self._free.append(self._drop(key))
        self._taken = []

    def entry(self, layer_head: int, row: int) -> Optional[int]:
        return self._entry.get((layer_head, row))
