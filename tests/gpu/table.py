#!/usr/bin/env python3
"""table.py COPY.JSON...: prints the figures of `ucm-bench copy --json`, a line a case, next to the
aims.

A figure by fragment is the worst of the fragments of the case. Several files each add their rows.
"""

import json
import sys

KIB = 1024
ALONE, WITH = ("dma", "sm", "auto"), ("staged", "auto+ring")
BUS = "chain's p99 alongside one DMA, to alone"
# name, aim, more is better, fragments from, to, strategies, figure of a row
CASES = [
    ("idle, load", 0.97, True, 4 * KIB, None, ALONE + WITH, lambda r: r["idle_load"]["ratio"]),
    ("idle, dump", 0.97, True, 4 * KIB, None, ALONE + WITH, lambda r: r["idle_dump"]["ratio"]),
    ("busy, load", 0.96, True, 4 * KIB, None, ALONE + WITH, lambda r: r["busy_load"]["ratio"]),
    ("busy, dump", 0.96, True, 4 * KIB, None, ALONE + WITH, lambda r: r["busy_dump"]["ratio"]),
    ("busy, worker keeps", 0.95, True, 4 * KIB, None, ALONE + WITH, lambda r: keeps(r)),
    ("busy, load, 512 KiB up", 0.93, True, 512 * KIB, None, ALONE, lambda r: r["busy_load"]["ratio"]),
    ("busy, dump, 512 KiB up", 0.93, True, 512 * KIB, None, ALONE, lambda r: r["busy_dump"]["ratio"]),
    ("    the worker keeps", 0.98, True, 512 * KIB, None, ALONE, lambda r: keeps(r)),
    ("busy, load, 64 KiB", 0.80, True, 64 * KIB, 64 * KIB, ALONE, lambda r: r["busy_load"]["ratio"]),
    ("busy, dump, 64 KiB", 0.80, True, 64 * KIB, 64 * KIB, ALONE, lambda r: r["busy_dump"]["ratio"]),
    ("    the worker keeps", 0.93, True, 64 * KIB, 64 * KIB, ALONE, lambda r: keeps(r)),
    ("both directions at once", 0.90, True, 4 * KIB, None, ALONE + WITH, lambda r: r["both_ratio"]),
    ("short kernels' p99", 1.10, False, 4 * KIB, None, ALONE + WITH, lambda r: r["chain_p99_ratio"]),
]


def keeps(row):
    return min(row["busy_load"]["worker_keeps"], row["busy_dump"]["worker_keeps"])


def cell(rows, case, strategy):
    _, aim, more, first, last, strategies, figure = case
    found = []
    for row in rows:
        if row["strategy"] == strategy and strategy in strategies and first <= row["fragment"] <= (last or row["fragment"]):
            try:
                found.append(figure(row))
            except KeyError:  # measured without a worker alongside
                pass
    if not found:
        return "-"
    worst = min(found) if more else max(found)
    return f"{worst:.2f}{'' if (worst >= aim if more else worst <= aim) else ' !'}"


def main(paths):
    rows, figures, bus, encodings = [], [], [], []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}")
            continue
        if "rows" not in document:
            encodings += document.get("figures", [])
            continue
        rows += document["rows"]
        if BUS in document:
            bus.append(document[BUS])
        last = rows[-1]["strategy"] if rows else "?"
        figures += [(last, f) for f in document.get("figures", []) if "target" in f and "baseline" in f]
    order = [s for s in ALONE[:2] + WITH[:1] + ALONE[2:] + WITH[1:] if any(r["strategy"] == s for r in rows)]
    print(f"{'share of one large DMA; ! misses the aim':42} {'aim':>5}" + "".join(f"{s:>11}" for s in order))
    for case in CASES:
        print(f"{case[0]:42} {case[1]:5.2f}" + "".join(f"{cell(rows, case, s):>11}" for s in order))
    if bus:
        print(f"{'    against a plain DMA of the worker':42} {'':5} {max(bus):10.2f}")
    for strategy, figure in figures:
        value = figure["ratio"]
        print(f"{figure['name'] + ', ' + strategy:42} {figure['target']:5.2f} {value:10.2f}{'' if figure['met'] else ' !'}")
    for figure in encodings:
        print(f"{figure['name']:42} {figure['target']:5.2f} {figure['value']:10.2f}{'' if figure['met'] else ' !'}")


if __name__ == "__main__":
    main(sys.argv[1:])
