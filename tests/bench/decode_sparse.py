"""The sparse step of decode.py: selection, slots and attention over them, behind the interface that llama_torch.Decode wants of attention.

Random weights decide nothing that a trained model's would, so the choice is not made by the model's own queries but by `Queries`, whose
change from step to step is set so that as many blocks are chosen again, and as many miss, as on a real model (docs/sparse.md). Everything
else is the model's: what is attended, where its KV goes, what the next layer gets."""

from dataclasses import replace

import torch
from llama_torch import Place
from ucmclient import sparse
from ucmclient.sparse.schedule import LayerMode

#: Tokens of the local window, whose KV lies in the engine's pages; never chosen.
WINDOW = 512


#: How queries change, as parts of their variance and the correlation of each from a step to the next one. At 1/32 of the context, for each KV
#: head, 0.728 is chosen again, after 8 and 64 steps 0.61 and 0.45, and of slots of a KV head 4.3, 2.8 and 2.4 % miss at 3, 4 and 4.6 times
#: what a step chooses. SmolLM2 on 8,192 tokens: 0.732, 0.63, 0.45; 4.4, 2.8, 2.3 % (tests/sparse/residency.py).
WALK = ((0.955, 0.999), (0.03, 0.8), (0.015, 0.0))
#: Of normally distributed queries against keys of variance 1.
SCALE = 2.0


class Queries:
    def __init__(self, shape, batch, device, lean=None):
        """lean: is added to all of them."""
        self.lean, size = lean, (shape.layers, batch, shape.heads, shape.head)
        self.generator = torch.Generator(device).manual_seed(11)
        self.parts = [torch.randn(size, generator=self.generator, device=device) for _ in WALK]
        self.now = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.next()

    def next(self):
        for part, (_, rho) in zip(self.parts, WALK):
            noise = torch.randn(part.shape, generator=self.generator, device=part.device)
            part.mul_(rho).add_(noise, alpha=(1 - rho ** 2) ** 0.5)
        now = sum(part * (share ** 0.5 * SCALE) for part, (share, _) in zip(self.parts, WALK))
        self.now.copy_(now if self.lean is None else now + self.lean)


def policy_of(text):
    """A policy, and behind it what its slots are: "POLICY +fp8 +3x" for coded ones, three times what a step chooses. -> the policy's text,
    the slots' encoding, the multiple or None."""
    policy, *words = text.split(" +")
    times = [float(word[:-1]) for word in words if word.endswith("x")]
    return policy, "fp8" if "fp8" in words else "", times[0] if times else None


class Setting:
    """A policy for requests of so many tokens: what it chooses, and the memory that a request needs."""

    def __init__(self, shape, policy, tokens, digest_shape, slots_of_need):
        """policy: as policy_of has it. slots_of_need: a request's slots, in multiples of what its step chooses."""
        policy, self.encoding, times = policy_of(policy)
        self.shape, self.tokens, self.policy = shape, tokens, sparse.Policy(policy)
        self.blocks = tokens // shape.block
        self.window = min(WINDOW // shape.block, self.blocks // 2)
        self.candidates = self.blocks - self.window
        self.digest = self.policy.digest(digest_shape)
        self.choice = replace(self.policy.choose(shape.block, self.candidates), local_window_sz=0)
        self.modes = self.policy.schedule(shape.layers).modes
        #: Layers that choose themselves: the others need no digests.
        self.choosing = [layer for layer, mode in enumerate(self.modes) if mode == LayerMode.SELECT]
        if LayerMode.DENSE in self.modes or self.policy.choice != "topk":
            raise SystemExit(f"{policy}: only top k, in layers that select or reuse, is measured here")
        self.chosen = min(self.candidates, -(-self.choice.topk_tokens // shape.block) or int(self.candidates * self.choice.sparse_ratio))
        self.head_bytes = shape.layer_bytes // shape.kv_heads
        self.slot_bytes = self.head_bytes // 2 + 2 * shape.block if self.encoding else self.head_bytes
        self.need = self.chosen * shape.kv_heads * shape.layers
        self.slots = int((times or slots_of_need) * self.need)

    def fit(self, memory):
        """Slots for what digests and pages leave of that memory."""
        others = self.request_bytes()
        self.slots = max((memory - others["digests"] - others["pages"]) // self.slot_bytes, self.need)

    def request_bytes(self):
        """Of GPU memory, tables and workspaces left out: digests, slots, pages of the window."""
        digests = len(self.choosing) * self.blocks * self.digest.bytes
        return {"digests": digests, "slots": self.slots * self.slot_bytes, "pages": self.window * self.shape.layers * self.shape.layer_bytes}


class SparseKv:
    """`batch` requests. rows: digests of all of them, by layer. steps: of decode_steps.py. Each step decodes the last token again, with queries of its own."""

    def __init__(self, weights, setting, batch, rows, steps, lean=None):
        s, device = weights.shape, weights.head.device
        self.shape, self.setting, self.batch, self.rows, self.steps = s, setting, batch, rows, steps
        self.queries = Queries(s, batch, device, lean)
        pages = (s.layers, batch * setting.window, 2, s.block, s.kv_heads, s.head)
        self.pages = torch.empty(pages, dtype=torch.bfloat16, device=device).normal_()
        numbers = torch.arange(batch * setting.blocks, dtype=torch.int32, device=device)
        self.table = numbers.view(batch, setting.blocks)
        self.page_table = torch.full((batch, setting.blocks), -1, dtype=torch.int32, device=device)
        self.page_table[:, setting.candidates:] = torch.arange(batch * setting.window, dtype=torch.int32, device=device).view(batch, -1)
        page = s.layer_bytes // 2  # elements
        self.at = self.page_table[:, -1].long() * page + (s.block - 1) * s.kv_heads * s.head
        self.position = torch.full((batch,), setting.tokens - 1, device=device)
        self.candidates = torch.full((batch,), setting.candidates, dtype=torch.int32, device=device)
        self.length = torch.full((batch,), setting.tokens, dtype=torch.int32, device=device)
        self.request = torch.arange(batch, dtype=torch.int32, device=device)
        self.chosen = steps.chosen(batch)
        self.out = torch.empty(batch, s.heads, s.head, dtype=torch.bfloat16, device=device)

    def first(self, batch):
        """The same with the first requests only, in the same memory."""
        some = object.__new__(SparseKv)
        some.__dict__.update(self.__dict__, batch=batch)
        for name in ("table", "page_table", "at", "position", "candidates", "length", "request", "out"):
            setattr(some, name, getattr(self, name)[:batch])
        some.chosen = self.steps.chosen(batch)
        return some

    def choose(self, layer):
        self.steps.select(self.rows[layer], self.table, self.candidates, self.queries.now[layer, :self.batch], out=self.chosen)

    def __call__(self, layer, rows, ops):
        pages = self.pages[layer]
        q = ops.rotate(rows, self.position, Place(pages[:, 0], pages[:, 1], self.at, self.shape.head))
        if self.setting.modes[layer] == LayerMode.SELECT:
            self.choose(layer)
        self.steps.layer(layer, self, q)
        return self.out.view(self.batch, -1)
