"""Lines and branches that tests ran, by directory: of the objects below a directory, which gcc
counts with --coverage.

    python3 tests/coverage.py build/coverage [--files]

Code of a process that is killed, that may not write, or that becomes another program counts as not
run.
"""

import collections
import glob
import json
import os
import subprocess
import sys

AT_ONCE = 100


def counts(directory):
    """{(file, line, branch): times}, with None for the line itself. Counts of several objects of
    one file are added."""
    found = glob.glob(os.path.join(directory, "**/obj/**/*.gcno"), recursive=True)
    merged = collections.Counter()
    for at in range(0, len(found), AT_ONCE):
        objects = [os.path.abspath(path) for path in found[at:at + AT_ONCE]]
        out = subprocess.run(["gcov", "--branch-probabilities", "--json-format", "--stdout", *objects],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
        for report in map(json.loads, out.splitlines()):
            paths = [os.path.join(report["current_working_directory"], file["file"]) for file in report["files"]]
            if not all(map(os.path.exists, paths)):
                continue  # an object that a removed source left: headers had other lines then
            for file, path in zip(report["files"], paths):
                name = os.path.relpath(path)
                if not name.startswith(("daemon/", "client/", "proto/", "kernels/")):
                    continue
                for line in file["lines"]:
                    merged[name, line["line_number"], None] += line["count"]
                    for branch, taken in enumerate(line["branches"]):
                        merged[name, line["line_number"], branch] += taken["count"]
    return merged


def main(directory, *options):
    modules = collections.defaultdict(lambda: [0] * 4)
    for (name, _line, branch), times in counts(directory).items():
        kind = 0 if branch is None else 2
        for module in (name if options else os.path.dirname(name), "all"):
            modules[module][kind] += 1
            modules[module][kind + 1] += times > 0
    print(f"{'':<36}{'lines':>7}{'run':>9}{'branches':>10}{'taken':>9}")
    for module, (lines, run, branches, taken) in sorted(modules.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{module:<36}{lines:>7}{100 * run / max(lines, 1):>8.1f}%{branches:>10}{100 * taken / max(branches, 1):>8.1f}%")


main(*sys.argv[1:])
