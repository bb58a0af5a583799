"""ucmclient_sparse.h as ctypes sees it: structures and prototypes."""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

from .._native import Transfer, lib


class Shape(Structure):
    _fields_ = [
        ("dtype", c_uint32),
        ("tokens", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("v_head_dim", c_uint32),
        ("rope_dim", c_uint32),
        ("k_offset", c_uint64),
        ("k_token_stride", c_uint64),
        ("k_head_stride", c_uint64),
        ("v_offset", c_uint64),
        ("v_token_stride", c_uint64),
        ("v_head_stride", c_uint64),
    ]


class Summary(Structure):
    _fields_ = [
        ("method", c_uint32),
        ("kind", c_uint32),
        ("run", c_uint32),
        ("pairs", c_uint32),
        ("keep", c_void_p),
        ("keep_bytes", c_uint32),
        ("bits", c_uint32),
        ("rope_bits", c_uint32),
        ("seed", c_uint64),
        ("chosen", c_uint32),
        ("rest", c_uint32),
        ("shape", Shape),
    ]


class SequenceKeys(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("n_keys", c_uint32),
        ("build", c_uint32),
        ("priority", c_uint32),
        ("daemon_timeout_ms", c_uint32),
        ("status", c_void_p),
    ]


class SequenceResult(Structure):
    _fields_ = [
        ("blocks", c_uint32),
        ("missing", c_uint32),
        ("in_dram", c_uint32),
        ("nvme", c_uint32),
        ("shared", c_uint32),
        ("summaries", c_uint32),
        ("built", c_uint32),
    ]


class Score(Structure):
    _fields_ = [
        ("metric", c_uint32),
        ("reduce", c_uint32),
        ("heads", c_uint32),
        ("rows", c_uint32),
        ("q_heads", c_uint32),
        ("beta", c_float),
    ]


class Choose(Structure):
    _fields_ = [
        ("policy", c_uint32),
        ("topk_tokens", c_uint32),
        ("min_blocks", c_uint32),
        ("sink_blocks", c_uint32),
        ("recent_blocks", c_uint32),
        ("limit", c_uint32),
        ("sparse_ratio", c_double),
        ("eps", c_double),
        ("beta_m", c_double),
    ]


class Select(Structure):
    _fields_ = [
        ("sequences", POINTER(c_void_p)),
        ("layers", POINTER(c_uint32)),
        ("n_rows", c_uint32),
        ("q_dtype", c_uint32),
        ("q", c_void_p),
        ("score", Score),
        ("choose", Choose),
        ("prefetch", c_uint32),
        ("daemon_timeout_ms", c_uint32),
    ]


class Selected(Structure):
    _fields_ = [
        ("counts", POINTER(c_uint32)),
        ("index", POINTER(c_uint32)),
        ("scores", POINTER(c_float)),
        ("counts_room", c_uint32),
        ("index_room", c_uint32),
        ("n_lists", c_uint32),
        ("n_blocks", c_uint32),
        ("evicted", c_uint32),
        ("no_summary", c_uint64),
    ]


class Summaries(Structure):
    _fields_ = [
        ("p", c_void_p),
        ("bytes", c_size_t),
        ("stride", c_size_t),
        ("n", c_uint32),
        ("missing", c_void_p),
    ]


LAYERS_MAX = 512


class Schedule(Structure):
    _fields_ = [
        ("layers", c_uint32),
        ("mode", c_uint8 * LAYERS_MAX),
        ("dense_below", c_uint32),
        ("retrieval_stride", c_uint32),
        ("lag", c_uint32),
        ("rows", c_uint32),
        ("beta", c_float),
    ]


class Step(Structure):
    _fields_ = [
        ("mode", c_uint32),
        ("choose", c_uint32),
        ("rows", c_uint32),
        ("layer", c_uint32),
        ("chosen_at", c_uint64),
    ]


POLICY_TEXT = 1024


class Policy(Structure):
    _fields_ = [
        ("preset", c_char * 24),
        ("summary", c_uint32),
        ("kind", c_uint32),
        ("run", c_uint32),
        ("pairs", c_uint32),
        ("bits", c_uint32),
        ("rope_bits", c_uint32),
        ("chosen", c_uint32),
        ("rest", c_uint32),
        ("seed", c_uint64),
        ("keep", c_double),
        ("metric", c_uint32),
        ("reduce", c_uint32),
        ("heads", c_uint32),
        ("rows", c_uint32),
        ("beta", c_double),
        ("choice", c_uint32),
        ("topk_tokens", c_uint32),
        ("min_blocks", c_uint32),
        ("limit", c_uint32),
        ("min_tokens", c_uint32),
        ("sparse_ratio", c_double),
        ("eps", c_double),
        ("microbatch", c_uint32),
        ("sink_blocks", c_uint32),
        ("recent_blocks", c_uint32),
        ("sink_tokens", c_uint32),
        ("recent_tokens", c_uint32),
        ("dense_below", c_uint32),
        ("dense_first", c_uint32),
        ("dense_last", c_uint32),
        ("reuse", c_uint32),
        ("retrieval_stride", c_uint32),
        ("lag", c_uint32),
        ("entries", c_double),
        ("goal", c_double),
        ("budget_tokens", c_uint32),
        ("grow", c_double),
        ("shrink", c_double),
        ("patience", c_uint32),
    ]


class PolicyBudget(Structure):
    _fields_ = [
        ("blocks", c_uint32),
        ("calm", c_uint32),
        ("least", c_uint32),
    ]


class Place(Structure):
    _fields_ = [
        ("slab", c_uint32),
        ("slot", c_uint32),
        ("seq", c_uint64),
        ("opened", c_uint64),
    ]


class MappingRef(Structure):
    _fields_ = [
        ("sequence", c_void_p),
        ("first", c_uint32),
        ("n", c_uint32),
        ("priority", c_uint32),
        ("daemon_timeout_ms", c_uint32),
        ("places", c_void_p),
    ]


class MappingReferenced(Structure):
    _fields_ = [
        ("placed", c_uint32),
        ("moved", c_uint32),
        ("read", c_uint32),
        ("missing", c_uint32),
    ]


class MappedRange(Structure):
    _fields_ = [
        ("address", c_void_p),
        ("bytes", c_uint64),
        ("slab", c_uint32),
        ("wanted", c_uint32),
        ("opened", c_uint64),
    ]


class MappingInfo(Structure):
    _fields_ = [
        ("opened", c_uint64),
        ("slab_bytes", c_uint64),
        ("slot_bytes", c_uint64),
        ("part_bytes", c_uint64),
        ("slabs", c_uint32),
        ("mapped", c_uint32),
        ("budget", c_uint64),
    ]


PROTOTYPES = {
    "ucm_sparse_summary_bytes": (c_int, [POINTER(Summary), POINTER(c_uint64)]),
    "ucm_sparse_summary_open": (c_int, [c_void_p, POINTER(Summary), c_int, c_int, POINTER(c_void_p)]),
    "ucm_sparse_summary_build": (c_int, [c_void_p, POINTER(Transfer), c_int, POINTER(c_void_p)]),
    "ucm_sparse_summary_local": (
        c_int,
        [POINTER(Summary), c_void_p, c_size_t, c_size_t, c_uint32, c_void_p, c_size_t, c_size_t],
    ),
    "ucm_sequence_open": (c_int, [c_void_p, c_uint32, c_uint32, c_int, POINTER(c_void_p)]),
    "ucm_sequence_close": (None, [c_void_p]),
    "ucm_sequence_append": (c_int, [c_void_p, POINTER(SequenceKeys), c_int, POINTER(SequenceResult)]),
    "ucm_sequence_blocks": (c_uint32, [c_void_p]),
    "ucm_sequence_prefetch": (c_int, [c_void_p, c_void_p, c_uint32, c_uint32, c_uint32, c_int, POINTER(c_void_p)]),
    "ucm_sparse_choose_defaults": (None, [POINTER(Choose)]),
    "ucm_sparse_score_defaults": (None, [POINTER(Summary), POINTER(Score)]),
    "ucm_sparse_room": (c_int, [POINTER(Select), POINTER(c_uint32), POINTER(c_uint32)]),
    "ucm_sparse_select": (c_int, [c_void_p, POINTER(Select), c_int, POINTER(Selected)]),
    "ucm_sparse_score_local": (
        c_int,
        [POINTER(Summary), POINTER(Score), POINTER(Summaries), c_void_p, c_uint32, c_void_p, c_size_t],
    ),
    "ucm_sparse_score_history": (c_int, [c_void_p, c_uint32, c_void_p]),
    "ucm_sparse_choose_local": (
        c_int,
        [POINTER(Choose), c_uint32, c_void_p, c_uint32, c_void_p, c_uint32, POINTER(c_uint32)],
    ),
    "ucm_sparse_select_local": (
        c_int,
        [POINTER(Summary), POINTER(Score), POINTER(Choose), POINTER(Summaries), c_void_p, c_uint32, POINTER(Selected)],
    ),
    "ucm_sparse_schedule_defaults": (c_int, [c_uint32, POINTER(Schedule)]),
    "ucm_sparse_schedule_for_model": (c_int, [c_char_p, c_uint32, POINTER(Schedule)]),
    "ucm_sparse_schedule_step": (c_int, [POINTER(Schedule), c_uint32, c_uint64, c_uint64, POINTER(Step)]),
    "ucm_sparse_schedule_choices": (c_int, [POINTER(Schedule), POINTER(c_uint32)]),
    "ucm_policy_parse": (c_int, [c_char_p, POINTER(Policy)]),
    "ucm_policy_text": (c_int, [POINTER(Policy), c_char_p, c_size_t]),
    "ucm_policy_preset": (c_int, [c_uint32, POINTER(c_char_p), POINTER(c_char_p)]),
    "ucm_policy_key": (c_int, [c_uint32, POINTER(c_char_p), POINTER(c_char_p)]),
    "ucm_policy_summary": (c_int, [POINTER(Policy), POINTER(Shape), c_void_p, POINTER(Summary)]),
    "ucm_policy_schedule": (c_int, [POINTER(Policy), c_char_p, c_uint32, POINTER(Schedule)]),
    "ucm_policy_choose": (c_int, [POINTER(Policy), c_uint32, c_uint32, POINTER(PolicyBudget), POINTER(Choose)]),
    "ucm_policy_budget_begin": (c_int, [POINTER(Policy), c_uint32, c_uint32, POINTER(PolicyBudget)]),
    "ucm_policy_budget_next": (c_int, [POINTER(Policy), c_uint32, c_float, POINTER(PolicyBudget)]),
    "ucm_mapping_open": (c_int, [c_void_p, c_uint32, c_uint32, c_int, POINTER(c_void_p)]),
    "ucm_mapping_close": (None, [c_void_p]),
    "ucm_mapping_ref": (c_int, [c_void_p, POINTER(MappingRef), c_int, POINTER(MappingReferenced)]),
    "ucm_mapping_unref": (c_int, [c_void_p, c_void_p, c_uint32, c_uint32, c_int]),
    "ucm_mapping_read": (c_int, [c_void_p, POINTER(Place), c_uint64, c_uint64, c_void_p]),
    "ucm_mapping_address": (c_int, [c_void_p, POINTER(Place), POINTER(c_void_p), POINTER(c_void_p)]),
    "ucm_mapping_ranges": (c_int, [c_void_p, POINTER(MappedRange), c_uint32, POINTER(c_uint32)]),
    "ucm_mapping_release": (c_int, [c_void_p, c_void_p]),
    "ucm_mapping_info": (c_int, [c_void_p, POINTER(MappingInfo)]),
}

for _name, (_result, _arguments) in PROTOTYPES.items():
    try:
        _function = getattr(lib, _name)
    except AttributeError:
        raise ImportError(f"libucmclient is older than ucmclient.sparse: it has no {_name}") from None
    _function.restype, _function.argtypes = _result, _arguments
