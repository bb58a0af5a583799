"""The worker's half of sparse decoding on a GPU: ucmclient.decode.gpu below vLLM's attention. Imports nothing of vLLM.

In a step of the engine, begin() learns what the scheduler planned and prepares it. Each layer runs one of two forms. end() waits for the layers,
and looks whether the step counts.

- uniform() and attend_uniform(): one token a request. The GPU finds sparse requests by the page of a request's last token, which no other request
  has. `_owner` has the sequence's number for that page. So the host decides nothing, and a CUDA graph can have the launches. What a step did not
  get is known only at its end. Then its sparse requests are *spoiled*: vLLM drops their tokens and computes them again, in the second form, from
  the last block on.
- attend_rows(): any other batch. Each layer waits for its result, has the blocks brought that it lacks, and runs again, before the next one.

Blocks that the daemon does not keep yet have pages, and misses are copied from there (`_page_of`). So nothing depends on when a block is stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from ...decode import Lost
from ...decode.cuda import Flag, Pages, Steps
from ...decode.gpu import GpuDecoder
from ...errors import UcmError
from ...sparse.cuda import Builder, Chosen, Selector
from ...sparse.summary import Summary
from .identity import Unsupported
from .layout import Layout
from .plan import Plan, SparseStep
from .sparse_ahead import Ahead
from .sparse_rows import Dense, Row, Rows, Slice, SparseRequest
from .sparse_rules import Rules
from .worker import WorkerHalf

logger = logging.getLogger("ucmclient.engine.vllm")

#: For blocks to come, in seconds.
_GATHER_TIMEOUT = 2.0
#: The daemon is asked for changes each time so many seconds have passed, if nothing else is new; without steps, by a thread.
_UPDATE = 0.1
_IDLE = 0.5
#: The daemon may have to copy what it is asked to keep into the mapping. So that nobody waits for that, it is asked while the GPU runs a step.
#: _MARGIN: asking stops so long before the step's end. _MANY, _ASK: a step of so many tokens takes far longer, and it is asked for so long.
#: _BEHIND: if steps are too short, it is asked for so long after one, each _UPDATE.
_MARGIN, _MANY, _ASK, _BEHIND = 0.001, 512, 0.004, 0.002
#: Most runs of a layer. Each gets at least one block that was missing.
_RUNS = 64

#: The workers of this process, by the address of each layer's KV tensor: an attention layer knows no other name of its engine.
_by_address: dict[int, tuple[SparseGpuWorker, int]] = {}


def worker_of(kv_cache: Any) -> Optional[tuple[SparseGpuWorker, int]]:
    """The worker whose KV tensor this is, and the layer's number."""
    return _by_address.get(kv_cache.data_ptr())


