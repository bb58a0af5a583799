"""Which slot holds which layer of which block: the residency table and its CLOCK, as a CPU keeps them."""

from __future__ import annotations

from typing import Optional


class Full(Exception):
    """Every slot is attended in this very step."""


class Residency:
    """slot(layer, row): the CLOCK's hand passes over slots that were used since it came last, and never takes one that was used
    since begin(): a step that is repeated finds what it found before."""

    def __init__(self, layers: int, slots: int):
        self._slot: list[dict[int, int]] = [{} for _ in range(layers)]
        self._owner: list[Optional[tuple[int, int]]] = [None] * slots
        self._used_at = [0] * slots
        self._referenced = bytearray(slots)
        self._hand, self._now = 0, 1

    def begin(self) -> None:
        self._now += 1

    def slot(self, layer: int, row: int) -> Optional[int]:
        """None: a miss."""
        slot = self._slot[layer].get(row)
        if slot is not None:
            self._used_at[slot], self._referenced[slot] = self._now, 1
        return slot

    def take(self) -> int:
        """A slot to fill: publish() or drop() it."""
        n = len(self._owner)
        for _ in range(2 * n):
            slot, self._hand = self._hand, (self._hand + 1) % n
            if self._used_at[slot] == self._now:
                continue
            if self._referenced[slot]:
                self._referenced[slot] = 0
                continue
            self._vacate(slot)
            self._used_at[slot] = self._now
            return slot
        raise Full

    def _vacate(self, slot: int) -> None:
        owner, self._owner[slot] = self._owner[slot], None
        if owner is not None:
            del self._slot[owner[0]][owner[1]]

    def publish(self, slot: int, layer: int, row: int) -> None:
        self._owner[slot], self._slot[layer][row] = (layer, row), slot

    def drop(self, slot: int) -> None:
        """Nothing came: the next one to take it need not wait."""
        self._used_at[slot] = self._referenced[slot] = 0

    def forget(self, row: int) -> None:
        for layer in self._slot:
            slot = layer.pop(row, None)
            if slot is not None:
                self._owner[slot] = None
                self.drop(slot)

    @property
    def resident(self) -> int:
        return sum(map(len, self._slot))
