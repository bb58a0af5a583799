#!/usr/bin/python3
"""The vLLM connector's setting `encoding`, in the small engine of tests/engines/vllm against a real
daemon. With lossless, requests get the same bit for bit as without a cache, through everything that
test_vllm_trouble.py does. With lossy encodings, results are close."""

import os
import unittest
from unittest import mock

import vllm_case
from vllm_case import BLOCK, GPU, Case, Request, daemon, engine, expected, model, prompt, run, watch, wild  # sets the paths
import numpy
import test_vllm_trouble
from ucmclient import EncodedNamespace, Found
from ucmclient.errors import UcmError

LAYOUTS = ("split", "fused", "packed", "content")
#: Tolerance of a first output's logits, relative to their length: three times what was measured.
CLOSE = {"fp8": 0.024, "int8": 0.006, "q4": 0.07}


class Bfloat16(Case):
    DTYPE = "bfloat16"

    def tearDown(self):
        """Before the engines are closed, nobody has a lease on blocks that no request needs."""
        if self.daemon is not None and self.daemon.process.poll() is None:
            self.eventually(lambda: self.stats()["leases"] == 0)

    def namespace(self, e):
        return e.connector._scheduler.link.ns

    def whole(self, tokens):
        return tokens // BLOCK * BLOCK


