#!/usr/bin/python3
"""Blocks of the vLLM connector of which some parts are encoded and some raw, in the small engine of
tests/engines/vllm against a real daemon. One rank's KV does not fit the encoding."""

import unittest

from vllm_case import BLOCK, Case, Request, prompt, watch, wild  # sets the paths


class Ranks(Case):
    """Parts of the rank whose KV does not fit are raw. The other ranks' parts, which fit, become
    raw, too."""

    DTYPE = "bfloat16"

    def test_what_one_of_them_can_not_hold(self):
        tokens = prompt(403, 150)
        for heads, more in (((0, 1), {}), ((2, 3), {"layout": "content"}),
                            ((2, 3), {"async_load": False, "layerwise": True, "layout": "packed"})):
            with self.subTest(heads=heads, **more), wild(heads):
                before = self.stats()
                a, b, plain = (self.engine(encoding=encoding, ranks=2, salt=repr(more), **more)
                               for encoding in ("lossless", "lossless", "none"))
                self.check(a, Request("cold", tokens))
                self.eventually(lambda: self.count(before, "unfit_decoded") == 150 // BLOCK)
                self.assertEqual(self.count(before, "encode_unfit"), 150 // BLOCK)
                for e in (b, plain):
                    self.check(e, Request("warm", tokens))
                    self.assertEqual(e.loaded_tokens, 150 // BLOCK * BLOCK)
                self.assertEqual(self.count(before, "unfit_decode_failed"), 0)

    def count(self, before, name):
        return self.stats()[name] - before[name]

    def test_what_does_not_fit_of_requests_that_are_preempted(self):
        with wild((2, 3)):
            tight = self.engine(blocks=24, encoding="lossless", ranks=2)
            self.check(tight, *(Request(f"r{i}", prompt(415 + i, 90), outputs=40) for i in range(4)))
            self.assertGreater(tight.preemptions, 0)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
