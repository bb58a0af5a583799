"""The scheduler's half of the connector: what is looked up, promised, loaded and stored, request by request.

Knows vLLM's objects by a few of their attributes (request_id, block_hashes, num_tokens, the fields of SchedulerOutput)
and imports nothing of it.

Promises: a hit is leased until it has been loaded, or its request is gone; a block is stored once its last token's KV
is computed by the step that the store is told with; a request's blocks are not given back while a store reads them.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import Any, Optional

from .link import Link
from .plan import Copy, Plan
from .settings import Settings

#: In a request's kv_transfer_params: a prefill instance is asked for its answer's, which the decode instance is given.
PREFILL, HANDOVER = "ucmd_prefill", "ucmd_blocks"


@dataclass
class _Promise:
    """The first blocks of a request were found, and are kept for it by a lease until `until`."""

    blocks: int
    lease: int
    until: float
    #: The engine has the blocks before this one itself.
    start: int = 0


@dataclass
class _Request:
    vllm: Any
    #: Of its LoRA adapter; empty for none.
    adapter: bytes = b""
    blocks: list[int] = field(default_factory=list)
    #: Blocks that are stored, or told to be.
    stored: int = 0
    #: A store was told to the workers: they report when the blocks may be given back.
    told: bool = False
    promise: Optional[_Promise] = None
    loading: bool = False
    #: A load of it failed: it is computed, lest it try for ever.
    failed: bool = False
    #: Until then blocks that were handed over are waited for.
    wait_until: float = 0.0

    def keys(self, first: int, end: int) -> bytes:
        hashes = self.vllm.block_hashes[first:end]
        if self.adapter:
            hashes = [hashlib.sha256(self.adapter + key).digest()[: len(key)] for key in hashes]
        return b"".join(hashes)


def adapter_of(request: Any) -> bytes:
    """The engine's hashes know a LoRA adapter by its name, which other engines may give to other weights: keys of such
    requests are hashed again with the adapter's path and the sizes and times of its files."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return b""
    path = str(getattr(lora, "lora_path", "") or getattr(lora, "path", ""))
    files = []
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            files = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file())
    return hashlib.sha256(repr((path, files)).encode()).digest()


