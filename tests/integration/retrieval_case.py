"""What the tests of retrieval share: a base namespace with blocks, its summaries, sequences and selections, and what numpy makes of
them."""

import os
import struct
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../reference/sparse"))
import methods  # noqa: E402
from second_client import OK, Case, Client, Region, keys  # noqa: E402

SUITE_TIMEOUT_S = 300
TOKENS, KV_HEADS, HEAD_DIM, LAYERS = 16, 2, 64, 3
K_BYTES = TOKENS * KV_HEADS * HEAD_DIM * 2
IDENTITY = {"model": "retrieval", "dtype": "f16", "layout": "test/1", "block_tokens": TOKENS, "key_bytes": 16, "parts": 1,
            "layers": [LAYERS], "layer_bytes": 2 * K_BYTES}  # K, then V
SHAPE = {"dtype": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
         "k_token_stride": KV_HEADS * HEAD_DIM * 2, "k_head_stride": HEAD_DIM * 2, "v_offset": K_BYTES,
         "v_token_stride": KV_HEADS * HEAD_DIM * 2, "v_head_stride": HEAD_DIM * 2}
IN_DRAM, ON_NVME, ON_SHARED, HELD = 1, 2, 3, 4
DEADLINE, CANCELLED_CODE = 6, 7
MEAN = {"method": 1}
METHODS = {"mean": (1, {}), "submean": (2, {"run": 4}), "box": (3, {}), "hash": (4, {"bits": 64, "seed": 7}),
           "stats": (5, {}), "tokens": (6, {"chosen": 2}), "rest": (6, {"chosen": 2, "rest": 1})}


def spec_of(name):
    return methods.Spec("tokens" if name == "rest" else name, rest=int(name == "rest"), tokens=TOKENS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
                        run=4, bits=64, seed=7, stand_ins=2)


def random_kv(blocks, seed):
    """f16[blocks][layers][K, V][tokens][heads][channels]"""
    shape = (blocks, LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def lists_of(answer):
    """[list of chosen blocks]"""
    counts = struct.unpack(f"<{len(answer['counts']) // 4}I", answer["counts"])
    index, at, out = np.frombuffer(answer["index"], "<u4"), 0, []
    for count in counts:
        out.append(index[at:at + count].tolist())
        at += count
    assert at == len(index)
    return out


class Retrieval(Case):
    blocks = 40

    def stored(self, blocks=None, client=None, **identity):
        """A client with a base namespace whose blocks, named 0 to n, are dumped."""
        blocks = blocks or self.blocks
        client, identity = client or self.client(), dict(IDENTITY, model=self.id(), **identity)
        ns = client.open(identity)
        region = Region(client, ns, identity, blocks)
        kv = random_kv(blocks, 1)
        region.memory[:] = kv.tobytes()
        self.assertEqual(set(region.dump(range(blocks), range(blocks))), {OK})
        return client, ns, region, kv

    def again(self, daemon=None, **identity):
        """Another connection to what stored() opened."""
        client = Client(daemon or self.daemon)
        self.addCleanup(client.close)
        return client, client.open(dict(IDENTITY, model=self.id(), **identity))

    def summaries(self, client, ns, method="mean", **more):
        number, params = METHODS[method]
        return client.call("summary.open", ns=ns, method=number, **params, **SHAPE, **more)["ns"]

    def build(self, client, derived, names, **more):
        return list(client.call("summary.build", ns=derived, keys=keys(*names), **more)["status"])

    def sequence(self, client, derived, names, **more):
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        return sequence, client.call("sequence.append", sequence=sequence, keys=keys(*names), **more)

    def query(self, rows=1, heads=4, seed=2):
        return np.random.default_rng(seed).standard_normal((rows, heads, HEAD_DIM)).astype(np.float16)

    def select(self, client, sequence, q, layer=0, **more):
        params = {"min_blocks": 1, **more}
        return client.call("select", sequences=[sequence], layers=[layer], q=q.tobytes(), q_dtype=1, q_heads=q.shape[1],
                           rows=q.shape[0], **params)

    def read_summaries(self, client, derived, layer_bytes, count):
        """u8[count][layers][layer_bytes] through a region of the summaries' namespace."""
        region = Region(client, derived, {"layers": [LAYERS], "layer_bytes": layer_bytes}, count)
        self.assertEqual(region.load(range(count), range(count)), [OK] * count)
        raw = np.frombuffer(region.memory[:], np.uint8).reshape(count, LAYERS, layer_bytes).copy()
        client.call("region.unregister", region=region.number)
        return raw
