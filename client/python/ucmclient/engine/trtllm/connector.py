"""TensorRT-LLM's KV cache connector on ucmd: kv_connector_config with this module and these classes (docs/engines.md).

A block is kept under a chained hash of its tokens and all before them, of the request's salt, its LoRA adapter and its images. A rank keeps its part;
a block is found when all ranks have stored theirs.

TensorRT-LLM promises less than vLLM, which has three consequences here:

- A connector cannot report a failed load. So blocks that a lookup found are leased until its request ends, and a load that fails nevertheless raises an error.
- It frees pages without a word, as when it pauses a request. It writes to freed pages in the next forward pass at the earliest. So at the begin of each
  pass a worker waits for its saves to end.
- A request may get fewer blocks than it was offered. So it saves what the scheduler's own positions say is computed, never what was offered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Optional

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker
except ImportError:  # before it moved
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tensorrt_llm._utils import mpi_allgather, mpi_rank

from ...keys import sha256_chain
from ...memory import current_context, on_gpu, wait_for_event
from ..pages import Fragment, PageStore, settings_of, weights_of
from ..places import Movers
from ..weights import weights_at
from ..vllm.identity import EngineIdentity

logger = logging.getLogger("ucmclient.engine.trtllm")
#: Settings as JSON: TensorRT-LLM's configuration of a connector has no place for them.
VARIABLE = "UCM_TRTLLM"
#: TensorRT-LLM waits for these in its loop, so other limits are right than in threads of a plug-in.
_DEFAULTS = {"lookup_timeout": 0.05, "transfer_timeout": 15.0}
#: Seconds that a lookup keeps what it found, unless its request ends before.
_LEASE = 120.0
#: TensorRT-LLM's arguments that determine weights, and therefore KV.
_WEIGHTS = ("revision", "dtype", "quant_config", "load_format", "model_kwargs", "sparse_attention_config", "speculative_config")
#: Beyond a transfer's deadline, in seconds.
_PATIENCE = 5.0


class Refused(RuntimeError):
    """The message says what would be right."""


class LoadFailed(RuntimeError):
    """A load failed after the connector had promised its blocks, and it cannot report that. Without this error it would compute with wrong KV."""


@dataclass
class Meta:
    """A step's keys and pages, for all workers."""

    load: list[tuple[bytes, int]] = field(default_factory=list)
    save: list[tuple[bytes, int]] = field(default_factory=list)


#: The worker of this process, whose connection the scheduler uses: both live in the process of rank 0.
_worker: Optional[UcmWorker] = None


