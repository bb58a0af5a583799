#!/usr/bin/python3
"""Blocks in two forms, asked for in every order of calls, alongside another tenant's blocks. A
client gets only the bytes of the block that it named, in the form of its pages. It gets nothing
else of the arena.

$UCM_ENCODING_GPU: pages and pools lie on a GPU, as encoding_case.py says; with "ring" those of
bytes have a copy agent, too."""

import faulthandler
import itertools
import struct
import unittest

import encoding_case
from encoding_case import DIM, GPU, HEADS, TOKENS, Reference, random_kv
from second_client import INVALID, MISS, OK, OTHER_UID, Case, Client, Pool, Refused, Region, keys

SUITE_TIMEOUT_S = 300
LAYERS, BLOCKS = 16, 3
PLAIN = TOKENS * HEADS * DIM * 2
IDENTITY = {"dtype": "bf16", "layout": "test/1", "block_tokens": TOKENS, "key_bytes": 16, "parts": 1, "layers": [LAYERS],
            "layer_bytes": PLAIN}
SUMMARIES = {"method": 1, "kind": 0, "dtype": 2, "kv_heads": HEADS, "head_dim": DIM, "k_token_stride": HEADS * DIM * 2,
           "k_head_stride": DIM * 2}
# With a scale for each element, int8 is longer than what it encodes. With one for two elements it
# is as long, so that sizes don't tell the forms apart.
FORMS = {"fp8": {}, "q4": {}, "lossless": {}, "int8": {}, "longer": {"encoding": "int8", "axis": 1, "run": 1},
         "as long": {"encoding": "int8", "axis": 1, "run": 2}}
STEPS = ("bytes", "view", "pool", "region", "sequence")  # bytes: namespace.open of the encoded one; view: encoding.open
MARK = b"the other one's!"


def orders():
    """The orders in which the client first opens the encoded namespace, one way or the other. On a
    GPU, where memory stays until the process ends, only some of them."""
    found = [order for order in itertools.permutations(STEPS) if order[0] in ("bytes", "view")]
    return found[::5] if GPU else found


def register(client, ns, size, spec, **more):
    """Memory, and the number of its region. spec: how its copies are encoded; None: they are raw.
    """
    if GPU:
        return encoding_case.encoding_gpu.register(client, size, GPU == "ring", spec or 0, ns=ns, part=0, **more)
    return encoding_case.register_host(client, size, ns=ns, part=0, **more)


class Blocks(Region):
    def __init__(self, client, ns, layer_bytes, blocks, spec=None):
        self.client, self.size = client, LAYERS * layer_bytes
        planes = [{"layer": layer, "offset": layer * layer_bytes, "stride": self.size, "block_bytes": layer_bytes} for layer in range(LAYERS)]
        self.memory, self.number = register(client, ns, blocks * self.size, spec, planes=planes, blocks=blocks)


class Slots(Pool):
    def __init__(self, client, ns, layer_bytes, slots, spec=None):
        self.client, self.size = client, layer_bytes
        self.memory, self.number = register(client, ns, slots * layer_bytes, spec, blocks=slots, block_pool=True,
                                            planes=[{"offset": 0, "stride": layer_bytes, "block_bytes": layer_bytes}])


