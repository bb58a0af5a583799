#!/usr/bin/python3
"""The numpy digests of tests/reference/sparse, which the C is compared with, against what their definitions promise."""

import fractions
import pathlib
import sys
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "reference/sparse"))
import formats  # noqa: E402
import methods as m  # noqa: E402

RNG = np.random.default_rng(14)
SPECS = [m.Spec("mean"), m.Spec("mean", kind=m.MAX), m.Spec("mean", kind=m.NORMALISED), m.Spec("submean", run=4),
         m.Spec("submean", run=8, keep=(0, 3, 9)), m.Spec("submean", run=8, keep=(0, 3, 9), pairs="interleaved"), m.Spec("box"),
         m.Spec("hash", bits=64), m.Spec("hash", bits=256), m.Spec("stats", v_head_dim=128), m.Spec("stats"), m.Spec("tokens"),
         m.Spec("hash", kv_heads=1, head_dim=576, rope_dim=64, bits=256, latent_bits=192)]


def keys(spec, n=5):
    return (RNG.normal(size=(n, spec.tokens, spec.kv_heads, spec.head_dim)) * 3).astype(np.float32)


def values(spec, n=5):
    return RNG.normal(size=(n, spec.tokens, spec.kv_heads, spec.v_head_dim)).astype(np.float32)


def nearest(exact):
    """The float32 nearest to a fraction, by comparison with the neighbours of a guess."""
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(near, key=lambda x: (abs(fractions.Fraction(float(x)) - exact), int(np.float32(x).view(np.uint32)) & 1))


class Arithmetic(unittest.TestCase):
    def test_fma_rounds_once(self):
        a = RNG.normal(size=2000).astype(np.float32)
        b = (RNG.normal(size=2000) * 2.0 ** RNG.integers(-30, 30, 2000)).astype(np.float32)
        c = RNG.normal(size=2000).astype(np.float32)
        a[:2], b[:2] = 1 + 2 ** -12, 1 + 2 ** -12  # the product lies half-way between two floats: only c decides
        c[:2] = 2.0 ** -80, -2.0 ** -80
        mine = m.fma(a, b, c)
        for i in range(2000):
            exact = fractions.Fraction(float(a[i])) * fractions.Fraction(float(b[i])) + fractions.Fraction(float(c[i]))
            self.assertEqual(mine[i], nearest(exact), i)
        self.assertNotEqual(mine[0], mine[1])

    def test_dot_is_of_32_lanes(self):
        for n in (1, 31, 64, 72, 576):
            q, r = RNG.normal(size=n).astype(np.float32), RNG.integers(-127, 128, n).astype(np.float32)
            acc = [np.float32(0)] * 32
            for c in range(n):
                acc[c % 32] = m.fma(q[c], r[c], acc[c % 32])[()]
            for half in (16, 8, 4, 2, 1):
                acc = [acc[i] + acc[i + half] for i in range(half)]
            self.assertEqual(m.dot(q, r), acc[0])

    def test_formats(self):
        self.assertEqual([float(x) for x in formats.fp8_e4m3_to_f32([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0xB8])],
                         [0, 2 ** -9, 2 ** -6, 1, 448, -448, -1])
        self.assertTrue(np.isnan(formats.fp8_e4m3_to_f32([0x7F, 0xFF])).all())
        x = np.abs(RNG.normal(size=1000)).astype(np.float32)
        up = formats.bf16_to_f32(formats.bf16_up(x))
        self.assertTrue(((up >= x) & (up <= x * np.float32(1 + 2 ** -7))).all())
        self.assertEqual(int(m.splitmix64(m.GOLDEN)), 0xE220A8397B1DCDAF)


