"""What the scheduler's half knows of a request: its keys, its blocks, and what of them is promised, loaded and stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Optional

from .adapters import Adapter
from .inputs import Mask

#: After every block.
NEVER = 1 << 62


@dataclass
class Promise:
    """A lookup found the first blocks of a request; a lease keeps them until `until`."""

    blocks: int
    lease: int
    until: float
    #: How many of these are not in DRAM.
    on_nvme: int = 0
    #: The engine itself has the blocks before this one.
    start: int = 0


@dataclass
class Request:
    vllm: Any
    #: Hashed into its keys; empty: the keys are the engine's hashes.
    prefix: bytes = b""
    #: Its LoRA adapter, as the prefix has it.
    adapter: Optional[Adapter] = None
    #: From this block on, keys are hashed with `own`, too.
    own_from: int = NEVER
    own: bytes = b""
    #: Which places are tokens, where embeddings lie next to them.
    mask: Optional[Mask] = None
    #: Places of items that a client has named, with what they are, and tokens of one of the engine's hashes.
    items: list[tuple[int, bytes]] = field(default_factory=list)
    hash_tokens: int = 1
    #: The engine's hashes stand for all of it.
    raw: bool = True
    #: Tokens of a block, if the token after a block is also hashed into its key. 0: it is not.
    reads_next: int = 0
    #: vLLM's count of its preemptions when it got its blocks.
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    #: How many blocks are stored or planned to be.
    stored: int = 0
    #: Since it got its blocks: a store may read the blocks from the first to the last of these.
    read_from: int = NEVER
    read_to: int = 0
    #: A plan has a store of it: the workers report when its blocks may be reused.
    reported_later: bool = False
    promise: Optional[Promise] = None
    loading: bool = False
    began: float = 0.0
    #: How many tokens of the load come from NVMe.
    slow: int = 0
    #: The engine's block ids that its latest load fills.
    loads: frozenset[int] = frozenset()
    #: Its blocks and loads before each preemption.
    past: list[tuple[list[int], frozenset[int]]] = field(default_factory=list)
    #: It used blocks whose load for another request failed, or blocks from before a reset. Do not store it.
    tainted: bool = False
    #: A load of it failed: compute it, without another try.
    failed: bool = False
    #: How long to wait for blocks that a prefill instance hands over.
    wait_until: float = 0.0
    #: Its lookup was answered by the lookup table, and reported to the daemon.
    told: bool = False

    @property
    def hashed(self) -> int:
        """How many blocks have a key."""
        hashes = len(self.vllm.block_hashes)
        return min(hashes, (self.vllm.num_tokens - 1) // self.reads_next) if self.reads_next else hashes

    def key(self, block: int) -> bytes:
        key = self.vllm.block_hashes[block]
        return key if self.raw and block < self.own_from else self._hashed(block, key)

    def keys(self, first: int, end: int) -> bytes:
        hashes = self.vllm.block_hashes[first:end]
        if not self.raw or first + len(hashes) > self.own_from:
            hashes = [self._hashed(first + i, key) for i, key in enumerate(hashes)]
        return b"".join(hashes)

    def _hashed(self, block: int, key: bytes) -> bytes:
        with_it = self.prefix + (self.own if block >= self.own_from else b"")
        if self.mask is not None:
            with_it += self.mask.digest(block)
        for place, what in self.items:
            if place < (block + 1) * self.hash_tokens + bool(self.reads_next):
                with_it += what
        if self.reads_next:
            with_it += self._behind((block + 1) * self.reads_next)
        return hashlib.sha256(with_it + key).digest()[: len(key)] if with_it else key

    def _behind(self, place: int) -> bytes:
        """What a draft reads there: a token, or a piece of an image in its place. The engine's hash of the blocks before does not cover it."""
        what = self.vllm.all_token_ids[place].to_bytes(8, "little", signed=True)
        for one in getattr(self.vllm, "mm_features", None) or ():
            first = one.mm_position.offset
            if first <= place < first + one.mm_position.length:
                what += f"{place - first}:{one.identifier}".encode()
        return what

    def preempted(self) -> bool:
        """Whether it was preempted since the last call. It has then lost its blocks, and stores may be cancelled."""
        times = getattr(self.vllm, "num_preemptions", 0)
        if times == self.preemptions:
            return False
        self.preemptions = times
        self.past += [(self.blocks, self.loads)] if self.loads else []
        self.blocks, self.stored, self.reported_later, self.loads = [], 0, False, frozenset()
        self.read_from, self.read_to = NEVER, 0
        return True
