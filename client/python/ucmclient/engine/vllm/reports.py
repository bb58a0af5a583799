"""What the connector's halves say to each other, by way of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

from .groups import HybridIdentity
from .identity import EngineIdentity
from .plan import Plan


@dataclass
class UcmMetadata(_base.KVConnectorMetadata):
    plan: Plan


@dataclass
class UcmHandshake(_base.KVConnectorHandshakeMetadata):
    identity: Union[EngineIdentity, HybridIdentity]


@dataclass
class UcmProgress(_base.KVConnectorWorkerMetadata):
    """The number of the plan that a worker has carried out, 0 if no report was asked for. Also the handshake's content, if that did not reach the scheduler's
    half (MultiConnector passes on only one connector's)."""

    number: int
    identities: frozenset[Union[EngineIdentity, HybridIdentity]] = frozenset()
    #: For the step's sparse requests: how many first blocks the daemon keeps.
    kept: dict[str, int] = field(default_factory=dict)
    #: Those whose step is worthless, with a block id that is reported to vLLM as invalid.
    spoiled: dict[str, int] = field(default_factory=dict)
    #: Those of these whose blocks are lost.
    lost: frozenset[str] = frozenset()
    #: For each hold of blocks: how many workers have given it up.
    released: dict[int, int] = field(default_factory=dict)
    #: For loads that ranks share out: how many ranks have their share, and which blocks did not come.
    shares: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    #: For each finished request: how many workers have no store that reads its blocks. The scheduler's half keeps them until all say so.
    sent: dict[str, int] = field(default_factory=dict)
    #: Processes of workers in which weights have changed since the last report.
    changed: frozenset[int] = frozenset()

    def aggregate(self, other: "UcmProgress") -> "UcmProgress":
        kept = {name: min(n, other.kept[name]) for name, n in self.kept.items() if name in other.kept}
        identities, spoiled = self.identities | other.identities, {**self.spoiled, **other.spoiled}
        released, sent = _sums(self.released, other.released), _sums(self.sent, other.sent)
        shares = dict(self.shares)
        for number, (ranks, failed) in other.shares.items():
            before, lost = shares.get(number, (0, frozenset()))
            shares[number] = before + ranks, lost | failed
        return UcmProgress(min(self.number, other.number), identities, kept, spoiled, self.lost | other.lost, released, shares, sent, self.changed | other.changed)


def _sums(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
