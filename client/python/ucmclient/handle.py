"""What all objects of the library are, and what calls share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

from ._native import lib
from .errors import Status, UcmError

if TYPE_CHECKING:
    from .client import Client


def _text(value: Optional[str]) -> Optional[bytes]:
    return None if value is None else value.encode()


def _timeout(seconds: Optional[float]) -> int:
    return -1 if seconds is None else max(0, min(int(seconds * 1000), 2**31 - 1))


def check_uuid(gpu: bytes) -> None:
    if len(gpu) != 16:
        raise ValueError(f"the UUID of a GPU has 16 bytes, {len(gpu)} were given")


class _Handle:
    """A handle of the library. It must be freed once, even if several threads close the object. If its client is
    closed, the library has freed it."""

    #: The library's function that frees it.
    _free: Any = None

    def __init__(self, client: Optional[Client] = None) -> None:
        self.client = client
        self._handle: Optional[int] = None
        self._closing = threading.Lock()

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise UcmError(Status.INVALID, f"this {type(self).__name__} is closed")
        if self.client is not None and self.client.closed:
            raise UcmError(Status.DISCONNECTED, f"this {type(self).__name__}'s client is closed")
        return self._handle

    def _take(self) -> Optional[int]:
        with self._closing:
            handle, self._handle = self._handle, None
        return handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        handle = self._take()
        if handle is not None and not self.client.closed:
            self._free(handle)


@contextlib.contextmanager
def on_behalf_of(request: str) -> Iterator[None]:
    """Within it, this thread's lookups, loads, dumps and prefetches carry the engine's id of a request. `ucmctl
    trace` shows them under that id. An id of more than 64 bytes is cut; one that is no text is left out."""
    lib.ucm_set_request_id(request.encode(errors="replace"))
    try:
        yield
    finally:
        lib.ucm_set_request_id(None)
