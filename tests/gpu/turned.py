#!/usr/bin/env python3
"""Loads that turn K into GPU memory, through a daemon and its clients: bits beside those of a region in host memory, and speed
beside plain loads of the same bytes.

turned.py [--json FILE] [--mib N] [--rounds N] [--strategy staged|sm|dma|auto]

Each case stores random blocks and loads them as they are and turned, without a companion ("straight": by the daemon's own kernel) and with
one. The strategy is the daemon's copy.strategy; with sm plain loads go by a kernel, too. $UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. Needs PyTorch with CUDA.
Exit status: 0 when all bits are equal; no speed fails it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests/integration"), os.environ.get("UCM_PYTHON", os.path.join(TOP, "client/python"))]

from daemon import UCMCTL, Daemon  # noqa: E402

LAYERS, TOKENS = 32, 16
#: name: dtype, heads, elements of a row, of these the first that turns and how many do, neighbours, V as large as K.
CASES = {
    "BF16, 8 heads of 128": ("bf16", 8, 128, 0, 128, False, True),
    "BF16, neighbours": ("bf16", 8, 128, 0, 128, True, True),
    "F16": ("f16", 8, 128, 0, 128, False, True),
    "E4M3": ("fp8_e4m3", 8, 128, 0, 128, False, True),
    "BF16, 32 of 128 turn": ("bf16", 8, 128, 0, 32, False, True),
    "BF16, MLA, 64 of 576": ("bf16", 1, 576, 512, 64, True, False),
}
ELEMENT = {"bf16": 2, "f16": 2, "fp8_e4m3": 1}


class Case:
    """Memory for some blocks, on the GPU and in host memory, in a namespace of its own."""

    def __init__(self, client, companion, name, mib, encoding=None):
        import torch
        from ucmclient import Identity, Plane, Rope, SharedMemory
        from ucmclient.memory import cuda_allocation

        dtype, heads, dim, first, rotary, neighbours, v = CASES[name]
        size = TOKENS * heads * dim * ELEMENT[dtype]
        self.torch, self.layer = torch, size * (2 if v else 1)
        self.blocks = max(8, (mib << 20) // (self.layer * LAYERS))
        bytes_ = self.blocks * self.layer * LAYERS
        self.ns = client.namespace(Identity(model=f"turned {name} {encoding}", dtype=dtype, layout="turned", block_tokens=TOKENS,
                                            shards=(LAYERS,), shard_bytes=self.layer))
        if encoding:
            self.ns = self.ns.encoded(encoding, dtype=dtype, k=(TOKENS, heads, dim), v=(TOKENS, heads, dim) if v else ())
        rope = Rope(rows=TOKENS * heads, dim=dim, rotary=rotary, first=first, interleaved=neighbours, dtype=dtype, base=500000.0)
        parts = (size, size) if v else (size,)

        def planes(offset):
            """Each layer's K, then its V, block by block."""
            return [Plane(0, offset + layer * self.blocks * self.layer + part * self.blocks * size, size, size, layer)
                    for layer in range(LAYERS) for part in range(len(parts))]

        self.gpu = torch.zeros(bytes_, dtype=torch.uint8, device="cuda")
        memory, base, uuid = cuda_allocation(self.gpu.data_ptr())
        there = planes(self.gpu.data_ptr() - base)
        self.straight = self.ns.register([memory], there, blocks=self.blocks, gpu=uuid, rope=rope, timeout=60)
        self.staged = companion.register(self.ns, [memory], there, [base], blocks=self.blocks, rope=rope, timeout=60)
        self.host = SharedMemory(bytes_)
        self.cpu = self.ns.register([self.host.memory()], planes(0), blocks=self.blocks, rope=rope, timeout=60)
        draw = random.Random(name)
        self.keys = [draw.randbytes(32) for _ in range(self.blocks)]
        self.table = list(range(self.blocks))
        draw.shuffle(self.table)
        # Three runs: far ahead, back, and one that stays.
        third = self.blocks // 3
        self.turns = [(third, 0, 5), (third, 1 << 20, 100000), (self.blocks - 2 * third, 200000, 200000)]

    def store(self, finite):
        """Random bits; finite: normal numbers, as an encoding of activations has them."""
        torch = self.torch
        if finite:
            self.gpu.copy_(torch.randn(self.gpu.numel() // 2, device="cuda").to(torch.bfloat16).view(torch.uint8))
        else:
            self.gpu.random_(0, 256)
        torch.cuda.synchronize()
        assert self.straight.dump(self.keys, self.table).wait(120).all_ok

    def load(self, region, turned):
        began = time.perf_counter()
        result = region.load(self.keys, self.table, turns=self.turns if turned else None).wait(120)
        assert result.all_ok
        return time.perf_counter() - began

    def same(self):
        """Of each way on the GPU: are its bytes those of the turned load into host memory?"""
        torch, right = self.torch, []
        self.load(self.cpu, True)
        want = torch.frombuffer(self.host.buffer, dtype=torch.uint8).cuda()
        for region in (self.straight, self.staged):
            self.gpu.zero_()
            torch.cuda.synchronize()
            self.load(region, True)
            right.append(bool(torch.equal(self.gpu, want)))
        self.load(self.straight, False)
        return right, not bool(torch.equal(self.gpu, want))

    def speeds(self, rounds):
        """Seconds of loads, by way: plain, turned."""
        took = {way: ([], []) for way in ("straight", "staged")}
        for i in range(rounds + 2):
            for way, (plain, turned) in took.items():
                for of, turn in ((plain, False), (turned, True)):
                    seconds = self.load(getattr(self, way), turn)
                    if i >= 2:
                        of.append(seconds)
        return {way: tuple(statistics.median(of) for of in two) for way, two in took.items()}

    def close(self):
        for region in (self.straight, self.staged, self.cpu):
            region.close()
        self.ns.close()


def run(client, companion, name, mib, rounds, encoding=None):
    case = Case(client, companion, name, mib, encoding)
    case.store(encoding is not None)
    right, moved = case.same()
    speeds = case.speeds(rounds)
    row = {"case": name + (f", {encoding}" if encoding else ""), "same": all(right) and moved, "straight_same": right[0], "staged_same": right[1],
           "differs_from_plain": moved}
    for way, (plain, turned) in speeds.items():
        row[way] = {"plain_gb_s": case.gpu.numel() / plain / 1e9, "turned_gb_s": case.gpu.numel() / turned / 1e9, "ratio": plain / turned}
    case.close()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strategy", default="staged")
    words = parser.parse_args()
    import torch
    from ucmclient import Client, Companion
    from ucmclient.memory import gpu_uuid

    torch.zeros(1, device="cuda")
    rows = []
    daemon = Daemon(nvme=False, **{"arena.size": "4GiB", "arena.extent": "64MiB", "device.cuda": "required", "copy.strategy": words.strategy})
    client = Client(daemon.socket, "turned")
    companion = Companion(client, gpu_uuid(0), timeout=60)
    run(client, companion, next(iter(CASES)), words.mib, 1)  # the first copies find sleeping clocks and unpinned memory
    for name, encoding in [*((name, None) for name in CASES), (next(iter(CASES)), "fp8")]:
        row = run(client, companion, name, words.mib, words.rounds, encoding)
        rows.append(row)
        print(f"{row['case']:28} {'same' if row['same'] else 'WRONG ' + str(row['straight_same']) + str(row['staged_same']) + str(row['differs_from_plain'])}", *(
            f" {way}: plain {row[way]['plain_gb_s']:6.2f} turned {row[way]['turned_gb_s']:6.2f} GB/s, {row[way]['ratio']:.3f}"
            for way in ("straight", "staged")), flush=True)
    stats = subprocess.run([UCMCTL, "--socket", daemon.socket, "--json", "stats"], capture_output=True, check=True).stdout
    for device in json.loads(stats)["devices"]:
        print({key: value for key, value in device.items() if key in ("name", "dma_bytes", "sm_bytes", "staged_bytes")})
    companion.close()
    client.close()
    daemon.stop()
    if words.json:
        with open(words.json, "w") as f:
            json.dump(rows, f, indent=1)
    sys.exit(0 if all(row["same"] for row in rows) else 1)


if __name__ == "__main__":
    main()
