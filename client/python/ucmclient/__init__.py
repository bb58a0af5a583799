"""Client of ucmd, the KV cache daemon of a host: a thin binding over libucmclient.

    with Client(name="worker-0") as client:
        with client.namespace(identity) as ns, ns.register(memory, planes, blocks=1024) as region:
            hits = ns.lookup_prefix(keys, lease=30.0)
            region.load(keys[: hits.blocks], block_ids, lease=hits.lease).wait()

It imports only the standard library; numpy and torch work by address (ucmclient.memory).
"""

from ._native import lib as _lib
from .client import (
    Client,
    EncodedNamespace,
    Found,
    Identity,
    Memory,
    MemoryKind,
    Namespace,
    WaitMode,
    Plane,
    PrefixHits,
    ServerInfo,
    TableHits,
)
from .copy_agent import CopyAgent, CopyAgentMissing, CopyAgentRegion
from .errors import Status, UcmError
from .handle import on_behalf_of
from .memory import SharedMemory, cuda_allocation, data_pointer, gpu_uuid
from .region import BlockResult, Region, Rope, Task, TaskResult

__version__ = _lib.ucm_version().decode()

__all__ = [
    "BlockResult",
    "Client",
    "CopyAgent",
    "CopyAgentMissing",
    "CopyAgentRegion",
    "EncodedNamespace",
    "Found",
    "Identity",
    "Memory",
    "MemoryKind",
    "Namespace",
    "WaitMode",
    "Plane",
    "PrefixHits",
    "Region",
    "Rope",
    "ServerInfo",
    "SharedMemory",
    "Status",
    "TableHits",
    "Task",
    "TaskResult",
    "UcmError",
    "cuda_allocation",
    "data_pointer",
    "gpu_uuid",
    "on_behalf_of",
]
