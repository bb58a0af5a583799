#!/usr/bin/python3
"""`ucm-bench serve` against an endpoint with known delays. The figures show the delays, failures
are counted and are no figures, and prompts share what they should.

$UCM_BENCH names another program than build/ucm-bench. A busy machine adds to delays, so the tests
check lower bounds, orders, and upper bounds of seconds.
"""

import json
import os
import subprocess
import time
import unittest

from fake_openai import FakeOpenAI

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))
TIMEOUT_S = 120


class Serve(unittest.TestCase):
    def fake(self, **how):
        fake = FakeOpenAI(**how)
        self.addCleanup(fake.close)
        return fake

    def run_serve(self, *words):
        return subprocess.run([UCM_BENCH, "--quiet", "serve", *words], capture_output=True, text=True, timeout=TIMEOUT_S)

    def cells(self, *words, status=0):
        run = self.run_serve("--json", "--tokens", "64", "--concurrency", "1", "--hits", "0", "--output", "4", "--rounds",
                             "1", *words)
        self.assertEqual(run.returncode, status, run.stderr)
        return json.loads(run.stdout)["cells"]

    def test_delays_show_in_order(self):
        # One request warms up. 2 of 50 are slow: the 99th percentile is theirs, the median is not.
        fake = self.fake(first=lambda n: 2 if n in (7, 20) else 0.02, gap=0.01)
        cell, = self.cells(fake.url, "--requests", "50")
        ttft, tpot = cell["ttft_ms"], cell["tpot_ms"]
        self.assertEqual((cell["ok"], cell["errors"], cell["timeouts"]), (50, 0, 0))
        self.assertGreaterEqual(ttft["p50"], 20)
        self.assertLess(ttft["p50"], 2000)
        self.assertGreaterEqual(ttft["p99"], 2000)
        self.assertGreater(ttft["mean"], ttft["p50"])
        self.assertLess(ttft["mean"], ttft["p99"])
        self.assertGreaterEqual(tpot["p50"], 10 * 0.9)
        self.assertLessEqual(tpot["p50"], tpot["p99"])
        self.assertEqual((cell["prompt_tokens"], cell["output_tokens"]), (50 * 64, 50 * 4))
        self.assertAlmostEqual(cell["requests_per_second"], 50 / cell["seconds"], places=3)

    def test_what_fails_is_counted_and_no_figure(self):
        kinds = ["status", "error", "cut", "no-done", "garbage", "empty", "hang"]
        fake = self.fake(first=lambda n: {1: 4, 2: 4}.get(n, 0.01),
                         behave=lambda n: kinds[n - 1] if 1 <= n <= len(kinds) else None)
        cell, = self.cells(fake.url, "--requests", "12", "--timeout", "8")
        self.assertEqual((cell["ok"], cell["timeouts"], cell["errors"], cell["broken_streams"]), (5, 1, 6, 4))
        self.assertLess(cell["ttft_ms"]["p99"], 4000)
        self.assertEqual(cell["output_tokens"], 5 * 4)

    def test_a_cell_without_an_answer_fails(self):
        fake = self.fake(behave=lambda n: "cut")
        cell, = self.cells(fake.url, "--requests", "3", status=1)
        self.assertEqual((cell["ok"], cell["ttft_ms"]["p50"], cell["requests_per_second"]), (0, 0, 0))

    def test_prompts_share_their_beginning(self):
        fake = self.fake()
        self.cells(fake.url, "--requests", "4", "--hits", "0,50,90", "--seed", "1")
        self.assertEqual(len(fake.prompts), 3 * 5)
        for cell, shared in enumerate((0, 32, 57)):
            prompts = fake.prompts[5 * cell:5 * cell + 5]
            self.assertEqual({len(prompt) for prompt in prompts}, {64})
            self.assertEqual(len({tuple(prompt[:shared]) for prompt in prompts}), 1)
            self.assertEqual(len({tuple(prompt[shared:]) for prompt in prompts}), 5)
        heads = {tuple(fake.prompts[5 * cell][:16]) for cell in range(3)}
        self.assertEqual(len(heads), 3, "cells share nothing")
        again = self.fake()
        self.cells(again.url, "--requests", "4", "--hits", "0,50,90", "--seed", "1")
        self.assertEqual(again.prompts, fake.prompts)
        other = self.fake()
        self.cells(other.url, "--requests", "4", "--hits", "90")
        self.assertNotIn(other.prompts[1], fake.prompts)

    def test_words_instead_of_ids(self):
        fake = self.fake(usage=False)
        cell, = self.cells(fake.url, "--requests", "2", "--text")
        self.assertEqual({len(prompt.split()) for prompt in fake.prompts}, {64})
        self.assertEqual(cell["output_tokens"], 2 * 4)

    def test_so_many_at_once(self):
        fake = self.fake()

        def together(n):
            """Requests of the second cell, except its first one, wait for each other."""
            end = time.monotonic() + 30
            while n > 9 and fake.most < 8 and time.monotonic() < end:
                time.sleep(0.01)
            return 0.15
        fake.first = together
        cells = self.cells(fake.url, "--requests", "8", "--concurrency", "1,8")
        self.assertEqual([cell["concurrency"] for cell in cells], [1, 8])
        self.assertEqual(fake.most, 8)
        self.assertGreater(cells[1]["requests_per_second"], cells[0]["requests_per_second"])

    def test_two_endpoints_by_turns(self):
        order, fakes = [], [self.fake(first=lambda n: 0.05), self.fake(first=lambda n: 0.5)]
        for name, fake in zip("AB", fakes):
            fake.behave = lambda n, name=name: order.append(name)
        run = self.run_serve(*(fake.url for fake in fakes), "--tokens", "16", "--concurrency", "1", "--hits", "50",
                             "--requests", "3", "--rounds", "2", "--output", "2")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual("".join(order), "AB" + "AAABBB" + "BBBAAA")
        self.assertFalse({str(p) for p in fakes[0].prompts} & {str(p) for p in fakes[1].prompts})
        rows = [line.split() for line in run.stdout.splitlines() if " B/A " in line]
        self.assertEqual(len(rows), 1)
        self.assertGreater(float(rows[0][6]), 1.5, run.stdout)  # the median time to the first token

    def test_mistakes(self):
        self.assertEqual(self.run_serve().returncode, 2)
        fake = self.fake()
        for wrong in (("--tokens", "0"), ("--tokens", "x"), ("--hits", "101"), ("--concurrency", "1,,2")):
            run = self.run_serve(fake.url, *wrong)
            self.assertEqual((run.returncode, wrong[0] in run.stderr), (2, True), run.stderr)
        fake.close()
        run = self.run_serve(fake.url)
        self.assertEqual((run.returncode, fake.url in run.stderr), (1, True), run.stderr)


if __name__ == "__main__":
    unittest.main()
