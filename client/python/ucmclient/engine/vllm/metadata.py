"""Sends the daemon the metadata of stored blocks, so that routers that follow its events know (docs/events.md).

It sends only while the daemon keeps events. A step adds one entry to a queue; a thread does the rest. If the queue is full, the
entry is left out. A router then learns of these blocks at their next use. Imports nothing of vLLM.
"""

from __future__ import annotations

import array
import logging
import queue
import threading
import time
from collections import OrderedDict
from typing import Any, Callable, Optional

from ...errors import Status, UcmError

logger = logging.getLogger("ucmclient.engine.vllm")

#: Runs of blocks that wait to be told.
_WAITING = 4096
#: Blocks that are known to be told, the latest.
_KNOWN = 65536
_TIMEOUT = 5.0
#: From a refusal to the next try.
_AGAIN = 60.0


class MetadataSender:
    def __init__(self, ns_of: Callable[[], Any], block_tokens: int):
        """ns_of: the open namespace, None while the daemon is away."""
        self._ns_of, self._block_tokens = ns_of, block_tokens
        #: None ends the thread.
        self._runs: queue.Queue[Optional[tuple[Any, int, int, bool]]] = queue.Queue(_WAITING)
        self._closed = False
        self._thread: Optional[threading.Thread] = None
        #: The daemon keeps no events. Another one may.
        self._not_before = 0.0
        #: Keys that this connection's daemon knows: the last block of each run.
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._known_of: Any = None  # which connection
        self.left_out = 0

    # ---- on the scheduler's thread ----

    def stored(self, tracked: Any, first: int, end: int) -> None:
        self._add(tracked, first, end, False)

    def found(self, tracked: Any, end: int) -> None:
        """The daemon has these blocks, perhaps from before its own start or the router's."""
        self._add(tracked, 0, end, True)

    def _add(self, tracked: Any, first: int, end: int, found: bool) -> None:
        if time.monotonic() < self._not_before or self._ns_of() is None or not tells_all(tracked.vllm):
            return
        try:
            self._runs.put_nowait((tracked, first, end, found))
        except queue.Full:
            self.left_out += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucm-metadata", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed = True
        try:
            self._runs.put_nowait(None)
        except queue.Full:
            pass  # the thread looks after each run
        if self.left_out:
            logger.info("%d runs of blocks were stored without metadata", self.left_out)

    # ---- on the thread ----

    def _run(self) -> None:
        while not self._closed and (run := self._runs.get()) is not None:
            try:
                self._tell(*run)
            except UcmError as error:
                if error.status == Status.UNSUPPORTED:
                    self._not_before = time.monotonic() + _AGAIN
                    logger.debug("routers are not told of tokens: %s", error)
            except Exception:  # whatever the request is: if this fails, routers only know less
                logger.warning("block metadata could not be sent", exc_info=True)

    def _tell(self, tracked: Any, first: int, end: int, found: bool) -> None:
        ns = self._ns_of()
        if ns is None or time.monotonic() < self._not_before:
            return
        connection = ns, ns.client.connection_epoch
        if connection != self._known_of:
            self._known_of, self._known = connection, OrderedDict()
        end = min(end, tracked.own_from)  # the keys of blocks that only this request may read stand for more than tokens
        keys = tracked.keys(0, end)
        size = ns.identity.key_bytes
        if found:
            first = next((i for i in range(end, 0, -1) if keys[(i - 1) * size : i * size] in self._known), 0)
        if first >= end:
            return
        tokens = array.array("I", tracked.vllm.all_token_ids[first * self._block_tokens : end * self._block_tokens])
        lora = getattr(tracked.vllm, "lora_request", None)
        ns.block_metadata(
            keys[first * size : end * size], tokens, parent=keys[(first - 1) * size : first * size] or None if first else None,
            lora=getattr(lora, "lora_name", None) or None, timeout=_TIMEOUT,
        )
        self._known[keys[(end - 1) * size : end * size]] = None
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def tells_all(request: Any) -> bool:
    """Whether its keys stand for nothing but its tokens and its adapter. A router that sees only tokens can't tell images, salts or
    embeddings apart."""
    return not (
        getattr(request, "mm_features", None) or getattr(request, "cache_salt", None)
        or getattr(request, "prompt_embeds", None) is not None
    )
