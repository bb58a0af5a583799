#!/usr/bin/python3
"""The vLLM connector's setting `chunks`, in the small engine of tests/engines/vllm. A prompt that
is sent in pieces gets, bit for bit, what the blended reference (blend_engine.py) computes. No other
request gets any of that."""

import math
import shutil
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, MODEL, Case, Request, daemon, expected, prompt, run, watch  # sets the paths
from extra import extra_of
import numpy

import engine as small
from blend_engine import BlendEngine, BlendRequest
from engine import configuration
from engine_pages import Tensor
from ucmclient import Client, Region, blend
from ucmclient.blend import First, Hkvd, Nothing, Span
from ucmclient.blend.pieces import CHUNKS, FIRST, SALT, STORE
from ucmclient.errors import Status, UcmError
from ucmclient.engine.vllm import chunk_rope, chunk_rules, connector, settings
from ucmclient.engine.vllm.identity import Unsupported
from ucmclient.engine.vllm.scheduler import PREFILL

A, C, SYSTEM = prompt(1, 50), prompt(2, 80), prompt(3, 32)  # 3, 5 and 2 whole blocks
MIXED = SYSTEM + A + prompt(5, 14) + C + prompt(6, 16) + A + prompt(4, 9)  # A at two positions
SPANS = [Span(32, 82), Span(96, 176), Span(192, 242)]
POLICIES = Nothing(), First(16), First(32)


def request(name, piece, outputs=8):
    return Request(name, piece.tokens, outputs if piece.last else 1, salt=piece.salt, transfer=piece.body["kv_transfer_params"])


def table(of, scale=1.0, **changed):
    """A table like vLLM's: a row of cosines and sines for each position."""
    rows = [[scale * f(p * w) for f in (math.cos, math.sin) for w in chunk_rope.frequencies(of)] for p in range(128)]
    said = {"head_size": of.rope.dim, "rotary_dim": of.rope.rotary, "is_neox_style": not of.rope.interleaved,
            "cos_sin_cache": numpy.array(rows, numpy.float32)}
    return SimpleNamespace(**{**said, **changed})