class Digests(unittest.TestCase):
    def test_bytes(self):
        for spec in SPECS:
            digest = m.build(spec, keys(spec), values(spec))
            raw = m.pack(spec, digest)
            self.assertEqual(raw.shape, (5, m.digest_bytes(spec)))
            back = m.unpack(spec, raw)
            for name, _, shape in spec.fields():
                self.assertEqual(back[name].shape, (5,) + shape)
                np.testing.assert_array_equal(back[name], digest[name])
        self.assertEqual(m.digest_bytes(m.Spec("mean")), 8 * 128 + 16)
        self.assertEqual(m.digest_bytes(m.Spec("hash", bits=64)), 8 * 16 * 8 + 32)

    def test_quantised_is_near(self):
        spec = m.Spec("mean")
        K = keys(spec)
        digest = m.build(spec, K)
        scale = formats.bf16_to_f32(digest["s"])[..., None]
        self.assertTrue((np.abs(digest["r"] * scale - K.mean(1)) <= scale * 0.5001 + 1e-6).all())
        self.assertGreaterEqual(np.abs(digest["r"]).max(-1).min(), 126)
        zero = m.build(spec, np.zeros_like(K))
        self.assertFalse(zero["r"].any() or zero["s"].any())

    def test_box_is_a_bound(self):
        for scale in (1e-30, 1, 1e4):
            spec = m.Spec("box", head_dim=96)
            K = (keys(spec) * scale).astype(np.float32)
            q = (RNG.normal(size=(3, 32, 96)) * 2.0 ** RNG.integers(-8, 8, (3, 32, 96))).astype(np.float32)
            bound = m.score(spec, m.build(spec, K), q).reshape(3, 8, 4, 5)
            exact = np.einsum("rghd,ntgd->rghnt", q.reshape(3, 8, 4, 96).astype(float), K.astype(float)).max(-1)
            self.assertTrue((bound >= exact).all())
            self.assertTrue((bound <= exact + 12 * scale * np.abs(q).sum(-1).reshape(3, 8, 4, 1)).all())

    def test_hash_tells_angles(self):
        spec = m.Spec("hash", tokens=1, kv_heads=1, bits=256, seed=7)
        K = keys(spec, 400)
        q = keys(spec, 1).reshape(1, 1, 128)
        K += np.linspace(-1, 1, 400, dtype=np.float32)[:, None, None, None] * q[0]
        got = m.score(spec, m.build(spec, K), q)[0, 0]
        cosine = (K[:, 0, 0] @ q[0, 0]) / np.linalg.norm(K[:, 0, 0], axis=-1) / np.linalg.norm(q)
        expected = 256 * (1 - 2 * np.arccos(cosine) / np.pi)
        self.assertGreater(np.corrcoef(got, expected)[0, 1], 0.9)
        same = m.score(spec, m.build(spec, q[None]), q)
        self.assertEqual(float(same[0, 0, 0]), 256)
        self.assertNotEqual(m.build(m.Spec("hash", tokens=1, kv_heads=1, bits=256), K)["words"].tolist(),
                            m.build(spec, K)["words"].tolist())

    def test_stats_are_an_estimate_of_the_log_sum(self):
        spec = m.Spec("stats", kv_heads=2, head_dim=64)
        K, q = keys(spec, 200) / 4, (RNG.normal(size=(1, 4, 64)) * 1.5).astype(np.float32)
        got = m.score(spec, m.build(spec, K), q).reshape(2, 2, 200)
        exact = np.log(np.exp(np.einsum("ghd,ntgd->ghnt", q.reshape(2, 2, 64), K) / 8).sum(-1))
        self.assertLess(np.abs(got - exact).mean(), 0.25)

    def test_stand_ins_are_far_from_each_other(self):
        spec = m.Spec("tokens", kv_heads=1, head_dim=32, stand_ins=3)
        K = np.zeros((1, 16, 1, 32), np.float32)
        K[0, 5, 0, 0], K[0, 9, 0, 1], K[0, 2, 0, 1] = 8, 4, 4
        np.testing.assert_array_equal(m.farthest_first(spec, K)[0, 0], [5, 2, 0])
        self.assertEqual(len(set(m.farthest_first(m.Spec("tokens", kv_heads=1, head_dim=32, stand_ins=16), 0 * K)[0, 0])), 16)

    def test_poison(self):
        for spec in SPECS:
            for bad in (np.nan, np.inf, -np.inf):
                K, V = keys(spec), values(spec)
                K[3, 7, -1, 2] = bad
                digest = m.build(spec, K, V)
                q = RNG.normal(size=(1, spec.kv_heads * 2, spec.head_dim)).astype(np.float32)
                raw = m.score(spec, digest, q)
                self.assertTrue((raw[:, -2:, 3] == np.inf).all())
                raw[:, -2:, 3] = 0
                self.assertTrue(np.isfinite(raw).all(), spec)
                clean = m.build(spec, np.where(np.isfinite(K), K, 0), V)
                for name, _, _ in spec.fields():
                    np.testing.assert_array_equal(np.delete(digest[name], 3, 0)[:, 0], np.delete(clean[name], 3, 0)[:, 0])


