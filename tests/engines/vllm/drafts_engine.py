"""stages_engine.py with a draft layer, which keeps rows of its own besides the last layer's KV. A
token's row is a function of it and of the next one, as in EAGLE's and MTP's layers. It runs after
all layers. With `later` it runs after get_finished, as in vLLM 0.32's first model runner."""

from types import SimpleNamespace

import numpy as np

import model as M
from engine import BLOCK
from stages_engine import StagesEngine

ROW = 8


def row(token, following):
    return np.arange(ROW, dtype=np.float32) + np.float32(token) + np.float32(following) / 256


class DraftsEngine(StagesEngine):
    """In each step, compares the draft's rows of all tokens that its requests have computed or
    loaded."""

    def __init__(self, *args, method="eagle", draft="draft", later=True, stages=(M.LAYERS,), **more):
        self.method, self.draft, self.later = method, draft, later
        self.compared = 0
        super().__init__(*args, stages=stages, beside=(0,) * (M.LAYERS - 1) + (ROW,), **more)
        self.pool.hits = lambda request: []  # vLLM's own hits end a block early, and are not what is tested

    def _configuration(self, *of):
        config, kv_config = super()._configuration(*of)
        model = SimpleNamespace(model=self.draft, revision=None, quantization=None, dtype="float32",
                                hf_config=SimpleNamespace(_commit_hash="1", to_dict=dict))
        config.speculative_config = SimpleNamespace(method=self.method, draft_model_config=model)
        return config, kv_config

    def execute(self, out):
        connectors = [rank.connector for rank in self.ranks if rank.connector is not None]
        for connector in connectors:
            connector.handle_preemptions(out.meta)
            connector.bind_connector_metadata(out.meta)
            if out.has_sync_kv_loads:
                connector.start_load_kv(None)
        logits = self._forward(out, connectors) if out.num_scheduled_tokens else {}
        done = SimpleNamespace(finished_sending=set(), finished_recving=set(), invalid_block_ids=set(), kv_connector_worker_meta=None)
        if not self.later:
            self._run_draft(out, logits, done.invalid_block_ids)
        for connector in connectors:
            self._report(connector, out, done)
        if self.later:
            self._run_draft(out, logits, done.invalid_block_ids)
        for connector in connectors:
            if self.later and out.num_scheduled_tokens:
                connector.wait_for_save()
            connector.clear_connector_metadata()
        return done, logits

    def _report(self, connector, out, done):
        if not out.has_sync_kv_loads:
            connector.start_load_kv(None)
        if not (self.later and out.num_scheduled_tokens):
            connector.wait_for_save()
        self._transfers(connector, out, done)
        done.invalid_block_ids |= connector.get_block_ids_with_load_errors()
        meta, before = connector.build_connector_worker_meta(), done.kv_connector_worker_meta
        done.kv_connector_worker_meta = before.aggregate(meta) if before and meta else before or meta

    def _run_draft(self, out, logits, invalid):
        for name, n in out.num_scheduled_tokens.items():
            request, blocks = self.requests[name], self.pool.requests[name]
            sampled = [int(np.argmax(logits[name]))] if name in logits else []
            tokens, end = request.tokens + sampled, request.num_computed_tokens
            for p in range(end):
                wanted, block = row(tokens[p], tokens[p + 1]), blocks[p // BLOCK]
                for rank in (rank for rank in self.ranks if rank.drafts is not None):
                    if p >= end - n:
                        rank.drafts[block, p % BLOCK] = wanted
                    elif invalid.isdisjoint(blocks):
                        assert np.array_equal(rank.drafts[block, p % BLOCK], wanted), f"{name}: the draft's row of token {p}"
                        self.compared += 1
