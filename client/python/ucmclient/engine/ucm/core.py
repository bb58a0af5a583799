"""What both interfaces of UCM's stores have in common: a store's configuration decides the namespace, and moves are numbered tasks."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Optional

from ...errors import UcmError
from ...memory import current_context, wait_for_event
from ..pages import settings_of
from ..places import Movers, PlaceStore, Plan
from ..vllm.identity import EngineIdentity

logger = logging.getLogger("ucmclient.engine.ucm")
WHERE = '"ucmd" in ucm_connector_config'
#: Seconds: UCM's connector looks up in vLLM's loop.
_LOOKUP = 0.1
#: Beyond a transfer's deadline, in seconds: for what waits before it.
_PATIENCE = 60.0


class Refused(RuntimeError):
    """The message says what would be right. UCM expects RuntimeError of its stores."""


class NotThere(RuntimeError):
    """A load found less than it was to load."""


class Unhealthy(RuntimeError):
    """The daemon is away, or did not keep what it got."""


def own_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], str, Optional[int]]:
    """What config["ucmd"] says: settings, the namespace's name, and UCM's shards of a block."""
    own = dict(config.get("ucmd") or {})
    model, shards = own.pop("model", "ucm"), own.pop("shards", None)
    if not isinstance(model, str) or not model:
        raise Refused(f"{WHERE}: model must be a name, not {model!r}")
    if shards is not None and (not isinstance(shards, int) or isinstance(shards, bool) or shards < 1):
        raise Refused(f"{WHERE}: shards must be a number, 1 or more, not {shards!r}")
    return own, model, shards


def key_of(block: bytes) -> bytes:
    """32 bytes for a block's id, of whatever length it is."""
    return block if len(block) == 32 else hashlib.sha256(b"ucm block " + block).digest()


class Store:
    """A PlaceStore, and threads that move for it."""

    def __init__(
        self, settings: Mapping[str, Any], model: str, block_bytes: int, shards: int, sizes: Sequence[int], threads: int, group: str = ""
    ):
        """sizes: of the pieces of one of UCM's shards; one for all of it, if this store moves nothing. group: what tells blocks apart besides their
        ids."""
        self.settings = settings_of({"lookup_timeout": _LOOKUP, **settings}, WHERE)
        identity = EngineIdentity(
            model=model, dtype="bytes", layout=f"ucm/1/{group}" if group else "ucm/1", block_tokens=1, layer_bytes=block_bytes // shards, layers=(shards,),
            revision=self.settings.revision or "", salt=self.settings.salt.encode(),
        )
        self.places = PlaceStore(self.settings, identity, sizes, "ucm")
        self._movers, self._numbers = Movers("ucm", threads), itertools.count(1)
        logger.info("ucmd: namespace %s, blocks of %d bytes in %d shards of %d pieces", model, block_bytes, shards, len(sizes))

    def found(self, blocks: Sequence[bytes]) -> list[bool]:
        return self.places.each([key_of(block) for block in blocks])

    def prefix(self, blocks: Sequence[bytes]) -> int:
        return self.places.prefix([key_of(block) for block in blocks])

    def fetch(self, blocks: Sequence[bytes]) -> None:
        try:
            self._movers.start(self.places.fetch, [key_of(block) for block in blocks])
        except RuntimeError as error:  # this call may be left out
            logger.debug("not prefetched: %s", error)

    def drop(self, blocks: Sequence[bytes]) -> bool:
        return self.places.drop([key_of(block) for block in blocks])

    def start(self, verb: str, blocks: Sequence[bytes], shards: Sequence[int], rows: Any, event: int = 0) -> tuple[int, Future]:
        """A number from 1 on, and what becomes the task's end. event: a cudaEvent_t after which the bytes are there."""
        if len(blocks) != len(shards):
            raise Refused(f"{len(blocks)} blocks and {len(shards)} shards: one for each block is right")
        try:
            plan = self.places.plan(shards, rows)
            context = current_context() if event else None
        except UcmError as error:
            raise Refused(str(error)) from error
        return next(self._numbers), self._movers.start(self._move, verb, [key_of(block) for block in blocks], plan, event, context)

    def _move(self, verb: str, keys: Sequence[bytes], plan: Plan, event: int, context: Optional[int]) -> None:
        if event:
            wait_for_event(event, context, self.settings.transfer_timeout)
        good = getattr(self.places, verb)(keys, plan)
        if not all(good):
            kind = NotThere if verb == "load" and self.places.link.ns is not None else Unhealthy
            raise kind(f"{good.count(False)} of {len(good)} shards were not {'loaded' if verb == 'load' else 'kept'}")

    def end(self, number: int, future: Future) -> None:
        """Waits; raises RuntimeError, as UCM expects of a task that failed."""
        if not self.places.end([future], self.settings.transfer_timeout + _PATIENCE) or future.cancelled():
            raise RuntimeError(f"task {number} did not end within {self.settings.transfer_timeout + _PATIENCE:g} s")
        error = future.exception()
        if error is not None:
            kind = type(error) if isinstance(error, (NotThere, Unhealthy)) else RuntimeError
            raise kind(f"task {number} failed: {error}") from error

    def close(self) -> None:
        self._movers.close()
        self.places.close()
