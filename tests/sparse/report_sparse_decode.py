#!/usr/bin/env python3
"""report_sparse_decode.py RESULTS FOLDER [CONTEXT...]: tables.md of what check_sparse_decode.py measured, of all contexts or of those whose
names begin so. Each group of contexts of one kind and length has a table of its own, and one of what each rule needs for 98 % of the dense
model's answers."""

import json
import os
import re
import sys

SETTING = re.compile(r"[:,](topk_tokens|eps|goal)=([0-9.]+)")
GOAL = 0.98


def pooled(rows):
    """Of the same rule in several contexts."""
    steps, asked = sum(r["steps"] for r in rows), sum(r["asked"] for r in rows)
    out = {key: sum(r[key] * r["steps"] for r in rows) / steps for key in ("attended", "union", "tokens", "kl", "same", "worse")}
    return {**out, "asked": asked, "kept": sum(r["kept"] for r in rows)}


def line(name, r):
    answers = f"{r['kept']} of {r['asked']}" if r["asked"] else "-"
    return f"| `{name}` | {r['attended']:.3f} | {r['tokens']:.0f} | {r['union']:.3f} | {answers} | {r['same']:.3f} | {r['kl']:.4f} | " \
           f"{100 * (2.718281828 ** r['worse'] - 1):+.1f} % |"


def needed(points, what):
    """The least KV of a rule from which on it keeps 98 %, between two settings by a straight line; None: it does not."""
    points = sorted(points, key=lambda r: r["attended"])
    value = [r["kept"] / r["asked"] if what == "answers" else r["same"] for r in points]
    best = None
    for i in range(len(points) - 1, -1, -1):
        if value[i] < GOAL:
            if best is not None:
                part = (GOAL - value[i]) / (value[i + 1] - value[i])
                best = {k: points[i][k] + part * (points[i + 1][k] - points[i][k]) for k in ("attended", "tokens")}
            break
        best = {k: points[i][k] for k in ("attended", "tokens")}
    return best


def rules(rows):
    """{rule without its setting: its measurements}"""
    out = {}
    for name, r in rows.items():
        out.setdefault(SETTING.sub("", name), []).append(r)
    return out


def tables(results):
    groups = {}
    for context, rows in results.items():
        kind, length = context.split()[0], next(iter(rows.values()))["length"] if rows else 0
        groups.setdefault((kind, round(length / 512) * 512), []).append(context)
    for (kind, length), contexts in sorted(groups.items()):
        common = [name for name in results[contexts[0]] if all(name in results[c] for c in contexts)]
        rows = {name: pooled([results[c][name] for c in contexts]) for name in common}
        yield f"## {kind}, about {length} tokens: {', '.join(contexts)}\n"
        yield "| policy | share attended | tokens | union of heads | answers kept | same token | KL | perplexity |"
        yield "|---|---|---|---|---|---|---|---|"
        yield from (line(name, r) for name, r in rows.items())
        what = "answers" if any(r["asked"] for r in rows.values()) else "tokens"
        yield f"\nFor 98 % of the dense {what}:\n"
        yield "| rule | share attended | tokens |"
        yield "|---|---|---|"
        for rule, points in sorted(rules(rows).items()):
            if len(points) > 1:
                best = needed(points, what)
                yield f"| `{rule}` | {best['attended']:.3f} | {best['tokens']:.0f} |" if best else f"| `{rule}` | not reached | |"
        yield ""


def main(path, folder, *names):
    with open(path, encoding="utf-8") as file:
        results = {name: rows for name, rows in json.load(file).items() if rows and (not names or name.startswith(names))}
    with open(os.path.join(folder, "tables.md"), "w", encoding="utf-8") as out:
        out.write("\n".join(tables(results)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
