"""A vLLM that reads what to generate from lines of JSON: check_vllm.py starts one process for each
engine.

The argument is JSON, {"model": directory, "connector": settings or null, and LLM's own}.

A line in is {"prompts": [[token]], "outputs": n, "more": of each prompt}.

A line out is {"seconds": it took, "tokens": [[token]], "cached": [tokens found in a cache],
"transfer": [kv_transfer_params], "sparse": counts, "drafted": counts, "free": pages that nobody
has, "logs": of each token, if "more" asks}. For the start it may be {"error": text}.
"""

import json
import os
import sys
import time

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING",
                  VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", KMP_BLOCKTIME="0")


def tiny_models(directory, wild):
    """Llama with random weights, the same for all callers. wild: the channels of its second KV
    head's V differ so much in size that "lossless" does not fit them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=8192)
    llama = LlamaForCausalLM(config)
    llama.save_pretrained(directory)
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.v_proj.weight[32:] *= 2.0 ** (-3.0 * torch.arange(32))[:, None]
    llama.save_pretrained(wild)


def eagle_model(directory, hidden=128, inner=256, heads=4, dim=32):
    """A draft layer for tiny_models', or another Llama, with random weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads,
                                         num_key_value_heads=2, head_dim=dim, vocab_size=512, max_position_embeddings=8192))
    llama.config.architectures = ["LlamaForCausalLM"]
    llama.config.save_pretrained(directory)
    weights = {name.removeprefix("model."): one.contiguous() for name, one in llama.model.state_dict().items()
               if name.startswith("layers.") and "input_layernorm" not in name}
    save_file({**weights, "fc.weight": torch.randn(hidden, 2 * hidden) / 16}, os.path.join(directory, "model.safetensors"), {"format": "pt"})


def hybrid_models(directory):
    """Small models whose layers keep their KV in several ways, with random weights, the same for
    all callers. Some have sliding windows alongside full attention: with and without a remainder of
    layers, with one size of heads and with two. Others have recurrent state."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM
    from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    size = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                vocab_size=512, max_position_embeddings=8192, sliding_window=256, initializer_range=0.2)
    window, full = "sliding_attention", "full_attention"
    torch.manual_seed(1)
    models = {
        "gemma3": Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=6, layer_types=[window, window, full] * 2, **size)),
        "gemma3-odd": Gemma3ForCausalLM(Gemma3TextConfig(
            num_hidden_layers=7, layer_types=[window, window, full, window, window, full, window], **size)),
        "gptoss": GptOssForCausalLM(GptOssConfig(
            num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2,
            **{**size, "sliding_window": 128, "intermediate_size": 128})),
    }
    size.pop("sliding_window")
    models["qwen3next"] = Qwen3NextForCausalLM(Qwen3NextConfig(
        num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, **size))
    models["nemotron"] = NemotronHForCausalLM(NemotronHConfig(
        hybrid_override_pattern="M-M*M-*-", num_hidden_layers=8, mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=64, n_groups=2,
        conv_kernel=4, expand=2, **size))
    for name, model in models.items():
        model.save_pretrained(os.path.join(directory, name))


def latent_config(of, name, **more):
    """Sizes of DeepSeek V3 and V3.2, whose kernels take only these latents."""
    return of(architectures=[name], hidden_size=512, intermediate_size=512, moe_intermediate_size=128, num_attention_heads=16, num_key_value_heads=16,
              kv_lora_rank=512, q_lora_rank=256, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4,
              num_experts_per_tok=2, n_group=1, topk_group=1, vocab_size=512, initializer_range=0.1, **more)


def gpu_models(directory):
    """Models for which only GPUs have kernels, and hybrid_models()."""
    import torch
    from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM, JambaConfig,
                              JambaForCausalLM)

    hybrid_models(directory)
    eagle_model(os.path.join(directory, "eagle"), 512, 1024, 8, 64)  # of gpu_engine's small model
    torch.manual_seed(1)
    latents = dict(num_hidden_layers=3, first_k_dense_replace=3, max_position_embeddings=8192)
    models = {
        "jamba": JambaForCausalLM(JambaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
            attn_layer_period=4, attn_layer_offset=2, num_experts=1, expert_layer_period=2, use_mamba_kernels=False, initializer_range=0.1,
            max_position_embeddings=8192)),
        "deepseek": DeepseekV3ForCausalLM(latent_config(DeepseekV3Config, "DeepseekV3ForCausalLM", **latents)),
        "indexer": DeepseekV32ForCausalLM(latent_config(
            DeepseekV32Config, "DeepseekV32ForCausalLM", mlp_layer_types=["dense"] * 3, **latents)),
    }
    for name, model in models.items():
        model.bfloat16().save_pretrained(os.path.join(directory, name))


def split_states():
    """vLLM 0.32's Mamba-2 promises states in the middle of a step, which its kernels for CPUs do
    not leave (it fails with an IndexError). Without the promise, vLLM ends steps where it wants a
    state, as for other recurrent layers."""
    from vllm.model_executor.layers.mamba import abstract, mamba_mixer2

    mamba_mixer2.MambaMixer2.get_kv_cache_spec = abstract.MambaBase.get_kv_cache_spec


def one_head_model(directory):
    """Llama with one KV head, of which all ranks have a copy, and with random weights, the same for
    all callers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=32, vocab_size=512,
        max_position_embeddings=8192)).save_pretrained(directory)


