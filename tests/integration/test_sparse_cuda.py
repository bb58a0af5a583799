#!/usr/bin/python3
"""ucmclient.sparse.cuda: its checks, with tensors that only say where they lie. Where torch has a
GPU: its summaries and choices against those of the CPU, a captured graph, and the example over a
real daemon."""

import ctypes
import unittest
from types import SimpleNamespace
from unittest import mock

from cuda_paths import GPU, torch  # sets the paths of the others
from fake_tensor import Device, Fake
from ucmclient import Client, Status, UcmError, sparse
from ucmclient.sparse import _native_cuda as native, cuda

TOKENS, HEADS, DIM, BLOCKS = 16, 2, 64, 300


class Library:
    """Records the arguments of a launch."""

    def __init__(self):
        self.launches, self.closed = [], 0

    def opened(self, *arguments):
        arguments[-1]._obj.value = 1
        return 0

    ucm_cuda_summary_open = ucm_cuda_select_open = opened

    def closed_(self, handle):
        self.closed += 1

    ucm_cuda_summary_close = ucm_cuda_select_close = closed_

    def ucm_cuda_select_info(self, handle, info):
        info._obj.lists, info._obj.room, info._obj.workspace_bytes = HEADS, 7, 1 << 20
        return 0

    def launched(self, handle, what, stream):
        copy = type(what._obj).from_buffer_copy(what._obj)
        if isinstance(copy, native.SummaryBuild):
            copy.first = [(x.k, x.v, x.out) for x in copy.layers[: copy.n_layers]]
        self.launches.append((copy, stream))
        return 0

    ucm_cuda_summary = ucm_cuda_select = launched

    def ucm_cuda_errmsg(self):
        return b"no"


