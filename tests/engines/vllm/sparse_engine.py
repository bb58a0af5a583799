"""The engine with `sparse=`: decoded tokens attend the blocks that matter. The others stay in the
daemon.

What a rank holds. *Pages*, like every engine. A sparse request has pages for its window, for tokens
that prefill is computing, and for blocks that the daemon does not keep yet. *Entries* of one size,
each for one layer of one block: K and V of the rank's KV heads, or (`apart`) of one of them. *Rows*
of summaries, one a block. Rows are named by the blocks' keys and entries by rows, so requests with
a common prefix share both. ucmclient.decode keeps rows and brings what is missing; kernels/entries
says which entry holds what, and kernels/attend attends. Their C stands for what runs on a GPU.

Which tokens are sparse. Those from a prompt's last one on, so all whose logits count. The others
are prefill and dense. A token attends its *window* from the engine's pages: the policy's last
blocks up to its own. It also attends blocks that its layer chooses of its *candidates*, all blocks
before the window. Both are one list, in the order of their positions, wherever they lie. Dense
tokens attend the list of all blocks, so a policy that takes everything gives dense bits. The choice
is a function of q, the candidates' summaries and the position. It does not depend on what is
resident, in pages, or in the batch. So a request's output does not depend on cuts into steps,
preemption, hits, ranks, or on the daemon's death, and every test compares bits.

A step. Every candidate gets a row. Its summaries come from its page, if it has one, otherwise from
the daemon. Layer by layer, each rank chooses with its own heads' queries, and resolves choices to
pages or entries. Blocks that are in neither are read from the daemon's mapping, before the layer
attends. A block that is not there either is *missing*: the layer continues without it, as a CUDA
graph would, and the step's result is worthless. Then all ranks gather the missing blocks, and the
step is repeated with the same tokens, until none is missing. It writes the same K and V to the same
pages, so it may be repeated. (Several GPUs must agree whether a step is repeated: after the first
layer that lacked a block, all results are wrong on all of them.) A request whose blocks did not
come by the timeout is dropped from the step. Nothing of the step is stored for it. It loses its
pages and is computed again, as after a preemption. After the third time it ends with an error.

Pages that go back. When a candidate is in the daemon, and a sequence of every rank keeps it there,
its page is free. So a prompt may be longer than all pages. Prefill then reads these blocks through
a few entries apart, layer by layer. If a request has no page for its next token, it waits while the
daemon is still storing blocks of it.

Admission. A request that no entries or rows could ever hold is refused with a sentence. Others are
admitted by their expected need (ucmclient.decode.Admission), so a step can need more entries than
there are. Then the request that came last is preempted, without blame. It comes back when its
maximum fits besides the running requests. A request that waits for entries or rows longer than
`wait` ends with an error.

Keys. KV of a sparse token is not what a dense engine computes. So keys of blocks with such tokens
also depend on the policy and the prompt's length. Only a request with the same ones finds them.
"""

import ctypes
import time
from types import SimpleNamespace

import numpy as np

import decode_kernels as kernels
import model as M
from engine import BLOCK, HOLE, LATER, Engine, Request
from ucmclient.decode import Admission, Choices, Decoder, HeadBytes, Lost, Refused, Room
from ucmclient.sparse import Policy, Shape

LOSSES = 3


class SparseRequest(Request):
    def __init__(self, name, prompt, outputs=8, policy=None, **more):
        self.policy, self.losses, self.error = policy, 0, None
        self.waits_since = None
        #: Of entries; admitted by the most; one token a step; since when it waits for entries or rows.
        self.floor, self.wary, self.alone, self.unfit_since = 0, False, False, None
        #: {(position, layer, KV head): blocks that were chosen}
        self.choices = {}
        super().__init__(name, prompt, outputs, **more)

    @property
    def dense_tokens(self):
        return self.prompt_tokens - 1

    def _content(self, first):
        tokens = super()._content(first)
        return tokens + f"{self.policy} {self.prompt_tokens}".encode() if first + BLOCK > self.dense_tokens else tokens


