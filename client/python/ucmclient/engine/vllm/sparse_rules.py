"""The setting `sparse`: what a policy means for this engine, and which engines it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...decode import Admission, Choices, Refused, Room
from ...errors import Status, UcmError
from ...sparse.summary import Shape
from ...sparse.policy import Policy
from .identity import Unsupported, heads_of
from .settings import Settings

_REMEDY = "start with --attention-backend CUSTOM, with the wheel of ucmclient installed, and a model of full attention only"
NOT_OURS = f"sparse decoding does not work with another attention backend: {_REMEDY}"
#: Places through which prefill reads a layer of blocks without pages, for dense tokens.
_STREAM = 8


@dataclass(frozen=True)
class Rules:
    """Requests whose prompts are long are sparse. Their sparse tokens begin with the block of the prompt's last token. A sparse token
    attends a *window*, the last blocks up to its own, and of the blocks before it what the policy chooses. All other tokens are dense.
    So if all other blocks of a prompt are found, none of their tokens need be computed."""

    policy: str
    choices: Choices
    block_tokens: int
    #: A sparse request's prompt has at least so many tokens.
    prompt: int
    #: Lists of blocks that a layer chooses for a token on each rank.
    lists: int
    #: Each rank's memory for entries and summaries, and what requests are admitted by.
    room: Room
    max_tokens: int
    #: Entries are on a GPU, one for each KV head of a layer of a block. No dense token attends a block without a page.
    on_gpu: bool = False

    def own(self, prompt_tokens: int) -> int:
        """The first block of a sparse request that holds sparsely computed tokens."""
        return (prompt_tokens - 1) // self.block_tokens

    def sparse(self, prompt_tokens: int) -> bool:
        return prompt_tokens >= self.prompt

    def candidates(self, position: int) -> int:
        """How many first blocks the token at this position chooses from. The window follows them."""
        return self.choices.candidates(position // self.block_tokens)

    def pageless(self, computed: int) -> int:
        """How many first blocks need no pages when so many tokens are computed. On a GPU a step that missed blocks is computed again,
        from the first token of the last computed token's block. So the window of that block's first token counts."""
        return self.candidates(max(0, computed - 1) if self.on_gpu else computed)

    def admission(self) -> Admission:
        return _admission(self.room, self.choices, self.lists, self.block_tokens, self.on_gpu)


def _admission(room: Room, choices: Choices, lists: int, block_tokens: int, on_gpu: bool) -> Admission:
    return Admission(room, choices, lists=lists, block_tokens=block_tokens, layer_heads=lists if on_gpu else 1)


def rules_of(settings: Settings, config: Any, kv_cache_config: Any) -> Rules:
    _check(settings, config, kv_cache_config)
    assert settings.sparse is not None
    policy, group = Policy(settings.sparse), kv_cache_config.kv_cache_groups[0]
    of, longest = heads_of(kv_cache_config, "sparse"), config.model_config.max_model_len
    shape, on_gpu = Shape("f32", of.tokens, of.heads, of.dim), device_of(config) == "cuda"
    try:
        if on_gpu:
            _on_gpu(policy)
        choices = _choices(policy, shape, len(group.layer_names), str(config.model_config.model))
    except (Refused, ValueError) as error:
        raise Unsupported(f"sparse: {error}") from None
    lists = 1 if choices.score.heads != "each" else of.heads
    most = _admission(Room(0, 0), choices, lists, of.tokens, on_gpu).need(longest)
    prompt = policy.dense_below + of.tokens
    if not most.rows or prompt >= longest:
        raise Unsupported(
            f"sparse: with --max-model-len {longest}, blocks of {of.tokens} tokens, dense_below={policy.dense_below} and a window of "
            f"{choices.window} blocks no request would ever be sparse: allow longer ones, or remove the setting"
        )
    room = Room(most.entries * settings.sparse_room, most.rows * settings.sparse_room, _STREAM)
    return Rules(str(policy), choices, of.tokens, prompt, lists, room, longest, on_gpu)


def device_of(config: Any) -> str:
    """"cuda", "cpu" ..."""
    return str(getattr(getattr(config, "device_config", None), "device_type", "cpu"))


def _on_gpu(policy: Policy) -> None:
    if policy.choice != "topk":
        raise Refused(f"{policy}: on a GPU how many blocks a token takes is known before it is computed; set choice=topk")
    if policy.dense_first or policy.dense_last:
        raise Refused(f"{policy}: a dense layer would bring all blocks in each step; set dense_first=0,dense_last=0")


def _asked_for(config: Any) -> bool:
    """For a vLLM that does not ask the backend for the KV cache's spec: whether the user set --attention-backend CUSTOM. The worker
    checks whose backend that is."""
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return getattr(backend, "name", backend) == "CUSTOM"


def _choices(policy: Policy, shape: Shape, layers: int, model: str) -> Choices:
    try:
        return Choices.from_policy(policy, shape, layers, model)
    except UcmError as error:
        if error.status == Status.UNSUPPORTED:
            raise Unsupported(f"sparse: {error}") from None
        if error.status != Status.NOT_FOUND:
            raise
    return Choices.from_policy(policy, shape, layers)


def _check(settings: Settings, config: Any, kv_cache_config: Any) -> None:
    for why, remedy in _reasons(settings, config, kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        raise Unsupported(f"sparse decoding does not work with {why}: {remedy}")


def _reasons(settings: Settings, config: Any, spec: Any) -> Iterator[tuple[str, str]]:
    cache_dtype, on_gpu = str(config.cache_config.cache_dtype), device_of(config) == "cuda"
    if cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        yield f"a KV cache of {cache_dtype}", "start with --kv-cache-dtype auto"
    if type(spec).__name__ != "SparseSpec" and not (type(spec).__name__ == "FullAttentionSpec" and _asked_for(config)):
        yield f"a KV cache of kind {type(spec).__name__}", _REMEDY
    if getattr(spec, "sliding_window", None) is not None or getattr(spec, "attention_chunk_size", None) is not None:
        yield "sliding windows or chunked attention", "take a model of full attention only"
    if on_gpu and str(config.model_config.dtype).rpartition(".")[2] not in ("bfloat16", "float16"):
        yield f"{config.model_config.dtype} on a GPU", "start with --dtype bfloat16"
    if getattr(config.scheduler_config, "async_scheduling", False):
        yield "asynchronous scheduling, which delivers a token before its step is known to be right", "start with --no-async-scheduling"
    if getattr(config, "speculative_config", None) is not None:
        yield "speculative decoding", "start without it"
    if getattr(config.model_config, "runner_type", "generate") != "generate":
        yield "a model that does not generate", 'remove the setting "sparse"'
    if not settings.async_load:
        yield "loads within the step", "set async_load to true"
    if settings.encoding != "none":
        yield "encoded blocks", "set encoding to none"
    if settings.summaries is not None:
        yield "the setting summaries, since the policy says which ones there are", "remove summaries"
    if not (settings.load and settings.store):
        yield "an engine that only stores or only loads", "start with kv_role kv_both, and load and store true"
