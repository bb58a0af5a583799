#!/usr/bin/env python3
"""make bench-gate: is this build of ucmd slower than another one?

    gate.py --old DIRECTORY --new DIRECTORY [--gate PERCENT] [--rounds N] [--only TEXT] [--json]

Both directories hold `ucmd` and `libucmclient.so`. Old and new take turns in one run, in random
order, on the same two processors. A round gives each case a pair of repetitions a few milliseconds
apart. That gives the ratios new / old of the time by the clock, and of the processor time. Other
work of the machine hits both.

The statistic is of the ratios' logarithms: their Hodges-Lehmann estimate, and the interval of
Wilcoxon's signed-rank test. That test assumes only symmetry, which the random order gives. It is
looked at after 16, 24, 32, 48 ... rounds with 99.9 % each time. A case ends with the first look
that decides. Daemons and workers start again every eight rounds. Where their memory happens to lie
changes times by some percent, which would be the same in every pair.

    fine       the interval of the clock's ratio and that of the processor's end below the gate
    SLOWER     one of the two begins beyond the gate, and the medians of most starts by themselves lie there, too
    undecided  neither, after all rounds

The exit status is 0 if all cases are fine, 6 if one is slower, else 5; 1 if it could not be measured.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOOKS = (16, 24, 32, 48, 64, 96, 128, 192)
ROUNDS_A_START = 8
Z = 3.29  # two-sided 99.9 %
CLOCK, PROCESSOR = "clock", "processor"
FINE, SLOWER, UNDECIDED = "fine", "SLOWER", "undecided"
EXIT = {FINE: 0, UNDECIDED: 5, SLOWER: 6}


class Failed(Exception):
    pass


class Worker:
    """A process of gate_worker with the build in `directory`."""

    def __init__(self, program, build, directory):
        os.mkdir(directory)
        self.build = build
        self.process = subprocess.Popen([program, os.path.join(build, "ucmd"), directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, "LD_LIBRARY_PATH": build})

    def cases(self):
        names = []
        while name := self.line():
            names.append(name)
        return names

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the worker of {self.build} ended")
        return line.rstrip("\n")

    def repeat(self, case):
        """(seconds by the clock, seconds of the processor)"""
        try:
            self.process.stdin.write(f"{case}\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(f"the worker of {self.build} ended") from None
        return tuple(map(float, self.line().split()))

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def interval(logs):
    """The estimate and its interval, of a list of logarithms, as ratios."""
    n = len(logs)
    walsh = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    outside = n * (n + 1) / 4 - Z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    k = max(0, math.floor(outside))
    return math.exp(statistics.median(walsh)), math.exp(walsh[k]), math.exp(walsh[-1 - k])


class Ratios:
    """New / old of one case by one measure."""

    def __init__(self):
        self.starts = []  # lists of logarithms, one for each start of the daemons
        self.old, self.new = [], []
        self.ratio = self.low = self.high = None

    def start(self):
        self.starts.append([])

    def add(self, old, new):
        self.starts[-1].append(math.log(new / old))
        self.old.append(old)
        self.new.append(new)

    def judge(self, gate):
        starts = [start for start in self.starts if start]
        self.ratio, self.low, self.high = interval([log for start in starts for log in start])
        beyond = sum(math.exp(statistics.median(start)) > gate for start in starts)
        if self.high <= gate:
            return FINE
        return SLOWER if self.low > gate and beyond >= 2 and 2 * beyond > len(starts) else UNDECIDED


class Case:
    def __init__(self, number, name):
        self.number, self.name = number, name
        self.by = {CLOCK: Ratios(), PROCESSOR: Ratios()}
        self.verdict, self.why = UNDECIDED, CLOCK

    def start(self):
        for ratios in self.by.values():
            ratios.start()

    def turn(self, old, new):
        sides = [(old, 0), (new, 1)]
        random.shuffle(sides)
        got = [None, None]
        for worker, side in sides:
            got[side] = worker.repeat(self.number)
        for measure, ratios in enumerate(self.by.values()):
            if got[0][measure] > 0 and got[1][measure] > 0:
                ratios.add(got[0][measure], got[1][measure])

    def judge(self, gate):
        """The verdict of the worse measure: slower goes before undecided, undecided before fine."""
        worst = {FINE: 0, UNDECIDED: 1, SLOWER: 2}
        said = {measure: ratios.judge(gate) for measure, ratios in self.by.items() if ratios.old}
        self.why = max(said, key=lambda measure: (worst[said[measure]], self.by[measure].ratio))
        self.verdict = said[self.why]


class Gate:
    def __init__(self, args, directory):
        self.args, self.directory = args, directory
        self.gate = 1 + args.gate / 100
        self.cases, self.starts, self.rounds = [], 0, 0
        self.began = time.monotonic()

    def left(self):
        return [case for case in self.cases if case.verdict == UNDECIDED]

    def start(self):
        """Workers of both sides; the first start makes the cases, too."""
        self.starts += 1
        workers, names = [], []
        order = [("old", self.args.old), ("new", self.args.new)]
        random.shuffle(order)
        sides = {}
        try:
            for name, build in order:
                worker = Worker(self.args.worker, build, os.path.join(self.directory, f"{name}{self.starts}"))
                workers.append(worker)
                sides[name] = worker
                names = worker.cases()
        except Failed:
            self.stop(workers)
            raise
        if not self.cases:
            self.cases = [Case(number, name) for number, name in enumerate(names) if self.args.only in name]
            if not self.cases:
                self.stop(workers)
                raise Failed(f"no case has {self.args.only!r} in its name")
        return sides["old"], sides["new"]

    def stop(self, workers):
        for worker in workers:
            worker.close()
        for name in ("old", "new"):
            shutil.rmtree(os.path.join(self.directory, f"{name}{self.starts}"), ignore_errors=True)

    def run(self):
        while self.rounds < self.args.rounds and (self.left() or not self.cases):
            old, new = self.start()
            try:
                self.some_rounds(old, new)
            finally:
                self.stop([old, new])

    def some_rounds(self, old, new):
        for case in self.left():
            case.start()
            old.repeat(case.number)  # not counted: caches and pages warm up
            new.repeat(case.number)
        for _ in range(ROUNDS_A_START):
            left = self.left()
            random.shuffle(left)
            for case in left:
                case.turn(old, new)
            self.rounds += 1
            if self.rounds in LOOKS or self.rounds >= self.args.rounds:
                for case in left:
                    case.judge(self.gate)
            if sys.stderr.isatty():
                print(f"\r\033[Kround {self.rounds}, {len(self.left())} of {len(self.cases)} cases are not decided", end="", file=sys.stderr)
            if self.rounds >= self.args.rounds:
                return

    def verdict(self):
        said = {case.verdict for case in self.cases}
        return SLOWER if SLOWER in said else UNDECIDED if UNDECIDED in said else FINE


def amount(case, value):
    if not case.by[PROCESSOR].old:
        return f"{value / 2**20:.2f} MiB"
    return f"{value * 1e6:.2f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms"


def table(gate):
    width = max(len(case.name) for case in gate.cases)
    print(f"{'WHAT':{width}}  {'OLD':>10}  {'NEW':>10}  {'CLOCK':>24}  {'PROCESSOR':>24}  ROUNDS")
    for case in gate.cases:
        clock = case.by[CLOCK]
        cells = [f"{100 * r.ratio - 100:+.1f} % ({100 * r.low - 100:+.1f} to {100 * r.high - 100:+.1f})" if r.old else "-"
                 for r in case.by.values()]
        print(f"{case.name:{width}}  {amount(case, statistics.median(clock.old)):>10}  {amount(case, statistics.median(clock.new)):>10}"
              f"  {cells[0]:>24}  {cells[1]:>24}  {len(clock.old):>6}  {case.verdict}"
              + (f" by the {case.why}" if case.verdict != FINE and case.by[PROCESSOR].old else ""))
    print(f"\n{gate.rounds} rounds, {gate.starts} starts, {time.monotonic() - gate.began:.0f} s; the gate is +{gate.args.gate:g} %: {gate.verdict()}")


def document(gate):
    return {"verdict": gate.verdict(), "gate_percent": gate.args.gate, "rounds": gate.rounds, "starts": gate.starts,
            "seconds": time.monotonic() - gate.began, "cases": [
                {"name": case.name, "verdict": case.verdict, "by": case.why, "rounds": len(case.by[CLOCK].old),
                 **{measure: {"old": statistics.median(r.old), "new": statistics.median(r.new), "ratio": r.ratio, "low": r.low,
                              "high": r.high} for measure, r in case.by.items() if r.old}} for case in gate.cases]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--old", required=True, metavar="DIRECTORY", help="the build to compare with")
    parser.add_argument("--new", required=True, metavar="DIRECTORY", help="the build in question")
    parser.add_argument("--worker", default=os.path.join(TOP, "build/gate-worker"), metavar="PROGRAM")
    parser.add_argument("--dir", default="/var/tmp", metavar="DIRECTORY", help="on the disk; takes 1 GiB")
    parser.add_argument("--gate", type=float, default=10, metavar="PERCENT", help="how much slower is too slow")
    parser.add_argument("--rounds", type=int, default=LOOKS[-1], metavar="N", help="at most")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not LOOKS[0] <= args.rounds or not 0 < args.gate:
        parser.error(f"wanted --rounds from {LOOKS[0]} on, and --gate beyond 0")
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # an idle machine's figures, if we may
    except OSError:
        pass
    args.old, args.new = os.path.abspath(args.old), os.path.abspath(args.new)
    directory = tempfile.mkdtemp(prefix="ucm-gate.", dir=args.dir)
    try:
        gate = Gate(args, directory)
        gate.run()
    except Failed as why:
        print(f"gate.py: {why}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(json.dumps(document(gate), indent=1))
    else:
        table(gate)
    return EXIT[gate.verdict()]


if __name__ == "__main__":
    sys.exit(main())
