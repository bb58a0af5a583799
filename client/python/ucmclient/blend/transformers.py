"""Chunks in models of Hugging Face's `transformers`, on a CPU or one GPU.

    with Runner(model, client, name="SmolLM2-135M", blocks=1024) as runner:
        for document in documents:
            runner.store(document)                     # once, each by itself
        logits, cache = runner.prefill(tokens, blend.split(tokens, separator), blend.First(16))
        more = runner.generate(tokens, logits, cache, 32)

It serves models whose decoder is a list `model.model.layers` over one rotary embedding, such as Llama, Mistral without a window, Qwen2 and
SmolLM2. They attend to all tokens, by `sdpa` or `eager` attention, and rotate K in halves. One sequence at a time. Others are refused, with
a sentence. Only this module imports torch and transformers.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..client import Client, Identity, Namespace, Plane
from ..copy_agent import CopyAgent
from ..keys import sha256_chain
from ..memory import SharedMemory, cuda_allocation
from ..region import BlockResult, Region, Rope
from .chunks import Chunks, Found, store_prefix
from .plan import Plan, plan as make_plan, selecting
from .policy import Asked, Hkvd, Policy
from .spans import Span

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def rope_of(config: Any, block_tokens: int, dtype: str = "bf16") -> Rope:
    """The Rope of a model's config, for K whose layer begins with it as [block_tokens][KV heads][head_dim]. Refuses kinds that can't be re-rotated."""
    settings = getattr(config, "rope_parameters", None)
    if settings is None:  # before transformers 5
        settings = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise ValueError(f"rope_type is {kind!r}; default, linear, dynamic, yarn and llama3 can be re-rotated")
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


class _Attended:
    """The weights that queries at positions from `first` on give to each of a request's tokens, summed over layers and heads."""

    def __init__(self, n_tokens: int, first: int, device: torch.device):
        self.sums, self.first = torch.zeros(n_tokens, device=device), first
        self.rows = 0  # how many last queries of a pass count
        self.layers = 0  # that were asked

    def add(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float) -> None:
        self.layers += 1
        if self.rows == 0:
            return
        heads, tokens = key.shape[1:3]
        queries = query[0, :, -self.rows :].reshape(heads, -1, query.shape[-1])
        scores = (queries @ key[0].transpose(1, 2)).float().view(-1, self.rows, tokens) * scaling
        self.sums[:tokens] += (scores + mask[0, 0, -self.rows :]).softmax(-1).sum((0, 1))


#: The name by which a model's config says that its attention tells an _Attended.
_TELLING = "ucmclient_attended"


def _telling(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, *, attended: Any = None, **more: Any
) -> Any:
    if attended is not None:
        attended.add(query, key, attention_mask, more["scaling"])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **more)


AttentionInterface.register(_TELLING, _telling)


