"""Chunks in models of Hugging Face's `transformers`, on their CPU.

    with Runner(model, client, name="SmolLM2-135M", blocks=1024) as runner:
        for document in documents:
            runner.store(document)                     # once, each by itself
        logits, cache = runner.prefill(tokens, blend.split(tokens, separator), blend.First(16))
        more = runner.generate(tokens, logits, cache, 32)

Models whose decoder is a list `model.model.layers` over one rotary embedding, with attention to all tokens (Llama, Mistral without a window,
Qwen2, SmolLM2 ...), K rotated in halves; one sequence at a time. Refused otherwise, with a sentence. torch and transformers are imported here only.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..client import Client, Identity, Plane
from ..keys import sha256_chain
from ..memory import SharedMemory
from ..region import BlockResult, Rope
from .chunks import Chunks, Found, store_prefix
from .plan import Plan, plan as make_plan, selecting
from .policy import Hkvd, Policy
from .spans import Span

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def rope_of(config: Any, block_tokens: int, dtype: str = "bf16") -> Rope:
    """The Rope of a model's config, for K whose layer begins with it as [block_tokens][KV heads][head_dim]. Refuses kinds that can't be turned."""
    settings = getattr(config, "rope_parameters", None)
    if settings is None:  # before transformers 5
        settings = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise ValueError(f"rope_type is {kind!r}; default, linear, dynamic, yarn and llama3 can be turned")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = int(dim * settings.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
    trained = config.max_position_embeddings if kind == "dynamic" else settings.get("original_max_position_embeddings", 0)
    fast, slow = ("high_freq_factor", "low_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
    return Rope(
        rows=block_tokens * config.num_key_value_heads,
        dim=dim,
        rotary=rotary,
        base=settings["rope_theta"],
        dtype=dtype,
        scaling=kind,
        factor=settings.get("factor") or 1.0,
        trained=trained or 0,
        fast=settings.get(fast) or 32.0,
        slow=settings.get(slow) or 1.0,
        whole=settings.get("truncate", True),
    )


class BlendLayer(DynamicLayer):
    """A layer's K and V of a request of known length. While `at` is set, what the model computes goes to these positions, and `deviation` is by how
    much its K differs from what was there; without it, to the end, as in any cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True
        self.at: Optional[torch.Tensor] = None
        self.end = keys.shape[2]  # of what a query of this pass may see
        self.deviation: Optional[torch.Tensor] = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **more: Any) -> Any:
        if self.at is None:
            return super().update(key_states, value_states, *args, **more)
        self.deviation = (key_states - self.keys[:, :, self.at]).abs().float().sum(dim=(0, 1, 3))
        self.keys[:, :, self.at] = key_states
        self.values[:, :, self.at] = value_states
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class BlendCache(Cache):
    """A `transformers` cache whose layers are BlendLayers."""

    def __init__(self, config: Any, n_tokens: int, dtype: torch.dtype):
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, n_tokens, dim)
        super().__init__(
            layers=[BlendLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(config.num_hidden_layers)]
        )


