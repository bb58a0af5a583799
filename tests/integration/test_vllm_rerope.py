#!/usr/bin/python3
"""ReRoPE in the small engine of tests/engines/vllm: two distances, raw K as a plane of its own, and chunks whose K turns beside it."""

import math
import unittest

from vllm_case import MODEL, expected, prompt
from daemon import Daemon

import numpy
import model as M

from blend_engine import BlendRequest
from rerope_engine import ReropeEngine, layout
from ucmclient import Client
from ucmclient.blend import First, Nothing, Span

A, QUESTION = prompt(1, 48), prompt(2, 20)
TOKENS = prompt(3, 32) + A + QUESTION


def from_scratch(tokens, window, trained):
    """The logits behind the last token, by distances alone: a key's rotation is by how far it stands, at most `window`."""
    hidden = [MODEL.embedding[t] for t in tokens]
    for layer in range(M.LAYERS):
        w = MODEL.layers[layer]
        unit = [h / numpy.sqrt(h @ h / numpy.float32(h.size) + numpy.float32(1e-5)) for h in hidden]
        raw = [(w["k"] @ x).reshape(M.KV_HEADS, M.HEAD) for x in unit]
        v = [(w["v"] @ x).reshape(M.KV_HEADS, M.HEAD) for x in unit]
        out = []
        for i, h in enumerate(hidden):
            scale = max(1.0, math.log(i + 1) / math.log(trained))
            heads = []
            for g in range(M.KV_HEADS):
                scores = numpy.stack([MODEL.queries(layer, h, min(i - j, window))[M.heads_of(g)] @ raw[j][g] for j in range(i + 1)]) * scale / M.HEAD**0.5
                p = numpy.exp(scores - scores.max(0))
                heads.append((p.T @ numpy.stack([v[j][g] for j in range(i + 1)]) / p.sum(0)[:, None]).astype(numpy.float32))
            out.append(MODEL.after(layer, h, heads))
        hidden = out
    return MODEL.logits(hidden[-1])


class Case(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon(nvme=False)
        self.addCleanup(lambda: self.daemon.stop())
        self.client = Client(socket=self.daemon.socket, name="rerope")

    def run_one(self, engine, *request):
        request = BlendRequest("one", *request, outputs=2)
        engine.add(request)
        while engine.requests:
            engine.step()
        return request.logits

    def engine(self, window, trained, **options):
        engine = ReropeEngine(MODEL, self.client, rerope_window=window, trained=trained, **{"budget": 256, **options})
        self.addCleanup(engine.close)
        return engine

    def test_two_distances_are_what_the_definition_says(self):
        tokens = prompt(4, 40)
        for window, trained in ((8, 16), (16, 512)):
            logits = self.run_one(self.engine(window, trained), tokens)
            numpy.testing.assert_allclose(logits[0], from_scratch(tokens, window, trained), atol=2e-3)

    def test_within_the_window_it_is_the_model(self):
        logits = self.run_one(self.engine(512, 512), TOKENS)
        numpy.testing.assert_allclose(logits[0], expected(TOKENS, 2)[0], atol=1e-4)

    def test_chunks_bring_raw_k_with_them(self):
        engine = self.engine(24, 32)
        self.assertTrue(engine.store(A).all_ok)
        full = self.run_one(engine, TOKENS)
        other = self.engine(24, 32)
        near = self.run_one(other, TOKENS, [Span(32, 80)], First(16))
        self.assertEqual(other.turned, 2)
        none = self.run_one(self.engine(24, 32), TOKENS, [Span(32, 80)], Nothing())
        self.assertLess(numpy.abs(near[0] - full[0]).max(), numpy.abs(none[0] - full[0]).max())
        self.assertLess(numpy.abs(near[0] - full[0]).max(), 0.5 * numpy.abs(full[0]).max())
        all_of_it = self.run_one(self.engine(24, 32), TOKENS, [Span(32, 80)], First(48))
        numpy.testing.assert_array_equal(all_of_it[0], full[0])

    def test_another_windows_blocks_are_others(self):
        self.assertTrue(self.engine(24, 32).store(A).all_ok)
        for window, trained, there in ((24, 32, 3), (25, 32, 0), (24, 64, 0)):
            found = self.engine(window, trained).chunks.lookup(A, [Span(0, 48)])
            self.assertEqual(sum(found.there[0]), there)
        with self.assertRaisesRegex(ValueError, "rerope_window 0, trained length 32"):
            layout(0, 32)


if __name__ == "__main__":
    unittest.main(verbosity=2)
