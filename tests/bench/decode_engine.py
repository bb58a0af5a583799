"""The engines of decode.py: what each of them measures."""

import gc
import statistics
import time

import decode_store as store
import torch
from decode_sparse import SparseKv, Setting
from llama import Shape
from llama_torch import Decode, DenseKv, Weights

TINY = Shape(layers=2, width=256, heads=4, kv_heads=2, head=64, inner=512, vocabulary=1000)
#: Beside weights and KV: activations, workspaces, and what the driver takes.
RESERVE = 3 << 30
#: Bytes a block, about, of who lies in which slot, and of selections: 15 MiB for a request of 8,192.
TABLES = 2048


def summary(seconds):
    counted = sorted(seconds)
    return {"ms": statistics.median(counted) * 1e3, "least": counted[0] * 1e3, "p99": counted[int(len(counted) * 0.99)] * 1e3}


class Engine:
    def __init__(self, options):
        self.options, self.tiny = options, options["tiny"]
        self.shape, self.device = (TINY, "cpu") if self.tiny else (Shape(), "cuda:0")
        self.blocks = options["tokens"] // self.shape.block
        self._weights, self.link, self.stored_rows, self.pinned = None, None, None, None

    @property
    def weights(self):
        if self._weights is None:
            self._weights = Weights(self.shape, self.device)
        return self._weights

    def setting(self, policy, tokens=None, slots=None):
        return Setting(self.shape, policy, tokens or self.options["tokens"], store.digest_shape(self.shape), slots or self.options["slots"])

    def wait(self):
        if not self.tiny:
            torch.cuda.synchronize()

    def memory(self):
        """Bytes of the GPU's memory for KV, digests and slots: what weights leave."""
        if self.tiny:
            return 3 * self.shape.kv_bytes(self.options["tokens"])
        held = self.weights, gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] - RESERVE if held else 0

    # ---- dense ----

    def dense(self):
        """Step times by batch size, the last one the largest that fits."""
        memory, s = self.memory(), self.shape
        most = memory // s.kv_bytes(self.options["tokens"])
        kv = DenseKv(self.weights, most, self.options["tokens"])
        rows = []
        for batch in [n for n in range(1, most + 1) if n in (1, 2, 4) or n == most]:
            bare = Decode(self.weights, batch, lambda layer, rows, ops: rows[:, :s.heads * s.head].contiguous()).capture()
            some = kv.first(batch)
            step = Decode(self.weights, batch, some).capture()
            step.seconds(5)
            rows.append({"batch": batch, "kernel": some.kernel, "kernels_us": some.times, **summary(step.seconds(self.options["steps"])),
                         "without_attention_ms": summary(bare.seconds(self.options["steps"]))["ms"]})
            rows[-1]["tokens_per_second"] = batch / rows[-1]["ms"] * 1e3
        return {"memory": memory, "kv_bytes": sum(k.nbytes + v.nbytes for k, v in kv.kv), "rows": rows}

    # ---- the daemon ----

    def connect(self):
        self.link = store.Link(self.options["socket"], self.shape, self.setting(self.options["policy"]).digest, self.device)

    def store(self, windowed, leaning):
        self.connect()
        return store.store(self.link, self.blocks, windowed, leaning)

    def open(self):
        """As a second engine: finds the prompt, loads its digests, pins its blocks, and computes nothing of it."""
        self.connect()
        times, began = {}, time.perf_counter()

        def lap(name):
            times[name] = time.perf_counter() - began - sum(times.values())

        keys = store.keys_of(self.shape, self.blocks)
        found = self.link.ns.lookup_prefix(keys).blocks
        self.link.chain.append(keys, timeout=store.PATIENCE)
        lap("lookup")
        size = self.shape.layers * self.blocks * self.link.digest.bytes
        self.stored_rows = store.bytes_for(size, self.device).view(self.shape.layers, self.blocks, -1)
        region = self.link.rows(self.stored_rows, self.blocks)
        lap("register")
        loaded = store.all_ok(region.load(keys, list(range(self.blocks))), "digests")
        lap("digests")
        self.link.open_window()
        self.pinned = self.link.pin(0, self.blocks)
        lap("pin")
        return {"blocks": self.blocks, "found": found, "digest_bytes": loaded.bytes, "seconds": times}

    # ---- sparse ----

    def make_steps(self, setting, batch):
        if self.tiny:
            from decode_tiny import CpuSteps as Steps
        else:
            from decode_steps import GpuSteps as Steps
        steps = Steps(setting, batch, self.link)
        if self.pinned is not None:
            steps.set_places(self.pinned, batch * setting.blocks)
        return steps

    def rows_of(self, setting, batch):
        """Digests of all requests, by layers that choose. The first one's are those in the daemon, if they are of this policy; others have
        copies."""
        if setting.tokens == self.options["tokens"] and setting.digest.bytes == self.link.digest.bytes:
            one = self.stored_rows
        else:
            one = store.make_rows(self.shape, setting.digest, setting.blocks, self.device)
        return {layer: one[layer] if batch == 1 else one[layer].repeat(batch, 1) for layer in setting.choosing}

    def sparse(self, policy, batches, tokens=None, slots=None):
        """Step times by batch size, in the memory of the largest. batches: 0 stands for as many as fit into the memory; none for
        four sizes up to that. slots: as the option; 0: as many as fit into an eighth of the KV."""
        setting = self.setting(policy, tokens, slots)
        if slots == 0:
            setting.fit(self.shape.kv_bytes(setting.tokens) // 8)
        memory, each = self.memory(), setting.request_bytes()
        fit = int(memory // (sum(each.values()) + TABLES * setting.blocks))
        batches = [n or fit for n in batches] or sorted({1, max(fit // 4, 1), max(fit // 2, 1), fit})
        most = max(batches)
        steps = self.make_steps(setting, most)
        kv = SparseKv(self.weights, setting, most, self.rows_of(setting, most), steps)
        out = {"policy": policy, "tokens": setting.tokens, "memory": memory, "request_bytes": each, "tables_bytes": steps.table_bytes,
               "chosen": setting.chosen, "window": setting.window, "digest_bytes": setting.digest.bytes, "slots": setting.slots,
               "kv_bytes": self.shape.kv_bytes(setting.tokens), "need_bytes": setting.need * setting.head_bytes, "rows": []}
        for batch in sorted(batches):
            out["rows"].append(self.sparse_batch(kv if batch == most else kv.first(batch)))
        out["checked"] = self.check(kv)
        steps.close()
        return out

    def sparse_batch(self, kv):
        steps, part = kv.steps, 1 if kv.batch == 1 else 2
        settle, count = self.options["settle"] // part, self.options["steps"] // part
        step = Decode(self.weights, kv.batch, kv).capture(steps.begin, steps.end)
        before, missed, again = [steps.result()[1]], [], [0]

        def after(i):
            again[0] += self.finish(step, steps)[0]
            now = steps.result()[1]
            missed.append(now - before[0])
            before[0] = now

        step.seconds(settle, lambda i: kv.queries.next(), after)
        first = missed[:4]
        missed.clear()
        row = {"batch": kv.batch, **summary(step.seconds(count, lambda i: kv.queries.next(), after))}
        accesses = kv.setting.need * kv.batch
        row.update(tokens_per_second=kv.batch / row["ms"] * 1e3, misses=statistics.mean(missed) / accesses, first_misses=first,
                   bus_bytes=statistics.mean(missed) * kv.setting.head_bytes / kv.batch, runs_again=again[0], select_us=self.select_us(kv))
        return row

    def finish(self, step, steps):
        """Until the step that has run counts. Returns how often it ran again, and how many layers of blocks were fetched."""
        again = fetched = 0
        while steps.result()[0]:
            if again > 2 * self.shape.layers:
                raise SystemExit(f"a step does not end: {steps.result()}")
            fetched += steps.serve(self.blocks)
            step.graph()
            self.wait()
            again += 1
        return again, fetched

    def select_us(self, kv):
        """Of one layer's selection alone: all layers in a graph, as they differ in their digests."""
        if self.tiny:
            return 0.0
        from llama_torch import microseconds
        choosing = kv.setting.choosing
        return microseconds(lambda: [kv.choose(layer) for layer in choosing]) / len(choosing)

    def check(self, kv):
        """Attention of the last layer that chooses against torch's over the same tokens, which are made again. Returns the largest error, over the largest
        value."""
        s, setting, layer = self.shape, kv.setting, kv.setting.choosing[-1]
        pages = store.room(s, min(store.SOME, self.blocks), s.layers, self.device)
        whole = torch.cat([store.random_kv(s, first, pages)[:, layer].clone() for first in range(0, self.blocks, len(pages))])
        q = torch.randn(kv.batch, s.heads, s.head, dtype=torch.bfloat16, device=self.device)
        kv.steps.begin()
        kv.choose(layer)
        kv.steps.layer(layer, kv, q)
        kv.steps.end()
        self.wait()
        if kv.steps.result()[0]:
            return None
        worst = 0.0
        for c in {0, kv.batch - 1}:
            local = kv.pages[layer][kv.page_table[c, setting.candidates:].long()]
            for head, chosen in enumerate(kv.steps.lists(kv, c)):
                some = whole[torch.tensor(chosen, device=self.device) % self.blocks][:, :, :, head]
                if setting.encoding and not self.tiny:
                    some = store.coded(some)
                some = torch.cat([some.float(), local[:, :, :, head].float()])
                k, v = some.transpose(0, 1).reshape(2, -1, s.head)
                rows = q[c].view(s.kv_heads, s.group, s.head)[head].float()
                right = torch.softmax(rows @ k.T * s.head ** -0.5, -1) @ v
                got = kv.out[c].view(s.kv_heads, s.group, s.head)[head].float()
                worst = max(worst, float((got - right).abs().max() / right.abs().max()))
        return worst

    # ---- after a restart ----

    def restart(self, how):
        """The first token of the prompt, from NVMe: `whole` loads all KV, `steps` digests and what the step asks for."""
        self.connect()
        keys = store.keys_of(self.shape, self.blocks)
        while self.link.ns.lookup_prefix(keys).blocks < self.blocks or self.link.digests.lookup_prefix(keys).blocks < self.blocks:
            time.sleep(0.1)  # the daemon reads its log
        return self.restart_whole(keys) if how == "whole" else self.restart_steps(keys)

    def restart_whole(self, keys):
        pages = store.room(self.shape, self.blocks, self.shape.layers, self.device)
        region = self.link.pages(pages)
        kv = DenseKv(self.weights, 1, self.options["tokens"])
        step = Decode(self.weights, 1, kv).capture()
        began = time.perf_counter()
        found = self.link.ns.lookup_prefix(keys, lease=60)
        loaded = store.all_ok(region.load(keys, list(range(self.blocks)), lease=found.lease), "the load")
        load = time.perf_counter() - began
        step.graph()
        self.wait()
        return {"how": "whole", "seconds": time.perf_counter() - began, "load": load, "bytes": loaded.bytes}

    def restart_steps(self, keys):
        setting = self.setting(self.options["policy"])
        steps = self.make_steps(setting, 1)
        size = self.shape.layers * self.blocks * setting.digest.bytes
        rows = store.bytes_for(size, self.device).view(self.shape.layers, self.blocks, -1).zero_()
        region = self.link.rows(rows, self.blocks)
        lean = store.LEAN[1] * self.shape.head ** -0.5
        kv = SparseKv(self.weights, setting, 1, dict(enumerate(rows)), steps, lean)
        step = Decode(self.weights, 1, kv).capture(steps.begin, steps.end)
        began = time.perf_counter()
        self.link.chain.append(keys, timeout=store.PATIENCE)
        appended = time.perf_counter() - began
        digests = store.all_ok(region.load(keys, list(range(self.blocks))), "digests").bytes
        loaded = time.perf_counter() - began
        step.graph()
        self.wait()
        again, fetched = self.finish(step, steps)
        seconds = time.perf_counter() - began
        step.graph()
        self.wait()
        return {"how": "steps", "policy": self.options["policy"], "seconds": seconds, "append": appended, "digests": loaded - appended,
                "digest_bytes": digests, "runs": again + 1, "fetched_layers": fetched, "fetched_bytes": fetched * self.shape.layer_bytes,
                "flags_then": steps.result()[0]}
