#!/usr/bin/env python3
"""Sparse decoding's half of a GPU worker without a GPU, a part of `make check-vllm`, which has
torch. It finds a batch's requests and their blocks, and attends them as dense attention would, in
both forms of a layer. The kernels are torch's here, and entries hold the blocks that have a page.
"""

import os
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))), "client/python"))

import torch  # noqa: E402

from ucmclient.decode import Choices, Room  # noqa: E402
from ucmclient.decode.cuda import Flag  # noqa: E402
from ucmclient.decode.rows import Rows  # noqa: E402
from ucmclient.decode.supply import Sequence  # noqa: E402
from ucmclient.sparse import Shape, TopK  # noqa: E402
from ucmclient.engine.vllm import sparse_gpu  # noqa: E402
from ucmclient.engine.vllm.plan import Plan, SparseStep  # noqa: E402
from ucmclient.engine.vllm.sparse_rules import Rules  # noqa: E402

BLOCK, LAYERS, HEADS, GROUP, DIM, PAGES = 4, 2, 2, 2, 8, 64


class FakeSelector:
    """Takes all candidates."""

    lists, workspace_bytes = HEADS, 0

    def __init__(self, summary, gpu, q_heads, max_blocks, **more):
        self.room = max_blocks

    def __call__(self, summaries, table, n_blocks, q, out=None, most=None):
        assert most.tolist() == n_blocks.tolist()
        for i, n in enumerate(n_blocks.tolist()):
            out.counts[i] = n
            out.index[i, :, :n] = torch.arange(n, dtype=torch.int32)
            for row in table[i, :n].tolist():
                assert summaries[row].any(), "a block without a summary"
        return out


class FakeSteps:
    table_bytes = workspace_bytes = 0

    def __init__(self, pool, shape, *, numbers, **more):
        self.numbers, self.shape, self.begun, self.ended, self.flags = numbers, shape, 0, 0, Flag(0)
        #: What the next steps lack.
        self.lacks = []

    bytes_of = staticmethod(lambda *_: 64)

    def begin(self):
        self.begun += 1
        self.flags = self.lacks.pop(0) if self.lacks else Flag(0)

    def end(self):
        self.ended = self.begun

    def result(self):
        return SimpleNamespace(step=self.ended, flags=self.flags)

    def layer(self, layer, chosen, table, requests, q, pages, out=None):
        out.zero_()
        for c, length in enumerate(pages.length.tolist()):
            for head in range(HEADS if length else 0):
                n, first, last = int(chosen.counts[c, head]), int(pages.first[c]), (length - 1) // BLOCK
                of = [int(pages.of[table[c, b]]) for b in chosen.index[c, head, :n].tolist()]
                of += [int(pages.table[c, b]) for b in range(first, last + 1)]
                assert all(page > 0 for page in of), "a block that is nowhere"
                kv = pages.kv[of][:, head].reshape(-1, 2 * DIM)[: n * BLOCK + length - first * BLOCK]
                mine = slice(head * GROUP, (head + 1) * GROUP)
                out[c, mine] = torch.softmax(q[c, mine] @ kv[:, :DIM].T / DIM**0.5, -1) @ kv[:, DIM:]
        return out


class FakeBuilder:
    def __init__(self, *_):
        pass

    def __call__(self, kv, summaries, pages, rows):
        for cache, of in zip(kv, summaries):
            for page, row in zip(pages.tolist(), rows.tolist()):
                assert cache[page].any(), "a summary of a page that is not written"
                of[row] = 1


class FakeDecoder:
    """No daemon."""

    def __init__(self, link, summary, steps, *, build, summarised, **more):
        self.steps, self._build, self.rows, self.mapped = steps, build, Rows(steps.numbers, lambda row: None), False
        self.summarised, self.summaries = summarised, torch.zeros((LAYERS, steps.numbers, 1), dtype=torch.uint8)
        self.sequences, self.crowded, self.gone, self.numbers = {}, set(), set(), list(range(6))
        self.ref_beside = None

    def open(self, name, floor):
        self.sequences[name] = Sequence(name, self.numbers.pop())
        return self.sequences[name]

    def close(self, name):
        sequence = self.sequences.pop(name, None)
        for row in sequence.rows if sequence else ():
            self.rows.release(row)

    def extend(self, sequence, keys, pages):
        first = len(sequence.rows)
        for key in keys:
            sequence.keys.append(key)
            sequence.rows.append(self.rows.bind(key))
        self._build([pages(first + i) for i in range(len(keys))], sequence.rows[first:])

    def bind(self, sequence, keys):
        sequence.keys += keys
        sequence.rows += [self.rows.bind(key) for key in keys]

    def write(self, table, sequence, first=0):
        table[first : len(sequence.rows)] = torch.tensor(sequence.rows[first:], dtype=table.dtype)

    def counted(self):
        return not self.steps.flags

    def serve(self):
        return {sequence for name, sequence in self.sequences.items() if name in self.gone}

    def update(self, keep):
        pass

    def keep_beside(self, seconds):
        return False


