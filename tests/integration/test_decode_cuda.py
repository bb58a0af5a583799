#!/usr/bin/python3
"""ucmclient.decode.cuda and GpuDecoder without a GPU: checks, with tensors that only say where they lie."""

import ctypes
import sys
import time
import unittest
from unittest import mock

import cuda_paths  # noqa: F401  sets the paths of the others
from fake_source import MISS, OK, Source
from fake_tensor import Fake
from ucmclient import Status, UcmError, sparse
from ucmclient.decode import Rounds, _native_cuda as native, cuda
from ucmclient.decode.gpu import GpuDecoder
from ucmclient.decode.supply import GLANCE
from ucmclient.sparse.cuda import Chosen

TOKENS, HEADS, DIM, GROUP = 16, 2, 64, 4
SHAPE = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM)
LAYER = 2 * TOKENS * HEADS * DIM * 2
HEAD_ENTRY = 2 * TOKENS * DIM * 2
LATENT = sparse.Shape("bf16", TOKENS, 1, 576, rope_dim=64)


class Library:
    """Records the arguments of a call."""

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
        result._obj.attended, result._obj.rounds, result._obj.share = 900, 3, 0.5
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
        return b"a floor of 9 entries"


class Checks(unittest.TestCase):
    def setUp(self):
        self.library = Library()
        for what, name, value in ((native, "library", lambda: self.library), (cuda.Steps, "_uuid", lambda steps: b"u" * 16)):
            patched = mock.patch.object(what, name, value)
            patched.start()
            self.addCleanup(patched.stop)

    def steps(self, pool=None, **more):
        options = {"layers": 3, "q_heads": GROUP * HEADS, "layer_bytes": LAYER, "numbers": 1000, "requests": 4, "sequences": 3, "room": 20,
                   "window": 5}
        return cuda.Steps(pool or Fake("uint8", 50, HEAD_ENTRY), SHAPE, **{**options, **more})

    def arguments(self, sequences=2, room=20, q=None):
        chosen = Chosen(Fake("int32", sequences, HEADS, at=0x1000), Fake("int32", sequences, HEADS, room, at=0x2000))
        return (1, chosen, Fake("int32", sequences, 300, at=0x3000), Fake("int32", sequences, at=0x4000),
                q or Fake("bfloat16", sequences, GROUP * HEADS, DIM, at=0x5000))

    def pages(self, sequences=2, **other):
        known = {"kv": Fake("bfloat16", 30, 2, TOKENS, HEADS, DIM, at=0x6000), "table": Fake("int32", sequences, 300, at=0x7000),
                 "first": Fake("int32", sequences, at=0x8000), "length": Fake("int32", sequences, at=0x9000)}
        return cuda.Pages(**{**known, **other})

    def test_structures_have_the_headers_sizes(self):
        structures = (native.Layout, native.Options, native.Info, native.Layer, native.Result, native.Key, native.Put)
        self.assertEqual([ctypes.sizeof(s) for s in structures], [48, 224, 40, 192, 56, 12, 24])

    def test_options(self):
        steps = self.steps(page_shape=sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM, v_offset=1 << 20))
        o = self.library.options
        self.assertEqual((o.layers, o.q_heads, o.kv_heads, o.head_dim, o.tokens, o.entry, o.entries, o.lists, o.room, o.window, o.block_pool),
                         (3, 8, 2, DIM, TOKENS, native.HEAD, 50, 2, 20, 5, 0x10000))
        self.assertEqual((o.stored.v_offset, o.page.v_offset), (LAYER // 2, 1 << 20))
        self.assertEqual((steps.entries, steps.entry_bytes, steps.splits), (50, HEAD_ENTRY, 3))
        self.assertEqual(self.steps(Fake("uint8", 7, LAYER), whole=True, lists=1).entries, 7)
        self.assertEqual((self.library.options.entry, self.library.options.lists), (native.LAYER, 1))
        self.assertEqual(cuda.Steps.bytes_of(SHAPE, LAYER, 10), 10 * HEAD_ENTRY)
        self.assertEqual((o.dtype, o.kv_dtype), (2, 2))
        small = cuda.Steps(Fake("uint8", 50, HEAD_ENTRY // 2), sparse.Shape("fp8", TOKENS, HEADS, DIM, v_head_dim=DIM), layers=3, q_heads=8,
                           layer_bytes=LAYER // 2, numbers=9, requests=1, sequences=1, room=20, window=5, q_dtype="bf16", v_scale=0.5)
        o = self.library.options
        self.assertEqual((small.entries, small.entry_bytes, o.dtype, o.kv_dtype, o.k_scale, o.v_scale), (50, HEAD_ENTRY // 2, 2, 3, 0, 0.5))
        encoded = self.steps(Fake("uint8", 50, HEAD_ENTRY // 2 + 2 * TOKENS), encoding="fp8")
        self.assertEqual((encoded.entries, self.library.options.encoding), (50, 1))
        self.assertEqual(cuda.Steps.bytes_of(SHAPE, LAYER, 10, encoding="fp8"), 10 * encoded.entry_bytes)
        steps.close(), steps.close()
        self.assertEqual(self.library.closed, 1)
        with self.assertRaisesRegex(UcmError, "closed"):
            steps.begin(stream=0)

    def test_options_refused(self):
        with self.assertRaisesRegex(ValueError, "pool has 100 bytes"):
            self.steps(Fake("uint8", 100))
        with self.assertRaisesRegex(ValueError, "encoding 'q4' of entries: 'fp8' is known"):
            self.steps(encoding="q4")
        with self.assertRaisesRegex(ValueError, "V has 0 channels"):
            cuda._layout(sparse.Shape("bf16", TOKENS, HEADS, DIM), TOKENS, HEADS, DIM, 2)
        with self.assertRaisesRegex(ValueError, "V has 32 channels and K 64: as many are wanted, or a latent"):
            cuda._layout(sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=32), TOKENS, HEADS, DIM, 2)
        with self.assertRaisesRegex(ValueError, "differ in tokens"):
            self.steps(page_shape=sparse.Shape("bf16", 32, HEADS, DIM, v_head_dim=DIM))

    def test_latents(self):
        size = TOKENS * 576 * 2
        steps = cuda.Steps(Fake("uint8", 50, size), LATENT, layers=3, q_heads=128, layer_bytes=size, numbers=9, requests=1, sequences=2,
                           room=20, window=5, scale=0.07)
        o = self.library.options
        self.assertEqual((steps.entries, steps.lists, o.kv_heads, o.q_heads, o.head_dim, o.v_head_dim), (50, 1, 1, 128, 576, 512))
        self.assertEqual((o.stored.k_token_stride, o.stored.v_token_stride, o.page.k_token_stride), (1152, 0, 1152))
        chosen = Chosen(Fake("int32", 2, 1), Fake("int32", 2, 1, 20))
        rest = (Fake("int32", 2, 300), Fake("int32", 2))
        q, out = Fake("bfloat16", 2, 128, 576), Fake("bfloat16", 2, 128, 512, at=0xa000)
        self.assertIs(steps.layer(1, chosen, *rest, q, out=out, stream=0), out)
        self.assertEqual((self.library.calls[-1][0].q_stride, self.library.calls[-1][0].out), (128 * 576, 0xa000))
        with self.assertRaisesRegex(ValueError, "out has shape"):
            steps.layer(1, chosen, *rest, q, out=q, stream=0)
        with self.assertRaisesRegex(ValueError, "q has shape"):
            steps.layer(1, chosen, *rest, out, out=out, stream=0)

    def test_a_layer_says_where_everything_lies(self):
        steps, out = self.steps(), Fake("bfloat16", 2, GROUP * HEADS, DIM, at=0xa000)
        steps.begin(stream=7)
        lse = Fake("float32", 2, GROUP * HEADS, at=0xb000)
        self.assertIs(steps.layer(*self.arguments(), self.pages(), out=out, lse=lse, stream=7), out)
        steps.end(stream=7)
        (begin, (l, stream), end) = self.library.calls
        self.assertEqual((begin, end, stream), (("begin", 7), ("end", 7), 7))
        self.assertEqual((l.layer, l.sequences, l.count, l.index, l.table, l.table_stride, l.request, l.q, l.q_stride, l.out, l.lse),
                         (1, 2, 0x1000, 0x2000, 0x3000, 300, 0x4000, 0x5000, GROUP * HEADS * DIM, 0xa000, 0xb000))
        self.assertEqual((l.pages, l.page_stride, l.page_bound, l.page_table, l.page_table_stride, l.first, l.length),
                         (0x6000, LAYER, 30, 0x7000, 300, 0x8000, 0x9000))
        self.assertEqual(l.page_of, 0)
        steps.layer(*self.arguments(), self.pages(of=Fake("int32", 1000, at=0xc000)), out=out, stream=7)
        self.assertEqual(self.library.calls[-1][0].page_of, 0xc000)
        steps.layer(*self.arguments(), out=out, stream=7)
        self.assertEqual((self.library.calls[-1][0].length, self.library.calls[-1][0].lse), (0, 0))

    def test_rounds(self):
        self.assertEqual((self.steps().rounds, self.library.options.rule), (None, 0))
        steps = self.steps(rounds=Rounds("estimated", 0.9, "estimates", every=6, sink_blocks=2, least=100))
        o = self.library.options
        self.assertEqual((o.rule, o.known, o.rounds, o.every, o.first, o.sink_blocks), (2, 1, 3, 6, 102, 2))
        self.assertAlmostEqual(o.eps, 0.9)
        sizes = {"rows": 1, "q_heads": GROUP * HEADS, "lists": HEADS, "sequences": 2}
        select = mock.Mock(head_scores=0xc000, head_pitch=300, **sizes)
        n, least, out = Fake("int32", 2, at=0xd000), Fake("int32", 2, at=0xe000), Fake("bfloat16", 2, GROUP * HEADS, DIM)
        layer, chosen, *rest = self.arguments()
        scored = Chosen(chosen.counts, chosen.index, Fake("float32", 2, HEADS, 20, at=0xf000))
        report = Fake("int32", 2, HEADS, 4, at=0x1f000)
        steps.layer(layer, scored, *rest, out=out, ranked=cuda.Ranked(select, n, least, report), stream=7)
        l = self.library.calls[-1][0]
        self.assertEqual((l.candidates, l.score, l.head_scores, l.head_pitch, l.least, l.report),
                         (0xd000, 0xf000, 0xc000, 300, 0xe000, 0x1f000))
        steps.layer(layer, scored, *rest, out=out, ranked=cuda.Ranked(select, n), stream=7)
        self.assertEqual((self.library.calls[-1][0].least, self.library.calls[-1][0].report), (0, 0))
        for words, of, ranked in (
            ("`ranked` is wanted", scored, None),
            ("scores of what was chosen", chosen, cuda.Ranked(select, n)),
            ("chosen.scores has shape", Chosen(chosen.counts, chosen.index, Fake("float32", 2, HEADS, 19)), cuda.Ranked(select, n)),
            ("ranked.least has 3", scored, cuda.Ranked(select, n, Fake("int32", 3))),
            ("ranked.report has shape", scored, cuda.Ranked(select, n, None, Fake("int32", 2, HEADS, 3))),
            *((f"ranked.select has .*{name}={size - 1}", scored, cuda.Ranked(mock.Mock(**{**sizes, name: size - 1}), n))
              for name, size in (*sizes.items(), ("rows", 3))),  # the kernels would read beyond its scores
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                steps.layer(layer, of, *rest, out=out, ranked=ranked, stream=7)

    def test_layers_refused(self):
        steps, q = self.steps(), Fake("bfloat16", 2, 6, DIM)
        for words, arguments, pages, more in (
            ("q has shape", self.arguments(q=q), None, {}),
            ("q has shape", self.arguments(4), None, {}),
            ("q is of float16", self.arguments(q=Fake("float16", 2, 8, DIM)), None, {}),
            ("each sequence has its own", self.arguments(q=Fake("bfloat16", 2, 8, DIM, strides=(0, DIM, 1))), None, {}),
            ("chosen.index has shape", self.arguments(room=19), None, {}),
            ("pages.first has 3", self.arguments(), self.pages(first=Fake("int32", 3)), {}),
            ("pages.of has 999", self.arguments(), self.pages(of=Fake("int32", 999)), {}),
            ("pages.kv is of uint8", self.arguments(), self.pages(kv=Fake("uint8", 30, LAYER)), {}),
            ("out has shape", self.arguments(), None, {"out": Fake("bfloat16", 2, 8, 32)}),
            ("lse is of int32", self.arguments(), None, {"lse": Fake("int32", 2, 8)}),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                steps.layer(*arguments, pages, **{"out": Fake("bfloat16", 2, 8, DIM), **more}, stream=0)
        self.assertEqual(self.library.calls, [])

    def test_between_steps(self):
        steps, self.library.unserved = self.steps(), [(1, 0, 7), (2, 1, 8)]
        result = steps.result()
        self.assertEqual((result.step, result.flags, result.unserved), (5, cuda.Flag.UNSERVED | cuda.Flag.NO_ENTRY, 2))
        self.assertEqual((result.attended, result.rounds, result.share), (900, 3, 0.5))
        keys = steps.unserved(stream=0)
        self.assertEqual(keys, [cuda.Key(1, 0, 7), cuda.Key(2, 1, 8)])
        self.assertEqual(steps.unserved(stream=0, first_layer=True), keys[:1])
        self.assertEqual(steps.put([(key, 3, 0x100 * i) for i, key in enumerate(keys, 1)], stream=0), 2)
        steps.forget([4, 5], stream=0)
        self.assertEqual(self.library.calls, [[(1, 0, 7, 3, 0x100), (2, 1, 8, 3, 0x200)], ("forget", [4, 5])])
        with self.assertRaisesRegex(UcmError, "a floor of 9 entries"):
            steps.enter(0, 9, stream=0)
        with self.assertRaisesRegex(ValueError, "1 places for 2 numbers"):
            steps.places([1, 2], cuda.Referenced((native.Place * 1)(), 0, 0, 0, 0), None, stream=0)


class FakeSteps:
    """What a GpuDecoder needs of Steps; records the calls."""

    layers, numbers, requests, device = 2, 6, 2, "cuda:0"

    def __init__(self):
        self.calls, self.flags, self.missed, self.keys, self.lost = [], 0, 0, [], 0
        #: Slabs of the mapping that the driver does not know, and the mappings for which one was registered.
        self.unregistered, self.registered = 0, []

    def register_mapping(self, mapping):
        self.registered.append(mapping)
        self.unregistered = max(0, self.unregistered - 1)
        return self.unregistered

    def __getattr__(self, name):
        if name not in ("enter", "leave", "forget", "leave_mapping", "places"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, *arguments))

    def result(self):
        return cuda.Result(1, cuda.Flag(self.flags), len(self.keys), self.missed, 0, 0)

    def unserved(self, *, first_layer=False):
        return [key for key in self.keys if not first_layer or key.layer == min(self.keys).layer]

    def put(self, items):
        self.calls.append(("put", items))
        return len(items)

    def update_mapping(self):
        return self.lost


class Decoders(unittest.TestCase):
    """GpuDecoder without a GPU and a daemon."""

    def decoder(self, *answers, **more):
        fake = mock.Mock(uint8="uint8")
        fake.zeros = fake.empty = lambda shape, **_: Fake("uint8", *shape, at=0x100000)
        self.steps, self.source, self.built = FakeSteps(), Source(*answers), []
        with mock.patch.dict(sys.modules, torch=fake):
            decoder = GpuDecoder(self.source, sparse.mean(SHAPE), self.steps, layer_bytes=0x100, landing=2, mapping=False,
                                 register=lambda ns, *_: ns.register(), build=lambda *what: self.built.append(what),
                                 **{"gather_timeout": 5.0, **more})
        return decoder

    def two(self, decoder):
        """Two sequences of three blocks each, of which they share the first."""
        a, b = decoder.open("a", 7), decoder.open("b")
        decoder.extend(a, [bytes([i]) * 32 for i in (0, 1, 2)], lambda i: 10 + i)
        decoder.extend(b, [bytes([i]) * 32 for i in (0, 3, 4)], lambda i: 20 + i)
        return a, b

    def test_rows_and_summaries(self):
        decoder = self.decoder([OK])
        a, b = self.two(decoder)
        self.assertEqual((a.rows, b.rows, a.number, b.number), ([0, 1, 2], [0, 3, 4], 1, 0))
        self.assertEqual(self.built, [([10, 11, 12], [0, 1, 2]), ([21, 22], [3, 4])])
        self.assertEqual(self.steps.calls, [("enter", 1, 7), ("enter", 0, 0)])
        decoder.close("a")
        c = decoder.open("c")
        decoder.extend(c, [bytes([i]) * 32 for i in (5, 6)], lambda i: 30 + i)
        self.assertEqual(self.steps.calls[2:], [("leave", 1), ("enter", 1, 0), ("forget", [1])], "5 was free, 1 was taken")
        self.assertEqual((decoder.counts.computed, self.built[-1]), (7, ([30, 31], [5, 1])))

    def test_what_is_served(self):
        decoder = self.decoder([OK] * 2)
        self.two(decoder)
        self.steps.keys = [cuda.Key(0, 0, 0), cuda.Key(0, 1, 0), cuda.Key(0, 0, 3), cuda.Key(1, 1, 2)]
        self.steps.flags, self.steps.missed = cuda.Flag.UNSERVED | cuda.Flag.NO_ENTRY, 6
        self.assertFalse(decoder.counted())
        self.assertEqual(decoder.serve(), set())
        self.assertEqual(self.source.asked, [[(0, 0, 0), (1, 0, 1)], [(0, 1, 0)]], "layers of blocks, two at a time")
        puts = [items for name, *items in self.steps.calls if name == "put"]
        self.assertEqual(puts, [[[(cuda.Key(0, 0, 0), 1, 0x100000), (cuda.Key(0, 1, 0), 1, 0x100000), (cuda.Key(0, 0, 3), 0, 0x100100)]],
                                [[(cuda.Key(1, 1, 2), 1, 0x100000)]]])
        self.steps.flags, self.steps.keys, self.steps.missed = 0, [], 6 + 4
        self.assertTrue(decoder.counted())
        counts = decoder.counts
        self.assertEqual((counts.misses, counts.mapped, counts.gathered, counts.failed), (6, 2, 4, 0))

    def test_much_that_is_missing_is_served_by_layer(self):
        decoder = self.decoder([OK], [OK])
        self.two(decoder)
        self.steps.keys, self.steps.flags = [cuda.Key(0, 0, 0), cuda.Key(0, 1, 0), cuda.Key(1, 0, 0), cuda.Key(1, 1, 2)], cuda.Flag.UNSERVED
        with mock.patch("ucmclient.decode.gpu.AT_ONCE", 1):
            decoder.serve()
            self.steps.keys = self.steps.keys[2:3]
            decoder.serve()
        self.assertEqual(self.source.asked, [[(0, 0, 0)], [(0, 1, 0)]])

    def test_who_loses(self):
        for answers, lost in ((([MISS, OK], [OK]), {"a", "b"}), (([OK, MISS], [OK]), {"b"}), (([OK, OK], [MISS]), {"a"})):
            decoder = self.decoder(*answers)
            self.two(decoder)
            self.steps.keys, self.steps.flags = [cuda.Key(0, 0, 0), cuda.Key(0, 0, 3), cuda.Key(1, 1, 2)], cuda.Flag.UNSERVED
            self.assertEqual({sequence.name for sequence in decoder.serve()}, lost)

    def test_one_deadline_for_all(self):
        decoder = self.decoder(None, gather_timeout=0.1)
        self.two(decoder)
        self.steps.keys, self.steps.flags = [cuda.Key(0, 0, row) for row in range(5)], cuda.Flag.UNSERVED
        began = time.monotonic()
        self.assertEqual(len(decoder.serve()), 2)
        self.assertLess(time.monotonic() - began, 5)
        self.assertEqual({len(items) for items in self.source.asked}, {2}, "the second batch was not asked for")
        self.assertNotIn("put", [name for name, *_ in self.steps.calls])

    def test_too_few_entries(self):
        decoder = self.decoder([OK] * 2)
        both = set(self.two(decoder))
        self.steps.keys, self.steps.flags = [cuda.Key(0, 0, 0)], cuda.Flag.UNSERVED | cuda.Flag.FULL
        self.assertEqual((decoder.serve(), decoder.crowded), (set(), set()))
        self.assertEqual((decoder.serve(), decoder.crowded), (set(), both))
        self.steps.flags = 0
        self.assertTrue(decoder.counted())
        self.steps.flags = cuda.Flag.UNSERVED | cuda.Flag.FULL
        self.assertEqual((decoder.serve(), decoder.crowded), (set(), set()), "another step")

    def test_rows_are_forgotten_until_the_entries_know_it(self):
        decoder = self.decoder([OK])
        self.two(decoder)
        decoder.close("a")
        forget, self.steps.forget = self.steps.forget, mock.Mock(side_effect=UcmError(Status.DEVICE, "busy"))
        c = decoder.open("c")
        with self.assertRaises(UcmError):
            decoder.extend(c, [bytes([i]) * 32 for i in (5, 6)], lambda i: 30 + i)
        self.steps.forget = forget
        decoder.extend(c, [], lambda i: None)
        self.assertEqual(self.steps.calls[-1], ("forget", [1]))

    def test_a_floor_that_is_refused_opens_nothing(self):
        decoder = self.decoder([OK])
        enter, self.steps.enter = self.steps.enter, mock.Mock(side_effect=UcmError(Status.NO_MEMORY, "floors"))
        for _ in range(3):
            with self.assertRaises(UcmError):
                decoder.open("a", 90)
        self.assertEqual(decoder.sequences, {})
        self.steps.enter = enter
        self.two(decoder)

    def test_what_is_registered_is_taken_back(self):
        decoder = self.decoder([OK])
        regions = []

        def register(*_, **__):
            regions.append(mock.Mock(closed=False, **{"client.closed": False}))
            return regions[-1]
        self.source.ns.register = register
        for summaries in (lambda: None, register):
            self.source.summaries = mock.Mock(register=summaries)
            decoder.update()
        self.assertEqual([region.unregister.call_count for region in regions], [1, 0, 0])
        regions[0].closed = True
        decoder.end()
        self.assertEqual([region.unregister.call_count for region in regions], [1, 1, 1])

    def mapped(self):
        """A decoder with a sequence of three blocks in a mapping. The fourth block is about to be
        there."""
        decoder = self.decoder([OK])
        a, _ = self.two(decoder)
        decoder._connected()
        referenced = mock.Mock(moved=0, read=0)
        decoder._mapping, a.registered, a.kept = mock.Mock(**{"client.closed": False, "ref.return_value": referenced}), mock.Mock(), 3
        self.source.ask = self.asked
        return decoder, a

    def asked(self, call, *arguments, **named):
        try:
            return call(*arguments, **named)
        except UcmError:
            return None

    def test_a_mapping_that_the_driver_refuses(self):
        decoder, a = self.mapped()
        mapping, self.steps.places = decoder._mapping, mock.Mock(side_effect=UcmError(Status.DEVICE, "not supported"))
        decoder.keep(a, a.keys)
        self.assertEqual(self.steps.calls[-1], ("leave_mapping",))
        mapping.close.assert_called_once_with()
        decoder.keep(a, a.keys)
        self.steps.places.assert_called_once()
        mapping.ref.assert_called_once()

    def test_a_step_takes_of_the_mapping_what_is_there(self):
        """With `beside` set, extend() of blocks with loaded summaries waits for nothing."""
        decoder, a = self.mapped()
        decoder._beside, a.registered.__len__ = True, lambda _: 3
        a.registered.append.return_value = mock.Mock(blocks=4)
        places = mock.MagicMock(placed=3, missing=0, moved=1, read=0, __len__=lambda _: 4, __iter__=lambda _: iter([1, 1, 1, None]))
        decoder._mapping.ref.return_value = places
        decoder._load_some = lambda wanted: 0
        decoder.extend(a, [bytes([9]) * 32], lambda block: None)
        decoder._mapping.ref.assert_called_once_with(a.registered, 0, 4, priority=7, daemon_timeout=GLANCE, timeout=5.0)
        self.assertEqual((self.steps.calls[-1][0], self.steps.calls[-1][1], a.referenced, a.below), ("places", [0, 1, 2, 5], 3, False))

    def test_a_sequence_that_another_thread_brought(self):
        """The mapping serves a new sequence, but not after a reconnect."""
        decoder, _ = self.mapped()
        decoder.close("b")
        connection_epoch = decoder.source.ns.client.connection_epoch
        for of, kept in ((connection_epoch, 2), (connection_epoch - 1, 0)):
            c, registered = decoder.open("c"), mock.MagicMock(client=decoder.source.ns.client, __len__=lambda _: 2)
            decoder.adopt(c, registered, of)
            self.assertEqual((c.kept, c.registered is registered, registered.close.call_count), (kept, kept > 0, kept == 0))
            decoder.close("c")
        self.steps.unregistered = 3
        self.assertIs(decoder.ref_beside(registered, 0, 2, 0.5), decoder._mapping.ref.return_value)
        self.assertEqual(self.steps.registered, [decoder._mapping] * 3, "one slab a call: a step may wait for it")
        self.assertEqual(decoder._mapping.ref.call_args, mock.call(registered, 0, 2, priority=7, daemon_timeout=0.5, timeout=5.0))
        decoder._mapping = None
        self.assertIsNone(decoder.ref_beside(registered, 0, 2, 0.5))

    def test_an_update_asks_for_what_is_new(self):
        decoder, a = self.mapped()
        b, mapping, decoder.source.summaries = decoder.sequences["b"], decoder._mapping, mock.Mock()
        a.asked, b.registered = 3, mock.Mock(__len__=lambda _: 0, **{"append.return_value": mock.Mock(blocks=2)})
        for _ in range(3):
            decoder.update()
        b.registered.append.assert_called_once()
        self.assertEqual([call.args[1:] for call in mapping.ref.call_args_list], [(0, 3), (0, 2)])
        decoder._ref_again_at = time.monotonic()
        decoder.update()
        self.assertEqual([call.args[1:] for call in mapping.ref.call_args_list[2:]], [(0, 3), (0, 2)], "it had left the mapping")
        b.forsake()
        with mock.patch("ucmclient.decode.supply.BlockSequence", lambda *_, **__: a.registered):
            a.registered.append.return_value, a.registered.__len__ = mock.Mock(blocks=0), lambda _: 0
            decoder.update()
        a.registered.append.assert_called_once()

    def test_a_silent_daemon_gets_its_mapping_back(self):
        decoder, _ = self.mapped()
        self.source.ns, self.steps.update_mapping = None, mock.Mock(side_effect=[2, UcmError(Status.DEVICE, "busy")])
        decoder.update()
        self.assertGreater(decoder._ref_again_at, 0)
        decoder.update()
        self.assertEqual(self.steps.update_mapping.call_count, 2)

    def test_mistakes(self):
        decoder = self.decoder([OK])
        for flags in (cuda.Flag.UNSERVED | cuda.Flag.STRAY, cuda.Flag.NO_PAGE):
            self.steps.flags = flags
            with self.assertRaisesRegex(RuntimeError, "lists or pages are wrong"):
                decoder.counted()

    def test_a_copy_that_took_too_long(self):
        decoder = self.decoder([OK])
        for flags in (cuda.Flag.NO_ENTRY, 0, cuda.Flag.NO_ENTRY):
            self.steps.flags = flags
            self.assertEqual(decoder.counted(), not flags)
        with self.assertRaisesRegex(RuntimeError, "lists or pages are wrong"):
            decoder.counted()


if __name__ == "__main__":
    unittest.main()
