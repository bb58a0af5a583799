"""Identities of namespaces and what follows from them, as docs/protocol.md and kernels/encoding/encoding.h say."""

import hashlib
import struct

ENCODINGS = {"fp8": (1, 1), "int8": (2, 1), "q4": (3, 2), "lossless": (4, 1)}
DTYPES = {"f16": 1, "bf16": 2, "fp8_e4m3": 3}
KEY_BYTES = 16


def padded(n, to=4096):
    return -(-n // to) * to


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def key_of(number, size=KEY_BYTES):
    return hashlib.sha256(b"key %d" % number).digest()[:size]


def keys_of(numbers, size=KEY_BYTES):
    return b"".join(key_of(number, size) for number in numbers)


def fingerprint(tenant, identity):
    text = [tenant] + [identity.get(name, "") for name in ("model", "revision", "dtype", "layout")]
    layers = identity["layers"] * (identity["parts"] if len(identity["layers"]) == 1 else 1)
    salt = identity.get("salt", b"")
    return hashlib.sha256(b"ucm-namespace-1\0" + b"".join(u32(len(word.encode())) + word.encode() for word in text)
                          + u32(identity["block_tokens"], identity["key_bytes"], identity["parts"], *layers)
                          + struct.pack("<Q", identity["layer_bytes"]) + u32(len(salt)) + salt).digest()


class Shape:
    """A layer: tensors of tokens, heads, dim."""

    def __init__(self, tokens, heads, dim, tensors, layers, parts, block_tokens):
        self.tokens, self.heads, self.dim, self.tensors = tokens, heads, dim, tensors
        self.layers, self.parts, self.block_tokens = layers, parts, block_tokens
        self.tensor_bytes = tokens * heads * dim * 2
        self.raw = self.tensor_bytes * tensors


def tensor_encoded(shape, spec, tensor):
    rows, dim, elements = shape.tokens * shape.heads, shape.dim, shape.tokens * shape.heads * shape.dim
    tiles = -(-shape.tokens // 16)
    if spec["encoding"] == "fp8":
        arrays = [elements, rows]
    elif spec["encoding"] == "int8":
        run = spec.get("run", 0) or shape.tokens
        by_channel = spec.get("axis", 0) == 1 and tensor == 0
        arrays = [elements, 2 * -(-shape.tokens // run) * shape.heads * dim if by_channel else 2 * rows]
    elif spec["encoding"] == "q4":
        group = min(dim & -dim, 128)
        groups = dim // group
        arrays = [elements // 2, 2 * rows * groups]
        if tensor == 0:
            arrays += [tiles * shape.heads * dim // 2, 2 * tiles * shape.heads * groups, tiles * shape.heads * dim // 2]
    else:
        arrays = [elements, -(-elements // 2), tiles * shape.heads, 4 * (1 + -(-elements // 128))]
    return sum(padded(n, 16) for n in arrays)


def encoded_bytes(shape, spec):
    return sum(tensor_encoded(shape, spec, tensor) for tensor in range(shape.tensors))


def spec_identity(shape, spec):
    """The 96 bytes."""
    encoding, version = ENCODINGS[spec["encoding"]]
    axis = spec.get("axis", 0) if encoding == 2 else 0
    out = u32(1, encoding, version, DTYPES[spec["dtype"]], shape.tensors, axis)
    out += struct.pack("<Q", spec.get("seed", 0) if encoding == 3 else 0)
    for tensor in range(2):
        used = tensor < shape.tensors
        order = spec.get("order", 0) if encoding in (2, 3, 4) and used else 0
        if encoding == 2 and (tensor == 1 or axis == 0):
            order = 0
        out += u32(tensor, shape.tokens, shape.heads, shape.dim, order) if used else bytes(20)
    run = spec.get("run", 0)
    out += u32(run if axis and 0 < run < shape.tokens else 0)
    return out.ljust(96, b"\0")


def encoded_identity(tenant, base, shape, spec, lie=None, **wrong):
    """The identity that encoding.open would open, made by hand. lie: the shape that its salt names; wrong: fields that say something
    else."""
    version = ENCODINGS[spec["encoding"]][1]
    salt = fingerprint(tenant, base) + struct.pack("<Q", wrong.pop("raw", base["layer_bytes"])) + spec_identity(lie or shape, spec)
    return {**base, "dtype": "encoded", "layout": f"encoding/{version}/{spec['encoding']}", "salt": salt,
            "layer_bytes": encoded_bytes(shape, spec), **wrong}


def encoding_params(shape, spec):
    rows = [shape.tokens, shape.heads, shape.dim]
    return dict(spec, k=rows, **({"v": rows} if shape.tensors == 2 else {}))


def summary_end(params, tokens):
    """How far the K of a summary's shape reaches."""
    width = (4, 2, 2, 1)[params.get("dtype", 0)]
    return (params.get("k_offset", 0) + (tokens - 1) * params["k_token_stride"]
            + (params["kv_heads"] - 1) * params.get("k_head_stride", 0) + params["head_dim"] * width)


def summary_within(params, tokens, limit):
    """Makes a summary's shape end before limit."""
    while summary_end(params, tokens) > limit:
        if params.get("k_offset", 0) > 0:
            params["k_offset"] = max(params["k_offset"] - (summary_end(params, tokens) - limit + 3) // 4 * 4, 0)
        elif params["kv_heads"] > 1:
            params["kv_heads"] //= 2
        elif params["head_dim"] > 4:
            params["head_dim"] = max(params["head_dim"] // 2 & ~3, 4)
        else:
            break
        params["k_head_stride"] = (4, 2, 2, 1)[params["dtype"]] * params["head_dim"]
        params["k_token_stride"] = params["k_head_stride"] * params["kv_heads"]


SUMMARIES = (None, "mean", "submean", "box", "hash", "stats", "tokens")


def summary_identity(base_fingerprint, base, params):
    """The identity of the summaries of a base, except layer_bytes; kernels/sparse/sparse.h has the
    176 bytes."""
    method, tokens = params["method"], base["block_tokens"]
    first = params.get("kind", 0) if method == 1 else params.get("rest", 0) if method == 6 else 0
    form = u32(1, method, first, params.get("run", 0) if method == 2 else 0, 0, params.get("bits", 0) if method == 4 else 0, 0,
               params.get("chosen", 0) if method == 6 else 0)
    form += struct.pack("<Q", params.get("seed", 0) if method == 4 else 0) + bytes(64)
    form += u32(params.get("dtype", 0), tokens, params["kv_heads"], params["head_dim"], 0, 0)
    form += struct.pack("<QQQ", params.get("k_offset", 0), params["k_token_stride"] if tokens > 1 else 0,
                        params.get("k_head_stride", 0) if params["kv_heads"] > 1 else 0) + bytes(24)
    return dict(base, dtype="summary", layout="summary/1/" + SUMMARIES[method], salt=hashlib.sha256(base_fingerprint + form).digest())