class Form:
    """A base and an encoded namespace of it, with blocks in the one (b0, ...) and in the other (c0, ...), and what they hold."""

    def __init__(self, case, name):
        self.case, self.name = case, name
        self.how = {"encoding": name, "dtype": "bf16", "k": [TOKENS, HEADS, DIM], **FORMS[name]}
        self.reference = Reference(**self.how)
        self.encoded_bytes = self.reference.encoded[0]
        self.identity = dict(IDENTITY, model=f"{case.id()} {name}")
        owner = self.owner = case.client()
        opened = owner.call("namespace.open", **self.identity)
        self.base = opened["ns"]
        self.encoded_identity = dict(
            self.identity, dtype="encoded", layout=f"encoding/{self.reference.spec.version}/{self.how['encoding']}", layer_bytes=self.encoded_bytes,
            salt=opened["fingerprint"] + struct.pack("<Q", PLAIN) + self.reference.identity())
        self.ns = self.view(owner)
        self.pages, self.names = Blocks(owner, self.ns, PLAIN, BLOCKS, self.reference.spec), []
        self.holds = {}  # by name: the raw form that a load gives, and the encoded one
        for i in range(BLOCKS):
            case.neighbour()
            for kind in "bc":
                kv = random_kv(self.pages.size)
                self.pages.memory[:len(kv)] = kv
                case.assertEqual(self.pages.dump([f"{kind}{i}"], [0], raw=kind == "b"), [OK])
                encoded = self.reference.encode(kv) if kind == "c" else None
                self.holds[f"{kind}{i}"] = (self.reference.decode(encoded) if encoded else kv, encoded)
                self.names.append(f"{kind}{i}")
        case.neighbour()
        self.summaries = owner.call("summary.open", ns=self.ns, **SUMMARIES)
        self.summary_of = self.built(owner, self.summaries["ns"]) if name == "lossless" else {}

    def view(self, client):
        return client.call("encoding.open", ns=client.open(self.identity), **self.how)["ns"]

    def built(self, client, ns):
        """Summaries of all blocks, by name, of those that are there."""
        client.call("summary.build", ns=ns, keys=keys(*self.names))
        region = Blocks(client, ns, self.summaries["layer_bytes"], len(self.names))
        status = region.load(self.names, range(len(self.names)))
        return {name: region.bytes(i) for i, name in enumerate(self.names) if status[i] == OK}


class Stranger:
    """A connection that takes the steps in that order."""

    def __init__(self, form, order):
        self.form, self.client, self.opened = form, Client(form.case.daemon), set()
        self.base = self.client.open(form.identity)
        self.pool = self.region = self.summaries = None
        self.sequences = []
        for step in order:
            getattr(self, "step_" + step)()
            self.opened.add(step)

    def step_bytes(self):
        self.form.case.assertEqual(self.client.open(self.form.encoded_identity), self.form.ns)

    def step_view(self):
        self.form.case.assertEqual(self.form.view(self.client), self.form.ns)

    def registered(self, kind, n):
        """Registers pages of raw KV if the view is open by now, else of bytes. The other size is
        refused."""
        plain = "view" in self.opened
        sizes = (PLAIN, self.form.reference.spec) if plain else (self.form.encoded_bytes, None)
        if not GPU and PLAIN != self.form.encoded_bytes:
            with self.form.case.assertRaises(Refused):
                kind(self.client, self.form.ns, PLAIN + self.form.encoded_bytes - sizes[0], n)
        return kind(self.client, self.form.ns, sizes[0], n, sizes[1]), plain

    def step_pool(self):
        self.pool = self.registered(Slots, LAYERS)

    def step_region(self):
        self.region = self.registered(Blocks, len(self.form.names))

    def step_sequence(self):
        self.summaries = self.client.call("summary.open", ns=self.form.ns, **SUMMARIES)["ns"]
        self.append()

    def append(self):
        for name in self.form.names:
            sequence = self.client.call("sequence.open", ns=self.summaries)["sequence"]
            if self.client.call("sequence.append", sequence=sequence, keys=keys(name))["blocks"]:
                self.sequences.append((name, sequence))

    def wanted(self, name, plain):
        """What pages get, or None: a miss."""
        return self.form.holds[name][0 if plain else 1]

    def check_pool(self, **source):
        pool, plain = self.pool
        for name, more in [(name, {"sequence": sequence}) for name, sequence in self.sequences] + [(name, {"keys": keys(name)}) for name in self.form.names]:
            for layers in ((LAYERS - 1,), (LAYERS - 1, 0), range(LAYERS)):
                pool.memory[:] = b"\xa5" * len(pool.memory)
                status = pool.gather([(0, layer, slot) for slot, layer in enumerate(layers)], **more)
                wanted = self.wanted(name, plain)
                self.form.case.assertEqual(status, [OK if wanted else MISS] * len(layers), (name, more))
                for slot in range(LAYERS):
                    at = layers[slot] * pool.size if wanted and slot < len(layers) else None
                    self.form.case.assertEqual(pool.bytes(slot), b"\xa5" * pool.size if at is None else wanted[at:at + pool.size])

    def check_region(self):
        region, plain = self.region
        names = self.form.names
        for method in ("load", "load_prefix"):
            for name in names:
                region.memory[:] = b"\xa5" * len(region.memory)
                wanted = self.wanted(name, plain)
                self.form.case.assertEqual(list(region.call(method, [name], [1])["status"]), [OK if wanted else MISS], (method, name))
                self.form.case.assertEqual(region.bytes(1), wanted or b"\xa5" * region.size)
        mixed = region.load(names, range(len(names)))
        self.form.case.assertEqual(mixed, [OK if self.wanted(name, plain) else MISS for name in names])
        for i, name in enumerate(names):
            if mixed[i] == OK:
                self.form.case.assertEqual(region.bytes(i), self.wanted(name, plain))

    def check_dump(self, key):
        """The owner then finds what it stores, in that form."""
        region, plain = self.region
        form, kv, encoded = self.form, *self.form.holds["c0"]
        region.memory[:region.size] = kv if plain else encoded
        form.case.assertEqual(region.dump([key], [0]), [OK])
        form.case.assertEqual(region.dump([key + "p"], [0], raw=True), [OK])
        for name, decoded in ((key, form.reference.decode(form.reference.encode(kv)) if plain else kv), (key + "p", kv)):
            form.case.assertEqual(form.pages.load([name], [0]), [OK], name)
            form.case.assertEqual(form.pages.bytes(0), decoded)
        for ns in (form.ns, form.base):
            form.owner.call("evict", ns=ns, keys=keys(key, key + "p"))

    def check_summaries(self):
        """A summary's bytes depend on the block alone, whatever was opened before."""
        form = self.form
        for _, sequence in self.sequences:  # they hold summaries
            self.client.call("sequence.close", sequence=sequence)
        form.case.until(lambda: form.owner.call("evict", ns=form.summaries["ns"], keys=keys(*form.names)).get("busy", 0) == 0, "an eviction")
        try:
            built = form.built(self.client, self.summaries)
        except Refused as error:
            form.case.assertEqual(error.code, INVALID)
            form.case.assertNotEqual(form.name, "lossless")
            built = {}
        form.case.assertEqual(built, form.summary_of)


