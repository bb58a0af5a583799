"""The settings in `kv_connector_extra_config`, and in its object `advanced`, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

from ...errors import UcmError
from ...sparse.policy import Policy
from .summaries import SummarySettings

_CHOICES = {"copy_agent": ("auto", "on", "off"), "encoding": ("none", "fp8", "int8", "q4", "lossless")}


def _advanced(default: Any) -> Any:
    return field(default=default, metadata={"kind": "advanced"})


@dataclass(frozen=True)
class Settings:
    """Times are in seconds, and bound all waits for the daemon. docs/vllm.md has the same lists."""

    #: Path of the daemon's socket; None: $UCM_SOCKET, else the default.
    socket: Optional[str] = None
    #: Don't start without the daemon; False: start, and use the daemon once it is there.
    required: bool = False
    #: Load what is stored.
    load: bool = True
    #: Store what this engine computes.
    store: bool = True
    #: Load between steps, while other requests run; False: at the start of the step that needs the blocks.
    async_load: bool = True
    #: With async_load false: start a layer's attention as soon as that layer has arrived.
    layerwise: bool = False
    #: A block has so many parts, each with the same number of KV heads, whatever the tensor-parallel size. Engines of sizes that divide the
    #: number share. 0: a part is what a rank holds.
    head_groups: int = 0
    #: How stored blocks are encoded (docs/encodings.md): "none", "fp8", "int8" (a scale for each channel of K), "q4", "lossless".
    encoding: str = "none"
    #: The summary that ucmd builds of each stored block (docs/sparse.md); None: none.
    summaries: Optional[SummarySettings] = None
    #: A policy of sparse decoding (docs/sparse.md) with --attention-backend CUSTOM; None: all decoding is dense.
    sparse: Optional[str] = None
    #: Requests may name chunks, which are loaded to where they stand in a prompt (docs/blend.md).
    chunks: bool = False
    #: Separates this engine's cache from others' with the same model, for reasons that the namespace can't know.
    salt: str = ""

    # ---- advanced ----

    #: Ask the engine to keep all layers of a block side by side, if its backends can.
    block_layout: bool = _advanced(True)
    #: Each of the ranks with the same bytes loads a share of a hit, and gathers the rest from the others.
    gather_loads: bool = _advanced(False)
    #: Move small fragments with kernels in this process (ucmclient.CopyAgent), which takes 64 MiB of GPU memory. "auto":
    #: where that is possible and pays; "on": refuse to start where it is impossible; "off".
    copy_agent: str = _advanced("auto")
    #: With an encoding: so many first tokens of a request are stored as they are, in whole blocks.
    raw_first: int = _advanced(0)
    #: With sparse: takes GPU memory for so many requests of the model's full length.
    sparse_room: int = _advanced(4)
    #: If a step completes so many tokens of a request, their blocks are stored by layer while the step computes. 0: all are stored after their
    #: step.
    layer_stores: int = _advanced(0)
    #: For models with sliding windows: hits end at multiples of so many tokens, and where prompts and answers end. 0: four windows.
    window_interval: int = _advanced(0)
    #: Compute hits of fewer tokens: a load costs a round trip.
    min_load_tokens: int = _advanced(0)
    #: Tokens that this engine computes in a second. If set, hits on NVMe that would take longer than that are computed,
    #: and read into DRAM for the next request. 0: they are always loaded.
    prefill_rate: float = _advanced(0.0)
    #: A lookup that takes longer is a miss.
    lookup_timeout: float = _advanced(0.02)
    #: How long a request waits for the shared tier's answer, while others go on. 0: lookups wait for it, half of lookup_timeout at most.
    shared_wait: float = _advanced(0.5)
    #: How long to wait for blocks that a prefill instance hands over, before computing them.
    handover_wait: float = _advanced(2.0)
    #: Limit for opening and registering, at the engine's start.
    connect_timeout: float = _advanced(30.0)
    #: Pause before trying a daemon again that was away or slow.
    retry_interval: float = _advanced(1.0)
    #: How long the daemon keeps blocks that a lookup found.
    lease: float = _advanced(60.0)
    #: A load or a store that takes longer fails.
    transfer_timeout: float = _advanced(30.0)
    #: A store is done when it is on NVMe.
    durable: bool = _advanced(False)
    #: When the engine resets external caches (sleeping does), its weights may change: it then loads nothing older and shares with no other
    #: engine any more. True: the weights never change, so a reset has no such effect.
    keep_on_reset: bool = _advanced(False)
    #: With vLLM's own KV events on: they tell of this engine's blocks in the daemon, too, as ucmevents does for a whole host.
    events: bool = _advanced(False)
    #: Names the weights; None: the model's revision does.
    revision: Optional[str] = _advanced(None)

    # ---- not of the engine's configuration ----

    #: Look in the daemon's lookup table first, and ask for no lookup if it says that nothing is cached.
    lookup_table: bool = field(default=True, metadata={"kind": None})
    #: If the daemon keeps events for routers: send it the metadata of stored blocks.
    block_metadata: bool = field(default=True, metadata={"kind": None})

    def for_role(self, producer: bool, consumer: bool) -> "Settings":
        """For kv_role: a mere producer does not load, and a mere consumer does not store. (vLLM reuses a producer's blocks while steps that
        write to them are under way. A load must not write to them then.)"""
        return replace(self, store=self.store and producer, load=self.load and consumer)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Refuses unknown names and values of another type than the default's, with a helpful message."""
        advanced = extra.get("advanced", {})
        if not isinstance(advanced, Mapping):
            raise ValueError(f"kv_connector_extra_config: advanced must be an object, not {advanced!r}")
        values = {name: _value(name, value, "plain") for name, value in extra.items() if name != "advanced"}
        values.update({name: _value(name, value, "advanced") for name, value in advanced.items()})
        settings = cls(**values)
        if settings.sparse is not None:
            try:
                Policy(settings.sparse)
            except UcmError as error:
                raise ValueError(f"kv_connector_extra_config: sparse: {error}") from None
        if settings.layerwise and settings.async_load:
            raise ValueError(
                "kv_connector_extra_config: layerwise needs async_load false: an asynchronous load ends before "
                "the request is scheduled, so that no layer is left to wait for"
            )
        if settings.gather_loads and (not settings.async_load or settings.sparse is not None):
            raise ValueError(
                "kv_connector_extra_config: gather_loads needs loads between steps, and none for sparse decoding: remove the setting "
                f"{'async_load' if settings.sparse is None else 'sparse'}, or gather_loads"
            )
        if settings.layer_stores and settings.sparse is not None:
            raise ValueError(
                "kv_connector_extra_config: layer_stores hands over what a step computes before it is known whether the step counts, "
                "which sparse leaves open until its end: remove one of them"
            )
        if settings.encoding == "none" and settings.raw_first:
            raise ValueError("kv_connector_extra_config: raw_first says what is not encoded: set encoding, too")
        if settings.encoding not in ("none", "lossless") and settings.summaries is not None:
            raise ValueError(
                "kv_connector_extra_config: summaries describe KV as it was computed, and ucmd builds them from what is stored: "
                f"set encoding to lossless or none, or summaries to none ({settings.encoding} loses)"
            )
        return settings


def kinds() -> dict[str, Any]:
    """Each setting's kind: "plain", "advanced", or None: the connector's own."""
    return {one.name: one.metadata.get("kind", "plain") for one in fields(Settings)}


def _value(name: str, value: Any, kind: str) -> Any:
    """The checked value. kind: as which it was given."""
    here = [known for known, of in kinds().items() if of == kind]
    if name not in here:
        other = {"advanced": "among the others, outside of \"advanced\"", "plain": 'in the object "advanced"'}[kind]
        if kinds().get(name):
            raise ValueError(f"kv_connector_extra_config: {name} stands {other}")
        raise ValueError(f"kv_connector_extra_config has no setting {name!r}; there are {', '.join(sorted(here))}")
    if name == "summaries":
        return SummarySettings.parse(value)
    default = getattr(Settings, name)
    wanted = str if default is None else type(default)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        words = "number" if wanted is float else wanted.__name__
        raise ValueError(f"kv_connector_extra_config: {name} must be a {words}, not {value!r}")
    if not isinstance(value, (str, bool)) and value < 0:
        raise ValueError(f"kv_connector_extra_config: {name} must be at least 0, not {value!r}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"kv_connector_extra_config: {name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    return value
