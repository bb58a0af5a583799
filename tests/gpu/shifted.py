#!/usr/bin/env python3
"""Loads that re-rotate K into GPU memory, through a daemon and its clients, compared with those
into host memory.

shifted.py [staged|sm|dma|auto]

Each case stores random blocks, and loads them as they are and re-rotated. It does so without a copy
agent ("straight": by the daemon's own kernel), and with one. The word is the daemon's
copy.strategy. $UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the copy
agent's. Needs PyTorch with CUDA. Exit status: 0 when all bits are equal."""

import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests/integration"), os.environ.get("UCM_PYTHON", os.path.join(TOP, "client/python"))]

from daemon import Daemon  # noqa: E402

LAYERS, TOKENS, MIB = 32, 16, 64 << 20
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

    def __init__(self, client, copy_agent, name, encoding=None):
        import torch
        from ucmclient import Identity, Plane, Rope, SharedMemory
        from ucmclient.memory import cuda_allocation

        dtype, heads, dim, first, rotary, neighbours, v = CASES[name]
        size = TOKENS * heads * dim * ELEMENT[dtype]
        self.torch, self.layer = torch, size * (2 if v else 1)
        self.blocks = max(8, MIB // (self.layer * LAYERS))
        bytes_ = self.blocks * self.layer * LAYERS
        self.ns = client.namespace(Identity(model=f"re-rotated {name} {encoding}", dtype=dtype, layout="shifted", block_tokens=TOKENS,
                                            layers=(LAYERS,), layer_bytes=self.layer))
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
        self.staged = copy_agent.register(self.ns, [memory], there, [base], blocks=self.blocks, rope=rope, timeout=60)
        self.host = SharedMemory(bytes_)
        self.cpu = self.ns.register([self.host.memory()], planes(0), blocks=self.blocks, rope=rope, timeout=60)
        draw = random.Random(name)
        self.keys = [draw.randbytes(32) for _ in range(self.blocks)]
        self.table = list(range(self.blocks))
        draw.shuffle(self.table)
        # Three runs: far ahead, back, and one that stays.
        third = self.blocks // 3
        self.shifts = [(third, 0, 5), (third, 1 << 20, 100000), (self.blocks - 2 * third, 200000, 200000)]

    def store(self, finite):
        """Random bits; finite: normal numbers, as an encoding of activations has them."""
        torch = self.torch
        if finite:
            self.gpu.copy_(torch.randn(self.gpu.numel() // 2, device="cuda").to(torch.bfloat16).view(torch.uint8))
        else:
            self.gpu.random_(0, 256)
        torch.cuda.synchronize()
        assert self.straight.dump(self.keys, self.table).wait(120).all_ok

    def load(self, region, shifted):
        assert region.load(self.keys, self.table, shifts=self.shifts if shifted else None).wait(120).all_ok

    def wrong(self):
        """For each way on the GPU: whether its bytes differ from those of a load with position
        shifts into host memory. Also whether a load without shifts has the same bytes."""
        torch, wrong = self.torch, []
        self.load(self.cpu, True)
        want = torch.frombuffer(self.host.buffer, dtype=torch.uint8).cuda()
        for way, region in (("straight", self.straight), ("staged", self.staged)):
            self.gpu.zero_()
            torch.cuda.synchronize()
            self.load(region, True)
            if not torch.equal(self.gpu, want):
                wrong.append(way)
        self.load(self.straight, False)
        return wrong + (["nothing turns"] if torch.equal(self.gpu, want) else [])

    def close(self):
        for region in (self.straight, self.staged, self.cpu):
            region.close()
        self.ns.close()


def main():
    import torch
    from ucmclient import Client, CopyAgent
    from ucmclient.memory import gpu_uuid

    torch.zeros(1, device="cuda")
    strategy, failed = sys.argv[1] if len(sys.argv) > 1 else "staged", False
    daemon = Daemon(nvme=False, **{"arena.size": "4GiB", "arena.slab": "64MiB", "device.cuda": "required", "copy.strategy": strategy})
    client = Client(daemon.socket, "shifted")
    copy_agent = CopyAgent(client, gpu_uuid(0), timeout=60)
    for name, encoding in [*((name, None) for name in CASES), (next(iter(CASES)), "fp8")]:
        case = Case(client, copy_agent, name, encoding)
        case.store(encoding is not None)
        wrong = case.wrong()
        case.close()
        print(f"{name}, {encoding}: {'WRONG: ' + ', '.join(wrong) if wrong else 'same'}", flush=True)
        failed |= bool(wrong)
    copy_agent.close()
    client.close()
    daemon.stop()
    sys.exit(failed)


if __name__ == "__main__":
    main()