class Chunks(Case):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="chunks.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.daemon = daemon(directory=self.directory)
        self.addCleanup(self.stop)
        self.reference = {}
        # The connector's base class here, also a real vLLM's, has rotated nothing, and has no
        # attention backend.
        rotated = [table(chunk_rope.rerotation_of(configuration(8, 1, False, {"chunks": True})[0]))]
        for name, of in ("_rotary_embeddings", lambda: rotated), ("_k_in_columns", lambda *_: False):
            patched = mock.patch(f"ucmclient.engine.vllm.connector.{name}", of)
            patched.start()
            self.addCleanup(patched.stop)

    def engine(self, **more):
        return super().engine(**{"chunks": True, "budget": 512, "blocks": 128, **more})

    def filled(self, *chunks, **more):
        """An engine that has stored these, each as a request of its own."""
        e = self.engine(**more)
        for i, chunk in enumerate(chunks):
            self.check(e, Request(f"chunk{i}", chunk, 1, transfer={STORE: True}))
        e.pool = small.Pool(e.blocks)  # a hit of its own prefix cache would be no load
        return e

    def pieces(self, tokens, spans, policy, salt="mine"):
        return list(blend.pieces(tokens, spans, policy, block_tokens=BLOCK, salt=salt))

    def answer(self, e, tokens, spans, policy, salt="mine", outputs=8, **more):
        """The last piece's logits."""
        for i, piece in enumerate(self.pieces(tokens, spans, policy, salt)):
            last = request(f"{salt}{i}", piece, outputs)
            run(e, last, **more)
        return last.logits

    def blended(self, tokens, spans, policy, outputs=8):
        """What the reference computes for the prompt. Its chunks lie in a namespace of their own.
        """
        key = tuple(tokens), tuple(spans), policy, outputs
        if key not in self.reference:
            client = Client(socket=self.daemon.socket, name="reference")
            e = BlendEngine(MODEL, client, budget=512)
            for chunk in {tuple(tokens[s.start : s.end]) for s in spans}:
                e.store(list(chunk))
            one = BlendRequest("reference", tokens, spans, policy, outputs)
            e.add(one)
            while e.requests:
                e.step()
            e.close()
            client.close()
            self.reference[key] = one.logits
        return self.reference[key]

    def equal(self, logits, others):
        self.assertEqual(len(logits), len(others))
        for i, (a, b) in enumerate(zip(logits, others)):
            self.assertTrue(numpy.array_equal(a, b), f"output {i}")

    def differ(self, logits, others):
        self.assertFalse(numpy.array_equal(logits[0], others[0]))

    # ---- what comes out ----

    def test_pieces_give_what_the_blended_reference_gives(self):
        e = self.filled(A, C)
        for policy, loaded in zip(POLICIES, (11, 8, 5)):
            before = e.loaded_tokens
            self.equal(self.answer(e, MIXED, SPANS, policy, salt=f"{policy}"), self.blended(MIXED, SPANS, policy))
            self.assertEqual(e.loaded_tokens - before, loaded * BLOCK)
            self.differ(self.blended(MIXED, SPANS, policy), expected(MIXED, 8))
            self.assertTrue(e.pool.idle())

    def test_all_layouts(self):
        for layout in ("fused", "content", "packed", "layers"):
            with self.subTest(layout):
                e = self.filled(A, C, layout=layout, salt=layout)
                self.equal(self.answer(e, MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))

    def test_tokens_of_a_channel_side_by_side(self):
        with mock.patch("ucmclient.engine.vllm.connector._k_in_columns", lambda *_: True):
            for ranks in 1, 2:
                e = self.filled(A, C, layout="columns", ranks=ranks)
                self.equal(self.answer(e, MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))
                self.assertEqual(e.loaded_tokens, 8 * BLOCK)

    def test_two_ranks(self):
        e = self.filled(A, C, ranks=2)
        self.equal(self.answer(e, MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))
        self.assertEqual(e.loaded_tokens, 8 * BLOCK)

    def test_chunks_side_by_side_are_one_load(self):
        e, tokens = self.filled(A[:48], C), SYSTEM + A[:48] + C + A[:48]
        spans = [Span(32, 80), Span(80, 160), Span(160, 208)]
        self.assertEqual(len(self.pieces(tokens, spans, Nothing())), 2)
        self.equal(self.answer(e, tokens, spans, Nothing()), self.blended(tokens, spans, Nothing()))

    def test_a_prompt_that_begins_with_a_chunk_has_an_exact_beginning(self):
        e, tokens = self.filled(A, C), C + prompt(8, 40)
        self.equal(self.answer(e, tokens, [Span(0, 80)], First(16)), expected(tokens, 8))
        self.assertEqual(e.loaded_tokens, 80)
        tokens = C + A + prompt(8, 9)
        self.equal(self.answer(e, tokens, [Span(0, 80), Span(80, 130)], First(16), "two"), self.blended(tokens, [Span(0, 80), Span(80, 130)], First(16)))
        self.assertEqual(e.loaded_tokens, 80 + 80 + 32)

    def test_other_engines_find_them(self):
        self.filled(A, C)
        self.equal(self.answer(self.engine(), MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))

    def test_steps_and_preemptions(self):
        self.filled(A, C)
        for budget in (7, 16, 33):
            self.equal(self.answer(self.engine(budget=budget), MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))
        # Two requests that don't fit side by side. All pieces of both but the last are there when
        # they begin. Blocks that one loses are loaded again.
        e = self.engine(blocks=40, budget=40)
        plain = Request("plain", prompt(20, 200), 120)
        *before, last = self.pieces(MIXED, SPANS, First(16))
        for i, piece in enumerate(before):
            run(e, request(f"p{i}", piece))
        run(e, plain, request("mixed", last, 100))
        self.assertGreater(e.preemptions, 0)
        self.same({"plain": plain})

    def test_what_a_preempted_request_has_not_any_more_is_loaded_again(self):
        e, (*before, last) = self.filled(A, C, budget=33), self.pieces(MIXED, SPANS, First(16))
        for i, piece in enumerate(before):
            run(e, request(f"p{i}", piece))
        one, loaded = request("mixed", last), e.loaded_tokens
        e.add(one)
        while not one.logits:
            e.step()
        e.running.remove(one)
        e._preempt(one)
        run(e)
        self.equal(one.logits, self.blended(MIXED, SPANS, First(16)))
        self.assertGreaterEqual(e.loaded_tokens, loaded)

    # ---- recipients ----

    def test_blended_kv_stays_with_its_salt(self):
        e = self.filled(A, C)
        blended = self.answer(e, MIXED, SPANS, First(16))
        for name, salt in (("none", ""), ("other", "other"), ("another prompt's", SALT + "other")):
            self.check(e, Request(name, MIXED, 8, salt=salt))
        again = Request("again", MIXED, 8, salt=SALT + "mine")
        run(e, again)
        self.equal(again.logits, blended)

    def test_nothing_of_a_blended_request_is_stored(self):
        e = self.filled(A, C)
        before = self.stats()["dump_blocks"]
        self.answer(e, MIXED, SPANS, First(16), outputs=40)
        run(e, Request("again", MIXED, 40, salt=SALT + "mine"))
        run(e, Request("as a chunk", MIXED, 1, salt=SALT + "mine", transfer={STORE: True}))
        self.assertEqual(self.stats()["dump_blocks"], before)

    def test_a_chunk_is_stored_as_one_and_not_as_a_prefix(self):
        e = self.engine()
        self.check(e, Request("chunk", C, 40, transfer={STORE: True}))
        self.assertEqual(self.stats()["dump_blocks"], 5)
        self.check(e, Request("chunk again", C, 8, transfer={STORE: True}))
        self.assertEqual(self.stats()["dump_blocks"], 5)
        self.assertFalse(self.loads(e, C + SYSTEM), "a prefix key found a chunk")
        self.check(self.engine(), Request("loads what is there", C + prompt(9, 40), 8, transfer={STORE: True}))
        # the prefix's blocks, and those that only the longer chunk has
        self.assertEqual(self.stats()["dump_blocks"], 5 + 7 + 2)

    def test_a_stored_chunk_is_handed_over_to_nobody(self):
        """The decode engine would wait for blocks of a prefix."""
        one = Request("chunk", C, 1, transfer={STORE: True, PREFILL: True})
        self.check(self.engine(), one)
        self.assertIsNone(one.answer)

    def test_prefixes_are_stored_and_loaded_alongside(self):
        first, second = self.filled(A, C), self.engine()
        self.check(first, Request("prefix", MIXED, 8))
        self.check(second, Request("prefix", MIXED, 8))
        self.assertEqual(second.loaded_tokens, len(MIXED) // BLOCK * BLOCK)
        blended, plain = self.pieces(MIXED, SPANS, First(16)), Request("beside", MIXED + SYSTEM, 8)
        for i, piece in enumerate(blended):
            last = request(f"p{i}", piece)
            run(second, last, *([plain] if piece.last else []))
        self.equal(last.logits, self.blended(MIXED, SPANS, First(16)))
        self.same({"beside": plain})

    def test_engines_with_and_without_share_prefixes(self):
        with_it, without = self.engine(layout="packed"), self.engine(layout="packed", chunks=False)
        self.check(with_it, Request("cold", MIXED))
        self.check(without, Request("warm", MIXED))
        self.assertEqual(without.loaded_tokens, len(MIXED) // BLOCK * BLOCK)

    def test_an_adapter_has_chunks_of_its_own(self):
        e, lora = self.filled(A, C), SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="")
        last = request("l", self.pieces(MIXED, SPANS, First(16))[-1])
        last.lora_request = lora
        self.check(e, last)
        self.assertEqual(e.loaded_tokens, 0)

    def test_adapters_without_files_are_shared_with_nobody(self):
        """Adapters may be handed to an engine as tensors: all under one path, and later others
        under the same name."""
        e = self.engine()
        for i, name in enumerate("kl"):
            chunk = Request(f"chunk of {name}", C, 1, transfer={STORE: True})
            chunk.lora_request = SimpleNamespace(lora_name=name, lora_int_id=i + 1, lora_path="in_memory")
            e.pool = small.Pool(e.blocks)
            self.check(e, chunk)
        self.assertEqual((e.loaded_tokens, self.stats()["dump_blocks"]), (0, 0))

    # ---- what goes wrong ----

    def refused(self, e, sentence, **params):
        one = Request(sentence, MIXED, 8, salt=SALT + sentence, transfer=params)
        e.connector._scheduler.reuse._told.clear()
        with self.assertLogs("ucmclient.engine.vllm", "WARNING") as logs:
            self.check(e, one)
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], sentence)

    def test_what_a_request_may_not_say(self):
        e = self.filled(A, C)
        self.refused(e, "chunk 1 begins at token 96, chunk 0 ends at 100", **{CHUNKS: [[32, 100], [96, 176]]})
        self.refused(e, "chunk 1 begins at token 32, chunk 0 ends at 176", **{CHUNKS: [[96, 176], [32, 82]]})
        self.refused(e, "chunk 0 is tokens 192 to 300 of a request of 251", **{CHUNKS: [[192, 300]]})
        self.refused(e, "a list of .begin, end.", **{CHUNKS: [[32]]})
        self.refused(e, "ucmd_first is a number", **{CHUNKS: [[32, 82]], FIRST: -1})
        self.refused(e, "may be blended", **{STORE: True})
        self.assertEqual(e.loaded_tokens, 0)

    def test_an_engine_that_does_not_say_how_it_rotates_k_does_not_start(self):
        with mock.patch.object(connector, "_rotary_embeddings", lambda: ()), self.assertRaisesRegex(Unsupported, "does not say by which tables"):
            self.engine()

    def test_whether_to_store_a_chunk_is_true_or_false(self):
        e = self.engine()
        with self.assertLogs("ucmclient.engine.vllm", "WARNING") as logs:
            self.check(e, Request("plain", C, 1, transfer={STORE: 1}))
        self.assertRegex("".join(logs.output), "ucmd_store_chunk is true or false")
        self.refused(e, "ucmd_store_chunk is true or false", **{STORE: "true"})

    def test_each_kind_of_mistake_is_told_once(self):
        e = self.engine()
        with self.assertLogs("ucmclient.engine.vllm", "WARNING") as logs:
            for end in 300, 301, 400:
                self.check(e, Request(f"to {end}", MIXED, 8, salt=SALT + f"{end}", transfer={CHUNKS: [[192, end]]}))
        self.assertEqual(len(logs.output), 1)

    def test_chunks_of_a_request_without_a_salt_are_a_prefix(self):
        e = self.filled(A, C)
        with self.assertLogs("ucmclient.engine.vllm", "WARNING") as logs:
            for name, salt in (("none", ""), ("other", "tenant")):
                self.check(e, Request(name, MIXED, 8, salt=salt, transfer={CHUNKS: [[32, 82]]}))
        self.assertRegex("".join(logs.output), "cache_salt does not begin with ucmd-chunks:")
        self.assertEqual((len(logs.output), e.loaded_tokens), (1, 0))

    def test_chunks_that_are_gone_are_computed(self):
        e = self.filled(A)
        tokens = SYSTEM + A + prompt(5, 14) + C + prompt(6, 9)
        self.equal(self.answer(e, tokens, SPANS[:2], First(16)), self.blended_without_c(tokens))
        self.assertEqual(e.loaded_tokens, 2 * BLOCK)

    def blended_without_c(self, tokens):
        return self.blended(tokens, SPANS[:1], First(16))

    def test_a_load_that_can_not_begin(self):
        e, (first, *_, last) = self.filled(A, C), self.pieces(MIXED, SPANS, First(16))
        run(e, request("first", first))
        load, calls = Region.load, []

        def refused(region, *args, shifts=None, **named):
            calls.append(shifts)
            if shifts is not None:
                raise UcmError(Status.NO_MEMORY, "none is left")
            return load(region, *args, shifts=shifts, **named)
        with mock.patch.object(Region, "load", refused):
            self.check(e, request("last", last))
        self.assertEqual((len(calls), e.recomputed), (1, 1))

    def test_blocks_that_went_between_lookup_and_load(self):
        e, (first, *_, last) = self.filled(A, C, lease=0.0), self.pieces(MIXED, SPANS, First(16))
        run(e, request("first", first))
        load = Region.load

        def late(region, *args, shifts=None, **named):
            self.daemon.until(lambda: region.ns.evict()[1] == 0, "keeps blocks")
            return load(region, *args, shifts=shifts, **named)
        with mock.patch.object(Region, "load", late):
            self.check(e, request("last", last))
        self.assertEqual(e.recomputed, 1)

    def test_aborts(self):
        e = self.filled(A, C)
        for i, piece in enumerate(self.pieces(MIXED, SPANS, First(16))):
            gone = request(f"gone{i}", piece)
            e.add(gone)
            e.step()
            if gone.request_id in e.requests:
                e.abort(gone.request_id)
            run(e, request(f"p{i}", piece))
        self.assertTrue(e.pool.idle())
        self.eventually(lambda: self.stats()["leases"] == 0)

    # ---- restarts ----

    def again(self):
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = daemon(directory=self.directory)

    def test_across_a_restart_of_the_daemon(self):
        e = self.filled(A, C)
        want = self.blended(MIXED, SPANS, First(16))
        self.again()
        self.equal(self.answer(self.engine(), MIXED, SPANS, First(16)), want)
        # The engine that saw the daemon go registers its pages again.
        self.eventually(lambda: e.ranks[0].connector._worker.shifting.link.region is not None and e.connector._scheduler.reuse.link.ns is not None)
        self.eventually(lambda: self.found_again(e))
        e.pool, computed = small.Pool(e.blocks), e.recomputed
        self.equal(self.answer(e, MIXED, SPANS, First(16), salt="again"), want)
        self.assertEqual(e.recomputed, computed)

    def found_again(self, e):
        before = e.loaded_tokens
        e.pool = small.Pool(e.blocks)
        self.answer(e, MIXED, SPANS, First(16), salt=f"after{before}.{e.steps}")
        return e.loaded_tokens > before

    def test_sleep_and_reset(self):
        e = self.filled(A, C)
        e.sleep()
        e.wake()
        self.equal(self.answer(e, MIXED, SPANS, First(16)), self.blended(MIXED, SPANS, First(16)))
        self.assertTrue(e.reset_prefix_cache(external=True))
        loaded = e.loaded_tokens
        self.equal(self.answer(e, MIXED, SPANS, First(16)), expected(MIXED, 8))  # older chunks may be of other weights
        self.assertEqual(e.loaded_tokens, loaded)

    def test_without_a_daemon(self):
        e = self.filled(A, C)
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.equal(self.answer(e, MIXED, SPANS, First(16)), expected(MIXED, 8))
        self.daemon = None