def say_replicas():
    """vLLM 0.32 says that ranks have the same bytes of MLA only, which it can't run here. The one head of this model they have, too."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._layer_tp_replicas = lambda spec, tp_size, dcp_size: tp_size


def start(options):
    import torch
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from extra import extra_of

    if os.path.basename(options["model"]) == "nemotron" and not torch.cuda.is_available():
        split_states()
    if os.path.basename(options["model"]) == "one-head":
        say_replicas()
    settings, beside = options.pop("connector"), options.pop("beside", None)
    ours = {"kv_connector": "UcmConnector", "kv_connector_module_path": "ucmclient.engine.vllm.connector", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": settings and extra_of(settings)}
    if beside is not None:
        both = [ours, {**ours, "kv_connector_extra_config": extra_of(beside)}]
        ours = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": both}}
    if settings is not None:
        options["kv_transfer_config"] = KVTransferConfig(**ours)
    return LLM(skip_tokenizer_init=True, **{"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, **options})


def sparse_counts():
    """The engine in this process."""
    counts = {}
    worker, spec = (sys.modules.get("ucmclient.engine.vllm.sparse_" + name) for name in ("worker", "spec"))
    for of in {of for of, _ in worker._by_address.values()} if worker else ():
        counts.update(vars(of.decoder.counts), sequences=len(of.decoder.sequences), rows=of.decoder.rows.in_use)
    for of in spec._schedulers.values() if spec else ():
        counts.update(vars(of.counts), requests=len(of._of))
    return counts


def drafted(llm):
    """Tokens that a draft has proposed, and those that were accepted; none without statistics (disable_log_stats false)."""
    wanted = {f"vllm:spec_decode_num_{name}_tokens": name for name in ("draft", "accepted")}
    if not getattr(llm.llm_engine, "log_stats", False):
        return {}
    return {wanted[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in wanted}


def reset(llm):
    """Resets the engine's own prefix cache, so that the next hit is in the daemon. Pages that are
    being stored are given back in a step."""
    from vllm import SamplingParams

    until = time.monotonic() + 30
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            raise RuntimeError("pages are in use without requests")
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def free_pages(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    if sys.argv[1] in ("hybrid", "gpu"):
        {"hybrid": hybrid_models, "gpu": gpu_models}[sys.argv[1]](sys.argv[2])
        return
    if sys.argv[1] == "eagle":
        eagle_model(sys.argv[2])
        return
    if sys.argv[1] == "one-head":
        one_head_model(sys.argv[2])
        return
    if sys.argv[1] == "models":
        tiny_models(*sys.argv[2:])
        return
    try:
        llm = start(json.loads(sys.argv[1]))
    except Exception as error:
        out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    from vllm import SamplingParams

    out.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        transfer = asked["more"].pop("transfer", None)
        logs = asked["more"].pop("logs", None)  # of how many tokens the log probabilities are wanted; a token's own comes in any case
        sampling = SamplingParams(temperature=0, max_tokens=asked["outputs"], detokenize=False, ignore_eos=True, logprobs=logs,
                                  extra_args={"kv_transfer_params": transfer} if transfer else None)
        if asked["more"].pop("reset", False):
            reset(llm)
        began = time.monotonic()
        done = llm.generate([{"prompt_token_ids": p, **asked["more"]} for p in asked["prompts"]], sampling,
                            use_tqdm=False)
        out.write(json.dumps({"seconds": time.monotonic() - began, "tokens": [list(o.outputs[0].token_ids) for o in done],
                              "cached": [o.num_cached_tokens or 0 for o in done],
                              "transfer": [o.kv_transfer_params for o in done], "sparse": sparse_counts(),
                              "free": free_pages(llm), "drafted": drafted(llm),
                              "logs": [[step[t].logprob for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs or ())]
                                       for o in done]}) + "\n")


if __name__ == "__main__":
    main()
