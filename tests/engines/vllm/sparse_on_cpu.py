"""A GPU for ucmclient.engine.vllm.sparse_gpu where there is none: its kernels by torch, on the
blocks of vLLM's kernels for CPUs. Entries, misses, reads of the daemon's mapping and missing blocks
are as ucmclient_cuda_decode.h says. So all around the kernels is real: the worker's half,
GpuDecoder, the daemon. The selection takes all blocks."""

import ctypes

import torch
from check_sparse_rows import FakeBuilder, FakeSelector, no_device

from ucmclient.decode.cuda import Flag, Key, Result
from ucmclient.decode.gpu import GpuDecoder
from ucmclient.memory import SharedMemory
from ucmclient.engine.vllm import backend_cpu, sparse_gpu, sparse_rules, sparse_worker


class Steps:
    """Entries of a layer of a block. There are enough. others: meanwhile another user takes one in
    so many entries. short: in one of so many steps, a block is not in the mapping any more."""

    table_bytes = workspace_bytes = 0
    device = "cpu"
    bytes_of = staticmethod(lambda *_: 64)
    short = others = 0

    def __init__(self, pool, shape, *, layers, layer_bytes, numbers, requests, **more):
        self.layers, self.numbers, self.requests, self.layer_bytes = layers, numbers, requests, layer_bytes
        self._entries, self._places, self._mapping = {}, {}, None
        self._begun, self._missed, self._lacks, self._flags, self._unserved = 0, 0, False, Flag(0), []
        self._last = self._made()

    def _made(self):
        return Result(self._begun, self._flags, len(self._unserved), self._missed, 0, 0)

    def begin(self):
        if self.others and not self._flags:
            self._entries = {(layer, row): of for (layer, row), of in self._entries.items() if (row + layer + self._begun) % self.others}
        self._begun, self._flags, self._unserved = self._begun + 1, Flag(0), []
        self._lacks = self.short > 0 and self._begun % self.short == 5

    def end(self):
        self._last = self._made()

    def result(self):
        return self._last

    def layer(self, layer, chosen, table, requests, q, pages, out=None):
        out.zero_()
        for c, length in enumerate(pages.length.tolist()):
            n, first = int(chosen.counts[c, 0]), int(pages.first[c])
            if length:
                blocks = [self._block(layer, row, pages) for row in table[c][chosen.index[c, 0, :n].long()].tolist()]
                window = pages.table[c, first : (length - 1) // self._tokens(pages.kv) + 1].tolist()
                assert all(page > 0 for page in window), "a block of the local window has no page"
                blocks += [pages.kv[page] for page in window]
                if not any(block is None for block in blocks):
                    out[c] = self._attended(torch.stack(blocks).float(), q[c], length, first - n)
        return out

    @staticmethod
    def _tokens(kv):
        return kv.shape[2]

    def _attended(self, blocks, q, length, left_out):
        tokens = length - left_out * self._tokens(blocks)
        k, v = (part.transpose(0, 1).flatten(1, 2)[:, :tokens] for part in sparse_worker._split(blocks))
        weights = torch.softmax(q.float().view(len(k), -1, q.shape[-1]) @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1)
        return (weights @ v).reshape(q.shape).to(q.dtype)

    def _block(self, layer, row, pages):
        """The block from its entry, a page, or the mapping; None: the step did not get it."""
        key = layer, row
        if key not in self._entries:
            self._missed += 1
            page, like = int(pages.of[row]), pages.kv[0]
            of = pages.kv[page].clone() if page > 0 else self._read(layer, row, like)
            if of is None:
                self._flags |= Flag.UNSERVED
                self._unserved.append(Key(layer, 0, row))
                return None
            self._entries[key] = of
        return self._entries[key]

    def _read(self, layer, row, like):
        mapping, place, self._lacks, lacks = self._mapping, self._places.get(row), False, self._lacks
        if lacks:
            return None
        read = None if mapping is None or place is None else mapping.read(place, layer * self.layer_bytes, self.layer_bytes)
        return None if read is None else self._tensor(read, like)

    @staticmethod
    def _tensor(read, like):
        return torch.frombuffer(read, dtype=like.dtype).view(like.shape)

    # ---- between steps ----

    def enter(self, request, floor=0):
        pass

    def leave(self, request):
        pass

    def forget(self, numbers):
        for number in numbers:
            self._places.pop(number, None)
            for layer in range(self.layers):
                self._entries.pop((layer, number), None)

    def places(self, numbers, referenced, mapping=None):
        self._mapping = mapping
        self._places.update(zip(numbers, referenced))

    def register_mapping(self, mapping, most=1):
        """There is no driver to register with, so nothing is left to do."""
        return 0

    def update_mapping(self):
        before = len(self._places)
        for mapping in self._mapping.ranges() if self._mapping is not None else ():
            if mapping.wanted:
                self._places = {row: place for row, place in self._places.items() if place is None or place.slab != mapping.slab}
                self._mapping.release(mapping)
        return before - len(self._places)

    def leave_mapping(self):
        self._mapping, self._places = None, {}

    def unserved(self, *, first_layer=False):
        return [key for key in self._unserved if not first_layer or key.layer == min(self._unserved).layer]

    def put(self, items):
        for (layer, _, row), _, at in items:
            bytes_of = bytearray(ctypes.string_at(at, self.layer_bytes))
            self._entries[layer, row] = self._tensor(bytes_of, self.like)
        self._missed += len(items)
        return len(items)


class Decoder(GpuDecoder):
    """Its memory is the host's, which the daemon maps."""

    def __init__(self, source, summary, steps, **more):
        super().__init__(source, summary, steps, register=self._of_host, **more)
        self._shared = {}
        for name in "_summaries", "_landing":
            like = getattr(self, name)
            memory = SharedMemory(like.nbytes)
            setattr(self, name, torch.frombuffer(memory.buffer, dtype=torch.uint8).view(like.shape))
            self._shared[getattr(self, name).data_ptr()] = memory
        for i, layer in enumerate(self.summarised):
            self.summaries[layer] = self._summaries[i]

    def _of_host(self, ns, tensor, planes, blocks, block_pool, part, timeout):
        memory = self._shared[tensor.data_ptr()].memory()
        return ns.register([memory], planes, blocks=blocks, part=part, block_pool=block_pool, timeout=timeout)


def forward(self, layer, query, key, value, kv_cache, batch, output, *args, **named):
    """Like SparseImpl of backend_gpu.py. It overwrites what the platform's kernels make of sparse
    tokens."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    CPUAttentionBackendImpl.forward(self, layer, query, key, value, kv_cache, batch, output, *args, **named)
    worker, number = (None if batch is None else sparse_gpu.worker_of(kv_cache)) or (None, 0)
    if worker is None or not worker.has_work(batch.max_query_len):
        return output
    worker._steps.like = kv_cache[0]
    if batch.max_query_len == 1:
        worker.uniform(number, batch.block_table, batch.seq_lens)
        worker.attend_uniform(number, query, output, batch.block_table)
        return output
    rows = worker.rows(batch, batch.query_start_loc, batch.seq_lens, batch.block_table)
    if not rows.all_dense:
        worker.attend_rows(number, rows, query, output)
    return output


def pretend(short=0, others=0, preempts=False):
    """That this platform is a GPU. short, others: see Steps. preempts: a step that came short can't be taken back, as with vLLM's newer runner."""
    reasons, tables = sparse_rules._reasons, sparse_gpu.SparseGpuWorker._tables

    def with_runner(worker, *args):
        worker._only_lost = preempts
        return tables(worker, *args)

    sparse_rules.device_of = lambda config: "cuda"
    sparse_rules._reasons = lambda *of: (reason for reason in reasons(*of) if "on a GPU" not in reason[0])
    sparse_gpu.Steps, sparse_gpu.GpuDecoder, Steps.short, Steps.others = Steps, Decoder, short, others
    sparse_gpu.Selector, sparse_gpu.Builder = FakeSelector, FakeBuilder
    sparse_gpu.SparseGpuWorker._tables = with_runner
    no_device(sparse_gpu.SparseGpuWorker)
    backend_cpu.SparseImpl.forward = forward