class SchedulerHalf:
    def __init__(self, settings: Settings, block_tokens: int):
        self.settings = settings
        self.block_tokens = block_tokens
        self.link: Optional[Link] = None
        self._requests: dict[str, _Request] = {}
        self._plan = Plan()

    def connect(self, link: Link) -> None:
        self.link = link

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    # ---- lookups ----

    def matched_tokens(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        """How many tokens behind `computed` can be loaded; the last one of a request is left to be computed. None: ask
        again, a prefill instance is still storing them."""
        if self.link is None or not self.settings.load:
            return 0, False
        tracked = self._tracked(request)
        promise = self._promise(tracked)
        if self._handed_over(tracked) > (promise.blocks if promise else 0) and time.monotonic() < tracked.wait_until:
            self._release(tracked)
            return None, False
        if promise is None or tracked.failed:
            return 0, False
        promise.start = computed // self.block_tokens
        tokens = min(promise.blocks * self.block_tokens, request.num_tokens - 1) - computed
        if tokens < max(1, self.settings.min_load_tokens):
            self._release(tracked)
            return 0, False
        return tokens, self.settings.async_load

    def _tracked(self, request: Any) -> _Request:
        return self._requests.setdefault(request.request_id, _Request(request, adapter=adapter_of(request)))

    def _promise(self, tracked: _Request) -> Optional[_Promise]:
        """vLLM asks for a waiting request again in every step: a promise that still holds is kept. The engine's own
        hits are asked for too: so the daemon knows that they are in use, and what it has lost of them is stored."""
        promise = tracked.promise
        if promise and time.monotonic() < promise.until:
            return promise
        self._release(tracked)
        keys = tracked.keys(0, len(tracked.vllm.block_hashes))
        ns = self.link.ns if self.link is not None else None
        if not keys or ns is None:
            return None
        hits = self.link.ask(
            ns.lookup_prefix, keys, lease=self.settings.lease, timeout=self.settings.lookup_timeout
        )
        if hits is None:
            return None
        tracked.stored = hits.blocks
        if hits.blocks == 0:
            return None
        # Half of the lease is left for the load.
        tracked.promise = _Promise(hits.blocks, hits.lease, time.monotonic() + self.settings.lease / 2)
        return tracked.promise

    def _handed_over(self, tracked: _Request) -> int:
        """How many blocks a prefill instance has said that it stores; they are waited for, for a while."""
        params = getattr(tracked.vllm, "kv_transfer_params", None) or {}
        blocks = params.get(HANDOVER, 0)
        if not isinstance(blocks, int) or tracked.failed or self.link is None or self.link.ns is None:
            return 0
        if tracked.wait_until == 0.0:
            tracked.wait_until = time.monotonic() + self.settings.handover_wait
        return min(blocks, len(tracked.vllm.block_hashes))

    def _release(self, tracked: _Request) -> None:
        promise, tracked.promise = tracked.promise, None
        if promise is not None and self.link is not None:
            self.link.release(promise.lease)

    # ---- a request's way ----

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The request has blocks; `tokens` of what was promised are to be loaded into them."""
        tracked = self._tracked(request)
        tracked.blocks = list(blocks)
        promise = tracked.promise
        if tokens == 0 or promise is None:
            if not tracked.loading:
                self._release(tracked)
            return
        first, end = promise.start, promise.start + -(-tokens // self.block_tokens)
        self._plan.loads.append(Copy(request.request_id, tracked.keys(first, end), tracked.blocks[first:end]))
        # A load within a step is over when the request is: its lease lasts until then, or runs out.
        tracked.loading = self.settings.async_load

    def step(self, output: Any) -> Plan:
        """What the workers are to do with this step."""
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                self._store_computed(tracked, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        resumed = _resumed(cached)
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            added = cached.new_block_ids[i]
            if request_id in resumed:
                tracked.blocks = list(added[0]) if added else []
            elif added:
                tracked.blocks.extend(added[0])
            self._store_computed(tracked, cached.num_computed_tokens[i], output)
        plan, self._plan = self._plan, Plan()
        plan.preempted = set(getattr(output, "preempted_req_ids", None) or ())
        for request_id in plan.preempted & self._requests.keys():
            self._requests[request_id].told, self._requests[request_id].blocks = False, []
        return plan

    def _store_computed(self, tracked: _Request, computed: int, output: Any) -> None:
        request = tracked.vllm
        after = computed + output.num_scheduled_tokens[request.request_id]
        self._store(tracked, after // self.block_tokens)

    def _store(self, tracked: _Request, end: int) -> None:
        """Only what has a hash: tokens that were proposed, but may be rejected, have none."""
        request = tracked.vllm
        end = min(end, len(request.block_hashes), len(tracked.blocks))
        if not self.settings.store or self.link is None or self.link.ns is None or end <= tracked.stored:
            return
        keys = tracked.keys(tracked.stored, end)
        self._plan.stores.append(Copy(request.request_id, keys, tracked.blocks[tracked.stored : end]))
        tracked.stored = end
        tracked.told = True

    def received(self, finished: Any, invalid: Any) -> None:
        """Loads that the workers have ended, and blocks that failed: those are computed, and stored anew."""
        for request_id in finished or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.loading = False
                self._release(tracked)
        if not invalid:
            return
        for tracked in self._requests.values():
            bad = [i for i, block in enumerate(tracked.blocks[: tracked.stored]) if block in invalid]
            if bad:
                tracked.stored, tracked.failed = bad[0], True

    def finished(self, request: Any, blocks: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Must the request's blocks be kept until the workers have reported it; and what a decode instance has to know
        of a request that asked for prefill only."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._release(tracked)
        if blocks and not tracked.loading:
            tracked.blocks = list(blocks)
            self._store(tracked, request.num_computed_tokens // self.block_tokens)
        asked = (getattr(request, "kv_transfer_params", None) or {}).get(PREFILL)
        handover = {HANDOVER: tracked.stored} if asked and tracked.stored else None
        if tracked.loading or not tracked.told:
            return False, handover  # vLLM itself waits for a load
        self._plan.ended.add(request.request_id)
        return True, handover


def _resumed(cached: Any) -> set[str]:
    """vLLM before 0.11.1 had a list of flags."""
    if hasattr(cached, "resumed_req_ids"):
        return cached.resumed_req_ids
    return {name for name, flag in zip(cached.req_ids, cached.resumed_from_preemption) if flag}
