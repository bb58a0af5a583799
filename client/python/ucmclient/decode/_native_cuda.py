"""ucmclient_cuda_decode.h as ctypes sees it: structures and prototypes. The first use loads libucmclient_cuda."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import lru_cache

from ..copy_agent import load_cuda
from ..errors import check as _check
from ..sparse._native import Place

HEAD, LAYER = 0, 1
ENCODINGS = {"": 0, "fp8": 1}


class Layout(Structure):
    _fields_ = [
        ("k_offset", c_uint64),
        ("k_token_stride", c_uint64),
        ("k_head_stride", c_uint64),
        ("v_offset", c_uint64),
        ("v_token_stride", c_uint64),
        ("v_head_stride", c_uint64),
    ]


class Options(Structure):
    _fields_ = [
        ("layers", c_uint32),
        ("q_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("v_head_dim", c_uint32),
        ("dtype", c_uint32),
        ("kv_dtype", c_uint32),
        ("tokens", c_uint32),
        ("scale", c_float),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("entry", c_uint32),
        ("block_pool", c_uint64),
        ("entries", c_uint32),
        ("numbers", c_uint32),
        ("requests", c_uint32),
        ("misses", c_uint32),
        ("sequences", c_uint32),
        ("lists", c_uint32),
        ("room", c_uint32),
        ("window", c_uint32),
        ("stored", Layout),
        ("layer_bytes", c_uint64),
        ("page", Layout),
        ("rule", c_uint32),
        ("known", c_uint32),
        ("eps", c_float),
        ("rounds", c_uint32),
        ("every", c_uint32),
        ("first", c_uint32),
        ("sink_blocks", c_uint32),
        ("encoding", c_uint32),
    ]


class Info(Structure):
    _fields_ = [
        ("entry_bytes", c_uint64),
        ("table_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("splits", c_uint32),
        ("split_tiles", c_uint32),
    ]


class Layer(Structure):
    _fields_ = [
        ("layer", c_uint32),
        ("sequences", c_uint32),
        ("index", c_uint64),
        ("count", c_uint64),
        ("table", c_uint64),
        ("table_stride", c_uint64),
        ("request", c_uint64),
        ("pages", c_uint64),
        ("page_stride", c_uint64),
        ("page_bound", c_uint32),
        ("page_table", c_uint64),
        ("page_table_stride", c_uint64),
        ("first", c_uint64),
        ("length", c_uint64),
        ("q", c_uint64),
        ("q_stride", c_uint64),
        ("out", c_uint64),
        ("lse", c_uint64),
        ("candidates", c_uint64),
        ("score", c_uint64),
        ("head_scores", c_uint64),
        ("head_pitch", c_uint32),
        ("least", c_uint64),
        ("report", c_uint64),
        ("page_of", c_uint64),
    ]


class Result(Structure):
    _fields_ = [
        ("step", c_uint64),
        ("flags", c_uint32),
        ("unserved", c_uint32),
        ("missed", c_uint64),
        ("taken", c_uint64),
        ("floors_broken", c_uint64),
        ("attended", c_uint64),
        ("rounds", c_uint32),
        ("share", c_float),
    ]


class Key(Structure):
    _fields_ = [("layer", c_uint32), ("head", c_uint32), ("number", c_uint32)]


class Put(Structure):
    _fields_ = [("key", Key), ("request", c_uint32), ("at", c_uint64)]


_HANDLE, _STREAM, _COUNT = c_void_p, c_void_p, POINTER(c_uint32)
PROTOTYPES = {
    "ucm_cuda_errmsg": (c_char_p, []),
    "ucm_cuda_decode_entry_bytes": (c_int, [POINTER(Options), POINTER(c_uint64)]),
    "ucm_cuda_decode_open": (c_int, [c_char_p, POINTER(Options), POINTER(c_void_p)]),
    "ucm_cuda_decode_close": (None, [_HANDLE]),
    "ucm_cuda_decode_info": (c_int, [_HANDLE, POINTER(Info)]),
    "ucm_cuda_decode_begin": (c_int, [_HANDLE, _STREAM]),
    "ucm_cuda_decode_layer": (c_int, [_HANDLE, POINTER(Layer), _STREAM]),
    "ucm_cuda_decode_end": (c_int, [_HANDLE, _STREAM]),
    "ucm_cuda_decode_result": (c_int, [_HANDLE, POINTER(Result)]),
    "ucm_cuda_decode_enter": (c_int, [_HANDLE, c_uint32, c_uint32, _STREAM]),
    "ucm_cuda_decode_leave": (c_int, [_HANDLE, c_uint32, _STREAM]),
    "ucm_cuda_decode_forget": (c_int, [_HANDLE, c_void_p, c_uint32, _STREAM]),
    "ucm_cuda_decode_places": (c_int, [_HANDLE, c_void_p, c_void_p, POINTER(Place), c_uint32, _STREAM]),
    "ucm_cuda_decode_mapping_register": (c_int, [_HANDLE, c_void_p, c_uint32, _COUNT]),
    "ucm_cuda_decode_mapping_update": (c_int, [_HANDLE, _COUNT, _STREAM]),
    "ucm_cuda_decode_mapping_leave": (c_int, [_HANDLE, _STREAM]),
    "ucm_cuda_decode_unserved": (c_int, [_HANDLE, POINTER(Key), c_uint32, _COUNT, _STREAM]),
    "ucm_cuda_decode_put": (c_int, [_HANDLE, POINTER(Put), c_uint32, _COUNT, _STREAM]),
}


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    return load_cuda(PROTOTYPES)


def check(rc: int) -> None:
    _check(rc, library().ucm_cuda_errmsg)
