"""decode.py's side of the daemon: the KV of one long prompt, its digests, its window."""

import time

import torch
from ucmclient import Client, Companion, Identity, Plane
from ucmclient.keys import sha256_chain
from ucmclient.memory import SharedMemory, cuda_allocation
from ucmclient.sparse import Chain, DigestNamespace
from ucmclient.sparse.digest import Shape as DigestShape

#: Blocks that are made, digested and stored at once.
SOME = 256
#: Daemon's calls may wait for as long as memory is taken for the first time.
PATIENCE = 120.0
#: Along the diagonal, added to keys that lean and to queries that find them: the best blocks of such queries lean.
LEAN = (6.0, 40.0)


def digest_shape(shape):
    return DigestShape("bf16", shape.block, shape.kv_heads, shape.head, v_head_dim=shape.head)


def keys_of(shape, blocks):
    return sha256_chain(list(range(blocks * shape.block)), shape.block)


def random_kv(shape, first, out, leaning=None):
    """KV of blocks from `first` on, normally distributed: [blocks][layers][K, V][tokens][kv_heads][head], the same in every process. leaning: of a
    share of the blocks, in a share of the layers each, keys point a little into the direction of LEAN."""
    generator = torch.Generator(out.device).manual_seed(first)
    out.normal_(generator=generator)
    if leaning:
        blocks, layers = (torch.rand(size, generator=generator, device=out.device) < share
                          for size, share in zip(((len(out), 1), out.shape[:2]), leaning))
        out[:, :, 0][blocks & layers] += LEAN[0] * shape.head ** -0.5
    return out


def coded(kv):
    """In float32, as the encoding `fp8` leaves rows of channels."""
    m, e = torch.frexp(kv.float().abs().amax(-1, keepdim=True))
    power = torch.where(m < 432 / 512, e - 9, e - 8)
    return torch.ldexp(torch.ldexp(kv.float(), -power).to(torch.float8_e4m3fn).float(), power)


def room(shape, n, layers, device):
    """Pages, or slots of one layer, that the daemon reaches: a tensor, and what it is registered by."""
    size = (n, layers, 2, shape.block, shape.kv_heads, shape.head)
    return bytes_for(n * layers * shape.layer_bytes, device).view(torch.bfloat16).view(size)


def bytes_for(size, device):
    if device != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    shared = SharedMemory(size)
    out = torch.frombuffer(shared.buffer, dtype=torch.uint8)
    _kept.append(shared)
    return out


#: SharedMemory has to outlive the views of it.
_kept = []


class Link:
    """One engine's connection."""

    def __init__(self, socket, shape, digest, device):
        self.shape, self.digest, self.device = shape, digest, device
        self.client = Client(socket, "decode", default_timeout=PATIENCE)
        self.ns = self.client.namespace(Identity(
            model="decode", dtype="bfloat16", layout="decode/1", block_tokens=shape.block, shards=(shape.layers,),
            shard_bytes=shape.layer_bytes))
        self.digests = DigestNamespace(self.ns, digest)
        self.chain, self.companion, self.window = Chain(self.digests), None, None

    def register(self, ns, tensor, planes, blocks, pool=False):
        """planes: of the tensor's memory, offsets from its begin."""
        if self.device == "cpu":
            shared = next(s for s in _kept if s.address <= tensor.data_ptr() < s.address + s.size)
            offset = tensor.data_ptr() - shared.address
            planes = [Plane(0, offset + p.offset, p.stride, p.chunk_bytes, p.shard) for p in planes]
            return ns.register([shared.memory()], planes, blocks=blocks, pool=pool)
        memory, base, uuid = cuda_allocation(tensor.data_ptr())
        offset = tensor.data_ptr() - base
        planes = [Plane(0, offset + p.offset, p.stride, p.chunk_bytes, p.shard) for p in planes]
        self.companion = self.companion or Companion(self.client, uuid, timeout=PATIENCE)
        return self.companion.register(ns, [memory], planes, [base], blocks=blocks, pool=pool, timeout=PATIENCE)

    def pages(self, pages):
        """A region of pages of `room`."""
        size, layers = self.shape.layer_bytes, pages.shape[1]
        return self.register(self.ns, pages, [Plane(0, i * size, layers * size, size, i) for i in range(layers)], len(pages))

    def slots(self, pages):
        """A pool, for fetches."""
        size = self.shape.layer_bytes
        return self.register(self.ns, pages, [Plane(0, 0, size, size, 0)], len(pages), pool=True)

    def rows(self, rows, blocks):
        """A region of the first rows of digests, [layers][numbers][bytes]."""
        layers, numbers, size = rows.shape
        return self.register(self.digests, rows, [Plane(0, i * numbers * size, size, size, i) for i in range(layers)], blocks)

    def open_window(self):
        self.window = self.ns.window(addresses=self.device != "cpu", timeout=PATIENCE)
        return self.window

    def pin(self, first, n):
        pinned = self.window.pin(self.chain, first, n, timeout=PATIENCE, deadline=PATIENCE)
        if pinned.placed != n:
            raise SystemExit(f"only {pinned.placed} of {n} blocks are in the window: more window.size is needed")
        return pinned