class SparseRank:
    """What a rank of the engine has besides its pages."""

    def __init__(self, rank, number, policy, room, requests, gather_timeout, apart, mapping):
        self.rank, self.heads, self.memory, self.room, self.requests = rank, rank.heads, rank.memory, room, requests
        worker = rank.connector._worker
        summary, self.layout, self.apart = worker._summary, worker._layout, apart
        self.decoder = Decoder(worker.link, summary, policy, room, self.new_entries(), requests=requests, layer_bytes=self.layout.layer_bytes,
                               part=number, apart=apart, mapping=mapping, gather_timeout=gather_timeout, timeout=worker.settings.lookup_timeout)
        self.shape = summary.shape
        self.entry_plan = kernels.Plan(HeadBytes(self.shape).shape if apart else self.shape, M.PER_KV)
        self.page_plans = [kernels.Plan(self.shape, M.PER_KV, self._in_pages(fragments)) for fragments in self.layout.layers]

    def new_entries(self):
        return kernels.Entries(M.LAYERS * (len(self.heads) if self.apart else 1), self.room.rows, self.room.entries, self.requests)

    @staticmethod
    def _in_pages(fragments):
        """From a layer's bytes to those of its fragments, from the first one's address on."""
        def at(offset):
            for fragment in fragments:
                if offset < fragment.size:
                    return fragment.address - fragments[0].address + offset
                offset -= fragment.size
        return at

    def layers(self, page):
        """The bytes of a block's layers, as entries and the daemon have them."""
        return [b"".join(ctypes.string_at(c.address + page * c.stride, c.size) for c in fragments) for fragments in self.layout.layers]

    def kv(self, data):
        """K and V of a layer of a block: [2, BLOCK, heads, HEAD]."""
        of, kind = self.shape.native(), self.memory.whole.dtype
        rows = ((of.k_offset, of.k_token_stride, of.k_head_stride), (of.v_offset, of.v_token_stride, of.v_head_stride))
        shape = (BLOCK, len(self.heads), M.HEAD)
        return np.stack([self.memory.get(np.ndarray(shape, kind, data, offset, (token, head, kind.itemsize))) for offset, token, head in rows])

    def chosen(self, layer, sequence, position, q):
        """For each head the blocks that it chose."""
        n = self.decoder.choices.candidates(position // BLOCK)
        lists = self.decoder.choose(sequence, layer, n, np.concatenate([q[M.heads_of(head)] for head in self.heads]))
        return lists * (len(self.heads) // len(lists))

    def attended(self, layer, lists, entries, pages, position, q):
        """For each head its attention over what it chose and the window. entries: of each list, those of blocks without pages."""
        window = (True, pages[self.decoder.choices.candidates(position // BLOCK): position // BLOCK + 1])
        for i, (head, chosen, at) in enumerate(zip(self.heads, lists, entries)):
            runs = []
            for b in chosen:
                if pages[b] != HOLE or b in at:
                    self._append(runs, pages[b] != HOLE, [pages[b] if pages[b] != HOLE else at[b]])
            self._append(runs, *window)
            pieces = [self._piece(layer, i, in_pages, which, 0) for in_pages, which in runs[:-1]]
            pieces.append(self._piece(layer, i, *runs[-1], position % BLOCK + 1))
            yield head, kernels.attend(q[M.heads_of(head)], pieces)

    @staticmethod
    def _append(runs, in_pages, which):
        """Neighbours that lie in the same memory are one run."""
        if runs and runs[-1][0] == in_pages:
            runs[-1][1].extend(which)
        else:
            runs.append((in_pages, list(which)))

    def _piece(self, layer, head, in_pages, which, tail):
        if in_pages:
            fragment = self.layout.layers[layer][0]
            return self.page_plans[layer], fragment.address, fragment.stride, self.layout.blocks, which, tail, head
        pool = self.decoder.pool.address, self.decoder.entry_bytes, self.room.entries
        return self.entry_plan, *pool, which, tail, 0 if self.apart else head

    def all_of(self, layer, sequence, pages):
        """K and V of all blocks, [block][2][BLOCK][heads][HEAD], also of those without pages. For
        dense tokens."""
        kv = np.empty((len(pages), 2, BLOCK, len(self.heads), M.HEAD), np.float32)
        there = [b for b, page in enumerate(pages) if page != HOLE]
        read = self.rank.read(layer, [pages[b] for b in there])
        kv[there] = read.reshape(2, len(there), BLOCK, len(self.heads), M.HEAD).swapaxes(0, 1)
        for found in self.decoder.stream(sequence, layer, [b for b, page in enumerate(pages) if page == HOLE]):
            for block, data in found.items():
                kv[block] = self.kv(data)
        return kv


def of_policy(text, dtype, heads):
    """Its choices, and the connector's setting of its summaries."""
    policy = Policy(text)
    shape = Shape({"float32": "f32", "bfloat16": "bf16"}[dtype], BLOCK, heads, M.HEAD, M.HEAD)
    summary = policy.summary(shape)
    parameters = {"submean": ("run",), "hash": ("bits", "seed"), "tokens": ("chosen", "rest")}.get(summary.method, ())
    return Choices.from_policy(policy, shape, M.LAYERS), {"method": summary.method, **{name: getattr(summary.native, name) for name in parameters}}


class SparseEngine(Engine):
    def __init__(self, model, connector, *, sparse, entries=256, rows=256, stream=8, apart=False, mapping=False, gather_timeout=2.0,
                 patience=2.0, wait=None, **more):
        """sparse: a policy's text, or Choices of ucmclient.decode over means. apart: entries of a KV head. mapping: read the daemon's. patience: seconds for which a request
        waits for its own pages, wait: for entries and rows, None: for ever."""
        summaries = "mean"
        if isinstance(sparse, str):
            sparse, summaries = of_policy(sparse, more.get("dtype", "float32"), M.KV_HEADS // more.get("ranks", 1))
        self.policy, self.room, self.patience, self.wait = sparse, Room(entries, rows, stream), patience, wait
        super().__init__(model, connector, **{"summaries": summaries, **more})
        self.sparse = [SparseRank(rank, i, self.policy, self.room, self.batch, gather_timeout, apart, mapping)
                       for i, rank in enumerate(self.ranks)]
        heads = len(self.ranks[0].heads)
        self.admission = Admission(self.room, sparse, lists=heads if sparse.score.heads == "each" else 1, block_tokens=BLOCK,
                                   layer_heads=heads if apart else 1)
        self.replays = self.errors = self.given_back = self.left_out = 0
        self._spoiled, self._left, self._kept, self._read_once = set(), set(), {}, {}
        #: Runs before what is missing is gathered.
        self.in_the_middle = lambda: None

    def request(self, name, prompt, outputs=8, **more):
        return SparseRequest(name, prompt, outputs, self.policy, **more)

    # ---- scheduler ----

    @staticmethod
    def _length(request):
        return request.prompt_tokens + request.outputs

    def add(self, request):
        if isinstance(request, SparseRequest):
            self.admission.check(self._length(request))
            pages = self.policy.window + 2 + -(-self.budget // BLOCK)
            if pages > self.blocks - 1:
                raise Refused(f"a window of {self.policy.window} blocks and steps of {self.budget} tokens need {pages} pages, and there "
                              f"are {self.blocks - 1}")
        super().add(request)

    def _admit(self, out, request, left):
        """A request does not hit blocks of the same step: if the step's result is worthless, they
        are, too."""
        if request.num_computed_tokens == 0 and not self._being_computed(out).isdisjoint(self.pool.hits(request)):
            return LATER
        if isinstance(request, SparseRequest) and request.num_computed_tokens == 0:
            if not self._fits(request):
                return None
        n = super()._admit(out, request, left)
        if n is None and isinstance(request, SparseRequest) and not (self.running or self.loading):
            self._out_of_patience(request)  # nobody will give pages back
        return n

    def _fits(self, request):
        beside = [(self._length(r), r.floor) for r in self.running + self.loading if isinstance(r, SparseRequest)]
        floor = self.admission.admit(self._length(request), beside, request.wary)
        if floor is None:
            request.unfit_since = request.unfit_since or time.monotonic()
            return False
        request.floor, request.unfit_since = floor, None
        return True

    def _being_computed(self, out):
        pages = set()
        for name in out.num_scheduled_tokens:
            request = self.requests[name]
            pages.update(self.pool.requests[name][request.num_computed_tokens // BLOCK:])
        return pages

    def _tokens(self, request, computed, left):
        n = super()._tokens(request, computed, left)
        if not isinstance(request, SparseRequest):
            return n
        if computed < request.dense_tokens:
            return min(n, request.dense_tokens - computed)
        if request.alone:
            return min(n, 1)
        # The last of them has only candidates that are whole before the step.
        return min(n, (computed // BLOCK + self.policy.window + 1) * BLOCK - computed)

    def _holes(self, request, computed, hits):
        return max(0, self.policy.candidates(computed // BLOCK) - hits) if isinstance(request, SparseRequest) else 0

    def _waits_for_pages(self, request):
        if not isinstance(request, SparseRequest):
            return False
        pages = self.pool.requests[request.request_id][: self.policy.candidates(request.num_computed_tokens // BLOCK)]
        if all(page == HOLE for page in pages):
            return False
        return not self._out_of_patience(request)

    def _out_of_patience(self, request):
        now = time.monotonic()
        request.waits_since = request.waits_since or now
        if now < request.waits_since + self.patience:
            return False
        request.waits_since, request.losses = None, request.losses + 1
        return True

    # ---- workers ----

    def execute(self, out):
        for name in out.finished_req_ids | out.preempted_req_ids:
            for rank in self.sparse:
                rank.decoder.close(name)
        self._spoiled, self._left, self._kept = set(), set(), {}
        done = super().execute(out)
        self._keep(out)
        if not out.num_scheduled_tokens:
            time.sleep(0.001)
        return done

    def _keys(self, request, blocks):
        tracked = self.connector._scheduler._tracked(request)
        return [tracked.keys(i, i + 1) for i in range(blocks)]

    def _keep(self, out):
        """Makes candidates of blocks while they have pages. Returns for each request how many the
        daemon keeps of all ranks."""
        for request in self.running:
            name, n = request.request_id, self.policy.candidates(request.num_computed_tokens // BLOCK)
            if isinstance(request, SparseRequest) and n and name not in self._gone() and name in out.num_scheduled_tokens:
                self._extend(request, n)
                keys = self._keys(request, n)
                self._kept[name] = min(rank.decoder.keep(rank.decoder.open(name), keys) for rank in self.sparse)

    def _forward(self, out, connectors):
        sparse = {name: self.requests[name] for name in out.num_scheduled_tokens if isinstance(self.requests[name], SparseRequest)}
        self._first = {name: self.requests[name].num_computed_tokens - n for name, n in out.num_scheduled_tokens.items()}
        for name, request in sparse.items():
            # Of its last token, without blocks of this step, which only dense tokens attend.
            self._extend(request, min(self.policy.candidates((request.num_computed_tokens - 1) // BLOCK), self._first[name] // BLOCK))
        again = False
        while True:
            self._read_once = {}
            for rank in self.sparse:
                rank.decoder.begin(again)
            logits = super()._forward(self._but_gone(out), connectors)
            connectors, again = (), True
            missing = [rank for rank in self.sparse if rank.decoder.missing]
            if not missing:
                break
            self.in_the_middle()
            self.replays += 1
            for rank in missing:
                self._spoiled |= {sequence.name for sequence in rank.decoder.serve()}
            if any(rank.decoder.crowded for rank in missing):
                self._leave_out(out)
        self._observe(out, sparse)
        for rank in self.ranks:
            rank.connector._worker.discard(self._gone())
        return {name: row for name, row in logits.items() if name not in self._gone()}

    def _gone(self):
        return self._spoiled | self._left

    def _but_gone(self, out):
        """The same without requests that were aborted meanwhile."""
        left = {name: n for name, n in out.num_scheduled_tokens.items() if name not in self._gone() and name in self.pool.requests}
        return SimpleNamespace(num_scheduled_tokens=left)

    def _leave_out(self, out):
        """A step has too few entries. The request that came last goes; if it is the only one, it
        had too many tokens."""
        step = self._but_gone(out).num_scheduled_tokens
        there = [r for r in self.running if isinstance(r, SparseRequest) and r.request_id in step]
        if there:
            there[-1].wary, there[-1].alone = True, there[-1].alone or len(there) == 1
            self._left.add(there[-1].request_id)
            self.left_out += 1

    def _observe(self, out, sparse):
        for name, request in sparse.items():
            candidates = self.policy.candidates((request.num_computed_tokens - 1) // BLOCK)
            pages = self.pool.requests.get(name, ())[:candidates]
            if out.num_scheduled_tokens[name] == 1 and request.num_computed_tokens > request.dense_tokens and not any(pages):
                if name not in self._gone() and name in self.pool.requests:
                    self.admission.saw(max(rank.decoder.open(name).taken for rank in self.sparse), candidates)

    def _extend(self, request, blocks):
        """Makes candidates of its first blocks, which are whole."""
        name, pages = request.request_id, self.pool.requests[request.request_id]
        keys = self._keys(request, blocks)
        for rank in self.sparse:
            sequence = rank.decoder.open(name, request.floor)
            try:
                rank.decoder.extend(sequence, keys[len(sequence.rows):], lambda i: None if pages[i] == HOLE else rank.layers(pages[i]))
            except Lost:
                self._spoiled.add(name)

    def _attend_all(self, layer, work):
        """First all choices of the layer, then all entries for them, then attention."""
        work_sparse = [item for item in work if self._is_sparse(*item[:2])]
        queries = self.model.queries(layer, *self._batch(work_sparse))
        lists = [self._choose(layer, rank, work_sparse, queries) for rank in self.sparse]
        entries = [rank.decoder.resolve(layer, [(rank.decoder.open(r.request_id), self._away(r, of)) for (r, _, _), of in zip(work_sparse, chosen)])
                 for rank, chosen in zip(self.sparse, lists)]
        for i, (item, q) in enumerate(zip(work_sparse, queries)):
            request, position, hidden = item
            outputs, pages = {}, self.pool.requests[request.request_id]
            for rank, chosen, at in zip(self.sparse, lists, entries):
                outputs.update(rank.attended(layer, chosen[i], at[i], pages, position, q))
            item[2] = self.model.after(layer, hidden, np.concatenate([outputs[head] for head in range(M.KV_HEADS)]))
        for item in work:
            if not self._is_sparse(*item[:2]):
                item[2] = self._attend(layer, *item)

    def _is_sparse(self, request, position):
        return isinstance(request, SparseRequest) and position >= request.dense_tokens and request.request_id not in self._spoiled

    def _choose(self, layer, rank, work, queries):
        out = []
        for (request, position, _), q in zip(work, queries):
            source = self.policy.source(layer)
            lists = [request.choices[position, source, head] for head in rank.heads] if source != layer else rank.chosen(
                layer, rank.decoder.open(request.request_id), position, q)
            request.choices.update({(position, layer, head): chosen for head, chosen in zip(rank.heads, lists)})
            out.append(lists)
        return out

    def _away(self, request, lists):
        pages = self.pool.requests[request.request_id]
        return [[b for b in chosen if pages[b] == HOLE] for chosen in lists]

    def _attend(self, layer, request, position, hidden):
        if request.request_id in self._spoiled:
            return hidden
        q, kv = self.model.queries(layer, hidden, position), self._dense(layer, request, self.pool.requests[request.request_id])
        return hidden if kv is None else self.model.after(layer, hidden, np.concatenate(kernels.over(kv, q, position)))

    def _dense(self, layer, request, pages):
        """K and V of the layer, read once a step; None: blocks did not come."""
        at = (layer, request.request_id)
        if at not in self._read_once:
            kv = np.empty((len(pages), 2, BLOCK, M.KV_HEADS, M.HEAD), np.float32)
            try:
                for rank in self.sparse:
                    kv[:, :, :, rank.heads] = rank.all_of(layer, rank.decoder.sequences.get(request.request_id), pages)
            except Lost:
                self._spoiled.add(request.request_id)
                kv = None
            self._read_once[at] = kv
        return self._read_once[at]

    # ---- what came of a step ----

    def update(self, out, done, logits):
        super().update(out, done, logits)
        for request in [r for r in self.running if r.request_id in self._gone()]:
            self.running.remove(request)
            self.pool.forget(self.pool.requests[request.request_id][self._first[request.request_id] // BLOCK:])
            if request.request_id in self._spoiled:
                request.losses += 1
                self.recomputed += 1
            self._preempt(request)
        for name, kept in self._kept.items():
            request = self.requests.get(name)
            if request is not None and request.status == "running":
                self._give_back(request, min(kept, self.policy.candidates(request.num_computed_tokens // BLOCK)))
        for request in [r for r in self.waiting if isinstance(r, SparseRequest)]:
            late = self.wait is not None and request.unfit_since is not None and time.monotonic() > request.unfit_since + self.wait
            if late or request.losses >= LOSSES:
                request.error = (f"{request.request_id} waited {self.wait} s for entries" if late else
                                 f"blocks of {request.request_id} did not come, {request.losses} times")
                self.waiting.remove(request)
                self.errors += 1
                self._finish(request)

    def _give_back(self, request, blocks):
        pages = self.pool.requests[request.request_id]
        if any(page != HOLE for page in pages[:blocks]):
            self.given_back += sum(page != HOLE for page in pages[:blocks])
            self.pool.give_back(request, blocks)
            self.connector._scheduler.given_back(request.request_id, blocks)
            request.waits_since = None

    def _invalid(self, bad, out):
        """Blocks that were loaded for the window are not there, and those before it have no pages.
        So the whole request is computed."""
        skip = super()._invalid(bad, out)
        for request in self.loading + self.running:
            if isinstance(request, SparseRequest) and request.request_id in skip | self.failed:
                request.num_computed_tokens = 0
        self._spoiled |= skip
        return skip

    def idle(self):
        """Nothing of any request is left."""
        return self.pool.idle() and all(not rank.decoder.sequences and not rank.decoder.rows.in_use for rank in self.sparse)

    def close(self):
        for rank in self.sparse:
            rank.decoder.end()
        super().close()
