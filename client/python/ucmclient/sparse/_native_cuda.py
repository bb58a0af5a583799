"""ucmclient_cuda_sparse.h as ctypes sees it: structures and prototypes. The first use loads libucmclient_cuda."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from functools import lru_cache

from ..copy_agent import load_cuda
from ..errors import check as _check
from ._native import Choose, Summary, Score

SUMMARY_LAYERS = 128


class SummaryLayer(Structure):
    _fields_ = [("k", c_uint64), ("v", c_uint64), ("out", c_uint64)]


class SummaryBuild(Structure):
    _fields_ = [
        ("layers", POINTER(SummaryLayer)),
        ("n_layers", c_uint32),
        ("n_blocks", c_uint32),
        ("numbers", c_uint64),
        ("out_numbers", c_uint64),
        ("stride", c_uint64),
        ("out_stride", c_uint64),
        ("bound", c_uint32),
        ("out_bound", c_uint32),
        ("thread_blocks", c_uint32),
    ]


class SelectOptions(Structure):
    _fields_ = [
        ("score", Score),
        ("choose", Choose),
        ("q_dtype", c_uint32),
        ("sequences", c_uint32),
        ("max_blocks", c_uint32),
        ("room", c_uint32),
    ]


class SelectInfo(Structure):
    _fields_ = [
        ("lists", c_uint32),
        ("room", c_uint32),
        ("workspace_bytes", c_uint64),
        ("head_scores", c_uint64),
        ("head_pitch", c_uint32),
    ]


class SelectLayer(Structure):
    _fields_ = [
        ("summaries", c_uint64),
        ("stride", c_uint64),
        ("bound", c_uint32),
        ("sequences", c_uint32),
        ("table", c_uint64),
        ("table_stride", c_uint64),
        ("n_blocks", c_uint64),
        ("q", c_uint64),
        ("q_stride", c_uint64),
        ("count", c_uint64),
        ("index", c_uint64),
        ("score", c_uint64),
        ("most", c_uint64),
    ]


PROTOTYPES = {
    "ucm_cuda_errmsg": (c_char_p, []),
    "ucm_cuda_summary_open": (c_int, [c_char_p, POINTER(Summary), POINTER(c_void_p)]),
    "ucm_cuda_summary_close": (None, [c_void_p]),
    "ucm_cuda_summary": (c_int, [c_void_p, POINTER(SummaryBuild), c_void_p]),
    "ucm_cuda_select_open": (c_int, [c_char_p, POINTER(Summary), POINTER(SelectOptions), POINTER(c_void_p)]),
    "ucm_cuda_select_close": (None, [c_void_p]),
    "ucm_cuda_select_info": (c_int, [c_void_p, POINTER(SelectInfo)]),
    "ucm_cuda_select": (c_int, [c_void_p, POINTER(SelectLayer), c_void_p]),
}


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    return load_cuda(PROTOTYPES)


def check(rc: int) -> None:
    _check(rc, library().ucm_cuda_errmsg)
