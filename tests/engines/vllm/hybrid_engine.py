"""engine.py for a model whose layers keep their KV in several ways, as in vLLM. Each way is a group
of layers, with block sizes of their own, out of one pool of blocks. Layers with a sliding window
attend the last tokens only. Blocks that no window reaches any more are given to others at once.
Recurrent layers have a state in the block of the last computed token, as with vLLM's "align". A
step that goes beyond a block first copies the state into another one. Prompts are cut so that steps
end with blocks.
"""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np

import model as M
from engine import BLOCK, HOLE, Engine, Rank as SplitRank, configuration
from engine_pool import Shown
from engine_pages import HostPages
from ucmclient.engine.vllm import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


class Group:
    """window: tokens that a token attends, itself included; 0: all before it. tensor: groups with
    the same number lie in the same tensors, each block of which belongs to one group at a time.
    state: its layers are recurrent; "inside": they also leave a state at a prompt's last multiple
    in the middle of a step."""

    def __init__(self, layers, window=0, tokens=BLOCK, tensor=0, state=False):
        self.layers, self.window, self.tokens, self.tensor, self.state = layers, window, tokens, tensor, state
        self.kept = 1 + (state == "inside")

    def skipped(self, computed):
        """How many first blocks a request does not need any more."""
        if self.state:
            return max(0, computed - 1) // self.tokens
        return max(0, computed - self.window + 1) // self.tokens if self.window else 0


#: Two windows and full attention, in blocks that look alike.
ALIKE = (Group([0], 40), Group([1], 40), Group([2]))
#: The window's layers lie elsewhere, and have blocks of twice as many tokens.
UNLIKE = (Group([0, 1], 40, 2 * BLOCK, 1), Group([2]))
ONLY_WINDOWS = (Group([0, 1, 2], 40),)
#: Two groups of recurrent layers, and full attention: in blocks of the same tensors, of which a state needs a part.
STATES = (Group([0], state=True), Group([1], state=True), Group([2]))
INSIDE = (Group([0], state="inside"), Group([1], state="inside"), Group([2]))
#: Windows alongside them.
ALL_KINDS = (Group([0], state=True), Group([1], 40), Group([2]))
ONLY_STATES = (Group([0, 1, 2], state=True),)


