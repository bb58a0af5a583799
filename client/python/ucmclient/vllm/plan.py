"""What the scheduler's half of the connector tells the workers' halves in a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Copy:
    """Blocks of one request to load or to store: keys packed, and as many of the engine's block ids."""

    request: str
    keys: bytes
    blocks: list[int]


@dataclass
class Plan:
    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    #: Requests whose blocks are about to be used for others: nothing of theirs may be read any more.
    preempted: set[str] = field(default_factory=set)
    #: Requests that are over, whose blocks are kept until every rank has said that no store reads them.
    ended: set[str] = field(default_factory=set)
    #: Which plan this is; not 0: the workers say when they have carried it out.
    number: int = 0
    #: The scheduler's half knows the namespace; if not, the workers name it.
    connected: bool = True