class Pieces(unittest.TestCase):
    def ends(self, spans, policy, tokens=251):
        return [(len(p.tokens), [(s.start, s.end) for s in p.chunks], p.last) for p in blend.pieces(range(tokens), spans, policy, block_tokens=16, salt="s")]

    def test_each_chunk_after_others_ends_a_piece(self):
        self.assertEqual(self.ends(SPANS, First(16)), [
            (48, [], False), (112, [(32, 82)], False), (208, [(32, 82), (96, 176)], False), (251, [(32, 82), (96, 176), (192, 242)], True)])

    def test_first_tokens_are_whole_blocks(self):
        self.assertEqual([end for end, *_ in self.ends(SPANS, First(17))], [64, 128, 224, 251])

    def test_chunks_that_are_computed_whole_end_none(self):
        self.assertEqual(self.ends(SPANS, First(64)), [(160, [], False), (251, [(96, 176)], True)])
        self.assertEqual(self.ends([Span(33, 120)], First(16)), [(251, [], True)])

    def test_a_first_chunk_needs_none(self):
        self.assertEqual(self.ends([Span(0, 80)], First(16)), [(251, [(0, 80)], True)])

    def test_chunks_that_are_joined_begin_with_blocks(self):
        tokens, spans = blend.join([[1] * 20, [2] * 32, [3] * 5], 9, 16)
        self.assertEqual(tokens, [1] * 20 + [9] * 12 + [2] * 32 + [3] * 5)
        self.assertEqual(spans, [Span(0, 20), Span(32, 64), Span(64, 69)])

    def test_what_is_refused(self):
        for spans, policy, salt, size, why in (
            ([Span(0, 8), Span(5, 9)], First(16), "s", 16, "chunk 1 begins at token 5"), (SPANS, Hkvd(), "s", 16, "the policy is First or Nothing"),
            (SPANS, First(16), "", 16, "the salt is empty"), (SPANS, First(16), "s", 0, "at least 1 token"),
        ):
            with self.assertRaisesRegex(ValueError, why):
                blend.pieces(range(251), spans, policy, block_tokens=size, salt=salt)


