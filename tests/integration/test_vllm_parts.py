#!/usr/bin/env python3
"""The vLLM connector's parts by themselves: where tensors keep blocks, what the scheduler's half decides, what tells
engines apart, what is refused. No daemon."""

import importlib.util
import json
import os
import re
import tempfile
import time
import unittest
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

from vllm_paths import TOP  # sets the paths of the others

import numpy

import engine
from engine import BLOCK, Request
import ucmclient
from ucmclient import BlockResult, PrefixHits, SharedMemory
from ucmclient.vllm import companion, identity, layout, settings
from ucmclient.vllm.connector import UcmConnector
from ucmclient.vllm.nvme import NvmeRate
from ucmclient.vllm.plan import Copy, Plan
from ucmclient.vllm.scheduler import SchedulerHalf
from ucmclient.vllm.worker import WorkerHalf
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class Tensors:
    """As vLLM's attention backends shape them."""

    BLOCKS = 6

    def tensor(self, physical, order, logical=None, dtype=numpy.uint8, gap=0, offset=0):
        """A view of fresh memory: axes `physical`, outermost first, seen in `order`; `gap` bytes behind each block."""
        size = int(numpy.prod(physical)) * numpy.dtype(dtype).itemsize
        memory = numpy.random.default_rng(1).integers(0, 256, size + gap * self.BLOCKS + offset, numpy.uint8)
        if gap:
            row = size // self.BLOCKS + gap
            whole = numpy.lib.stride_tricks.as_strided(
                memory[offset:].view(dtype), physical,
                (row, *(numpy.cumprod((1, *physical[:0:-1]))[-2::-1] * numpy.dtype(dtype).itemsize)))
        else:
            whole = memory[offset:].view(dtype).reshape(physical)
        view = whole.transpose(order)
        return engine.Tensor(view if logical is None else view.reshape(logical)), memory

    def block(self, chunks, memory, b):
        base = memory.__array_interface__["data"][0]
        return b"".join(memory[at: at + c.size].tobytes()
                        for c in chunks for at in (c.address - base + b * c.stride,))