class BlendLayer(DynamicLayer):
    """A layer's K and V of a request of known length. While `at` is set, what the model computes goes to these positions; otherwise to the end, as in
    any cache. deviation: if `compares`, by how much K at these positions differed from what was there."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True
        self.at: Optional[torch.Tensor] = None
        self.end = keys.shape[2]  # of what a query of this pass may see
        self.compares = False
        self.deviation: Optional[torch.Tensor] = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **more: Any) -> Any:
        if self.at is None:
            return super().update(key_states, value_states, *args, **more)
        if self.compares:
            self.deviation = (key_states.float() - self.keys[:, :, self.at].float()).abs().sum(dim=(0, 1, 3))
        self.keys[:, :, self.at] = key_states
        self.values[:, :, self.at] = value_states
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class BlendCache(Cache):
    """A `transformers` cache whose layers are BlendLayers."""

    def __init__(self, config: Any, n_tokens: int, dtype: torch.dtype, device: torch.device):
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, n_tokens, dim)
        #: The prompt's, of all layers: [layer][K, V][1][head][token][channel].
        self.prompt = torch.zeros(shape, dtype=dtype, device=device)
        super().__init__(layers=[BlendLayer(keys, values) for keys, values in self.prompt])


class Runner:
    """A model, its pages, and the namespaces of its chunks and prefixes. name, revision: of the weights, for the identity. blocks: so many move at once.
    copy_agent: of the client and the model's GPU, which the caller closes; without it the daemon's own kernels re-rotate K. One thread at a time."""

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        name: str,
        revision: str = "",
        blocks: int = 1024,
        block_tokens: int = 16,
        copy_agent: Optional[CopyAgent] = None,
    ):
        config = model.config
        _check_model(model)
        self.model, self.client, self.blocks, self.B = model, client, blocks, block_tokens
        self.dtype, self.device = model.dtype, model.device
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self._rope = rope_of(config, block_tokens, _DTYPES[self.dtype])
        self.dim = self._rope.dim
        self.identity = Identity(
            model=name,
            revision=revision,
            dtype=_DTYPES[self.dtype],
            layout="nhd/1",
            block_tokens=block_tokens,
            layers=(self.layers,),
            layer_bytes=2 * block_tokens * self.heads * self.dim * self.dtype.itemsize,
        )
        #: [block][layer][K, V][token][head][channel]
        self.pages, where = self._new_pages(copy_agent)
        self.chunks = Chunks(client, self.identity)
        self._chunk_pages = self.chunks.register(**where, blocks=blocks, rope=self._rope)
        self.prefixes = client.namespace(self.identity)
        self._prefix_pages = _register(self.prefixes, **where, blocks=blocks)
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

    def _new_pages(self, copy_agent: Optional[CopyAgent]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Pages on the model's device, and how they are registered."""
        shape = (self.blocks, self.layers, 2, self.B, self.heads, self.dim)
        layer = self.identity.layer_bytes
        first, more = 0, {}
        if self.device.type == "cpu":
            if copy_agent is not None:
                raise ValueError("a copy agent was given, but the model lies in host memory: copy agents are for GPUs")
            shared = SharedMemory(self.blocks * self.layers * layer)
            pages, memory = torch.frombuffer(shared.buffer, dtype=self.dtype).view(shape), shared.memory()
        else:
            pages = torch.zeros(shape, dtype=self.dtype, device=self.device)
            with torch.cuda.device(self.device):
                memory, base, gpu = cuda_allocation(pages.data_ptr())
            if copy_agent is not None and copy_agent.gpu != gpu:
                raise ValueError(f"the copy agent is one of GPU {copy_agent.gpu.hex()}, the model lies on GPU {gpu.hex()}")
            first = pages.data_ptr() - base
            more = {"gpu": gpu} if copy_agent is None else {"copy_agent": copy_agent, "addresses": [base]}
        planes = [Plane(0, first + i * layer, self.layers * layer, layer, i) for i in range(self.layers)]
        return pages, {"memory": [memory], "planes": planes, **more}

    def _settle(self) -> None:
        """What PyTorch still does with the pages. The daemon and a copy agent use streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _room(self, blocks: int) -> None:
        if blocks > self.blocks:
            raise ValueError(f"{blocks} blocks are to move at once, the pages hold {self.blocks}")

    def _to_pages(self, cache: BlendCache, first: int, blocks: int) -> None:
        """Blocks of a prompt from block `first` on, to pages 0 and on, where the daemon may then read them."""
        rows = cache.prompt[:, :, 0, :, first * self.B : (first + blocks) * self.B]
        self.pages[:blocks] = rows.unflatten(3, (blocks, self.B)).permute(3, 0, 1, 4, 2, 5)
        self._settle()

    def _from_pages(self, cache: BlendCache, first: int, blocks: int, position: int) -> None:
        rows = self.pages[first : first + blocks].permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
        cache.prompt[:, :, 0, :, position : position + blocks * self.B] = rows

    # ---- requests ----

    def store(self, tokens: Sequence[int]) -> int:
        """Computes a chunk by itself and stores its whole blocks, unless they are there. -> how many it stored."""
        found = self.chunks.lookup(tokens, [Span(0, len(tokens))])
        if all(found.there[0]):
            return 0
        found = dataclasses.replace(found, there=((False,) * len(found.there[0]),))
        plan = make_plan(found, Hkvd(), paged=False)
        cache = self._new_cache(len(tokens))
        self._compute(tokens, plan, cache, 0, len(tokens))
        n = len(found.keys[0])
        self._room(n)
        self._to_pages(cache, 0, n)
        return self._chunk_pages.store(plan, tokens, 0, range(n)).wait().ok

    def prefill(
        self, tokens: Sequence[int], spans: Sequence[Span], policy: Policy, *, step: int = 0, prefixes: bool = True
    ) -> tuple[torch.Tensor, BlendCache]:
        """A request's logits after its last token, and its cache. step: computes so many tokens' positions at a time; 0: all at once. If not all tokens are
        computed, attention has a mask. It has a row for each computed token, as long as the tokens up to the step's end. prefixes: begins with the longest
        cached prefix, and stores the exact blocks that it computed."""
        cache = self._new_cache(len(tokens))
        packed = sha256_chain(tokens, self.B) if prefixes else b""
        names = [packed[i : i + 32] for i in range(0, len(packed), 32)]
        hit = self._load_prefix(names[: (len(tokens) - 1) // self.B], cache) if prefixes else 0
        plan = self._load_chunks(self.chunks.lookup(tokens, spans, prefix=hit * self.B, lease=30), policy, cache)
        self.last_plan, self.computed_tokens = plan, 0.0
        if isinstance(policy, Asked) and plan.exact < len(tokens):
            logits = self._asked(tokens, plan, policy, cache, step)
        else:
            logits = self._steps(tokens, plan, cache, step)
        if prefixes:
            self._store_prefix(plan, names, hit, cache)
        assert logits is not None  # a plan computes the last token
        return logits, cache

    def generate(self, tokens: Sequence[int], logits: torch.Tensor, cache: BlendCache, n: int) -> list[int]:
        """n tokens after a prefill, the likeliest each."""
        out: list[int] = []
        for position in range(len(tokens), len(tokens) + n):
            out.append(int(logits.argmax()))
            with torch.no_grad():
                answer = self.model(
                    input_ids=self._tensor([[out[-1]]]), position_ids=self._tensor([[position]]), past_key_values=cache, use_cache=True
                )
            logits = answer.logits[0, -1]
        return out

    # ---- the cache ----

    def _load_prefix(self, names: list[bytes], cache: BlendCache) -> int:
        hits = self.prefixes.lookup_prefix(names, lease=30) if names else None
        if hits is None or hits.blocks == 0:
            return 0
        n = min(hits.blocks, self.blocks)
        self._settle()
        result = self._prefix_pages.load(names[:n], range(n), lease=hits.lease).wait()
        whole = next((i for i, r in enumerate(result.blocks) if r != BlockResult.OK), n)
        self._from_pages(cache, 0, whole, 0)
        return whole

    def _load_chunks(self, found: Found, policy: Policy, cache: BlendCache) -> Plan:
        """Blocks that could not be loaded are computed. So is all of a request for which dynamic scaling has other frequencies."""
        if self._rope.scaling == "dynamic" and found.n_tokens > self._rope.trained:
            found = dataclasses.replace(found, there=tuple((False,) * len(of) for of in found.there))
        plan = make_plan(found, policy, paged=False)
        while plan.loads:
            self._room(len(plan.loads))
            self._settle()
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

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def _new_cache(self, n_tokens: int) -> BlendCache:
        return BlendCache(self.model.config, n_tokens, self.dtype, self.device)

    def _steps(self, tokens: Sequence[int], plan: Plan, cache: BlendCache, step: int, **more: Any) -> Optional[torch.Tensor]:
        step, logits = step or len(tokens), None
        for at in range(plan.prefix, len(tokens), step):
            logits = self._compute(tokens, plan, cache, at, min(at + step, len(tokens)), **more)
        return logits

    def _asked(self, tokens: Sequence[int], plan: Plan, policy: Asked, cache: BlendCache, step: int) -> Optional[torch.Tensor]:
        """Computes what the plan says, and notes what the tokens after the last reused chunk attend to. Then it computes the reused tokens that drew
        the most attention, and the tokens after the last chunk again."""
        behind = min(plan.spans[plan.loads[-1].chunk].end, len(tokens) - 1)
        question = _between(plan.compute, behind, len(tokens))
        attended = _Attended(len(tokens), question[-policy.queries :][0], self.device)
        kind, self.model.config._attn_implementation = self.model.config._attn_implementation, _TELLING
        try:
            self._steps(tokens, plan, cache, step, attended=attended)
        finally:
            self.model.config._attn_implementation = kind
        if attended.layers < self.layers:
            raise ValueError(f"{type(self.model).__name__} hands nothing on to its attention, so the question can't say what it attends to")
        shifted = plan.reused[bisect.bisect_left(plan.reused, plan.exact) :]
        chosen = policy.choose(attended.sums[self._tensor(shifted)].tolist())
        plan = dataclasses.replace(plan, compute=(*(shifted[i] for i in chosen), *question), reused=())
        return self._steps(tokens, plan, cache, step, leaving=(policy.layers(self.layers), behind))

    def _compute(
        self,
        tokens: Sequence[int],
        plan: Plan,
        cache: BlendCache,
        begin: int,
        end: int,
        attended: Optional[_Attended] = None,
        leaving: Optional[tuple[int, int]] = None,
    ) -> Optional[torch.Tensor]:
        """Computes the plan's positions in [begin, end) into the cache. leaving: so many layers compute all of them; later layers only positions from
        there on. -> the logits of the request's last token, if it is one of them."""
        choosing = selecting(plan.policy) if plan.reused else []
        always = _between(plan.compute, begin, end)
        reused = _between(plan.reused, begin, end) if choosing else ()
        at = self._tensor(sorted((*always, *reused)))
        if len(at) == 0:
            return None
        fixed = torch.zeros(end, dtype=torch.bool, device=self.device)
        fixed[self._tensor(always)] = True
        decoder, more = self.model.model, {}
        if attended is not None:
            attended.rows, more = len(always) - bisect.bisect_left(always, attended.first), {"attended": attended}
        with torch.no_grad():
            hidden = decoder.embed_tokens(self._tensor(tokens)[at])[None]
            rotary = decoder.rotary_emb(hidden, position_ids=at[None])
            mask = self._mask(at, end)
            for layer, module in enumerate(decoder.layers):
                of = cache.layers[layer]
                of.at, of.end, of.compares = at, end, layer in choosing
                answer = module(
                    hidden, attention_mask=mask, position_ids=at[None], past_key_values=cache, use_cache=True, position_embeddings=rotary, **more
                )
                hidden = answer[0] if isinstance(answer, tuple) else answer
                of.at, of.end = None, 0
                self.computed_tokens += len(at) / self.layers
                keep = None
                if layer in choosing:
                    keep = self._chosen(plan, layer, fixed[at], of.deviation, len(reused))
                elif leaving is not None and layer + 1 == leaving[0]:
                    keep = (at >= leaving[1]).nonzero()[:, 0]
                if keep is not None:
                    if len(keep) == 0:
                        return None
                    at, hidden = at[keep], hidden[:, keep]
                    rotary = tuple(part[:, keep] for part in rotary)
                    mask = self._mask(at, end)
            if end != plan.n_tokens:
                return None
            return self.model.lm_head(decoder.norm(hidden[:, -1:]))[0, 0].float()

    def _chosen(self, plan: Plan, layer: int, fixed: torch.Tensor, deviation: Any, reused: int) -> torch.Tensor:
        """Which of the positions go on. fixed: those that do in any case."""
        assert isinstance(plan.policy, Hkvd)
        loose = (~fixed).nonzero()[:, 0]
        chosen = plan.policy.choose(layer, deviation[loose].tolist(), reused)
        fixed[loose[self._tensor(chosen)]] = True
        return fixed.nonzero()[:, 0]

    def _mask(self, at: torch.Tensor, end: int) -> Optional[torch.Tensor]:
        """What a query at each of the positions may not see of the first `end` tokens. None if each of them has a query, since `sdpa` then
        knows it."""
        if len(at) == end and self.model.config._attn_implementation == "sdpa":
            return None
        # CUDA's kernels copy a mask whose rows don't begin at multiples of 16 elements, in each layer.
        mask = torch.zeros(len(at), -(-end // 16) * 16, dtype=self.dtype, device=self.device)[:, :end]
        hidden = torch.arange(end, device=self.device)[None] > at[:, None]
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min)[None, None]


def _between(positions: Sequence[int], begin: int, end: int) -> Sequence[int]:
    return positions[bisect.bisect_left(positions, begin) : bisect.bisect_left(positions, end)]


def _register(ns: Namespace, *, copy_agent: Optional[CopyAgent] = None, **where: Any) -> Region:
    return ns.register(**where) if copy_agent is None else copy_agent.register(ns, **where)


def _check_model(model: Any) -> None:
    config = model.config
    name = type(model).__name__
    if not hasattr(model, "model") or not hasattr(model.model, "layers") or not hasattr(model.model, "rotary_emb"):
        raise ValueError(f"{name} has no model.layers under one rotary_emb, so its layers can't be run one by one")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        raise ValueError(f"{name} attends through a window in some layers; chunks need attention to all tokens")
    if model.dtype not in _DTYPES:
        raise ValueError(f"{name} computes in {model.dtype}; float32, float16 and bfloat16 can be re-rotated")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(f"{name} attends by {config._attn_implementation!r}, which takes no mask of chosen positions; load it with sdpa or eager")
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1 or model.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} lies on {', '.join(devices)}; chunks need it on the CPU or on one CUDA GPU")
