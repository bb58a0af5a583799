"""Which blocks a decoded token attends, and what that needs at most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..sparse.choice import Choice, Score, TopK


class Refused(ValueError):
    """A request can't be decoded with this worker's memory; the sentence says what would be enough."""


@dataclass(frozen=True)
class Choices:
    """layers: a Choice for each. A token whose block is the t-th attends its *window*, the blocks from t - `window` to its
    own, and of those before them, its *candidates*, what the layer's choice takes. The window is their local_window_sz, so
    it must be the same in all, and 1 or more. It does not count in sparse_ratio and topk_tokens."""

    layers: tuple[Choice, ...]
    score: Score = Score()

    def __post_init__(self) -> None:
        windows = {choice.local_window_sz for choice in self.layers}
        if len(windows) != 1 or 0 in windows:
            raise ValueError(f"layers have windows of {sorted(windows)} blocks; all must have one size, 1 or more")

    @classmethod
    def alike(cls, choice: Choice, layers: int, score: Score = Score()) -> Choices:
        return cls((choice,) * layers, score)

    @property
    def window(self) -> int:
        return self.layers[0].local_window_sz

    def candidates(self, block: int) -> int:
        """Of a token in that block: so many first blocks."""
        return max(0, block - self.window)

    def of_candidates(self, layer: int) -> Choice:
        return replace(self.layers[layer], local_window_sz=0)

    def room(self, layer: int, candidates: int, block_tokens: int) -> int:
        """The most blocks of a list, unless more than these have no digest or NaN in their keys."""
        choice = self.layers[layer]
        most = candidates
        if isinstance(choice, TopK):
            wanted = -(-choice.topk_tokens // block_tokens) if choice.topk_tokens else int(candidates * choice.sparse_ratio)
            most = min(candidates, max(choice.min_blocks, choice.init_window_sz, wanted))
        return min(most, choice.limit or most)

    def slots(self, candidates: int, lists: int, block_tokens: int) -> int:
        """What a token needs at once, of all layers, if its lists have nothing in common."""
        return sum(
            min(candidates, lists * self.room(layer, candidates, block_tokens)) for layer in range(len(self.layers))
        )


@dataclass(frozen=True)
class Room:
    """A worker's memory for sparse decoding. slots: of the pool; rows: of digests. stream: slots beside these, through which
    prefill reads blocks that have no pages any more."""

    slots: int
    rows: int
    stream: int = 8

    def needed(self, choices: Choices, tokens: int, lists: int, block_tokens: int) -> Room:
        """For a request that becomes so long. lists: of a selection of this worker, 1 or its KV heads."""
        candidates = choices.candidates((tokens - 1) // block_tokens)
        return Room(choices.slots(candidates, lists, block_tokens), candidates, 0)

    def check(self, need: Room, tokens: int) -> None:
        """Raises Refused if no worker with this room could ever decode it."""
        for name, has, wants in (("slots", self.slots, need.slots), ("rows of digests", self.rows, need.rows)):
            if wants > has:
                raise Refused(
                    f"a request of {tokens} tokens needs {wants} {name} and this worker has {has}: give it more, "
                    "choose fewer blocks, or allow fewer tokens"
                )

    def holds(self, needs: Iterable[Room]) -> bool:
        """Whether requests with these needs can be decoded in one step."""
        known = list(needs)
        return sum(n.slots for n in known) <= self.slots and sum(n.rows for n in known) <= self.rows
