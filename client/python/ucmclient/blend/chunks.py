"""The namespace of chunks, whose keys do not depend on what precedes a chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ..buffers import Blocks
from ..client import Client, Found as Tier, Identity, Memory, Plane
from ..copy_agent import CopyAgent
from ..keys import sha256_chain
from ..region import Region, Rope, Task
from .plan import BlendedError, Plan
from .spans import Span, check_spans

#: The end of the layout in a chunk namespace's identity: keys of version 1, SHA-256 chained from a chunk's first token.
LAYOUT = ";chunks/1"


def chunk_identity(identity: Identity) -> Identity:
    """The identity of a model's chunks, from the identity of its prefixes."""
    if identity.key_bytes != 32:
        raise ValueError(f"keys of chunks have 32 bytes, the identity says {identity.key_bytes}")
    if identity.layout.endswith(LAYOUT):
        raise ValueError("the identity is that of a chunk namespace already")
    return dataclasses.replace(identity, layout=identity.layout + LAYOUT)


def chunk_keys(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """The keys of a chunk's whole blocks. Tokens after the last whole block have none."""
    packed = sha256_chain(tokens, block_tokens)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


@dataclass(frozen=True)
class Found:
    """A request's chunks as a lookup found them. keys[i] and there[i] are those of the whole blocks of spans[i]. lease: on the blocks that are
    there; 0: none."""

    n_tokens: int
    block_tokens: int
    prefix: int
    spans: tuple[Span, ...]
    keys: tuple[tuple[bytes, ...], ...]
    there: tuple[tuple[bool, ...], ...]
    lease: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens the blocks that are there hold."""
        return sum(map(sum, self.there)) * self.block_tokens


class Chunks:
    """The chunks of an Identity. Only store() puts blocks here, and it takes the Plan of the request that computed them. Regions of it are
    handles that can't dump. Threads may share it."""

    def __init__(self, client: Client, identity: Identity, timeout: Optional[float] = None):
        self.identity = identity
        self._ns = client.namespace(chunk_identity(identity), timeout)

    def close(self) -> None:
        self._ns.close()

    def __enter__(self) -> "Chunks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> bytes:
        return self._ns.fingerprint

    def lookup(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        *,
        prefix: int = 0,
        lease: float = 0.0,
        wait: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Found:
        """Which blocks of a request's chunks are cached, in one call to the daemon. prefix: for how many first tokens the caller already has exact
        KV. lease, wait: as for Namespace.lookup_per_key."""
        B = self.identity.block_tokens
        check_spans(spans, len(tokens))
        if not 0 <= prefix <= len(tokens):
            raise ValueError(f"the prefix has {prefix} tokens, the request {len(tokens)}")
        keys = tuple(tuple(chunk_keys(tokens[s.start : s.end], B)) for s in spans)
        flat = [key for of in keys for key in of]
        tiers, number = self._ns.lookup_per_key(flat, lease, timeout, wait=wait) if flat else (b"", 0)
        there, at = [], 0
        for of in keys:
            there.append(tuple(t != Tier.NOT for t in tiers[at : at + len(of)]))
            at += len(of)
        return Found(len(tokens), B, prefix, tuple(spans), keys, tuple(there), number)

    def register(
        self,
        memory: Sequence[Memory],
        planes: Sequence[Plane],
        *,
        blocks: int,
        rope: Optional[Rope] = None,
        copy_agent: Optional[CopyAgent] = None,
        **options: Any,
    ) -> "ChunkPages":
        """Registers pages, as Namespace.register does, or with a copy agent, as CopyAgent.register does. Without rope the pages can
        only be stored from."""
        if copy_agent is not None:
            return ChunkPages(self, copy_agent.register(self._ns, memory, planes, blocks=blocks, rope=rope, **options), rope)
        return ChunkPages(self, self._ns.register(memory, planes, blocks=blocks, rope=rope, **options), rope)


class ChunkPages:
    """Pages that chunks are loaded to, re-rotated, and stored from."""

    def __init__(self, chunks: Chunks, region: Region, rope: Optional[Rope]):
        self.chunks, self._region, self._rope = chunks, region, rope

    def close(self) -> None:
        self._region.close()

    def __enter__(self) -> "ChunkPages":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, plan: Plan, blocks: Blocks, *, lease: int = 0, **options: Any) -> Task:
        """Loads what the plan says, with K re-rotated: blocks[i] of the pages takes plan.loads[i]. The plan must have loads. A block whose result
        is not OK is missing: compute its tokens. lease: the lookup's. options: as for Region.load."""
        dynamic = self._rope is not None and self._rope.scaling == "dynamic"
        length = plan.n_tokens if dynamic else 0
        shifts = [(s.count, s.old, s.new, 0, length) for s in plan.segments]
        return self._region.load([load.key for load in plan.loads], blocks, lease=lease, shifts=shifts, **options)

    def store(self, plan: Plan, tokens: Sequence[int], chunk: int, blocks: Blocks, **options: Any) -> Task:
        """Stores the whole blocks of the plan's chunk of that number, whose KV lies in these blocks of the pages. The request must have computed
        the chunk at the chunk's own start; otherwise this raises BlendedError. tokens: the request's. options: as for Region.dump."""
        plan.check_chunk(chunk)
        if self._rope is not None and self._rope.scaling == "dynamic" and plan.n_tokens > self._rope.trained:
            raise BlendedError(
                f"the request has {plan.n_tokens} tokens, the model was trained for {self._rope.trained}: dynamic scaling gave its K frequencies of its own"
            )
        if len(tokens) != plan.n_tokens:
            raise ValueError(f"{len(tokens)} tokens were given, the plan is for {plan.n_tokens}")
        span = plan.spans[chunk]
        keys = chunk_keys(tokens[span.start : span.end], plan.block_tokens)
        return self._region.dump(keys, blocks, **options)


def store_prefix(plan: Plan, region: Region, keys: Sequence[bytes], blocks: Blocks, *, first_block: int = 0, **options: Any) -> Task:
    """Stores blocks of a request under prefix keys, from its block first_block on. Raises BlendedError if one of them follows a re-rotated
    block. options: as for Region.dump."""
    plan.check_prefix(first_block, len(keys))
    return region.dump(list(keys), blocks, **options)
