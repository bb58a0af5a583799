"""Rows of summaries. A row's number stands for a block in everything that is decided on the worker's GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Optional


class Rows:
    """A row for each block that a sequence may choose. Sequences with a common prefix have the same rows. A row that
    nobody uses keeps its summary until another block takes the row, the longest unused first."""

    def __init__(self, n: int, forget: Callable[[int], None]):
        """forget(row): it will stand for another block."""
        self._forget = forget
        self._users = [0] * n
        self._key: list[Optional[bytes]] = [None] * n
        self._row: dict[bytes, int] = {}
        self._unused = OrderedDict((row, None) for row in range(n))
        self._filled: set[int] = set()

    @property
    def in_use(self) -> int:
        return len(self._users) - len(self._unused)

    def bind(self, key: bytes) -> Optional[int]:
        """The block's row, for one more user; None: all are in use."""
        row = self._row.get(key)
        if row is None:
            if not self._unused:
                return None
            row, _ = self._unused.popitem(last=False)
            self._drop(row)
            self._row[key], self._key[row] = row, key
        self._unused.pop(row, None)
        self._users[row] += 1
        return row

    def _drop(self, row: int) -> None:
        key = self._key[row]
        if key is not None:
            del self._row[key]
            self._filled.discard(row)
            self._forget(row)

    def key(self, row: int) -> bytes:
        key = self._key[row]
        assert key is not None
        return key

    def filled(self, row: int) -> bool:
        """The row's summaries are there, of all layers."""
        return row in self._filled

    def fill(self, row: int) -> None:
        self._filled.add(row)

    def release(self, row: int) -> None:
        self._users[row] -= 1
        if self._users[row] == 0:
            self._unused[row] = None