class Lossless(Bfloat16):
    def share(self, **more):
        a, b = (self.engine(**{"encoding": "lossless", **more}) for _ in range(2))
        tokens = prompt(400, 150)
        self.check(a, Request("cold", tokens))
        self.check(b, Request("warm", tokens))
        self.assertEqual((a.loaded_tokens, b.loaded_tokens), (0, self.whole(150)))
        return a, b

    def test_layouts(self):
        for layout in LAYOUTS:
            with self.subTest(layout):
                before = self.stats()
                self.share(layout=layout, salt=layout)
                after = self.stats()
                plain, encoded = (after[name] - before[name] for name in ("encode_raw_bytes", "encode_bytes"))
                self.assertGreater(plain, 1.2 * encoded)
                self.assertGreater(encoded, 0)
                self.assertEqual(after["encode_unfit"], 0)

    def test_loads_within_the_step(self):
        self.share(async_load=False)

    def test_layer_after_layer(self):
        for layout in ("split", "fused", "packed", "content"):
            with self.subTest(layout):
                self.share(async_load=False, layerwise=True, layout=layout, salt=layout)

    def test_ranks(self):
        self.share(ranks=2)
        self.share(ranks=2, replicated=True)

    def test_sleep(self):
        a, b = self.share()
        a.sleep()
        a.wake()
        self.check(a, Request("again", prompt(400, 150)), Request("new", prompt(401, 60)))
        self.assertGreater(a.loaded_tokens, 0)
        self.check(b, Request("shared", prompt(401, 60)))

    def test_what_does_not_fit_is_stored_as_it_is(self):
        with wild():
            a, b, plain = self.engine(encoding="lossless"), self.engine(encoding="lossless"), self.engine()
            tokens = prompt(402, 150)
            with self.assertLogs("ucmclient.engine.vllm", "WARNING") as log:
                self.check(a, Request("cold", tokens))
            self.assertEqual(sum("can't hold" in line for line in log.output), 1)
            self.assertGreaterEqual(self.stats()["encode_unfit"], 150 // BLOCK)
            for e in (b, plain):
                self.check(e, Request("warm", tokens))
                self.assertEqual(e.loaded_tokens, self.whole(150))

    def test_what_does_not_fit_of_a_request_that_is_preempted(self):
        with wild():
            tight = self.engine(blocks=24, encoding="lossless")
            self.check(tight, *(Request(f"r{i}", prompt(410 + i, 90), outputs=40) for i in range(4)))
            self.assertGreater(tight.preemptions, 0)


class Lossy(Bfloat16):
    def far(self, got, want):
        return float(numpy.linalg.norm(got - want) / numpy.linalg.norm(want))

    def test_logits_are_close(self):
        for encoding, most in CLOSE.items():
            for layout in LAYOUTS:
                with self.subTest(encoding, layout=layout):
                    a, b = (self.engine(encoding=encoding, layout=layout, salt=layout) for _ in range(2))
                    tokens = prompt(420, 150)
                    self.check(a, Request("cold", tokens))
                    warm = run(b, Request("warm", tokens))["warm"]
                    self.assertTrue(b.pool.idle())
                    self.assertEqual(b.loaded_tokens, self.whole(150))
                    self.assertTrue(all(numpy.isfinite(logits).all() for logits in warm.logits))
                    far = self.far(warm.logits[0], expected(tokens, 8, self.DTYPE)[0])
                    self.assertGreater(far, 0, "nothing was encoded")
                    self.assertLess(far, most)

    def test_a_scale_for_each_channel(self):
        """Two channels of K, which are rotated together, are 130 times as large, and the queries'
        as much smaller. Scores are unchanged."""
        large = model.Model()
        for layer in large.layers:
            for channel in (0, model.HEAD // 2):
                layer["k"][channel::model.HEAD] *= numpy.float32(130)
                layer["q"][channel::model.HEAD] /= numpy.float32(130)
        with mock.patch.object(vllm_case, "MODEL", large), mock.patch.dict(vllm_case.EXPECTED, clear=True):
            tokens = prompt(421, 150)
            want = expected(tokens, 8, self.DTYPE)[0]
            for layout in ("split", "packed", "content"):
                a, b = (self.engine(encoding="int8", layout=layout, salt=layout) for _ in range(2))
                self.check(a, Request("cold", tokens))
                far = self.far(run(b, Request("warm", tokens))["warm"].logits[0], want)
                self.assertEqual(b.loaded_tokens, self.whole(150))
                with self.subTest(layout, far=far):
                    self.assertLess(far, CLOSE["int8"])

    def test_it_goes_on_when_requests_are_preempted_and_aborted(self):
        tight = self.engine(blocks=24, encoding="fp8")
        requests = [Request(f"r{i}", prompt(430 + i, 90), outputs=70) for i in range(4)]
        aborted = []

        def between(e):
            if e.steps == 30 and e.running:
                aborted.append(e.running[0].request_id)
                e.abort(aborted[0])
        done = run(tight, *requests, between=between)
        self.assertGreater(tight.preemptions, 0)
        self.assertTrue(aborted and tight.pool.idle())
        for name, r in done.items():
            self.assertTrue(all(numpy.isfinite(logits).all() for logits in r.logits))
            if name not in aborted:
                self.assertEqual(len(r.logits), 70)

    def test_the_daemon_is_killed_and_comes_back(self):
        e = self.engine(encoding="fp8", lookup_timeout=0.05)
        tokens = prompt(440, 100)
        run(e, Request("cold", tokens))
        self.restart()
        self.eventually(lambda: self.namespace(e) is not None and e.ranks[0].connector._worker.link.region)

        def loads():
            before, e.pool = e.loaded_tokens, engine.Pool(e.blocks)
            run(e, Request(f"again{before}.{e.steps}", tokens))
            return e.loaded_tokens > before
        self.eventually(loads)
        self.assertIsInstance(self.namespace(e), EncodedNamespace)
        self.assertGreater(self.stats()["encode_bytes"], 0)


class Fleet(Bfloat16):
    """Engines of several encodings, and one without."""

    def test_engines_of_other_encodings_do_not_meet(self):
        tokens = prompt(450, 150)
        for encoding in ("fp8", "int8", "q4", "lossless", "none"):
            with self.subTest(encoding):
                one, again = (self.engine(encoding=encoding) for _ in range(2))
                self.check(one, Request("cold", tokens))  # bit for bit: nothing of the others was loaded
                self.assertEqual(one.loaded_tokens, 0)
                run(again, Request("warm", tokens))
                self.assertEqual(again.loaded_tokens, self.whole(150))

    def test_raw_blocks_serve_all(self):
        for layout in LAYOUTS:
            plain = self.engine(layout=layout, salt=layout)
            tokens = prompt(451, 150)
            self.check(plain, Request("cold", tokens))
            for encoding in ("fp8", "lossless"):
                with self.subTest(encoding, layout=layout):
                    e = self.engine(encoding=encoding, layout=layout, salt=layout)
                    self.check(e, Request("warm", tokens))
                    self.assertEqual(e.loaded_tokens, self.whole(150))
        self.assertEqual(self.stats()["decode_bytes"], 0)

    def test_both_forms_in_one_prefix(self):
        plain, a, b = self.engine(), self.engine(encoding="fp8"), self.engine(encoding="fp8")
        tokens = prompt(452, 200)
        self.check(plain, Request("head", tokens[:96]))
        self.check(a, Request("tail", tokens))
        self.assertEqual(a.loaded_tokens, 96)
        run(b, Request("warm", tokens))
        self.assertEqual(b.loaded_tokens, self.whole(200))
        self.check(plain, Request("whole", tokens))
        self.assertEqual(plain.loaded_tokens, 0, "its own hits, and nothing encoded")


class Policy(Bfloat16):
    """raw_first."""

    def forms(self, e, request):
        """The stored form of each block of a request: p: raw, e: encoded, -: not stored."""
        ns, keys = self.namespace(e), b"".join(request.block_hashes)
        both, plain = ns.lookup_per_key(keys)[0], ns.base.lookup_per_key(keys)[0]
        return "".join("p" if p != Found.NOT else "e" if b != Found.NOT else "-" for b, p in zip(both, plain))

    def stored(self, tokens, outputs=1, budget=64, **more):
        e = self.engine(encoding="fp8", budget=budget, salt=repr(more), **more)
        request = Request("cold", prompt(460, tokens), outputs=outputs)
        self.check(e, request)
        return self.forms(e, request)

    def test_first(self):
        self.assertEqual(self.stored(100), "eeeeee")
        self.assertEqual(self.stored(100, raw_first=1), "peeeee")
        self.assertEqual(self.stored(100, raw_first=16), "peeeee")
        self.assertEqual(self.stored(100, raw_first=17), "ppeeee")
        self.assertEqual(self.stored(100, raw_first=40, budget=32), "pppeee", "in chunks, too")
        self.assertEqual(self.stored(100, raw_first=1000), "pppppp")

    def test_they_are_what_a_plain_engine_has(self):
        e, plain = self.engine(encoding="fp8", raw_first=40), self.engine()
        tokens = prompt(461, 100)
        self.check(e, Request("cold", tokens))
        self.check(plain, Request("warm", tokens))
        self.assertEqual(plain.loaded_tokens, 48)


class Refused(Bfloat16):
    def test_with_what_to_change(self):
        with self.assertRaisesRegex(ValueError, "the KV cache is float32: start with --dtype bfloat16"):
            self.engine(encoding="fp8", dtype="float32")
        with self.assertRaisesRegex(UcmError, "f16"):
            self.engine(encoding="lossless", dtype="float16")
        self.check(self.engine(), Request("others go on", prompt(470, 40)))


@unittest.skipIf(GPU, "what is on NVMe is looked for on the host")
@unittest.skipUnless(os.environ.get("UCM_PHASE", "plain") == "plain", "sanitizers see test_vllm_trouble.py and the encodings by themselves")
class LosslessTrouble(test_vllm_trouble.Trouble, Bfloat16):
    ROUND = 20

    def engine(self, **more):
        return super().engine(encoding="lossless", **more)

    def corrupt(self, path, payloads):
        """A block begins with signs and mantissas of K, a byte each."""
        def rest(payload):
            bits = numpy.frombuffer(payload, numpy.uint32) >> 16
            return (bits >> 8 & 0x80 | bits & 0x7f).astype(numpy.uint8).tobytes()
        super().corrupt(path, [rest(payload) for payload in payloads])


#: If a block's bytes don't matter, test_vllm_trouble.py has the test.
for name in ("late_loads_hold_nobody_else_up", "a_connection_that_is_cut_as_soon_as_it_is_there", "a_daemon_that_is_busy_at_the_start",
             "a_daemon_that_stops_answering", "killed_again_and_again", "an_engine_that_starts_before_the_daemon",
             "loads_within_the_step_are_given_up", "slow_disks_are_not_waited_for"):
    assert hasattr(LosslessTrouble, f"test_{name}"), name
    setattr(LosslessTrouble, f"test_{name}", None)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
