#!/usr/bin/python3
"""Tenants of one daemon do whatever its protocol allows, in every order, and look for each other's bytes.

    fuzz_live.py [--seconds N] [--seed N] [--jobs N]     programs from that seed on (0: any), each with a daemon of its own
    fuzz_live.py --replay FILE [--trace]                 what was found, again
    fuzz_live.py --shrink FILE                           makes it shorter

It needs a daemon that is built with clang's AddressSanitizer ($UCMD; `make SAN=address CC=clang`
builds one). That poisons memory that no slot's owner may touch. It also needs a Python 3 with
msgpack and numpy, and nothing of the tree but this directory. It runs as root: tenants are uids
from 1000 on. Other environment: FUZZ_WAIT_S (120): seconds after which a daemon hangs; FUZZ_ASAN:
more for ASAN_OPTIONS.

On another machine: copy this directory and the daemon. Copy libraries that `ldd` names and the
machine lacks into a directory that LD_LIBRARY_PATH names. Then `pip install msgpack numpy`, and

    UCMD=./ucmd python3 fuzz_live.py --seconds 3600 --jobs 16 --out found

A finding is printed. The directory --out (build/fuzz/live) gets it as a program of a line a call,
first as it ran and then shrunk. The same seed gives the same program; the daemon's threads may take
another course. A finding whose kind was found before is counted and not shrunk again. Exit status:
1 if anything was found."""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time

import grammar
import shrink
import subject


def save(path, program, words):
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps({"options": program["options"], "found": words}) + "\n")
        for op in program["ops"]:
            file.write(json.dumps(op) + "\n")


def read(path):
    with open(path, encoding="utf-8") as file:
        head, *ops = [json.loads(line) for line in file]
    return {"options": head["options"], "ops": ops}


def show(program):
    for op in program["ops"]:
        print("   ", json.dumps(op))


class Job:
    def __init__(self, args, number):
        self.args, self.number, self.found, self.counts, self.programs, self.begun = args, number, {}, {}, 0, 0

    def run(self):
        self.begun = time.monotonic()
        deadline = self.begun + self.args.seconds
        seed = self.args.seed + self.number
        while time.monotonic() < deadline:
            self.one(seed)
            seed += self.args.jobs
            if self.found and self.args.first:
                break
        return self.programs, self.found, self.counts

    def one(self, seed):
        program = grammar.Generator(seed).program()
        finding, counts = shrink.find(program)
        self.programs += 1
        for what, n in counts.items():
            self.counts[what] = self.counts.get(what, 0) + n
        if not finding:
            return
        self.found[finding.kind] = self.found.get(finding.kind, 0) + 1
        after = time.monotonic() - self.begun
        print(f"seed {seed}, program {self.programs} of job {self.number}, after {after:.0f} s: {finding.kind}", flush=True)
        if self.found[finding.kind] > 1:
            return
        path = os.path.join(self.args.out, f"{seed}")
        save(path + ".long", program, str(finding))
        print(str(finding)[:6000], flush=True)
        seconds = self.args.shrink_seconds
        shorter, again = shrink.shrink(program, finding, seconds, say=print if self.args.jobs == 1 else lambda *a, **k: None)
        if not again:
            print(f"it does not show when it is run again; the program is {path}.long", flush=True)
            return
        save(path, shorter, str(again))
        print(f"{len(shorter['ops'])} calls of {len(program['ops'])} show it: --replay {path}", flush=True)
        show(shorter)


def work(args, number):
    return Job(args, number).run()


def fuzz(args):
    os.makedirs(args.out, exist_ok=True)
    args.seed = args.seed or random.SystemRandom().randrange(1, 1 << 40)
    print(f"from seed {args.seed} on, {args.seconds} s, {args.jobs} daemons at once", flush=True)
    if args.jobs == 1:
        results = [work(args, 0)]
    else:
        with multiprocessing.Pool(args.jobs) as pool:
            results = pool.starmap(work, [(args, number) for number in range(args.jobs)])
    found, counts = {}, {}
    for _, kinds, called in results:
        for total, more in ((found, kinds), (counts, called)):
            for what, n in more.items():
                total[what] = total.get(what, 0) + n
    print(f"{sum(programs for programs, _, _ in results)} programs, {sum(found.values())} findings")
    if args.counts:
        for what in sorted(counts):
            print(f"  {counts[what]:8} {what}")
    for kind, n in sorted(found.items(), key=lambda one: -one[1]):
        print(f"  {n:4} {kind}")
    return 1 if found else 0


def replay(args):
    def trace(at, method, answer):
        print(at, method, answer)
    finding, counts = shrink.find(read(args.replay), trace if args.trace else None)
    print(finding if finding else "nothing is found")
    if args.counts:
        print(counts)
    return 1 if finding else 0


def shorten(args):
    program = read(args.shrink)
    finding, _ = shrink.find(program)
    if not finding:
        print("nothing is found")
        return 1
    program, again = shrink.shrink(program, finding, args.shrink_seconds)
    save(args.shrink + ".short", program, str(again))
    show(program)
    print(again)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default=os.path.join(subject.TOP, "build/fuzz/live"))
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--counts", action="store_true", help="what was called, and how it was answered")
    parser.add_argument("--shrink-seconds", type=float, default=300)
    parser.add_argument("--replay")
    parser.add_argument("--shrink")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    if os.getuid() != 0:
        parser.error("tenants are uids: run it as root")
    return replay(args) if args.replay else shorten(args) if args.shrink else fuzz(args)


if __name__ == "__main__":
    sys.exit(main())
