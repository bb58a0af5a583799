"""What `kv_connector_extra_config` may say, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Optional


_CHOICES = {"companion": ("auto", "on", "off")}


@dataclass(frozen=True)
class Settings:
    """Times are in seconds. An engine never waits longer than these say for the daemon."""

    #: Path of the daemon's socket; None: $UCM_SOCKET or the system's.
    socket: Optional[str] = None
    #: Load between steps, while other requests run; False: before the step that needs the blocks.
    async_load: bool = True
    #: With async_load false: begin a layer's attention as soon as that layer is there.
    layerwise: bool = False
    #: Ask the engine to keep all layers of a block side by side, where its backends can.
    block_layout: bool = True
    #: Move small chunks by this process's own kernels (ucmclient.Companion), which takes 64 MiB of the GPU's memory:
    #: "auto": where that pays and can be, "on": refuse to start where it can't be, "off".
    companion: str = "auto"
    #: Store what this engine computes.
    store: bool = True
    #: Load what is stored.
    load: bool = True
    #: Hits of fewer tokens than this are recomputed: a load costs a round trip.
    min_load_tokens: int = 0
    #: Tokens that this engine computes in a second. Given, hits on NVMe which would take longer than that are computed,
    #: and read into DRAM for the next request. 0: they are loaded.
    prefill_rate: float = 0.0
    #: A lookup that takes longer is a miss.
    lookup_timeout: float = 0.02
    #: For opening and registering: the engine's start waits so long for a daemon that is slow.
    connect_timeout: float = 30.0
    #: Don't start without the daemon; False: start, and use it when it is there.
    required: bool = False
    #: A daemon that was away is tried again after so long.
    retry_interval: float = 1.0
    #: How long the daemon keeps blocks that a lookup has promised.
    lease: float = 60.0
    #: A load, or a store, that takes longer is given up.
    transfer_deadline: float = 30.0
    #: Blocks that a prefill instance has handed over are waited for so long, then computed.
    handover_wait: float = 2.0
    #: Store on NVMe before it counts as stored.
    durable: bool = False
    #: When the engine resets external caches, too (sleeping does), it may have other weights from then on: loads nothing of
    #: before, and shares with nobody any more. True: the weights never change, go on.
    keep_on_reset: bool = False
    #: Separates this engine's cache from others' with the same model; for what the namespace can't know.
    salt: str = ""
    #: Names the weights where model and revision do not.
    revision: Optional[str] = None

    def for_role(self, producer: bool, consumer: bool) -> "Settings":
        """kv_role: a producer that is no consumer does not load, and the other way round. vLLM gives a producer's blocks
        away while steps that write to them are under way, which a load must not meet."""
        return replace(self, store=self.store and producer, load=self.load and consumer)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Unknown keys, and values of another type than the default's, are refused with the sentence that helps."""
        known = {field.name: field for field in fields(cls)}
        values = {}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(
                    f"kv_connector_extra_config has no setting {name!r}; there are {', '.join(sorted(known))}"
                )
            default = known[name].default
            if default is None:
                wanted: Any = str
            elif isinstance(default, bool) or not isinstance(default, (int, float)):
                wanted = type(default)
            else:
                wanted = (int, float) if isinstance(default, float) else int
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                kind = wanted.__name__ if isinstance(wanted, type) else "number"
                raise ValueError(f"kv_connector_extra_config: {name} must be a {kind}, not {value!r}")
            if not isinstance(value, (str, bool)) and value < 0:
                raise ValueError(f"kv_connector_extra_config: {name} must be at least 0, not {value!r}")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(
                    f"kv_connector_extra_config: {name} must be one of {', '.join(_CHOICES[name])}, not {value!r}"
                )
            values[name] = value
        settings = cls(**values)
        if settings.layerwise and settings.async_load:
            raise ValueError(
                "kv_connector_extra_config: layerwise needs async_load false: an asynchronous load ends before "
                "the request is scheduled, so that no layer is left to wait for"
            )
        return settings