class Layouts(Tensors, unittest.TestCase):
    """Every block's bytes are found, and no others."""

    def right(self, tensor, memory, dimension=0, chunks=1, kernel=1):
        got = layout.tensor_chunks(tensor, self.BLOCKS)
        self.assertEqual(len(got), chunks)
        seen = set()
        for b in range(self.BLOCKS):
            mine = numpy.take(tensor.array, range(b * kernel, (b + 1) * kernel), dimension)
            bytes_ = self.block(got, memory, b)
            self.assertEqual(sorted(bytes_), sorted(mine.tobytes()))
            for c in got:
                piece = range(c.address + b * c.stride, c.address + b * c.stride + c.size)
                self.assertTrue(seen.isdisjoint(piece))
                seen.update(piece)

    def test_keys_in_front_of_values(self):  # FlashAttention before 0.31: [2, blocks, tokens, heads, width]
        self.right(*self.tensor((2, 6, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.float16), dimension=1, chunks=2)
        self.right(*self.tensor((2, 6, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.float16), dimension=1, chunks=2)

    def test_keys_beside_values(self):  # FlashInfer, Triton: [blocks, 2, tokens, heads, width], HND below it
        self.right(*self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.float16))
        self.right(*self.tensor((6, 2, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.float16))
        self.right(*self.tensor((6, 2, 16, 4, 8), (1, 0, 2, 3, 4), dtype=numpy.float16), dimension=1)

    def test_latent(self):  # MLA: [blocks, tokens, 576], and DeepSeek's indexer: [blocks, tokens, 132]
        self.right(*self.tensor((6, 64, 576), (0, 1, 2), dtype=numpy.float16))
        self.right(*self.tensor((6, 64, 132), (0, 1, 2)))

    def test_one_view_a_layer(self):  # vLLM 0.32 and 0.33: [blocks, heads, tokens, content] of one allocation
        heads, tokens, content, layers = 4, 16, 8, 3
        for name, physical, order, chunks in (
                ("LBHNC", (layers, 6, heads, tokens, content), (0, 1, 2, 3, 4), 1),
                ("LBNHC", (layers, 6, tokens, heads, content), (0, 1, 3, 2, 4), 1),
                ("LHBNC", (layers, heads, 6, tokens, content), (0, 2, 1, 3, 4), heads),
                ("BLHNC", (6, layers, heads, tokens, content), (1, 0, 2, 3, 4), 1),
                ("BLNHC", (6, layers, tokens, heads, content), (1, 0, 3, 2, 4), 1),
                ("BHLNC", (6, heads, layers, tokens, content), (2, 0, 1, 3, 4), heads)):
            whole, memory = self.tensor(physical, order, dtype=numpy.float16)
            views = {f"layers.{i}": engine.Tensor(layer) for i, layer in enumerate(whole.array)}
            for view in views.values():
                with self.subTest(name):
                    self.right(view, memory, chunks=chunks)
            for layerwise in (False, True):
                with self.subTest(name, layerwise=layerwise):
                    got = layout.layout_of(views, 6, layerwise)
                    together = name in ("BLHNC", "BLNHC") and not layerwise
                    self.assertEqual(len(got.layers), 1 if together else layers)
                    self.assertEqual(got.layer_bytes * len(got.layers), whole.array[:, 0].nbytes)
                    for b in range(6):
                        pieces = [self.block(shard, memory, b) for shard in got.layers]
                        self.assertEqual(sorted(b"".join(pieces)), sorted(whole.array[:, b].tobytes()))

    def test_names_tell_orders_apart(self):
        names = set()
        for physical, order in (((6, 4, 16, 8), (0, 1, 2, 3)), ((6, 16, 4, 8), (0, 2, 1, 3)), ((6, 4, 8, 16), (0, 1, 2, 3)),
                                ((4, 6, 16, 8), (1, 0, 2, 3))):
            view, _ = self.tensor(physical, order)
            names.add(layout.layout_of({"0": view}, 6).name)
        view, _ = self.tensor((6, 4, 16, 8), (0, 1, 2, 3), dtype=numpy.float16)
        names.add(layout.layout_of({"0": view}, 6).name)
        self.assertEqual(len(names), 5)

    def test_kernels_with_smaller_blocks(self):
        self.right(*self.tensor((24, 4, 16, 8), (0, 1, 2, 3)), kernel=4)
        self.right(*self.tensor((2, 12, 16, 4, 8), (0, 1, 2, 3, 4)), dimension=1, chunks=2, kernel=2)

    def test_padding_is_left_alone(self):  # quantized pages with scales, aligned pages, hybrids' raw tensors
        self.right(*self.tensor((6, 4, 16, 9), (0, 1, 2, 3), gap=64))
        self.right(*self.tensor((6, 4, 16, 9), (0, 1, 2, 3), gap=64, offset=128))

    def test_layers_of_different_sizes_are_one(self):  # DeepSeek-V3.2
        one, memory = self.tensor((6, 64, 576), (0, 1, 2), dtype=numpy.float16)
        other, more = self.tensor((6, 64, 132), (0, 1, 2))
        got = layout.layout_of({"mla": one, "indexer": other, "shares": one}, 6)
        self.assertEqual((len(got.layers), got.layer_bytes), (1, 64 * (1152 + 132)))
        self.assertEqual(self.block(got.layers[0][:1], memory, 3), one.array[3].tobytes())
        self.assertEqual(self.block(got.layers[0][1:], more, 3), other.array[3].tobytes())
        with self.assertRaisesRegex(ValueError, "layerwise"):
            layout.layout_of({"mla": one, "indexer": other}, 6, True)

    def test_what_is_not_understood(self):
        for view, _ in (self.tensor((7, 16, 8), (0, 1, 2)), self.tensor((3, 6, 16), (0, 1, 2)), self.tensor((768,), (0,))):
            with self.assertRaisesRegex(ValueError, "not understood"):
                layout.tensor_chunks(view, 6)
        overlapping = engine.Tensor(numpy.lib.stride_tricks.as_strided(numpy.zeros(64, numpy.uint8), (6, 16), (8, 1)))
        with self.assertRaisesRegex(ValueError, "not understood"):
            layout.tensor_chunks(overlapping, 6)
        view, _ = self.tensor((2, 2, 16, 8), (0, 1, 2, 3))
        with self.assertRaisesRegex(ValueError, "more blocks"):
            layout.tensor_chunks(view, 2)


class Sections(Tensors, unittest.TestCase):
    """What encodings are told: each chunk is rows of one head each, and they are the tensor's, in this order."""

    HEADS, TOKENS, DIM = 4, 16, 8
    OF = layout.Heads(TOKENS, HEADS, DIM)

    def layout(self, views, of=OF, layerwise=False, dtype="bfloat16"):
        if not isinstance(views, dict):
            views = {"0": views}
        for view in views.values():
            view.dtype = dtype
        got, without = (layout.layout_of(views, self.BLOCKS, layerwise, heads) for heads in (of, None))
        self.assertEqual((got.name, len(got.layers), got.layer_bytes), (without.name, len(without.layers), without.layer_bytes))
        self.assertIsNone(without.sections)
        sections = (got.sections.k, got.sections.v) if got.sections.v else (got.sections.k,)
        for shard in got.layers:
            self.assertEqual([2 * numpy.prod(rows) for rows in sections], [chunk.size for chunk in shard])
        return got

    def of(self, views, **more):
        got = self.layout(views, **more).sections
        return got.k, got.v, got.order

    def test_keys_and_values_apart(self):
        right = (16, 4, 8), (16, 4, 8), 0
        self.assertEqual(self.of(self.tensor((2, 6, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)[0]), right)
        self.assertEqual(self.of(self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)[0]), right)
        self.assertEqual(self.of(self.tensor((6, 2, 16, 4, 8), (1, 0, 2, 3, 4), dtype=numpy.uint16)[0]), right)
        hnd = (16, 4, 8), (16, 4, 8), 1
        self.assertEqual(self.of(self.tensor((2, 6, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.uint16)[0]), hnd)
        self.assertEqual(self.of(self.tensor((6, 2, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.uint16)[0]), hnd)
        self.assertEqual(self.of(self.tensor((6, 2, 4, 16, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)[0]), hnd, "on CPUs")

    def test_the_halves_are_keys_and_values(self):
        view, memory = self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        keys_, values = self.layout(view).layers[0]
        for b in range(6):
            self.assertEqual(self.block([keys_], memory, b), view.array[b, 0].tobytes())
            self.assertEqual(self.block([values], memory, b), view.array[b, 1].tobytes())

    def test_latent(self):
        of = layout.Heads(64, 1, 576, False)
        for shape in ((6, 64, 576), (6, 1, 64, 576)):
            view, _ = self.tensor(shape, tuple(range(len(shape))), dtype=numpy.uint16)
            self.assertEqual(self.of(view, of=of), ((64, 1, 576), None, 0))

    def test_one_view_a_layer(self):
        """[blocks, heads, tokens, K and V of one]."""
        for name, physical, order, right in (
                ("LBHNC", (3, 6, 4, 16, 16), (0, 1, 2, 3, 4), (64, 2, 8)),
                ("LBNHC", (3, 6, 16, 4, 16), (0, 1, 3, 2, 4), (16, 8, 8)),
                ("BLHNC", (6, 3, 4, 16, 16), (1, 0, 2, 3, 4), (192, 2, 8)),
                ("BLNHC", (6, 3, 16, 4, 16), (1, 0, 3, 2, 4), (48, 8, 8))):
            whole, _ = self.tensor(physical, order, dtype=numpy.uint16)
            views = {str(i): engine.Tensor(layer) for i, layer in enumerate(whole.array)}
            with self.subTest(name):
                self.assertEqual(self.of(views), (right, None, 0))
                one = (right[0] // (3 if name[0] == "B" else 1), *right[1:])
                self.assertEqual(self.of(views, layerwise=True), (one, None, 0))

    def test_all_layers_side_by_side(self):
        view, _ = self.tensor((6, 3, 2, 16, 4, 8), (0, 1, 2, 3, 4, 5), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((96, 4, 8), None, 0))
        view, _ = self.tensor((6, 3, 2, 4, 16, 8), (0, 1, 2, 4, 3, 5), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((16, 24, 8), None, 1))
        whole, _ = self.tensor((6, 3, 2, 16, 4, 8), (1, 0, 2, 3, 4, 5), dtype=numpy.uint16)
        views = {str(i): engine.Tensor(layer) for i, layer in enumerate(whole.array)}
        self.assertEqual(self.of(views), ((96, 4, 8), None, 0))
        self.assertEqual(self.of(views, layerwise=True), ((16, 4, 8), (16, 4, 8), 0))

    def test_more_layers_than_a_section_holds(self):
        whole, _ = self.tensor((6, 80, 16, 4, 16), (1, 0, 3, 2, 4), dtype=numpy.uint16)
        views = {str(i): engine.Tensor(layer) for i, layer in enumerate(whole.array)}
        self.assertEqual(self.of(views), ((1280, 8, 8), None, 0))
        whole, _ = self.tensor((6, 2, 1024, 4, 1024), (1, 0, 3, 2, 4), dtype=numpy.uint16)
        views = {str(i): engine.Tensor(layer, "bfloat16") for i, layer in enumerate(whole.array)}
        of = layout.Heads(1024, 4, 512)
        got = layout.layout_of(views, 6, False, of)
        self.assertEqual((len(got.layers), got.sections.k), (2, (1024, 8, 512)))
        view, _ = self.tensor((6, 2, 1024, 4, 1024), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        view.dtype = "bfloat16"
        with self.assertRaisesRegex(ValueError, "set block_layout to false"):
            layout.layout_of({"all": view}, 6, False, of)

    def test_kernels_with_smaller_blocks(self):
        view, _ = self.tensor((2, 12, 8, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((16, 4, 8), (16, 4, 8), 0))
        view, _ = self.tensor((12, 2, 8, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((32, 4, 8), None, 0), "K and V take turns")

    def test_types(self):
        view, _ = self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        for dtype, name in (("torch.bfloat16", "bf16"), ("torch.float16", "f16")):
            self.assertEqual(self.layout(view, dtype=dtype).sections.dtype, name)

    def test_as_many_tokens_as_heads(self):
        view, _ = self.tensor((6, 2, 16, 16, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        got = self.layout(view, of=layout.Heads(16, 16, 8))
        self.assertTrue(got.sections.alike)
        config, kv_config = engine.configuration(8, 1, False, {})
        for encoding in ("fp8", "int8", "lossless", "q4"):
            with self.subTest(encoding):
                make = lambda: identity.identity_of(config, kv_config, got, identity.Ranks(0, 1, True),  # noqa: E731
                                                    settings.Settings(encoding=encoding), {})
                if encoding == "q4":
                    self.assertRaisesRegex(identity.Unsupported, "--block-size", make)
                else:
                    self.assertEqual(make().sections, got.sections)

    def test_refused_with_what_to_change(self):
        fits = ((6, 2, 16, 4, 8), (0, 1, 2, 3, 4))
        for (physical, order), dtype, words in (
                (fits, "torch.float32", "float32: start with --dtype bfloat16"),
                (fits, "torch.float8_e4m3fn", "is stored as it is: remove the setting"),
                (fits, "torch.uint8", "is stored as it is: remove the setting"),
                (((6, 2, 16, 4, 12), fits[1]), "bfloat16", "can't be told .* use another attention backend"),
                (((6, 2, 4, 4, 16, 2), (0, 1, 2, 3, 4, 5)), "bfloat16", "use another attention backend"),
                (((6, 3, 16, 4, 8), fits[1]), "bfloat16", "use another attention backend"),
                (((4, 6, 16, 16), (1, 0, 2, 3)), "bfloat16", "4 pieces .* heads of a block together")):
            view, _ = self.tensor(physical, order, dtype=numpy.uint16)
            with self.subTest(words, shape=physical), self.assertRaisesRegex(ValueError, words):
                self.layout(view, dtype=dtype)
        latent, indexer = self.tensor((6, 64, 576), (0, 1, 2))[0], self.tensor((6, 64, 132), (0, 1, 2))[0]
        with self.assertRaisesRegex(ValueError, "use another attention backend"):
            self.layout({"0": latent, "1": indexer}, of=layout.Heads(64, 1, 576, False))

    def test_what_the_engine_says_of_its_heads(self):
        def spec(name="FullAttentionSpec", **more):
            return type(name, (), {"block_size": 16, "num_kv_heads": 8, "head_size": 128, **more})()

        def of(one):
            return identity.heads_of(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one)]), "encoding")
        self.assertEqual(of(spec(head_size_v=128)), layout.Heads(16, 8, 128))
        self.assertEqual(of(spec("MLAAttentionSpec", num_kv_heads=1, head_size=576)), layout.Heads(16, 1, 576, False))
        several = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"0": spec(), "1": spec()})
        self.assertEqual(of(several), layout.Heads(16, 8, 128))
        several.kv_cache_specs["1"] = spec(head_size=64)
        for bad in (several, spec(head_size_v=64), type("FullAttentionSpec", (), {"block_size": 16})()):
            with self.assertRaisesRegex(identity.Unsupported, "several sizes"):
                of(bad)


class Decisions(unittest.TestCase):
    """The scheduler's half, step by step, with a daemon that has nothing."""

    def half(self, **more):
        ns = SimpleNamespace(lookup_prefix=lambda keys, **_: PrefixHits(0, 0, 0))
        half = SchedulerHalf(settings.Settings(**more), BLOCK)
        half.link = SimpleNamespace(ns=ns, ask=lambda call, *a, **k: call(*a, **k), release=lambda lease: None)
        return half

    def output(self, request, blocks, tokens, preempted=(), resumed=False):
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        new = []
        if resumed:
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ["r"], [(blocks,)], [0]
            cached.resumed_req_ids = {"r"}
        else:
            new = [SimpleNamespace(req_id="r", block_ids=(blocks,), num_computed_tokens=0)]
        return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, preempted_req_ids=set(preempted),
                               num_scheduled_tokens={"r": tokens})

    def test_preempted_and_resumed_in_one_step(self):
        for resumed in (True, False):  # the older and the newer model runner
            half, request = self.half(), Request("r", range(40))
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            self.assertEqual([c.blocks for c in half.step(self.output(request, [1, 2, 3], 40)).stores], [[1, 2]])
            request.num_preemptions = 1
            half.matched_tokens(request, 0)
            half.allocated(request, [4, 5, 6], 0)
            plan = half.step(self.output(request, [4, 5, 6], 40, preempted="r", resumed=resumed))
            self.assertEqual((plan.preempted, [c.blocks for c in plan.stores]), ({"r"}, [[4, 5]]))
            request.num_computed_tokens = 40
            self.assertTrue(half.finished(request, [4, 5, 6])[0], "its blocks would be given back while they are read")

    def loading(self, lost, anew=False):
        """A load within the step, whose request is gone before it is known that it failed; then one that the engine
        gives the same blocks, as its own hits. What is stored of that."""
        half, request, later = self.half(async_load=False), Request("r", range(40)), Request("later", range(40))
        hits = [PrefixHits(2, 2, 1)]
        half.link.ns.lookup_prefix = lambda keys, **_: hits[0]
        self.assertEqual(half.matched_tokens(request, 0), (32, False))
        half.allocated(request, [1, 2, 3], 32)
        output = self.output(request, [1, 2, 3], 8)
        output.scheduled_new_reqs[0].num_computed_tokens = 32
        number = half.step(output).number
        self.assertGreater(number, 0)
        if lost == "aborted":
            half.finished(request, [1, 2, 3])
        elif lost == "preempted":
            request.num_preemptions = 1
            half.matched_tokens(request, 0)
        half.received((), {2}, number)
        if lost == "aborted when it was known":
            half.finished(request, [1, 2, 3])
        hits[0] = PrefixHits(1, 1, 2)
        half.matched_tokens(later, 32)
        half.allocated(later, [1, 2, 9], 0)
        output = self.output(later, [1, 2, 9], 8)
        output.scheduled_new_reqs[0].req_id, output.num_scheduled_tokens = "later", {"later": 40 if anew else 8}
        output.scheduled_new_reqs[0].num_computed_tokens = 0 if anew else 32
        return [copy.blocks for copy in half.step(output).stores]

    def test_what_a_failed_load_left_behind_is_not_stored(self):
        for lost in ("aborted", "preempted", "aborted when it was known"):
            with self.subTest(lost):
                self.assertEqual(self.loading(lost), [])
                self.assertEqual(self.loading(lost, anew=True), [[2]], "it was computed anew")

    def test_an_adapter_that_was_written_over_is_shared_with_nobody(self):
        half = self.half()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "adapter.safetensors")
            with open(path, "w", encoding="ascii") as file:
                file.write("one")
            request = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=1, lora_path=folder))
            first = half._prefix(request)
            self.assertEqual(half._prefix(request), first)
            with open(path, "w", encoding="ascii") as file:
                file.write("other")
            self.assertEqual(len({first, half._prefix(request), half._prefix(request)}), 3)
            with mock.patch("os.scandir", side_effect=FileNotFoundError):
                self.assertNotEqual(half._prefix(request), first)

    def test_a_reset_lets_nothing_through(self):
        for lost in (False, True):
            half, request = self.half(), Request("r", range(40))
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            before = half.step(self.output(request, [1, 2, 3], 20)).stores
            request.num_preemptions = int(lost)
            half.reset()
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            after = half.step(self.output(request, [1, 2, 3], 40, preempted="r" if lost else (), resumed=lost)).stores
            self.assertEqual([c.blocks for c in after], [[1, 2]] if lost else [])
            self.assertNotIn(before[0].keys, [c.keys[: len(before[0].keys)] for c in after])

    def test_a_request_with_nothing_to_store_keeps_no_blocks(self):
        half, request = self.half(), Request("r", range(10))
        half.matched_tokens(request, 0)
        half.allocated(request, [1], 0)
        self.assertEqual(half.step(self.output(request, [1], 10)).stores, [])
        self.assertFalse(half.finished(request, [1])[0])

    def test_chains_longer_than_a_request_to_the_daemon(self):
        half, request = self.half(), Request("r", [])
        request.block_hashes = [bytes(32)] * 40000
        request.tokens = [0] * (40000 * BLOCK)
        half.matched_tokens(request, 0)
        half.allocated(request, list(range(40000)), 0)
        plan = half.step(self.output(request, list(range(40000)), 40000 * BLOCK))
        self.assertEqual([len(c.blocks) for c in plan.stores], [16384, 16384, 7232])

    def test_nvme_is_measured(self):
        rate = NvmeRate(settings.Settings(prefill_rate=1000.0))
        self.assertTrue(rate.worth(1000, 1000))
        rate.measured(1000, 2.0)
        self.assertFalse(rate.worth(1000, 1000))
        self.assertTrue(rate.worth(1000, 400))  # most of it is in DRAM
        for _ in range(10):
            rate.measured(4000, 1.0)
        self.assertTrue(rate.worth(1000, 1000))
        self.assertTrue(NvmeRate(settings.Settings()).worth(1, 1))


class Moves(unittest.TestCase):
    def test_a_daemon_that_falls_silent_costs_one_timeout(self):
        memory = SharedMemory(8 * 4096)
        view = engine.Tensor(numpy.frombuffer(memory.buffer, numpy.uint8).reshape(8, 4096))
        asked = []
        half = WorkerHalf(settings.Settings(socket="/nonexistent", connect_timeout=0.1), None, layout.layout_of({"0": view}, 8),
                          name="test", part=0, writes=True, on_gpu=False, event=lambda: None)
        half.close()

        class Silent:
            @property
            def region(self):
                return None if asked else SimpleNamespace(dump=None, load=None)

            def ask(self, call, keys, *_, **__):
                asked.append(keys)

        half.link = Silent()
        copies = [Copy(str(i), bytes([i]), [i]) for i in range(4)]
        half.start_stores(Plan(stores=copies, ended={"0", "3"}))
        self.assertEqual(asked, [bytes([0])])
        asked.clear()
        half.start_loads(Plan(loads=copies))
        self.assertEqual(asked, [bytes([0])])
        self.assertEqual(half.finished(), ({"0", "3"}, set("0123")))
        self.assertEqual(half.failed_blocks(), {0, 1, 2, 3})


    def test_events_that_the_daemon_can_not_open(self):
        """The worker waits for them itself, and stores the refused blocks again."""
        memory = SharedMemory(8 * 4096)
        view = engine.Tensor(numpy.frombuffer(memory.buffer, numpy.uint8).reshape(8, 4096))
        come, given, tasks = [False], [], []

        class Event:
            def ipc_handle(self):
                return bytes(64)

            def query(self):
                return come[0]

        class Refused:
            """A dump's task: refused with an event, done without."""

            def __init__(self, event):
                self.result = SimpleNamespace(blocks=bytes([BlockResult.DEVICE if event else BlockResult.OK]))
                self.closed = False
                tasks.append(self)

            def check(self):
                return self.result

            def close(self):
                self.closed = True

        class Link:
            region = SimpleNamespace(dump=None)

            def ask(self, call, keys, blocks, *, event, **__):
                given.append((keys, event is not None))
                return Refused(event)

        half = WorkerHalf(settings.Settings(socket="/nonexistent", connect_timeout=0.1), None, layout.layout_of({"0": view}, 8),
                          name="test", part=0, writes=True, on_gpu=False, event=Event)
        half.close()
        half.link = Link()
        half.start_stores(Plan(stores=[Copy("a", b"a", [0])], ended={"a"}))
        with self.assertLogs("ucmclient.vllm", "WARNING") as log:
            self.assertEqual(half.finished(), (set(), set()), "blocks that are to be stored again are given back")
        self.assertIn("docs/containers.md", log.output[0])
        half.start_stores(Plan(stores=[Copy("b", b"b", [1]), Copy("c", b"c", [2])], ended={"b"}))
        self.assertEqual(half.finished(), (set(), set()))
        self.assertEqual(given, [(b"a", True)], "the event has not come")
        half.preempted(Plan(preempted={"c"}))
        come[0] = True
        self.assertEqual(half.finished(), (set(), set()))
        self.assertEqual(half.finished(), ({"a", "b"}, set()))
        self.assertEqual(given, [(b"a", True), (b"a", False), (b"b", False)])
        self.assertTrue(all(task.closed for task in tasks))

    def test_an_event_that_never_comes(self):
        memory = SharedMemory(8 * 4096)
        view = engine.Tensor(numpy.frombuffer(memory.buffer, numpy.uint8).reshape(8, 4096))
        half = WorkerHalf(settings.Settings(socket="/nonexistent", connect_timeout=0.1, transfer_deadline=0.05), None,
                          layout.layout_of({"0": view}, 8), name="test", part=0, writes=True, on_gpu=False,
                          event=lambda: SimpleNamespace(query=lambda: False))
        half.close()
        half.link, half._events_refused = SimpleNamespace(region=SimpleNamespace(dump=None)), True
        half.start_stores(Plan(stores=[Copy("a", b"a", [0])], ended={"a"}))
        deadline = time.monotonic() + 10
        while half.finished() != ({"a"}, set()):
            self.assertLess(time.monotonic(), deadline)


class Companions(unittest.TestCase):
    """Which workers have a companion. What it does for them is test_vllm_companion.py's."""

    def choice(self, setting, chunk=4096, on_gpu=True, missing=None, writes=True, **more):
        one = layout.Layout(((layout.Chunk(0, 1 << 20, 64), layout.Chunk(0, 1 << 20, chunk)),), 8, chunk, "", {})
        with mock.patch.object(companion, "require", side_effect=missing):
            return companion.Accompaniment(settings.Settings.parse({"companion": setting, **more}), one, on_gpu, writes)

    def test_auto(self):
        missing = ucmclient.CompanionMissing("tried libucmclient_cuda.so.0: no such file")
        for more, used, words in (({}, True, "4 KiB"), ({"chunk": (512 << 10) - 1}, True, "small chunks"),
                                  ({"chunk": 512 << 10}, False, "512 KiB"), ({"on_gpu": False}, False, "GPU"),
                                  ({"missing": missing}, False, "no such file"),
                                  ({"store": False}, True, "small chunks"),
                                  ({"layerwise": True, "async_load": False}, True, "small chunks"),
                                  ({"layerwise": True, "async_load": False, "store": False}, False, "stores nothing"),
                                  ({"load": False, "writes": False}, False, "stores nothing")):
            with self.subTest(more):
                choice = self.choice("auto", **more)
                self.assertEqual(choice.used, used)
                self.assertIn(words, choice.why)

    def test_on_is_refused_with_the_remedy(self):
        self.assertTrue(self.choice("on", chunk=1 << 20).used)
        missing = ucmclient.CompanionMissing("tried libucmclient_cuda.so.0: no such file")
        for more, words in (({"on_gpu": False}, "GPU"), ({"missing": missing}, "UCMCLIENT_CUDA_LIB")):
            with self.subTest(more), self.assertRaisesRegex(identity.Unsupported, f'companion "on".*{words}.*"auto"'):
                self.choice("on", **more)

    def test_off(self):
        with mock.patch.object(companion, "require", side_effect=AssertionError("it was looked for")):
            self.assertFalse(companion.Accompaniment(settings.Settings.parse({"companion": "off"}), None, True, True).used)


class Refusals(unittest.TestCase):
    def refused(self, words, change):
        config, kv_config = engine.configuration(8, 1, False, {})
        change(config, kv_config)
        with self.assertRaises(identity.Unsupported) as caught:
            identity.check_engine(config, kv_config)
        self.assertIn(words, str(caught.exception))

    def test_engines_that_can_not_share(self):
        self.refused("hybrid", lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]))
        self.refused("prefix-caching", lambda c, k: setattr(c.cache_config, "enable_prefix_caching", False))
        self.refused("pipeline", lambda c, k: setattr(c.parallel_config, "pipeline_parallel_size", 2))
        self.refused("scales", lambda c, k: setattr(c.cache_config, "calculate_kv_scales", True))
        self.refused("sha256", lambda c, k: setattr(c.cache_config, "prefix_caching_hash_algo", "builtin"))
        sliding = type("SlidingWindowSpec", (), {"block_size": BLOCK})()
        self.refused("SlidingWindowSpec", lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", sliding))
        several = type("UniformTypeKVCacheSpecs", (), {"block_size": BLOCK, "kv_cache_specs": {"0": sliding}})()
        self.refused("SlidingWindowSpec", lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", several))
        self.refused("must agree", lambda c, k: setattr(k, "hash_block_size", BLOCK // 2))

    def test_what_tells_engines_apart(self):
        def name(change=lambda c: None, backend="FLASH_ATTN"):
            config, kv_config = engine.configuration(8, 1, False, {})
            config.model_config.hf_config = SimpleNamespace(
                to_dict=lambda: {"rope_theta": 1e4}, rope_scaling={"original_max_position_embeddings": 4096})
            config.model_config.max_model_len = 4096
            change(config)
            view = engine.Tensor(numpy.zeros((8, 2, BLOCK, 4), numpy.float16))
            return identity.identity_of(config, kv_config, layout.layout_of({"0": view}, 8), identity.Ranks(0, 1, True),
                                        settings.Settings(), {"backends": [backend]})

        def hf(config, **more):
            for key, value in more.items():
                setattr(config.model_config.hf_config, key, value)
        with tempfile.TemporaryDirectory() as folder:
            weights = os.path.join(folder, "model.safetensors")
            open(weights, "w").close()
            local = [name(lambda c: setattr(c.model_config, "model", folder))]
            os.utime(weights, (1, 1))
            local.append(name(lambda c: setattr(c.model_config, "model", folder)))
        others = [*local, name(backend="FLASHINFER"), name(lambda c: setattr(c.model_config, "max_model_len", 8192)),
                  name(lambda c: hf(c, _commit_hash="abc")), name(lambda c: hf(c, to_dict=lambda: {"rope_theta": 1e6})),
                  name(lambda c: setattr(c.cache_config, "cache_dtype", "fp8")),
                  name(lambda c: setattr(c.model_config, "quantization", "awq")),
                  name(lambda c: setattr(c, "load_config", SimpleNamespace(load_format="dummy")))]
        self.assertEqual(len({name(), *others}), 1 + len(others))
        self.assertEqual(name(), name())

    def test_engines_that_are_too_old(self):
        for name in ("handle_preemptions", "build_connector_worker_meta"):
            kept = vars(KVConnectorBase_V1)[name]
            delattr(KVConnectorBase_V1, name)
            try:
                with self.subTest(name), self.assertRaisesRegex(ImportError, f"too old.* has no {name}"):
                    spec = importlib.util.find_spec("ucmclient.vllm.connector")
                    spec.loader.exec_module(importlib.util.module_from_spec(spec))
            finally:
                setattr(KVConnectorBase_V1, name, kept)

    def test_seeds_that_differ_between_processes(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("PYTHONHASHSEED", None)
            with self.assertRaisesRegex(identity.Unsupported, "PYTHONHASHSEED=0"):
                identity.check_hash("xxhash")
            os.environ["PYTHONHASHSEED"] = "random"
            with self.assertRaises(identity.Unsupported):
                identity.check_hash("sha256")
            os.environ["PYTHONHASHSEED"] = "0"
            self.assertEqual(identity.check_hash("sha256"), 32)

    def test_the_layout_that_is_asked_for(self):
        for extra, wanted in (({}, "BLNHC"), ({"layerwise": True}, None), ({"block_layout": False}, None)):
            config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
            with mock.patch("ucmclient.vllm.connector.find_spec", return_value=object()):
                self.assertEqual(UcmConnector.get_required_kvcache_layout(config), wanted)
            with mock.patch("ucmclient.vllm.connector.find_spec", return_value=None):
                self.assertIsNone(UcmConnector.get_required_kvcache_layout(config))

    def test_the_manual_has_every_setting(self):
        with open(os.path.join(TOP, "docs/vllm.md"), encoding="utf-8") as manual:
            table = manual.read().partition("## Settings")[2].partition("\n## ")[0]
        told = {}
        for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.M):
            names = re.findall(r"`(\w+)`", names)
            told.update(dict.fromkeys(names, defaults.strip("`")))
        self.assertEqual(set(told), {field.name for field in fields(settings.Settings)})
        for field in fields(settings.Settings):
            if field.default is not None:
                with self.subTest(field.name):
                    self.assertEqual(json.loads(told[field.name]), field.default)

    def test_settings_say_what_would_be_right(self):
        for extra, words in (({"sockt": "x"}, "there are .*socket"), ({"lease": "long"}, "must be a number"),
                             ({"lease": -1}, "at least 0"), ({"layerwise": True}, "async_load false"),
                             ({"load": 1}, "must be a bool"),
                             ({"companion": "yes"}, "one of auto, on, off"), ({"encoding": "fp4"}, "one of none, fp8, int8, q4, lossless"),
                             ({"plain_first": 16}, "set encoding, too"), ({"encoding": "fp8", "plain_recent": -1}, "at least 0"), ({"companion": True}, "must be a str")):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, words):
                settings.Settings.parse(extra)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    unittest.main(verbosity=2)