class SparseGpuWorker:
    def __init__(
        self, rules: Rules, worker: WorkerHalf, layout: Layout, summary: Summary, kv_caches: dict[str, Any], config: Any, part: int
    ):
        import torch

        self._torch, self.rules, self._layers = torch, rules, len(layout.layers)
        self._caches = [next(kv_caches[name] for name, n in layout.numbers.items() if n == i) for i in range(self._layers)]
        self._device, shape = self._caches[0].device, summary.shape
        if self._layers != len(rules.choices.layers) or any(cache.shape[0] != layout.blocks for cache in self._caches):
            raise Unsupported("sparse: the engine keeps its KV in other blocks or layers than it says: take another --block-size")
        self._sequences = config.scheduler_config.max_num_seqs
        self._blocks = -(-rules.max_tokens // rules.block_tokens)
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        #: The engine's newer runner can't take a step's tokens back, so its requests are preempted instead.
        self._only_lost = bool(getattr(config, "use_v2_model_runner", False))
        try:
            self._open(rules, worker, layout, summary, heads, part)
        except torch.cuda.OutOfMemoryError:
            raise Unsupported(
                f"sparse: {self._pool_bytes >> 20} MiB of entries and {self._summary_bytes >> 20} MiB of summaries do not fit the GPU alongside "
                "vLLM's memory: lower --gpu-memory-utilization, sparse_room, --max-model-len or --max-num-seqs"
            ) from None
        self._tables(shape, heads)
        self._requests: dict[str, SparseRequest] = {}
        self._step: list[SparseRequest] = []
        self._live = False
        #: The number of the last step of entries that was looked at.
        self._seen = 0
        self._rows_of: tuple[Any, Optional[Rows]] = (None, None)
        self._updated = 0.0
        #: When the step began, and how long recent steps of one token a request took, from begin to end.
        self._began, self._took = 0.0, 0.0
        #: Held while `decoder` is used. A step lasts from begin() to end(); _live is true then.
        self._lock, self._stop = threading.Lock(), threading.Event()
        #: By row: the pages that hold its block, each with the number of requests that say so.
        self._pages_of: dict[int, dict[int, int]] = {}
        self.kept: dict[str, int] = {}
        self.spoiled: dict[str, int] = {}
        self._lost: set[str] = set()
        for number, cache in enumerate(self._caches):
            _by_address[cache.data_ptr()] = (self, number)
        self._idle = threading.Thread(target=self._idling, name="ucmclient-sparse", daemon=True)
        self._idle.start()

    def _open(self, rules: Rules, worker: WorkerHalf, layout: Layout, summary: Summary, heads: int, part: int) -> None:
        torch, shape, choices = self._torch, summary.shape, rules.choices
        whole = rules.lists == 1 and shape.kv_heads > 1
        self._pool_bytes = Steps.bytes_of(shape, layout.layer_bytes, rules.room.entries, whole)
        self._summary_bytes = rules.room.rows * len(choices.choosing) * summary.bytes
        self._pool = torch.empty(self._pool_bytes, dtype=torch.uint8, device=self._device)
        most = choices.candidates(self._blocks)
        choose = choices.of_candidates(0, most)
        self._select = Selector(
            summary, self._pool, heads, most, sequences=self._sequences, choose=choose, score=choices.score, q_dtype=shape.dtype
        )
        self._steps = Steps(
            self._pool, shape, layers=self._layers, q_heads=heads, layer_bytes=layout.layer_bytes, numbers=rules.room.rows,
            requests=self._sequences + 2, sequences=self._sequences, room=self._select.room, window=choices.window + 2, lists=self._select.lists,
            whole=whole,
        )
        self._build = Builder(summary, self._pool)
        self.decoder = GpuDecoder(
            worker.link, summary, self._steps, layer_bytes=layout.layer_bytes, build=self._summaries, part=part,
            beside=True, summarised=choices.choosing, gather_timeout=_GATHER_TIMEOUT, timeout=worker.settings.lookup_timeout,
        )
        self._ahead = Ahead(worker.link, self.decoder.ref_beside, part, _GATHER_TIMEOUT)

    def _tables(self, shape: Any, heads: int) -> None:
        """What launches name: their addresses never change."""

        def numbers(*sizes: int, fill: int = 0) -> Any:
            return self._torch.full(sizes, fill, dtype=self._torch.int32, device=self._device)

        n, room, most = self._sequences, self._select.room, self.rules.choices.candidates(self._blocks)
        of_candidates = [self.rules.choices.room(0, c, self.rules.block_tokens) for c in range(most + 1)]
        #: How many blocks a list has, by the number of candidates.
        self._most_of = self._numbers(of_candidates)
        #: By a sequence's number: rows of its blocks. Number 0 belongs to no sequence.
        self._rows_table = numbers(n + 2, self._blocks + 1, fill=-1)
        #: By page: the number of the sequence whose last token lies there.
        self._owner = numbers(self._caches[0].shape[0])
        #: By row: a page that has its block.
        self._page_of = numbers(self._steps.numbers, fill=-1)
        self._table, self._candidates, self._length = numbers(n, self._blocks + 1), numbers(n), numbers(n)
        self._requests_of, self._dense_lens, self._most = numbers(n), numbers(n), numbers(n)
        self._is_sparse = self._torch.zeros((n, 1, 1), dtype=self._torch.bool, device=self._device)
        self._chosen = Chosen(numbers(n, self._select.lists), numbers(n, self._select.lists, room, fill=-1))
        self._out = self._torch.zeros((n, heads, shape.head_dim), dtype=self._caches[0].dtype, device=self._device)

    @property
    def lost(self) -> frozenset[str]:
        """The spoiled ones that must be preempted."""
        return frozenset(self.spoiled if self._only_lost else self._lost)

    @property
    def chosen_as(self) -> str:
        """A sentence for the log, after the start."""
        room = self.rules.room
        return (
            f"requests whose prompts have {self.rules.prompt} tokens and more decode sparsely, by {self.rules.policy}: {room.entries} entries, "
            f"{self._pool_bytes >> 20} MiB, {room.rows} rows of summaries, {self._summary_bytes >> 20} MiB, and "
            f"{(self._steps.table_bytes + self._steps.workspace_bytes + self._select.workspace_bytes) >> 20} MiB of tables"
        )

    def _idling(self) -> None:
        """While the engine has no steps, gives the daemon what it wants back of the mapping. The daemon waits only for seconds."""
        self._use_device()
        while not self._stop.wait(_IDLE):
            with self._lock:
                if not self._live and time.monotonic() >= self._updated + _IDLE:
                    self.decoder.keep_beside(_ASK)
                    self._update()

    def _use_device(self) -> None:
        """Sets the device's context for this thread. Without it the CUDA driver does not tell memory's address."""
        self._torch.cuda.set_device(self._device)
        self._torch.cuda.synchronize(self._device)

    def _update(self) -> None:
        try:
            self.decoder.update(keep=False)
        except UcmError as error:
            logger.error("the daemon's mapping can't be used any more: %s", error)
            self.decoder.source.cut()
        self._updated = time.monotonic()

    def shutdown(self) -> None:
        self._stop.set()
        self._idle.join()
        self._ahead.end()
        for cache in self._caches:
            _by_address.pop(cache.data_ptr(), None)
        self._torch.cuda.synchronize(self._device)
        self._requests.clear()
        self.decoder.end()

    def _running(self) -> bool:
        return not self._torch.cuda.current_stream(self._device).query()

    def _wait(self) -> None:
        self._torch.cuda.current_stream(self._device).synchronize()

    def _numbers(self, values: Sequence[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32).to(self._device)

    def _set(self, tensor: Any, where: Sequence[int], values: Sequence[int]) -> None:
        if where:
            tensor[self._numbers(where).long()] = self._numbers(values)

    # ---- steps ----

    def begin(self, plan: Plan) -> None:
        with self._lock:
            self._live = True
            self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        self._step, self._rows_of, self.kept, self.spoiled, self._lost = [], (None, None), {}, {}, set()
        self._began = time.monotonic()
        self._seen = self._steps.result().step  # vLLM's warm-up and captures run steps, too
        self.close(plan.gone)
        for name, keys in plan.ahead.items():
            self._ahead.begin(name, keys)
        for step in plan.sparse:
            request = self._told(step)
            for row in request.sequence.rows[request.whole :]:
                self.decoder.rows.fill(row)
            self._step.append(request)
            if request.first < request.own and not all(request.pages[: -(-request.end // self.rules.block_tokens)]):
                self._spoil(request, "a load did not bring all that it needs", lost=True)
                continue
            self._extend(request, min(self.rules.candidates(request.end - 1), request.first // self.rules.block_tokens))
            request.whole = len(request.sequence.rows)
        self._own()

    def _told(self, step: SparseStep) -> SparseRequest:
        if step.reset:
            brought = self._ahead.take(step.request)
            self.close([step.request])
            sequence = self.decoder.open(step.request, step.floor)
            if brought is not None:
                self.decoder.adopt(sequence, *brought)
            own = self.rules.own(step.prompt_tokens) * self.rules.block_tokens
            self._requests[step.request] = SparseRequest(step.request, own, sequence)
        request = self._requests[step.request]
        request.pages += step.pages
        request.keys += step.keys
        self._forget_pages(request, range(request.given, step.given))
        for i in range(request.given, step.given):
            request.pages[i] = 0
        request.given = step.given
        request.first, request.end = step.first, step.end
        return request

    def _own(self) -> None:
        """Writes changes of `_owner`: which sequence's last token lies in a page."""
        left, taken = {}, {}
        for request in self._step:
            page = request.pages[(request.end - 1) // self.rules.block_tokens]
            page = page if request.first >= request.own and request.name not in self.spoiled else 0
            if page != request.last_page:
                left[request.last_page], taken[page] = 0, request.sequence.number
                request.last_page = page
        now = {**left, **taken, 0: 0}  # a page that one request has left may be another's in the same step
        if taken:
            self._set(self._owner, list(now), list(now.values()))

    def _extend(self, request: SparseRequest, blocks: int) -> None:
        """Makes candidates of its first blocks, which are whole."""
        sequence, pages = request.sequence, request.pages
        first = len(sequence.rows)
        if blocks <= first:
            return
        try:
            self.decoder.extend(sequence, request.keys[first:blocks], lambda block: pages[block] or None)
        except Lost as error:
            self._spoil(request, error, lost=True)
        self._entered(request, first)

    def _entered(self, request: SparseRequest, first: int) -> None:
        """The sequence has new rows from `first` on."""
        sequence = request.sequence
        self.decoder.write(self._rows_table[sequence.number], sequence, first)
        where, values = [], []
        for row, page in zip(sequence.rows[first:], request.pages[first:]):
            if page:
                of = self._pages_of.setdefault(row, {})
                of[page] = of.get(page, 0) + 1
                where.append(row)
                values.append(page)
        self._set(self._page_of, where, values)

    def _forget_pages(self, request: SparseRequest, blocks: Iterable[int]) -> None:
        """These blocks of the request have no pages any more."""
        where, values = [], []
        for block in blocks:
            if block >= len(request.sequence.rows) or not request.pages[block]:
                continue
            row, page = request.sequence.rows[block], request.pages[block]
            of = self._pages_of[row]
            of[page] -= 1
            if not of[page]:
                del of[page]
                where.append(row)
                values.append(next(iter(of), -1))
            if not of:
                del self._pages_of[row]
        self._set(self._page_of, where, values)

    def _summaries(self, pages: Sequence[Any], rows: Sequence[int]) -> None:
        layers = self.decoder.summarised
        self._build(
            [self._caches[layer] for layer in layers], [self.decoder.summaries[layer] for layer in layers], self._numbers(pages),
            self._numbers(rows),
        )

    def _spoil(self, request: SparseRequest, why: Any, lost: bool) -> None:
        """The latest page that vLLM knew before this step stands for the request. vLLM then computes that page's tokens again. They must be
        sparse, or all of the request's."""
        before = max(0, request.first - 1)
        if lost or before < request.own:
            logger.warning("request %s is computed again: %s", request.name, why)
            self._lost.add(request.name)
        self.spoiled[request.name] = request.pages[before // self.rules.block_tokens]

    def end(self) -> None:
        with self._lock:
            self._end()
            self._live = False

    def _end(self) -> None:
        asked = bool(self._step) and self._keep_beside()
        if self._step:
            self._wait()
            if self._steps.result().step != self._seen:  # uniform() has run, perhaps in a graph
                self._seen = self._steps.result().step
                took = time.monotonic() - self._began
                self._took = min(took, 1.01 * self._took) if self._took else took
                if not self.decoder.counted():
                    self._short()
        due = time.monotonic() >= self._updated + (_UPDATE if self._step else _IDLE)
        if due and not asked:
            self.decoder.keep_beside(_BEHIND)
        if asked or due or self.spoiled:
            self._update()
        for request in self._step:
            if request.name not in self.spoiled:
                n, sequence = min(request.whole, self.rules.candidates(request.end)), request.sequence
                self.kept[request.name] = min(n, sequence.kept, sequence.referenced) if self.decoder.mapped else 0
        self._step = []

    def _keep_beside(self) -> bool:
        """Asks the daemon while the GPU runs the step. Returns whether it asked for anything."""
        asked, many = False, sum(request.end - request.first for request in self._step) >= _MANY
        while self._running():
            left = _ASK if many else self._began + self._took - _MARGIN - time.monotonic()
            if not self.decoder.keep_beside(left):
                break
            asked = True
        return asked

    def _short(self) -> None:
        """Gathers what a step did not get. The step is then computed again."""
        lost = self.decoder.serve()
        crowded = self._step[-1:] if self.decoder.crowded else []
        for request in self._step:
            if request.first >= request.own and request.name not in self.spoiled:
                why = "did not come" if request.sequence in lost else "have too few entries" if request in crowded else "came late"
                self._spoil(request, f"blocks {why}", lost=request.sequence in lost or request in crowded)

    def close(self, names: Iterable[str]) -> None:
        for name in names:
            request = self._requests.pop(name, None)
            if request is not None:
                self._forget_pages(request, range(len(request.pages)))
                self._set(self._owner, [request.last_page][: bool(request.last_page)], [0])
            self._ahead.drop(name)
            self.decoder.close(name)

    def arrived(self, names: set[str]) -> set[str]:
        """names: requests whose loads have ended. Returns those of these and of earlier ones that need not wait for the daemon any more."""
        return self._ahead.arrived(names)

    # ---- layers, of one token a request ----

    def has_work(self, longest: int) -> bool:
        """Whether there is work for a batch whose longest query has so many tokens. Outside of a step, vLLM warms up and captures graphs."""
        return bool(self._step) if self._live else longest == 1

    def uniform(self, layer: int, block_table: Any, lengths: Any) -> Any:
        """How many tokens each request of the batch attends densely. lengths: how many it has."""
        n = lengths.shape[0]
        if layer == 0:
            self._find(block_table, lengths, n)
            self._steps.begin()
        return self._dense_lens[:n]

    def _find(self, block_table: Any, lengths: Any, n: int) -> None:
        """Runs on the GPU alone."""
        torch = self._torch
        last = torch.div((lengths - 1).clamp_(min=0), self.rules.block_tokens, rounding_mode="floor")
        page = block_table.gather(1, last.long().unsqueeze(1)).squeeze(1).clamp_(min=0)
        number = self._owner.index_select(0, page) * (lengths > 0)
        sparse = number > 0
        self._is_sparse[:n, 0, 0] = sparse
        self._requests_of[:n] = number
        self._candidates[:n] = (last - self.rules.choices.window).clamp_(min=0) * sparse
        self._most[:n] = self._most_of.index_select(0, self._candidates[:n])
        self._length[:n] = lengths * sparse
        self._dense_lens[:n] = lengths * ~sparse
        self._table[:n] = self._rows_table.index_select(0, number)

    def attend_uniform(self, layer: int, query: Any, output: Any, block_table: Any) -> None:
        n = block_table.shape[0]
        some = Slice(
            None, self._candidates[:n], self._most[:n], self._length[:n], self._table[:n], block_table, self._requests_of[:n], n
        )
        out = self._launch(layer, some, query[:n], Chosen(self._chosen.counts[:n], self._chosen.index[:n]), self._out[:n])
        output[:n] = self._torch.where(self._is_sparse[:n], out, output[:n])
        if layer == self._layers - 1:
            self._steps.end()

    def _launch(self, layer: int, some: Slice, q: Any, chosen: Chosen, out: Any) -> Any:
        if self.rules.choices.source(layer) == layer:
            self._select(self.decoder.summaries[layer], some.table, some.candidates, q, out=chosen, most=some.most)
        pages = Pages(self._caches[layer], some.page_table, some.candidates, some.length, self._page_of)
        return self._steps.layer(layer, chosen, some.table, some.requests, q, pages, out=out)

    # ---- layers of other batches ----

    def rows(self, batch: Any, starts: Any, ends: Any, block_table: Any) -> Rows:
        """batch: an object that is the same in all layers of a step. starts: of each request's queries, and the end of all; ends:
        tokens that each has then."""
        if self._rows_of[0] is batch and self._rows_of[1] is not None:
            return self._rows_of[1]
        starts, ends, tokens = starts.tolist(), ends.tolist(), self.rules.block_tokens
        last = self._torch.tensor([max(end - 1, 0) // tokens for end in ends], device=self._device)
        pages = block_table[: len(ends)].gather(1, last.unsqueeze(1)).squeeze(1).tolist()
        by_page = {request.pages[(request.end - 1) // tokens]: request for request in self._step}
        sparse, dense, found = [], [], 0
        for i, (page, end) in enumerate(zip(pages, ends)):
            first, request = end - (starts[i + 1] - starts[i]), by_page.get(page)
            if request is not None and request.end == end and first < end:
                found += 1
                begin = min(end, max(first, request.own))
                if begin < end and request.name not in self.spoiled:
                    sparse.append(Row(request, starts[i] + begin - first, begin, end))
                    end = begin
            if first < end:
                dense.append((i, starts[i], end - first, end))
        if found != len(self._step):
            raise RuntimeError(f"{found} of {len(self._step)} sparse requests were found in vLLM's batch")
        rows = Rows(sparse, self._dense_of(dense) if dense and sparse else None)
        self._rows_of = (batch, rows)
        return rows

    def _dense_of(self, dense: Sequence[tuple[int, int, int, int]]) -> Dense:
        torch, counts = self._torch, [n for _, _, n, _ in dense]
        at = torch.cat([torch.arange(first, first + n) for _, first, n, _ in dense]).to(self._device)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self._device)
        lengths = self._numbers([end for *_, end in dense])
        which = self._numbers([i for i, *_ in dense]).long()
        return Dense(which, at, starts, lengths, sum(counts), max(counts), max(end for *_, end in dense))

    def attend_rows(self, layer: int, rows: Rows, query: Any, output: Any) -> None:
        if rows.slices is None:
            rows.slices = self._slices(rows)
        self._summary_new(layer, rows)
        for some, chosen in rows.slices:
            q = query[some.at].contiguous()
            output[some.at] = self._attended(layer, some, q, chosen)

    def _slices(self, rows: Rows) -> list[tuple[Slice, Chosen]]:
        tokens = [(row, row.q + i, row.first + i) for row in rows.sparse for i in range(row.end - row.first)]
        for row in rows.sparse:
            self._bind(row.request, self.rules.candidates(row.end - 1))
        return [self._slice(tokens[at : at + self._sequences]) for at in range(0, len(tokens), self._sequences)]

    def _slice(self, tokens: Sequence[tuple[Row, int, int]]) -> tuple[Slice, Chosen]:
        requests, n, width = [row.request for row, _, _ in tokens], len(tokens), self._blocks + 1
        of = self._numbers([request.sequence.number for request in requests])
        page_table = self._torch.tensor([(r.pages + [0] * width)[:width] for r in requests], dtype=self._torch.int32).to(self._device)
        ends = [p + 1 if row.request.name not in self.spoiled else 0 for row, _, p in tokens]
        candidates = self._numbers([self.rules.candidates(max(end - 1, 0)) for end in ends])
        some = Slice(
            self._numbers([at for _, at, _ in tokens]).long(), candidates, self._most_of.index_select(0, candidates),
            self._numbers(ends),
            self._rows_table.index_select(0, of), page_table, of, n,
        )
        room = self._select.room
        index = self._torch.full((n, self._select.lists, room), -1, dtype=self._torch.int32, device=self._device)
        return some, Chosen(index.new_zeros((n, self._select.lists)), index)

    def _bind(self, request: SparseRequest, blocks: int) -> None:
        """Makes candidates of blocks that this step fills. Their summaries come layer by layer."""
        first = len(request.sequence.rows)
        try:
            self.decoder.bind(request.sequence, request.keys[first:blocks])
        except Lost as error:
            self._spoil(request, error, lost=True)
        self._entered(request, first)

    def _summary_new(self, layer: int, rows: Rows) -> None:
        new = [(row.request.pages[b], row.request.sequence.rows[b])
               for row in rows.sparse for b in range(row.request.whole, len(row.request.sequence.rows))]
        if new and self.decoder.summaries[layer] is not None:
            pages, at = zip(*new)
            self._build([self._caches[layer]], [self.decoder.summaries[layer]], self._numbers(pages), self._numbers(at))

    def _attended(self, layer: int, some: Slice, q: Any, chosen: Chosen) -> Any:
        """Runs until all of it is there."""
        out = q.new_empty(q.shape)
        for _ in range(_RUNS):
            self._steps.begin()
            self._launch(layer, some, q, chosen, out)
            self._steps.end()
            self._wait()
            result = self._steps.result()
            self._seen = result.step
            if self.decoder.counted():
                return out
            if result.flags & Flag.FULL and some.n > 1:
                return self._one_by_one(layer, some, q, chosen, out)
            lost = self.decoder.serve()
            for request in self._step:
                if request.sequence in lost or (self.decoder.crowded and request.sequence.number in some.requests.tolist()):
                    self._spoil(request, "blocks did not come", lost=True)
                    self._leave_out(request)
        raise RuntimeError("a layer of sparse tokens does not end")

    def _leave_out(self, request: SparseRequest) -> None:
        """Its tokens are not attended further in this step."""
        rows = self._rows_of[1]
        for some, _ in (rows.slices if rows is not None else None) or ():
            gone = some.requests == request.sequence.number
            some.candidates[gone], some.most[gone], some.length[gone] = 0, self._most_of[0], 0

    def _one_by_one(self, layer: int, some: Slice, q: Any, chosen: Chosen, out: Any) -> Any:
        """The tokens of a slice together need more entries than there are."""
        for i in range(some.n):
            at = slice(i, i + 1)
            one = Slice(
                some.at[at], some.candidates[at], some.most[at], some.length[at], some.table[at], some.page_table[at], some.requests[at], 1
            )
            out[at] = self._attended(layer, one, q[at], Chosen(chosen.counts[at], chosen.index[at]))
        return out
