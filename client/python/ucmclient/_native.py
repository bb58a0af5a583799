"""libucmclient as ctypes sees it: structures, prototypes, and where the library is found.

Mirrors client/include/ucmclient.h. ctypes.CDLL releases the interpreter lock during each call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

SONAME = "libucmclient.so.0"


class Options(Structure):
    _fields_ = [("socket", c_char_p), ("name", c_char_p), ("default_timeout_ms", c_int)]


class ServerInfo(Structure):
    _fields_ = [
        ("server", c_char * 64),
        ("tenant", c_char * 257),
        ("instance", c_uint8 * 16),
        ("admin", c_int),
        ("max_keys", c_uint32),
        ("max_requests", c_uint32),
        ("max_regions", c_uint32),
        ("max_leases", c_uint32),
        ("max_lease_ms", c_uint32),
        ("max_timeout_ms", c_uint32),
    ]


class Identity(Structure):
    _fields_ = [
        ("tenant", c_char_p),
        ("model", c_char_p),
        ("revision", c_char_p),
        ("dtype", c_char_p),
        ("layout", c_char_p),
        ("block_tokens", c_uint32),
        ("key_bytes", c_uint32),
        ("parts", c_uint32),
        ("layers", POINTER(c_uint32)),
        ("n_layers", c_uint32),
        ("layer_bytes", c_uint64),
        ("salt", c_char_p),
        ("salt_bytes", c_size_t),
        ("durability", c_uint32),
    ]


class KvRows(Structure):
    _fields_ = [("tokens", c_uint32), ("heads", c_uint32), ("dim", c_uint32)]


class EncodedForm(Structure):
    _fields_ = [
        ("encoding", c_char_p),
        ("dtype", c_char_p),
        ("version", c_uint32),
        ("k", KvRows),
        ("v", KvRows),
        ("order", c_uint32),
        ("axis", c_uint32),
        ("seed", c_uint64),
        ("run", c_uint32),
    ]


class EncodingInfo(Structure):
    _fields_ = [("form", EncodedForm), ("raw_bytes", c_uint64), ("encoded_bytes", c_uint64)]


#: ucm_prove_cb
Prove = CFUNCTYPE(c_int, c_void_p, c_uint64, c_void_p)


class Memory(Structure):
    _fields_ = [
        ("kind", c_int),
        ("bytes", c_uint64),
        ("offset", c_uint64),
        ("fd", c_int),
        ("ipc", c_uint8 * 64),
        ("prove_cb", Prove),
        ("prove_ctx", c_void_p),
    ]


class Plane(Structure):
    _fields_ = [
        ("memory", c_uint32),
        ("offset", c_uint64),
        ("stride", c_uint64),
        ("block_bytes", c_uint32),
        ("layer", c_uint32),
    ]


class Rope(Structure):
    _fields_ = [
        ("offset", c_uint32),
        ("rows", c_uint32),
        ("dim", c_uint32),
        ("first", c_uint32),
        ("rotary", c_uint32),
        ("interleaved", c_uint32),
        ("dtype", c_char_p),
        ("scaling", c_char_p),
        ("base", c_double),
        ("factor", c_double),
        ("trained", c_uint32),
        ("whole", c_uint32),
        ("fast", c_double),
        ("slow", c_double),
        ("run", c_uint32),
    ]


class RegionSpec(Structure):
    _fields_ = [
        ("part", c_uint32),
        ("blocks", c_uint32),
        ("device", c_char_p),
        ("gpu", c_char_p),
        ("memory", POINTER(Memory)),
        ("n_memory", c_uint32),
        ("planes", POINTER(Plane)),
        ("n_planes", c_uint32),
        ("ring_region", c_uint32),
        ("block_pool", c_uint32),
        ("rope", POINTER(Rope)),
    ]


class CudaOptions(Structure):
    _fields_ = [("entry_bytes", c_uint64), ("entries", c_uint32)]


class Lookup(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("n_keys", c_uint32),
        ("lease_ms", c_uint32),
        ("wait_ms", c_uint32),
        ("shared", POINTER(c_uint32)),
        ("wait_mode", c_uint32),
        ("pending", POINTER(c_uint32)),
    ]


class TableHits(Structure):
    _fields_ = [
        ("hits", c_uint32),
        ("in_dram", c_uint32),
        ("on_shared", c_uint32),
        ("complete", c_uint32),
        ("shared_tier", c_uint32),
    ]


class BlockMetadata(Structure):
    _fields_ = [("keys", c_void_p), ("n_keys", c_uint32), ("tokens", c_void_p), ("parent", c_char_p), ("lora", c_char_p)]


class Transfer(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("blocks", c_void_p),
        ("n_keys", c_uint32),
        ("layer", c_uint32),
        ("n_layers", c_uint32),
        ("priority", c_uint32),
        ("daemon_timeout_ms", c_uint32),
        ("lease", c_uint32),
        ("cuda_event", c_char_p),
        ("part", c_uint32),
        ("n_parts", c_uint32),
        ("durability", c_uint32),
        ("progress_interval", c_uint32),
        ("shifts", c_void_p),
        ("n_shifts", c_uint32),
    ]


class GatherSpec(Structure):
    _fields_ = [
        ("sequence", c_void_p),
        ("keys", c_void_p),
        ("n_keys", c_uint32),
        ("items", c_void_p),
        ("n_items", c_uint32),
        ("priority", c_uint32),
        ("daemon_timeout_ms", c_uint32),
    ]


class Result(Structure):
    _fields_ = [("bytes", c_uint64), ("n_ok", c_uint32), ("n_keys", c_uint32), ("result", POINTER(c_uint8))]


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ucm_strerror": (c_char_p, [c_int]),
    "ucm_errmsg": (c_char_p, []),
    "ucm_version": (c_char_p, []),
    "ucm_connect": (c_int, [POINTER(Options), c_int, POINTER(c_void_p)]),
    "ucm_close": (None, [c_void_p]),
    "ucm_disconnect": (None, [c_void_p]),
    "ucm_connection_epoch": (c_uint64, [c_void_p]),
    "ucm_fd": (c_int, [c_void_p]),
    "ucm_process": (c_int, [c_void_p]),
    "ucm_server_info": (c_int, [c_void_p, POINTER(ServerInfo)]),
    "ucm_namespace_open": (c_int, [c_void_p, POINTER(Identity), c_int, POINTER(c_void_p)]),
    "ucm_namespace_close": (None, [c_void_p]),
    "ucm_namespace_fingerprint": (None, [c_void_p, c_char_p]),
    "ucm_region_register": (c_int, [c_void_p, POINTER(RegionSpec), c_int, POINTER(c_void_p)]),
    "ucm_region_gpu_busy": (None, [c_void_p, c_int]),
    "ucm_region_unregister": (c_int, [c_void_p, c_int]),
    "ucm_shared_memory": (c_int, [c_size_t, POINTER(c_int), POINTER(c_void_p)]),
    "ucm_set_request_id": (c_int, [c_char_p]),
    "ucm_lookup_prefix": (
        c_int,
        [c_void_p, POINTER(Lookup), c_int, POINTER(c_uint32), POINTER(c_uint32), POINTER(c_uint32)],
    ),
    "ucm_lookup_per_key": (c_int, [c_void_p, POINTER(Lookup), c_int, c_char_p, POINTER(c_uint32), POINTER(c_uint32)]),
    "ucm_lookup_table_open": (c_int, [c_void_p, c_int]),
    "ucm_lookup_table_read": (c_int, [c_void_p, c_void_p, c_uint32, c_char_p, POINTER(TableHits)]),
    "ucm_lookup_note": (c_int, [c_void_p, c_void_p, c_uint32, c_int]),
    "ucm_block_metadata": (c_int, [c_void_p, POINTER(BlockMetadata), c_int]),
    "ucm_call": (
        c_int,
        [c_void_p, c_char_p, c_char_p, c_size_t, c_int, POINTER(c_void_p), POINTER(c_size_t)],
    ),
    "ucm_release": (c_int, [c_void_p, c_uint32, c_int]),
    "ucm_release_soon": (c_int, [c_void_p, c_uint32]),
    "ucm_load": (c_int, [c_void_p, POINTER(Transfer), c_int, POINTER(c_void_p)]),
    "ucm_load_prefix": (c_int, [c_void_p, POINTER(Transfer), c_uint32, c_int, POINTER(c_void_p)]),
    "ucm_gather": (c_int, [c_void_p, POINTER(GatherSpec), c_int, POINTER(c_void_p)]),
    "ucm_dump": (c_int, [c_void_p, POINTER(Transfer), c_int, POINTER(c_void_p)]),
    "ucm_dump_raw": (c_int, [c_void_p, POINTER(Transfer), c_int, POINTER(c_void_p)]),
    "ucm_encoding_open": (c_int, [c_void_p, POINTER(EncodedForm), c_int, POINTER(c_void_p)]),
    "ucm_encoding_describe": (c_int, [c_void_p, POINTER(EncodingInfo)]),
    "ucm_prefetch": (c_int, [c_void_p, POINTER(Transfer), c_int, POINTER(c_void_p)]),
    "ucm_task_check": (c_int, [c_void_p, POINTER(Result)]),
    "ucm_task_wait": (c_int, [c_void_p, c_int, POINTER(Result)]),
    "ucm_task_wait_layers": (c_int, [c_void_p, c_uint32, c_int, c_void_p]),
    "ucm_task_cancel": (c_int, [c_void_p, c_int]),
    "ucm_task_free": (None, [c_void_p]),
    "ucm_pin": (c_int, [c_void_p, c_void_p, c_uint32, c_int, POINTER(c_uint64)]),
    "ucm_unpin": (c_int, [c_void_p, c_void_p, c_uint32, c_int, POINTER(c_uint64)]),
    "ucm_evict": (c_int, [c_void_p, c_void_p, c_uint32, c_int, POINTER(c_uint64), POINTER(c_uint64)]),
    "ucm_keys_sha256": (c_int, [c_char_p, c_void_p, c_uint32, c_uint32, c_void_p]),
    "ucm_keys_md5": (c_int, [c_char_p, c_char_p, c_void_p, c_uint32, c_uint32, c_void_p]),
}


def candidates(variable: str, soname: str, directories: Iterable[str]) -> list[str]:
    """The file that the environment variable names; else those in the directories, then the loader's."""
    named = os.environ.get(variable)
    if named:
        return [named]
    beside = [os.path.join(directory, soname) for directory in directories if directory]
    return [path for path in beside if os.path.exists(path)] + [soname]


def load(paths: Iterable[str], prototypes: dict[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    """The first library that loads and has all prototypes. Raises OSError, which names the files that were tried."""
    tried = []
    for path in paths:
        try:
            library = ctypes.CDLL(path)
            for name, (result, arguments) in prototypes.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
        else:
            return library
    raise OSError(f"tried {'; '.join(tried)}")


try:
    lib = load(candidates("UCMCLIENT_LIB", SONAME, [os.path.dirname(os.path.abspath(__file__))]), _PROTOTYPES)
except OSError as error:
    raise ImportError(
        f"libucmclient was not found: install ucmd, or name the library in UCMCLIENT_LIB ({error})"
    ) from None

_libc = ctypes.CDLL(None)
_libc.free.restype, _libc.free.argtypes = None, [c_void_p]


def free(memory: c_void_p) -> None:
    """What the library took from malloc for its caller."""
    _libc.free(memory)
