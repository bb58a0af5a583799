"""What the tests of encoded namespaces share: engines that store KV in one form or another, and
what the C reference makes of their bytes.

With $UCM_ENCODING_GPU their pages lie on a GPU, and layers are as large as a ring wants them.
"straight": the daemon's kernels encode and decode; "ring": those of a copy agent
(encoding_gpu.py)."""

import ctypes
import mmap
import os
import struct

from second_client import Case, Client, keys, memfd, u32

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SUITE_TIMEOUT_S = 300
GPU = os.environ.get("UCM_ENCODING_GPU")
TOKENS, HEADS, DIM, LAYERS = (16, 8, 128, 3) if GPU else (16, 2, 64, 3)
TENSOR = TOKENS * HEADS * DIM * 2  # K's bytes, and V's
LAYER = 2 * TENSOR
BLOCK = LAYERS * LAYER
IDENTITY = {"model": "encoding", "dtype": "bf16", "layout": "test/1", "block_tokens": TOKENS, "key_bytes": 16, "parts": 1,
            "layers": [LAYERS], "layer_bytes": LAYER}
SIZES = {"dtype": "bf16", "k": [TOKENS, HEADS, DIM], "v": [TOKENS, HEADS, DIM]}
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "fp8_e4m3": 3}
UNFIT = 9
if GPU:
    import encoding_gpu

LIB = ctypes.CDLL(os.environ.get("UCM_ENCODING_KERNELS", os.path.join(TOP, "build/encoding_kernels.so")))
LIB.test_name.restype = ctypes.c_char_p
LIB.test_bytes.restype = ctypes.c_uint64


class Tensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("kind", "tokens", "heads", "dim", "order")]


class Spec(ctypes.Structure):
    _fields_ = [("encoding", ctypes.c_uint32), ("version", ctypes.c_uint32), ("dtype", ctypes.c_uint32),
                ("n_tensors", ctypes.c_uint32), ("tensor", Tensor * 2), ("axis", ctypes.c_uint32),
                ("run", ctypes.c_uint32), ("seed", ctypes.c_uint64)]


assert ctypes.sizeof(Spec) == LIB.test_spec_bytes()
ENCODINGS = {}
while (found := LIB.test_name(len(ENCODINGS))) is not None:
    ENCODINGS[found.decode()] = LIB.test_number(found)
LIB.test_isa(0)  # the reference


class Reference:
    """One spec as encoding.open takes it, and its C reference."""

    def __init__(self, encoding, dtype="bf16", k=(), v=(), order=0, axis=0, run=0, seed=0):
        self.spec = Spec(ENCODINGS[encoding], LIB.test_version(encoding.encode()), DTYPES[dtype], 2 if v else 1, axis=axis, run=run,
                         seed=seed)
        for i, sizes in enumerate((k, v)[:self.spec.n_tensors]):
            self.spec.tensor[i] = Tensor(i, *sizes, order)
        tensors = range(self.spec.n_tensors)
        self.encoded = [LIB.test_bytes(ctypes.byref(self.spec), i) for i in tensors]
        size = 1 if dtype == "fp8_e4m3" else 2
        self.plain = [size * sizes[0] * sizes[1] * sizes[2] for sizes in (k, v)[:self.spec.n_tensors]]

    def identity(self):
        out = ctypes.create_string_buffer(96)
        LIB.test_identity(ctypes.byref(self.spec), out)
        return out.raw

    def run(self, function, from_sizes, to_sizes, data):
        out, at = b"", 0
        while at < len(data):
            for i, (size, to_size) in enumerate(zip(from_sizes, to_sizes)):
                to = ctypes.create_string_buffer(to_size)
                function(ctypes.byref(self.spec), i, data[at:at + size], to)
                out, at = out + to.raw, at + size
        return out

    def encode(self, block):
        return self.run(LIB.test_encode, self.plain, self.encoded, block)

    def decode(self, encoded):
        return self.run(LIB.test_decode, self.encoded, self.plain, encoded)


def random_kv(size):
    """bf16 numbers of about the sizes that KV has."""
    data = bytearray(os.urandom(size))
    for i in range(1, size, 2):
        data[i] = (data[i] & 0x81) | 0x3e
    return bytes(data)


