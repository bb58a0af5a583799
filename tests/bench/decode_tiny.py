"""What decode_steps.py does on a GPU, for a small shape on a CPU: it shows that decode.py works, and measures nothing."""

import numpy
import torch
from llama_torch import functional
from ucmclient.sparse.digest import Digests


class CpuSteps:
    """Slots are entries of a dictionary in the order of their last use; blocks come from the window by Window.read."""

    def __init__(self, setting, batch, link):
        self.setting, self.link, self.places, self.slots = setting, link, {}, {}
        self.missed, self.table_bytes = 0, 0

    def selector(self, setting, batch):
        def select(rows, table, candidates, q, out):
            for c in range(len(table)):
                some = rows[table[c, :candidates[c]].long()].contiguous()
                digests = Digests(setting.digest, some.numpy().view(numpy.uint32))
                out[c] = digests.select(q[c].contiguous(), setting.choice, setting.policy.score).lists
        return select

    def chosen(self, select, batch):
        return [None] * batch

    def set_places(self, numbers, places):
        self.places.update(zip(numbers, places))

    def enter(self, batch):
        pass

    def begin(self):
        pass

    end = begin

    def result(self):
        return {"flags": 0, "missed": self.missed}

    def block(self, layer, number):
        s = self.link.shape
        data = self.link.window.read(self.places[number], layer * s.layer_bytes, s.layer_bytes)
        return torch.frombuffer(data, dtype=torch.bfloat16).view(2, s.block, s.kv_heads, s.head)

    def layer(self, layer, kv, q):
        s = kv.shape
        for c in range(kv.batch):
            for head, chosen in enumerate(kv.chosen[c]):
                numbers = [int(kv.table[c, i]) for i in chosen]
                for number in numbers:
                    at = (layer, head, number)
                    value = self.slots.pop(at, None)
                    if value is None:
                        self.missed += 1
                        value = self.block(layer, number)[:, :, head].clone()
                        if len(self.slots) >= kv.setting.slots * kv.batch:
                            self.slots.pop(next(iter(self.slots)))
                    self.slots[at] = value
                local = kv.page_table[c, kv.setting.candidates:].long()
                pieces = torch.cat([torch.stack([self.slots[layer, head, n] for n in numbers]), kv.pages[layer][local][:, :, :, head]])
                k, v = pieces.transpose(0, 1).reshape(2, -1, s.head)
                rows = q[c].view(s.kv_heads, s.group, s.head)[head]
                kv.out[c, head * s.group:(head + 1) * s.group] = functional.scaled_dot_product_attention(rows[None], k[None], v[None])[0]

    def close(self):
        pass

    def lists(self, kv, c):
        return [list(one) for one in kv.chosen[c]]