class Pool(Shown):
    """Tables of block ids, one for each group; the methods of engine.py's, and those of vLLM's that a connector calls."""

    def __init__(self, blocks, groups):
        self.groups, self.references = groups, [0] * blocks
        self.free = OrderedDict((b, None) for b in range(1, blocks))
        self.of_hash, self.hash_of, self.requests = {}, {}, {}
        self.show(blocks)

    def _key(self, request, number, block):
        return number, request.block_hashes[(block + 1) * self.groups[number].tokens // BLOCK - 1]

    def hits(self, request):
        unit = int(np.lcm.reduce([g.tokens for g in self.groups]))
        for end in range((request.num_tokens - 1) // unit * unit, 0, -unit):
            tables = []
            for number, group in enumerate(self.groups):
                first = group.skipped(end)
                keys = [self._key(request, number, i) for i in range(first, end // group.tokens)]
                tables.append([HOLE] * first + [self.of_hash.get(key) for key in keys])
            if not any(None in table for table in tables):
                return tables
        return ()

    def allocate(self, request, tokens, hits=(), computed=0):
        """computed: of a new request, tokens that are cached here or loaded."""
        name = request.request_id
        if name in self.requests:
            tables = self.requests[name]
            for table, group in zip(tables, self.groups):
                self._skip(table, group.skipped(request.num_computed_tokens))
        else:
            tables = [[] for _ in self.groups]
            for table, found, group in zip(tables, hits or tables, self.groups):
                skipped = group.skipped(computed)
                table += [HOLE] * skipped + list(found[skipped:])
        wanted = [max(0, -(-tokens // g.tokens) - len(t)) for t, g in zip(tables, self.groups)]
        if sum(min(n, g.kept) if g.state else n for n, g in zip(wanted, self.groups)) > len(self.free) - len({b for t in tables for b in t if b in self.free}):
            return None
        if name not in self.requests:
            for b in (b for table in tables for b in table if b != HOLE):
                self._take(b)
        new = [self._new_blocks(n, g) for n, g in zip(wanted, self.groups)]
        self.requests[name] = [table + more for table, more in zip(tables, new)]
        return new

    def _new_blocks(self, n, group):
        """A state lies in the last one."""
        return [HOLE if group.state and i + group.kept < n else self._new() for i in range(n)]

    def _new(self):
        b, _ = self.free.popitem(last=False)
        self.of_hash.pop(self.hash_of.pop(b, None), None)
        self.references[b] = 1
        return b

    def _take(self, b):
        self.references[b] += 1
        self.free.pop(b, None)

    def _unused(self, b):
        self.references[b] -= 1
        assert self.references[b] >= 0
        if self.references[b] == 0:
            self.free[b] = None
            self.free.move_to_end(b, last=False)  # a late reader would see

    def _skip(self, table, blocks):
        for i in range(min(blocks, len(table))):
            table[i], b = HOLE, table[i]
            if b != HOLE:
                self._unused(b)

    def cache(self, request, tokens):
        for number, (table, group) in enumerate(zip(self.requests[request.request_id], self.groups)):
            for i in range(min(tokens, len(request.block_hashes) * BLOCK) // group.tokens):
                key = self._key(request, number, i)
                if table[i] != HOLE and key not in self.of_hash and table[i] not in self.hash_of:
                    self.of_hash[key], self.hash_of[table[i]] = table[i], key

    def release(self, request):
        for table in self.requests.pop(request.request_id, []):
            self._skip(table, len(table))

    def idle(self):
        return len(self.free) == len(self.references) - 1 and not self.requests


class Rank:
    def __init__(self, engine, number, heads):
        self.heads, groups, self.at = heads, engine.groups, {}
        n, self.pages, tensors = len(heads), {}, {}
        sizes = {g.tensor: (max(len(one.layers) for one in groups if one.tensor == g.tensor), g.tokens) for g in groups}
        shapes = {t: (layers, engine.blocks, 2, tokens, n, M.HEAD) for t, (layers, tokens) in sizes.items()}
        self.memory = HostPages(sum(int(np.prod(shape)) for shape in shapes.values()), engine.options.dtype)
        begin = 0
        for t, shape in shapes.items():
            pages, begin = self.memory.whole[begin : begin + int(np.prod(shape))].reshape(shape), begin + int(np.prod(shape))
            for group in (g for g in groups if g.tensor == t):
                for i, layer in enumerate(group.layers):
                    self.pages[layer] = pages[i]
                    tensors[f"layers.{layer}"] = self.memory.tensor(pages[i][:, :, :1] if group.state else pages[i])
        self.memory.forget()
        self.connector = None
        if engine.connector_class is not None:
            connector_module._tensor_parallel_rank = lambda: number
            connector_module._of_all_ranks = lambda config, mine: [mine]
            self.connector = engine.connector_class(engine.config, KVConnectorRole.WORKER, engine.kv_config)
            self.connector.register_kv_caches(dict(sorted(tensors.items())))

    def write(self, layer, block, row, k, v):
        for i, of in enumerate((k, v)):
            self.memory.put(self.pages[layer], (block, i, row), of[self.heads])

    def read(self, layer, blocks):
        return self.memory.get(self.pages[layer][blocks].swapaxes(0, 1)).reshape(2, -1, len(self.heads), M.HEAD)

    being_read = SplitRank.being_read


class HybridEngine(Engine):
    RANK = Rank

    def __init__(self, model, connector=None, groups=ALIKE, **more):
        self.groups = groups
        self.of_layer = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        super().__init__(model, connector, **more)
        self.failures = 0
        self.states = {}  # of this step: the state after each token of each request and layer

    def _configuration(self, blocks, ranks, *more):
        config, kv_config = configuration(blocks, ranks, *more)
        heads = kv_config.kv_cache_groups[0].kv_cache_spec.num_kv_heads
        kv_config.kv_cache_groups, kv_config.hash_block_size = [self._group(g, heads) for g in self.groups], BLOCK
        return config, kv_config

    @staticmethod
    def _group(group, heads):
        of = {"block_size": group.tokens, "num_kv_heads": heads, "head_size": M.HEAD}
        if group.state:
            spec = type("MambaSpec", (), {"block_size": group.tokens, "mamba_cache_mode": "align", "shapes": ((2, heads, M.HEAD),)})
            return SimpleNamespace(kv_cache_spec=spec(), layer_names=[f"layers.{i}" for i in group.layers])
        spec = type("SlidingWindowSpec", (), {**of, "sliding_window": group.window}) if group.window else type("FullAttentionSpec", (), of)
        return SimpleNamespace(kv_cache_spec=spec(), layer_names=[f"layers.{i}" for i in group.layers])

    def _new_pool(self):
        return Pool(self.blocks, self.groups)

    def _ids(self, blocks):
        return tuple(list(table) for table in blocks)

    def _hit_tokens(self, hits):
        return len(hits[0]) * self.groups[0].tokens if hits else 0

    def _holes(self, request, computed, hits):
        return computed

    def _tokens(self, request, computed, left):
        """With recurrent layers, a step of a prompt ends with a block. It also ends at the last
        block where a hit can end, and where the connector asks for it."""
        end = computed + super()._tokens(request, computed, left)
        sizes = [g.tokens for g in self.groups if g.state]
        last = max(request.prompt_tokens, request.num_tokens - 1)
        if not sizes or computed >= last:
            return end - computed
        size = max(sizes)
        if end < last and end // size * size > computed:
            end = end // size * size
        inside = end >= last and computed % size == 0 and any(g.state == "inside" for g in self.groups)
        stops = [(computed // size + 1) * size if computed % size else 0, 0 if inside else (request.num_tokens - 1) // size * size,
                 getattr(request, "shared_prefix_boundary", 0)]
        return min([s for s in stops if computed < s < end], default=end) - computed

    def _admit(self, out, request, left):
        if request.num_computed_tokens == 0:
            request.shared_prefix_boundary = 0
            # Requests whose load holds pages, and that need more, must not wait for each other.
            holding = [r for r in (*self.loading, *self.waiting) if r.request_id in self.pool.requests]
            if holding and len(self.pool.free) < sum(self._needs(r) for r in (*holding, request)):
                return None
        return super()._admit(out, request, left)

    def _needs(self, request):
        """Blocks more, for its next step at most."""
        tables = self.pool.requests.get(request.request_id, [[]] * len(self.groups))
        return sum(1 if g.state and t else 2 if g.state else -(-(request.num_tokens + 1) // g.tokens) - len(t)
                   for t, g in zip(tables, self.groups))

    def execute(self, out):
        self.states, self.begun = {}, {
            name: self.requests[name].num_computed_tokens - n for name, n in out.num_scheduled_tokens.items()}
        return super().execute(out)

    def _write_state(self, layer, request, position, k, v):
        name, number = request.request_id, self.of_layer[layer]
        size, table = self.groups[number].tokens, self.pool.requests[name][number]
        before = self.states.get((layer, name, position - 1), np.zeros((2, M.KV_HEADS, M.HEAD), np.float32))
        if position and position == self.begun[name]:
            for rank in self.ranks:
                before[:, rank.heads] = rank.read(layer, [table[(position - 1) // size]])[:, 0]
        now = np.float32(0.75) * before + np.stack([k, v])
        self.states[layer, name, position] = now
        running = (request.num_computed_tokens - 1) // size
        blocks = [table[running]]
        if position + 1 == running * size and table[running - 1] != HOLE:
            blocks.append(table[running - 1])
        for block in blocks:
            assert block != HOLE
            for rank in self.ranks:
                assert block not in rank.being_read(), "a store reads this block"
                rank.write(layer, block, 0, *now)

    def _block_state(self, out):
        offers = {}
        for name, n in out.num_scheduled_tokens.items():
            computed, tables = self.requests[name].num_computed_tokens, self.pool.requests[name]
            for number, group in ((i, g) for i, g in enumerate(self.groups) if g.state):
                i = (computed + n - 1) // group.tokens - 1
                if i >= 0 and computed < (i + 1) * group.tokens and tables[number][i] != HOLE:
                    offers.setdefault(name, []).append((number, tables[number][i], (i + 1) * group.tokens))
        return SimpleNamespace(get_block_ids=lambda name: self._ids(self.pool.requests[name]), boundary_state_offloads=offers)

    def _tell_finished(self, request, blocks):
        return self.connector.request_finished_all_groups(request, tuple(list(table) for table in blocks))

    def _transfers(self, connector, out, done):
        results = connector.get_transfer_results(out.finished_req_ids)
        done.finished_sending |= self._all_ranks("sent", results.finished_sending)
        done.finished_recving |= self._all_ranks("received", results.finished_recving)
        self.failed_on_a_rank = getattr(self, "failed_on_a_rank", set()) | results.failed_recving
        done.failed_recving = self.failed_on_a_rank & done.finished_recving
        self.failed_on_a_rank -= done.failed_recving

    def update(self, out, done, logits):
        for name in getattr(done, "failed_recving", ()):
            request = self.requests[name]
            if request.status == "loading":
                request.num_computed_tokens = 0
                self.failed.add(name)
                self.failures += 1
        super().update(out, done, logits)

    def _invalid(self, bad, out):
        assert not bad, "vLLM can't tell whose they are"
        return set()

    def _write(self, layer, work, k, v):
        number = self.of_layer[layer]
        size = self.groups[number].tokens
        for (request, position, _), *both in zip(work, k, v):
            if self.groups[number].state:
                self._write_state(layer, request, position, *both)
                continue
            block = self.pool.requests[request.request_id][number][position // size]
            assert block != HOLE
            for rank in self.ranks:
                assert block not in rank.being_read(), "a store reads this block"
                rank.write(layer, block, position % size, *both)

    def _attended(self, layer, work, queries):
        return np.array([M.attend(q, *self._read(layer, request, position + 1))
                         for q, (request, position, _) in zip(queries, work)], np.float32).reshape(queries.shape)

    def _read(self, layer, request, tokens):
        """The tokens that the last one of these attends."""
        number = self.of_layer[layer]
        group, table = self.groups[number], self.pool.requests[request.request_id][number]
        if group.state:
            return self.states[layer, request.request_id, tokens - 1][:, None]
        first = max(0, tokens - group.window) if group.window else 0
        blocks = table[first // group.tokens : -(-tokens // group.tokens)]
        assert HOLE not in blocks
        begin = first % group.tokens
        both = np.empty((2, tokens - first, M.KV_HEADS, M.HEAD), np.float32)
        for rank in self.ranks:
            both[:, :, rank.heads] = rank.read(layer, blocks)[:, begin : begin + tokens - first]
        return both
