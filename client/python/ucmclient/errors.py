"""Errors, with the numbers of ucmclient.h."""

from __future__ import annotations

import enum
from collections.abc import Callable

from ._native import lib


class Status(enum.IntEnum):
    """enum ucm_status."""

    OK = 0
    INVALID = 1
    UNSUPPORTED = 2
    DENIED = 3
    NOT_FOUND = 4
    BUSY = 5
    DEADLINE = 6
    CANCELLED = 7
    DEVICE = 8
    IO = 9
    NO_MEMORY = 10
    SHUTDOWN = 11
    INTERNAL = 12
    DISCONNECTED = 100
    NO_DAEMON = 101
    PROTOCOL = 102
    CONSUMED = 103
    PENDING = 104


class UcmError(Exception):
    """A call failed. `status` is a Status (an int if it has no name here); str() is the sentence."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        try:
            self.status: int = Status(code)
        except ValueError:
            self.status = code

    @property
    def away(self) -> bool:
        """The daemon is not there, or went away during the call. A later retry may succeed."""
        return self.status in (Status.DISCONNECTED, Status.NO_DAEMON, Status.SHUTDOWN)


def check(rc: int, sentence: Callable[[], bytes] = lib.ucm_errmsg) -> int:
    """Returns the rc of a library call, or raises UcmError with its sentence."""
    if rc >= 0:
        return rc
    text = sentence().decode("utf-8", "replace")
    name = lib.ucm_strerror(rc).decode()
    raise UcmError(-rc, f"{name}: {text}" if text else name)
