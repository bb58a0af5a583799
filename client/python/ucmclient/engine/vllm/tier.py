"""A secondary tier of vLLM's offloading connector on ucmd: secondary_tiers with "module_path": "ucmclient.engine.vllm.tier" (docs/engines.md).

vLLM keeps KV in host memory of its own, its primary tier. It asks this tier to keep chunks of it and to bring them back. A chunk is a page with
what all of vLLM's workers hold, so it is one block of one layer here. All calls come from the scheduler's thread and wait for nobody. Threads of
the tier look up, store and load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ...memory import data_pointer
from ..pages import Fragment, PageStore, settings_of, weights_of
from ..places import Full, Movers
from .identity import EngineIdentity

logger = logging.getLogger("ucmclient.engine.vllm")
#: Beyond a transfer's deadline, in seconds, for what waits before it.
_PATIENCE = 60.0
#: Bytes of a chunk: the most that the daemon takes as one layer.
_LARGEST = 256 << 20


def key_of(key: bytes) -> bytes:
    """vLLM's key is a block hash and the number of a group of layers."""
    return hashlib.sha256(b"ucm vllm chunk " + key).digest()


class _Lookups(AsyncLookupManager):
    def __init__(self, store: PageStore, tier_type: str):
        self._store = store
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._store.each([key_of(key) for key in keys])


class UcmTier(SecondaryTierManager):
    medium = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, **settings: Any):
        """settings: the rest of the tier's configuration."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings.pop("locality", None)
        of = settings_of(settings, "the tier's configuration")
        chunks, size = len(primary_kv_view), self.block_size_bytes
        if not 0 < size <= _LARGEST:
            raise ValueError(f"a chunk of {size} bytes: up to {_LARGEST} are right, with a smaller \"block_size\" of the offloading connector")
        self._store = PageStore(of, _identity(offloading_spec, of, size), [Fragment(_address(primary_kv_view), size, size)], chunks, "vllm-tier")
        self._movers, self._deadline = Movers("vllm-tier", 2), of.transfer_timeout
        self._lookups = _Lookups(self._store, tier_type)
        self._mutex = threading.Lock()
        #: Under way, by their number; done, until vLLM asks; what loads failed to bring, until their requests end.
        self._jobs: dict[int, Any] = {}
        self._done: list[tuple[JobResult, Collection[bytes]]] = []

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    # ---- jobs ----

    def submit_store(self, job_metadata: Any) -> None:
        self._submit("save", job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit("load", job_metadata)

    def _submit(self, verb: str, job: Any) -> None:
        keys, pages = list(job.keys), [int(chunk) for chunk in job.chunk_ids]
        try:
            with self._mutex:  # so that it does not end before it is noted
                self._jobs[job.job_id] = self._movers.start(self._move, verb, job.job_id, keys, pages), verb, keys
        except Full as error:
            logger.warning("ucmd: %s", error)
            self._end(verb, job.job_id, keys, [False] * len(keys), 0.0)

    def _move(self, verb: str, number: int, keys: list[bytes], pages: list[int]) -> None:
        begin, good = time.monotonic(), [False] * len(keys)
        try:
            good = getattr(self._store, verb)([key_of(key) for key in keys], pages)
        except Exception as error:
            logger.error("ucmd: %s", error)
        self._end(verb, number, keys, good, time.monotonic() - begin)

    def _end(self, verb: str, number: int, keys: list[bytes], good: list[bool], seconds: float) -> None:
        """Ends a transfer. Of a load it also notes which chunks came, since the others are no longer hits."""
        came = [key for key, one in zip(keys, good) if one]
        failed = [key for key, one in zip(keys, good) if not one] if verb == "load" else []
        result = JobResult(number, all(good), came if failed and came else None, seconds, good.count(True) * self.block_size_bytes)
        with self._mutex:
            self._jobs.pop(number, None)
            self._done.append((result, failed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._mutex:
            done, self._done = self._done, []
        for _, failed in done:
            self._lookups.mark_miss(failed)
        return [result for result, _ in done]

    def drain_jobs(self) -> None:
        with self._mutex:
            jobs = dict(self._jobs)
        if jobs and not self._store.end([future for future, _, _ in jobs.values()], (self._deadline + _PATIENCE) * len(jobs)):
            logger.error("ucmd: transfers did not end in time")
        for number, (future, verb, keys) in jobs.items():
            if future.cancelled():
                self._end(verb, number, keys, [False] * len(keys), 0.0)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._movers.close()
        self._store.close()


def _address(view: memoryview) -> int:
    # The array is not kept: vLLM releases the view when it shuts down.
    return data_pointer(np.frombuffer(view.cast("B"), dtype=np.uint8))


def _identity(spec: Any, settings: Any, size: int) -> EngineIdentity:
    """All that vLLM's configuration says of a chunk's bytes, and of which keys name it."""
    config = spec.config
    parallel = dataclasses.asdict(config.parallel)
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        parallel.pop(name, None)
    if config.canonical_layout and config.parallel.is_parallelism_agnostic:
        parallel = {}
    known = {"groups": [dataclasses.asdict(group) for group in config.groups], "cache": dataclasses.asdict(config.cache), "parallel": parallel,
             "replicated": config.replicated_layout, "canonical": config.canonical_layout, "layout": config.kv_cache_layout,
             "bytes": config.worker_kv_bytes_per_block}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return EngineIdentity(
        model=str(config.model.name)[:256], dtype=str(config.model.dtype), layout=f"vllm-tier/1/{digest}",
        block_tokens=max(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk, layer_bytes=size, layers=(1,),
        revision=weights_of(settings, str(config.model.name), {}), salt=settings.salt.encode(),
    )