class Runner:
    """A model, its pages, and the namespaces of its chunks and prefixes. name, revision: of the weights, for the identity. One thread at a time."""

    def __init__(self, model: Any, client: Client, *, name: str, revision: str = "", blocks: int = 1024, block_tokens: int = 16):
        config = model.config
        _check_model(model)
        self.model, self.client, self.blocks, self.B = model, client, blocks, block_tokens
        self.dtype = model.dtype
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        rope = rope_of(config, block_tokens, _DTYPES[self.dtype])
        self.dim, size = rope.dim, self.dtype.itemsize
        section = block_tokens * self.heads * self.dim * size
        self.identity = Identity(
            model=name,
            revision=revision,
            dtype=_DTYPES[self.dtype],
            layout="nhd/1",
            block_tokens=block_tokens,
            shards=(self.layers,),
            shard_bytes=2 * section,
        )
        self._memory = SharedMemory(self.layers * 2 * blocks * section)
        planes = [Plane(0, i * blocks * section, section, section, i // 2) for i in range(2 * self.layers)]
        #: [layer][K, V][block][token][head][channel]
        self.pages = torch.frombuffer(self._memory.buffer, dtype=self.dtype).view(self.layers, 2, blocks, block_tokens, self.heads, self.dim)
        self.chunks = Chunks(client, self.identity)
        self._rope = rope
        self._chunk_pages = self.chunks.register([self._memory.memory()], planes, blocks=blocks, rope=rope)
        self.prefixes = client.namespace(self.identity)
        self._prefix_pages = self.prefixes.register([self._memory.memory()], planes, blocks=blocks)
        #: What the last prefill loaded and computed.
        self.last_plan: Optional[Plan] = None
        self.computed_tokens = 0.0

    def close(self) -> None:
        self._prefix_pages.close()
        self._chunk_pages.close()
        self.prefixes.close()
        self.chunks.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- pages ----

    def _room(self, blocks: int) -> None:
        if blocks > self.blocks:
            raise ValueError(f"{blocks} blocks are to move at once, the pages hold {self.blocks}")

    def _to_pages(self, cache: Cache, first: int, blocks: int) -> None:
        """Blocks of a cache from block `first` on, to pages 0 and on."""
        a, b = first * self.B, (first + blocks) * self.B
        for layer, of in enumerate(cache.layers):
            for which, tensor in enumerate((of.keys, of.values)):
                self.pages[layer, which, :blocks] = tensor[0, :, a:b].transpose(0, 1).reshape(blocks, self.B, self.heads, self.dim)

    def _from_pages(self, cache: Cache, first: int, blocks: int, position: int) -> None:
        for layer, of in enumerate(cache.layers):
            for which, tensor in enumerate((of.keys, of.values)):
                rows = self.pages[layer, which, first : first + blocks].reshape(-1, self.heads, self.dim)
                tensor[0, :, position : position + blocks * self.B] = rows.transpose(0, 1)

    # ---- requests ----

    def store(self, tokens: Sequence[int]) -> int:
        """Computes a chunk by itself and stores its whole blocks, unless they are there. -> how many it stored."""
        found = self.chunks.lookup(tokens, [Span(0, len(tokens))])
        if all(found.there[0]):
            return 0
        found = dataclasses.replace(found, there=((False,) * len(found.there[0]),))
        plan = make_plan(found, Hkvd(), paged=False)
        cache = BlendCache(self.model.config, len(tokens), self.dtype)
        self._compute(tokens, plan, cache, 0, len(tokens))
        n = len(found.keys[0])
        self._room(n)
        self._to_pages(cache, 0, n)
        return self._chunk_pages.store(plan, tokens, 0, range(n)).wait().ok

    def prefill(
        self, tokens: Sequence[int], spans: Sequence[Span], policy: Policy, *, step: int = 0, prefixes: bool = True
    ) -> tuple[torch.Tensor, BlendCache]:
        """A request's logits behind its last token, and its cache. step: computes so many tokens' positions at a time; 0: all at once. prefixes: begins with
        the longest cached prefix, and stores the exact blocks that it computed."""
        cache = BlendCache(self.model.config, len(tokens), self.dtype)
        packed = sha256_chain(tokens, self.B)
        names = [packed[i : i + 32] for i in range(0, len(packed), 32)]
        hit = self._load_prefix(names[: (len(tokens) - 1) // self.B], cache) if prefixes else 0
        plan = self._load_chunks(self.chunks.lookup(tokens, spans, prefix=hit * self.B, lease=30), policy, cache)
        self.last_plan, self.computed_tokens = plan, 0.0
        step, at, logits = step or len(tokens), plan.prefix, None
        while at < len(tokens):
            logits = self._compute(tokens, plan, cache, at, min(at + step, len(tokens)))
            at += step
        if prefixes:
            self._store_prefix(plan, names, hit, cache)
        assert logits is not None  # a plan computes the last token
        return logits, cache

    def generate(self, tokens: Sequence[int], logits: torch.Tensor, cache: BlendCache, n: int) -> list[int]:
        """n tokens behind a prefill, the likeliest each."""
        out: list[int] = []
        for position in range(len(tokens), len(tokens) + n):
            out.append(int(logits.argmax()))
            with torch.no_grad():
                answer = self.model(
                    input_ids=torch.tensor([[out[-1]]]), position_ids=torch.tensor([[position]]), past_key_values=cache, use_cache=True
                )
            logits = answer.logits[0, -1]
        return out

    # ---- the cache ----

    def _load_prefix(self, names: list[bytes], cache: BlendCache) -> int:
        hits = self.prefixes.lookup_prefix(names, lease=30) if names else None
        if hits is None or hits.blocks == 0:
            return 0
        n = min(hits.blocks, self.blocks)
        result = self._prefix_pages.load(names[:n], range(n), lease=hits.lease).wait()
        whole = next((i for i, r in enumerate(result.blocks) if r != BlockResult.OK), n)
        self._from_pages(cache, 0, whole, 0)
        return whole

    def _load_chunks(self, found: Found, policy: Policy, cache: BlendCache) -> Plan:
        """Blocks that could not be loaded are computed, and all of a request that dynamic scaling gives frequencies of its own."""
        if self._rope.scaling == "dynamic" and found.n_tokens > self._rope.trained:
            found = dataclasses.replace(found, there=tuple((False,) * len(of) for of in found.there))
        plan = make_plan(found, policy, paged=False)
        while plan.loads:
            self._room(len(plan.loads))
            result = self._chunk_pages.load(plan, range(len(plan.loads)), lease=found.lease).wait()
            if result.all_ok:
                break
            lost = {(load.chunk, load.block) for load, r in zip(plan.loads, result.blocks) if r != BlockResult.OK}
            there = tuple(tuple(t and (i, j) not in lost for j, t in enumerate(of)) for i, of in enumerate(found.there))
            found = dataclasses.replace(found, there=there, lease=0)
            plan = make_plan(found, policy, paged=False)
        for s in plan.segments:
            self._from_pages(cache, s.first, s.count, s.new)
        return plan

    def _store_prefix(self, plan: Plan, names: list[bytes], hit: int, cache: BlendCache) -> None:
        n = min(plan.exact // self.B - hit, self.blocks)
        if n > 0:
            self._to_pages(cache, hit, n)
            store_prefix(plan, self._prefix_pages, names[hit : hit + n], array.array("I", range(n)), first_block=hit).wait()

    # ---- the model ----

    def _compute(self, tokens: Sequence[int], plan: Plan, cache: BlendCache, begin: int, end: int) -> Optional[torch.Tensor]:
        """The plan's positions in [begin, end), which become K and V in the cache. -> the logits of the request's last token, if it is one of them."""
        choosing = selecting(plan.policy) if plan.reused else []
        always = {p for p in plan.compute if begin <= p < end}
        reused = [p for p in plan.reused if begin <= p < end]
        at = torch.tensor(sorted([*always, *reused]) if choosing else sorted(always))
        if len(at) == 0:
            return None
        decoder = self.model.model
        with torch.no_grad():
            hidden = decoder.embed_tokens(torch.tensor(tokens)[at])[None]
            rotary = decoder.rotary_emb(hidden, position_ids=at[None])
            for layer, module in enumerate(decoder.layers):
                of = cache.layers[layer]
                of.at, of.end = at, end
                answer = module(
                    hidden,
                    attention_mask=_mask(at, end, hidden.dtype),
                    position_ids=at[None],
                    past_key_values=cache,
                    use_cache=True,
                    position_embeddings=rotary,
                )
                hidden = answer[0] if isinstance(answer, tuple) else answer
                of.at, of.end = None, 0
                self.computed_tokens += len(at) / self.layers
                if layer in choosing:
                    keep = self._chosen(plan, layer, at, of.deviation, always, len(reused))
                    at, hidden = at[keep], hidden[:, keep]
                    rotary = tuple(part[:, keep] for part in rotary)
            if int(at[-1]) != plan.n_tokens - 1:
                return None
            return self.model.lm_head(decoder.norm(hidden[:, -1:]))[0, 0].float()

    @staticmethod
    def _chosen(plan: Plan, layer: int, at: torch.Tensor, deviation: Any, always: set[int], reused: int) -> torch.Tensor:
        assert isinstance(plan.policy, Hkvd)
        candidates = [i for i, p in enumerate(at.tolist()) if p not in always]
        chosen = plan.policy.choose(layer, deviation[candidates].tolist(), reused)
        return torch.tensor(sorted([i for i, p in enumerate(at.tolist()) if p in always] + [candidates[c] for c in chosen]))


def _mask(at: torch.Tensor, end: int, dtype: torch.dtype) -> torch.Tensor:
    """What a query at each of the positions may not see of the first `end` tokens."""
    hidden = torch.arange(end)[None] > at[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[None, None]


def _check_model(model: Any) -> None:
    config = model.config
    name = type(model).__name__
    if not hasattr(model, "model") or not hasattr(model.model, "layers") or not hasattr(model.model, "rotary_emb"):
        raise ValueError(f"{name} has no model.layers under one rotary_emb, so its layers can't be run one by one")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        raise ValueError(f"{name} attends through a window in some layers; chunks need attention to all tokens")
    if model.dtype not in _DTYPES:
        raise ValueError(f"{name} computes in {model.dtype}; float32, float16 and bfloat16 can be turned")
    if model.device.type != "cpu":
        raise ValueError(f"{name} lies on {model.device}; the daemon turns K in host memory only")