def register_host(client, size, **more):
    """Memory, and the number of its region."""
    fd = memfd(size)
    try:
        region = client.call("region.register", [fd], device="cpu", handles=[{"kind": 0, "bytes": size}], **more)
        return mmap.mmap(fd, size), region["region"]
    finally:
        os.close(fd)


class Pages:
    """Blocks in a memfd, or on a GPU. K and V of a layer lie side by side, each a plane of its own.
    spec: how the namespace's blocks are encoded, for a copy agent. ring_region: the region's number
    for a ring that does not exist."""

    def __init__(self, client, ns, blocks, tensors=(TENSOR, TENSOR), layers=LAYERS, part=0, spec=None, ring_region=0):
        self.client, self.size = client, layers * sum(tensors)
        planes, at = [], 0
        for layer in range(layers):
            for fragment in tensors:
                planes.append({"layer": layer, "offset": at, "stride": self.size, "block_bytes": fragment})
                at += fragment
        size, region = blocks * self.size, {"ns": ns, "part": part, "blocks": blocks, "planes": planes}
        if GPU:
            self.memory, self.number = encoding_gpu.register(client, size, GPU == "ring", spec, **region)
        else:
            self.memory, self.number = register_host(client, size, ring_region=ring_region, **region)

    def fill(self, block):
        self.memory[block * self.size:(block + 1) * self.size] = random_kv(self.size)
        return self.bytes(block)

    def bytes(self, block):
        return self.memory[block * self.size:(block + 1) * self.size]

    def put(self, block, data):
        self.memory[block * self.size:(block + 1) * self.size] = data

    def clear(self):
        self.memory[:] = bytes(len(self.memory))

    def begin(self, method, names, blocks, **more):
        return self.client.begin(method, region=self.number, keys=keys(*names), blocks=u32(*blocks), **more)

    def call(self, method, names, blocks, **more):
        return self.client.wait(self.begin(method, names, blocks, **more))

    def dump(self, names, blocks, **more):
        return list(self.call("dump", names, blocks, **more)["status"])

    def load(self, names, blocks, **more):
        return list(self.call("load", names, blocks, **more)["status"])


class Engine:
    """A connection that stores its blocks in one form: an encoding, or None."""

    def __init__(self, daemon, identity, encoding, blocks=16, part=0, **spec):
        self.client = Client(daemon)
        self.base = self.ns = self.client.open(identity)
        self.reference, self.opened = None, None
        if encoding:
            sizes = {**SIZES, **spec}
            self.opened = self.client.call("encoding.open", ns=self.base, encoding=encoding, **sizes)
            self.ns, self.reference = self.opened["ns"], Reference(encoding, **sizes)
        self.spec = self.reference.spec if self.reference else None
        self.pages = Pages(self.client, self.ns, blocks, part=part, spec=self.spec)
        self.dump, self.load = self.pages.dump, self.pages.load

    def through(self, block):
        """What a load makes of the raw bytes that this engine dumped."""
        return self.reference.decode(self.reference.encode(block)) if self.reference else block

    def each(self, *names, **more):
        return list(self.client.call("lookup", ns=self.ns, keys=keys(*names), per_key=True, **more)["status"])

    def hits(self, *names, **more):
        return self.client.call("lookup", ns=self.ns, keys=keys(*names), **more)["hits"]

    def metrics(self):
        return self.client.metrics()

    def listed(self, ns=None):
        entries = self.client.call("namespace.list", limit=4096)["namespaces"]
        return next(entry for entry in entries if entry["ns"] == (ns or self.ns))


class EncodingCase(Case):
    def engine(self, encoding, daemon=None, blocks=16, identity=None, **spec):
        """identity: the fields in which it differs from the others'."""
        engine = Engine(daemon or self.daemon, {**IDENTITY, "model": self.id(), **(identity or {})}, encoding, blocks, **spec)
        self.addCleanup(engine.client.close)
        return engine

    def identity_of(self, engine):
        """The encoded namespace's identity as the page has it."""
        listed = engine.listed()
        return dict(IDENTITY, model=self.id(), dtype="encoded", layout=listed["layout"], layer_bytes=listed["layer_bytes"],
                    salt=listed["base_fingerprint"] + struct.pack("<Q", LAYER) + engine.reference.identity())
