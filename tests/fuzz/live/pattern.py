"""What tenants store: every 16 bytes name the tenant, whatever part of them leaks.

A grain is eight bf16 (or f16) numbers. Their high bytes are the tenant's own, so its numbers lie in a range of magnitudes that no
other tenant has, and a digest or a lossy encoding of them stays in one. The low bytes are a mark, the block and the place.
A wild grain has numbers of all magnitudes behind the tenant's mark: what `lossless` can't hold."""

import numpy as np

GRAIN = 16
HIGH = (0x3e, 0x41, 0x44, 0x47)          # by tenant; bf16 of about 2^-3, 2^3, 2^9, 2^15
MARK = ((0x2d, 0x53), (0x35, 0x4b), (0x59, 0x27), (0x6b, 0x1d))


def needle(tenant):
    (a, b), high = MARK[tenant], HIGH[tenant]
    return bytes((a, high, b, high))


NEEDLES = [needle(tenant) for tenant in range(len(HIGH))]


def is_wild(key):
    return key % 7 == 6


def content(tenant, label, key, shard, size):
    """Bytes of a shard of a block; a function of its arguments."""
    n = -(-size // GRAIN)
    out = np.empty((n, GRAIN), np.uint8)
    out[:, 1::2] = HIGH[tenant]
    out[:, 0], out[:, 2] = MARK[tenant]
    place = np.arange(n, dtype=np.uint32)
    out[:, 4], out[:, 6] = key & 0x7f, label & 0x7f
    out[:, 8], out[:, 10] = place & 0x7f, place >> 7 & 0x7f
    mixed = (place + 1) * np.uint32(2654435761) + np.uint32(key * 40503 + label * 7919 + shard * 104729 & 0xffffffff)
    out[:, 12], out[:, 14] = mixed >> 9 & 0x7f, mixed >> 21 & 0x7f
    if is_wild(key):
        out[:, 8:16] = np.random.default_rng((tenant, label, key, shard)).integers(0, 256, (n, 8), np.uint8)
    return out.tobytes()[:size]


def foreign(data, tenant):
    """Where another tenant's grain lies in the data: (place, tenant); None: nowhere."""
    for other, mark in enumerate(NEEDLES):
        at = data.find(mark) if other != tenant else -1
        while at >= 0:
            if len(data) >= at + 8 and data[at + 5] == data[at + 7] == HIGH[other] and data[at + 4] < 128 and data[at + 6] < 128:
                return at, other
            at = data.find(mark, at + 1)
    return None
