"""Tells vLLM what becomes of this engine's blocks in ucmd, for vLLM's own publisher of KV events (take_events).

A thread follows the daemon's events (docs/events.md) by a connection of its own, beginning with a list of all blocks. It remembers
what it has told, and after a gap tells the difference. It can't send AllBlocksCleared, which is about the GPU's blocks, too. While
vLLM does not take its events, it asks for no further ones; the daemon's ring continues meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional

from ...client import Client
from ...errors import Status, UcmError
from .settings import Settings

logger = logging.getLogger("ucmclient.engine.vllm")

#: Events that wait for vLLM.
_MOST = 65536
_PAGE = 1024
_WAIT_MS = 500
_TIMEOUT = 10.0
_END = 2**64 - 1
_MEDIA = (None, "CPU", "STORAGE", "STORAGE")


class EventFeed:
    def __init__(self, settings: Settings, name: str, fingerprint: Callable[[], Optional[bytes]], make: Any = None):
        """fingerprint: of the namespace, None while it is not open. make: vLLM's events, by default those that it has."""
        self._settings, self._name, self._fingerprint = settings, name, fingerprint
        self._make = make or VllmEvents()
        self._lock = threading.Lock()
        self._room = threading.Event()
        self._events: list[Any] = []
        #: The medium of each published block.
        self._told: dict[bytes, str] = {}
        self._closed = threading.Event()
        self._instance, self._since, self._ns = b"", _END, 0
        self._thread = threading.Thread(target=self._run, name="ucm-events", daemon=True)
        self._thread.start()

    def take(self) -> list[Any]:
        with self._lock:
            events, self._events = self._events, []
        if events:
            self._room.set()
        return events

    def close(self) -> None:
        self._closed.set()
        self._room.set()

    # ---- on the thread ----

    def _run(self) -> None:
        while not self._closed.wait(self._settings.retry_interval):
            fingerprint = self._fingerprint()
            if fingerprint is None:
                continue
            try:
                with Client(self._settings.socket, self._name, timeout=_TIMEOUT) as client:
                    while not self._closed.is_set() and self._step(client, fingerprint):
                        pass
            except UcmError as error:
                if error.status == Status.UNSUPPORTED:
                    logger.warning("vLLM's events say nothing of ucmd: %s", error)
                    return
                logger.debug("ucmd's events are not available: %s", error)
            self._since = _END

    def _step(self, client: Client, fingerprint: bytes) -> bool:
        """False: the daemon has no such namespace yet."""
        with self._lock:
            full = len(self._events) >= _MOST
            if full:
                self._room.clear()
        if full:
            self._room.wait(1.0)
            return True
        fresh = self._since == _END
        page = ask(client, "events", since=self._since, limit=_PAGE, wait_ms=0 if fresh else _WAIT_MS, tokens=True)
        if fresh or page["lost"] or page["instance"] != self._instance:
            # The connection may be one to another daemon than before, which renumbers namespaces .
            self._instance, self._since, self._ns = page["instance"], page["last"], _number_of(client, fingerprint)
            self._tell_difference(client)
            return self._ns != 0
        self._since = page["next"]
        self._add([told for event in page["events"] if event["ns"] == self._ns for told in self._changed(event)])
        return True

    def _tell_difference(self, client: Client) -> None:
        there = {block["key"]: block for block in listed(client, self._ns)} if self._ns else {}
        gone = [self._make.removed(key, medium) for key, medium in self._told.items() if key not in there]
        self._told = {key: medium for key, medium in self._told.items() if key in there}
        self._add(gone + [told for block in parents_first(there) for told in self._changed(block)])

    def _changed(self, block: dict[str, Any]) -> Iterator[Any]:
        key, now, was = block["key"], _MEDIA[block["is"]], self._told.get(block["key"])
        if now is not None and (now != was or "tokens" in block and block.get("was") == block["is"]):
            self._told[key] = now
            yield self._make.stored(key, now, block)
        if was is not None and was != now:
            if now is None:
                del self._told[key]
            yield self._make.removed(key, was)

    def _add(self, events: list[Any]) -> None:
        with self._lock:
            self._events += events


def ask(client: Client, method: str, **params: Any) -> dict[str, Any]:
    try:
        from msgspec.msgpack import decode, encode  # vLLM has it
    except ImportError:
        from msgpack import packb as encode, unpackb as decode
    return decode(client.call(method, encode(params), timeout=_TIMEOUT))


def _pages(client: Client, method: str, field: str, **params: Any) -> Iterator[dict[str, Any]]:
    cursor = 0
    while True:
        page = ask(client, method, cursor=cursor, **params)
        yield from page[field]
        cursor = page["next"]
        if not cursor:
            return


def _number_of(client: Client, fingerprint: bytes) -> int:
    """0: this daemon has no such namespace yet."""
    spaces = _pages(client, "namespace.list", "namespaces")
    return next((space["ns"] for space in spaces if space["fingerprint"] == fingerprint), 0)


def listed(client: Client, ns: int) -> Iterator[dict[str, Any]]:
    return _pages(client, "events.list", "blocks", ns=ns)


def parents_first(blocks: dict[bytes, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A router accepts a block only if it knows the parent."""
    done: set[bytes] = set()
    for key in blocks:
        chain = []
        while key in blocks and key not in done:
            done.add(key)
            chain.append(blocks[key])
            key = blocks[key].get("parent", b"")
        yield from reversed(chain)


class VllmEvents:
    """Makes vLLM's events."""

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        self._stored, self._removed = kv_events.BlockStored, kv_events.BlockRemoved
        self._hash: Callable[[Any], Any] = kv_cache_utils.maybe_convert_block_hash

    def stored(self, key: bytes, medium: str, block: dict[str, Any]) -> Any:
        ids = memoryview(block.get("tokens", b"")).cast("I").tolist()
        parent = block.get("parent") or None
        return self._stored(
            block_hashes=[self._hash(key)], parent_block_hash=self._hash(parent) if parent else None, token_ids=ids,
            block_size=len(ids), lora_id=None, medium=medium, lora_name=block.get("lora") or None,
        )

    def removed(self, key: bytes, medium: str) -> Any:
        return self._removed(block_hashes=[self._hash(key)], medium=medium)
