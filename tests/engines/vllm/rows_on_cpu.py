"""An attention backend on a CPU that keeps a token's channels of a head side by side, K before V.
vLLM's backends on GPUs do the same. (Its kernels for CPUs keep the tokens of a channel side by
side, which no re-rotation of rows fits.) By torch, one request after the other."""

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class RowsImpl(CPUAttentionBackendImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        there = slot_mapping >= 0
        block, row = slot_mapping[there] // kv_cache.shape[2], slot_mapping[there] % kv_cache.shape[2]
        tokens = torch.cat([key[: len(there)][there], value[: len(there)][there]], -1)
        kv_cache[block, :, row] = tokens.to(kv_cache.dtype)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **named):
        of = attn_metadata
        if of is None:
            return output
        starts = of.query_start_loc.tolist()
        for i, length in enumerate(of.seq_lens.tolist()):
            blocks = of.block_table[i, : -(-length // kv_cache.shape[2])]
            k, v = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length].chunk(2, -1)
            q = query[starts[i] : starts[i + 1]].transpose(0, 1)[None]
            seen = torch.ones(q.shape[2], length, dtype=torch.bool).tril(length - q.shape[2])
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
            output[starts[i] : starts[i + 1]] = out[0].transpose(0, 1)
        return output


class RowsBackend(CPUAttentionBackend):
    @staticmethod
    def get_name():
        return "CUSTOM"  # a name of vLLM's list

    @staticmethod
    def get_impl_cls():
        return RowsImpl


def serve():
    """This process's engine has it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from ucmclient.engine.vllm import chunk_rules

    chunk_rules.ROWS.add(RowsBackend.get_name())
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.RowsBackend")
