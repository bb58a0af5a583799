"""The scheduler's half of sparse decoding: which requests are sparse, when they are admitted, and which of their blocks have
no pages. Imports nothing of vLLM.

Promises: a page goes back only when every rank has said that the daemon keeps its block. Also no token that is still to be computed may
have it in its window. Only requests of the same policy and prompt length find what a sparse token computed. Nobody finds what a
worthless step computed, since blocks enter the engine's cache when their step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from .plan import SparseStep
from .sparse_rules import Rules

#: After losing blocks so often, a request keeps its pages.
_LOSSES = 3


@dataclass
class _Of:
    """A sparse request."""

    vllm: Any
    prompt_tokens: int
    #: Its length in tokens at the end.
    tokens: int
    #: Entries that it keeps against others; None: it is not admitted yet.
    floor: Optional[int] = None
    #: How many of its first blocks the daemon keeps for all ranks.
    kept: int = 0
    #: How many of its first blocks have no pages, or gave them back.
    given: int = 0
    #: Its last step was worthless, so it is computed again.
    lost: bool = False
    losses: int = 0
    #: How many pages and keys the workers know.
    pages: int = 0
    keys: int = 0


@dataclass
class Counts:
    """given_back: pages that went back. spared: pages that hits did not take. lost: requests that lost blocks and are computed again.
    repeated: steps of requests that are computed again because their blocks came late."""

    given_back: int = 0
    spared: int = 0
    lost: int = 0
    repeated: int = 0


@dataclass
class SparseScheduler:
    rules: Rules
    #: The budget of one step of the engine.
    budget: int
    #: Runs when pages of a request go back: its name, and how many first blocks have none now.
    given_back: Callable[[str, int], None] = lambda name, blocks: None
    counts: Counts = field(default_factory=Counts)
    _of: dict[str, _Of] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._admission = self.rules.admission()

    # ---- requests ----

    def is_sparse(self, request: Any) -> bool:
        """A request with a LoRA adapter is not sparse. Its blocks would come in a step before it is known which version of the adapter
        that step has."""
        return self.rules.sparse(request.num_prompt_tokens) and getattr(request, "lora_request", None) is None

    def own_blocks(self, request: Any) -> int:
        """The first block of a sparse request that holds sparsely computed tokens."""
        return self.rules.own(request.num_prompt_tokens)

    def own_name(self, request: Any) -> bytes:
        """What the keys of these blocks stand for, besides the tokens."""
        return f"/{self.rules.policy}/{request.num_prompt_tokens}/".encode()

    def admit(self, request: Any) -> bool:
        """Whether there are entries and rows of summaries for the most that it can need, alongside the requests that were admitted."""
        of = self._of.get(request.request_id)
        if of is None:
            prompt = request.num_prompt_tokens
            of = _Of(request, prompt, min(prompt + (request.max_tokens or 0), self.rules.max_tokens))
            self._of[request.request_id] = of
        if of.floor is None:
            beside = [(other.tokens, other.floor) for other in self._of.values() if other.floor is not None]
            of.floor = self._admission.admit(of.tokens, beside, wary=True)
        return of.floor is not None

    def finished(self, name: str) -> None:
        self._of.pop(name, None)

    # ---- pages ----

    def needs_no_pages(self, name: str, local: int, external_tokens: int) -> int:
        """How many first blocks need no pages if a hit adds so many tokens to `local` blocks. If more must be computed than a step may
        have, all get pages. Otherwise every such step would bring all blocks."""
        of = self._of.get(name)
        if of is None or external_tokens <= 0 or of.losses >= _LOSSES:
            return 0
        computed = local * self.rules.block_tokens + external_tokens
        if of.vllm.num_tokens - computed > self.budget:
            return 0
        if self.rules.on_gpu and computed < self.rules.own(of.prompt_tokens) * self.rules.block_tokens:
            return 0
        return self.rules.pageless(computed)

    def give_back(self, name: str, computed: int) -> tuple[int, int]:
        """The blocks between which pages are no longer needed."""
        of = self._of.get(name)
        if of is None or of.lost or of.losses >= _LOSSES or computed < of.prompt_tokens - 1:
            return 0, 0
        first, end = of.given, min(of.kept, self.rules.pageless(computed))
        if first < end:
            of.given = end
            self.given_back(name, end)
        return first, end

    def cacheable(self, request: Any, tokens: int) -> int:
        """How many of its first tokens the engine's prefix cache may have."""
        of = self._of.get(request.request_id)
        if of is None:
            return tokens
        done = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return min(tokens, max(0, done), of.prompt_tokens - 1)

    def lost(self, name: str) -> bool:
        """The engine must preempt it."""
        of = self._of.get(name)
        return of is not None and of.lost

    def freed(self, name: str) -> None:
        """It has no pages any more: it was preempted, or is finished."""
        of = self._of.get(name)
        if of is not None:
            of.lost, of.kept, of.given, of.pages, of.keys = False, 0, 0, 0, 0

    # ---- steps ----

    def step(self, tracked: Any, first: int, tokens: int, reset: bool) -> SparseStep | None:
        """For the workers: what a step computes of a request. reset: it has other pages than before."""
        name = tracked.vllm.request_id
        of = self._of.get(name)
        if of is None:
            return None
        if reset:
            of.pages = of.keys = 0
        keys = min(len(tracked.vllm.block_hashes), len(tracked.blocks))
        step = SparseStep(
            name, of.prompt_tokens, first, first + tokens, reset, tracked.blocks[of.pages :],
            [tracked.keys(i, i + 1) for i in range(of.keys, keys)], of.given, of.floor or 0,
        )
        of.pages, of.keys = len(tracked.blocks), max(of.keys, keys)
        return step

    def received(self, kept: Mapping[str, int], spoiled: Iterable[str], lost: Container[str]) -> None:
        """spoiled: whose step is worthless. lost: which of them must be preempted; the others have all their blocks now."""
        for name, blocks in kept.items():
            if name in self._of:
                self._of[name].kept = blocks
        for name in spoiled:
            of = self._of.get(name)
            if name not in lost:
                self.counts.repeated += 1
            elif of is not None and not of.lost:
                of.lost, of.losses = True, of.losses + 1
                self.counts.lost += 1
