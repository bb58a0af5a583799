"""What the scheduler's half of the connector sends to the workers' halves in each step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Copy:
    """Blocks of one request to load or to store: keys packed, and as many of the engine's block ids."""

    request: str
    keys: bytes
    blocks: list[int]
    #: A store of an engine that encodes: these blocks are stored as they are.
    plain: bool = False


@dataclass
class Plan:
    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    #: Requests whose blocks will be reused: stores must stop reading them.
    preempted: set[str] = field(default_factory=set)
    #: Finished requests whose blocks stay allocated until every rank reports that no store reads them.
    ended: set[str] = field(default_factory=set)
    #: This plan's number. If it is not 0, the workers report when they have carried the plan out.
    number: int = 0
    #: The scheduler's half knows the namespace. Otherwise the workers send it.
    connected: bool = True
