"""engine.py as a pipeline: each stage has some of the layers, and as many ranks as the engine has
tensor-parallel ones. Ranks register at the same time, as processes do, because each asks the others
what they keep."""

import threading
from types import SimpleNamespace

import numpy as np

import model as M
from engine import BLOCK, Engine, Rank
from engine_pages import HostPages
from ucmclient.engine.vllm import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

WAIT_S = 20


class Gather:
    """The reports of each stage's ranks with the same heads, once all have reported."""

    def __init__(self, stages):
        self.said, self.all_have = [None] * stages, threading.Barrier(stages)

    def __call__(self, stage, said):
        self.said[stage] = said
        self.all_have.wait(WAIT_S)
        return list(self.said)


class StageRank:
    """A worker with the KV of some heads in some layers. Of a context's ranks, it has those tokens
    of a block that are its turn. Layers may differ in how many elements they keep besides K and V
    (`beside`, of each layer and token), as an indexer's keys do."""

    being_read = Rank.being_read

    def __init__(self, engine, stage, heads, layers, number=0):
        """number: of its tensor-parallel rank."""
        o, n, tokens = engine.options, len(heads), BLOCK // engine.context
        self.heads, self.layers, self.stage = heads, layers, stage
        shape, kv = (engine.blocks, tokens, n, M.HEAD), 2 * tokens * n * M.HEAD
        sizes = [kv + tokens * engine.beside[layer] for layer in layers]
        at, run = np.arange(tokens), engine.run
        #: Which tokens of a block it holds.
        self.rows = list(at // run * run * engine.context + number % engine.context * run + at % run)
        self.memory = HostPages(engine.blocks * sum(sizes), o.dtype)
        whole, at, self.pages, self.tensors = self.memory.whole, 0, {}, {}
        self.drafts = None  # what the last layer keeps besides K and V: [block, token, element]
        blocks = whole.reshape(engine.blocks, -1)
        for layer, size in zip(layers, sizes):
            if o.layout == "packed":  # all layers of a block side by side
                own = blocks[:, at: at + size]
            else:
                own = whole[engine.blocks * at: engine.blocks * (at + size)].reshape(engine.blocks, size)
            both = np.lib.stride_tricks.as_strided(own, (engine.blocks, 2, *shape[1:]),
                                                   (own.strides[0], own.itemsize * kv // 2, *self._strides(own, n)))
            self.pages[layer] = both.swapaxes(0, 1)
            self.tensors[f"layers.{layer}"] = self.memory.tensor(both if size == kv else own)
            if layer == M.LAYERS - 1 and size > kv:
                beside = (engine.blocks, tokens, (size - kv) // tokens)
                self.drafts = np.lib.stride_tricks.as_strided(own[:, kv:], beside, (own.strides[0], own.itemsize * beside[2], own.itemsize))
            at += size
        self.memory.forget()
        self.connector = None

    @staticmethod
    def _strides(own, heads):
        return tuple(own.itemsize * n for n in (heads * M.HEAD, M.HEAD, 1))

    def register(self, engine):
        if engine.connector_class is not None:
            self.connector = engine.connector_class(engine.config, KVConnectorRole.WORKER, engine.kv_config)
            self.connector.register_kv_caches(self.tensors)

    def write(self, layer, blocks, rows, k, v):
        mine = [i for i, row in enumerate(rows) if layer in self.pages and row in self.rows]
        if mine:
            at = [blocks[i] for i in mine], [self.rows.index(rows[i]) for i in mine]
            for i, of in enumerate((k, v)):
                self.memory.put(self.pages[layer], (i, *at), of[mine][:, self.heads])

    def read(self, layer, blocks):
        return self.memory.get(self.pages[layer][:, blocks])


class StagesEngine(Engine):
    def __init__(self, *args, stages=(2, 1), beside=(0,) * M.LAYERS, context=1, run=1, kv_heads=None, **more):
        """stages: how many layers each has. context: among so many ranks a block's tokens go in turn, `run` at a time. kv_heads: how many
        the model says it has; neighbouring ranks have the same."""
        self.stages, self.beside, self.context, self.run, self.kv_heads = stages, beside, context, run, kv_heads
        super().__init__(*args, **more)

    def _configuration(self, *of):
        config, kv_config = super()._configuration(*of)
        parallel, spec = config.parallel_config, kv_config.kv_cache_groups[0].kv_cache_spec
        parallel.pipeline_parallel_size = len(self.stages)
        parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size = self.context, self.run
        spec.block_size, kv_config.hash_block_size = BLOCK // self.context, BLOCK
        if self.kv_heads is not None:
            config.model_config.get_total_num_kv_heads = lambda: self.kv_heads
            spec.num_kv_heads = M.KV_HEADS // self.kv_heads
        return config, kv_config

    def _ranks(self, heads):
        if self.kv_heads is not None:
            share, same = M.KV_HEADS // self.kv_heads, len(heads) // self.kv_heads
            heads = [list(range(r // same * share, (r // same + 1) * share)) for r in range(len(heads))]
        firsts = [sum(self.stages[:i]) for i in range(len(self.stages))]
        ranks = [[StageRank(self, i, of, range(first, first + n), r) for r, of in enumerate(heads)]
                 for i, (first, n) in enumerate(zip(firsts, self.stages))]
        of, gathers, errors = threading.local(), [Gather(len(self.stages)) for _ in heads], []
        connector_module._tensor_parallel_rank = lambda: of.rank
        connector_module._of_all_ranks = lambda config, mine: [mine]
        connector_module._stage_number = lambda: of.stage
        connector_module._all_stages = lambda said: gathers[of.rank](of.stage, said)

        def register(stage, rank):
            of.stage, of.rank = stage, rank
            try:
                ranks[stage][rank].register(self)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=register, args=(i, r)) for i in range(len(ranks)) for r in range(len(heads))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        everyone = [rank for stage in ranks for rank in stage]
        if errors:
            for rank in everyone:
                if rank.connector is not None:
                    rank.connector.shutdown()
            raise SomeRefused(errors)
        return everyone

    def shake_hands(self, ours=True):
        """By the ranks of stage and tensor, as vLLM from 0.32 on."""
        said = {(rank.stage, r): rank.connector.get_handshake_metadata() for r, rank in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(said if ours else {(0, 0): object()})

    def _read(self, layer, request, tokens):
        """K and V of the first tokens: heads and tokens of all ranks."""
        blocks = self.pool.requests[request.request_id][: -(-tokens // BLOCK)]
        both = np.empty((2, len(blocks), BLOCK, M.KV_HEADS, M.HEAD), np.float32)
        for rank in (rank for rank in self.ranks if layer in rank.pages):
            both[np.ix_((0, 1), range(len(blocks)), rank.rows, rank.heads)] = rank.read(layer, blocks)
        return both.reshape(2, -1, M.KV_HEADS, M.HEAD)[:, :tokens]


class SomeRefused(Exception):
    def __init__(self, errors):
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors
