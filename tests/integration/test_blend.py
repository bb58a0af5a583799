#!/usr/bin/python3
"""ucmclient.blend over a real daemon: chunks by their content, plans, and what is never stored."""

import array
import math
import os
import random
import shutil
import struct
import tempfile
import unittest

import client_paths  # noqa: F401  sets the paths of the others
from daemon import Daemon, DaemonCase
from ucmclient import Client, Identity, Plane, Rope, SharedMemory, UcmError, blend, keys
from ucmclient.blend import Asked, BlendedError, First, Found, Hkvd, Nothing, Span

B, CHUNK, BLOCKS = 16, 4096, 32
A, C, QUESTION = list(range(100, 150)), list(range(500, 580)), list(range(900, 910))  # 50, 80 and 10 tokens
SEPARATOR = [7, 7]


class Spans(unittest.TestCase):
    def test_a_separator_ends_chunks_and_belongs_to_none(self):
        self.assertEqual(blend.split([1, 2, 7, 7, 3, 7, 4, 7, 7], SEPARATOR), [Span(0, 2), Span(4, 7)])
        self.assertEqual(blend.split([7, 7, 1, 7, 7, 7, 7, 2], SEPARATOR), [Span(2, 3), Span(7, 8)])
        self.assertEqual(blend.split([7, 7, 7, 1], SEPARATOR), [Span(2, 4)])
        self.assertEqual(blend.split([1, 2, 7, 7, 3], SEPARATOR, least=2), [Span(0, 2)])
        self.assertEqual(blend.split([], SEPARATOR), [])
        with self.assertRaisesRegex(ValueError, "name at least one"):
            blend.split([1], [])

    def test_fixed_lengths_leave_the_rest(self):
        self.assertEqual(blend.split_fixed(70, 32), [Span(0, 32), Span(32, 64)])
        self.assertEqual(blend.split_fixed(70, 32, start=6), [Span(6, 38), Span(38, 70)])
        with self.assertRaisesRegex(ValueError, "at least one token"):
            blend.split_fixed(70, 0)

    def test_wrong_chunks_are_refused(self):
        with self.assertRaisesRegex(ValueError, "chunk 1 begins at token 5, chunk 0 ends at 8; chunks come in order and do not overlap"):
            blend.check_spans([Span(0, 8), Span(5, 9)], 20)
        with self.assertRaisesRegex(ValueError, "chunk 0 is tokens 4 to 21 of a request of 20"):
            blend.check_spans([Span(4, 21)], 20)
        with self.assertRaisesRegex(ValueError, "chunk 0 is tokens -1 to 3"):
            blend.check_spans([Span(-1, 3)], 20)


def found(n, spans, prefix=0, lacking=()):
    """All blocks of these chunks except `lacking`, as (chunk, block)."""
    there = tuple(tuple((i, j) not in lacking for j in range(len(s) // B)) for i, s in enumerate(spans))
    names = tuple(tuple(bytes([i, j]) * 16 for j in range(len(of))) for i, of in enumerate(there))
    return Found(n, B, prefix, tuple(spans), names, there)


class Plans(unittest.TestCase):
    def check_covers(self, plan):
        """Each token after the prefix is either computed or reused."""
        self.assertEqual(sorted(plan.compute + plan.reused), list(range(plan.prefix, plan.n_tokens)))
        self.assertIn(plan.n_tokens - 1, plan.compute)
        held = {p for load in plan.loads for p in range(load.position, load.position + B)}
        self.assertLessEqual(set(plan.reused), held)

    def test_the_first_tokens_of_each_chunk(self):
        plan = blend.plan(found(200, [Span(16, 66), Span(96, 176)]), First(4))
        self.check_covers(plan)
        self.assertEqual([(s.count, s.old, s.new) for s in plan.segments], [(3, 0, 16), (5, 0, 96)])
        self.assertEqual(plan.compute, tuple([*range(0, 20), *range(64, 100), *range(176, 200)]))
        self.assertEqual(plan.exact, 16)
        asked = blend.plan(found(200, [Span(16, 66), Span(96, 176)]), Asked(first=4))
        self.assertEqual((asked.compute, asked.reused, asked.loads), (plan.compute, plan.reused, plan.loads))

    def test_a_block_whose_tokens_are_all_computed_is_not_loaded(self):
        plan = blend.plan(found(200, [Span(16, 66), Span(96, 176)]), First(16))
        self.check_covers(plan)
        self.assertEqual([(s.count, s.old, s.new) for s in plan.segments], [(2, 16, 32), (4, 16, 112)])
        self.assertEqual(plan.exact, 32, "the first 16 tokens are computed after what is exact")

    def test_a_chunk_at_the_beginning_is_exact(self):
        plan = blend.plan(found(200, [Span(0, 50), Span(64, 144)]), First(16))
        self.check_covers(plan)
        self.assertEqual((plan.loads[0].old, plan.loads[0].position), (0, 0))
        self.assertEqual(plan.exact, 80)
        plan = blend.plan(found(64, [Span(0, 48)]), Nothing())
        self.assertEqual(plan.exact, 64)

    def test_blocks_that_lack_are_computed_and_the_others_loaded(self):
        plan = blend.plan(found(200, [Span(16, 96)], lacking={(0, 1), (0, 4)}), Nothing())
        self.check_covers(plan)
        self.assertEqual([(s.count, s.old, s.new) for s in plan.segments], [(1, 0, 16), (2, 32, 48)])
        self.assertLessEqual(set(range(32, 48)), set(plan.compute))

    def test_a_prefix_hit_goes_before_chunks(self):
        plan = blend.plan(found(200, [Span(16, 64), Span(96, 176)], prefix=48), Nothing())
        self.check_covers(plan)
        self.assertEqual([(s.count, s.old, s.new) for s in plan.segments], [(1, 32, 48), (5, 0, 96)])

    def test_pages_take_chunks_at_whole_blocks(self):
        spans = [Span(10, 60), Span(64, 144)]
        plan = blend.plan(found(200, spans), Nothing())
        self.check_covers(plan)
        self.assertEqual((plan.passed_over, {load.chunk for load in plan.loads}), ((0,), {1}))
        plan = blend.plan(found(200, spans), Nothing(), paged=False)
        self.check_covers(plan)
        self.assertEqual((plan.passed_over, {load.chunk for load in plan.loads}), ((), {0, 1}))

    def test_the_last_token_is_always_computed(self):
        plan = blend.plan(found(64, [Span(16, 64)]), Nothing())
        self.check_covers(plan)
        self.assertEqual(plan.compute, tuple([*range(16), 63]))


class Deviations(unittest.TestCase):
    def test_the_largest_go_on(self):
        policy = Hkvd(ratio=0.4)
        self.assertEqual(policy.choosing, [1])
        self.assertEqual(policy.choose(1, [1, 9, 3, 9, 0], 5), [1, 3])
        self.assertEqual(policy.choose(1, [2, 2, 2, 2, 2], 5), [0, 1], "of equals the earlier")
        self.assertEqual(policy.choose(1, [1, 9, float("nan"), 9, 0], 5), [1, 2], "NaN is computed again")
        self.assertEqual(policy.choose(1, [], 0), [])

    def test_a_ratio_for_each_layer(self):
        policy = Hkvd(ratio={1: 0.6, 3: 0.2})
        self.assertEqual(policy.choosing, [1, 3])
        self.assertEqual(policy.choose(1, [5, 4, 3, 2, 1], 5), [0, 1, 2])
        self.assertEqual(policy.choose(3, [1, 2, 3], 5), [2], "of all that were reused, not of what is left")

    def test_a_threshold_instead_of_a_share(self):
        self.assertEqual(Hkvd(threshold=1.5).choose(1, [1, 1, 1, 5], 4), [3])
        self.assertEqual(Hkvd(threshold=0.5).choose(1, [0, 0], 2), [])

    def test_wrong_settings_are_refused(self):
        for words, settings in (("from 1 on", dict(layers=[0])), ("from 1 on", dict(layers=[])), ("in order", dict(layers=[2, 1])),
                                ("no larger", dict(ratio={1: 0.2, 2: 0.4})), ("0 to 1.0 are allowed", dict(ratio=1.5)),
                                ("0 and more", dict(threshold=-1))):
            with self.assertRaisesRegex(ValueError, words):
                Hkvd(**settings)
        with self.assertRaisesRegex(ValueError, "0 and more"):
            First(-1)
        for words, settings in (("0 to 1 are allowed", dict(ratio=1.5)), ("first -1 tokens", dict(first=-1)), ("1 and more", dict(queries=0)),
                                ("more than 0", dict(depth=0)), ("at most 1", dict(depth=1.1))):
            with self.assertRaisesRegex(ValueError, words):
                Asked(**settings)

    def test_what_draws_the_most_attention_is_computed(self):
        policy = Asked(0.4)
        self.assertEqual(policy.choose([0.1, 0.9, 0.3, 0.9, 0]), [1, 3])
        self.assertEqual(policy.choose([0.2, 0.2, 0.2]), [0, 1], "of equals the earlier")
        self.assertEqual(policy.choose([0, 0.9, float("nan")]), [1, 2], "NaN is computed again")
        self.assertEqual(policy.choose([]), [])
        self.assertEqual([policy.layers(n) for n in (1, 30, 32)], [1, 20, 22])


HEADS, DIM = 2, 64  # K of a block: 4 KiB in BF16, and V as much


def bf16(x):
    """x rounded to BF16, to nearest even, as its 16 bits."""
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16


def value(h):
    return struct.unpack("<f", struct.pack("<I", h << 16))[0]


def rotated(raw, position, base):
    """The rows of a block's K in BF16, whose first token is at that position."""
    out = []
    for token, rows in enumerate(raw):
        for row in rows:
            half = [0.0] * DIM
            for i in range(DIM // 2):
                a = (position + token) * base ** (-2 * i / DIM)
                x, y = row[i], row[i + DIM // 2]
                half[i], half[i + DIM // 2] = x * math.cos(a) - y * math.sin(a), x * math.sin(a) + y * math.cos(a)
            out += [bf16(v) for v in half]
    return array.array("H", out)


class Rerotation(unittest.TestCase):
    """Through the daemon: K of a chunk at other positions, V as it was."""

    BASE, TENSOR = 10000.0, B * HEADS * DIM * 2

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="blend.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.daemon = Daemon(directory=self.directory)
        self.addCleanup(lambda: self.daemon.stop())
        self.open()

    def open(self):
        self.client = Client(socket=self.daemon.socket, name="rerotation")
        identity = Identity(model="rerotation", dtype="bf16", layout="nhd/1", block_tokens=B, layers=(1,), layer_bytes=2 * self.TENSOR)
        self.chunks = blend.Chunks(self.client, identity)
        self.shared = SharedMemory(2 * self.TENSOR * BLOCKS)
        self.planes = [Plane(0, i * self.TENSOR, 2 * self.TENSOR, self.TENSOR, 0) for i in range(2)]
        self.pages = self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS,
                                          rope=Rope(rows=B * HEADS, dim=DIM, rotary=DIM, base=self.BASE))

    def tensor(self, block, which):
        start = (2 * block + which) * self.TENSOR
        return self.shared.buffer[start:start + self.TENSOR]

    def put(self, tokens):
        """Stores a chunk as it was computed at its own start. -> its raw K, block by block."""
        rng = random.Random(str(tokens))
        n = len(tokens) // B
        raw = [[[[rng.uniform(-2, 2) for _ in range(DIM)] for _ in range(HEADS)] for _ in range(B)] for _ in range(n)]
        for j in range(n):
            self.tensor(j, 0)[:] = rotated(raw[j], j * B, self.BASE).tobytes()
            self.tensor(j, 1)[:] = rng.randbytes(self.TENSOR)
        self.values = [bytes(self.tensor(j, 1)) for j in range(n)]
        plan = blend.plan(self.chunks.lookup(tokens, [Span(0, len(tokens))]), Nothing())
        self.assertTrue(self.pages.store(plan, tokens, 0, range(n)).wait().all_ok)
        return raw

    def get(self, tokens, spans, policy=Nothing()):
        found = self.chunks.lookup(tokens, spans, lease=10)
        plan = blend.plan(found, policy)
        self.shared.buffer[:] = bytes(len(self.shared.buffer))
        self.assertTrue(self.pages.load(plan, range(len(plan.loads)), lease=found.lease).wait().all_ok)
        return plan

    def check(self, plan, chunk, raw, values):
        for i, load in enumerate(plan.loads):
            if load.chunk != chunk:
                continue
            want, got = rotated(raw[load.block], load.position, self.BASE), array.array("H", bytes(self.tensor(i, 0)))
            for a, b in zip(want, got):
                self.assertLess(abs(value(a) - value(b)), 0.03, (load, value(a), value(b)))
            self.assertEqual(bytes(self.tensor(i, 1)), values[load.block], "V stays")

    def test_a_chunk_at_two_positions_and_across_a_restart(self):
        raw_a, values_a = self.put(A), self.values
        raw_c, values_c = self.put(C), self.values
        tokens = [1] * 16 + A + [2] * 14 + C + [3] * 16 + A + QUESTION
        spans = [Span(16, 66), Span(80, 160), Span(176, 226)]

        def check():
            plan = self.get(tokens, spans)
            self.assertEqual([(s.count, s.new) for s in plan.segments], [(3, 16), (5, 80), (3, 176)])
            for chunk, raw, values in ((0, raw_a, values_a), (1, raw_c, values_c), (2, raw_a, values_a)):
                self.check(plan, chunk, raw, values)

        check()
        self.client.close()
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory)
        self.open()
        check()

    def test_a_chunk_where_it_was_computed_keeps_its_bits(self):
        self.put(A)
        before = [bytes(self.tensor(j, 0)) for j in range(3)]
        plan = self.get(A + QUESTION, [Span(0, 50)])
        self.assertEqual([bytes(self.tensor(j, 0)) for j in range(3)], before)
        self.assertEqual(plan.exact, 60)

    def test_loads_that_can_not_be_are_refused(self):
        self.put(A)
        region, names = self.pages._region, blend.chunk_keys(A, B)
        for words, shifts in (
            ("the runs have 2 keys, the load has 3", [(2, 0, 16)]),
            ("run 1 begins at position 40, the one before ends at 48", [(2, 0, 16), (1, 32, 40)]),
            ("run 0 has no keys", [(0, 0, 16), (3, 0, 16)]),
            ("of run 0's last token the new position is 2147483687; 0 to 2147483647 are allowed", [(3, 0, 2147483640)]),
            ("of run 0's last token the old position", [(3, 2147483640, 0)]),
        ):
            with self.assertRaisesRegex(UcmError, words):
                region.load(names, range(3), shifts=shifts).wait()
        plain = self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS)
        with self.assertRaisesRegex(UcmError, "was registered without rope"):
            plain._region.load(names, range(3), shifts=[(3, 0, 16)]).wait()
        with self.assertRaisesRegex(UcmError, 'rope_scaling is "longrope"; default, linear, dynamic, yarn and llama3 are known'):
            self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS,
                                 rope=Rope(rows=B * HEADS, dim=DIM, rotary=DIM, base=1e4, scaling="longrope"))

    def test_dynamic_scaling_stores_no_more_than_the_model_was_trained_for(self):
        rope = Rope(rows=B * HEADS, dim=DIM, rotary=DIM, base=1e4, scaling="dynamic", factor=2, trained=40)
        pages = self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS, rope=rope)
        plan = blend.plan(self.chunks.lookup(A, [Span(0, 50)]), Nothing())
        with self.assertRaisesRegex(BlendedError, "the request has 50 tokens, the model was trained for 40"):
            pages.store(plan, A, 0, range(3))
        self.put(A)
        names = blend.chunk_keys(A, B)
        self.assertTrue(pages._region.load(names, range(3), shifts=[(3, 0, 16, 20, 40)]).wait().all_ok, "both within what it was trained for")
        with self.assertRaisesRegex(UcmError, "run 0 goes from a length of 0 to 66, past the trained 40: dynamic scaling then gives each token an angle"):
            pages._region.load(names, range(3), shifts=[(3, 0, 16, 0, 66)]).wait()


class Storing(DaemonCase):
    def setUp(self):
        self.client = Client(socket=self.daemon.socket, name="blend")
        self.addCleanup(self.client.close)
        self.identity = Identity(model=self.id(), dtype="bf16", layout="nhd/1", block_tokens=B, layers=(1,), layer_bytes=CHUNK)
        self.chunks = blend.Chunks(self.client, self.identity)
        self.shared = SharedMemory(CHUNK * BLOCKS)
        self.shared.buffer[:] = os.urandom(CHUNK * BLOCKS)
        self.planes = [Plane(0, 0, CHUNK, CHUNK, 0)]
        self.pages = self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS)

    def store(self, tokens):
        """As a request that is this chunk alone."""
        own = self.chunks.lookup(tokens, [Span(0, len(tokens))])
        plan = blend.plan(own, Nothing())
        n = len(tokens) // B
        self.assertTrue(self.pages.store(plan, tokens, 0, range(n)).wait().all_ok)

    def test_a_chunk_is_found_after_any_beginning(self):
        self.store(A)
        self.store(C)
        for tokens in (A + SEPARATOR + C + QUESTION, C + SEPARATOR + A + SEPARATOR + QUESTION, QUESTION + SEPARATOR + A):
            spans = blend.split(tokens, SEPARATOR, least=B)
            seen = self.chunks.lookup(tokens, spans, lease=5)
            whole = {len(A): 3, len(C): 5, len(C + QUESTION): 5}
            self.assertEqual([sum(of) for of in seen.there], [whole[len(s)] for s in spans])
            self.assertNotEqual(seen.lease, 0)
            self.client.release(seen.lease)
        changed = A[:20] + [1] + A[21:]
        self.assertEqual(self.chunks.lookup(changed, [Span(0, 50)]).there, ((True, False, False),))

    def test_chunks_and_prefixes_never_meet(self):
        self.store(A)
        prefixes = self.client.namespace(self.identity)
        self.assertEqual(prefixes.lookup_prefix(keys.sha256_chain(A, B)).blocks, 0)
        self.assertNotEqual(prefixes.fingerprint, self.chunks.fingerprint)
        with self.assertRaisesRegex(ValueError, "already"):
            blend.chunk_identity(blend.chunk_identity(self.identity))

    def test_blended_kv_is_never_stored(self):
        self.store(A)
        tokens = QUESTION + SEPARATOR + [3] * 4 + A + SEPARATOR + [4] * 12 + C
        spans = [Span(16, 66), Span(80, 160)]
        plan = blend.plan(self.chunks.lookup(tokens, spans), First(4))
        self.assertEqual((plan.exact, len(plan.loads)), (16, 3))
        with self.assertRaisesRegex(BlendedError, "chunk 0 begins at token 16"):
            self.pages.store(plan, tokens, 0, range(3))
        with self.assertRaisesRegex(BlendedError, "chunk 1 begins at token 80"):
            self.pages.store(plan, tokens, 1, range(5))  # computed in full, but after what is blended
        prefixes = self.client.namespace(self.identity)
        region = prefixes.register([self.shared.memory()], self.planes, blocks=BLOCKS)
        names = [keys.sha256_chain(tokens, B)[i:i + 32] for i in range(0, 10 * 32, 32)]
        with self.assertRaisesRegex(BlendedError, "blocks 0 to 1 reach to token 32, but from token 16 on KV is blended"):
            blend.store_prefix(plan, region, names[:2], range(2))
        self.assertTrue(blend.store_prefix(plan, region, names[:1], range(1)).wait().all_ok)
        self.assertEqual(prefixes.lookup_prefix(names).blocks, 1)
        self.assertEqual(self.chunks.lookup(tokens, spans).there[1], (False,) * 5)

    def test_pages_of_chunks_have_no_way_around_the_plan(self):
        self.assertFalse(hasattr(self.pages, "dump"))
        self.assertFalse(hasattr(self.chunks, "ns"))
        plan = blend.plan(self.chunks.lookup(A, [Span(0, 50)]), Nothing())
        with self.assertRaisesRegex(ValueError, "49 tokens were given, the plan is for 50"):
            self.pages.store(plan, A[:49], 0, range(3))

    def test_a_copy_agent_learns_where_k_lies(self):
        asked = {}

        class CopyAgent:
            def register(_, ns, memory, planes, **more):
                asked.update(more, fingerprint=ns.fingerprint)
                return ns.register(memory, planes, blocks=more["blocks"], rope=more["rope"])

        rope = Rope(rows=32, dim=32, rotary=32, base=1e4)
        pages = self.chunks.register([self.shared.memory()], self.planes, blocks=BLOCKS, rope=rope, copy_agent=CopyAgent(), addresses=[4096])
        self.assertEqual(asked, {"blocks": BLOCKS, "rope": rope, "addresses": [4096], "fingerprint": self.chunks.fingerprint})
        pages.close()

    def test_requests_that_can_not_be_are_refused(self):
        with self.assertRaisesRegex(ValueError, "do not overlap"):
            self.chunks.lookup(A, [Span(0, 20), Span(10, 40)])
        with self.assertRaisesRegex(ValueError, "the prefix has 51 tokens, the request 50"):
            self.chunks.lookup(A, [], prefix=51)
        with self.assertRaisesRegex(ValueError, "keys of chunks have 32 bytes"):
            blend.chunk_identity(Identity(model="m", dtype="bf16", layout="l", block_tokens=B, layers=(1,), layer_bytes=CHUNK, key_bytes=16))


if __name__ == "__main__":
    unittest.main(verbosity=2)
