#!/usr/bin/python3
"""fuzz_live.py for some seconds, from the same seeds and from fresh ones; and that it knows all that there is to call.

UCM_LIVE_SECONDS=600 makes it ten minutes. `make fuzz-live` is the same for hours."""

import collections
import io
import os
import random
import re
import sys
import time
import unittest
from contextlib import redirect_stdout

try:
    import grammar
    import shrink
    import subject
    import things
    from fuzz_live import save, show
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

SECONDS = float(os.environ.get("UCM_LIVE_SECONDS", "16"))
OUT = os.path.join(subject.TOP, "build/fuzz/live")
FIXED = 12


class Live(unittest.TestCase):
    def test_it_knows_every_method(self):
        """One that messages.h has and grammar.py lacks belongs into an act of its own."""
        with open(os.path.join(subject.TOP, "proto/messages.h"), encoding="utf-8") as file:
            methods = set(re.findall(r'^ +M\(\w+, \w+, "([\w.]+)"', file.read(), re.M))
        self.assertEqual(methods, things.METHODS)

    def test_its_programs_call_every_method(self):
        called = set()
        for seed in range(300):
            called.update(things.method_of(op) for op in grammar.Generator(seed).program()["ops"])
        self.assertEqual(things.METHODS - called, set())

    def test_a_seed_is_a_program(self):
        self.assertEqual(grammar.Generator(7).program(), grammar.Generator(7).program())

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
        for moved in ("loaded plain", "fetched plain"):
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
