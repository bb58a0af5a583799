#!/usr/bin/env python3
"""ucmclient.decode.cuda: its checks with tensors that only say where they lie."""

import ctypes
import os
import pathlib
import sys
import unittest
from unittest import mock

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "client/python"))
if (TOP / "build/libucmclient.so").exists():
    os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))

from fake_tensor import Fake  # noqa: E402
from ucmclient import Status, UcmError, sparse  # noqa: E402
from ucmclient.decode import _native_cuda as native, cuda  # noqa: E402
from ucmclient.sparse.cuda import Chosen  # noqa: E402

TOKENS, HEADS, DIM, GROUP = 16, 2, 64, 4
SHAPE = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM)
SHARD = 2 * TOKENS * HEADS * DIM * 2
HEAD_SLOT = 2 * TOKENS * DIM * 2


class Library:
    """Takes what a call was given."""

    def __init__(self):
        self.calls, self.closed, self.unserved = [], 0, []

    def ucm_cuda_decode_open(self, uuid, options, out):
        self.options = native.Options.from_buffer_copy(options._obj)
        out._obj.value = 1
        return 0

    def ucm_cuda_decode_info(self, handle, info):
        info._obj.splits, info._obj.split_tiles = 3, 8
        return 0

    def ucm_cuda_decode_close(self, handle):
        self.closed += 1

    def ucm_cuda_decode_begin(self, handle, stream):
        self.calls.append(("begin", stream))
        return 0

    def ucm_cuda_decode_end(self, handle, stream):
        self.calls.append(("end", stream))
        return 0

    def ucm_cuda_decode_layer(self, handle, layer, stream):
        self.calls.append((native.Layer.from_buffer_copy(layer._obj), stream))
        return 0

    def ucm_cuda_decode_result(self, handle, result):
        result._obj.step, result._obj.flags, result._obj.unserved = 5, 257, len(self.unserved)
        return 0

    def ucm_cuda_decode_unserved(self, handle, out, room, n, stream):
        for i, key in enumerate(self.unserved[:room]):
            out[i] = native.Key(*key)
        n._obj.value = len(self.unserved)
        return 0

    def ucm_cuda_decode_put(self, handle, items, n, placed, stream):
        self.calls.append([(i.key.layer, i.key.head, i.key.number, i.request, i.at) for i in items[:n]])
        placed._obj.value = n
        return 0

    def ucm_cuda_decode_forget(self, handle, numbers, n, stream):
        self.calls.append(("forget", ctypes.cast(numbers, ctypes.POINTER(ctypes.c_uint32))[:n]))
        return 0

    def ucm_cuda_decode_enter(self, handle, request, floor, stream):
        return -Status.NO_MEMORY

    def ucm_cuda_errmsg(self):
        return b"a floor of 9 slots"


