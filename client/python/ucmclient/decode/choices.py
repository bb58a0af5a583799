"""Which blocks a decoded token attends, and what that needs at most."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Optional, Union

from ..sparse.choice import Choice, Mass, Score, TopK
from ..sparse.digest import Shape
from ..sparse.policy import Budget, Policy
from ..sparse.schedule import LayerMode


class Refused(ValueError):
    """A request can't be decoded with this worker's memory; the sentence says what would be enough."""


@dataclass(frozen=True)
class Choices:
    """layers: a Choice for each. A token whose block is the t-th attends its *window*, the blocks from t - `window` to its
    own, and of those before them, its *candidates*, what the layer's choice takes. The window is their local_window_sz, so
    it must be the same in all, and 1 or more. It does not count in sparse_ratio and topk_tokens. A score of heads "sum" or "max" is of
    the worker's own KV heads: then what is chosen depends on how many ranks share them."""

    layers: tuple[Choice, ...]
    score: Score = Score()
    #: Steps' worth of blocks that a request keeps in slots against others. Results do not depend on it.
    floor: float = field(default=1.0, repr=False, compare=False)

    def __post_init__(self) -> None:
        windows = {choice.local_window_sz for choice in self.layers}
        if len(windows) != 1 or 0 in windows:
            raise ValueError(f"layers have windows of {sorted(windows)} blocks; all must have one size, 1 or more")

    @classmethod
    def alike(cls, choice: Choice, layers: int, score: Score = Score()) -> Choices:
        return cls((choice,) * layers, score)

    @classmethod
    def from_policy(cls, policy: Union[Policy, str], shape: Shape, layers: int, model: Optional[str] = None) -> Choices:
        """As the policy says for blocks of this shape; model: as for Policy.schedule. A token's choice may depend on nothing
        but its own queries and the blocks before it, or its result would depend on what was computed in the same place before it. So
        these are refused: choices that serve later steps (retrieval_stride, lag), and queries of earlier steps (rows). And rules that stop while attention runs (psa, estimated, certified) need an
        attention that stops. With a `goal`, the budget is the one that a request of that length begins with, and does
        not follow what steps cover."""
        policy = Policy(policy) if isinstance(policy, str) else policy
        for key, least in (("retrieval_stride", 1), ("rows", 1), ("lag", 0)):
            if getattr(policy, key) > least:
                raise Refused(f"{policy}: {key}={getattr(policy, key)} needs what earlier tokens asked for; set {key}={least}")
        if policy.choice not in ("topk", "mass"):
            raise Refused(f"{policy}: choice={policy.choice} stops while attention runs; topk and mass choose before it")
        schedule = policy.schedule(layers, model)
        window = policy.choose(shape.tokens, 0, _budget(policy, shape.tokens, 0)).local_window_sz
        score = policy.score if policy.beta else replace(policy.score, beta=schedule.beta)
        dense = tuple(mode == LayerMode.DENSE for mode in schedule.modes)
        sources = tuple(schedule.step(layer, 0, policy.dense_below).layer if not dense[layer] else layer for layer in range(layers))
        nominal = TopK(local_window_sz=window)
        return _OfPolicy((nominal,) * layers, score, policy.slots, str(policy), shape.tokens, dense, sources)

    @property
    def window(self) -> int:
        return self.layers[0].local_window_sz

    def candidates(self, block: int) -> int:
        """Of a token in that block: so many first blocks."""
        return max(0, block - self.window)

    def source(self, layer: int) -> int:
        """The layer whose lists it attends: itself, or one before it."""
        return layer

    def of_candidates(self, layer: int, candidates: int) -> Choice:
        """What is chosen of so many, their first blocks included and the window not."""
        return replace(self.layers[layer], local_window_sz=0)

    def room(self, layer: int, candidates: int, block_tokens: int) -> int:
        """The most blocks of a list, unless more than these have no digest or NaN in their keys."""
        choice = self.of_candidates(layer, candidates)
        most = candidates
        if isinstance(choice, TopK):
            wanted = -(-choice.topk_tokens // block_tokens) if choice.topk_tokens else int(candidates * choice.sparse_ratio)
            most = min(candidates, max(choice.min_blocks, choice.init_window_sz, wanted))
        return min(most, choice.limit or most)

    def slots(self, candidates: int, lists: int, block_tokens: int, strands: int = 1) -> int:
        """What a token needs at once, of all layers, if its lists have nothing in common. strands: of a layer."""
        of_strand = max(1, lists // strands)
        rooms = (self.room(layer, candidates, block_tokens) for layer in range(len(self.layers)))
        return strands * sum(min(candidates, of_strand * room) for room in rooms)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Policy:
    return Policy(text)


def _budget(policy: Policy, tokens: int, blocks: int) -> Optional[Budget]:
    return policy.budget(tokens, blocks) if policy.goal > 0 else None


@dataclass(frozen=True)
class _OfPolicy(Choices):
    """The windows count in what a policy takes: the token's window, too, which is no candidate."""

    text: str = ""
    tokens: int = 0
    dense: tuple[bool, ...] = ()
    sources: tuple[int, ...] = ()

    def source(self, layer: int) -> int:
        return self.sources[layer]

    def of_candidates(self, layer: int, candidates: int) -> Choice:
        policy, complete = _parsed(self.text), candidates + self.window
        if self.dense[layer] or complete * self.tokens < policy.dense_below:
            return TopK(init_window_sz=0, local_window_sz=0, sparse_ratio=1.0)
        choice = policy.choose(self.tokens, complete, _budget(policy, self.tokens, complete))
        first, limit = min(choice.init_window_sz, candidates), max(0, choice.limit - self.window)
        if isinstance(choice, Mass):
            return replace(choice, init_window_sz=first, local_window_sz=0, limit=max(limit, 1) if choice.limit else 0)
        assert isinstance(choice, TopK)
        wanted = -(-choice.topk_tokens // self.tokens) if choice.topk_tokens else int(complete * choice.sparse_ratio)
        most = max(0, max(wanted, choice.min_blocks) - self.window)
        most = min(most, limit) if choice.limit else most
        return TopK(init_window_sz=first, local_window_sz=0, sparse_ratio=0.0, min_blocks=most)


@dataclass(frozen=True)
class Room:
    """A worker's memory for sparse decoding. slots: of the pool; rows: of digests. stream: places for whole layers of blocks
    beside these, through which prefill reads blocks that have no pages any more."""

    slots: int
    rows: int
    stream: int = 8
