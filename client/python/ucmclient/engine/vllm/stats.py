"""What vLLM asks of the connector for its log and for Prometheus: what loads and stores did since it last asked.

The worker's half counts (Counts). vLLM sends what counts() gives, as raw numbers, to the process that logs, and adds up those of
all ranks. So loads and stores count once for each rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Optional

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _metrics
except ImportError:  # an older vLLM
    _metrics = None  # type: ignore[assignment]

_StatsBase: Any = getattr(_metrics, "KVConnectorStats", object)
_PromBase: Any = getattr(_metrics, "KVConnectorPromMetrics", object)

#: What is counted, by name in the log, and what Prometheus says of it.
COUNTED = {
    "loads": "loads that have ended",
    "load_blocks": "blocks that loads brought",
    "load_failed_blocks": "blocks that loads should have brought and did not; they were computed",
    "load_seconds": "time of loads, from their beginning until the engine saw their end",
    "stores": "stores that have ended",
    "store_blocks": "blocks that stores took, stored before or not",
    "store_failed_blocks": "blocks that could not be stored",
}


@dataclass
class Counts:
    """Counts of a worker's half since they were last taken."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self.values[name] = self.values.get(name, 0) + value

    def load(self, blocks: int, failed: int, began: float) -> None:
        self.add(loads=1, load_blocks=blocks - failed, load_failed_blocks=failed, load_seconds=time.monotonic() - began)

    def store(self, blocks: int, failed: int) -> None:
        self.add(stores=1, store_blocks=blocks - failed, store_failed_blocks=failed)

    def take(self) -> Optional[dict[str, float]]:
        """None: nothing happened."""
        values, self.values = self.values, {}
        return values or None


class UcmStats(_StatsBase):
    """A KVConnectorStats. data: name of COUNTED to its number, without those that are 0."""

    def __init__(self, data: Optional[dict[str, Any]] = None):
        self.data = dict(data or {})

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: "UcmStats") -> "UcmStats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {name: self.data[name] for name in COUNTED if self.data.get(name)}
        if "load_seconds" in shown:
            shown["load_seconds"] = round(shown["load_seconds"], 3)
        return shown


class UcmPromMetrics(_PromBase):
    """A counter vllm:ucm_NAME for each of COUNTED."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._make(labelnames, per_engine_labelvalues)

    def _make(self, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTED.items():
            counter = self._counter_cls(name=f"vllm:ucm_{name}", documentation=f"ucmd's connector: {text}", labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters and engine_idx in self._counters[name]:
                self._counters[name][engine_idx].inc(value)
