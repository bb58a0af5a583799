"""UcmConnector: ucmd as a KVConnectorBase_V1 of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "UcmConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ucmclient.vllm.connector", "kv_load_failure_policy": "recompute"}'

This file has only what vLLM calls; scheduler.py and worker.py do the work. The worker's half knows the layout of the KV
tensors, so it names the namespace. vLLM's handshake (get_handshake_metadata) carries the name to the scheduler's half,
which opens the same namespace.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Optional, Union

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from ..memory import SharedMemory, in_shared_memory
from ..sparse.policy import Policy
from .digests import digest_of, shape_of
from .events import EventFeed
from .groups import Group, HybridIdentity, check_hybrid, groups_of, hash_tokens, hybrid_identity, kinds_of
from .hybrid_scheduler import HybridScheduler
from .hybrid_worker import HybridWorker
from .identity import EngineIdentity, Unsupported, block_tokens, check_engine, check_one_group, heads_of, identity_of, ranks_of
from .layout import Layout, layout_of
from .plan import Plan
from .scheduler import SchedulerHalf
from .settings import Settings
from .stats import UcmPromMetrics, UcmStats
from .sparse_rules import NOT_OURS, rules_of
from .sparse_scheduler import SparseScheduler
from .sparse_gpu import SparseGpuWorker
from .sparse_worker import SparseWorker, digest_by
from .worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..sparse.digest import Digest

logger = init_logger("vllm.ucmclient")

#: A vLLM without handle_preemptions overwrites blocks that are being stored. One without build_connector_worker_meta
#: can't report the outcome of a load, and may reuse an aborted request's blocks during a load.
_NEEDED = (
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "build_connector_worker_meta",
)
_missing = [name for name in _NEEDED if not hasattr(KVConnectorBase_V1, name)]
if _missing:
    raise ImportError(f"this vLLM is too old for UcmConnector: KVConnectorBase_V1 has no {', '.join(_missing)}")

_HandshakeBase: Any = getattr(_base, "KVConnectorHandshakeMetadata", object)
_GroupsBase: Any = getattr(_base, "SupportsHMA", object)


@dataclass
class UcmMetadata(KVConnectorMetadata):
    plan: Plan


@dataclass
class UcmHandshake(_HandshakeBase):
    identity: Union[EngineIdentity, HybridIdentity]


@dataclass
class UcmProgress(_base.KVConnectorWorkerMetadata):
    """The number of the plan that a worker has carried out, 0 if no report was asked for. Also the handshake's content
    if that did not reach the scheduler's half (MultiConnector passes on one connector's only)."""

    number: int
    identities: frozenset[Union[EngineIdentity, HybridIdentity]] = frozenset()
    #: Of sparse requests of the step: how many first blocks the daemon keeps.
    kept: dict[str, int] = field(default_factory=dict)
    #: Those whose step is worthless, with a block id that vLLM is told as invalid.
    spoiled: dict[str, int] = field(default_factory=dict)
    #: Of these, whose blocks are lost.
    lost: frozenset[str] = frozenset()
    #: By how many workers holds of blocks are given up.
    released: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: "UcmProgress") -> "UcmProgress":
        kept = {name: min(n, other.kept[name]) for name, n in self.kept.items() if name in other.kept}
        identities, spoiled = self.identities | other.identities, {**self.spoiled, **other.spoiled}
        released = {n: self.released.get(n, 0) + other.released.get(n, 0) for n in self.released.keys() | other.released.keys()}
        return UcmProgress(min(self.number, other.number), identities, kept, spoiled, self.lost | other.lost, released)


class UcmConnector(KVConnectorBase_V1, _GroupsBase):
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: Any = None):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config or {}).for_role(
            getattr(transfer, "is_kv_producer", True), getattr(transfer, "is_kv_consumer", True)
        )
        self._config = vllm_config
        self._kv_config = kv_cache_config
        self._worker: Union[WorkerHalf, HybridWorker, None] = None
        self._carried_out: Optional[Plan] = None
        self._feed: Optional[EventFeed] = None
        self._identity: Union[EngineIdentity, HybridIdentity, None] = None
        self._sparse: Union[SparseWorker, SparseGpuWorker, None] = None
        check_engine(vllm_config)
        #: None: the model has one kind of KV cache, which is full attention.
        self._groups = groups_of(kv_cache_config)
        if self._groups is None:
            check_one_group(kv_cache_config)
        else:
            check_hybrid(kv_cache_config, self._groups, self._settings, KVConnectorBase_V1)
        sparse = self._settings.sparse is not None
        self._rules = rules_of(self._settings, vllm_config, kv_cache_config) if sparse else None
        if role == KVConnectorRole.SCHEDULER:
            if self._settings.load and getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
                logger.warning(
                    'kv_load_failure_policy is not "recompute": a request whose blocks turn out to be gone fails'
                )
            self._scheduler = self._make_scheduler()
            if self._groups is None and self._settings.events and _events_on(vllm_config):
                self._feed = EventFeed(self._settings, f"vllm-events-{os.getpid()}", self._namespace)

    def _make_scheduler(self) -> SchedulerHalf:
        if self._groups is None:
            return SchedulerHalf(self._settings, block_tokens(self._kv_config), self._sparse_scheduler())
        workers = self._config.parallel_config.tensor_parallel_size
        return HybridScheduler(self._settings, self._groups, hash_tokens(self._kv_config), workers)

    def _sparse_scheduler(self) -> Optional[SparseScheduler]:
        if self._rules is None:
            return None
        from .sparse_spec import serve

        scheduler = SparseScheduler(self._rules, self._config.scheduler_config.max_num_batched_tokens)
        serve(self._kv_config.kv_cache_groups[0], scheduler)
        return scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store causes a miss later, no error."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """True if all layers of a block should lie side by side, in one tensor, which makes one large copy."""
        apart = self._settings.layerwise or self._settings.digests is not None or self._settings.sparse is not None
        return self._settings.block_layout and not apart

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> Optional[str]:
        """The same for vLLM from 0.31 on. Backends that can't do it keep their layout."""
        if find_spec("vllm.v1.kv_cache_layout") is None:
            return None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        return "BLNHC" if extra.get("block_layout", True) and not extra.get("layerwise", False) else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        on_gpu = next(iter(kv_caches.values())).device.type == "cuda"
        if not on_gpu:
            self._shared = _share(kv_caches)
        if self._groups is not None:
            self._register_groups(self._groups, kv_caches, on_gpu)
            return
        layout, digest = self._layout(kv_caches)
        tp_rank = _tensor_parallel_rank()
        ranks = ranks_of(self._config, self._kv_config, tp_rank)
        self._identity = identity_of(self._config, self._kv_config, layout, ranks, self._settings, _engine(self._config))
        self._worker = WorkerHalf(
            self._settings,
            self._identity,
            layout,
            name=f"vllm-worker-{tp_rank}-{os.getpid()}",
            part=ranks.part,
            writes=ranks.writes,
            on_gpu=on_gpu,
            event=_record_event if on_gpu else _no_event,
            digest=digest,
            build=self._rules is None or self._rules.on_gpu,
        )
        if self._rules is not None and digest is not None:
            _check_backend(self._config)
            make = SparseGpuWorker if self._rules.on_gpu else SparseWorker
            self._sparse = make(self._rules, self._worker, layout, digest, kv_caches, self._config, ranks.part)
        sparse = self._sparse.chosen_as if self._sparse is not None else ""
        for sentence in (self._worker.companion.why, self._worker.stored_as, self._worker.digested_as, sparse):
            if sentence:
                logger.info("%s", sentence)

    def _register_groups(self, groups: list[Group], kv_caches: dict[str, Any], on_gpu: bool) -> None:
        kinds = kinds_of(groups, kv_caches, self._kv_config.num_blocks)
        tp_rank = _tensor_parallel_rank()
        ranks = ranks_of(self._config, self._kv_config, tp_rank)
        one = identity_of(self._config, self._kv_config, kinds.layouts[0], ranks, self._settings, _engine(self._config))
        self._identity = hybrid_identity(one, kinds, groups)
        self._worker = HybridWorker(
            self._settings, self._identity, kinds, name=f"vllm-worker-{tp_rank}-{os.getpid()}", part=ranks.part, writes=ranks.writes,
            on_gpu=on_gpu, event=_record_event if on_gpu else _no_event,
        )
        for sentence in self._worker.sentences:
            logger.info("%s", sentence)

    def _layout(self, kv_caches: dict[str, Any]) -> tuple[Layout, Optional[Digest]]:
        settings, blocks = self._settings, self._kv_config.num_blocks
        coded = heads_of(self._kv_config, "encoding") if settings.encoding != "none" else None
        apart = settings.layerwise or settings.digests is not None or self._rules is not None
        layout = layout_of(kv_caches, blocks, apart, coded)
        if self._rules is not None and not self._rules.on_gpu:
            return layout, digest_by(self._rules, self._kv_config)
        if self._rules is None and settings.digests is None:
            return layout, None
        tensors: dict[int, Any] = {}
        for name, tensor in kv_caches.items():
            tensors.setdefault(layout.numbers[name], tensor)
        if self._rules is not None:
            heads, cache_dtype = heads_of(self._kv_config, "sparse"), str(self._config.cache_config.cache_dtype)
            return layout, Policy(self._rules.policy).digest(shape_of(list(tensors.values()), layout, heads, cache_dtype))
        heads, cache_dtype = heads_of(self._kv_config, "digests"), str(self._config.cache_config.cache_dtype)
        return layout, digest_of(settings.digests, list(tensors.values()), layout, heads, cache_dtype)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any = None) -> None:
        self.register_kv_caches({"all": kv_cache})

    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.restore()

    def get_handshake_metadata(self) -> Optional[UcmHandshake]:
        return UcmHandshake(self._identity) if self._identity is not None else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._sparse is not None:
            self._sparse.begin(self._plan())

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, UcmMetadata)
        return metadata.plan

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, UcmMetadata):
            self._worker.preempted(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._settings.layerwise and isinstance(self._worker, WorkerHalf):
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored after the step, all layers at once."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._start_stores(self._worker)

    def _start_stores(self, worker: Union[WorkerHalf, HybridWorker]) -> None:
        """Runs once for each plan. vLLM 0.20 skips wait_for_save in a step without tokens, but always calls
        get_finished."""
        plan = self._plan()
        if plan is not self._carried_out:
            self._carried_out = plan
            if self._sparse is not None:
                self._sparse.end()
            worker.start_stores(plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]], Optional[set[str]]]:
        if self._worker is None:
            return None, None
        self._start_stores(self._worker)
        sent, received = self._worker.finished()[:2]
        if isinstance(self._sparse, SparseGpuWorker):
            received = self._sparse.arrived(received)
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM's call of get_finished, where it has this; only here can failed loads of several groups be told."""
        if not isinstance(self._worker, HybridWorker):
            return super().get_transfer_results(finished_req_ids)
        self._start_stores(self._worker)
        return _base.KVConnectorTransferResults(*self._worker.finished())

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._worker.failed_blocks() if isinstance(self._worker, WorkerHalf) else set()
        return failed.union(self._sparse.spoiled.values()) if self._sparse is not None else failed

    def build_connector_worker_meta(self) -> Optional[UcmProgress]:
        if self._worker is None or self._identity is None:
            return None
        plan = self._plan()
        released = self._worker.take_released() if isinstance(self._worker, HybridWorker) else None
        if not plan.number and plan.connected and not released:
            return None
        identities = frozenset() if plan.connected else frozenset((self._identity,))
        if self._sparse is None:
            return UcmProgress(plan.number, identities, released=released or {})
        sparse = self._sparse
        return UcmProgress(plan.number, identities, dict(sparse.kept), dict(sparse.spoiled), frozenset(sparse.lost))

    def get_kv_connector_stats(self) -> Optional[UcmStats]:
        stats = UcmStats()
        for worker in getattr(self._worker, "kinds", [self._worker]) if self._worker is not None else ():
            stats.aggregate(UcmStats(worker.counts.take()))
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[dict[str, Any]] = None) -> UcmStats:
        return UcmStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> UcmPromMetrics:
        return UcmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._feed is not None:
            self._feed.close()
        if self._sparse is not None:
            self._sparse.shutdown()
        if self._worker is not None:
            self._worker.close()
        if hasattr(self, "_scheduler"):
            self._scheduler.close()

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        self._connect({handshake.identity for handshake in metadata.values() if isinstance(handshake, UcmHandshake)})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if isinstance(self._scheduler, HybridScheduler):
            self._scheduler.bind(gpu_block_pool)

    def _connect(self, identities: Collection[Any]) -> None:
        if len(identities) > 1:
            raise Unsupported(f"the engine's ranks keep their KV in {len(identities)} different layouts")
        for identity in identities:
            self._scheduler.connect(identity, f"vllm-scheduler-{os.getpid()}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[Optional[int], bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        self._scheduler.allocated(request, tables[0] if self._groups is None else tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Splits hits into DRAM and NVMe, for vLLM's statistics."""
        slow = min(self._scheduler.from_nvme(request), num_external_tokens)
        tiers = {_base.CacheHitSource.HOST: num_external_tokens - slow, _base.CacheHitSource.DISK: slow}
        return {tier: tokens for tier, tokens in tiers.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> UcmMetadata:
        return UcmMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        progress = getattr(connector_output, "kv_connector_worker_meta", None)
        if not isinstance(progress, UcmProgress):
            progress = UcmProgress(0)
        self._connect(progress.identities)
        if isinstance(self._scheduler, HybridScheduler):
            failed = getattr(connector_output, "failed_recving", None)
            self._scheduler.received_all(connector_output.finished_recving, failed, progress.released)
            return
        invalid = set(connector_output.invalid_block_ids or ())
        if self._scheduler.sparse is not None:
            self._scheduler.sparse.received(progress.kept, progress.spoiled, progress.lost)
            self._scheduler.spoiled(progress.spoiled)
            invalid.difference_update(progress.spoiled.values())
        self._scheduler.received(connector_output.finished_recving, invalid, progress.number)

    def reset_cache(self) -> bool:
        if not self._settings.keep_on_reset:
            logger.warning("the cache was reset: this engine shares with no other engine until its restart")
            self._scheduler.reset()
        return True

    def take_events(self) -> list[Any]:
        return self._feed.take() if self._feed is not None else []

    def _namespace(self) -> Optional[bytes]:
        """By its fingerprint; None while the daemon is away."""
        link = self._scheduler.link
        ns = link.ns if link is not None else None
        return ns.fingerprint if ns is not None else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        return self._scheduler.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Optional[dict[str, Any]]]:
        if isinstance(self._scheduler, HybridScheduler):
            return self._scheduler.finished_all(request, block_ids)
        return self.request_finished(request, block_ids[0])


def _events_on(config: Any) -> bool:
    return bool(getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False))


