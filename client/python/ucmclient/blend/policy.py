"""Which tokens of reused chunks are computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional, Union


@dataclass(frozen=True)
class Nothing:
    """None: chunks are taken as they are."""


@dataclass(frozen=True)
class First:
    """The first tokens of each chunk. At the begin of a sequence they drew much attention that they don't draw inside one (EPIC, Hu
    et al., arXiv 2410.15332)."""

    tokens: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"the first {self.tokens} tokens; 0 and more are allowed")


@dataclass(frozen=True)
class Hkvd:
    """Those whose K deviates most from what a computation after the request's own tokens gives, in chosen early layers (CacheBlend, Yao
    et al., arXiv 2405.16444). All tokens pass the layers up to the first that chooses. Only the chosen ones pass those after it.

    layers: those that choose. ratio: the share of the reused tokens that goes on, one for all layers or one for each; it must not grow.
    threshold: instead of a share, those go on whose deviation is more than that times the mean. The deviation of a token is the sum over its KV
    heads and channels of |K computed - K loaded|. Layer 0's K depends on no other token, so it tells nothing."""

    ratio: Union[float, Mapping[int, float]] = 0.2
    layers: Sequence[int] = (1,)
    threshold: Optional[float] = None
    _ratios: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        layers = sorted(self.ratio) if isinstance(self.ratio, Mapping) else list(self.layers)
        if not layers or layers[0] < 1 or any(a >= b for a, b in zip(layers, layers[1:])):
            raise ValueError(f"layers {layers} choose; name at least one, from 1 on, each once and in order (layer 0 has no deviation)")
        before = 1.0
        for layer in layers:
            ratio = self.ratio[layer] if isinstance(self.ratio, Mapping) else self.ratio
            if not 0 <= ratio <= before:
                raise ValueError(f"layer {layer} lets a share of {ratio} go on; 0 to {before} are allowed: a later layer's is no larger")
            self._ratios[layer] = before = ratio
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"the threshold is {self.threshold}; 0 and more are allowed")

    @property
    def choosing(self) -> list[int]:
        """The layers that choose, in order."""
        return list(self._ratios)

    def choose(self, layer: int, deviation: Sequence[float], reused: int) -> list[int]:
        """The tokens whose computation goes on after that layer, as indices of `deviation`, in order. reused: how many tokens were reused at first. Ties
        go to the earlier token; NaN counts as more than any number."""
        values = _numbers(deviation)
        if self.threshold is not None:
            finite = [v for v in values if v != math.inf]
            limit = self.threshold * sum(finite) / len(finite) if finite else 0.0
            return [i for i, v in enumerate(values) if v > limit]
        return _largest(values, math.ceil(self._ratios[layer] * reused))


@dataclass(frozen=True)
class Asked:
    """Those that the tokens after the last chunk, the question, attend to most. ProphetKV (Wang et al., arXiv 2602.02579) and FusionRAG (Wang et al., arXiv
    2601.12904) choose by the query, too. First all tokens that are not reused and the first tokens of each chunk are computed. Then the reused tokens that
    drew the most attention meanwhile, over all layers and heads, are computed, and the question once more.

    ratio: the share. first: how many of the first tokens of each chunk. depth: the share of layers, from the first on, in which the chosen tokens are
    computed. In later layers they keep the K and V that were loaded. queries: at most so many of the question's last tokens count."""

    ratio: float = 0.08
    first: int = 16
    depth: float = 2 / 3
    queries: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"a share of {self.ratio} is to be computed; 0 to 1 are allowed")
        if self.first < 0:
            raise ValueError(f"the first {self.first} tokens; 0 and more are allowed")
        if not 0 < self.depth <= 1:
            raise ValueError(f"the depth is {self.depth} of the layers; more than 0 and at most 1 are allowed")
        if self.queries < 1:
            raise ValueError(f"{self.queries} tokens of the question say what they attend to; 1 and more are allowed")

    def layers(self, of: int) -> int:
        """In how many of a model's layers the chosen tokens are computed."""
        return math.ceil(self.depth * of)

    def choose(self, attended: Sequence[float]) -> list[int]:
        """The reused tokens that are computed, as indices of `attended`, in order. Ties go to the earlier token; NaN counts as more than any number."""
        return _largest(_numbers(attended), math.ceil(self.ratio * len(attended)))


def _numbers(values: Sequence[float]) -> list[float]:
    return [math.inf if math.isnan(v) else float(v) for v in values]


def _largest(values: Sequence[float], count: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count])


Policy = Union[Nothing, First, Hkvd, Asked]
