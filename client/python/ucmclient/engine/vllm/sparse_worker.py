"""The worker's half of sparse decoding: what a step's tokens attend, and where it lies. Imports nothing of vLLM.

Of a sparse request a worker holds the engine's *pages* of its window and of blocks that the daemon does not keep yet. It holds *entries*, each
for one layer of one block, and *rows* of summaries, one for each block that may be chosen. ucmclient.decode keeps entries and rows by the
blocks' keys. vLLM's own table of a request's blocks is not read: it still names pages that went back.

In a step of the engine, begin() learns what the scheduler planned, and rows() finds the batch's sparse requests. attend() runs for each layer,
and end() tells what the daemon keeps. A layer that lacks a block waits for it, up to a timeout. If the block does not come, the request is
*spoiled*: the scheduler's half throws the step away for all ranks.

On a CPU, vLLM's kernels keep K of a block with its tokens innermost, [head_dim][tokens], but summaries need a token's channels together. So the
daemon builds no summaries here. This worker computes them from what it has or reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ... import decode
from ...decode import Decoder, Lost
from ...sparse.summary import Summary, Shape
from ...sparse.policy import Policy
from .identity import Unsupported, heads_of
from .layout import Layout
from .plan import Plan, SparseStep
from .sparse_rows import StepRequest
from .sparse_rules import Rules
from .sparse_entries import HostEntries
from .worker import WorkerHalf

logger = logging.getLogger("ucmclient.engine.vllm")

#: For blocks to come, in seconds.
_GATHER_TIMEOUT = 2.0

#: The workers of this process, by the address of each layer's KV tensor: an attention layer knows no other name of its engine.
_by_address: dict[int, tuple[SparseWorker, int]] = {}


def worker_of(kv_cache: Any) -> Optional[tuple[SparseWorker, int]]:
    """The worker whose KV tensor this is, and the layer's number."""
    return _by_address.get(kv_cache.data_ptr())


def summary_by(rules: Rules, kv_cache_config: Any) -> Summary:
    """The summary of K alone, in float32, of one layer of a block."""
    of = heads_of(kv_cache_config, "sparse")
    return Policy(rules.policy).summary(Shape("f32", of.tokens, of.heads, of.dim))


@dataclass(eq=False)
class _Request(StepRequest):
    """The summaries of candidates that the step completes come layer by layer. They count when the scheduler goes on with the request,
    because then no rank has spoiled the step that made them."""

    @property
    def sparse_from(self) -> int:
        """The step's tokens from this position on attend what they choose."""
        return min(self.end, max(self.first, self.own))


@dataclass
class Row:
    """A request of the batch: its tokens are queries q..., at positions first to end. of: None: all of it is dense."""

    index: int
    q: int
    first: int
    end: int
    of: Optional[_Request]

    @property
    def dense_end(self) -> int:
        return self.end if self.of is None else self.of.sparse_from


