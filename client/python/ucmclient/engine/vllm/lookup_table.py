"""Which lookups the scheduler need not wait for: those for which the daemon's lookup table says that nothing is cached.

A hit there is advisory, so the connector still asks the daemon for the lease, and its answer decides. If the daemon has less than the table
said, the engine gets less. A miss counts if the table is complete and no shared tier might have more. The client reports such a lookup without
a wait, and the daemon counts it among its lookups.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Optional

from ...client import Namespace, PrefixHits, TableHits
from ...errors import Status, UcmError
from .settings import Settings

logger = logging.getLogger("ucmclient.engine.vllm")

#: How many keys of a request are looked up. The first one decides, the others are counted.
_LOOKED = 128


@dataclass
class LookupTableCounts:
    #: Lookups that the daemon answered, and those that the table answered.
    asked: int = 0
    spared: int = 0
    #: Blocks that the table had and the daemon, asked right after, had not; and the reverse. Blocks come and go between the two.
    false_hits: int = 0
    false_misses: int = 0


class LookupTable:
    def __init__(self, settings: Settings):
        self._settings = settings
        self.counts = LookupTableCounts()
        #: The namespace (of one connection) whose table this is, or whose daemon has no table.
        self._opened: Optional[Namespace] = None
        self._missing: Optional[Namespace] = None
        self._not_before = 0.0

    def open(self, ns: Any) -> None:
        """Gets the table, or a new one if it is of no use any more. Call it when the daemon has just answered."""
        if not self._settings.lookup_table or ns is self._missing or time.monotonic() < self._not_before:
            return
        try:
            ns.lookup_table_open(timeout=self._settings.lookup_timeout)
            self._opened = ns
        except UcmError as error:
            self._not_before = time.monotonic() + self._settings.retry_interval
            if error.status == Status.UNSUPPORTED:
                self._missing = ns
                logger.info("every lookup asks ucmd: %s", error)

    def look(self, ns: Any, keys: bytes) -> Optional[TableHits]:
        """None: ask."""
        return ns.lookup_table_read(keys[: _LOOKED * ns.identity.key_bytes]) if ns is self._opened else None

    def spares(self, advice: Optional[TableHits]) -> bool:
        """Nothing is cached: the lookup need not be awaited."""
        spared = advice is not None and advice.blocks == 0 and advice.certain
        self.counts.spared += spared
        return spared

    def close(self) -> None:
        c = self.counts
        if c.spared:
            logger.info(
                "the lookup table answered %d of %d lookups; of the others' blocks they had %d that ucmd had not, and lacked %d",
                c.spared, c.asked + c.spared, c.false_hits, c.false_misses,
            )

    def learn(self, ns: Any, advice: Optional[TableHits], hits: PrefixHits) -> None:
        """The daemon has answered the same lookup."""
        self.counts.asked += 1
        if advice is None:
            self.open(ns)
            return
        blocks = min(hits.blocks, _LOOKED)
        self.counts.false_hits += max(0, advice.blocks - blocks)
        if advice.certain:
            self.counts.false_misses += max(0, blocks - advice.blocks)
