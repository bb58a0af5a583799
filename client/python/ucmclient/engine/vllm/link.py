"""The connection of an engine to its daemon. While the daemon is away, no call goes to it and a thread tries to
connect.

That thread publishes client, namespace and region together, so callers see all of them or none. Everything else runs on
the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Optional, TypeVar

from ...client import Client, Namespace, Region, on_behalf_of
from ...errors import Status, UcmError
from ...sparse.sequence import SummaryNamespace
from ...sparse.summary import Summary
from .identity import EngineIdentity
from .settings import Settings

logger = logging.getLogger("ucmclient.engine.vllm")
Result = TypeVar("Result")
#: Seconds.
_BUSY_PAUSE = 0.1
#: The first wait for an answer to hello, and further ones.
_PROBE = (0.1, 1.0)
#: Registers the caller's memory. The second argument is a timeout.
Setup = Callable[[Namespace, float], Optional[Region]]


class Link:
    """One client, one namespace and its summaries, and a worker's region. Calls through it take a bounded time, even if the daemon hangs."""

    def __init__(
        self,
        settings: Settings,
        identity: EngineIdentity,
        name: str,
        setup: Optional[Setup] = None,
        summary: Optional[Summary] = None,
        build: bool = True,
    ):
        """summary: while this connection lasts, the daemon builds it for each block that is stored. build: False: it does not."""
        self.settings = settings
        self._summary, self._build = summary, build
        self.identity = identity
        self.name = name
        self.setup = setup
        self._lock = threading.Lock()
        #: Held while the memory is registered, so that it is neither dropped nor restored meanwhile. Taken before
        #: _lock.
        self._setting_up = threading.Lock()
        self._closed = threading.Event()
        self._search: Optional[threading.Thread] = None
        self._client: Optional[Client] = None
        self._ns: Optional[Namespace] = None
        self._summaries: Optional[SummaryNamespace] = None
        self._region: Optional[Region] = None
        self._silent_until = 0.0
        #: When a call found no daemon first, and whether one found none retry_interval later.
        self._away_since, self._gone = 0.0, False
        #: The engine sleeps: its memory is not there.
        self._asleep = False
        try:
            self._open_first()
        except UcmError as error:
            if settings.required or not _may_pass(error):
                raise
            logger.warning("ucmd is not there (%s): going on without it", error)
            self._look_for_it()

    # ---- opening ----

    def _open_first(self) -> None:
        """If the daemon is required but busy, for instance while its GPUs start, this waits for it."""
        until = time.monotonic() + self.settings.connect_timeout
        while True:
            try:
                self._open()
                return
            except UcmError as error:
                if not self.settings.required or error.status != Status.BUSY or time.monotonic() >= until:
                    raise
            time.sleep(_BUSY_PAUSE)

    def _open(self) -> None:
        timeout = self.settings.connect_timeout
        client = Client(self.settings.socket, self.name, timeout=timeout)
        try:
            ns = self._encoded(client.namespace(self.identity, timeout=timeout), timeout)
            summaries = self._summarised(ns, timeout)
            with self._setting_up:
                region = None if self.setup is None or self._asleep else self.setup(ns, timeout)
                self._publish(client, ns, summaries, region)
        except BaseException:
            client.close()
            raise

    def _encoded(self, base: Namespace, timeout: float) -> Namespace:
        """The namespace of the engine's encoded blocks."""
        of = self.identity.kv_tensors
        if of is None:
            return base
        return base.encoded(
            self.identity.encoding, k=of.k, v=of.v or (), dtype=of.dtype, heads_first=bool(of.order),
            per_channel=self.identity.per_channel, run=of.run if self.identity.per_channel else 0,
            timeout=timeout,
        )

    def _summarised(self, ns: Namespace, timeout: float) -> Optional[SummaryNamespace]:
        return None if self._summary is None else SummaryNamespace(ns, self._summary, build=self._build, timeout=timeout)

    def _publish(
        self, client: Client, ns: Namespace, summaries: Optional[SummaryNamespace], region: Optional[Region]
    ) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._client, self._ns, self._summaries, self._region = client, ns, summaries, region
                self._search = None  # the thread is about to end
                return
        client.close()

    def _look_for_it(self) -> None:
        with self._lock:
            if self._client is not None or (self._search is not None and self._search.is_alive()):
                return
            self._search = threading.Thread(target=self._searching, name=f"{self.name}-search", daemon=True)
            self._search.start()

    def _searching(self) -> None:
        while not self._closed.wait(self.settings.retry_interval):
            try:
                self._open()
            except UcmError as error:
                logger.debug("ucmd is still away: %s", error)
                if not _may_pass(error):
                    logger.error("ucmd refused this engine, which continues without it: %s", error)
                    return
            else:
                logger.info("ucmd is there")
                return

    # ---- use ----

    @property
    def ns(self) -> Optional[Namespace]:
        """None while the daemon is away."""
        return self._ns if time.monotonic() >= self._silent_until else None

    @property
    def summaries(self) -> Optional[SummaryNamespace]:
        """The summaries of the namespace's blocks; None also if the daemon can't build them."""
        return self._summaries if time.monotonic() >= self._silent_until else None

    @property
    def away(self) -> bool:
        """No daemon is there, nor was one retry_interval before. One that is restarted has had that time."""
        return self._ns is None or self._gone

    @property
    def region(self) -> Optional[Region]:
        return self._region if time.monotonic() >= self._silent_until else None

    def ask(self, call: Callable[..., Result], *args: Any, request: str = "", **named: Any) -> Optional[Result]:
        """Returns the call's result; None if the daemon did not answer in time, or refused. request: the engine's id
        of the request that the call is for."""
        try:
            if request:
                with on_behalf_of(request):
                    result = call(*args, **named)
            else:
                result = call(*args, **named)
        except UcmError as error:
            self._failed(error)
            return None
        if self._silent_until:
            logger.info("ucmd answers again")
            self._silent_until, self._away_since, self._gone = 0.0, 0.0, False
        return result

    def tell(self, call: Callable[..., Any], *args: Any, request: str = "", **named: Any) -> None:
        """For calls that the daemon can do without. If too much is on its way already, it makes none."""
        try:
            with on_behalf_of(request):
                call(*args, **named)
        except UcmError as error:
            if error.status != Status.BUSY:
                self._failed(error)

    def _failed(self, error: UcmError) -> None:
        if error.away or error.status in (Status.DEADLINE, Status.BUSY):
            if not self._silent_until:
                logger.warning("ucmd does not answer (%s): going on without it", error)
            now = time.monotonic()
            self._silent_until = now + self.settings.retry_interval
            if error.away:
                self._away_since = self._away_since or now
                self._gone = now >= self._away_since + self.settings.retry_interval
        else:
            logger.error("ucmd refused a call: %s", error)

    def release(self, lease: int) -> None:
        """Waits for nobody. A lease that can't be given back runs out."""
        client = self._client
        if not lease or client is None or time.monotonic() < self._silent_until:
            return
        try:
            client.release_soon(lease)
        except UcmError as error:
            self._failed(error)

    def drop_region(self) -> None:
        """Returns when the daemon has unmapped the memory. If the daemon does not answer, this breaks the
        connection."""
        with self._setting_up, self._lock:
            self._asleep = True
            region, self._region = self._region, None
        if region is None:
            return
        try:
            region.unregister(timeout=self.settings.connect_timeout)
        except UcmError as error:
            logger.error("ucmd did not unmap the memory (%s): connecting again", error)
            self.cut()

    def restore_region(self) -> None:
        """Registers the memory again. If that fails, a new connection will register it."""
        with self._setting_up:
            self._asleep = False
            ns = self._ns if self._region is None else None
            if ns is None or self.setup is None:
                return
            self._region = self.ask(self.setup, ns, self.settings.connect_timeout)
        if self._region is None:
            self.cut()

    def cut(self, wait: float = 0.0) -> None:
        """Ends the connection, and with it everything the daemon does for it; the thread then makes a new one. wait: at most so many seconds for the
        daemon to answer another connection, or to be gone. A daemon that was stopped during a copy continues that piece when it runs again."""
        self._drop()
        self._look_for_it()
        until, patience = time.monotonic() + wait, _PROBE[0]
        while (left := until - time.monotonic()) > 0 and not self._answers(min(left, patience)):
            patience = _PROBE[1]

    def _answers(self, seconds: float) -> bool:
        """If nobody listens, that is an answer, too."""
        try:
            Client(self.settings.socket, self.name, timeout=seconds).close()
        except UcmError as error:
            return error.status not in (Status.DEADLINE, Status.BUSY)
        return True

    def _drop(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            self._ns = self._summaries = self._region = None
        if client is not None:
            client.close()

    def close(self) -> None:
        self._closed.set()
        self._drop()


def _may_pass(error: UcmError) -> bool:
    """A daemon that is away or busy may recover; one that refuses will refuse again."""
    return error.away or error.status in (Status.DEADLINE, Status.BUSY)