class SparseWorker:
    def __init__(
        self, rules: Rules, worker: WorkerHalf, layout: Layout, summary: Summary, kv_caches: dict[str, Any], config: Any, part: int
    ):
        self.rules, self._layers, self._shape = rules, len(layout.layers), summary.shape
        requests = config.scheduler_config.max_num_seqs + 1
        self._caches = [next(kv_caches[name] for name, n in layout.numbers.items() if n == i) for i in range(self._layers)]
        if self._layers != len(rules.choices.layers) or any(cache.shape[0] != layout.blocks for cache in self._caches):
            raise Unsupported("sparse: the engine keeps its KV in other blocks or layers than it says: take another --block-size")
        entries = HostEntries(self._layers, rules.room.entries)
        self.decoder = _Decoder(
            worker.link, summary, rules.choices, rules.room, entries, requests=requests, layer_bytes=layout.layer_bytes,
            part=part, gather_timeout=_GATHER_TIMEOUT, timeout=worker.settings.lookup_timeout,
        )
        self._entries = _tensor(self.decoder.pool.buffer, self._caches[0])
        self.decoder.keys_in = lambda data: self._keys_in(self._block(data))
        self._requests: dict[str, _Request] = {}
        #: This step's requests, by the page of its last token, which no other request has.
        self._step: dict[int, _Request] = {}
        self._rows_of: tuple[Any, Optional[list[Row]]] = (None, None)
        #: This step's choices, by layer, request and position.
        self._chosen: dict[tuple[int, str, int], list[list[int]]] = {}
        self.kept: dict[str, int] = {}
        self.spoiled: dict[str, int] = {}
        for number, cache in enumerate(self._caches):
            _by_address[cache.data_ptr()] = (self, number)

    @property
    def lost(self) -> frozenset[str]:
        """The spoiled ones that must be preempted."""
        return frozenset(self.spoiled)

    @property
    def chosen_as(self) -> str:
        """A sentence for the log, after the start."""
        room = self.rules.room
        entries, summaries = len(self.decoder.pool.buffer) >> 20, room.rows * len(self.decoder.summarised) * self.decoder.summary.bytes >> 20
        return (
            f"requests whose prompts have {self.rules.prompt} tokens and more decode sparsely, by {self.rules.policy}: {room.entries} entries, "
            f"{entries} MiB, and {room.rows} rows of summaries, {summaries} MiB"
        )

    def shutdown(self) -> None:
        for cache in self._caches:
            _by_address.pop(cache.data_ptr(), None)
        self._requests.clear()
        self.decoder.end()

    # ---- steps ----

    def begin(self, plan: Plan) -> None:
        self._step, self._rows_of, self.kept, self.spoiled = {}, (None, None), {}, {}
        self._chosen.clear()
        self.close(plan.gone)
        for step in plan.sparse:
            request = self._told(step)
            for row in request.sequence.rows[request.whole :]:
                self.decoder.rows.fill(row)
            self._step[request.pages[(request.end - 1) // self.rules.block_tokens]] = request
            self._extend(request, min(self.rules.candidates(request.end - 1), request.first // self.rules.block_tokens))
            request.whole = len(request.sequence.rows)

    def _told(self, step: SparseStep) -> _Request:
        if step.reset:
            self.close([step.request])
            sequence = self.decoder.open(step.request, step.floor)
            own = self.rules.own(step.prompt_tokens) * self.rules.block_tokens
            self._requests[step.request] = _Request(step.request, own, sequence)
        request = self._requests[step.request]
        request.pages += step.pages
        request.keys += step.keys
        request.pages[: step.given] = [0] * step.given
        request.first, request.end = step.first, step.end
        return request

    def _extend(self, request: _Request, blocks: int) -> None:
        """Makes candidates of its first blocks, which are whole."""
        new, pages = request.keys[len(request.sequence.rows) : blocks], request.pages

        def keys_of(block: int) -> Optional[list[Any]]:
            return [self._keys_in(cache[pages[block]]) for cache in self._caches] if pages[block] else None

        try:
            self.decoder.extend(request.sequence, new, keys_of)
        except Lost as error:
            self._spoil(request, error)

    def _spoil(self, request: _Request, why: Any) -> None:
        """The latest page that vLLM knew before this step stands for the request."""
        logger.warning("request %s is computed again: %s", request.name, why)
        self.spoiled[request.name] = request.pages[max(0, request.first - 1) // self.rules.block_tokens]

    def end(self) -> None:
        for request in self._step.values():
            if request.name not in self.spoiled:
                n = min(request.whole, self.rules.candidates(request.end))
                self.kept[request.name] = min(n, self.decoder.keep(request.sequence, request.keys[:n]))
        self._step = {}

    def close(self, names: Iterable[str]) -> None:
        for name in names:
            self.decoder.close(name)
            self._requests.pop(name, None)

    # ---- layers ----

    def rows(self, batch: Any, starts: Sequence[int], ends: Sequence[int], table: Any) -> Optional[list[Row]]:
        """batch: an object that is the same in all layers of a step. starts: of each request's queries, and the end of all; ends:
        tokens that each has then. None: nobody is sparse."""
        if self._rows_of[0] is batch:
            return self._rows_of[1]
        rows = []
        for i, end in enumerate(ends):
            page = int(table[i][(end - 1) // self.rules.block_tokens]) if self._step else 0
            request = self._step.get(page)
            rows.append(Row(i, starts[i], end - (starts[i + 1] - starts[i]), end, request if request and request.end == end else None))
        found = sum(row.of is not None for row in rows)
        if found != len(self._step):
            raise RuntimeError(f"{found} of {len(self._step)} sparse requests were found in vLLM's batch")
        self._rows_of = (batch, rows if found else None)
        return self._rows_of[1]

    def has_pages(self, row: Row) -> bool:
        """Whether all blocks that its dense tokens attend have pages."""
        return row.of is None or all(row.of.pages[: -(-row.dense_end // self.rules.block_tokens)])

    def gathered(self, layer: int, row: Row) -> Any:
        """Copies of all blocks that a row's dense tokens attend, in their order, as the KV tensor has them."""
        import torch

        request, cache = row.of, self._caches[layer]
        assert request is not None
        pages = request.pages[: -(-row.dense_end // self.rules.block_tokens)]
        out = torch.zeros((len(pages), *cache.shape[1:]), dtype=cache.dtype)
        for block, page in enumerate(pages):
            if page:
                out[block] = cache[page]
        if request.name in self.spoiled:
            return out
        try:
            for found in self.decoder.stream(request.sequence, layer, [b for b, page in enumerate(pages) if not page]):
                for block, data in found.items():
                    out[block] = self._block(data)
        except Lost as error:
            self._spoil(request, error)
        return out

    def attend(self, layer: int, rows: Sequence[Row], query: Any, output: Any, scale: float) -> None:
        """The sparse tokens' attention; query and output are [tokens, heads, head_dim]."""
        for row in rows:
            if row.of is None or row.of.name in self.spoiled or row.dense_end == row.end:
                continue
            self._fill(layer, row.of)
            for position in range(row.dense_end, row.end):
                lists = self._lists(layer, row.of, position, query[row.q + position - row.first])
                entries = self._bring(layer, row.of, lists)
                if entries is None:
                    break
                at = row.q + position - row.first
                output[at] = self._attended(layer, row.of, position, lists, entries, query[at], scale)

    def _lists(self, layer: int, request: _Request, position: int, q: Any) -> list[list[int]]:
        """What the layer chooses for the token, or an earlier layer whose choice it shares."""
        at = self.rules.choices.source(layer), request.name, position
        if at[0] == layer:
            self._chosen[at] = self.decoder.choose(request.sequence, layer, self.rules.candidates(position), q.float().numpy())
        return self._chosen[at]

    def _fill(self, layer: int, request: _Request) -> None:
        """The step's last tokens can choose blocks that this step fills, as they could if tokens came one at a time."""
        candidates = self.rules.candidates(request.end - 1)
        self.decoder.bind(request.sequence, request.keys[len(request.sequence.rows) : candidates])
        for block in range(request.whole, candidates if layer in self.decoder.summarised else 0):
            self.decoder.summary_layer(request.sequence.rows[block], layer, self._keys_in(self._caches[layer][request.pages[block]]))

    def _bring(self, layer: int, request: _Request, lists: Sequence[Sequence[int]]) -> Optional[dict[int, int]]:
        """The entries of those blocks that have no pages; None: the request is spoiled. They stay the token's until the next token is attended,
        so entries for one layer of one token are enough."""
        away = [sorted(block for block in set().union(*lists) if not request.pages[block])]
        for _ in range(2):
            self.decoder.begin()
            ((entries,),) = self.decoder.resolve(layer, [(request.sequence, away)])
            if not self.decoder.missing:
                return entries
            if self.decoder.serve():
                break
        self._spoil(request, "blocks did not come")
        return None

    def _attended(
        self, layer: int, request: _Request, position: int, lists: Sequence[Sequence[int]], entries: dict[int, int], q: Any, scale: float
    ) -> Any:
        import torch

        cache, out, heads = self._caches[layer], torch.empty_like(q), self._shape.kv_heads
        last, n = position // self.rules.block_tokens, self.rules.candidates(position)
        group, window = len(q) // heads, range(n, last + 1)
        tokens = position + 1 - last * self.rules.block_tokens
        for head in range(heads):
            chosen = lists[head * len(lists) // heads]
            blocks = [(cache[request.pages[b]] if request.pages[b] else self._entries[entries[b]])[head] for b in [*chosen, *window]]
            k, v = _split(torch.stack(blocks).float())
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            valid = len(k) - self.rules.block_tokens + tokens
            mine = slice(head * group, (head + 1) * group)
            weights = torch.softmax(q[mine].float() @ k[:valid].T * scale, dim=-1)
            out[mine] = (weights @ v[:valid]).to(out.dtype)
        return out

    def _block(self, data: Any) -> Any:
        """Bytes as the daemon has them."""
        return _tensor(data, self._caches[0])[0]

    def _keys_in(self, block: Any) -> Any:
        """K of a block, [tokens, heads, head_dim] in float32."""
        return _split(block.float())[0].transpose(0, 1).contiguous().numpy()


def _split(block: Any) -> tuple[Any, Any]:
    """[..., tokens, 2 * head_dim] as vLLM's kernels for CPUs use it: K as [head_dim, tokens], then V as [tokens, head_dim]."""
    *outer, tokens, both = block.shape
    k, v = block.reshape(*outer, 2, tokens * both // 2).unbind(-2)
    return k.reshape(*outer, both // 2, tokens).transpose(-1, -2), v.reshape(*outer, tokens, both // 2)


def _tensor(buffer: Any, like: Any) -> Any:
    """Blocks that follow one another, as the KV tensor has them."""
    import torch

    return torch.frombuffer(buffer, dtype=like.dtype).view(-1, *like.shape[1:])


class _Decoder(Decoder):
    """Summaries are computed from K alone, one layer at a time. Blocks that have no pages are read."""

    #: K of a block's bytes.
    keys_in: Callable[[Any], Any]

    def summary_layer(self, row: int, layer: int, keys: Any) -> None:
        self._summaries.buffer[self._at(layer, row)] = self.summary.compute(keys, 1).data.cast("B")

    def _load_summaries(self, sequence: decode.Sequence, wanted: list[tuple[bytes, int]]) -> None:
        rows = {row for _, row in wanted}
        blocks = [i for i, row in enumerate(sequence.rows) if row in rows]
        self.keep(sequence, sequence.keys)
        for layer in self.summarised:
            for found in self.stream(sequence, layer, blocks):
                for block, data in found.items():
                    self.summary_layer(sequence.rows[block], layer, self.keys_in(data))
        for row in rows:
            self.rows.fill(row)
        self.counts.computed += len(rows)