def all_ok(task, what):
    result = task.wait(PATIENCE)
    if not result.all_ok:
        raise SystemExit(f"{what}: only {result.ok} of {len(result.blocks)} blocks")
    return result


def build(builder, digest, pages, rows, first):
    """Digests of these pages into rows from `first` on, of all layers."""
    n, layers = pages.shape[:2]
    if builder is None:
        for layer in range(layers):
            made = digest.compute(pages[:, layer].contiguous(), n)
            rows[layer, first:first + n] = torch.frombuffer(made.data, dtype=torch.uint8).view(n, -1)
        return
    numbers = torch.arange(n, dtype=torch.int32, device=pages.device)
    builder([pages[:, i] for i in range(layers)], list(rows), numbers, numbers + first, thread_blocks=2048)


def make_builder(digest, device):
    if device == "cpu":
        return None
    from ucmclient.sparse.cuda import Builder
    return Builder(digest, gpu=torch.device(device))


def make_rows(shape, digest, blocks, device):
    """Digests of as many random blocks, made here: for policies whose digests nobody stored, and for longer sequences."""
    rows = bytes_for(shape.layers * blocks * digest.bytes, device).view(shape.layers, blocks, digest.bytes)
    pages, builder = room(shape, min(SOME, blocks), shape.layers, device), make_builder(digest, device)
    for first in range(0, blocks, len(pages)):
        build(builder, digest, random_kv(shape, first, pages), rows, first)
    if builder is not None:
        torch.cuda.synchronize()
        builder.close()
    return rows


def store(link, blocks, windowed=True, leaning=None):
    """Makes the prompt: KV and digests of its blocks, in the daemon, in the window if it has room for them."""
    shape, keys, began = link.shape, keys_of(link.shape, blocks), time.perf_counter()
    pages = room(shape, min(SOME, blocks), shape.layers, link.device)
    region, n = link.pages(pages), len(pages)
    rows = bytes_for(shape.layers * blocks * link.digest.bytes, link.device).view(shape.layers, blocks, -1)
    builder = make_builder(link.digest, link.device)
    if windowed:
        link.open_window()
    for first in range(0, blocks, n):
        build(builder, link.digest, random_kv(shape, first, pages, leaning), rows, first)
        if link.device != "cpu":
            torch.cuda.synchronize()
        some = keys[32 * first:32 * (first + n)]
        all_ok(region.dump(some, list(range(n))), "the store of KV")
        if windowed:
            link.chain.append(some, timeout=PATIENCE)
            link.pin(first, n)
    all_ok(link.rows(rows, blocks).dump(keys, list(range(blocks))), "the store of digests")
    return {"seconds": time.perf_counter() - began, "digest_bytes": rows.nbytes, "kv_bytes": blocks * shape.layers * shape.layer_bytes}
