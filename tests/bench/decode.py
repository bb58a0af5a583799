#!/usr/bin/env python3
"""Sparse decoding on one GPU beside dense attention with all KV there: the table of docs/sparse.md, "Measured on a GPU".

    decode.py dense [--tokens N] [--steps N] [--json FILE]

A transformer of Llama-3.1-8B's shape with random weights (llama.py) decodes one token of each request a step, as one CUDA graph.

$UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. Needs PyTorch with CUDA; with --tiny a small shape
runs on a CPU, which shows that the script works."""

import argparse
import json
import os
import statistics
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.environ.get("UCM_PYTHON", os.path.join(TOP, "client/python")), os.path.dirname(os.path.abspath(__file__))]

import torch  # noqa: E402

import llama_torch as llama  # noqa: E402
from llama import Shape  # noqa: E402

TINY = Shape(layers=2, width=256, heads=4, kv_heads=2, head=64, inner=512, vocabulary=1000)
#: Beside weights and KV: activations, workspaces, and what the driver takes.
RESERVE = 3 << 30


def gpu_memory(options):
    """Bytes that are free now."""
    if options.tiny:
        return 8 << 30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def summary(seconds):
    """Of steps, the first of which warm up."""
    counted = sorted(seconds[len(seconds) // 4:])
    return {"ms": statistics.median(counted) * 1e3, "least": counted[0] * 1e3, "p99": counted[int(len(counted) * 0.99)] * 1e3}


def measure_dense(weights, options):
    """Step times by batch size, up to the largest batch that fits."""
    room = gpu_memory(options) - RESERVE
    most = 3 if options.tiny else room // weights.shape.kv_bytes(options.tokens)
    kv = llama.DenseKv(weights, most, options.tokens)
    rows = []
    for batch in range(1, most + 1):
        bare = llama.Decode(weights, batch, lambda layer, rows, ops: rows[:, :weights.shape.heads * weights.shape.head].contiguous())
        bare = summary(bare.capture().seconds(options.steps))["ms"]
        some = kv.first(batch)
        step = llama.Decode(weights, batch, some).capture()
        rows.append({"batch": batch, "kernel": some.kernel, "kernels_us": some.times, "without_attention_ms": bare,
                     **summary(step.seconds(options.steps))})
        rows[-1]["tokens_per_second"] = batch / rows[-1]["ms"] * 1e3
        print(rows[-1], flush=True)
    return {"room_bytes": room, "kv_bytes": kv_bytes(kv), "rows": rows}


def kv_bytes(kv):
    return sum(k.nbytes + v.nbytes for k, v in kv.kv)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("dense",))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="a small shape, on a CPU")
    options = parser.parse_args()
    began = time.monotonic()
    with torch.inference_mode():
        weights = llama.Weights(TINY if options.tiny else Shape(), "cpu" if options.tiny else "cuda")
        result = measure_dense(weights, options)
    print(f"# {time.monotonic() - began:.1f} s")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
