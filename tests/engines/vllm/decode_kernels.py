"""The C of kernels/entries and kernels/attend, as the small engine's "GPU" runs it: `make build/decode_kernels.so`."""

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_uint8, c_uint32, c_uint64, c_void_p

import numpy as np

from ucmclient.sparse import Shape

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
LIB = ctypes.CDLL(os.environ.get("UCM_DECODE_KERNELS", os.path.join(TOP, "build/decode_kernels.so")))
WHY = 256


class EntriesShape(Structure):
    _fields_ = [(name, c_uint32) for name in ("layer_heads", "numbers", "entries", "requests", "misses")]


class Lists(Structure):
    _fields_ = [(name, c_uint32) for name in ("sequences", "lists", "room", "apart")] + [
        ("index", c_void_p), ("count", c_void_p), ("begin", c_void_p), ("end", c_void_p), ("table", c_void_p), ("table_stride", c_uint64),
        ("request", c_void_p)]


class Miss(Structure):
    _fields_ = [("key", c_uint32), ("entry", c_int32), ("request", c_uint32)]


class KvShape(Structure):
    _fields_ = [(name, c_uint32) for name in ("dtype", "tokens", "kv_heads", "head_dim", "v_head_dim", "rope_dim")] + [
        (name, c_uint64) for name in ("k_offset", "k_token_stride", "k_head_stride", "v_offset", "v_token_stride", "v_head_stride")]


class Memory(Structure):
    _fields_ = [("base", c_void_p), ("stride", c_uint64), ("blocks", c_uint32)]


class Piece(Structure):
    _fields_ = [("plan", c_void_p), ("memory", Memory), ("blocks", c_void_p), ("n", c_uint32), ("tail", c_uint32), ("head", c_uint32)]


for name, result, arguments in (
        ("entries", c_void_p, [POINTER(EntriesShape), c_char_p]), ("entries_free", None, [c_void_p]),
        ("entries_enter", c_int, [c_void_p, c_uint32, c_uint32]), ("entries_leave", None, [c_void_p, c_uint32]),
        ("entries_forget", None, [c_void_p, c_uint32]), ("entries_begin", None, [c_void_p]),
        ("entries_resolve", None, [c_void_p, c_uint32, POINTER(Lists)]), ("entries_want", None, [c_void_p, c_uint32, c_uint32, c_uint32]),
        ("entries_entry", c_int32, [c_void_p, c_uint32, c_uint32]), ("entries_take", None, [c_void_p]),
        ("entries_missed", c_uint32, [c_void_p, POINTER(Miss)]),
        ("entries_publish", None, [c_void_p, POINTER(c_uint8)]), ("entries_verify", c_int, [c_void_p, c_char_p]),
        ("attend_plan", c_void_p, [POINTER(KvShape), c_uint32, c_char_p]),
        ("attend", c_int, [POINTER(Piece), c_uint32, c_void_p, c_void_p])):
    function = getattr(LIB, "test_" + name)
    function.restype, function.argtypes = result, arguments


