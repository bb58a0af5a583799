"""A transformer of Llama's shape with random weights in bfloat16 (PyTorch): what ttft.py and decode.py have in common, and a decode
step of decode.py's. Small kernels are Triton's (llama_kernels.py) on a GPU, and torch's on a CPU, where only tests run it."""

import time

import torch
from torch.nn import functional


class Weights:
    def __init__(self, shape, device):
        self.shape = shape
        torch.manual_seed(1)

        def matrix(rows, columns):
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * (columns ** -0.5)

        s = shape
        self.embedding = matrix(s.vocabulary, s.width) * s.width ** 0.5
        self.layers = [(matrix((s.heads + 2 * s.kv_heads) * s.head, s.width), matrix(s.width, s.heads * s.head),
                        matrix(2 * s.inner, s.width), matrix(s.width, s.inner)) for _ in range(s.layers)]
        self.head = matrix(s.vocabulary, s.width)
        self.turns = 500000.0 ** (-torch.arange(s.head // 2, device=device) / (s.head // 2))

    def rotate(self, x, positions):
        """x: [tokens][heads][head]"""
        angle = (positions[:, None] * self.turns)[:, None]
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


# ---- a decode step ----

class Place:
    """Where a step's tokens put their KV: token b's head h lies `at`[b] + h * head_stride elements behind k's and v's first one."""

    def __init__(self, k, v, at, head_stride):
        self.k, self.v, self.at, self.head_stride = k, v, at, head_stride


class TorchOps:
    """The small operations between matrix products."""

    def __init__(self, weights):
        self.weights, self.shape = weights, weights.shape

    def add_norm(self, x, delta):
        """x += delta (unless it is None); returns x by its root mean square."""
        if delta is not None:
            x += delta
        return functional.rms_norm(x, x.shape[-1:])

    def rotate(self, rows, position, place):
        """Queries, rotated, of rows [batch][(heads + 2 * kv_heads) * head]; keys, rotated, and values go to their place."""
        s = self.shape
        q, k, v = rows.view(len(rows), -1, s.head).split((s.heads, s.kv_heads, s.kv_heads), 1)
        for of, to in ((self.weights.rotate(k, position), place.k), (v, place.v)):
            for b, at in enumerate(place.at.tolist()):
                to.as_strided((s.kv_heads, s.head), (place.head_stride, 1), to.storage_offset() + at).copy_(of[b])
        return self.weights.rotate(q, position)

    def gate(self, rows):
        gate, value = rows.chunk(2, -1)
        return functional.silu(gate) * value


def ops_of(weights):
    if weights.head.device.type == "cpu":
        return TorchOps(weights)
    from llama_kernels import TritonOps
    return TritonOps(weights)


class Decode:
    """One token of each of `batch` requests. attention(layer, rows, ops) stores the new tokens' KV and returns [batch][heads * head]."""

    def __init__(self, weights, batch, attention):
        self.weights, self.attention, self.ops = weights, attention, ops_of(weights)
        self.tokens = torch.arange(batch, device=weights.head.device)
        self.graph = None

    def _step(self):
        w, delta = self.weights, None
        x = w.embedding[self.tokens]
        for layer, (qkv, out, up, down) in enumerate(w.layers):
            rows = functional.linear(self.ops.add_norm(x, delta), qkv)
            attended = self.attention(layer, rows, self.ops)
            h = self.ops.add_norm(x, functional.linear(attended, out))
            delta = functional.linear(self.ops.gate(functional.linear(h, up)), down)
        logits = functional.linear(self.ops.add_norm(x, delta), w.head)
        self.tokens.copy_(logits.argmax(-1))

    def capture(self, begin=None, end=None):
        """Makes a graph of the step; begin and end launch what belongs to it before and behind."""
        def whole():
            if begin is not None:
                begin()
            self._step()
            if end is not None:
                end()

        if self.tokens.device.type == "cpu":
            self.graph = whole
            return self
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            whole()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            whole()
        self.graph = graph.replay
        return self

    def seconds(self, steps, before=None, after=None):
        """Of each step, from its launch until the host has its tokens. before(i) runs outside that time, after(i) within."""
        wait = torch.cuda.synchronize if self.tokens.device.type == "cuda" else lambda: None
        times = []
        for i in range(steps):
            if before is not None:
                before(i)
            wait()
            began = time.perf_counter()
            self.graph()
            wait()
            if after is not None:
                after(i)
            times.append(time.perf_counter() - began)
        return times


# ---- dense attention ----

def forms(q, k, v):
    """torch's attention of a query a request, by kernel. q: [batch][heads][head]; k, v: [batch][kv_heads][tokens][head]. What it calls
    efficient has no grouped heads, and query heads of a KV head as rows of one query were never faster."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if q.device.type == "cuda" else (SDPBackend.MATH,)
    for backend in backends:
        def call(backend=backend):
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True).view(len(q), -1)
        yield backend.name.partition("_")[0].lower(), call


def microseconds(call, rounds=9):
    """Of one call in a graph, the median."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[rounds // 2]


class DenseKv:
    """All KV of `batch` requests of so many tokens, one piece a layer: the best case for torch. Each step decodes the last token again."""

    def __init__(self, weights, batch, tokens):
        s, device = weights.shape, weights.head.device
        self.shape, self.times = s, {}
        shape = (batch, s.kv_heads, tokens, s.head)
        self.kv = [tuple(torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)) for _ in range(s.layers)]
        self.at = torch.arange(batch, device=device) * (s.kv_heads * tokens * s.head) + (tokens - 1) * s.head
        self.position = torch.full((batch,), tokens - 1, device=device)
        self.head_stride = tokens * s.head
        self.kernel = self._best()

    def first(self, batch):
        """The same with the first requests only, in the same memory."""
        some = object.__new__(DenseKv)
        some.__dict__.update(self.__dict__, kv=[(k[:batch], v[:batch]) for k, v in self.kv], at=self.at[:batch],
                             position=self.position[:batch], times={})
        some.kernel = some._best()
        return some

    def _best(self):
        """The fastest of torch's kernels for this shape."""
        s, (k, v) = self.shape, self.kv[0]
        q = torch.randn(len(k), s.heads, s.head, dtype=k.dtype, device=k.device)
        if k.device.type == "cpu":
            return next(forms(q, k, v))[0]
        self.times = {name: microseconds(call) for name, call in forms(q, k, v)}
        return min((us, name) for name, us in self.times.items())[1]

    def __call__(self, layer, rows, ops):
        k, v = self.kv[layer]
        q = ops.rotate(rows, self.position, Place(k, v, self.at, self.head_stride))
        return dict(forms(q, k, v))[self.kernel]()