def no_device(worker):
    """For sparse_gpu.SparseGpuWorker: its kernels have run when they return."""
    worker._use_device = worker._wait = lambda worker: None
    worker._running = lambda worker: False


no_device(sparse_gpu.SparseGpuWorker)


class Engine:
    """Two requests of a batch that begins with a dense one."""

    def __init__(self):
        torch.manual_seed(0)
        self.caches = {str(i): torch.zeros(PAGES, HEADS, BLOCK, 2 * DIM) for i in range(LAYERS)}
        choices = Choices.alike(TopK(sink_blocks=0, recent_blocks=1, topk_tokens=400, min_blocks=0), LAYERS)
        rules = Rules("p", choices, BLOCK, 20, HEADS, Room(100, 60), 200, on_gpu=True)
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4), parallel_config=None,
                                 model_config=SimpleNamespace(get_num_attention_heads=lambda _: HEADS * GROUP))
        layout = SimpleNamespace(layers=range(LAYERS), numbers={str(i): i for i in range(LAYERS)}, blocks=PAGES, layer_bytes=512)
        summary = SimpleNamespace(shape=Shape("f32", BLOCK, HEADS, DIM), bytes=1)
        link = SimpleNamespace(link=SimpleNamespace(summaries=None), settings=SimpleNamespace(lookup_timeout=1.0))
        fakes = {"Steps": FakeSteps, "Selector": FakeSelector, "Builder": FakeBuilder, "GpuDecoder": FakeDecoder}
        with mock.patch.multiple(sparse_gpu, **fakes):
            self.worker = sparse_gpu.SparseGpuWorker(rules, link, layout, summary, self.caches, config, 0)
        self.free, self.tables, self.kv, self.told = list(range(PAGES - 1, 0, -1)), {}, {}, {}

    def step(self, *of):
        """of: name, prompt's tokens, and the step's first token and end. Returns the blocks that
        must be attended, and those that were."""
        plan, rows = Plan(), []
        for name, prompt, first, end in of:
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK < end:
                table.append(self.free.pop())
            kv = self.kv.setdefault(name, [torch.randn(200, HEADS, 2 * DIM) for _ in range(LAYERS)])
            rows.append((name, first, end, table, kv))
            if prompt >= 20:
                known = self.told.get(name)
                pages = table[known or 0 :]
                plan.sparse.append(SparseStep(name, prompt, first, end, known is None, list(pages),
                                              [f"{name} {i}".encode() for i in range(known or 0, len(table))], 0, 0))
                self.told[name] = len(table)
        self.worker.begin(plan)
        starts = torch.tensor([0, *(end - first for _, first, end, *_ in rows)]).cumsum(0).to(torch.int32)
        ends = torch.tensor([end for _, _, end, *_ in rows], dtype=torch.int32)
        table = torch.tensor([(t + [0] * 60)[:60] for *_, t, _ in rows], dtype=torch.int32)
        batch, wanted, got = object(), [], []
        for layer in range(LAYERS):
            q, cache = torch.randn(int(starts[-1]), HEADS * GROUP, DIM), self.caches[str(layer)]
            want, out = torch.zeros_like(q), torch.full_like(q, 7.0)
            for i, (_, first, end, pages, kv) in enumerate(rows):
                for p in range(first, end):
                    cache[pages[p // BLOCK], :, p % BLOCK] = kv[layer][p]
                for p in range(first, end):
                    for head in range(HEADS):
                        mine, at = slice(head * GROUP, (head + 1) * GROUP), int(starts[i]) + p - first
                        k, v = kv[layer][: p + 1, head].split(DIM, -1)
                        want[at, mine] = torch.softmax(q[at, mine] @ k.T / DIM**0.5, -1) @ v
            self.layer(layer, q, want, out, batch, starts, ends, table)
            wanted.append(want), got.append(out)
        self.worker.end()
        return torch.stack(wanted), torch.stack(got)

    def layer(self, layer, q, want, out, batch, starts, ends, table):
        """As SparseImpl.forward; dense tokens get what is wanted."""
        worker, longest = self.worker, int((starts[1:] - starts[:-1]).max())
        if not worker.has_work(longest):
            out[:] = want
        elif longest == 1:
            dense = worker.uniform(layer, table, ends) > 0
            out[dense] = want[dense]
            worker.attend_uniform(layer, q, out, table)
        else:
            rows = worker.rows(batch, starts, ends, table)
            if rows.all_dense:
                out[:] = want
                return
            if rows.dense is not None:
                out[rows.dense.at] = want[rows.dense.at]
            worker.attend_rows(layer, rows, q, out)


class Batches(unittest.TestCase):
    def setUp(self):
        self.engine = Engine()
        self.worker = self.engine.worker

    def right(self, *of):
        wanted, got = self.engine.step(*of)
        self.assertLess((wanted - got).abs().max(), 1e-5)

    def prompts(self):
        self.right(("short", 10, 0, 10), ("a", 30, 0, 13))
        self.right(("short", 10, 10, 11), ("a", 30, 13, 30), ("b", 45, 0, 9))
        self.right(("b", 45, 9, 45), ("a", 30, 30, 31))

    def test_prompts_in_pieces_then_one_token_each(self):
        self.prompts()
        for i in range(20):
            self.right(("b", 45, 45 + i, 46 + i), ("short", 10, 11 + i, 12 + i), ("a", 30, 31 + i, 32 + i))
        self.right(("a", 30, 51, 52))
        self.worker.close(["a", "b"])
        self.assertEqual((int(self.worker._owner.sum()), self.worker._pages_of), (0, {}))
        self.assertEqual(set(self.worker._page_of.tolist()), {-1})

    def test_a_step_that_came_short(self):
        self.prompts()
        self.worker._steps.lacks = [Flag.UNSERVED]
        self.engine.step(("b", 45, 45, 46), ("a", 30, 31, 32))
        pages = self.engine.tables
        self.assertEqual(self.worker.spoiled, {"b": pages["b"][44 // BLOCK], "a": pages["a"][30 // BLOCK]})
        self.assertEqual((self.worker.lost, self.worker.kept), (frozenset(), {}))
        self.worker._steps.lacks = [Flag.UNSERVED] * 3  # of layers, which wait for it
        self.right(("b", 45, 44, 46), ("a", 30, 28, 32))
        self.assertEqual(self.worker.spoiled, {})
        self.worker._steps.lacks, self.worker.decoder.gone = [Flag.UNSERVED], {"b"}
        self.engine.step(("b", 45, 46, 47), ("a", 30, 32, 33))
        self.assertEqual((self.worker.lost, set(self.worker.spoiled)), (frozenset("b"), {"a", "b"}))

    def test_one_that_loses_blocks_in_the_middle_of_a_layer(self):
        self.prompts()
        self.worker._steps.lacks, self.worker.decoder.gone = [Flag.UNSERVED], {"b"}
        wanted, got = self.engine.step(("b", 45, 44, 47), ("a", 30, 28, 32))
        self.assertLess((wanted - got)[:, 3:].abs().max(), 1e-5)
        self.assertEqual((self.worker.lost, set(self.worker.spoiled)), (frozenset("b"), {"b"}))
        (some, _), *_ = self.worker._rows_of[1].slices
        lost = some.requests == self.worker._requests["b"].sequence.number
        self.assertEqual((int(some.length[lost].sum()), int(some.candidates[lost].sum())), (0, 0), "it would attend blocks without pages")

    def test_the_first_sparse_tokens_are_not_computed_again_alone(self):
        self.right(("a", 30, 0, 28))
        self.worker._steps.lacks = [Flag.UNSERVED]
        self.engine.step(("a", 30, 28, 29))
        self.assertEqual(self.worker.lost, frozenset("a"), "what is before them is dense")

    def test_entries_for_one_token_at_a_time(self):
        self.right(("a", 30, 0, 13))
        self.worker._steps.lacks = [Flag.UNSERVED | Flag.FULL]
        self.right(("a", 30, 13, 30))

    def test_blocks_that_a_load_did_not_bring(self):
        plan = Plan(sparse=[SparseStep("a", 30, 8, 29, True, [0, 0, 3, 4, 5, 6, 7, 8], [bytes([i]) for i in range(8)], 0, 0)])
        self.worker.begin(plan)
        self.assertEqual((self.worker.lost, self.worker.spoiled), (frozenset("a"), {"a": 0}))


if __name__ == "__main__":
    unittest.main(verbosity=2)
