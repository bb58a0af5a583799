"""Which blocks a decoded token attends, and what that needs at most."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Optional, Union

from ..sparse.choice import Choice, Mass, Score, TopK
from ..sparse.summary import Shape
from ..sparse.policy import Budget, Policy
from ..sparse.schedule import LayerMode


class Refused(ValueError):
    """A request can't be decoded with this worker's memory; the sentence says what would be enough."""


@dataclass(frozen=True)
class Rounds:
    """How a list stops while attention runs, for cuda.Steps: enum ucm_cuda_decode_rule. rule: psa, estimated or certified; eps: the share to cover;
    every: rounds end after multiples of so many blocks; sink_blocks: blocks that come first. known: what the summary's scores say of weights:
    "estimates", "bounds" or nothing (""). rounds: of a layer, at most; with one, all that was chosen is attended, and what it covers is reported.
    least: at least so many blocks are attended."""

    rule: str
    eps: float
    known: str = ""
    every: int = 4
    sink_blocks: int = 0
    rounds: int = 3
    least: int = 0


@dataclass(frozen=True)
class Choices:
    """layers: a Choice for each. A token whose block is the t-th attends its *window*, the blocks from t - `window` to its own. The blocks before
    them are its *candidates*. Of these it attends what the layer's choice takes. The window is the choices' recent_blocks, so it must be the same in
    all, and 1 or more. It does not count in sparse_ratio and topk_tokens. If the score's heads is "sum" or "max", only the worker's own KV heads
    count. Then what is chosen depends on how many ranks share them."""

    layers: tuple[Choice, ...]
    score: Score = Score()
    #: Steps' worth of blocks that a request keeps in entries against others. Results do not depend on it.
    floor: float = field(default=1.0, repr=False, compare=False)
    #: How lists stop while attention runs; None: attention covers all that was chosen.
    rounds: Optional[Rounds] = None

    def __post_init__(self) -> None:
        windows = {choice.recent_blocks for choice in self.layers}
        if len(windows) != 1 or 0 in windows:
            raise ValueError(f"layers have windows of {sorted(windows)} blocks; all must have one size, 1 or more")

    @classmethod
    def alike(cls, choice: Choice, layers: int, score: Score = Score()) -> Choices:
        return cls((choice,) * layers, score)

    @classmethod
    def from_policy(
        cls, policy: Union[Policy, str], shape: Shape, layers: int, model: Optional[str] = None, *, stops: bool = False
    ) -> Choices:
        """The policy's choices for blocks of this shape; model: as for Policy.schedule. A token's choice may depend only on its own queries and the
        blocks before it; otherwise its result would depend on earlier computations. So these are refused: choices that serve later steps
        (retrieval_stride, lag), and queries of earlier steps (rows). stops: cuda.Steps runs attention, so rules that stop while it runs (psa,
        estimated, certified) are allowed. With a `goal`, the budget is the one that a request of that length begins with. With `stops` too, the
        steps report what they cover, and LayerChoices can have budgets follow it."""
        policy = Policy(policy) if isinstance(policy, str) else policy
        for key, least in (("retrieval_stride", 1), ("rows", 1), ("lag", 0)):
            if getattr(policy, key) > least:
                raise Refused(f"{policy}: {key}={getattr(policy, key)} needs what earlier tokens asked for; set {key}={least}")
        if policy.choice not in ("topk", "mass") and not stops:
            raise Refused(f"{policy}: choice={policy.choice} stops while attention runs, as that of cuda.Steps does; topk and mass choose before it")
        if policy.choice not in ("topk", "mass") and policy.reuse > 1:
            raise Refused(f"{policy}: reuse={policy.reuse} has layers attend by the scores of another one's queries; set reuse=1")
        schedule = policy.schedule(layers, model)
        window = policy.choose(shape.tokens, 0, _budget(policy, shape.tokens, 0)).recent_blocks
        score = policy.score if policy.beta else replace(policy.score, beta=schedule.beta)
        dense = tuple(mode == LayerMode.DENSE for mode in schedule.modes)
        sources = tuple(schedule.step(layer, 0, policy.dense_below).layer if not dense[layer] else layer for layer in range(layers))
        nominal = TopK(recent_blocks=window)
        rounds = _rounds(policy, shape) if stops else None
        return _OfPolicy((nominal,) * layers, score, policy.entries, rounds, str(policy), shape.tokens, dense, sources)

    @property
    def window(self) -> int:
        return self.layers[0].recent_blocks

    def candidates(self, block: int) -> int:
        """How many first blocks a token in that block may choose from."""
        return max(0, block - self.window)

    def source(self, layer: int) -> int:
        """The layer whose lists it attends: itself, or one before it."""
        return layer

    @property
    def choosing(self) -> tuple[int, ...]:
        """The layers that choose themselves. Only their summaries are read."""
        return tuple(layer for layer in range(len(self.layers)) if self.source(layer) == layer)

    def of_candidates(self, layer: int, candidates: int) -> Choice:
        """How many of so many candidates are chosen, with their first blocks and without the window."""
        return replace(self.layers[layer], recent_blocks=0)

    def least(self, layer: int, candidates: int) -> int:
        """Blocks of a list that are attended whatever they cover."""
        return self.rounds.least if self.rounds else 0

    def budget(self, candidates: int) -> Optional[Budget]:
        """The budget of one layer of a request that begins with so many candidates, if the policy has a goal."""
        return None

    def of_budget(self, layer: int, candidates: int, budget: Budget) -> int:
        """Blocks of a list that such a budget chooses."""
        return self.room(layer, candidates, 1)

    def room(self, layer: int, candidates: int, block_tokens: int) -> int:
        """The most blocks of a list, unless more blocks than that have no summary, or NaN in their keys."""
        choice = self.of_candidates(layer, candidates)
        most = candidates
        if isinstance(choice, TopK):
            wanted = -(-choice.topk_tokens // block_tokens) if choice.topk_tokens else int(candidates * choice.sparse_ratio)
            most = min(candidates, max(choice.min_blocks, choice.sink_blocks, wanted))
        return min(most, choice.limit or most)

    def entries(self, candidates: int, lists: int, block_tokens: int, layer_heads: int = 1) -> int:
        """How many entries a token needs at once, for all layers, if its lists have nothing in common. layer_heads: of a layer."""
        of_layer_head = max(1, lists // layer_heads)
        rooms = (self.room(layer, candidates, block_tokens) for layer in range(len(self.layers)))
        return layer_heads * sum(min(candidates, of_layer_head * room) for room in rooms)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Policy:
    return Policy(text)


def _rounds(policy: Policy, shape: Shape) -> Optional[Rounds]:
    summary, tokens = policy.summary(shape), shape.tokens
    estimates = summary.method == "stats" or (summary.method == "tokens" and summary.native.rest != 0)
    known = "estimates" if estimates else "bounds" if summary.method == "box" else ""
    if policy.score.reduce != "softmax":
        known = ""  # no scores of query heads are kept
    if policy.choice in ("estimated", "certified") and not known:
        raise Refused(f"{policy}: choice={policy.choice} asks each query head's scores what is left; set reduce=softmax")
    sinks = max(policy.sink_blocks, -(-policy.sink_tokens // tokens))
    least = max(policy.min_blocks, -(-policy.min_tokens // tokens))
    if policy.choice in ("psa", "estimated", "certified"):
        most = 6 if policy.choice == "psa" else Rounds.rounds  # PSA's double
        return Rounds(policy.choice, policy.eps, known, policy.microbatch, sinks, most, least)
    if policy.goal > 0 and known == "estimates":  # the budget says how many; steps report what they cover
        return Rounds("estimated", 1.0, known, rounds=1)
    return None


def _budget(policy: Policy, tokens: int, blocks: int) -> Optional[Budget]:
    return policy.budget(tokens, blocks) if policy.goal > 0 else None


@dataclass(frozen=True)
class _OfPolicy(Choices):
    """A policy's number includes the windows, so it includes the token's window, which is no candidate."""

    text: str = ""
    tokens: int = 0
    dense: tuple[bool, ...] = ()
    sources: tuple[int, ...] = ()

    def source(self, layer: int) -> int:
        return self.sources[layer]

    def is_dense(self, layer: int, candidates: int) -> bool:
        return self.dense[layer] or (candidates + self.window) * self.tokens < _parsed(self.text).dense_below

    def least(self, layer: int, candidates: int) -> int:
        if not self.rounds or not self.is_dense(layer, candidates):
            return max(0, super().least(layer, candidates) - self.window)
        return candidates

    def of_candidates(self, layer: int, candidates: int) -> Choice:
        policy, complete = _parsed(self.text), candidates + self.window
        if self.is_dense(layer, candidates):
            return TopK(sink_blocks=0, recent_blocks=0, sparse_ratio=1.0)
        return self._taken(candidates, policy.choose(self.tokens, complete, self.budget(candidates)))

    def budget(self, candidates: int) -> Optional[Budget]:
        return _budget(_parsed(self.text), self.tokens, candidates + self.window)

    def of_budget(self, layer: int, candidates: int, budget: Budget) -> int:
        if self.is_dense(layer, candidates):
            return candidates
        taken = self._taken(candidates, _parsed(self.text).choose(self.tokens, candidates + self.window, budget))
        return min(candidates, max(taken.min_blocks, taken.sink_blocks)) if isinstance(taken, TopK) else candidates

    def _taken(self, candidates: int, choice: Choice) -> Choice:
        """The candidates among the chosen complete blocks."""
        complete = candidates + self.window
        first, limit = min(choice.sink_blocks, candidates), max(0, choice.limit - self.window)
        if isinstance(choice, Mass):
            return replace(choice, sink_blocks=first, recent_blocks=0, limit=max(limit, 1) if choice.limit else 0)
        assert isinstance(choice, TopK)
        wanted = -(-choice.topk_tokens // self.tokens) if choice.topk_tokens else int(complete * choice.sparse_ratio)
        most = max(0, max(wanted, choice.min_blocks) - self.window)
        most = min(most, limit) if choice.limit else most
        return TopK(sink_blocks=first, recent_blocks=0, sparse_ratio=0.0, min_blocks=most)


@dataclass(frozen=True)
class Room:
    """A worker's memory for sparse decoding. entries: of the pool; rows: of summaries. stream: further places for whole layers of blocks, through
    which prefill reads blocks that no longer have pages."""

    entries: int
    rows: int
    stream: int = 8
