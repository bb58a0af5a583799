"""UcmConnector: ucmd as a KVConnectorBase_V1 of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "UcmConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ucmclient.engine.vllm.connector", "kv_load_failure_policy": "recompute"}'

This file has only what vLLM calls; scheduler.py and worker.py do the work. The worker's half knows the layout of the KV
tensors, so it names the namespace. vLLM's handshake (get_handshake_metadata) carries the name to the scheduler's half,
which opens the same namespace.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional, Union

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.logger import init_logger

from ...sparse.policy import Policy
from ..weights import Weights, forget
from . import adapters, watching
from .chunk_rope import check_tables, rerotation_of
from .chunk_rules import Rerotated, check_chunks, in_columns, shifted, with_chunks
from .chunk_scheduler import ChunkingScheduler
from .chunk_worker import ChunkingWorker
from .context import Context, check_context, context_of, context_ranks
from .summaries import summary_of, shape_of
from .drafts import check_drafts, drafts_of
from .events import EventFeed
from .head_groups import check_head_groups, group_layouts, head_groups_of
from .gather_loads import Exchange, GatheringWorker, GatherPlanner, ranks_with_the_same
from .gather_pages import TorchExchange
from .groups import Group, HybridIdentity, check_hybrid, groups_of, hash_tokens, hybrid_identity, kinds_of
from .hybrid_scheduler import HybridScheduler
from .hybrid_worker import HybridWorker
from .identity import EngineIdentity, Ranks, Unsupported, block_tokens, check_engine, check_one_group, heads_of, identity_of, model_weights, ranks_of
from .layer_stores import LayerStores, check_layer_stores, store_by_layer
from .layout import Layout, layers_alike, layout_of
from .plan import Plan
from .reports import UcmHandshake, UcmMetadata, UcmProgress
from .scheduler import SchedulerHalf
from .settings import Settings
from .shared_tensors import bind, share
from .stages import Stage, check_stages, staged, stages_of
from .stats import UcmPromMetrics, UcmStats
from .sparse_rules import NOT_OURS, rules_of
from .sparse_scheduler import SparseScheduler
from .sparse_gpu import SparseGpuWorker
from .sparse_worker import SparseWorker, summary_by
from .worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ...sparse.summary import Summary

logger = init_logger("vllm.ucmclient")

watching.loads()
watching.names()
if not hasattr(_base, "KVConnectorTransferResults"):
    raise ImportError("this vLLM is too old for UcmConnector, which needs 0.32 or a newer one")


class UcmConnector(KVConnectorBase_V1, _base.SupportsHMA):
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: Any = None):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config or {}).for_role(transfer.is_kv_producer, transfer.is_kv_consumer)
        self._config = vllm_config
        self._kv_config = kv_cache_config
        self._worker: Union[WorkerHalf, HybridWorker, None] = None
        #: Changes of weights that the scheduler's half knows of.
        self._changes = watching.changes(False)
        #: Finished requests to report to the scheduler's half.
        self._sent: set[str] = set()
        self._feed: Optional[EventFeed] = None
        self._identity: Union[EngineIdentity, HybridIdentity, None] = None
        self._sparse: Union[SparseWorker, SparseGpuWorker, None] = None
        check_engine(vllm_config)
        #: None: the model has one kind of KV cache, which is full attention.
        self._groups = groups_of(kv_cache_config)
        check_context(vllm_config, self._groups, self._settings)
        self._context = context_of(vllm_config, kv_cache_config) if self._groups is None else Context()
        if self._groups is None:
            check_one_group(kv_cache_config, self._context.ranks)
        else:
            check_hybrid(vllm_config, kv_cache_config, self._groups, self._settings)
        check_head_groups(self._settings, self._groups is not None)
        check_stages(vllm_config, self._groups, self._settings)
        check_layer_stores(self._settings, self._groups is not None)
        check_chunks(self._settings, vllm_config, self._groups)
        self._layers: Optional[LayerStores] = None
        check_drafts(vllm_config, self._groups, self._settings)
        self._drafts = drafts_of(vllm_config)
        #: The weights that the worker has read, and a name of its own if these are in doubt.
        self._read: Optional[Weights] = None
        self._alone: dict[str, Any] = {}
        sparse = self._settings.sparse is not None
        self._rules = rules_of(self._settings, vllm_config, kv_cache_config) if sparse else None
        if role == KVConnectorRole.WORKER and getattr(vllm_config, "lora_config", None) is not None:
            adapters.watch()
        if role == KVConnectorRole.SCHEDULER:
            if self._settings.load and transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    'kv_load_failure_policy is not "recompute": a request whose blocks turn out to be gone fails'
                )
            self._scheduler = self._make_scheduler()
            self._scheduler.resets_count = not watching.calls() and not self._settings.keep_on_reset
            if self._groups is None and self._settings.events and _events_on(vllm_config):
                self._feed = EventFeed(self._settings, f"vllm-events-{os.getpid()}", self._namespace)

    def _make_scheduler(self) -> SchedulerHalf:
        parallel = self._config.parallel_config
        workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if self._groups is None:
            reads_next = self._drafts is not None and self._drafts.reads_next
            tokens = block_tokens(self._kv_config) * self._context.ranks
            if self._settings.chunks:
                return ChunkingScheduler(self._settings, tokens, rerotation_of(self._config).length, workers)
            scheduler = SchedulerHalf(self._settings, tokens, self._sparse_scheduler(), reads_next, workers)
            ranks = ranks_with_the_same(self._config, self._kv_config, self._settings)
            scheduler.gathers = GatherPlanner(ranks) if ranks else None
            return scheduler
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

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> Optional[str]:
        """All layers of a block side by side, which makes one large copy. Backends that can't do it keep their layout."""
        settings = Settings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        together = settings.block_layout and not settings.layerwise
        if settings.head_groups:  # all layers of a head side by side, and its tokens
            return "BHLNC" if together else "LBHNC"
        return "BLNHC" if together else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        on_gpu = next(iter(kv_caches.values())).device.type == "cuda"
        if not on_gpu:
            self._shared = share(kv_caches)
            bind(self._config, kv_caches)
        self._look_at_weights()
        if self._groups is not None:
            self._register_groups(self._groups, kv_caches, on_gpu)
            return
        tp_rank = _tensor_parallel_rank()
        ranks = context_ranks(self._config, self._kv_config, tp_rank, self._context)
        if stages_of(self._config) > 1:
            (layout, summary, ranks), more = self._stage(kv_caches, ranks), []
        else:
            if self._settings.head_groups:
                of = head_groups_of(self._config, self._kv_config, tp_rank, self._settings.head_groups)
                (layout, *more), ranks, summary = group_layouts(kv_caches, self._kv_config.num_blocks, of, self._apart(kv_caches)), of.ranks, None
            else:
                (layout, summary), more = self._layout(kv_caches), []
            self._identity = self._named(layout, ranks, self._engine())
        make_worker, gathered, of_chunks = WorkerHalf, "", self._chunks(kv_caches)
        if of_chunks is not None:
            make_worker = functools.partial(ChunkingWorker, shifted=of_chunks)
        sharing = ranks_with_the_same(self._config, self._kv_config, self._settings)
        if sharing:
            exchange = _exchange(self._config, layout, kv_caches, tp_rank, sharing)
            make_worker = functools.partial(GatheringWorker, rank=tp_rank, ranks=sharing, exchange=exchange)
            gathered = f"each of {sharing} ranks loads its share of a hit, and gathers the others'"
        self._worker = make_worker(
            self._settings,
            self._identity,
            layout,
            name=f"vllm-worker-{tp_rank}-{os.getpid()}",
            part=ranks.part,
            writes=ranks.writes,
            on_gpu=on_gpu,
            event=_record_event if on_gpu else _no_event,
            summary=summary,
            build=self._rules is None or self._rules.on_gpu,
            more=more,
        )
        self._layers, stored_when = store_by_layer(self._worker, self._config, layout)
        if self._rules is not None and summary is not None:
            _check_backend(self._config)
            make = SparseGpuWorker if self._rules.on_gpu else SparseWorker
            self._sparse = make(self._rules, self._worker, layout, summary, kv_caches, self._config, ranks.part)
        sparse = self._sparse.chosen_as if self._sparse is not None else ""
        for sentence in (self._worker.copy_agent.why, self._worker.stored_as, self._worker.summarised_as, stored_when, gathered, sparse):
            if sentence:
                logger.info("%s", sentence)

    def _look_at_weights(self) -> None:
        """All ranks have read them by now. They share with nobody if any rank may have read others."""
        self._read = model_weights(self._config, self._settings)
        draft = self._drafts.doubt if self._drafts is not None else ""
        forget()
        said = _of_all_ranks(self._config, (self._read, self._drafts.name["files"] if self._drafts is not None else None, draft))
        doubts = {doubt for read, _, draft in said for doubt in (read.doubt, draft) if doubt}
        if any(one[:2] != said[0][:2] for one in said):
            doubts.add("its ranks have seen different files")
        if doubts:
            engine = self._config.kv_transfer_config.engine_id, getattr(self._config, "instance_id", "")
            self._alone = {"alone": [str(one) for one in engine]}
            logger.warning("this engine shares with no other one, since it is not known which weights it has: %s. Start it again when nobody writes to "
                           'them, or name them by the setting "revision"', "; ".join(sorted(doubts)))

    def _engine(self) -> dict[str, Any]:
        return {**_engine(self._config), **self._alone}

    def _chunks(self, kv_caches: dict[str, Any]) -> Optional[Rerotated]:
        if not self._settings.chunks:
            return None
        of = shifted(self._config, self._kv_config, kv_caches, _k_in_columns(self._config, self._kv_config, kv_caches))
        check_tables(of.rerotation, _rotary_embeddings())
        self._identity = with_chunks(self._identity, of)
        logger.info("%s", of.rerotation.sentence)
        return of

    def _register_groups(self, groups: list[Group], kv_caches: dict[str, Any], on_gpu: bool) -> None:
        kinds = kinds_of(groups, kv_caches, self._kv_config.num_blocks)
        tp_rank = _tensor_parallel_rank()
        ranks = ranks_of(self._config, self._kv_config, tp_rank)
        one = identity_of(self._config, self._kv_config, kinds.layouts[0], ranks, self._settings, self._engine(), read=self._read)
        self._identity = hybrid_identity(one, kinds, groups)
        self._worker = HybridWorker(
            self._settings, self._identity, kinds, name=f"vllm-worker-{tp_rank}-{os.getpid()}", part=ranks.part, writes=ranks.writes,
            on_gpu=on_gpu, event=_record_event if on_gpu else _no_event,
        )
        for sentence in self._worker.sentences:
            logger.info("%s", sentence)

    def _stage(self, kv_caches: dict[str, Any], ranks: Ranks) -> tuple[Layout, Optional[Summary], Ranks]:
        """The same in a pipeline, of which this rank has some layers."""
        made: list[Any] = []

        def layout() -> Layout:
            made.extend(self._layout(kv_caches))
            return made[0]

        of = staged(layout, ranks, self._engine(), _stage_number(), _all_stages)
        if self._settings.summaries is not None and of.layout.layer_bytes != made[0].layer_bytes:
            raise Unsupported('summaries: the stages of the pipeline keep layers of different sizes: remove the setting "summaries"')
        self._identity = replace(self._named(of.layout, of.ranks, of.engine), layers=of.layers)
        return of.layout, made[1], of.ranks

    def _named(self, layout: Layout, ranks: Ranks, engine: dict[str, Any]) -> EngineIdentity:
        draft = self._drafts.name if self._drafts is not None else None
        engine = {**engine, **self._context.name}
        one = identity_of(self._config, self._kv_config, layout, ranks, self._settings, engine, draft, self._read)
        return replace(one, block_tokens=one.block_tokens * self._context.ranks)

    def _layout(self, kv_caches: dict[str, Any]) -> tuple[Layout, Optional[Summary]]:
        settings, blocks = self._settings, self._kv_config.num_blocks
        encoded = heads_of(self._kv_config, "encoding") if settings.encoding != "none" else None
        apart = self._apart(kv_caches) or settings.summaries is not None or self._rules is not None
        # An encoding takes whole layers, of which stages may have different numbers.
        apart = apart or (encoded is not None and stages_of(self._config) > 1)
        layout = layout_of(kv_caches, blocks, apart, encoded)
        if self._rules is not None and not self._rules.on_gpu:
            return layout, summary_by(self._rules, self._kv_config)
        if self._rules is None and settings.summaries is None:
            return layout, None
        tensors: dict[int, Any] = {}
        for name, tensor in kv_caches.items():
            tensors.setdefault(layout.numbers[name], tensor)
        if self._rules is not None:
            heads, cache_dtype = heads_of(self._kv_config, "sparse"), str(self._config.cache_config.cache_dtype)
            return layout, Policy(self._rules.policy).summary(shape_of(list(tensors.values()), layout, heads, cache_dtype))
        heads, cache_dtype = heads_of(self._kv_config, "summaries"), str(self._config.cache_config.cache_dtype)
        return layout, summary_of(settings.summaries, list(tensors.values()), layout, heads, cache_dtype)

    def _apart(self, kv_caches: dict[str, Any]) -> bool:
        """Whether layers are loaded or stored one by one. If layers differ in size, blocks are stored after their step."""
        if self._settings.layerwise:
            return True
        return self._settings.layer_stores > 0 and layers_alike(kv_caches, self._kv_config.num_blocks)

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
        if self._layers is not None:
            self._layers.begin(self._plan())
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
        if self._layers is not None:
            self._layers.layer(layer_name)

    def wait_for_save(self) -> None:
        """vLLM calls it when all layers of a step have run, also a draft model's."""
        if self._sparse is not None:
            self._sparse.end()
        if self._worker is not None:
            self._worker.start_stores(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]], Optional[set[str]]]:
        if self._worker is None:
            return None, None
        sent, received = self._worker.finished()[:2]
        if isinstance(self._sparse, SparseGpuWorker):
            received = self._sparse.arrived(received)
        return self._not_ours(sent) or None, received or None

    def _not_ours(self, sent: set[str]) -> set[str]:
        """Finished requests to report to the engine: none, if the scheduler's half keeps their blocks."""
        if not self._plan().ours:
            return sent
        self._sent |= sent
        return set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM's call of get_finished; only here can failed loads of several groups be told."""
        if not isinstance(self._worker, HybridWorker):
            return super().get_transfer_results(finished_req_ids)
        sent, received, failed = self._worker.finished()
        return _base.KVConnectorTransferResults(self._not_ours(sent), received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._worker.failed_blocks() if isinstance(self._worker, WorkerHalf) else set()
        return failed.union(self._sparse.spoiled.values()) if self._sparse is not None else failed

    def build_connector_worker_meta(self) -> Optional[UcmProgress]:
        if self._worker is None or self._identity is None:
            return None
        plan = self._plan()
        released = self._worker.take_released() if isinstance(self._worker, HybridWorker) else None
        shares = self._worker.take_arrived() if isinstance(self._worker, GatheringWorker) else {}
        sent, self._sent = dict.fromkeys(self._sent, 1), set()
        before, self._changes = self._changes, watching.changes(False)
        changed = frozenset((os.getpid(),)) if before != self._changes else frozenset()
        if not plan.number and plan.connected and not released and not shares and not sent and not changed:
            return None
        identities = frozenset() if plan.connected else frozenset((self._identity,))
        if self._sparse is None:
            return UcmProgress(plan.number, identities, released=released or {}, shares=shares, sent=sent, changed=changed)
        sparse = self._sparse
        return UcmProgress(plan.number, identities, dict(sparse.kept), dict(sparse.spoiled), frozenset(sparse.lost), sent=sent, changed=changed)

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

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """By the ranks of stage and tensor: all of them name one namespace."""
        self.set_xfer_handshake_metadata(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
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
        """Splits hits by DRAM and NVMe, for vLLM's statistics."""
        slow = min(self._scheduler.from_nvme(request), num_external_tokens)
        tiers = {_base.CacheHitSource.HOST: num_external_tokens - slow, _base.CacheHitSource.DISK: slow}
        return {tier: tokens for tier, tokens in tiers.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> UcmMetadata:
        return UcmMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        progress = connector_output.kv_connector_worker_meta
        if not isinstance(progress, UcmProgress):
            progress = UcmProgress(0)
        self._connect(progress.identities)
        self._scheduler.sent(progress.sent)
        if progress.changed - {os.getpid()}:  # what changed in this process was seen before
            self._scheduler.reset()
        if isinstance(self._scheduler, HybridScheduler):
            self._scheduler.received_all(connector_output.finished_recving, connector_output.failed_recving, progress.released)
            return
        if self._scheduler.gathers is not None:
            self._scheduler.gathers.received(progress.shares)
        invalid = set(connector_output.invalid_block_ids or ())
        if self._scheduler.sparse is not None:
            self._scheduler.sparse.received(progress.kept, progress.spoiled, progress.lost)
            self._scheduler.spoiled(progress.spoiled)
            invalid.difference_update(progress.spoiled.values())
        self._scheduler.received(connector_output.finished_recving, invalid, progress.number)

    def reset_cache(self) -> bool:
        if not self._settings.keep_on_reset:
            self._scheduler.reset()
        return True

    def take_events(self) -> list[Any]:
        return self._feed.take() if self._feed is not None else []

    def _namespace(self) -> Optional[bytes]:
        """Names the namespace by its fingerprint; None while the daemon is away."""
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
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    if not all(getattr(layer.get_attn_backend(), "attends_sparsely", False) for layer in layers):
        raise Unsupported(NOT_OURS)


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def _stage_number() -> int:
    from vllm.distributed import get_pp_group

    return get_pp_group().rank_in_group


def _all_stages(mine: Stage) -> Sequence[Stage]:
    import torch
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    stages: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(stages, mine, group=group.cpu_group)
    return stages


def _of_all_ranks(config: Any, mine: Any) -> list[Any]:
    """What each rank of this engine says: first the ranks of a stage, then the stages."""
    said = [mine]
    for size, group in (("tensor_parallel_size", "get_tp_group"), ("pipeline_parallel_size", "get_pp_group")):
        if getattr(config.parallel_config, size, 1) > 1:
            import torch
            import vllm.distributed

            of = getattr(vllm.distributed, group)()
            parts: list[Any] = [None] * of.world_size
            torch.distributed.all_gather_object(parts, said, group=of.cpu_group)
            said = [one for part in parts for one in part]
    return said


def _exchange(config: Any, layout: Layout, kv_caches: dict[str, Any], rank: int, ranks: int) -> Exchange:
    from vllm.distributed import get_tp_group

    return TorchExchange(layout, kv_caches, get_tp_group().device_group, rank, ranks)


def _k_in_columns(config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> bool:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        of = heads_of(kv_cache_config, "chunks")
        instructions = _get_attn_isa(next(iter(kv_caches.values())).dtype, of.tokens, of.dim)
    except (ImportError, TypeError):  # other versions of it
        instructions = "an unknown instruction set"
    return in_columns(_engine(config).get("backends", ()), instructions)


def _rotary_embeddings() -> Collection[Any]:
    """This process's rotary embeddings; none: this vLLM does not tell."""
    try:
        from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    except ImportError:
        return ()
    return _ROPE_DICT.values()


def _no_event() -> None:
    return None


def _record_event() -> Any:
    """Records an event after all work of the step. The daemon waits for the event before it reads."""
    import torch

    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event
