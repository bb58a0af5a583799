#!/usr/bin/python3
"""Selections against a real daemon, through second_client.py. Its choices are compared with the
numpy of tests/reference/sparse/methods.py. Also bounds, prefetches, and hostile clients."""

import faulthandler
import os
import unittest

import numpy as np
from retrieval_case import (CANCELLED_CODE, DEADLINE, HEAD_DIM, IN_DRAM, KV_HEADS, LAYERS, METHODS, SUITE_TIMEOUT_S,
                            Retrieval, lists_of, spec_of, methods)
from second_client import INVALID, NOT_FOUND, OK, keys, u32


class Selections(Retrieval):
    options = {"arena.size": "64MiB"}

    def expected(self, name, kv, layer, q, reduce="max", heads="per_head"):
        spec = spec_of(name)
        raw = methods.score(spec, methods.build(spec, kv[:, layer, 0], kv[:, layer, 1]), q.astype(np.float32))
        return methods.reduce_heads(methods.reduce_group(raw, KV_HEADS, reduce), heads)

    def test_every_method_chooses_what_numpy_chooses(self):
        client, ns, _, kv = self.stored()
        q = self.query(rows=2)
        for name in METHODS:
            sequence, _ = self.sequence(client, self.summaries(client, ns, name), range(self.blocks), build=True)
            for layer, reduce, heads in ((0, "max", "per_head"), (2, "mean", "per_head"), (1, "max", "sum"), (2, "max", "max")):
                with self.subTest(method=name, layer=layer, reduce=reduce, heads=heads):
                    scores = self.expected(name, kv, layer, q, reduce, heads)
                    answer = self.select(client, sequence, q, layer, reduce=["max", "mean"].index(reduce), scores=True,
                                         heads=["per_head", "sum", "max"].index(heads), sparse_ratio=0.3, min_blocks=4,
                                         sink_blocks=1, recent_blocks=2)
                    right = [methods.choose_topk(row, methods.count_topk(self.blocks)).tolist() for row in scores]
                    self.assertEqual(lists_of(answer), right)
                    got = np.frombuffer(answer["scores"], "<f4")
                    want = np.concatenate([row[c] for row, c in zip(scores, right)])
                    np.testing.assert_allclose(got, want, rtol=1e-6 if name == "rest" else 0)  # which has exp() in it

    def test_mass_and_softmax(self):
        client, ns, _, kv = self.stored()
        q = self.query()
        sequence, _ = self.sequence(client, self.summaries(client, ns, "stats"), range(self.blocks), build=True)
        scores = self.expected("stats", kv, 0, q)
        answer = self.select(client, sequence, q, policy=1, eps=0.6, beta_m=1.0, sink_blocks=1, recent_blocks=1)
        right = [methods.choose_mass(row, 0.6, 1.0, 1, 1) for row in scores]
        for blocks, best in zip(lists_of(answer), right):
            self.assertLessEqual(abs(len(blocks) - len(best)), 1)  # numpy's exp differs
            self.assertGreaterEqual(len(set(blocks) & set(best.tolist())), len(best) - 1)
        summed = self.select(client, sequence, q, reduce=2, heads=1, min_blocks=5, scores=True)
        self.assertEqual([len(blocks) for blocks in lists_of(summed)], [5])

    def test_many_rows_in_one_message(self):
        client, ns, _, kv = self.stored()
        derived = self.summaries(client, ns)
        sequences = [self.sequence(client, derived, range(n), build=True)[0] for n in (self.blocks, 5, 17)]
        sequences.append(client.call("sequence.open", ns=derived)["sequence"])  # no blocks
        rows = [(sequences[i % 4], i % LAYERS, [self.blocks, 5, 17, 0][i % 4]) for i in range(200)]
        q = np.concatenate([self.query(seed=i) for i in range(200)])
        answer = client.call("select", sequences=[c for c, _, _ in rows], layers=[s for _, s, _ in rows], q=q.tobytes(), q_dtype=1,
                             q_heads=4, min_blocks=3)
        got = lists_of(answer)
        self.assertEqual(len(got), 400)
        for i, (_, layer, n) in enumerate(rows):
            scores = self.expected("mean", kv[:n], layer, q[i:i + 1]) if n else np.zeros((2, 0))
            self.assertEqual(got[2 * i:2 * i + 2], [methods.choose_topk(row, min(3, n), 0, 0).tolist() for row in scores], i)

    def test_queries_of_every_type(self):
        client, ns, _, kv = self.stored()
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(self.blocks), build=True)
        q = np.round(self.query().astype(np.float32) * 4) / 4  # exact in all of them
        bf16 = (q.view(np.uint32) >> 16).astype(np.uint16)
        answers = [client.call("select", sequences=[sequence], layers=[1], q=data.tobytes(), q_dtype=dtype, q_heads=4, min_blocks=7,
                               scores=True) for dtype, data in enumerate((q, q.astype(np.float16), bf16))]
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0], answers[2])

    def test_bad_selections(self):
        client, ns, _, _ = self.stored(8)
        derived = self.summaries(client, ns)
        sequence, _ = self.sequence(client, derived, range(8), build=True)
        other, _ = self.sequence(client, self.summaries(client, ns, "box"), range(8), build=True)
        q = self.query().tobytes()
        good = {"sequences": [sequence], "layers": [0], "q": q, "q_dtype": 1, "q_heads": 4, "min_blocks": 1}
        self.assertEqual(len(lists_of(client.call("select", **good))), 2)
        for wrong in ({"layers": [LAYERS]}, {"layers": [0, 1]}, {"layers": []}, {"sequences": []}, {"q": q[:-2]}, {"q": q + b"xx"},
                      {"q_heads": 3}, {"q_heads": 2}, {"q_heads": 1}, {"rows": 2}, {"rows": 65}, {"q_dtype": 0}, {"q_dtype": 3},
                      {"metric": 3}, {"reduce": 3}, {"heads": 3}, {"policy": 2}, {"eps": 1.5}, {"eps": 1}, {"sparse_ratio": -0.1},
                      {"sparse_ratio": float("nan")}, {"beta": float("inf")}, {"limit": 1 << 21}, {"prefetch": 9},
                      {"sequences": [sequence, other], "layers": [0, 0], "q": q + q}):
            self.refused(INVALID, client.call, "select", **dict(good, **wrong))
        self.refused(NOT_FOUND, client.call, "select", **dict(good, sequences=[0]))
        self.refused(NOT_FOUND, client.call, "select", **dict(good, sequences=[sequence ^ 1]))
        for bad in (np.nan, np.inf, -np.inf):
            values = self.query()
            values[0, 2, 5] = bad
            said = self.refused(INVALID, client.call, "select", **dict(good, q=values.tobytes()))
            self.assertIn(f"element {2 * HEAD_DIM + 5} ", said.args[2])
        self.refused(INVALID, client.call, "select", **dict(good, metric=1, sequences=[other]))

    def test_an_answer_that_is_too_long_is_refused_before_it_is_made(self):
        client, ns, _, _ = self.stored(8)
        derived = self.summaries(client, ns)
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        for _ in range(2):
            client.call("sequence.append", sequence=sequence, keys=keys(0, 1, 2, 3) * 500, build=True)
        q = np.tile(self.query(heads=2), (100, 1, 1)).tobytes()
        ask = dict(sequences=[sequence] * 100, layers=[0] * 100, q=q, q_dtype=1, q_heads=2)
        self.refused(INVALID, client.call, "select", sparse_ratio=1.0, **ask)
        answer = client.call("select", sparse_ratio=1.0, limit=1000, **ask)
        self.assertEqual({len(blocks) for blocks in lists_of(answer)}, {1000})
        self.refused(INVALID, client.call, "select", sparse_ratio=1.0, limit=1000, scores=True, **ask)
        self.assertEqual({len(blocks) for blocks in lists_of(client.call("select", sparse_ratio=0.25, **ask))}, {1000})

    def test_limits_windows_and_nothing(self):
        client, ns, _, _ = self.stored()
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(self.blocks), build=True)
        q = self.query()
        self.assertEqual(lists_of(client.call("select", sequences=[sequence], layers=[0], q=q.tobytes(), q_dtype=1, q_heads=4)), [[], []])
        windows = self.select(client, sequence, q, min_blocks=0, sink_blocks=2, recent_blocks=3)
        last = self.blocks
        self.assertEqual(lists_of(windows), [[0, 1, last - 3, last - 2, last - 1]] * 2)
        self.assertEqual([len(blocks) for blocks in lists_of(self.select(client, sequence, q, topk_tokens=100, min_blocks=0))], [7, 7])
        self.assertEqual([len(blocks) for blocks in lists_of(self.select(client, sequence, q, sparse_ratio=1.0, limit=6))], [6, 6])

    def test_prefetch_of_what_was_chosen(self):
        client, ns, region, _ = self.stored()
        derived = self.summaries(client, ns)
        self.build(client, derived, range(self.blocks))
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        sequence, _ = self.sequence(client, derived, range(self.blocks))
        before = client.metrics()
        answer = self.select(client, sequence, self.query(), min_blocks=6, prefetch=8)
        wanted = sorted(set(sum(lists_of(answer), [])))
        self.until(lambda: client.tiers(ns, *wanted) == [IN_DRAM] * len(wanted), "the chosen blocks")
        self.assertEqual(client.tiers(ns, *range(self.blocks)).count(IN_DRAM), len(wanted))
        self.assertEqual(region.load(wanted, range(len(wanted))), [OK] * len(wanted))
        rest = [block for block in range(self.blocks) if block not in wanted][:5]
        self.refused(INVALID, client.call, "sequence.prefetch", sequence=sequence, index=u32(self.blocks))
        self.refused(INVALID, client.call, "sequence.prefetch", sequence=sequence, index=bytes(5))
        answer = client.call("sequence.prefetch", sequence=sequence, index=u32(*rest, rest[0]), priority=7)
        self.assertEqual(answer["status"], bytes([OK] * 6))
        client.call("sequence.close", sequence=sequence)  # its leases
        client.call("evict", ns=ns, tier=1)
        after = client.metrics()
        self.assertEqual(after["prefetch_useful"] - before["prefetch_useful"], len(wanted))
        self.assertEqual(after["prefetch_useless"] - before["prefetch_useless"], 5)

    def test_prefetch_of_what_rows_of_several_sequences_chose(self):
        client, ns, _, _ = self.stored()
        derived = self.summaries(client, ns)
        self.build(client, derived, range(self.blocks))
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        third = self.blocks // 3
        sequences = [self.sequence(client, derived, range(i * third, (i + 1) * third))[0] for i in range(3)]
        order = [1, 0, 1, 2, 0, 1, 2, 2]
        q = np.concatenate([self.query(seed=seed) for seed in range(len(order))])
        answer = client.call("select", sequences=[sequences[i] for i in order], layers=[0] * len(order), q=q.tobytes(), q_dtype=1,
                             q_heads=4, min_blocks=2, prefetch=1)
        wanted = {order[i // 2] * third + block for i, blocks in enumerate(lists_of(answer)) for block in blocks}
        self.assertLess(len(wanted), self.blocks)
        self.until(lambda: client.tiers(ns, *wanted) == [IN_DRAM] * len(wanted), "the chosen blocks")
        self.until(lambda: not client.metrics()["requests_active"], "the end of all prefetches")
        self.assertEqual(client.tiers(ns, *range(self.blocks)).count(IN_DRAM), len(wanted))

    def test_cancel_and_deadline(self):
        client, ns, _, _ = self.stored(8)
        derived = self.summaries(client, ns, "tokens")
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        client.call("sequence.append", sequence=sequence, keys=keys(*range(8)) * 250, build=True)
        rows = 100 if os.environ.get("UCM_PHASE", "plain") == "plain" else 10  # sanitizers make each many times longer
        q = np.tile(self.query(rows=4, heads=8), (rows, 1, 1))[:rows * 4].tobytes()
        long = dict(sequences=[sequence] * rows, layers=[0] * rows, q=q, q_dtype=1, q_heads=8, rows=4, limit=10, reduce=2)
        codes = []
        for how in ("cancel", "deadline"):
            for _ in range(20):
                msgid = client.begin("select", timeout_ms=1 if how == "deadline" else 0, **long)
                if how == "cancel":
                    client.call("cancel", msgid=msgid)
                try:
                    client.wait(msgid)
                    codes.append(0)
                except Exception as refused:
                    codes.append(refused.code)
        self.assertTrue(set(codes) <= {0, CANCELLED_CODE, DEADLINE}, codes)
        self.assertEqual(len(lists_of(client.call("select", **long))), 2 * rows)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