class Checks(unittest.TestCase):
    def setUp(self):
        self.library = Library()
        for what, name, value in ((native, "library", lambda: self.library), (cuda.Steps, "_uuid", lambda steps: b"u" * 16)):
            patched = mock.patch.object(what, name, value)
            patched.start()
            self.addCleanup(patched.stop)

    def steps(self, pool=None, **more):
        options = {"layers": 3, "q_heads": GROUP * HEADS, "shard_bytes": SHARD, "numbers": 1000, "requests": 4, "chains": 3, "room": 20,
                   "window": 5}
        return cuda.Steps(pool or Fake("uint8", 50, HEAD_SLOT), SHAPE, **{**options, **more})

    def arguments(self, chains=2, room=20, q=None):
        chosen = Chosen(Fake("int32", chains, HEADS, at=0x1000), Fake("int32", chains, HEADS, room, at=0x2000))
        return (1, chosen, Fake("int32", chains, 300, at=0x3000), Fake("int32", chains, at=0x4000),
                q or Fake("bfloat16", chains, GROUP * HEADS, DIM, at=0x5000))

    def pages(self, chains=2, **other):
        known = {"kv": Fake("bfloat16", 30, 2, TOKENS, HEADS, DIM, at=0x6000), "table": Fake("int32", chains, 300, at=0x7000),
                 "first": Fake("int32", chains, at=0x8000), "length": Fake("int32", chains, at=0x9000)}
        return cuda.Pages(**{**known, **other})

    def test_structures_have_the_headers_sizes(self):
        structures = (native.Layout, native.Options, native.Info, native.Layer, native.Result, native.Key, native.Put)
        self.assertEqual([ctypes.sizeof(s) for s in structures], [48, 176, 40, 136, 40, 12, 24])

    def test_options(self):
        steps = self.steps(page_shape=sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM, v_offset=1 << 20))
        o = self.library.options
        self.assertEqual((o.layers, o.q_heads, o.kv_heads, o.head_dim, o.tokens, o.slot, o.slots, o.lists, o.room, o.window, o.pool),
                         (3, 8, 2, DIM, TOKENS, native.HEAD, 50, 2, 20, 5, 0x10000))
        self.assertEqual((o.shard.v_offset, o.page.v_offset), (SHARD // 2, 1 << 20))
        self.assertEqual((steps.slots, steps.slot_bytes, steps.splits), (50, HEAD_SLOT, 3))
        self.assertEqual(self.steps(Fake("uint8", 7, SHARD), whole=True, lists=1).slots, 7)
        self.assertEqual((self.library.options.slot, self.library.options.lists), (native.LAYER, 1))
        self.assertEqual(cuda.Steps.bytes_of(SHAPE, SHARD, 10), 10 * HEAD_SLOT)
        steps.close(), steps.close()
        self.assertEqual(self.library.closed, 1)
        with self.assertRaisesRegex(UcmError, "closed"):
            steps.begin(stream=0)

    def test_options_refused(self):
        with self.assertRaisesRegex(ValueError, "pool has 100 bytes"):
            self.steps(Fake("uint8", 100))
        with self.assertRaisesRegex(ValueError, "V has 0 channels"):
            cuda._layout(sparse.Shape("bf16", TOKENS, HEADS, DIM), TOKENS, HEADS, DIM, 2)
        with self.assertRaisesRegex(ValueError, "differ in tokens"):
            self.steps(page_shape=sparse.Shape("bf16", 32, HEADS, DIM, v_head_dim=DIM))

    def test_a_layer_says_where_everything_lies(self):
        steps, out = self.steps(), Fake("bfloat16", 2, GROUP * HEADS, DIM, at=0xa000)
        steps.begin(stream=7)
        lse = Fake("float32", 2, GROUP * HEADS, at=0xb000)
        self.assertIs(steps.layer(*self.arguments(), self.pages(), out=out, lse=lse, stream=7), out)
        steps.end(stream=7)
        (begin, (l, stream), end) = self.library.calls
        self.assertEqual((begin, end, stream), (("begin", 7), ("end", 7), 7))
        self.assertEqual((l.layer, l.chains, l.count, l.index, l.table, l.table_stride, l.request, l.q, l.q_stride, l.out, l.lse),
                         (1, 2, 0x1000, 0x2000, 0x3000, 300, 0x4000, 0x5000, GROUP * HEADS * DIM, 0xa000, 0xb000))
        self.assertEqual((l.pages, l.page_stride, l.page_bound, l.page_table, l.page_table_stride, l.first, l.length),
                         (0x6000, SHARD, 30, 0x7000, 300, 0x8000, 0x9000))
        steps.layer(*self.arguments(), out=out, stream=7)
        self.assertEqual((self.library.calls[-1][0].length, self.library.calls[-1][0].lse), (0, 0))

    def test_layers_refused(self):
        steps, q = self.steps(), Fake("bfloat16", 2, 6, DIM)
        for words, arguments, pages, more in (
            ("q has shape", self.arguments(q=q), None, {}),
            ("q has shape", self.arguments(4), None, {}),
            ("q is of float16", self.arguments(q=Fake("float16", 2, 8, DIM)), None, {}),
            ("each chain has its own", self.arguments(q=Fake("bfloat16", 2, 8, DIM, strides=(0, DIM, 1))), None, {}),
            ("chosen.index has shape", self.arguments(room=19), None, {}),
            ("pages.first has 3", self.arguments(), self.pages(first=Fake("int32", 3)), {}),
            ("pages.kv is of uint8", self.arguments(), self.pages(kv=Fake("uint8", 30, SHARD)), {}),
            ("out has shape", self.arguments(), None, {"out": Fake("bfloat16", 2, 8, 32)}),
            ("lse is of int32", self.arguments(), None, {"lse": Fake("int32", 2, 8)}),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                steps.layer(*arguments, pages, **{"out": Fake("bfloat16", 2, 8, DIM), **more}, stream=0)
        self.assertEqual(self.library.calls, [])

    def test_between_steps(self):
        steps, self.library.unserved = self.steps(), [(1, 0, 7), (2, 1, 8)]
        result = steps.result()
        self.assertEqual((result.step, result.flags, result.unserved), (5, cuda.Flag.UNSERVED | cuda.Flag.NO_SLOT, 2))
        keys = steps.unserved(stream=0)
        self.assertEqual(keys, [cuda.Key(1, 0, 7), cuda.Key(2, 1, 8)])
        self.assertEqual(steps.put([(key, 3, 0x100 * i) for i, key in enumerate(keys, 1)], stream=0), 2)
        steps.forget([4, 5], stream=0)
        self.assertEqual(self.library.calls, [[(1, 0, 7, 3, 0x100), (2, 1, 8, 3, 0x200)], ("forget", [4, 5])])
        with self.assertRaisesRegex(UcmError, "a floor of 9 slots"):
            steps.enter(0, 9, stream=0)
        with self.assertRaisesRegex(ValueError, "1 places for 2 numbers"):
            steps.places([1, 2], cuda.Pinned((native.Place * 1)(), 0, 0, 0, 0), None, stream=0)


if __name__ == "__main__":
    unittest.main()