def _settings() -> Any:
    try:
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        if not isinstance(given, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise Refused(f"{VARIABLE} must be a JSON object of settings: {error}") from None
    return settings_of({**_DEFAULTS, **given}, VARIABLE)


class UcmWorker(KvCacheConnectorWorker):
    def __init__(self, llm_args: Any):
        super().__init__(llm_args)
        global _worker
        _worker = self
        self.settings, self.store = _settings(), None
        self._movers, self._saves = Movers("trtllm", 1), list[Future]()

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """A tensor whose first dimension counts pages."""
        size = kv_cache_tensor[0].numel() * kv_cache_tensor.element_size()
        stride = kv_cache_tensor.stride(0) * kv_cache_tensor.element_size()
        what = [str(kv_cache_tensor.dtype), list(kv_cache_tensor.shape[1:])]
        self._open([Fragment(kv_cache_tensor.data_ptr(), stride, size)], kv_cache_tensor.shape[0], what)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Newer versions: pieces of memory by layer group."""
        if len(layout.groups) != 1 or layout.groups[0].replicated_regions:
            raise Refused(f"this KV cache has {len(layout.groups)} groups of layers or parts that all ranks share, which is not supported: use a model "
                          "with one attention window")
        regions = layout.groups[0].regions
        if len({region.num_slots for region in regions}) != 1:
            raise Refused("this KV cache's regions have different numbers of pages, which is not supported")
        what = [[region.size, [[one.layer_id, one.role, one.expansion] for one in region.buffers]] for region in regions]
        self._open([Fragment(region.base, region.stride, region.size) for region in regions], regions[0].num_slots, what)

    def _open(self, fragments: list[Fragment], pages: int, what: Any) -> None:
        args, of = self._llm_args, self.settings
        ranks = int(getattr(args, "tensor_parallel_size", 1) or 1)
        if int(getattr(args, "pipeline_parallel_size", 1) or 1) > 1 or int(getattr(args, "context_parallel_size", 1) or 1) > 1:
            raise Refused("pipeline and context parallelism are not supported: use tensor_parallel_size alone")
        if getattr(args, "enable_attention_dp", False):
            raise Refused("attention data parallelism is not supported: remove enable_attention_dp")
        sparse = getattr(args, "sparse_attention_config", None)
        if sparse is not None and not getattr(sparse, "sparse_disable_index_value", True):
            raise Refused("sparse attention keeps a part of its index outside of these pages: set sparse_disable_index_value in sparse_attention_config")
        tokens = int(args.kv_cache_config.tokens_per_block)
        digest = hashlib.sha256(json.dumps([what, tokens, ranks], default=str).encode()).hexdigest()[:32]
        identity = EngineIdentity(
            model=str(args.model)[:256], dtype=str(getattr(args.kv_cache_config, "dtype", "auto")), layout=f"trtllm/1/{digest}", block_tokens=tokens,
            layer_bytes=sum(fragment.size for fragment in fragments), layers=(1,), parts=ranks, salt=of.salt.encode(),
            revision=weights_of(of, str(args.model), {name: getattr(args, name, None) for name in _WEIGHTS}, _drafts(args),
                                *([mpi_allgather] if ranks > 1 else [])),
        )
        if self.store is not None:
            self.store.close()
        self.store = PageStore(of, identity, fragments, pages, "trtllm", part=mpi_rank() % ranks)
        self._on_gpu = on_gpu(fragments[0].address)
        logger.info("ucmd: %d pages of %d bytes, part %d of %d", pages, self.store.page_bytes, mpi_rank() % ranks, ranks)

    # ---- a step ----

    def start_load_kv(self, stream: Any) -> None:
        self._saved()
        meta = self._metadata
        if meta is None or not meta.load:
            return
        stream.synchronize()  # what was computed before may still use these pages
        good = self.store.load([key for key, _ in meta.load], [page for _, page in meta.load])
        if not all(good):
            raise LoadFailed(f"{good.count(False)} of {len(good)} blocks that were found before did not come (is ucmd down?), and TensorRT-LLM has no way "
                             "to compute them now: it must not go on with wrong KV")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        """Begins to save, after the forward pass; start_load_kv of the next step waits."""
        meta = self._metadata
        if meta is None or not meta.save:
            return
        event = stream.record_event() if self._on_gpu else None
        context = current_context() if event is not None else None
        self._saves.append(self._movers.start(self._save, list(meta.save), event, context))

    def _save(self, what: Sequence[tuple[bytes, int]], event: Any, context: Optional[int]) -> None:
        if event is not None:
            wait_for_event(event.cuda_event, context, self.settings.transfer_timeout)
        good = self.store.save([key for key, _ in what], [page for _, page in what])
        if not all(good):
            logger.debug("%d of %d blocks were not kept", good.count(False), len(good))

    def _saved(self) -> None:
        saves, self._saves = self._saves, []
        if saves and not self.store.end(saves, 2 * self.settings.transfer_timeout + _PATIENCE):
            logger.error("ucmd: blocks were not kept, since they were not stored in time")
        for one in saves:
            error = one.exception() if one.done() and not one.cancelled() else None
            if error is not None:
                logger.error("ucmd: blocks were not kept: %s", error)

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[list[int], list[int]]:
        return [], []  # nothing is asynchronous beyond a step

    def close(self) -> None:
        self._saved()
        self._movers.close()
        if self.store is not None:
            self.store.close()


class _Request:
    """Blocks [first, first + found) are to be loaded, and those before `saved` are stored. known: the request has come as a new one, so tokens and pages
    (by block) are all that it has."""

    def __init__(self, seed: bytes, keys: list[bytes], first: int, found: int, saved: int, leases: list[Any]):
        self.seed, self.keys, self.first, self.found, self.saved, self.leases = seed, keys, first, found, saved, leases
        self.tokens, self.pages, self.known = list[int](), list[int](), False


class UcmScheduler(KvCacheConnectorScheduler):
    def __init__(self, llm_args: Any):
        super().__init__(llm_args)
        self._block = int(llm_args.kv_cache_config.tokens_per_block)
        self._requests: dict[int, _Request] = {}
        self._adapters: dict[tuple[Any, str], str] = {}

    @property
    def _store(self) -> PageStore:
        if _worker is None or _worker.store is None:
            raise Refused("the worker of this process has no KV cache yet: connector_worker_class must be UcmWorker")
        return _worker.store

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._forget(request.request_id)
        seed = _seed(request, self._adapters)
        if seed is None:
            return 0, False
        tokens = list(request.get_tokens(0))
        keys, first = _chain(seed, tokens, self._block), num_computed_tokens // self._block
        # It leaves one token to compute, and leaves a block alone that is computed in part.
        there, leases = self._store.hold_prefix(keys[: (len(tokens) - 1) // self._block], _LEASE)
        found = max(0, there - first) if num_computed_tokens % self._block == 0 else 0
        self._requests[request.request_id] = _Request(seed, keys, first, found, min(there, first) + found, leases)
        return found * self._block, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        state = self._requests.get(request.request_id)
        if state is not None:
            state.pages = list(block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        meta = Meta()
        for data in scheduler_output.new_requests:
            state = self._requests.get(data.request_id)
            if state is not None:
                state.tokens, state.pages, state.known = list(data.new_tokens), list(data.new_block_ids), True
                self._step(meta, data, state)
        for data in scheduler_output.cached_requests:
            state = self._requests.get(data.request_id)
            if state is not None and state.known:
                state.tokens += data.new_tokens
                state.pages += data.new_block_ids
                self._step(meta, data, state)
            elif state is not None:
                # It was looked up again after a pause. TensorRT-LLM does not tell again what came before, so nothing is known to save by.
                self._loads(meta, state)
                self._forget(data.request_id)
        return meta

    def _step(self, meta: Meta, data: Any, state: _Request) -> None:
        self._loads(meta, state)
        # In a first step, computed_position leaves out loaded tokens: it may be less than the computed tokens, never more.
        computed = (data.computed_position + data.num_scheduled_tokens) // self._block
        end = min(computed, len(state.tokens) // self._block, len(state.pages))
        if end > len(state.keys):
            parent = state.keys[-1] if state.keys else state.seed
            state.keys += _chain(parent, state.tokens[len(state.keys) * self._block :], self._block)
        meta.save += [(state.keys[i], state.pages[i]) for i in range(state.saved, end) if state.pages[i] >= 0]
        state.saved = max(state.saved, end)

    @staticmethod
    def _loads(meta: Meta, state: _Request) -> None:
        which = range(state.first, min(state.first + state.found, len(state.pages)))
        if state.found and not which:
            raise LoadFailed(f"{state.found} blocks were found, and TensorRT-LLM does not say into which pages they go")
        meta.load += [(state.keys[i], state.pages[i]) for i in which if state.pages[i] >= 0]
        state.found = 0

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._forget(request.request_id)
        return False

    def request_reset(self, request: Any) -> None:
        """Its pages are given back, and it is looked up again before it runs. A TensorRT-LLM after 035ab91 calls this."""
        self._forget(request.request_id)

    def _forget(self, number: int) -> None:
        state = self._requests.pop(number, None)
        if state is not None:
            self._store.let_go(state.leases)


def _chain(parent: bytes, tokens: Sequence[int], block: int) -> list[bytes]:
    packed = sha256_chain(list(tokens), block, parent)
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


def _drafts(args: Any) -> list[tuple[str, Optional[str]]]:
    """Models that draft, whose KV may lie next to the model's."""
    of = getattr(args, "speculative_config", None)
    named = [getattr(of, name, None) for name in ("speculative_model", "speculative_model_dir")]
    return [(str(name), None) for name in named if name]


def _adapter(request: Any, adapters: dict[tuple[Any, str], str]) -> Optional[str]:
    """What tells its LoRA adapter apart; "" without one. None: nothing does. Its number alone may be another adapter's in another engine, or in the next
    one. If its files changed since this process began, this engine may have either version."""
    number, path = getattr(request, "lora_task_id", None), getattr(request, "py_lora_path", None) or ""
    if number is None:
        return ""
    read = weights_at(path) if path else None
    if read is None or read.doubt:
        return None
    now = json.dumps([path, read.known])
    return now if adapters.setdefault((number, path), now) == now else None


def _seed(request: Any, adapters: dict[tuple[Any, str], str]) -> Optional[bytes]:
    """A hash of all inputs but the tokens that change KV: images, adapter, salt. None: one of them is unknown, so nothing is shared.
    adapters: what each was when it was first used."""
    images = getattr(request, "multimodal_hashes", None)
    if not images and (getattr(request, "multimodal_positions", None) or getattr(request, "multimodal_lengths", None)):
        return None
    if getattr(request, "prompt_embedding_table", None) is not None and not images:
        return None
    adapter = _adapter(request, adapters)
    if adapter is None:
        return None
    what = [getattr(request, "cache_salt", None), adapter, [list(one) for one in images or ()], getattr(request, "cache_salt_id", None)]
    return hashlib.sha256(b"ucm trtllm/1 " + json.dumps(what, default=str).encode()).digest()
