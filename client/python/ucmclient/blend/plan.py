"""What is loaded for a request, what is computed, and what of it may be stored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .policy import Asked, First, Hkvd, Policy
from .spans import Span

if TYPE_CHECKING:
    from .chunks import Found


class BlendedError(ValueError):
    """The caller wanted to store KV that was computed alongside re-rotated blocks, or not at a chunk's own
    start."""


class Load(NamedTuple):
    """A block of a chunk. Its tokens lie at `position` of the request, and were computed at `old`. chunk: which of the request's
    chunks. block: which of the chunk's blocks."""

    key: bytes
    chunk: int
    block: int
    old: int
    position: int


@dataclass(frozen=True)
class Segment:
    """Loads [first, first + count), which follow one another here and where they were computed."""

    first: int
    count: int
    old: int
    new: int


@dataclass(frozen=True)
class Plan:
    """For one request. Tokens below `prefix` are there already, and exact.

    loads: blocks to load, in order. compute: positions to compute in all layers, in order; the last token of the request is one. Every other position
    from `prefix` on is reused: it has K and V of a load. With Hkvd and Asked, the policy later names some of them to compute. passed_over: chunks that
    are not reused, because they begin at no multiple of the block's tokens.

    exact: how many first tokens have exactly the KV that a computation of the request gives. Only those may be stored."""

    n_tokens: int
    block_tokens: int
    prefix: int
    spans: tuple[Span, ...]
    policy: Policy
    loads: tuple[Load, ...]
    compute: tuple[int, ...]
    reused: tuple[int, ...]
    exact: int
    passed_over: tuple[int, ...]

    @property
    def segments(self) -> list[Segment]:
        step = (self.block_tokens, self.block_tokens)
        starts = [
            i
            for i, (last, load) in enumerate(zip((None, *self.loads), self.loads))
            if last is None or (load.old - last.old, load.position - last.position) != step
        ]
        ends = (*starts[1:], len(self.loads))
        return [Segment(i, end - i, self.loads[i].old, self.loads[i].position) for i, end in zip(starts, ends)]

    def check_prefix(self, first_block: int, blocks: int) -> None:
        """Raises BlendedError unless those blocks of the request hold exact KV."""
        end = (first_block + blocks) * self.block_tokens
        if end > self.exact:
            raise BlendedError(
                f"blocks {first_block} to {first_block + blocks - 1} reach to token {end}, but from token {self.exact} on KV is blended: "
                "it belongs to this request alone"
            )

    def check_chunk(self, chunk: int) -> None:
        """Raises BlendedError unless that chunk's KV was computed at its own start."""
        span = self.spans[chunk]
        if span.start != 0:
            raise BlendedError(
                f"chunk {chunk} begins at token {span.start} of this request; only KV that was computed at a chunk's own start, with nothing before it, "
                "may be stored"
            )
        whole = len(span) // self.block_tokens * self.block_tokens
        if whole > self.exact:
            raise BlendedError(f"chunk {chunk} reaches to token {whole}, but from token {self.exact} on KV is blended")


def _first_positions(spans: Sequence[Span], shifted: set[int], tokens: int) -> set[int]:
    out: set[int] = set()
    for i in shifted:
        out.update(range(spans[i].start, min(spans[i].end, spans[i].start + tokens)))
    return out


def _beginning(policy: Policy) -> int:
    """How many of the first tokens of each re-rotated chunk are computed in any case."""
    if isinstance(policy, First):
        return policy.tokens
    return policy.first if isinstance(policy, Asked) else 0


#: Turns 0 to 1 and 1 to 0.
_NOT = bytes((1, 0)) + bytes(254)


def plan(found: Found, policy: Policy, *, paged: bool = True) -> Plan:
    """paged: the engine's pages hold block_tokens tokens each, from token 0 on. So only chunks that begin at a multiple of that can be loaded in
    place. False: the engine copies tokens from where they were loaded to."""
    B = found.block_tokens
    loads: list[Load] = []
    passed: list[int] = []
    for i, (span, keys, there) in enumerate(zip(found.spans, found.keys, found.there)):
        if paged and span.start % B != 0:
            passed.append(i)
            continue
        for j, key in enumerate(keys):
            if there[j] and span.start + j * B >= found.prefix:
                loads.append(Load(key, i, j, j * B, span.start + j * B))
    shifted = {load.chunk for load in loads if load.old != load.position}
    again = _first_positions(found.spans, shifted, _beginning(policy))
    again.add(found.n_tokens - 1)
    # Arrays of marks are faster than sets. A long request has a million positions, and its first token waits for this.
    computed, reuse = bytearray(found.n_tokens), bytearray(found.n_tokens)
    for p in again:
        computed[p] = 1
    loads = [load for load in loads if computed.find(0, load.position, load.position + B) >= 0]
    for load in loads:
        reuse[load.position : load.position + B] = computed[load.position : load.position + B].translate(_NOT)
    reused = tuple(itertools.compress(range(found.n_tokens), reuse))
    compute = tuple(itertools.compress(range(found.prefix, found.n_tokens), reuse[found.prefix :].translate(_NOT)))
    exact = min((load.position for load in loads if load.old != load.position), default=found.n_tokens)
    return Plan(
        n_tokens=found.n_tokens,
        block_tokens=B,
        prefix=found.prefix,
        spans=tuple(found.spans),
        policy=policy,
        loads=tuple(loads),
        compute=compute,
        reused=reused,
        exact=exact,
        passed_over=tuple(passed),
    )


def selecting(policy: Policy) -> list[int]:
    """The layers in which the policy chooses by what was computed."""
    return policy.choosing if isinstance(policy, Hkvd) else []
