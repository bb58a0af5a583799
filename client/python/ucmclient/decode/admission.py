"""Which requests are decoded together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

from .choices import Choices, Refused, Room

#: The weight of the latest token in what later ones are expected to take.
_NEWEST = 1 / 32


@dataclass(frozen=True)
class Need:
    """What a request needs at its full length. entries: the most that one token of it takes, over all layers. rows: of summaries."""

    entries: int
    rows: int


class Admission:
    """Every request gets a floor in the pool, by what its tokens are *expected* to take. That is the most that they may take, times the
    part of it that tokens took here before, times the policy's `floor`. The floors of all that run fit the pool, and their rows fit the
    summaries. A step can still need more entries than there are. Then the request that came last leaves the step
    (ucmclient.decode.Decoder says when). It is admitted again as *wary*: by the most that it and the others may take. The oldest request
    never leaves, since one that no pool of this size could hold is refused before it begins. Nothing of this decides what a token
    attends."""

    def __init__(self, room: Room, choices: Choices, *, lists: int, block_tokens: int, layer_heads: int = 1):
        """lists: of a selection of this worker, 1 or its KV heads. layer_heads: 1 if an entry holds a layer of a block, its KV heads if a
        entry holds one of them."""
        self.room, self.choices = room, choices
        self._lists, self._tokens, self._layer_heads = lists, block_tokens, layer_heads
        #: Which part of the most tokens took. Until any was seen: all of it.
        self.expected = 1.0
        self._needs: dict[int, Need] = {}

    def need(self, tokens: int) -> Need:
        """What a request of this length needs."""
        if tokens not in self._needs:
            candidates = self.choices.candidates((tokens - 1) // self._tokens)
            self._needs[tokens] = Need(self.most(candidates), candidates)
        return self._needs[tokens]

    def most(self, candidates: int) -> int:
        return self.choices.entries(candidates, self._lists, self._tokens, self._layer_heads)

    def check(self, tokens: int) -> None:
        """Raises Refused if a worker with this memory could never decode it."""
        need = self.need(tokens)
        for name, has, wants in (("entries", self.room.entries, need.entries), ("rows of summaries", self.room.rows, need.rows)):
            if wants > has:
                raise Refused(
                    f"a request of {tokens} tokens needs {wants} {name} and this worker has {has}: give it more, "
                    "choose fewer blocks, or allow fewer tokens"
                )

    def saw(self, taken: int, candidates: int) -> None:
        """Notes that a token with so many candidates took so many entries."""
        most = self.most(candidates)
        if most > 0:
            self.expected += _NEWEST * (min(1.0, taken / most) - self.expected)

    def floor(self, tokens: int, wary: bool = False) -> int:
        """Never more than there can be blocks of it."""
        need = self.need(tokens)
        floor = math.ceil(self.choices.floor * self.expected * need.entries)
        everything = need.rows * self._layer_heads * len(self.choices.layers)
        return min(max(floor, need.entries if wary else 0), everything, self.room.entries)

    def admit(self, tokens: int, beside: Iterable[tuple[int, int]], wary: bool = False) -> Optional[int]:
        """The floor of one more request, or None: it waits. beside: tokens and floor of each request that runs."""
        floor, running = self.floor(tokens, wary), list(beside)
        entries = floor + sum(max(kept, self.need(other).entries if wary else 0) for other, kept in running)
        rows = sum(self.need(one).rows for one in [tokens, *(other for other, _ in running)])
        return floor if entries <= self.room.entries and rows <= self.room.rows else None
