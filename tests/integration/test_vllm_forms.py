#!/usr/bin/python3
"""Blocks of the vLLM connector that are coded in one place and plain in another, in the small engine of tests/vllm against a real
daemon: ranks of which one can't hold its part, and tiers that differ."""

import shutil
import tempfile
import unittest

from vllm_case import BLOCK, GPU, Case, Request, daemon, expected, prompt, run, watch, wild  # sets the paths
import numpy

#: As in test_vllm_encoding.py, of fp8.
CLOSE = 0.024


class Ranks(Case):
    """The parts that one rank's KV does not fit are plain. The others', which fit, become plain, too."""

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


@unittest.skipIf(GPU, "what is on NVMe does not depend on the device")
class Tiers(Case):
    """encoding_dram and encoding_disk: what the daemon has in DRAM is one form, and after a restart, on NVMe, the other."""

    DTYPE = "bfloat16"

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="vllm_tiers.")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.daemon = daemon(folder=self.folder)
        self.addCleanup(self.stop)

    def logits(self, e, name, tokens):
        got = run(e, Request(name, tokens))[name].logits[0]
        self.assertEqual(e.loaded_tokens, 150 // BLOCK * BLOCK, "it was loaded")
        return got

    def exact(self, logits, tokens):
        want = expected(tokens, 8, self.DTYPE)[0]
        if numpy.array_equal(logits, want):
            return True
        self.assertLess(numpy.linalg.norm(logits - want) / numpy.linalg.norm(want), CLOSE)
        return False

    def test_each_has_its_form(self):
        for dram, disk in (("plain", "coded"), ("coded", "plain"), ("plain", "plain")):
            with self.subTest(dram=dram, disk=disk):
                more = {"encoding": "fp8", "encoding_dram": dram, "encoding_disk": disk, "salt": dram + disk}
                tokens, written = prompt(480, 150), self.stats()["nvme_writes"]
                self.check(self.engine(**more), Request("cold", tokens))
                self.assertEqual(self.exact(self.logits(self.engine(**more), "warm", tokens), tokens), dram == "plain")
                self.eventually(lambda: self.stats()["nvme_writes"] == written + 150 // BLOCK)
                self.assertEqual(self.daemon.stop(), 0)
                self.daemon = daemon(folder=self.folder)
                self.assertEqual(self.exact(self.logits(self.engine(**more), "later", tokens), tokens), disk == "plain")

    def test_it_is_said_at_the_start(self):
        for dram, disk, words in (("plain", "coded", "as they are in DRAM, as fp8 on NVMe"), ("coded", "plain", "as fp8 in DRAM"),
                                  ("plain", "plain", "stored as they are; those")):
            e = self.engine(encoding="fp8", encoding_dram=dram, encoding_disk=disk)
            self.assertIn(words, e.ranks[0].connector._worker.stored_as)

    def test_what_does_not_fit_of_one_rank(self):
        with wild((2, 3)):
            more = {"encoding": "lossless", "encoding_dram": "plain", "ranks": 2}
            a, b = self.engine(**more), self.engine(**more)
            tokens = prompt(481, 150)
            self.check(a, Request("cold", tokens))
            self.eventually(lambda: self.stats()["nvme_writes"] >= 2 * (150 // BLOCK))
            self.check(b, Request("warm", tokens))
            self.assertEqual(b.loaded_tokens, 150 // BLOCK * BLOCK)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
