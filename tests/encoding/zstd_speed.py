#!/usr/bin/env python3
"""zstd_speed.py MODEL: GB of plain KV a second that one core compresses and decompresses with zstd, and encodes and decodes with `lossless`, of
the same real K and V in the same run: blocks of 16 tokens, all layers. For zstd the bytes of a block are sorted before: all exponents, and
all signs and mantissas. Sorting them and back is not in zstd's times; `lossless` has it in its own. Wants libzstd.so.1 and
encoding_kernels.so."""

import ctypes
import os
import sys
import time

import numpy as np
import texts
from load import load
from model import bf16, to_numpy

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))
import methods  # noqa: E402
from test_encoding_numpy import LIB, c_spec  # noqa: E402

BLOCK, TOKENS, ROUNDS = 16, 2048, 7
u64, pointer = ctypes.c_size_t, ctypes.c_void_p


def libzstd():
    lib = ctypes.CDLL("libzstd.so.1")
    for name, out, arguments in (("ZSTD_createCCtx", pointer, []), ("ZSTD_createDCtx", pointer, []), ("ZSTD_compressBound", u64, [u64]),
                                 ("ZSTD_compressCCtx", u64, [pointer, pointer, u64, pointer, u64, ctypes.c_int]),
                                 ("ZSTD_decompressDCtx", u64, [pointer, pointer, u64, pointer, u64]), ("ZSTD_isError", ctypes.c_uint, [u64]),
                                 ("ZSTD_versionString", ctypes.c_char_p, [])):
        function = getattr(lib, name)
        function.restype, function.argtypes = out, arguments
    return lib


def best_of(work):
    """Seconds of this thread's CPU; the data are larger than a core's caches, so that a round finds them cold."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def zstd(lib, level, streams):
    """streams[blocks, bytes] -> (bytes they become, seconds to compress, to decompress)"""
    packer, unpacker, bound = lib.ZSTD_createCCtx(), lib.ZSTD_createDCtx(), lib.ZSTD_compressBound(streams.shape[1])
    packed, back = np.zeros((len(streams), bound), np.uint8), np.zeros_like(streams)
    sizes = [0] * len(streams)

    def compress():
        for i, stream in enumerate(streams):
            sizes[i] = lib.ZSTD_compressCCtx(packer, packed[i].ctypes.data, bound, stream.ctypes.data, stream.nbytes, level)

    def decompress():
        for i, stream in enumerate(streams):
            lib.ZSTD_decompressDCtx(unpacker, back[i].ctypes.data, stream.nbytes, packed[i].ctypes.data, sizes[i])

    seconds = best_of(compress), best_of(decompress)
    assert not any(lib.ZSTD_isError(size) for size in sizes) and (back == streams).all()
    return (sum(sizes), *seconds)


def lossless(blocks):
    """blocks[blocks, tokens, heads, dim], bf16 -> the same"""
    spec = methods.Spec("lossless", tokens=BLOCK, heads=blocks.shape[2], dim=blocks.shape[3])
    c = ctypes.byref(c_spec(spec))
    coded, back = np.zeros((len(blocks), LIB.test_bytes(c, 0)), np.uint8), np.zeros_like(blocks)

    def encode():
        for i, block in enumerate(blocks):
            LIB.test_encode(c, 0, pointer(block.ctypes.data), pointer(coded[i].ctypes.data))

    def decode():
        for i, block in enumerate(coded):
            LIB.test_decode(c, 0, pointer(block.ctypes.data), pointer(back[i].ctypes.data))

    seconds = best_of(encode), best_of(decode)
    assert (back == blocks).all()
    return (coded.nbytes, *seconds)


def main(path):
    model, lib = load(path, bf16), libzstd()
    ids = texts.pieces(model.tokenizer, 1, TOKENS)[0][1]
    _, k, v, _ = model.prefill(ids)
    kv = (np.stack([to_numpy(x) for x in k + v]).view(np.uint32) >> 16).astype(np.uint16)  # [2 * layers, tokens, heads, dim]
    blocks = np.ascontiguousarray(kv.reshape(len(kv), -1, BLOCK, *kv.shape[2:]).transpose(1, 2, 0, 3, 4)).reshape(
        TOKENS // BLOCK, BLOCK, -1, kv.shape[3])
    flat = blocks.reshape(len(blocks), -1)
    exponents, rest = (flat >> 7 & 255).astype(np.uint8), (flat >> 8 & 0x80 | flat & 0x7F).astype(np.uint8)
    print(f"zstd {lib.ZSTD_versionString().decode()}, {len(blocks)} blocks of {flat[0].nbytes} bytes; GB/s of plain KV, one core, best of {ROUNDS}")
    print("| | ratio | compress | decompress |\n|---|---|---|---|")

    def row(name, size, there, back):
        print(f"| {name} | {blocks.nbytes / size:.3f} | {blocks.nbytes / there / 1e9:.2f} | {blocks.nbytes / back / 1e9:.2f} |", flush=True)

    row("`lossless`", *lossless(blocks))
    for level in (1, 3):
        small = zstd(lib, level, exponents)
        row(f"zstd -{level}, exponents only", small[0] + rest.nbytes, *small[1:])
        row(f"zstd -{level}, exponents, and signs and mantissas", *(a + b for a, b in zip(small, zstd(lib, level, rest))))
        row(f"zstd -{level}, as it is", *zstd(lib, level, flat.view(np.uint8)))
    row("`lossless` once more", *lossless(blocks))


if __name__ == "__main__":
    main(*sys.argv[1:])
