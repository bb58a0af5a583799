"""A paged engine around model.py that calls a KV connector's hooks as vLLM does: scheduler, block pool, workers.

These are modelled on vLLM 0.33 (v1/core/sched/scheduler.py, v1/core/kv_cache_manager.py,
v1/worker):
- the order of the hooks in a step, and chained block hashes
- the local prefix cache, and blocks that are cached when they are scheduled
- preemption of the request that came last
- loads that a request waits for outside of the batch, and blocks whose load failed
- blocks that a finished request keeps until the workers have reported it
"""

import hashlib
import uuid
from collections import deque
from types import SimpleNamespace

import numpy as np

import model as M
from engine_pages import GpuPages, HostPages
from engine_pool import BLOCK, HOLE, Pool
from extra import extra_of
from ucmclient.engine.vllm import adapters, connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

LATER = -1


class Request:
    def __init__(self, name, prompt, outputs=8, salt="", lora=None, transfer=None):
        self.request_id, self.outputs, self.salt, self.lora_request = name, outputs, salt, lora
        self.cache_salt = salt or None
        self.tokens, self.prompt_tokens = list(prompt), len(prompt)
        self.num_computed_tokens, self.num_preemptions, self.status = 0, 0, "waiting"
        self.kv_transfer_params, self.answer = transfer, None
        self.block_hashes, self.logits = [], []
        self._hash()

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def num_prompt_tokens(self):
        return self.prompt_tokens

    @property
    def all_token_ids(self):
        return self.tokens

    def append(self, token):
        self.tokens.append(token)
        self._hash()

    def _hash(self):
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.tokens):
            first = len(self.block_hashes) * BLOCK
            parent = self.block_hashes[-1] if first else self.salt.encode()
            self.block_hashes.append(hashlib.sha256(parent + b"/" + self._content(first)).digest())

    def _content(self, first):
        """The content of the block that begins with this token. Its KV is a function of this, and
        of the blocks before."""
        return np.array(self.tokens[first: first + BLOCK], np.int32).tobytes()


class Halves:
    """Arrays of K and V as one, where their strides differ. The first index says which."""

    def __init__(self, k, v):
        self.of = k, v

    def __getitem__(self, at):
        which, *rest = at
        return np.stack([one[tuple(rest)] for one in self.of]) if isinstance(which, slice) else self.of[which][tuple(rest)]

    def __setitem__(self, at, rows):
        which, *rest = at
        self.of[which][tuple(rest)] = rows


