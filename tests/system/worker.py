#!/usr/bin/env python3
"""worker.py dump|load|lookup MODEL FIRST COUNT: an engine's worker inside a machine. Dumps blocks whose bytes follow from
their names, or loads and compares them. One line of JSON. tests/integration/second_client.py is its client."""

import collections
import hashlib
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))
from second_client import DEMO, EXISTS, OK, Client, Region  # noqa: E402

Socket = collections.namedtuple("Socket", "socket clients")


def filling(model, name, size):
    return hashlib.shake_128(f"{model} {name}".encode()).digest(size)


def main():
    verb, model, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    client = Client(Socket(os.environ.get("UCM_SOCKET", "/run/ucmd/ucmd.sock"), []))
    identity = dict(DEMO, model=model, layer_bytes=32768)
    ns = client.open(identity)
    names = list(range(first, first + count))
    keys = b"".join(n.to_bytes(16, "big") for n in names)
    # as engines do; it finds blocks that other hosts, or this one before a restart, have put on a
    # root
    if verb != "dump":
        hits = client.call("lookup", ns=ns, keys=keys, shared=True)["hits"]
    if verb == "lookup":
        print(json.dumps({"hits": hits}))
        return
    region = Region(client, ns, identity, count)
    for i, name in enumerate(names):
        if verb == "dump":
            region.memory[i * region.size:(i + 1) * region.size] = filling(model, name, region.size)
    blocks = b"".join(i.to_bytes(4, "little") for i in range(count))
    status = list(client.call(verb, region=region.number, keys=keys, blocks=blocks)["status"])
    wrong = sum(region.bytes(i) != filling(model, name, region.size)
                for i, name in enumerate(names) if status[i] in (OK, EXISTS))
    print(json.dumps({"ok": sum(s in (OK, EXISTS) for s in status), "of": count, "wrong": wrong}))


main()
