"""All that a request brings to vLLM's scheduler, and whether its KV depends on it. A vLLM with a
field that is not here fails `make check-vllm` (check_vllm_unit.py). Find out what the field does to
KV. Hash it into keys (client/python/ucmclient/engine/vllm/inputs.py) if that is missing."""

#: By the engine's block hashes.
HASHED = "in vLLM's block hashes"
#: By the connector.
OURS = "hashed into keys by the connector"
NONE = "KV of a token does not depend on it"
#: Which tokens are sampled; these are in the hashes.
TOKENS = "decides which tokens come, and they are hashed"

REQUEST = {
    "prompt_token_ids": HASHED, "prompt_embeds": HASHED, "cache_salt": HASHED,
    "prompt_is_token_ids": OURS,
    "mm_features": f"{HASHED} by names; by bytes where a client chose the name: {OURS}",
    "lora_request": f"{HASHED} by name and path; by files: {OURS}",
    "sampling_params": "see SAMPLING", "pooling_params": "see POOLING",
    "block_hasher": "makes the hashes", "resumable": "what comes later is hashed when it comes",
    "request_id": NONE, "external_req_id": NONE, "client_index": NONE, "data_parallel_rank": NONE, "current_wave": NONE, "arrival_time": NONE,
    "priority": NONE, "trace_headers": NONE, "session_id": NONE, "kv_hints": NONE, "abort_immediately": NONE,
    "reasoning_ended": TOKENS, "reasoning_parser_kwargs": TOKENS, "eos_token_id": TOKENS,
}
SAMPLING = {
    "skip_reading_prefix_cache": "the connector then looks nothing up", "extra_args": "kv_transfer_params and the like, which change no KV",
    **dict.fromkeys((
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words", "_bad_words_token_ids", "max_tokens", "min_tokens",
        "ignore_eos", "_all_stop_token_ids", "_eos_token_id", "logit_bias", "allowed_token_ids", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "repetition_detection", "structured_outputs", "thinking_token_budget", "trace_decode_token_ids", "watermarking",
        "_watermarking_skipped", "logits_processors"), TOKENS),
    **dict.fromkeys((
        "logprobs", "prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids", "logprob_token_ids", "flat_logprobs", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "output_text_buffer_length", "stream_interval",
        "skip_clone", "routed_experts_prompt_start", "truncate_prompt_tokens"), NONE),
}
POOLING = {
    "extra_kwargs": f"a model may be given anything by it: {OURS}, as something of no other request",
    "skip_reading_prefix_cache": "the connector then looks nothing up",
    **dict.fromkeys((
        "dimensions", "use_activation", "task", "output_kind", "requires_token_ids", "returned_token_ids", "step_tag_id", "late_interaction_params",
        "late_chunking_params", "normalize", "activation", "softmax", "truncate_prompt_tokens"), NONE),
}
LORA = {
    "lora_name": HASHED, "lora_path": f"{OURS}, with its files", "is_3d_lora_weight": OURS,
    "lora_int_id": "only within this engine", "load_inplace": "the workers then read it again, and note that", "base_model_name": NONE,
    "long_lora_max_len": NONE, "tensorizer_config_dict": "without files of its own at lora_path nothing is shared",
}
FEATURE = {
    "identifier": HASHED, "mm_position": HASHED, "mm_hash": "the identifier without the adapter", "modality": "the identifier is of it, too",
    "data": f"the identifier is its hash, unless a client chose that: then {OURS}",
}
