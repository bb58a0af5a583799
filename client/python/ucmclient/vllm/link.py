"""The connection of an engine to its daemon, which may be away: then nothing is asked of it for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Optional, TypeVar

from ..client import Client, Identity, Namespace
from ..errors import Status, UcmError
from .settings import Settings

logger = logging.getLogger("ucmclient.vllm")
Result = TypeVar("Result")


class Link:
    """One client and one namespace. Calls made through it cost an engine a bounded time, whatever the daemon does."""

    def __init__(self, settings: Settings, identity: Identity, name: str):
        self.settings = settings
        self.identity = identity
        self.name = name
        self.client: Client
        self.ns: Namespace
        self.cut_off = False
        self._away_until = 0.0
        self._open(settings.connect_timeout)

    def _open(self, timeout: float) -> None:
        self.client = Client(self.settings.socket, self.name, timeout=timeout)
        try:
            self.ns = self.client.namespace(self.identity, timeout=timeout)
        except BaseException:
            self.client.close()
            raise

    @property
    def usable(self) -> bool:
        """False for a while after the daemon was found to be away."""
        return time.monotonic() >= self._away_until

    def ask(self, call: Callable[..., Result], *args: Any, **named: Any) -> Optional[Result]:
        """What the call returns; None when the daemon did not answer in time, or refused."""
        if not self.usable:
            return None
        try:
            result = call(*args, **named)
        except UcmError as error:
            self._failed(error)
            return None
        if self._away_until:
            logger.info("ucmd is back")
            self._away_until = 0.0
        return result

    def _failed(self, error: UcmError) -> None:
        if error.away or error.status in (Status.DEADLINE, Status.BUSY):
            if not self._away_until:
                logger.warning("ucmd does not answer (%s): going on without it", error)
            self._away_until = time.monotonic() + self.settings.retry_interval
        else:
            logger.error("ucmd refused a call: %s", error)

    def cut(self) -> None:
        """Ends the connection, and with it all that the daemon does for it; reopen() makes another."""
        self.client.close()
        self.cut_off = True
        self._away_until = time.monotonic() + self.settings.retry_interval

    def reopen(self) -> bool:
        if not self.usable:
            return False
        try:
            self._open(self.settings.lookup_timeout)
        except UcmError as error:
            self._failed(error)
            return False
        self.cut_off = False
        return True

    def close(self) -> None:
        self.client.close()
