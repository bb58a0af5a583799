#!/usr/bin/python3
"""The vLLM connector's setting `head_groups`, in the small engine of tests/engines/vllm. Engines of
1, 2 and 4 tensor-parallel ranks load what each of them has stored. Outputs are the same bit for bit
as without a cache."""

import os
import shutil
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, GPU, Case, Request, daemon, engine, model, prompt, watch  # sets the paths
from extra import extra_of
import numpy

import test_vllm_layouts
import test_vllm_trouble
from engine import configuration
from ucmclient import Namespace, Region
from ucmclient.errors import Status, UcmError
from ucmclient.engine.vllm import head_groups, identity, settings
from ucmclient.engine.vllm.layout import Heads

WHOLE = 150 // BLOCK * BLOCK


class HeadGroups(Case):
    def sized(self, ranks, **more):
        return self.engine(**{"ranks": ranks, "head_groups": 4, "layout": "heads", **more})

    def crossed(self, sizes, seed, **more):
        """Engines of all other sizes load what an engine of one size stores."""
        for i, size in enumerate(sizes):
            tokens = prompt(seed + i, 150)
            self.check(self.sized(size, **more), Request("cold", tokens))
            for other in sizes:
                with self.subTest(stored=size, loaded=other, **more):
                    warm = self.sized(other, **more)
                    self.check(warm, Request("warm", tokens))
                    self.assertEqual(warm.loaded_tokens, WHOLE)

    def test_engines_of_all_sizes_share(self):
        self.crossed((1, 2, 4), 700)

    def test_layers_apart(self):
        self.crossed((1, 4), 710, layout="layers")

    def test_groups_of_several_heads(self):
        for layout in ("heads", "layers"):
            self.crossed((1, 2), 720, head_groups=2, layout=layout, salt=layout)

    def test_layer_after_layer(self):
        self.crossed((1, 4), 730, async_load=False, layerwise=True)
        self.crossed((1, 2), 735, async_load=False, layerwise=True, head_groups=2, layout="layers")

    def test_a_part_is_a_group_whoever_stores_it(self):
        for ranks in (1, 2, 4):
            before = self.stats()["dump_blocks"]
            self.check(self.sized(ranks), Request("cold", prompt(740 + ranks, 150)))
            self.assertEqual(self.stats()["dump_blocks"] - before, 4 * (157 // BLOCK))

    def test_other_groups_and_other_orders_are_other_blocks(self):
        tokens = prompt(750, 150)
        self.check(self.sized(2), Request("cold", tokens))
        for more in ({"head_groups": 2}, {"layout": "layers", "head_groups": 2}, {"head_groups": 0, "ranks": 4}, {"dtype": "float16"}):
            other = self.sized(**{"ranks": 2, **more})
            other.add(Request("other", tokens))
            other.step()
            self.assertEqual(other.loaded_tokens, 0, more)
            other.abort("other")

    def test_sleep(self):
        a, b = self.sized(1), self.sized(2)
        tokens = prompt(760, 150)
        self.check(a, Request("cold", tokens))
        for e in (a, b):
            e.sleep()
            e.wake()
        self.check(b, Request("other", prompt(761, 150)))
        self.assertEqual(self.stats()["regions"], 1 * 4 + 2 * 2)

    def test_a_part_that_can_not_be_asked_for_fails_the_load(self):
        tokens, ask = prompt(770, 150), Region.load
        self.check(self.sized(4), Request("cold", tokens))

        def refused(region, *args, **named):
            calls.append(region)
            if len(calls) % 4 == 3:
                raise UcmError(Status.NO_MEMORY, "none is left")
            return ask(region, *args, **named)
        calls, warm = [], self.sized(1)
        with mock.patch.object(Region, "load", refused):
            self.check(warm, Request("warm", tokens))
        self.assertEqual((len(calls), warm.recomputed), (3, 1))

    def test_a_part_that_can_not_be_registered(self):
        register, made = Namespace.register, []

        def refused(ns, *args, part, **named):
            if part == 2:
                raise UcmError(Status.BUSY, "not now")
            made.append(register(ns, *args, part=part, **named))
            return made[-1]
        with mock.patch.object(Namespace, "register", refused):
            e = self.sized(1)
            self.eventually(lambda: len(made) >= 2)
        self.assertTrue(all(region.closed for region in made[:2]))
        self.eventually(lambda: self.loads(e, prompt(775, 150)))


@unittest.skipIf(GPU, "of another host's daemon the host's memory says enough")
class TwoHosts(Case):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="ucm-heads-")
        self.addCleanup(shutil.rmtree, self.directory)
        self.daemon = self.host()
        self.addCleanup(self.stop)

    def host(self):
        return daemon(**{"shared.roots": self.directory, "shared.negative": "50ms", "shared.lookup_timeout": "10s", "shared.timeout": "30s"})

    def test_prefill_of_two_ranks_serves_decode_of_one_and_of_four(self):
        tokens = prompt(780, 150)
        self.check(self.engine(ranks=2, head_groups=4, layout="heads", role="kv_producer"), Request("prefill", tokens))
        self.eventually(lambda: self.stats()["shared_writes"] >= 4 * (157 // BLOCK))
        other = self.host()
        self.addCleanup(other.stop)
        for ranks in (1, 4):
            decode = self.engine(ranks=ranks, head_groups=4, layout="heads", role="kv_consumer", socket=other.socket)
            self.check(decode, Request("decode", tokens))
            self.assertEqual(decode.loaded_tokens, WHOLE)


@unittest.skipIf(GPU, "what is on NVMe is looked for on the host")
@unittest.skipUnless(os.environ.get("UCM_PHASE", "plain") == "plain", "sanitizers see test_vllm_trouble.py itself")
class HeadGroupsTrouble(test_vllm_trouble.Trouble):
    """An engine has four parts of each block, or its ranks have two each."""

    def engine(self, **more):
        return super().engine(**{"head_groups": 4, "layout": "heads", **more})


for name in dir(test_vllm_trouble.Trouble):
    if name.startswith("test_") and not any(word in name for word in ("preemption", "aborts")):
        setattr(HeadGroupsTrouble, name, None)


class Bytes(test_vllm_layouts.Tensors, unittest.TestCase):
    """A group's bytes and its layout's name are the same whatever else its rank holds."""

    HEADS, TOKENS, DIM, LAYERS = 8, 5, 6, 3

    def part(self, tensors, memory, ranks, rank, groups, part, apart):
        heads = self.HEADS // ranks
        of = head_groups.HeadGroups(identity.Ranks(0, groups, True), groups // ranks, self.HEADS // groups, Heads(self.TOKENS, heads, self.DIM))
        layouts = head_groups.group_layouts(tensors, self.BLOCKS, of, apart)
        one = layouts[part - rank * groups // ranks]
        base = memory.__array_interface__["data"][0]
        got = [b"".join(memory[at: at + c.size].tobytes() for c in layer for at in (c.address - base + 2 * c.stride,)) for layer in one.layers]
        return one.name, got

    def rank(self, values, order, ranks, rank):
        """A rank's tensors: its heads of `values` [layer, block, head, token, channel], in physical
        `order`, seen as [block, head, ...]."""
        share = self.HEADS // ranks
        mine = values[:, :, rank * share: (rank + 1) * share]
        memory = numpy.ascontiguousarray(mine.transpose(order))
        view = memory.transpose(numpy.argsort(order))
        flat = memory.reshape(-1).view(numpy.uint8)
        return {f"layers.{i}": test_vllm_layouts.engine_pages.Tensor(view[i]) for i in range(self.LAYERS)}, flat

    def test_of_any_rank(self):
        values = numpy.arange(self.LAYERS * self.BLOCKS * self.HEADS * self.TOKENS * 2 * self.DIM, dtype=numpy.uint16).reshape(
            self.LAYERS, self.BLOCKS, self.HEADS, self.TOKENS, 2 * self.DIM)
        names = set()
        orders = {"LBHNC": (0, 1, 2, 3, 4), "BLHNC": (1, 0, 2, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}
        for groups in (2, 4, 8):
            for name, order in orders.items():
                for apart in (False, True):
                    with self.subTest(name, groups=groups, apart=apart):
                        for part in range(groups):
                            found = set()
                            for ranks in [n for n in (1, 2, 4, 8) if n <= groups]:
                                rank = part * ranks // groups
                                layer_name, got = self.part(*self.rank(values, order, ranks, rank), ranks, rank, groups, part, apart)
                                found.add((layer_name, tuple(got)))
                            self.assertEqual(len(found), 1)
                        names.add((found.pop()[0], groups, name, apart))
        # In a group of one head, all three orders are the same. Otherwise it matters whether all
        # layers of a head lie together.
        self.assertEqual({groups: len({name for name, of, *_ in names if of == groups}) for groups in (2, 4, 8)}, {2: 3, 4: 3, 8: 2})


class Refusals(unittest.TestCase):
    def of(self, groups, ranks=1, **parallel):
        config, kv = configuration(8, ranks, False, {})
        vars(config.parallel_config).update(parallel)
        return head_groups.head_groups_of(config, kv, 0, groups)

    def refused(self, words, call, *args, **named):
        with self.assertRaisesRegex(identity.Unsupported, words):
            call(*args, **named)

    def test_groups_that_do_not_fit(self):
        self.assertEqual((self.of(4).mine, self.of(4, 2).mine, self.of(2, 2).size), (4, 2, 2))
        self.refused("it can be 1, 2, 4: take the largest --tensor-parallel-size", self.of, 3)
        self.refused("it can be 4: ", self.of, 2, ranks=4)
        self.refused("use --pipeline-parallel-size 1", self.of, 4, pipeline_parallel_size=2)

    def test_heads_that_are_not_shared_out(self):
        config, kv = configuration(8, 4, False, {})
        config.model_config.get_total_num_kv_heads = lambda: 2
        self.refused("the model's 2: use a smaller", head_groups.head_groups_of, config, kv, 0, 4)

    def test_latent_vectors(self):
        config, kv = configuration(8, 1, False, {})
        kv.kv_cache_groups[0].kv_cache_spec = type("MLAAttentionSpec", (), vars(type(kv.kv_cache_groups[0].kv_cache_spec)) | {})()
        self.refused("share anyway", head_groups.head_groups_of, config, kv, 0, 4)

    def test_other_settings(self):
        for extra in ({"encoding": "fp8"}, {"summaries": "mean"}, {"sparse": "auto"}):
            of = settings.Settings.parse(extra_of({"head_groups": 4, **extra}))
            self.refused(f'remove the setting "{list(extra)[0]}"', head_groups.check_head_groups, of, False)
        self.refused("--disable-hybrid-kv-cache-manager", head_groups.check_head_groups, settings.Settings.parse(extra_of({"head_groups": 4})), True)

    def test_tensors(self):
        def tensor(*shape):
            return SimpleNamespace(shape=shape, element_size=lambda: 2, data_ptr=lambda: 4096, dtype="torch.bfloat16",
                                   stride=lambda: tuple(int(numpy.prod(shape[i + 1:])) for i in range(len(shape))))
        of = head_groups.HeadGroups(identity.Ranks(0, 4, True), 4, 1, Heads(16, 4, 8))
        self.refused("VLLM_KV_CACHE_LAYOUT=HND", head_groups.group_layouts, {"a": tensor(2, 6, 16, 4, 8)}, 6, of, False)
        self.refused("can't tell which dimension", head_groups.group_layouts, {"a": tensor(2, 6, 16, 32)}, 6, of, False)
        alike = head_groups.HeadGroups(identity.Ranks(0, 4, True), 4, 1, Heads(4, 4, 8))
        self.refused("can't tell which dimension", head_groups.group_layouts, {"a": tensor(6, 4, 4, 16)}, 6, alike, False)

    def test_the_layout_that_is_asked_for(self):
        from ucmclient.engine.vllm.connector import UcmConnector
        for more, wanted in (({}, "BHLNC"), ({"layerwise": True, "async_load": False}, "LBHNC"), ({"advanced": {"block_layout": False}}, "LBHNC")):
            config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"head_groups": 4, **more}))
            self.assertEqual(UcmConnector.get_required_kvcache_layout(config), wanted)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
