"""What the scheduler's half of the connector sends to the workers' halves in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .adapters import Adapter


@dataclass
class Copy:
    """Blocks of one request to load or to store: keys packed, and as many of the engine's block ids."""

    request: str
    keys: bytes
    blocks: list[int]
    #: For a store of an engine that encodes: these blocks are stored as they are.
    raw: bool = False
    #: A store of what this step computes, large enough to go by layers.
    layered: bool = False
    #: A load that ranks with the same bytes share out; 0: it is not.
    number: int = 0
    #: A load that re-rotates K: runs of blocks, as Region.load has them.
    shifts: Optional[list[tuple[int, ...]]] = None
    #: What the keys stand for, besides tokens.
    adapter: Optional[Adapter] = None

    def some(self, indexes: list[int], raw: bool) -> "Copy":
        """The copy of its blocks with these indexes."""
        size = len(self.keys) // len(self.blocks)
        keys = b"".join(self.keys[i * size : (i + 1) * size] for i in indexes)
        return Copy(self.request, keys, [self.blocks[i] for i in indexes], raw, adapter=self.adapter)


@dataclass
class Gather:
    """A load of which all ranks have their share. Now they gather the others', and report these blocks as failed."""

    number: int
    failed: list[int]


@dataclass
class SparseStep:
    """What a step computes of a request that decodes sparsely."""

    request: str
    prompt_tokens: int
    #: The step's tokens are those from first to end.
    first: int
    end: int
    #: pages and keys are all; False: those that were added.
    reset: bool
    #: The engine's block ids, 0 where there is no page.
    pages: list[int]
    keys: list[bytes]
    #: How many first blocks have no pages any more.
    given: int
    #: Slots that it keeps against others.
    floor: int


@dataclass
class Plan:
    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    #: Requests whose loads, under way or in this plan, bring KV of weights that the engine had before. These loads have
    #: failed.
    void: set[str] = field(default_factory=set)
    #: Requests whose blocks will be reused: stores must stop reading them.
    preempted: set[str] = field(default_factory=set)
    #: Finished requests whose blocks stay allocated until every rank reports that no store reads them.
    ended: set[str] = field(default_factory=set)
    #: True: the scheduler's half, not the engine, keeps these allocated and needs the report.
    ours: bool = False
    #: The engine may overwrite any block, so no store may still read one.
    fence: bool = False
    #: This plan's number. If it is not 0, the workers report when they have carried the plan out.
    number: int = 0
    #: The steps of this step's sparse requests.
    sparse: list[SparseStep] = field(default_factory=list)
    #: For requests whose load takes no pages for its first blocks: the keys of these, packed.
    ahead: dict[str, bytes] = field(default_factory=dict)
    #: Requests that have finished or were preempted since the last plan.
    gone: set[str] = field(default_factory=set)
    #: The step computes something, so that the GPU is busy while blocks are copied.
    computes: bool = False
    #: The scheduler's half knows the namespace. Otherwise the workers send it.
    connected: bool = True
    #: The plan of requests that load or store chunks.
    chunks: Optional["Plan"] = None


@dataclass
class HeldCopy(Copy):
    """A store of blocks that the engine may give to others while their request runs. The scheduler's half holds them until all
    workers have reported the number."""

    hold: int = 0


@dataclass
class HybridPlan(Plan):
    """The plan of an engine with several kinds of blocks."""

    #: Loads and stores of each kind.
    kinds: list[Plan] = field(default_factory=list)
    #: The number of this plan's stores that hold blocks. 0: none do.
    hold: int = 0
    #: Requests that have nothing valid to load.
    hopeless: set[str] = field(default_factory=set)
