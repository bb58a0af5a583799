#!/usr/bin/python3
"""`make bench-gate`: a build is not slower than itself. Answers that take 60 us longer are found,
and named.

$UCMD names the build's daemon; gate-worker and delay.so lie next to it.
"""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCMD = os.path.abspath(os.environ.get("UCMD", os.path.join(TOP, "build/ucmd")))
BUILD = os.path.dirname(UCMD)
PROGRAM = os.path.join(TOP, "tests/gate/gate.py")
BASE = os.path.join(TOP, "tests/gate/base.sh")
LOOKUP = "lookup of 64 keys"

spec = importlib.util.spec_from_file_location("gate", PROGRAM)
gate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gate)


class Judging(unittest.TestCase):
    def ratios(self, true, noise, starts=3, bias=0.0):
        ratios = gate.Ratios()
        for start in range(starts):
            ratios.start()
            for _ in range(8):
                ratios.add(1, true * math.exp(random.gauss(0, noise)) * (1 + bias * (start == 0)))
        return ratios

    def test_interval(self):
        """It holds the true ratio, and an outlier hardly moves it."""
        random.seed(1)
        for true in (0.5, 1, 1.3):
            missed = 0
            for _ in range(200):
                ratios = self.ratios(true, 0.1)
                ratios.judge(1.1)
                missed += not ratios.low <= true <= ratios.high
                self.assertLess(ratios.high / ratios.low, 1.4)
            self.assertLessEqual(missed, 2)
        ratios = self.ratios(1, 0.01)
        ratios.add(1, 50)
        self.assertEqual(ratios.judge(1.1), gate.FINE)

    def test_verdicts(self):
        random.seed(2)
        for true in (0.5, 1):
            self.assertEqual(self.ratios(true, 0.05).judge(1.1), gate.FINE)
        self.assertEqual(self.ratios(1.3, 0.05).judge(1.1), gate.SLOWER)
        self.assertEqual(self.ratios(1.1, 0.05).judge(1.1), gate.UNDECIDED)
        # One start alone is no proof.
        self.assertEqual(self.ratios(1.3, 0.01, starts=1).judge(1.1), gate.UNDECIDED)
        # No false alarm of a machine whose times vary by a third.
        said = [self.ratios(1, 0.3, starts=2).judge(1.1) for _ in range(300)]
        self.assertNotIn(gate.SLOWER, said)


class Running(unittest.TestCase):
    def run_gate(self, old, new, *words):
        with tempfile.TemporaryDirectory(prefix="gate.") as directory:
            run = subprocess.run([sys.executable, "-B", PROGRAM, "--json", "--old", old, "--new", new, "--dir", directory, "--worker",
                                  os.path.join(BUILD, "gate-worker"), *words], capture_output=True, text=True, timeout=280)
            self.assertEqual(os.listdir(directory), [], run.stderr)
        return run, json.loads(run.stdout) if run.stdout else None

    def delayed(self, directory):
        """A build whose daemon takes 60 us more for each answer."""
        with open(os.path.join(directory, "ucmd"), "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nUCM_DELAY_NS=60000 LD_PRELOAD={BUILD}/delay.so exec {UCMD} "$@"\n')
        os.chmod(file.name, 0o755)
        os.symlink(os.path.join(BUILD, "libucmclient.so.0"), os.path.join(directory, "libucmclient.so.0"))
        return directory

    def test_same(self):
        """All cases of a build against itself: none is slower."""
        run, said = self.run_gate(BUILD, BUILD, "--rounds", "16")
        self.assertIn((run.returncode, said and said["verdict"]), ((0, "fine"), (5, "undecided")), run.stderr + run.stdout)
        self.assertGreaterEqual(len(said["cases"]), 12)
        for case in said["cases"]:
            self.assertEqual(case["rounds"], 16)
            self.assertLessEqual(case["clock"]["low"], case["clock"]["ratio"])
            self.assertLessEqual(case["clock"]["ratio"], case["clock"]["high"])

    def test_slower(self):
        with tempfile.TemporaryDirectory(prefix="delayed.") as directory:
            self.delayed(directory)
            run, said = self.run_gate(BUILD, directory, "--only", LOOKUP, "--rounds", "16")
            self.assertEqual((run.returncode, said and said["verdict"]), (6, "SLOWER"), run.stderr + run.stdout)

    def test_mistakes(self):
        for words, status, sentence in ((("--only", "nothing"), 1, "no case has 'nothing' in its name"),
                                        (("--rounds", "1"), 2, "wanted --rounds")):
            run, _ = self.run_gate(BUILD, BUILD, *words)
            self.assertEqual(run.returncode, status)
            self.assertIn(sentence, run.stderr)
        with tempfile.TemporaryDirectory(prefix="empty.") as directory:
            run, _ = self.run_gate(directory, BUILD)
            self.assertEqual(run.returncode, 1)
            self.assertIn(f"the worker of {directory} ended", run.stderr)

    def test_base(self):
        """A commit that is not there is named, and nothing is built."""
        with tempfile.TemporaryDirectory(prefix="base.") as directory:
            run = subprocess.run([BASE, "make", directory, "no-such-commit"], cwd=TOP, capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, run.stdout, os.listdir(directory)), (1, "", []))
            self.assertIn("there is no commit no-such-commit", run.stderr)


if __name__ == "__main__":
    unittest.main()
