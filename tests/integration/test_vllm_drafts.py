#!/usr/bin/python3
"""The vLLM connector with a draft that keeps KV of its own (EAGLE, MTP, draft models). The draft's
KV is stored and loaded with the model's. It is never another draft's, nor of another next token.
The small engine of tests/engines/vllm (drafts_engine.py) against a real daemon."""

import hashlib
import unittest
from types import SimpleNamespace

from vllm_case import BLOCK, MODEL, Case, Request, engine, prompt, watch

from drafts_engine import DraftsEngine
from stages_engine import SomeRefused, StagesEngine
from ucmclient.engine.vllm import drafts, identity, settings
from ucmclient.engine.vllm.connector import UcmConnector


class WithImage(Request):
    def __init__(self, name, tokens, image, at):
        self.mm_features = [SimpleNamespace(identifier=hashlib.sha256(image.encode()).hexdigest(), mm_position=SimpleNamespace(offset=at, length=4))]
        super().__init__(name, tokens)

    def _content(self, first):
        image = self.mm_features[0]
        return super()._content(first) + (image.identifier.encode() if first <= image.mm_position.offset < first + BLOCK else b"")


class Drafting(Case):
    def drafting(self, kind=DraftsEngine, **more):
        e = kind(MODEL, UcmConnector, **{"socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0, **more})
        self.addCleanup(e.close)
        return e

    def share(self, **more):
        a, b = self.handed_on(self.drafting(**more), self.drafting(**more), prompt(1, 150), 150 // BLOCK * BLOCK, outputs=20)
        self.assertGreater(b.compared, 150)
        return a, b

    def test_what_the_draft_keeps_comes_with_the_model_s(self):
        for more in ({"later": True}, {"later": False}, {"later": True, "async_load": False}, {"later": True, "ranks": 2},
                     {"later": True, "layout": "packed"}, {"method": "draft_model"}):
            with self.subTest(**more):
                self.share(salt=repr(more), **more)

    def test_the_next_token_counts(self):
        """Two prompts agree in three blocks, but not in the token after them. So the draft's KV of
        the third block differs."""
        head = prompt(2, 3 * BLOCK)
        a, b = self.drafting(), self.drafting()
        self.check(a, Request("one", head + [1] + prompt(3, 40)))
        self.check(b, Request("other", head + [2] + prompt(4, 40)))
        self.assertEqual(b.loaded_tokens, 2 * BLOCK)
        for last, seed in ((1, 3), (2, 4)):
            c = self.drafting()
            self.check(c, Request(f"again{last}", head + [last] + prompt(seed, 40)))
            self.assertEqual(c.loaded_tokens, 5 * BLOCK)

    def test_the_image_after_a_block_counts(self):
        """The image's tokens are the same as any other image's."""
        tokens = prompt(8, 5 * BLOCK + 3)
        a, b, c = self.drafting(), self.drafting(), self.drafting()
        self.check(a, WithImage("one", tokens, "a cat", 3 * BLOCK))
        self.check(b, WithImage("other", tokens, "a dog", 3 * BLOCK))
        self.assertEqual(b.loaded_tokens, 2 * BLOCK)
        self.check(c, WithImage("again", tokens, "a cat", 3 * BLOCK))
        self.assertEqual(c.loaded_tokens, 5 * BLOCK)

    def test_what_follows_a_whole_block_is_not_known_yet(self):
        a, b, c = self.drafting(), self.drafting(), self.drafting()
        cold = Request("cold", prompt(5, 4 * BLOCK), outputs=BLOCK + 2)
        self.check(a, cold)
        self.check(b, Request("the same", cold.tokens[: 4 * BLOCK]))
        self.assertEqual(b.loaded_tokens, 3 * BLOCK)
        self.check(c, Request("goes on", cold.tokens[: 5 * BLOCK + 1]))
        self.assertEqual(c.loaded_tokens, 5 * BLOCK, "outputs are stored, too")

    def test_a_draft_model_does_not_look_ahead(self):
        a, b = self.drafting(method="draft_model"), self.drafting(method="draft_model")
        b._run_draft = lambda *of: None
        self.handed_on(a, b, prompt(6, 4 * BLOCK), 4 * BLOCK - 1)

    def test_other_drafts_are_other_engines(self):
        self.share()
        for more in ({"draft": "other"}, {"method": "mtp"}, {"kind": StagesEngine, "stages": (3,), "beside": (0, 0, 8)}):
            other = self.drafting(**more)
            self.check(other, Request("other", prompt(1, 150)))
            self.assertEqual(other.loaded_tokens, 0)

    def test_preemption_and_prompts_in_pieces(self):
        tight = self.drafting(blocks=24, budget=40)
        self.check(tight, *[Request(f"r{i}", prompt(40 + i, 120), outputs=60) for i in range(4)])
        self.assertGreater(tight.preemptions, 0)
        other = self.drafting()
        self.check(other, *[Request(f"r{i}", prompt(40 + i, 120), outputs=60) for i in range(4)])
        self.assertGreaterEqual(other.loaded_tokens, 4 * (120 // BLOCK * BLOCK))

    def test_a_pipeline_whose_last_stage_drafts(self):
        self.share(stages=(2, 1))

    def test_failed_loads(self):
        for asynchronous in (True, False):
            _, b = self.share(async_load=asynchronous, salt=repr(asynchronous))
            self.one_load_fails(b, 0, prompt(1, 150))

    def test_layer_after_layer_is_refused(self):
        with self.assertRaisesRegex(SomeRefused, "remove the setting layerwise"):
            self.drafting(async_load=False, layerwise=True)


class Rules(unittest.TestCase):
    def config(self, method, **more):
        config, _ = engine.configuration(8, 1, False, {})
        config.speculative_config = SimpleNamespace(method=method, model="draft")
        vars(config).update(more)
        return config

    def test_methods_that_keep_no_kv(self):
        for method in ("ngram", "suffix", "medusa"):
            self.assertIsNone(drafts.drafts_of(self.config(method)))
        self.assertIsNone(drafts.drafts_of(engine.configuration(8, 1, False, {})[0]))
        self.assertTrue(drafts.drafts_of(self.config("a method that comes later")).reads_next, "whatever is not known may keep KV")

    def test_refusals_name_the_remedy(self):
        for words, config, groups in (("method ngram", self.config("eagle"), [1, 2]),
                                      ("extract_hidden_states", self.config("extract_hidden_states"), None),
                                      ("num_speculative_tokens to 1", self.config("mtp", num_prefill_lookahead_tokens=3), None)):
            with self.subTest(words), self.assertRaisesRegex(identity.Unsupported, words):
                drafts.check_drafts(config, groups, settings.Settings())


if __name__ == "__main__":
    watch()
    unittest.main()
