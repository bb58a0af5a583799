"""The functions that the daemon runs for a request, as gcov counts them in a build with --coverage,
through libucmclient.

One daemon serves one request, another one 101. The difference is a hundred requests: connecting,
opening and stopping are the same in both. A function belongs to a request if at least half of these
run it. Functions of headers and of proto/ count.
"""

import glob
import json
import os
import subprocess
import sys

from modules import TOP

BLOCKS, LAYERS, FRAGMENT = 4, 4, 4096
FEW, MANY = 1, 101
PROMPTS = 100  # that lookups take in turn: a daemon samples one key in 16 at random, to count reuse


def requests(name):
    """{what a daemon is asked for: (done before, done again and again)}. An identity, pages, keys and calls are as in the README."""
    return {"load": (dump, load), "dump": (nothing, dump), "lookup": (dump_prompts, lookup)}[name]


def nothing(_ns, _region, _turn):
    pass


def keys(turn):
    return b"".join(bytes([block]) + turn.to_bytes(31, "little") for block in range(BLOCKS))


def done(task):
    result = task.wait()
    assert result.all_ok, result
    task.close()


def dump(_ns, region, turn):
    done(region.dump(keys(turn), list(range(BLOCKS))))


def dump_prompts(ns, region, _turn):
    """Each has a lease from the start, so that no lookup's lease is its blocks' last."""
    for turn in range(PROMPTS):
        dump(ns, region, turn)
        lookup(ns, region, turn)


def load(_ns, region, _turn):
    done(region.load(keys(0), list(range(BLOCKS))))


def lookup(ns, _region, turn):
    assert ns.lookup_prefix(keys(turn % PROMPTS), lease=60).blocks == BLOCKS


def serve(counted, name, n):
    """Calls of each function of a daemon's life: {(file, function): calls}."""
    from ucmclient import Client, Identity, Plane, SharedMemory
    from daemon import Daemon

    for file in glob.glob(os.path.join(TOP, counted, "obj/**/*.gcda"), recursive=True):
        os.unlink(file)
    before, again = requests(name)
    daemon = Daemon(nvme=False)
    with Client(socket=daemon.socket, name="shape") as client:
        ns = client.namespace(Identity("shape", "bf16", "nhd/1", 16, FRAGMENT, (LAYERS,)))
        shared = SharedMemory(LAYERS * FRAGMENT * BLOCKS)
        planes = [Plane(0, layer * FRAGMENT * BLOCKS, FRAGMENT, FRAGMENT, layer) for layer in range(LAYERS)]
        region = ns.register([shared.memory()], planes, blocks=BLOCKS)
        before(ns, region, 0)
        for turn in range(1, n + 1):
            again(ns, region, turn)
    assert daemon.stop() == 0
    return calls(counted)


def calls(counted):
    objects = os.path.join(TOP, counted, "obj")
    found = [os.path.relpath(path, TOP) for path in glob.glob(f"{objects}/**/*.gcda", recursive=True)]
    out = subprocess.run(["gcov", "--json-format", "--stdout", *found], cwd=TOP, capture_output=True, text=True, check=True).stdout
    counts = {}
    for line in out.split("\n"):
        for file in json.loads(line)["files"] if line else ():
            for function in file["functions"]:
                at = (os.path.relpath(os.path.join(TOP, file["file"]), TOP), function["name"])
                # What a header defines is in each object that includes it; those of other projects do not count.
                if not at[0].startswith(".."):
                    counts[at] = counts.get(at, 0) + function["execution_count"]
    return counts


def followed(counted, names=("load", "dump", "lookup")):
    """{request: {(file, function): calls of one}}"""
    os.environ["UCMD"] = os.path.join(TOP, counted, "ucmd")
    sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
    found = {}
    for name in names:
        few, many = serve(counted, name, FEW), serve(counted, name, MANY)
        turns = MANY - FEW
        each = {at: (n - few.get(at, 0)) / turns for at, n in many.items()}
        found[name] = {at: n for at, n in each.items() if n >= 0.5}
    return found
