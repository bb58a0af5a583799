"""How blocks are scored and chosen, and what was chosen."""

from __future__ import annotations

from ctypes import byref, c_uint32
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from .._native import lib
from ..buffers import Blocks, uint32s
from ..errors import check
from . import _native as native
from .tensors import Numbers, Tensor, dtype_number

if TYPE_CHECKING:
    from .summary import Summary

_METRICS = ("dot", "l2", "rounded")
_REDUCES = ("max", "mean", "softmax")
_HEADS = ("each", "sum", "max")


@dataclass(frozen=True)
class Score:
    """reduce: over the queries that share a KV head ("softmax": the sum of each one's softmax over the blocks). None: for
    TopK "softmax", but "max" if scores are no logits (hashes, normalised means, metric "l2"); else "max". heads: a list
    of blocks for "each" KV head, or one for all, by their "sum" or "max". metric "l2": minus the squared distance, for
    mean, submean and tokens. "rounded": the product with the query rounded to 10 to 14 bits, for these and tokens with
    rest. A GPU computes it several times as fast. beta: softmax's scale, 0 for 1 / sqrt(head_dim)."""

    reduce: Optional[str] = None
    heads: str = "each"
    metric: str = "dot"
    beta: float = 0.0

    def native(self, rows: int, q_heads: int, summary: Summary, choose: Optional[Choice]) -> native.Score:
        numbers = []
        for names, name, what in (
            (_METRICS, self.metric, "metric"),
            (_REDUCES, self.reduce or self._best(summary, choose), "reduce"),
            (_HEADS, self.heads, "heads"),
        ):
            if name not in names:
                raise ValueError(f"{what} is {name!r}: one of {', '.join(names)}")
            numbers.append(names.index(name))
        return native.Score(*numbers, rows, q_heads, self.beta)

    def _best(self, summary: Summary, choose: Optional[Choice]) -> str:
        score = native.Score()
        lib.ucm_sparse_score_defaults(byref(summary.native), byref(score))
        return _REDUCES[score.reduce] if isinstance(choose, TopK) and self.metric != "l2" else "max"


@dataclass(frozen=True)
class Choice:
    """What every policy has: how many first and last blocks are always chosen, and the most of a list (0: no limit)."""

    sink_blocks: int = 1
    recent_blocks: int = 2
    limit: int = 0

    def native(self) -> native.Choose:
        raise NotImplementedError

    def _fill(self, **more: Any) -> native.Choose:
        for field, value in self.__dict__.items():
            if isinstance(value, int) and not 0 <= value < 2**32:
                raise ValueError(f"{field} is {value}; 0 to 2**32 - 1 are allowed")
        return native.Choose(
            sink_blocks=self.sink_blocks, recent_blocks=self.recent_blocks, limit=self.limit, **more
        )


@dataclass(frozen=True)
class TopK(Choice):
    """max(min_blocks, sparse_ratio of the blocks), or topk_tokens tokens; ESA's and GSA's parameters and defaults."""

    sparse_ratio: float = 0.3
    min_blocks: int = 4
    topk_tokens: int = 0

    def native(self) -> native.Choose:
        return self._fill(
            policy=0, sparse_ratio=self.sparse_ratio, min_blocks=self.min_blocks, topk_tokens=self.topk_tokens
        )


@dataclass(frozen=True)
class Mass(Choice):
    """The fewest blocks that cover `eps` of the estimated attention, where a block weighs exp(beta_m * score)."""

    eps: float = 0.95
    beta_m: float = 1.0

    def native(self) -> native.Choose:
        return self._fill(policy=1, eps=self.eps, beta_m=self.beta_m)


@dataclass(frozen=True)
class Selection:
    """The choices of one row. lists: for each list the chosen blocks' numbers, ascending, as memoryviews of uint32.
    numpy.asarray and torch.frombuffer take them without a copy. scores: likewise, in float32. evicted, no_summary: in the
    whole call, blocks that were evicted by name meanwhile (recompute them), and blocks without a summary (always
    chosen)."""

    lists: list[memoryview]
    scores: list[memoryview]
    evicted: int = 0
    no_summary: int = 0

    def union(self) -> list[int]:
        """The blocks of all lists, each once: what to prefetch or load."""
        return sorted(set().union(*self.lists))


def query_of(
    q: Any, dtype: Any, score: Score, summary: Summary, batch: bool, choose: Optional[Choice] = None
) -> tuple[Tensor, int, native.Score]:
    """The query's address, dtype and shape. batch: it has a first dimension, one entry a row of the selection."""
    query = Tensor(q, "q")
    wants = "[n]" * batch + "[rows][q_heads][head_dim]"
    shape = query.shape[1:] if batch else query.shape
    if len(shape) not in (2, 3) or shape[-1] != summary.shape.head_dim:
        raise ValueError(f"q has shape {query.shape}; {wants} is wanted, with head_dim {summary.shape.head_dim}")
    number = query.wants(None if dtype is None else dtype_number(dtype), "q")
    return query, number, score.native(shape[0] if len(shape) == 3 else 1, shape[-2], summary, choose)


def split(
    out: native.Selected, counts: Numbers, index: Numbers, scores: Numbers, lists_of_rows: list[int]
) -> list[Selection]:
    """The library's answer, by rows."""
    rows, at, begin = [], 0, 0
    for n in lists_of_rows:
        lists, values = [], []
        for count in counts.view[at : at + n]:
            lists.append(index.view[begin : begin + count])
            values.append(scores.view[begin : begin + count])
            begin += count
        at += n
        rows.append(Selection(lists, values, out.evicted, out.no_summary))
    return rows


def choose(scores: Any, policy: Choice = TopK(), block_tokens: int = 16) -> memoryview:
    """Chooses among the float32 scores of one list."""
    source = Tensor(scores, "scores")
    if source.wants(0, "scores") != 0 or len(source.shape) != 1:
        raise ValueError("scores must be float32, of one dimension")
    n, count = source.shape[0], c_uint32()
    index = Numbers(n, "I")
    check(
        lib.ucm_sparse_choose_local(
            byref(policy.native()), block_tokens, source.address, n, index.address, n, byref(count)
        )
    )
    return index.view[: count.value]


def history_scores(uses: Blocks) -> memoryview:
    """The first GSA's scores: by how often each block was used, and by its place. They need no summaries."""
    borrowed, n = uint32s(uses)
    out = Numbers(n, "f")
    check(lib.ucm_sparse_score_history(borrowed.address, n, out.address))
    return out.view