class Rules(unittest.TestCase):
    def config(self, names=("LlamaForCausalLM",), **of):
        config, kv_config = configuration(8, 1, False, {"chunks": True})
        config.model_config.architectures = list(names)
        config.model_config.hf_text_config = SimpleNamespace(**{
            "head_dim": 128, "max_position_embeddings": 4096, "rope_parameters": {"rope_theta": 5e5, **of}})
        return config

    def rope(self, *names, **of):
        return chunk_rope.rerotation_of(self.config(names or ("LlamaForCausalLM",), **of)).rope

    def test_what_the_configuration_says(self):
        plain = self.rope()
        self.assertEqual((plain.base, plain.rotary, plain.scaling, plain.interleaved), (5e5, 128, "default", False))
        self.assertEqual(self.rope(rope_type="linear", factor=4).factor, 4)
        llama = self.rope(rope_type="llama3", factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192)
        self.assertEqual((llama.scaling, llama.fast, llama.slow, llama.trained), ("llama3", 4.0, 1.0, 8192))
        yarn = self.rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, truncate=False)
        self.assertEqual((yarn.fast, yarn.slow, yarn.whole), (32.0, 1.0, False))
        self.assertEqual((self.rope(partial_rotary_factor=0.5).rotary, self.rope("Glm4ForCausalLM").interleaved), (64, True))
        old = self.config()
        old.model_config.hf_text_config = SimpleNamespace(
            hidden_size=512, num_attention_heads=8, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}, max_position_embeddings=2048)
        of = chunk_rope.rerotation_of(old).rope
        self.assertEqual((of.dim, of.base, of.scaling, of.factor), (64, 1e4, "linear", 2.0))

    def test_vllm_computes_dynamic_scaling_for_one_length(self):
        of = chunk_rope.rerotation_of(self.config(rope_type="dynamic", factor=2.0, max_trained_positions=1024))
        self.assertEqual((of.rope.trained, of.length), (1024, 4096))

    def test_an_engine_that_rotates_otherwise_is_refused(self):
        of, other = (chunk_rope.rerotation_of(self.config(rope_type="yarn", factor=4.0, original_max_position_embeddings=n)) for n in (2048, 4096))
        chunk_rope.check_tables(of, [table(of), table(of, scale=1.14)])
        for tables in ([table(of), table(other)], [table(of, is_neox_style=False)], [table(of, rotary_dim=64)], [SimpleNamespace()]):
            with self.assertRaisesRegex(Unsupported, "does not rotate K as the model's configuration says"):
                chunk_rope.check_tables(of, tables)

    def test_kinds_that_can_not_be_shifted(self):
        for why, names, more in (
            ("rope_type is 'longrope'; default, linear", (), {"rope_type": "longrope"}), ("'default' with mrope_section", (), {"mrope_section": [1, 2]}),
            ("'dynamic' with alpha", (), {"rope_type": "dynamic", "alpha": 1000.0}), ("rotate K in 2 ways", (), {"full": {}, "sliding": {}}),
            ("how Llama4ForCausalLM rotates K is not known", ("Llama4ForCausalLM",), {}),
        ):
            with self.assertRaisesRegex(Unsupported, why):
                self.rope(*names, **more)

    def test_what_is_refused_alongside(self):
        for sentence, more, change in (
            ("alongside encoding", {"encoding": "fp8"}, None), ("alongside sparse", {"sparse": "auto"}, None), ("alongside head_groups", {"head_groups": 2}, None),
            ("alongside summaries", {"summaries": "mean"}, None), ("alongside layer_stores", {"layer_stores": 64}, None), ("alongside gather_loads", {"gather_loads": True}, None),
            ("loads within the step", {"async_load": False}, None), ("MLA", {}, lambda c: setattr(c.model_config, "use_mla", True)),
            ("pipeline parallelism", {}, lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2)),
            ("a KV cache of fp8", {}, lambda c: setattr(c.cache_config, "cache_dtype", "fp8")),
            ("draft", {}, lambda c: setattr(c, "speculative_config", SimpleNamespace(method="eagle"))),
        ):
            config = self.config()
            (change or (lambda c: None))(config)
            with self.assertRaisesRegex(Unsupported, f"chunks: not supported .*{sentence}.*remove the setting"):
                chunk_rules.check_chunks(settings.Settings.parse(extra_of({"chunks": True, **more})), config, None)
        with self.assertRaisesRegex(Unsupported, "several kinds of KV cache"):
            chunk_rules.check_chunks(settings.Settings(chunks=True), self.config(), [1, 2])
        chunk_rules.check_chunks(settings.Settings(encoding="fp8"), self.config(), [1, 2])

    def test_backends_and_layouts(self):
        config, kv_config = configuration(8, 1, False, {"chunks": True})
        self.assertEqual([chunk_rules.in_columns(*of) for of in ((["FLASH_ATTN"], ""), (["CPU_ATTN"], "vec16"))], [False, True])
        for backends, instructions, words in (
            (["CPU_ATTN"], "amx", "CPU_ATTN for amx keeps K is not known"), (["ROCM_ATTN"], "vec", "ROCM_ATTN keeps K is not known"),
            (["CPU_ATTN", "FLASH_ATTN"], "vec", "CPU_ATTN for vec keeps K"), ([], "", "does not say which attention backend"),
        ):
            with self.assertRaisesRegex(Unsupported, words):
                chunk_rules.in_columns(backends, instructions)
        heads, dim, blocks = small.M.KV_HEADS, small.M.HEAD, 64
        halves = {"k first": (2, 2 * blocks, BLOCK // 2, heads, dim), "k and v of each": (2 * blocks, 2, BLOCK // 2, heads, dim)}
        kernels = {name: {"layers.0": Tensor(numpy.zeros(shape, numpy.float32), "torch.float32")} for name, shape in halves.items()}
        of = SimpleNamespace(**{**vars(kv_config), "num_blocks": blocks})
        self.assertEqual(chunk_rules.shifted(config, of, kernels["k first"], False).rope.rows, BLOCK * heads)
        with self.assertRaisesRegex(Unsupported, "can't tell where K lies"):  # blocks of two of the kernel's, each with K and V
            chunk_rules.shifted(config, of, kernels["k and v of each"], False)
        for layout, columns in ("heads", False), ("heads", True), ("split", True):
            e = small.Engine(MODEL, layout=layout)
            with self.assertRaisesRegex(Unsupported, "can't tell where K lies"):
                chunk_rules.shifted(config, SimpleNamespace(**{**vars(kv_config), "num_blocks": 64}), e.ranks[0].tensors, columns)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
