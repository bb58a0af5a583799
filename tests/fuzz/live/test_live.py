#!/usr/bin/python3
"""Runs fuzz_live.py for some seconds, from fixed seeds and from fresh ones. Checks that it knows
all calls that there are.

UCM_LIVE_SECONDS=600 makes it ten minutes. `make fuzz-live` is the same for hours."""

import collections
import io
import itertools
import os
import random
import re
import time
import unittest
from contextlib import redirect_stdout

import grammar
import shrink
import subject
import things
from fuzz_live import save, show
from shapes import Shape, encoded_identity, encoding_params
from world import World

SECONDS = float(os.environ.get("UCM_LIVE_SECONDS", "20"))
OUT = os.path.join(subject.TOP, "build/fuzz/live")
FIXED = 12
OPTIONS = {"set": {"arena.size": "8MiB", "arena.slab": "1MiB", "mapping.size": "2MiB"}, "nvme": False, "shared": False, "keep": False,
           "encrypted": False}


def as_long(right, opened, look):
    """Stores raw bytes by a region of the encoded namespace, which encoding.open named, or
    namespace.open before it. Then looks at them in the base, which expects other bytes unless
    `right` is set."""
    shape, spec = Shape(16, 2, 16, 1, 1, 1, 16), {"encoding": "int8", "dtype": "f16", "axis": 1, "run": 2}
    base = things.Family(0, shape).identity(0)
    encoded = encoded_identity(f"uid:{subject.FIRST_UID}", base, shape, spec)
    assert encoded["layer_bytes"] == base["layer_bytes"] == shape.raw
    generator = grammar.Generator(1)
    conn = generator.connect(0)
    one, two = ({"of": name, "field": "ns"} for name in ("base", ("view", "bytes")[opened - 1]))
    generator.call(conn, "namespace.open", "base", 0, **base)
    if opened == 2:
        generator.call(conn, "namespace.open", "bytes", 0, **dict(encoded, salt={"hex": encoded["salt"].hex()}))
    generator.call(conn, "encoding.open", "view", 0, ns=one, **encoding_params(shape, spec))
    region = {"part": 0, "blocks": 4, "fragments": [shape.raw], "layers": 1, "base": None, "lossless": False, "raw": 1}
    generator.add("region", conn, **region, **{"as": "to"}, ns=two, pool=False, form="bytes", label=2)
    generator.add("dump", conn, region="to", keys=[3, 4], at=[0, 1], more={"raw": True})
    label = 1 if right else 2
    if look == "mapping":
        generator.call(conn, "summary.open", "summary", 0, ns=one, method=1, kind=0, dtype=2, kv_heads=2, head_dim=16, k_token_stride=64,
                       k_head_stride=32)
        generator.call(conn, "sequence.open", "sequence", 0, ns={"of": "summary", "field": "ns"}, part=0)
        generator.call(conn, "sequence.append", "append", 0, sequence={"of": "sequence", "field": "sequence"}, keys={"keys": [3, 4]})
        generator.add("mapping", conn, **{"as": "mapping"}, ns=one, part=0, label=label, layer_bytes=shape.raw, layers=1, exact=True)
        generator.add("ref", conn, mapping="mapping", sequence={"of": "sequence", "field": "sequence"}, first=0, n=2)
    else:
        generator.add("region", conn, **region, **{"as": "from"}, ns=one, pool=look == "gather", form="raw", label=label)
        found = {"keys": [3, 4], "at": [2, 0], "more": {}} if look == "load" else {"source": {"keys": {"keys": [3, 4]}}, "items": [[0, 0, 2], [1, 0, 0]]}
        generator.add(look, conn, region="from", **found)
    return {"options": OPTIONS, "ops": generator.ops}


class Ends(World):
    """Its daemon does, when all calls are answered."""

    def left(self):
        self.daemon.process.kill()
        super().left()


class Live(unittest.TestCase):
    def test_its_programs_call_every_method(self):
        """One that messages.h has and no program calls belongs into an act of grammar.py."""
        with open(os.path.join(subject.TOP, "proto/messages.h"), encoding="utf-8") as file:
            methods = set(re.findall(r'^ +M\(\w+, \w+, "([\w.]+)"', file.read(), re.M))
        called = {things.method_of(op) for seed in range(300) for op in grammar.Generator(seed).program()["ops"]}
        self.assertEqual(called - {None}, methods)

    def test_a_seed_is_a_program(self):
        self.assertEqual(grammar.Generator(7).program(), grammar.Generator(7).program())

    @unittest.skipIf(os.getuid() != 0, "tenants are uids")
    def test_a_region_holds_what_it_was_registered_for(self):
        """Here the encoded form is as long as the raw one. If the base then holds wrong bytes, the
        check finds them."""
        for stored in "right", "wrong":
            for opened, look in itertools.product((1, 2), ("load", "gather", "mapping")):
                with self.subTest(stored=stored, opened=opened, look=look):
                    finding, counts = shrink.find(as_long(stored == "right", opened, look))
                    if stored == "right":
                        self.assertIsNone(finding)
                        self.assertGreater(counts[{"load": "loaded raw", "gather": "gathered raw", "mapping": "read in a mapping"}[look]], 0)
                    else:
                        self.assertEqual(finding and finding.kind, "wrong bytes in a mapping" if look == "mapping" else "wrong bytes")

    @unittest.skipIf(os.getuid() != 0, "tenants are uids")
    def test_a_daemon_that_ends_after_the_last_call_is_found(self):
        with self.assertRaises(subject.Finding) as raised:
            Ends({"options": OPTIONS, "ops": []}).run()
        self.assertEqual(raised.exception.kind, "end -9")

    @unittest.skipIf(os.getuid() != 0, "tenants are uids")
    def test_nobody_sees_what_is_not_his(self):
        deadline, seed, runs, counts = time.monotonic() + SECONDS, 1, 0, collections.Counter()
        while time.monotonic() < deadline or runs < 2:
            program = grammar.Generator(seed).program()
            finding, called = shrink.find(program)
            counts.update(called)
            if finding:
                self.report(seed, program, finding)
            runs += 1
            seed = runs + 1 if runs < FIXED else random.SystemRandom().randrange(1, 1 << 40)
        for moved in ("loaded raw", "gathered raw"):
            self.assertGreater(counts[moved], 0, "programs that move nothing find nothing")

    def report(self, seed, program, finding):
        os.makedirs(OUT, exist_ok=True)
        path, said = os.path.join(OUT, str(seed)), io.StringIO()
        save(path + ".long", program, str(finding))
        with redirect_stdout(said):
            shorter, again = shrink.shrink(program, finding, 60)
            if again:
                save(path, shorter, str(again))
                show(shorter)
        self.fail(f"seed {seed}: {finding}\n{said.getvalue()}\ntests/fuzz/live/fuzz_live.py --replay {path if again else path + '.long'}")


if __name__ == "__main__":
    unittest.main()
