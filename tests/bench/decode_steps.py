"""The GPU's half of decode.py's sparse step: a pool of slots, selections, and the steps over them (ucmclient.decode.cuda)."""

import array

import decode_store as store
import torch
from ucmclient.decode.cuda import Pages, Steps
from ucmclient.sparse._native import Place
from ucmclient.sparse.cuda import Chosen, Selector
from ucmclient.sparse.window import Pinned

#: Layers of blocks that a fetch brings at once, for what is in no window.
FETCHED = 4096


class GpuSteps:
    def __init__(self, setting, batch, link):
        s, self.setting, self.link, self.fetched = setting.shape, setting, link, None
        self.device = torch.device(link.device)
        self.select = Selector(setting.digest, gpu=self.device, q_heads=s.heads, max_blocks=setting.candidates, chains=batch,
                               choose=setting.choice, score=setting.policy.score)
        shape = store.digest_shape(s)
        self.pool = torch.empty(Steps.bytes_of(shape, s.layer_bytes, batch * setting.slots, encoding=setting.encoding), dtype=torch.uint8, device=self.device)
        self.steps = Steps(self.pool, shape, layers=s.layers, q_heads=s.heads, shard_bytes=s.layer_bytes, numbers=batch * setting.blocks,
                           requests=batch, chains=batch, room=self.select.room, window=setting.window, encoding=setting.encoding)
        self.begin, self.end = self.steps.begin, self.steps.end
        self.table_bytes = self.steps.table_bytes + self.steps.workspace_bytes + self.select.workspace_bytes
        for request in range(batch):
            self.steps.enter(request, setting.need)

    def set_places(self, pinned, numbers):
        """All numbers have the prompt's places by turns."""
        times = numbers // len(pinned)
        places = (Place * numbers).from_buffer_copy(bytes(pinned.places) * times)
        self.steps.places(array.array("I", range(numbers)), Pinned(places, numbers, 0, 0, 0), self.link.window)

    def chosen(self, batch):
        lists = (batch, self.select.lists)
        return Chosen(torch.empty(lists, dtype=torch.int32, device=self.device),
                      torch.empty((*lists, self.select.room), dtype=torch.int32, device=self.device))

    def layer(self, layer, kv, q):
        pages = Pages(kv.pages[layer], kv.page_table, kv.candidates, kv.length)
        self.steps.layer(layer, kv.chosen, kv.table, kv.request, q, pages, out=kv.out)

    def result(self):
        """flags, misses so far."""
        result = self.steps.result()
        return int(result.flags), result.missed

    def serve(self, stored):
        """Brings what the step's first layer that was not served lacks. A layer behind that one chose by queries that a real model would not
        have had. Returns how many layers of blocks came from the daemon."""
        keys = self.steps.unserved(first_layer=True)
        layer = keys[0].layer
        blocks = sorted({key.number % stored for key in keys})
        if self.fetched is None:
            self.fetched = store.room(self.setting.shape, FETCHED, 1, self.link.device)
            self.region = self.link.slots(self.fetched)
        at = {}
        for i, block in enumerate(blocks[:FETCHED]):
            at[block] = i
        items = array.array("I", [x for block, slot in at.items() for x in (block, layer, slot)])
        store.all_ok(self.region.fetch(self.link.chain, items, priority=7), "a fetch")
        size, base = self.setting.shape.layer_bytes, self.fetched.data_ptr()
        self.steps.put([(key, key.number // self.setting.blocks, base + at[key.number % stored] * size)
                        for key in keys if key.number % stored in at])
        return len(at)

    def lists(self, kv, c):
        return kv.chosen.lists()[c]

    def close(self):
        self.steps.close()
        self.select.close()