def _engine(config: Any) -> dict[str, Any]:
    """What arranges a block's bytes beyond the tensors' shapes: vLLM's version and the attention backends."""
    import vllm

    known: dict[str, Any] = {"vllm": ".".join(str(getattr(vllm, "__version__", "")).split(".")[:2])}
    try:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    except ImportError:
        return known
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    known["backends"] = sorted({layer.get_attn_backend().get_name() for layer in layers})
    return known


def _check_backend(config: Any) -> None:
    """A vLLM that does not ask backends for their spec has not said whose it is."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    if not all(getattr(layer.get_attn_backend(), "attends_sparsely", False) for layer in layers):
        raise Unsupported(NOT_OURS)


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def _no_event() -> None:
    return None


def _record_event() -> Any:
    """Records an event after all work of the step. The daemon waits for the event before it reads."""
    import torch

    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event


def _share(kv_caches: dict[str, Any]) -> list[SharedMemory]:
    """Moves an engine's KV tensors, while they are empty, into memory that the daemon can map. Each tensor keeps its
    object, shape and strides."""
    shared: dict[int, SharedMemory] = {}
    for tensor in kv_caches.values():
        if in_shared_memory(tensor.data_ptr()):
            continue
        import torch

        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            shared[storage.data_ptr()] = SharedMemory(storage.nbytes())
        to = torch.frombuffer(shared[storage.data_ptr()].buffer, dtype=torch.uint8).untyped_storage()
        tensor.set_(to, tensor.storage_offset(), tensor.size(), tensor.stride())
    return list(shared.values())
