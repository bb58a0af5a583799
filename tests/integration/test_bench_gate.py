#!/usr/bin/env python3
"""`ucm-bench gate`: it passes against easy ratios, finds what is slower, knows what it can't decide, and says which.
Whether a ratio is right depends on the machine, so the ratios here are far from the gate.

$UCMD and $UCM_BENCH name other programs than those in build/.
"""

import json
import os
import subprocess
import tempfile
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))
TIMEOUT_S = 280


class Gate(unittest.TestCase):
    def gate(self, cases, *words):
        with tempfile.TemporaryDirectory(prefix="gate.") as folder:
            path = os.path.join(folder, "ratios.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"gate": 1, "cases": cases}, file)
            run = subprocess.run([UCM_BENCH, "--quiet", "--json", "gate", "--ucmd", UCMD, "--dir", folder, "--baseline",
                                  path, *words], capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual(os.listdir(folder), ["ratios.json"])
        return run, json.loads(run.stdout) if run.stdout else None

    def test_verdicts(self):
        """1000 times what is committed passes, and a thousandth is slower."""
        with open(os.path.join(TOP, "tests/bench/gate.json"), encoding="utf-8") as file:
            names = list(json.load(file)["cases"])
        self.assertEqual(len(names), 12)
        run, said = self.gate({name: 1000 for name in names}, "--most", "30")
        self.assertEqual((run.returncode, said["verdict"]), (0, "passed"), run.stderr)
        self.assertEqual([case["name"] for case in said["cases"]], names)
        self.assertEqual({case["repetitions"] for case in said["cases"]}, {15})
        for case in said["cases"]:
            self.assertLessEqual(case["low"], case["ratio"])
            self.assertLessEqual(case["ratio"], case["high"])
        run, said = self.gate({name: 0.001 if at == 3 else 1000 for at, name in enumerate(names)}, "--most", "30")
        self.assertEqual((run.returncode, said["verdict"]), (6, "slower"), run.stderr)
        self.assertEqual([case["verdict"] for case in said["cases"]], ["ok"] * 3 + ["SLOWER"] + ["ok"] * 8)
        # Too few repetitions for the later half to agree.
        run, said = self.gate({name: 0.001 for name in names}, "--most", "15")
        self.assertEqual((run.returncode, said["verdict"]), (5, "undecided"), run.stderr)

    def test_mistakes(self):
        run, _ = self.gate({}, "--baseline", "/nonexistent/ratios.json")
        self.assertEqual((run.returncode, "/nonexistent/ratios.json" in run.stderr), (1, True))
        run, _ = self.gate({}, "--most", "1")
        self.assertEqual(run.returncode, 2)


if __name__ == "__main__":
    unittest.main()