class Rank:
    """A worker: a share of the KV heads in its own pages, and its half of the connector."""

    def __init__(self, engine, number, heads):
        self.heads, o = heads, engine.options
        n, shape = len(heads), (engine.blocks, BLOCK, len(heads), M.HEAD)
        self.memory = (GpuPages if o.gpu else HostPages)(M.LAYERS * 2 * int(np.prod(shape)), o.dtype)
        whole, tensor = self.memory.whole, self.memory.tensor
        if o.layout == "split":  # K and V in front
            self.pages = list(whole.reshape(M.LAYERS, 2, *shape))
            self.tensors = {f"layers.{i}": tensor(layer) for i, layer in enumerate(self.pages)}
        elif o.layout == "fused":  # K and V of a block side by side
            pages = whole.reshape(M.LAYERS, engine.blocks, 2, BLOCK, n, M.HEAD)
            self.pages = [layer.swapaxes(0, 1) for layer in pages]
            self.tensors = {f"layers.{i}": tensor(layer) for i, layer in enumerate(pages)}
        elif o.layout == "content":  # as "packed", and K and V of a token and head side by side: BLNHC of vLLM
            pages = whole.reshape(engine.blocks, M.LAYERS, BLOCK, n, 2, M.HEAD)
            self.pages = [pages[:, i].swapaxes(2, 3).swapaxes(1, 2).swapaxes(0, 1) for i in range(M.LAYERS)]
            pages = whole.reshape(engine.blocks, M.LAYERS, BLOCK, n, 2 * M.HEAD)
            self.tensors = {f"layers.{i}": tensor(pages[:, i].swapaxes(1, 2)) for i in range(M.LAYERS)}
        elif o.layout == "columns":  # as vLLM's kernels for CPUs: of a head K, with the tokens of a channel side by side, then V
            pages = whole.reshape(M.LAYERS, engine.blocks, n, 2, BLOCK * M.HEAD)
            k = pages[:, :, :, 0].reshape(M.LAYERS, engine.blocks, n, M.HEAD, BLOCK).transpose(0, 1, 4, 2, 3)
            v = pages[:, :, :, 1].reshape(M.LAYERS, engine.blocks, n, BLOCK, M.HEAD).transpose(0, 1, 3, 2, 4)
            self.pages = [Halves(k[i], v[i]) for i in range(M.LAYERS)]
            pages = whole.reshape(M.LAYERS, engine.blocks, n, BLOCK, 2 * M.HEAD)
            self.tensors = {f"layers.{i}": tensor(pages[i]) for i in range(M.LAYERS)}
        elif o.layout in ("heads", "layers"):  # BHLNC, LBHNC of vLLM: a head's tokens side by side
            inner = (engine.blocks, n, M.LAYERS, BLOCK, 2, M.HEAD) if o.layout == "heads" else (M.LAYERS, engine.blocks, n, BLOCK, 2, M.HEAD)
            pages = whole.reshape(inner)
            layers = [pages[:, :, i] if o.layout == "heads" else pages[i] for i in range(M.LAYERS)]
            self.pages = [layer.transpose(3, 0, 2, 1, 4) for layer in layers]
            pages = whole.reshape(*inner[:-2], 2 * M.HEAD)
            layers = [pages[:, :, i] if o.layout == "heads" else pages[i] for i in range(M.LAYERS)]
            self.tensors = {f"layers.{i}": tensor(layer) for i, layer in enumerate(layers)}
        else:  # "packed": all layers of a block side by side
            pages = whole.reshape(engine.blocks, M.LAYERS, 2, BLOCK, n, M.HEAD)
            self.pages = [pages[:, i].swapaxes(0, 1) for i in range(M.LAYERS)]
            self.tensors = {f"layers.{i}": tensor(pages[:, i]) for i in range(M.LAYERS)}
        self.memory.forget()  # what was never written must never count
        self.connector = None
        if engine.connector_class is not None:
            connector_module._tensor_parallel_rank = lambda: number  # vLLM has a process for each rank
            connector_module._of_all_ranks = lambda config, mine: [mine]
            self.connector = engine.connector_class(engine.config, KVConnectorRole.WORKER, engine.kv_config)
            self.connector.register_kv_caches(self.tensors)

    def write(self, layer, blocks, rows, k, v):
        """K and V of tokens, whose blocks and rows in these are given."""
        for i, of in enumerate((k, v)):
            self.memory.put(self.pages[layer], (i, blocks, rows), of[:, self.heads])

    def being_read(self):
        """Blocks that a store of this rank reads now."""
        worker = self.connector._worker if self.connector is not None else None
        halves = getattr(worker, "kinds", [worker] if worker is not None else ())
        return {block for half in halves for store in half._stores if store.task is not None for copy in store.copies for block in copy.blocks}

    def read(self, layer, blocks):
        """K and V of these blocks' tokens."""
        return self.memory.get(self.pages[layer][:, blocks]).reshape(2, -1, len(self.heads), M.HEAD)