class Checks(unittest.TestCase):
    """Without a GPU."""

    def setUp(self):
        self.library = Library()
        for what, value in ((native, "library"), (cuda, "gpu_uuid")):
            patched = mock.patch.object(what, value, (lambda: self.library) if what is native else lambda n: b"u" * 16)
            patched.start()
            self.addCleanup(patched.stop)
        self.summary = sparse.mean(sparse.Shape("bf16", TOKENS, HEADS, DIM))
        self.gpu = Fake("uint8", 1, 1)

    def refused(self, words, call, *arguments, error=ValueError, **more):
        with self.assertRaisesRegex(error, words):
            call(*arguments, **more)
        self.assertEqual(self.library.launches, [])

    def kv(self, layers=3, dtype="bfloat16", blocks=10):
        return Fake(dtype, layers, blocks, 2, TOKENS, HEADS, DIM, at=0x100000)

    def summaries(self, layers=3, blocks=20, pad=0):
        return Fake("uint8", layers, blocks, self.summary.bytes + pad, at=0x900000)

    def test_a_build_says_where_everything_lies(self):
        build = cuda.Builder(self.summary, self.gpu)
        build(self.kv(), self.summaries(pad=4), Fake("int32", 5, at=0x42), Fake("int32", 5, at=0x43), thread_blocks=9, stream=77)
        (b, stream), = self.library.launches
        layer_bytes, out = 2 * TOKENS * HEADS * DIM * 2, self.summary.bytes + 4
        self.assertEqual((b.n_layers, b.n_blocks, b.numbers, b.out_numbers, b.stride, b.out_stride, b.bound, b.out_bound,
                          b.thread_blocks, stream), (3, 5, 0x42, 0x43, layer_bytes, out, 10, 20, 9, 77))
        self.assertEqual(b.first, [(0x100000 + i * 10 * layer_bytes, 0, 0x900000 + i * 20 * out) for i in range(3)])
        build.close()
        build.close()
        self.assertEqual(self.library.closed, 1)
        with self.assertRaisesRegex(UcmError, "closed"):
            build(self.kv(), self.summaries(), Fake("int32", 5), stream=0)

    def test_more_layers_than_a_launch_takes(self):
        cuda.Builder(self.summary, self.gpu)(self.kv(130), self.summaries(130), Fake("int32", 5), stream=0)
        self.assertEqual([b.n_layers for b, _ in self.library.launches], [128, 2])

    def test_k_and_v_apart(self):
        shape = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM, v_offset=0)
        self.summary = sparse.stats(shape)
        build = cuda.Builder(self.summary, self.gpu)
        k, v = (Fake("bfloat16", 10, TOKENS, HEADS, DIM, at=at) for at in (0x1000, 0x2000))
        build([(k, v)], self.summaries(1), Fake("int32", 5), stream=0)
        self.assertEqual(self.library.launches.pop()[0].first, [(0x1000, 0x2000, 0x900000)])
        self.refused("K and V", build, [(k, Fake("bfloat16", 9, TOKENS, HEADS, DIM))], self.summaries(1), Fake("int32", 5), stream=0)

    def test_builds_refused(self):
        build, n, good, out = cuda.Builder(self.summary, self.gpu), Fake("int32", 5), self.kv(), self.summaries()
        self.refused("kv has 3 layers and summaries 2", build, good, self.summaries(2), n, stream=0)
        self.refused("kv has 0 layers", build, [], [], n, stream=0)
        self.refused("is of float32", build, self.kv(dtype="float32"), out, n, stream=0)
        self.refused("a block has .* reads", build, Fake("bfloat16", 3, 10, TOKENS, HEADS, DIM // 2), out, n, stream=0)
        self.refused("a summary has", build, good, Fake("uint8", 3, 20, 8), n, stream=0)
        far = Fake("bfloat16", 10, 2, TOKENS, HEADS, DIM, device=("cpu", 0))
        self.refused("lies on cpu:0", build, [far], [out[0]], n, stream=0)
        self.refused("this Builder is for cuda:0", build, good, out, Fake("int32", 5, device=("cuda", 1)), stream=0)
        self.refused("int32 is wanted", build, good, out, Fake("int64", 5), stream=0)
        self.refused("one contiguous dimension", build, good, out, Fake("int32", 5, strides=(2,)), stream=0)
        self.refused("out_blocks 4", build, good, out, n, Fake("int32", 4), stream=0)
        self.refused("layer 1 differs", build, [good[0], self.kv(blocks=9)[0]], [out[0], out[1]], n, stream=0)
        self.refused("a list", build, good, out, [1, 2], error=TypeError, stream=0)
        if torch is None:
            self.refused("stream must be named", build, good, out, n)

    def selector(self, **more):
        return cuda.Selector(self.summary, self.gpu, 4, 100, sequences=3, **more)

    def arguments(self, sequences=2, q=None):
        return (Fake("uint8", 50, self.summary.bytes, at=0x5000), Fake("int32", sequences, 128, at=0x6000),
                Fake("int32", sequences, at=0x7000), q or Fake("bfloat16", sequences, 4, DIM, at=0x8000))

    def test_a_selection_says_where_everything_lies(self):
        select = self.selector()
        chosen = select(*self.arguments(), stream=SimpleNamespace(cuda_stream=5))
        (s, stream), = self.library.launches
        self.assertEqual((s.summaries, s.stride, s.bound, s.sequences, s.table, s.table_stride, s.n_blocks, s.q, s.q_stride, s.count,
                          s.index, s.score, stream),
                         (0x5000, self.summary.bytes, 50, 2, 0x6000, 128, 0x7000, 0x8000, 4 * DIM, 0x990000, 0x990000, 0, 5))
        self.assertEqual((chosen.counts.shape, chosen.index.shape), ((2, HEADS), (2, HEADS, 7)))
        self.assertIs(select(*self.arguments(), out=chosen, stream=0), chosen)
        select(*self.arguments(), scores=Fake("float32", 2, HEADS, 7, at=0xb000), stream=0)
        self.assertEqual((self.library.launches[-1][0].score, self.library.launches[-1][0].most), (0xb000, 0))
        select(*self.arguments(), most=Fake("int32", 2, at=0xc000), stream=0)
        self.assertEqual(self.library.launches[-1][0].most, 0xc000)

    def test_selections_refused(self):
        select = self.selector()
        summaries, table, n, q = self.arguments()
        self.refused("bytes a block", select, Fake("uint8", 50, 8), table, n, q, stream=0)
        self.refused(r"\[sequences\]\[100 or more\]", select, summaries, Fake("int32", 2, 99), n, q, stream=0)
        self.refused("2 dimensions", select, summaries, Fake("int32", 128), n, q, stream=0)
        self.refused("for 1 to 3", select, *self.arguments(4), stream=0)
        self.refused("for 2 sequences", select, summaries, table, Fake("int32", 3), q, stream=0)
        self.refused("q is of float16", select, *self.arguments(q=Fake("float16", 2, 4, DIM)), stream=0)
        self.refused("q has shape", select, *self.arguments(q=Fake("bfloat16", 2, 8, DIM)), stream=0)
        self.refused("contiguous", select, *self.arguments(q=Fake("bfloat16", 2, 4, DIM, strides=(4 * DIM, 1, 4))), stream=0)
        self.refused("most has 3 numbers for 2", select, *self.arguments(), most=Fake("int32", 3), stream=0)
        wrong = cuda.Chosen(Fake("int32", 2, HEADS), Fake("int32", 2, HEADS, 6))
        self.refused("out.index has shape", select, *self.arguments(), out=wrong, stream=0)
        self.refused("scores is of int32", select, *self.arguments(), scores=Fake("int32", 2, HEADS, 7), stream=0)

    def test_handles_refused(self):
        self.refused("gpu is cpu:0", cuda.Builder, self.summary, Fake("uint8", 1, device=("cpu", 0)))
        self.refused("with a number", cuda.Builder, self.summary, Device("cuda", None))
        self.refused("sequences is 0", cuda.Selector, self.summary, self.gpu, 4, 100, sequences=0)
        self.refused("reduce is", cuda.Selector, self.summary, self.gpu, 4, 100, score=sparse.Score(reduce="least"))
        self.refused("dtype", cuda.Selector, self.summary, self.gpu, 4, 100, q_dtype="int8")

    def test_a_refusal_of_the_library_has_its_sentence(self):
        build = cuda.Builder(self.summary, self.gpu)
        self.library.ucm_cuda_summary = lambda *_: -1
        with self.assertRaisesRegex(UcmError, "no") as caught:
            build(self.kv(), self.summaries(), Fake("int32", 5), stream=0)
        self.assertEqual(caught.exception.status, Status.INVALID)

    def test_structures_have_the_headers_sizes(self):
        self.assertEqual([ctypes.sizeof(s) for s in (native.SummaryLayer, native.SummaryBuild, native.SelectInfo, native.SelectLayer)],
                         [24, 64, 32, 96])


def methods(shape):
    return (sparse.mean(shape), sparse.submean(shape, run=4), sparse.box(shape), sparse.hash(shape, bits=128, seed=3),
            sparse.stats(shape), sparse.tokens(shape, chosen=2), sparse.tokens(shape, chosen=3, rest=True))


@unittest.skipUnless(GPU, "there is no torch with a GPU")
class OnGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.manual_seed(1)
        cls.kv = torch.randn(3, BLOCKS, 2, TOKENS, HEADS, DIM).bfloat16()
        cls.q = torch.randn(2, 4 * HEADS, DIM).bfloat16()
        cls.shape = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM)

    def built(self, summary, stream=None):
        """Summaries of all layers, block b at place BLOCKS - 1 - b."""
        out = torch.zeros(3, BLOCKS, summary.bytes + 12, dtype=torch.uint8, device="cuda")
        blocks = torch.arange(BLOCKS, dtype=torch.int32, device="cuda")
        places = blocks.flip(0).contiguous()
        kv = self.kv.cuda()
        with cuda.Builder(summary, out) as build:
            build(kv, out, blocks, places)
            torch.cuda.synchronize()
        return out, places

    def test_summaries_and_choices_are_those_of_the_cpu(self):
        for summary in methods(self.shape):
            for choose in (sparse.TopK(sparse_ratio=0.1), sparse.Mass(eps=0.5, limit=40)):
                with self.subTest(summary.method, choose=choose):
                    out, places = self.built(summary)
                    want = [summary.compute(self.kv[layer]) for layer in range(3)]
                    for layer in range(3):
                        got = bytes(out[layer, :, : summary.bytes].flip(0).contiguous().cpu().flatten().tolist())
                        self.assertEqual(got, bytes(want[layer].data.cast("B")))
                    lengths = torch.tensor([BLOCKS, 123], dtype=torch.int32, device="cuda")
                    table = places[None].expand(2, BLOCKS).contiguous()
                    with cuda.Selector(summary, out, 4 * HEADS, BLOCKS, sequences=2, choose=choose) as select:
                        scores = torch.zeros(2, select.lists, select.room, device="cuda")
                        chosen = select(out[1], table, lengths, self.q.cuda(), scores=scores)
                        lists = chosen.lists()
                    for sequence, n in enumerate((BLOCKS, 123)):
                        one = sparse.Summaries(summary, want[1].data.cast("B")[: n * summary.bytes]).select(self.q[sequence], choose)
                        self.assertEqual(lists[sequence], [list(of) for of in one.lists])
                        for i, of in enumerate(one.scores):
                            self.assertEqual(scores[sequence, i, : len(of)].tolist(), of.tolist())

    def test_it_runs_on_torchs_stream_and_in_a_graph(self):
        summary = sparse.box(self.shape)
        out, places = self.built(summary)
        lengths, q = torch.tensor([BLOCKS], dtype=torch.int32, device="cuda"), self.q[:1].cuda()
        with cuda.Selector(summary, out, 4 * HEADS, BLOCKS, choose=sparse.TopK(sparse_ratio=0.1)) as select:
            first = select(out[0], places[None], lengths, q).lists()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chosen = select(out[0], places[None], lengths, q)
            q.copy_(self.q[1:])
            graph.replay()
            torch.cuda.synchronize()
            second = chosen.lists()
            self.assertNotEqual(first, second)
            self.assertEqual(second, select(out[0], places[None], lengths, q).lists())
            q.copy_(self.q[:1])
            graph.replay()
            self.assertEqual(chosen.lists(), first)
            del graph

    def test_the_example(self):
        import select_on_gpu
        from daemon import Daemon

        daemon = Daemon(**{"device.cuda": "required"})
        self.addCleanup(daemon.stop)
        said = []
        with Client(socket=daemon.socket) as client:
            blocks = select_on_gpu.retrieve(client, said.append)
        self.assertIn(select_on_gpu.NEEDLE, blocks)
        self.assertLess(len(blocks), 20)


if __name__ == "__main__":
    unittest.main()