class Entries:
    """ucmclient.decode.Entries."""

    def __init__(self, layer_heads, rows, entries, requests):
        why = ctypes.create_string_buffer(WHY)
        self.rows, self.entries, self.misses = rows, entries, layer_heads * rows
        self._s = LIB.test_entries(byref(EntriesShape(layer_heads, rows, entries, requests, self.misses)), why)
        assert self._s, why.value

    def __del__(self):
        if self._s:
            LIB.test_entries_free(self._s)

    def enter(self, request, floor):
        assert LIB.test_entries_enter(self._s, request, floor) == 0

    def leave(self, request):
        LIB.test_entries_leave(self._s, request)

    def forget(self, row):
        LIB.test_entries_forget(self._s, row)

    def begin(self):
        LIB.test_entries_begin(self._s)

    def resolve(self, layer_head, sequences, apart):
        """The arrays are a GPU's: [sequences][lists][room], and a table of rows for each sequence."""
        if not sequences:
            return
        lists = [of for _, _, of in sequences]
        count = np.array([[len(blocks) for blocks in of] for of in lists], np.uint32)
        index = np.full((*count.shape, max(1, count.max(initial=0))), 0xffffffff, np.uint32)
        table = np.full((len(sequences), max(1, max(len(rows) for _, rows, _ in sequences))), -1, np.int32)
        for sequence, (_, rows, of) in enumerate(sequences):
            table[sequence, : len(rows)] = rows
            for l, blocks in enumerate(of):
                index[sequence, l, : len(blocks)] = blocks
        requests = np.array([request for request, _, _ in sequences], np.uint32)
        LIB.test_entries_resolve(self._s, layer_head, byref(Lists(
            *index.shape, int(apart), index.ctypes.data, count.ctypes.data, None, None, table.ctypes.data, table.shape[1], requests.ctypes.data)))

    def want(self, wanted):
        for layer_head, row, request in wanted:
            LIB.test_entries_want(self._s, layer_head, row, request)

    def take(self):
        LIB.test_entries_take(self._s)
        misses = (Miss * self.misses)()
        n = LIB.test_entries_missed(self._s, misses)
        return [(*divmod(miss.key, self.rows), miss.entry if miss.entry >= 0 else None) for miss in misses[:n]]

    def publish(self, arrived):
        LIB.test_entries_publish(self._s, (c_uint8 * max(1, len(arrived)))(*arrived))
        why = ctypes.create_string_buffer(WHY)
        assert LIB.test_entries_verify(self._s, why) == 0, why.value

    def entry(self, layer_head, row):
        entry = LIB.test_entries_entry(self._s, layer_head, row)
        return entry if entry >= 0 else None


class Plan:
    """Where K and V lie in the blocks of a memory. shape: ucmclient's; at(offset): where a layer's byte lies, from the memory's base."""

    def __init__(self, shape, group, at=lambda offset: offset):
        native = shape.native()
        self.native = KvShape(*(getattr(native, name) for name, _ in KvShape._fields_))
        self.native.k_offset, self.native.v_offset = at(self.native.k_offset), at(self.native.v_offset)
        why = ctypes.create_string_buffer(WHY)
        self.plan = LIB.test_attend_plan(byref(self.native), group, why)  # kept as long as the process
        assert self.plan, why.value


def attend(q, pieces):
    """The attention of a KV head. q is [queries, HEAD]. A piece is (plan, address, stride, blocks
    of that memory, which ones, tokens of the last one, which head)."""
    native, keep = (Piece * len(pieces))(), []
    for to, (plan, address, stride, blocks, which, tail, head) in zip(native, pieces):
        which = np.array(which, np.int32)
        keep.append(which)
        to.plan, to.memory = plan.plan, Memory(address, stride, blocks)
        to.blocks, to.n, to.tail, to.head = which.ctypes.data, len(which), tail, head
    q, out = np.ascontiguousarray(q, np.float32), np.empty((len(q), pieces[0][0].native.v_head_dim), np.float32)
    r = LIB.test_attend(native, len(pieces), q.ctypes.data, out.ctypes.data)
    assert r == 0, os.strerror(-r)
    return out


PLANS = {}


def over(kv, q, position, lists=None, dtype="f32"):
    """The attention of all KV heads, in order, over an array [block][2][BLOCK][KV_HEADS][HEAD] up
    to that position. It is over all blocks, or for each head over a list of them that ends with the
    position's block."""
    blocks, _, tokens, heads, dim = kv.shape
    assert kv.flags.c_contiguous
    if dtype not in PLANS:
        PLANS[dtype] = Plan(Shape(dtype, tokens, heads, dim, v_head_dim=dim), len(q) // heads)
    every, group, tail = list(range(position // tokens + 1)), len(q) // heads, position % tokens + 1
    return [attend(q[head * group: (head + 1) * group],
                   [(PLANS[dtype], kv.ctypes.data, kv.strides[0], blocks, every if lists is None else lists[head], tail, head)])
            for head in range(heads)]
