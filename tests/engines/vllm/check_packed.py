#!/usr/bin/env python3
"""How vLLM packs layers of several kinds into one buffer, with its own code and the connector's, a
part of `make check-vllm`. It has caches as large models have them, in each layout, without the
models. A block that is copied by the connector's fragments is whole, and no other block changes."""

import os
import sys
import unittest
from types import SimpleNamespace

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python")]

import torch  # noqa: E402
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: E402
try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups  # noqa: E402
except ImportError:  # 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    CircularBufferSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec, SparseCacheRole)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from ucmclient.engine.vllm.groups import check_hybrid, groups_of, kinds_of  # noqa: E402
from ucmclient.engine.vllm.identity import Unsupported, check_one_group  # noqa: E402
from ucmclient.engine.vllm.layout import layout_of  # noqa: E402
from ucmclient.engine.vllm.settings import Settings  # noqa: E402

BLOCKS = 5


def _gpt_oss():
    heads = dict(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
    return {f"layers.{i}": SlidingWindowSpec(**heads, sliding_window=128) if i % 2 == 0 else FullAttentionSpec(**heads) for i in range(24)}


def _qwen3_next():
    """48 layers, in blocks of so many tokens that a state of 32 heads fits a page."""
    full = FullAttentionSpec(block_size=1056, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    state = MambaSpec(block_size=1056, shapes=((3, 8192), (32, 128, 128)), dtypes=(torch.bfloat16, torch.float32),
                      page_size_padded=full.page_size_bytes, mamba_cache_mode="align")
    return {f"layers.{i}": full if i % 4 == 3 else state for i in range(8)}


def _deepseek_v32():
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla")
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
    return {f"layers.{i}.{name}": spec for i in range(5) for name, spec in (("attn", latent), ("indexer.k_cache", index))}


def _deepseek_v4(replay=False):
    """Layers of three kinds, by their names in vLLM: windows alone, and windows alongside a latent of 4 tokens with an indexer, or of 128."""
    def latent(per, **more):
        return MLAAttentionSpec(block_size=256, num_kv_heads=1, max_tp_shards=1, dtype=torch.uint8, tokens_per_state=per, alignment=576, **more)

    def state(size, tokens, window):
        return SlidingWindowMLASpec(block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=torch.float32,
                                    sliding_window=window, alignment=576)

    specs, packed = {}, dict(head_size=512, cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", state_content_bytes=584)
    for i, per in enumerate([0, 0, 4, 128, 4, 128, 4]):
        name = f"model.layers.{i}.attn"
        specs[name + ".swa_cache"] = SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, max_tp_shards=1, dtype=torch.uint8, sliding_window=128, alignment=576,
            bounded_replay=replay, **packed)
        if per:
            specs[name] = latent(per, **packed)
            specs[name + ".compressor.state_cache"] = state(2 * 512 * (1 + (per == 4)), 4 if per == 4 else 8, 8 if per == 4 else 128)
        if per == 4:
            specs[name + ".indexer.k_cache"] = latent(per, head_size=132)
            specs[name + ".indexer.compressor.state_cache"] = state(512, 4, 8)
    return specs


class Packed(unittest.TestCase):
    def config(self, specs, layout):
        cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, prefix_cache_retention_interval=0, num_gpu_blocks_override=BLOCKS,
                                enable_prefix_caching=True, prefix_match_unit=None, block_size=max(s.block_size for s in specs.values()))
        config = SimpleNamespace(
            cache_config=cache, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False), speculative_config=None,
            attention_config=SimpleNamespace(hisparse_config=None), kv_transfer_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), model_config=SimpleNamespace(max_model_len=4096))
        kv_config = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), 1 << 40)
        kv_config.hash_block_size = resolve_kv_cache_block_sizes(kv_config, config)[1]
        return config, kv_config

    def layouts(self, specs, layout):
        """The groups' layers, and the layout that the connector copies them by; the tensors."""
        config, kv_config = self.config(specs, layout)
        tensors = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
        groups = groups_of(kv_config)
        if groups is None:
            check_one_group(kv_config)
            return [(list(specs), layout_of(tensors, BLOCKS))], tensors
        check_hybrid(config, kv_config, groups, Settings.parse({}))
        kinds = kinds_of(groups, tensors, BLOCKS)
        return [(g.layers, kinds.layouts[m.kind]) for g, m in zip(groups, kinds.members)], tensors

    def check(self, specs, layouts, groups):
        for layout in layouts:
            with self.subTest(layout.name):
                found, tensors = self.layouts(specs, layout)
                self.assertEqual(len(found), groups)
                self.assertEqual(sorted(name for names, _ in found for name in names), sorted(specs))
                raw = torch.empty(0, dtype=torch.uint8)
                raw.set_(next(iter(tensors.values())).untyped_storage())
                for names, of in found:
                    self.copied(raw, {name: tensors[name] for name in names}, of)

    def copied(self, raw, tensors, layout):
        raw.random_(generator=torch.Generator().manual_seed(1))
        per = {name: tensor.shape[0] // BLOCKS for name, tensor in tensors.items()}
        want = {name: t[per[name]:2 * per[name]].contiguous().view(torch.uint8).clone() for name, t in tensors.items()}
        others = {(name, b): t[b * per[name]:(b + 1) * per[name]].contiguous().view(torch.uint8).clone()
                  for name, t in tensors.items() for b in range(BLOCKS) if b != 3}
        for fragment in (fragment for layer in layout.layers for fragment in layer):
            at = fragment.address - raw.data_ptr()
            raw[at + 3 * fragment.stride: at + 3 * fragment.stride + fragment.size] = raw[at + fragment.stride: at + fragment.stride + fragment.size].clone()
        for name, t in tensors.items():
            self.assertTrue(torch.equal(t[3 * per[name]:4 * per[name]].contiguous().view(torch.uint8), want[name]), name)
        for (name, b), bytes_ in others.items():
            t = tensors[name]
            self.assertTrue(torch.equal(t[b * per[name]:(b + 1) * per[name]].contiguous().view(torch.uint8), bytes_), (name, b))

    def test_gpt_oss(self):
        self.check(_gpt_oss(), KVCacheLayout, 2)

    def test_qwen3_next(self):
        self.check(_qwen3_next(), [one for one in KVCacheLayout if one.is_block_compact], 4)

    def test_deepseek_v32(self):
        self.check(_deepseek_v32(), [one for one in KVCacheLayout if one.is_block_compact], 1)

    def test_deepseek_v4(self):
        layouts = [one for one in KVCacheLayout if one.is_block_compact and one.is_block_outermost]
        found, _ = self.layouts(_deepseek_v4(), layouts[0])
        self.check(_deepseek_v4(), layouts, len(found))
        self.assertGreater(len(found), 3)

    def test_what_is_refused(self):
        layout = KVCacheLayout.BLNHC
        with self.assertRaisesRegex(Unsupported, "SlidingWindowMLASpec.*for one request"):
            self.layouts(_deepseek_v4(replay=True), layout)
        ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        with self.assertRaisesRegex(Unsupported, "CircularBufferSpec.*for one request"):
            self.layouts({**_gpt_oss(), "ring": ring}, layout)


if __name__ == "__main__":
    unittest.main()
