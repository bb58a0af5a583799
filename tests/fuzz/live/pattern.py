"""What tenants store: every 16 bytes name the tenant, whatever part of them leaks.

A grain is eight bf16 (or f16) numbers. Their high bytes are the tenant's own, so its numbers lie in
a range of magnitudes that no other tenant has. A summary or a lossy encoding of them stays in that
range. The low bytes are a mark, the block, the place and a check. The check is needed because
encodings' scales are bf16, too, and look like a mark now and then. A wild grain has numbers of all
magnitudes after the tenant's mark: what `lossless` can't hold."""

import zlib

import numpy as np

GRAIN = 16
HIGH = (0x3e, 0x41, 0x44, 0x47)          # by tenant; bf16 of about 2^-3, 2^3, 2^9, 2^15
MARK = ((0x2d, 0x53), (0x35, 0x4b), (0x59, 0x27), (0x6b, 0x1d))
NEEDLES = [bytes((a, high, b, high)) for (a, b), high in zip(MARK, HIGH)]


def is_wild(key):
    return key % 7 == 6


def checks(key, label, low, high):
    """14 bits that follow from the others of a grain; of numbers or of arrays."""
    mixed = (key * 40503 + label * 7919 + low * 104729 + high * 1299709 + 77) & 0xffffffff
    mixed = (mixed ^ mixed >> 13) * 2654435761 & 0xffffffff
    return mixed >> 9 & 0x7f, mixed >> 21 & 0x7f


def content(tenant, label, key, layer, size):
    """Bytes of a layer of a block; a function of its arguments."""
    n = -(-size // GRAIN)
    out = np.empty((n, GRAIN), np.uint8)
    out[:, 1::2] = HIGH[tenant]
    out[:, 0], out[:, 2] = MARK[tenant]
    out[:, 4], out[:, 6] = key & 0x7f, label & 0x7f
    place = np.arange(n, dtype=np.uint64) + np.uint64(layer * 1021)
    low, high = place & np.uint64(0x7f), place >> np.uint64(7) & np.uint64(0x7f)
    out[:, 8], out[:, 10] = low, high
    out[:, 12], out[:, 14] = (word.astype(np.uint8) for word in checks(key & 0x7f, label & 0x7f, low, high))
    if is_wild(key):
        out[:, 8:12] = np.frombuffer(wild_check(out[0, :8].tobytes()), np.uint8) if n else 0
        out[:, 12:16] = np.random.default_rng((tenant, label, key, layer)).integers(0, 256, (n, 4), np.uint8)
    return out.tobytes()[:size]


def hostile(key, layer, size):
    """Bytes that no encoder wrote, for decoders."""
    rng = np.random.default_rng((key, layer, size))
    kind = (key // 3 + layer) % 4
    if kind == 0:
        return rng.integers(0, 256, size, np.uint8).tobytes()
    if kind == 1:
        return b"\xff" * size
    out = rng.integers(0, 256, size, np.uint8)
    out[rng.random(size) < 0.9] = (0, 255)[kind - 2]
    return out.tobytes()


def wild_check(head):
    return zlib.crc32(head).to_bytes(4, "little")


def is_grain(grain, high):
    if len(grain) < GRAIN:
        return False
    if grain[8:12] == wild_check(grain[:8]):
        return True
    return (grain[1::2] == bytes([high]) * 8 and max(grain) < 128
            and (grain[12], grain[14]) == checks(grain[4], grain[6], grain[8], grain[10]))


def foreign(data, tenant):
    """Where another tenant's bytes lie in the data: (place, tenant); None: nowhere. Two grains side
    by side are no coincidence."""
    for other, mark in enumerate(NEEDLES):
        at = data.find(mark) if other != tenant else -1
        while at >= 0:
            beside = data[at + GRAIN:at + 2 * GRAIN], data[max(at - GRAIN, 0):at]
            if is_grain(data[at:at + GRAIN], HIGH[other]) and any(is_grain(one, HIGH[other]) for one in beside):
                return at, other
            at = data.find(mark, at + 1)
    return None