class Engine:
    RANK = Rank

    def __init__(self, model, connector=None, *, blocks=64, ranks=1, replicated=False, layout="split", budget=64,
                 batch=4, gpu=False, dtype="float32", role="kv_both", handshake=True, **extra):
        """extra: kv_connector_extra_config. budget: tokens of a step. replicated: every rank has all KV heads. handshake
        false: another connector's reaches the scheduler in its place."""
        self.model, self.blocks, self.budget, self.batch = model, blocks, budget, batch
        self.options = SimpleNamespace(layout=layout, gpu=gpu, dtype=dtype)
        self.connector_class = connector
        self.by_layer = "layer_stores" in extra
        self.config, self.kv_config = self._configuration(blocks, ranks, replicated, extra, role, dtype)
        heads = list(range(M.KV_HEADS))
        share = M.KV_HEADS // (1 if replicated else ranks)
        self.ranks = self._ranks([heads if replicated else heads[r * share: (r + 1) * share] for r in range(ranks)])
        self.connector = None
        if connector is not None:
            connector_module.watching.calls = lambda: True  # what changes weights is seen
            self.connector = connector(self.config, KVConnectorRole.SCHEDULER, self.kv_config)
            self.shake_hands(handshake)
        self.pool = self._new_pool()
        self.requests, self.waiting, self.loading, self.running = {}, deque(), [], []
        self.finished, self.received, self.failed = set(), set(), set()
        self.lost, self.reset_lost = set(), set()  # preempted since the last step; by reset_prefix_cache
        self.reports = {"sent": {}, "received": {}}
        self.adapters, self.lingering = set(), set()
        self.steps = self.loaded_tokens = self.preemptions = self.recomputed = 0

    @property
    def pool(self):
        return self._pool

    @pool.setter
    def pool(self, pool):
        self._pool = pool
        if self.connector is not None:
            self.connector.bind_gpu_block_pool(pool)

    def _configuration(self, *of):
        return configuration(*of)

    def _ranks(self, heads):
        """heads: of each rank."""
        return [self.RANK(self, r, of) for r, of in enumerate(heads)]

    def _new_pool(self):
        return Pool(self.blocks)

    def shake_hands(self, ours=True):
        self.connector.set_xfer_handshake_metadata(
            {r: rank.connector.get_handshake_metadata() if ours else object() for r, rank in enumerate(self.ranks)})

    # ---- scheduler ----

    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        out = SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens={}, preempted_req_ids=set(),
                              has_sync_kv_loads=False,
                              scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[],
                                                                    num_computed_tokens=[]))
        left = self._schedule_running(out, self.budget)
        if not self.lost - self.reset_lost:
            self._schedule_waiting(out, left)
        out.preempted_req_ids, self.lost, self.reset_lost = self.lost, set(), set()
        out.finished_req_ids, self.finished = self.finished, set()
        out.kv_connector_block_state = self._block_state(out)
        out.meta = self.connector.build_connector_meta(out) if self.connector else None
        for name, n in out.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += n
        return out

    def _block_state(self, out):
        """What only the scheduler's half knows."""
        return None

    def _schedule_running(self, out, left):
        i = 0
        while i < len(self.running) and left > 0:
            request = self.running[i]
            n = self._tokens(request, request.num_computed_tokens, left)
            new = self.pool.allocate(request, request.num_computed_tokens + n)
            if new is None and self._waits_for_pages(request):
                i += 1
                continue
            if new is None:
                victim = self.running.pop()
                assert victim.request_id not in out.num_scheduled_tokens
                self._preempt(victim)
                if victim is request:
                    break
                continue
            self.pool.cache(request, request.num_computed_tokens + n)
            self._scheduled(out, request, n, self._ids(new), resumed=False)
            left -= n
            i += 1
        return left

    def _ids(self, blocks):
        """As vLLM says a request's blocks: a list for each group."""
        return (list(blocks),)

    def _tokens(self, request, computed, left):
        """How many tokens of it the next step may compute."""
        return min(request.num_tokens - computed, left)

    def _waits_for_pages(self, request):
        """Some of its blocks will be free without a preemption."""
        return False

    def _hit_tokens(self, hits):
        return len(hits) * BLOCK

    def _holes(self, request, computed, hits):
        """How many blocks after these hits need no pages."""
        return 0

    def _preempt(self, request):
        self.pool.release(request)
        request.num_computed_tokens, request.status = 0, "preempted"
        request.num_preemptions += 1
        self.preemptions += 1
        self.lost.add(request.request_id)
        self.waiting.appendleft(request)

    def _scheduled(self, out, request, n, blocks, resumed):
        out.num_scheduled_tokens[request.request_id] = n
        cached = out.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if resumed:
            cached.resumed_req_ids.add(request.request_id)

    def _schedule_waiting(self, out, left):
        """Requests that have waited for a load hold blocks, and go first, because others may wait
        for these."""
        for request in [r for r in self.loading if self._loaded(r)]:
            self.loading.remove(request)
            self.waiting.appendleft(request)
        self.waiting = deque(sorted(self.waiting, key=lambda r: r.request_id not in self.pool.requests))
        later = []
        while self.waiting and left > 0 and len(self.running) + len(self.loading) < self.batch:
            n = self._admit(out, self.waiting[0], left)
            if n is None:
                break
            request = self.waiting.popleft()
            if n == LATER:
                later.append(request)
            elif n == 0:
                self.loading.append(request)
            else:
                left -= n
        self.waiting.extend(later)

    def _loaded(self, request):
        """A load is over. Its valid blocks are cached, and the last token is left to be computed.
        """
        name = request.request_id
        if name not in self.received:
            return False
        self.received.discard(name)
        if name in self.failed:
            self.failed.discard(name)
            if request.num_computed_tokens == 0:
                self.pool.release(request)
        if request.num_computed_tokens:
            self.pool.cache(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        request.status = "preempted" if request.num_preemptions else "waiting"
        return True

    def _admit(self, out, request, left):
        """Tokens scheduled; 0: it waits for a load; LATER: the connector can't say yet; None: there is no room."""
        external, asynchronous, hits, computed = 0, False, [], request.num_computed_tokens
        if computed == 0:
            hits = self.pool.hits(request)
            computed = self._hit_tokens(hits)
            if self.connector is not None:
                external, asynchronous = self.connector.get_num_new_matched_tokens(request, computed)
                if external is None:
                    return LATER
            computed += external
        n = 0 if asynchronous else self._tokens(request, computed, left)
        holes = 0 if request.num_computed_tokens else self._holes(request, computed, len(hits))
        if self.pool.allocate(request, computed + n, hits, holes) is None:
            return None
        blocks = self.pool.requests[request.request_id]
        if self.connector is not None:
            self.connector.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda: self._ids(blocks)), external)
        self.loaded_tokens += external
        request.num_computed_tokens = computed
        if asynchronous:
            request.status = "loading"
            return 0
        out.has_sync_kv_loads |= external > 0
        self.pool.cache(request, computed + n)
        self.running.append(request)
        if request.status == "preempted":
            self._scheduled(out, request, n, self._ids(blocks), resumed=True)
        else:
            out.num_scheduled_tokens[request.request_id] = n
            out.scheduled_new_reqs.append(SimpleNamespace(req_id=request.request_id, block_ids=self._ids(blocks),
                                                          num_computed_tokens=computed))
        request.status = "running"
        return n

    # ---- workers ----

    def execute(self, out):
        """Finished loads and stores of every rank, failed blocks, and the logits of requests whose
        tokens are all there."""
        connectors = [rank.connector for rank in self.ranks if rank.connector is not None]
        self._read_adapters(out)
        for connector in connectors:
            connector.handle_preemptions(out.meta)
            connector.bind_connector_metadata(out.meta)
            if out.has_sync_kv_loads:
                connector.start_load_kv(None)
        logits = self._forward(out, connectors) if out.num_scheduled_tokens else {}
        done = SimpleNamespace(finished_sending=set(), finished_recving=set(), invalid_block_ids=set(),
                               kv_connector_worker_meta=None)
        for connector in connectors:
            if not out.has_sync_kv_loads:
                connector.start_load_kv(None)
            connector.wait_for_save()
            self._transfers(connector, out, done)
            done.invalid_block_ids |= connector.get_block_ids_with_load_errors()
            meta = connector.build_connector_worker_meta()
            before = done.kv_connector_worker_meta
            done.kv_connector_worker_meta = before.aggregate(meta) if before and meta else before or meta
            connector.clear_connector_metadata()
        return done, logits

    def _read_adapters(self, out):
        """A worker reads an adapter when a step needs it first."""
        for name in out.num_scheduled_tokens:
            self.add_lora(self.requests[name].lora_request)

    def add_lora(self, lora):
        """Or when it is told to."""
        number = getattr(lora, "lora_int_id", 0)
        if lora is not None and number not in self.adapters:
            with adapters.reading(self, lora):
                self.adapters.add(number)

    def _transfers(self, connector, out, done):
        sent, received = connector.get_finished(out.finished_req_ids)
        done.finished_sending |= self._all_ranks("sent", sent)
        done.finished_recving |= self._all_ranks("received", received)

    def _all_ranks(self, kind, names):
        """What every rank has reported by now."""
        counts, whole = self.reports[kind], set()
        for name in names or ():
            counts[name] = counts.get(name, 0) + 1
            if counts[name] == len(self.ranks):
                del counts[name]
                whole.add(name)
        return whole

    def _forward(self, out, connectors):
        work = []  # request, position, hidden state
        for name, n in out.num_scheduled_tokens.items():
            request = self.requests[name]
            first = request.num_computed_tokens - n
            work += [[request, p, self.model.embedding[request.tokens[p]]] for p in range(first, first + n)]
        for layer in range(M.LAYERS):
            for connector in connectors:
                connector.wait_for_layer_load(f"layers.{layer}")
            self._write(layer, work, *self.model.keys_values(layer, *self._batch(work)))
            self._attend_all(layer, work)
            for connector in connectors:
                connector.save_kv_layer(f"layers.{layer}", None, None)
        return self._logits(work)

    def _logits(self, work):
        return {request.request_id: self.model.logits(hidden) for request, position, hidden in work
                if position == request.num_tokens - 1}

    def _batch(self, work):
        """Hidden states and positions, of none, too."""
        return np.array([hidden for _, _, hidden in work], np.float32).reshape(-1, M.WIDTH), [position for _, position, _ in work]

    def _attend_all(self, layer, work):
        hidden, positions = self._batch(work)
        outputs = self._attended(layer, work, self.model.queries(layer, hidden, positions))
        for item, after in zip(work, self.model.after(layer, hidden, outputs)):
            item[2] = after

    def _write(self, layer, work, k, v):
        blocks = [self.pool.requests[request.request_id][position // BLOCK]
                  for request, position, _ in work]
        for rank in self.ranks:
            assert self.by_layer or rank.being_read().isdisjoint(blocks), "a store reads this block"
            rank.write(layer, blocks, [position % BLOCK for _, position, _ in work], k, v)

    def _attended(self, layer, work, queries):
        """What each of these tokens gets from all tokens up to it."""
        outputs, of_request = np.empty_like(queries), {}
        for i, (request, _, _) in enumerate(work):
            of_request.setdefault(request.request_id, []).append(i)
        for indices in of_request.values():
            request, positions = work[indices[0]][0], [work[i][1] for i in indices]
            read = self._read(layer, request, positions[-1] + 1)
            outputs[indices] = M.attend_all(queries[indices], positions, read)
        return outputs

    def _read(self, layer, request, tokens):
        """K and V of the first tokens, heads of all ranks side by side."""
        blocks = self.pool.requests[request.request_id][: -(-tokens // BLOCK)]
        both = np.empty((2, tokens, M.KV_HEADS, M.HEAD), np.float32)
        for rank in self.ranks:
            both[:, :, rank.heads] = rank.read(layer, blocks)[:, :tokens]
        return both

    # ---- what came of a step ----

    def update(self, out, done, logits):
        skip = self._invalid(done.invalid_block_ids, out)
        for name in out.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.status != "running" or name in skip or name not in logits:
                continue
            request.logits.append(logits[name])
            request.append(int(np.argmax(logits[name])))
            if request.num_tokens - request.prompt_tokens == request.outputs:
                self.running.remove(request)
                self._finish(request)
        if self.connector is not None:
            self.connector.update_connector_output(done)
        for name in done.finished_recving:
            if self.requests[name].status == "loading":
                self.received.add(name)
            else:
                self._forget(name)
        for name in done.finished_sending:
            self._forget(name)
        if self.lingering and not self.pool.held:
            for name in self.lingering:
                self.requests.pop(name)
            self.lingering = set()

    def _invalid(self, bad, out):
        """Requests go back to the block before their first bad one. Running requests of this step
        have computed with missing bytes."""
        skip = set()
        for request in self.loading + self.running:
            name = request.request_id
            before = request.num_computed_tokens - out.num_scheduled_tokens.get(name, 0)
            blocks = self.pool.requests[name][: -(-before // BLOCK)]
            first = next((i for i, b in enumerate(blocks) if b in bad), None)
            if first is None:
                continue
            request.num_computed_tokens = first * BLOCK
            self.recomputed += 1
            (skip if request.status == "running" else self.failed).add(name)
        return skip

    def _finish(self, request, loading=False):
        request.status = "finished"
        delayed = False
        if self.connector is not None:
            delayed, request.answer = self._tell_finished(request, self.pool.requests.get(request.request_id, []))
        assert not (delayed and loading)
        self.finished.add(request.request_id)
        if not (delayed or loading):
            self._forget(request.request_id)

    def _tell_finished(self, request, blocks):
        return self.connector.request_finished(request, list(blocks))

    def _forget(self, name):
        """It is seen as long as the connector holds blocks, so that waiting for requests includes
        these."""
        request = self.requests[name]
        assert request.status == "finished"
        self.pool.release(request)
        if self.pool.held:
            self.lingering.add(name)
        else:
            self.requests.pop(name)

    def abort(self, name):
        request = self.requests[name]
        loading = request.status == "loading" and name not in self.received
        next(queue for queue in (self.running, self.loading, self.waiting) if request in queue).remove(request)
        self.received.discard(name)
        self.failed.discard(name)
        self._finish(request, loading)

    # ---- outside ----

    def step(self):
        out = self.schedule()
        done, logits = self.execute(out)
        self.update(out, done, logits)
        self.steps += 1

    def reset_prefix_cache(self, external=False):
        """Between steps: all running requests lose their blocks, and may be scheduled again in the
        next step."""
        while self.running:
            self.reset_lost.add(self.running[-1].request_id)
            self._preempt(self.running.pop())
        assert self.pool.reset_prefix_cache(), "blocks are in use"
        return not external or self.connector.reset_cache() is not False

    def sleep(self):
        """Pages lose what was in them."""
        self.reset_prefix_cache()
        for rank in self.ranks:
            for _ in range(2):
                rank.connector.unregister_kv_caches()
            rank.memory.forget()

    def wake(self):
        for rank in self.ranks:
            for _ in range(2):
                rank.connector.restore_kv_caches()
        self.shake_hands()

    def close(self):
        for rank in self.ranks:
            if rank.connector is not None:
                rank.connector.unregister_kv_caches()
                rank.connector.shutdown()
        if self.connector is not None:
            self.connector.shutdown()


def configuration(blocks, ranks, replicated, extra, role="kv_both", dtype="float32"):
    """As much of VllmConfig and KVCacheConfig as connectors read."""
    heads = M.KV_HEADS // (1 if replicated else ranks)
    spec = type("FullAttentionSpec", (), {"block_size": BLOCK, "num_kv_heads": heads, "head_size": M.HEAD})()
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="mini", revision=None, dtype=dtype, quantization=None, use_mla=replicated,
                                     hf_config=SimpleNamespace(_commit_hash="1", to_dict=dict)),
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256",
                                     cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_of(extra), engine_id=uuid.uuid4().hex, kv_load_failure_policy="recompute",
                                           is_kv_producer=role != "kv_consumer",
                                           is_kv_consumer=role != "kv_producer"),
    )
    if extra.get("chunks"):  # asks how the model rotates K
        config.model_config.architectures = ["LlamaForCausalLM"]
        config.model_config.hf_text_config = SimpleNamespace(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, head_dim=M.HEAD)
    kv_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=blocks)
    return config, kv_config