class Scores(unittest.TestCase):
    def test_distance_metric(self):
        for spec in (m.Spec("mean"), m.Spec("submean"), m.Spec("tokens")):
            K, q = keys(spec), RNG.normal(size=(2, 16, 128)).astype(np.float32)
            self.assertTrue((m.score(spec, m.build(spec, K), q, "l2") < 0).all())
        spec = m.Spec("mean", kv_heads=1)
        K = keys(spec)
        got = m.score(spec, m.build(spec, K), K.mean(1)[:1].astype(np.float32), "l2")
        self.assertEqual(got[0, 0].argmax(), 0)

    def test_reduce(self):
        raw = np.array([[[1, 5, np.nan], [2, 3, 4]], [[0, 0, 0], [7, 1, np.inf]]], np.float32)  # [rows, heads, n]
        np.testing.assert_array_equal(m.reduce_group(raw, 1), [[7, 5, np.inf]])
        np.testing.assert_array_equal(m.reduce_group(raw, 2), [[1, 5, 0], [7, 3, np.inf]])
        np.testing.assert_array_equal(m.reduce_group(raw, 1, "mean"), [[2.5, 2.25, np.inf]])
        soft = m.reduce_group(raw[:, :, :2], 1, "softmax", 1.0)
        self.assertAlmostEqual(float(soft.sum()), 4, places=5)
        np.testing.assert_array_equal(m.reduce_heads(m.reduce_group(raw, 2), "max"), [[7, 5, np.inf]])
        np.testing.assert_array_equal(m.reduce_heads(m.reduce_group(raw, 2), "sum"), [[8, 8, np.inf]])


class Choices(unittest.TestCase):
    def test_order(self):
        s = np.array([1, np.nan, -0.0, 0.0, 3, 3, -np.inf, np.inf], np.float32)
        np.testing.assert_array_equal(m.ranking(s), [7, 4, 5, 0, 2, 3, 1, 6])

    def test_topk(self):
        s = np.arange(20, dtype=np.float32)[::-1].copy()
        np.testing.assert_array_equal(m.choose_topk(s, 5), [0, 1, 2, 18, 19])
        np.testing.assert_array_equal(m.choose_topk(s, 1), [0, 18, 19])
        s[[9, 10, 11]] = np.inf
        np.testing.assert_array_equal(m.choose_topk(s, 4), [0, 9, 10, 11, 18, 19])
        np.testing.assert_array_equal(m.choose_topk(s, 4, room=4), [0, 9, 10, 11])
        self.assertEqual(m.count_topk(100), 30)
        self.assertEqual(m.count_topk(3), 3)
        self.assertEqual(m.count_topk(100, topk_tokens=100), 7)

    def test_mass(self):
        s = np.log(np.array([1, 8, 4, 2, 1, 1, 1], np.float32))
        np.testing.assert_array_equal(m.choose_mass(s, 0.8, 1.0), [0, 1, 2, 5, 6])
        np.testing.assert_array_equal(m.choose_mass(s, 0.5, 1.0, limit=4), [0, 1, 5, 6])
        np.testing.assert_array_equal(m.choose_mass(s, 1.0, 1.0), range(7))

    def test_history(self):
        np.testing.assert_allclose(m.history_scores(np.array([2, 0, 0], np.uint32)), [1.1, 0.55, 1.0], rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
