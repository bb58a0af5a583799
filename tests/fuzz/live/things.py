"""What a program's connections have, as the generator remembers it."""

import zlib

from shapes import ENCODINGS

TENANTS = 3                              # and the operator, which is the last
KEYS = 24
RAW, BYTES, ENCODED, SUMMARY = "raw", "bytes", "encoded", "summary"
SPECS = [{"encoding": "lossless", "dtype": "bf16"}, {"encoding": "int8", "dtype": "bf16"}, {"encoding": "fp8", "dtype": "bf16"},
         {"encoding": "q4", "dtype": "bf16", "seed": 5}, {"encoding": "int8", "dtype": "bf16", "axis": 1},
         {"encoding": "int8", "dtype": "bf16", "axis": 1, "run": 1}, {"encoding": "int8", "dtype": "f16", "axis": 1, "run": 2},
         {"encoding": "fp8", "dtype": "f16"}]
SPEC_WEIGHTS = (3, 1, 1, 1, 1, 3, 1, 1)  # summaries are built of the first; the sixth is longer than what it encodes


class Ns:
    """A namespace as one connection opened it. spec: of what is encoded; base: of summaries."""

    def __init__(self, name, form, family, spec, identity, base=None):
        self.name, self.form, self.family, self.spec, self.identity, self.base = name, form, family, spec, identity, base
        self.layer_bytes = identity["layer_bytes"]
        self.crc = zlib.crc32(repr(sorted(identity.items())).encode())
        self.label = self.crc & 0x7f  # what its blocks' bytes are named for

    @property
    def ref(self):
        return {"of": self.name, "field": "ns"}


class Region:
    def __init__(self, name, ns, part, blocks, pool):
        self.name, self.ns, self.part, self.blocks, self.pool = name, ns, part, blocks, pool
        self.shifts = False              # K of its blocks


class BlockSequence:
    def __init__(self, name, summary, part):
        self.name, self.summary, self.part, self.blocks = name, summary, part, 0


class Connection:
    def __init__(self, number, tenant):
        self.number, self.tenant = number, tenant
        self.spaces, self.regions, self.sequences, self.mappings, self.leases = [], [], [], [], []
        self.encoded = set()            # (family, spec) that it opened by encoding.open

    def of(self, *forms):
        return [ns for ns in self.spaces if ns.form in forms]


class Family:
    """A model, which every tenant has under almost the same name (one letter differs), with the
    same keys."""

    def __init__(self, number, shape):
        self.number, self.shape = number, shape
        self.stored = {}                # (tenant, spec or None) -> keys

    def identity(self, tenant, layer_bytes=None):
        shape = self.shape
        return {"model": f"model-{'abcd'[tenant]}-{self.number}", "dtype": "bf16", "layout": "l/1", "block_tokens": shape.block_tokens,
                "key_bytes": 16, "parts": shape.parts, "layers": [shape.layers], "layer_bytes": layer_bytes or shape.raw}


def of(thing, field):
    return {"of": thing.name, "field": field}


OPS = {"connect": "hello", "region": "region.register", "unregister": "region.unregister", "dump": "dump", "load": "load", "gather": "gather",
       "select": "select", "mapping": "mapping.open", "ref": "mapping.ref", "release": "mapping.release", "close": "mapping.close",
       "cancel": "cancel", "rekey": "encryption_key.reload"}


def method_of(op):
    return op.get("m") or OPS.get(op["do"])


TIMED = {"prefetch", "summary.build", "sequence.append", "sequence.prefetch"}  # they take a deadline and a priority

assert set(ENCODINGS) == {"fp8", "int8", "q4", "lossless"} and TENANTS <= 3
