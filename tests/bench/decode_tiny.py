"""What decode_steps.py does on a GPU, for a small shape on a CPU: it shows that decode.py works, and measures nothing."""

import decode_store as store
import numpy
import torch
from llama_torch import functional
from ucmclient.sparse.digest import Digests


class CpuSteps:
    """Slots are entries of a dictionary in the order of their last use; blocks come from the window by Window.read."""

    def __init__(self, setting, batch, link):
        self.setting, self.link, self.places, self.slots = setting, link, {}, {}
        self.missed, self.table_bytes, self.fetched, self.unserved = 0, 0, {}, []

    def select(self, rows, table, candidates, q, out):
        for c in range(len(table)):
            some = rows[table[c, :candidates[c]].long()].contiguous()
            digests = Digests(self.setting.digest, some.numpy().view(numpy.uint32))
            out[c] = digests.select(q[c].contiguous(), self.setting.choice, self.setting.policy.score).lists

    def chosen(self, batch):
        return [None] * batch

    def set_places(self, pinned, numbers):
        self.places = {i: pinned.places[i % len(pinned)] for i in range(numbers)}

    def begin(self):
        self.unserved = []

    def end(self):
        pass

    def result(self):
        return len(self.unserved), self.missed

    def serve(self, stored):
        """As decode_steps.py: the first layer's, by a fetch."""
        layer = min(at[0] for at in self.unserved)
        blocks = sorted({number % stored for at, _, number in self.unserved if at == layer})
        pages = store.room(self.link.shape, len(blocks), 1, "cpu")
        items = [(block, layer, slot) for slot, block in enumerate(blocks)]
        store.all_ok(self.link.slots(pages).fetch(self.link.chain, items), "a fetch")
        self.fetched.update({(layer, block): pages[slot, 0].clone() for slot, block in enumerate(blocks)})
        return len(blocks)

    def block(self, layer, number):
        s = self.link.shape
        if (layer, number) in self.fetched:
            return self.fetched[layer, number]
        if number not in self.places:
            return None
        data = self.link.window.read(self.places[number], layer * s.layer_bytes, s.layer_bytes)
        return torch.frombuffer(data, dtype=torch.bfloat16).view(2, s.block, s.kv_heads, s.head)

    def strand(self, kv, layer, head, number):
        at = (layer, head, number)
        value = self.slots.pop(at, None)
        if value is None:
            self.missed += 1
            block = self.block(layer, number)
            if block is None:
                self.unserved.append(at)
                return torch.zeros(2, kv.shape.block, kv.shape.head, dtype=torch.bfloat16)
            value = block[:, :, head].clone()
            if len(self.slots) >= kv.setting.slots * kv.batch:
                self.slots.pop(next(iter(self.slots)))
        self.slots[at] = value
        return value

    def layer(self, layer, kv, q):
        s = kv.shape
        for c in range(kv.batch):
            local = kv.pages[layer][kv.page_table[c, kv.setting.candidates:].long()]
            for head, chosen in enumerate(kv.chosen[c]):
                strands = [self.strand(kv, layer, head, int(kv.table[c, i])) for i in chosen]
                k, v = torch.cat([torch.stack(strands), local[:, :, :, head]]).transpose(0, 1).reshape(2, -1, s.head)
                rows = q[c].view(s.kv_heads, s.group, s.head)[head]
                kv.out[c, head * s.group:(head + 1) * s.group] = functional.scaled_dot_product_attention(rows[None], k[None], v[None])[0]

    def close(self):
        pass

    def lists(self, kv, c):
        return [list(one) for one in kv.chosen[c]]
