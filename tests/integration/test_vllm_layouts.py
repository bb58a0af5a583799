#!/usr/bin/python3
"""Where the tensors of vLLM's attention backends keep blocks, and which kv_tensors a block's bytes
belong to. No daemon."""

import os
import unittest
from types import SimpleNamespace

import vllm_paths  # noqa: F401  sets the paths of the others

import numpy

import engine
import engine_pages
from ucmclient.engine.vllm import identity, layout, settings


class Tensors:
    """As vLLM's attention backends shape them."""

    BLOCKS = 6

    def tensor(self, physical, order, logical=None, dtype=numpy.uint8, gap=0, offset=0):
        """A view of fresh memory: axes `physical`, outermost first, seen in `order`; `gap` bytes after each block."""
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
        return engine_pages.Tensor(view if logical is None else view.reshape(logical)), memory

    def block(self, fragments, memory, b):
        base = memory.__array_interface__["data"][0]
        return b"".join(memory[at: at + c.size].tobytes()
                        for c in fragments for at in (c.address - base + b * c.stride,))


class Layouts(Tensors, unittest.TestCase):
    """Every block's bytes are found, and no others."""

    def right(self, tensor, memory, dimension=0, fragments=1, kernel=1):
        got = layout.tensor_fragments(tensor, self.BLOCKS)
        self.assertEqual(len(got), fragments)
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
        self.right(*self.tensor((2, 6, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.float16), dimension=1, fragments=2)
        self.right(*self.tensor((2, 6, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.float16), dimension=1, fragments=2)

    def test_keys_alongside_values(self):  # FlashInfer, Triton: [blocks, 2, tokens, heads, width], HND below it
        self.right(*self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.float16))
        self.right(*self.tensor((6, 2, 4, 16, 8), (0, 1, 3, 2, 4), dtype=numpy.float16))
        self.right(*self.tensor((6, 2, 16, 4, 8), (1, 0, 2, 3, 4), dtype=numpy.float16), dimension=1)

    def test_latent(self):  # MLA: [blocks, tokens, 576], and DeepSeek's indexer: [blocks, tokens, 132]
        self.right(*self.tensor((6, 64, 576), (0, 1, 2), dtype=numpy.float16))
        self.right(*self.tensor((6, 64, 132), (0, 1, 2)))

    def test_one_view_a_layer(self):  # vLLM 0.32 and 0.33: [blocks, heads, tokens, content] of one allocation
        heads, tokens, content, layers = 4, 16, 8, 3
        for name, physical, order, fragments in (
                ("LBHNC", (layers, 6, heads, tokens, content), (0, 1, 2, 3, 4), 1),
                ("LBNHC", (layers, 6, tokens, heads, content), (0, 1, 3, 2, 4), 1),
                ("LHBNC", (layers, heads, 6, tokens, content), (0, 2, 1, 3, 4), heads),
                ("BLHNC", (6, layers, heads, tokens, content), (1, 0, 2, 3, 4), 1),
                ("BLNHC", (6, layers, tokens, heads, content), (1, 0, 3, 2, 4), 1),
                ("BHLNC", (6, heads, layers, tokens, content), (2, 0, 1, 3, 4), heads)):
            whole, memory = self.tensor(physical, order, dtype=numpy.float16)
            views = {f"layers.{i}": engine_pages.Tensor(layer) for i, layer in enumerate(whole.array)}
            for view in views.values():
                with self.subTest(name):
                    self.right(view, memory, fragments=fragments)
            for layerwise in (False, True):
                with self.subTest(name, layerwise=layerwise):
                    got = layout.layout_of(views, 6, layerwise)
                    together = name in ("BLHNC", "BLNHC") and not layerwise
                    self.assertEqual(len(got.layers), 1 if together else layers)
                    self.assertEqual(got.layer_bytes * len(got.layers), whole.array[:, 0].nbytes)
                    for b in range(6):
                        pieces = [self.block(layer, memory, b) for layer in got.layers]
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
        self.right(*self.tensor((2, 12, 16, 4, 8), (0, 1, 2, 3, 4)), dimension=1, fragments=2, kernel=2)

    def test_padding_is_left_alone(self):  # quantized pages with scales, aligned pages, hybrids' raw tensors
        self.right(*self.tensor((6, 4, 16, 9), (0, 1, 2, 3), gap=64))
        self.right(*self.tensor((6, 4, 16, 9), (0, 1, 2, 3), gap=64, offset=128))

    def test_layers_of_different_sizes_are_one(self):  # DeepSeek-V3.2
        one, memory = self.tensor((6, 64, 576), (0, 1, 2), dtype=numpy.float16)
        other, more = self.tensor((6, 64, 132), (0, 1, 2))
        got = layout.layout_of({"mla": one, "indexer": other, "shared_roots": one}, 6)
        self.assertEqual((len(got.layers), got.layer_bytes), (1, 64 * (1152 + 132)))
        self.assertEqual(self.block(got.layers[0][:1], memory, 3), one.array[3].tobytes())
        self.assertEqual(self.block(got.layers[0][1:], more, 3), other.array[3].tobytes())
        with self.assertRaisesRegex(ValueError, "layerwise"):
            layout.layout_of({"mla": one, "indexer": other}, 6, True)

    def test_what_is_not_understood(self):
        for view, _ in (self.tensor((7, 16, 8), (0, 1, 2)), self.tensor((3, 6, 16), (0, 1, 2)), self.tensor((768,), (0,))):
            with self.assertRaisesRegex(ValueError, "not understood"):
                layout.tensor_fragments(view, 6)
        overlapping = engine_pages.Tensor(numpy.lib.stride_tricks.as_strided(numpy.zeros(64, numpy.uint8), (6, 16), (8, 1)))
        with self.assertRaisesRegex(ValueError, "not understood"):
            layout.tensor_fragments(overlapping, 6)
        view, _ = self.tensor((2, 2, 16, 8), (0, 1, 2, 3))
        with self.assertRaisesRegex(ValueError, "more blocks"):
            layout.tensor_fragments(view, 2)


class KvTensors(Tensors, unittest.TestCase):
    """The layout that encodings get: each fragment has rows of one head. The fragments together are
    the tensor, in this order."""

    HEADS, TOKENS, DIM = 4, 16, 8
    OF = layout.Heads(TOKENS, HEADS, DIM)

    def layout(self, views, of=OF, layerwise=False, dtype="bfloat16"):
        if not isinstance(views, dict):
            views = {"0": views}
        for view in views.values():
            view.dtype = dtype
        got, without = (layout.layout_of(views, self.BLOCKS, layerwise, heads) for heads in (of, None))
        self.assertEqual((got.name, len(got.layers), got.layer_bytes), (without.name, len(without.layers), without.layer_bytes))
        self.assertIsNone(without.kv_tensors)
        kv_tensors = (got.kv_tensors.k, got.kv_tensors.v) if got.kv_tensors.v else (got.kv_tensors.k,)
        for layer in got.layers:
            self.assertEqual([2 * numpy.prod(rows) for rows in kv_tensors], [fragment.size for fragment in layer])
        return got

    def of(self, views, **more):
        got = self.layout(views, **more).kv_tensors
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
            views = {str(i): engine_pages.Tensor(layer) for i, layer in enumerate(whole.array)}
            with self.subTest(name):
                self.assertEqual(self.of(views), (right, None, 0))
                self.assertEqual(self.layout(views).kv_tensors.run, 0 if name == "LBNHC" else 16)
                one = (right[0] // (3 if name[0] == "B" else 1), *right[1:])
                self.assertEqual(self.of(views, layerwise=True), (one, None, 0))

    def test_all_layers_side_by_side(self):
        view, _ = self.tensor((6, 3, 2, 16, 4, 8), (0, 1, 2, 3, 4, 5), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((96, 4, 8), None, 0))
        self.assertEqual(self.layout(view).kv_tensors.run, 16)
        view, _ = self.tensor((6, 3, 2, 4, 16, 8), (0, 1, 2, 4, 3, 5), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((16, 24, 8), None, 1))
        self.assertEqual(self.layout(view).kv_tensors.run, 0, "heads of each layer are heads of their own")
        whole, _ = self.tensor((6, 3, 2, 16, 4, 8), (1, 0, 2, 3, 4, 5), dtype=numpy.uint16)
        views = {str(i): engine_pages.Tensor(layer) for i, layer in enumerate(whole.array)}
        self.assertEqual(self.of(views), ((96, 4, 8), None, 0))
        self.assertEqual(self.of(views, layerwise=True), ((16, 4, 8), (16, 4, 8), 0))

    def test_more_layers_than_a_section_holds(self):
        whole, _ = self.tensor((6, 80, 16, 4, 16), (1, 0, 3, 2, 4), dtype=numpy.uint16)
        views = {str(i): engine_pages.Tensor(layer) for i, layer in enumerate(whole.array)}
        self.assertEqual(self.of(views), ((1280, 8, 8), None, 0))
        whole, _ = self.tensor((6, 2, 1024, 4, 1024), (1, 0, 3, 2, 4), dtype=numpy.uint16)
        views = {str(i): engine_pages.Tensor(layer, "bfloat16") for i, layer in enumerate(whole.array)}
        of = layout.Heads(1024, 4, 512)
        got = layout.layout_of(views, 6, False, of)
        self.assertEqual((len(got.layers), got.kv_tensors.k), (2, (1024, 8, 512)))
        view, _ = self.tensor((6, 2, 1024, 4, 1024), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        view.dtype = "bfloat16"
        with self.assertRaisesRegex(ValueError, "set block_layout to false"):
            layout.layout_of({"all": view}, 6, False, of)

    def test_kernels_with_smaller_blocks(self):
        view, _ = self.tensor((2, 12, 8, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((16, 4, 8), (16, 4, 8), 0))
        self.assertEqual(self.layout(view).kv_tensors.run, 0)
        view, _ = self.tensor((12, 2, 8, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        self.assertEqual(self.of(view), ((32, 4, 8), None, 0), "K and V take turns")
        self.assertEqual(self.layout(view).kv_tensors.run, 8)

    def test_types(self):
        view, _ = self.tensor((6, 2, 16, 4, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        for dtype, name in (("torch.bfloat16", "bf16"), ("torch.float16", "f16")):
            self.assertEqual(self.layout(view, dtype=dtype).kv_tensors.dtype, name)

    def test_as_many_tokens_as_heads(self):
        view, _ = self.tensor((6, 2, 16, 16, 8), (0, 1, 2, 3, 4), dtype=numpy.uint16)
        got = self.layout(view, of=layout.Heads(16, 16, 8))
        self.assertTrue(got.kv_tensors.alike)
        config, kv_config = engine.configuration(8, 1, False, {})
        for encoding in ("fp8", "int8", "lossless", "q4"):
            with self.subTest(encoding):
                make = lambda: identity.identity_of(config, kv_config, got, identity.Ranks(0, 1, True),  # noqa: E731
                                                    settings.Settings(encoding=encoding), {})
                if encoding in ("q4", "int8"):
                    self.assertRaisesRegex(identity.Unsupported, "--block-size", make)
                else:
                    self.assertEqual(make().kv_tensors, got.kv_tensors)

    def test_refused_with_what_to_change(self):
        fits = ((6, 2, 16, 4, 8), (0, 1, 2, 3, 4))
        for (physical, order), dtype, words in (
                (fits, "torch.float32", "float32: start with --dtype bfloat16"),
                (fits, "torch.float8_e4m3fn", "is stored as it is: remove the setting"),
                (fits, "torch.uint8", "is stored as it is: remove the setting"),
                (((6, 2, 16, 4, 12), fits[1]), "bfloat16", "can't tell where K and V lie .* use another attention backend"),
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


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    unittest.main(verbosity=2)