class Orders(Case):
    options = {"arena.size": "256MiB" if GPU else "32MiB"}

    def setUp(self):
        """Blocks of another tenant lie around all others: as long as a raw one, and as an encoded
        one of each form."""
        self.other = self.client(uid=OTHER_UID)
        self.around, self.others = [], 0
        for size in {PLAIN, *(Reference(**{"encoding": name, "dtype": "bf16", "k": [TOKENS, HEADS, DIM], **FORMS[name]}).encoded[0]
                              for name in FORMS)}:
            identity = dict(IDENTITY, model=f"{self.id()} {size}", layer_bytes=size)
            region = Region(self.other, self.other.open(identity), identity, 1)
            region.memory[:] = MARK * (len(region.memory) // len(MARK))
            self.around.append(region)

    def neighbour(self):
        for region in self.around:
            self.assertEqual(region.dump([f"around{self.others}"], [0]), [OK])
            self.others += 1

    def every_order(self, below):
        for place, name in enumerate(FORMS):
            form = Form(self, name)
            if below:
                self.settled(form.owner, form.base)
                self.settled(form.owner, form.ns)
            # Reads from below don't depend on who asks, so there each form runs its share of the
            # orders.
            for number, order in enumerate(orders()[place::len(FORMS)] if below else orders()):
                with self.subTest(form=name, order=order):
                    stranger = Stranger(form, order)
                    try:
                        stranger.append()
                        for ns in (form.base, form.ns) if below else ():
                            form.owner.call("evict", ns=ns, keys=keys(*form.names), tier=1)
                        stranger.check_pool()
                        stranger.check_region()
                        stranger.check_dump(f"{below} {number}")
                        stranger.check_summaries()
                    finally:
                        stranger.client.close()

    def tearDown(self):
        """The daemon refused all of this before it asked for bytes that are not the part's."""
        self.assertEqual(self.client().metrics()["span_refused"], 0)

    def test_in_dram(self):
        self.every_order(False)

    def test_below(self):
        self.every_order(True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
