#!/usr/bin/env python3
"""report.py RESULTS.JSON FOLDER: tables (FOLDER/tables.md) and plots (FOLDER/retrieval.svg) of what check_sparse.py measured."""

import json
import os
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 520, 330, 58, 34, 150, 40
COLOURS = ["#222222", "#1f77b4", "#17becf", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#7f7f7f", "#e377c2"]
COMPARED = ["oracle, mass", "tokens 4 + mean", "tokens 2 + mean", "mean, softmax", "box, softmax", "hash 128, max", "ESA", "window only",
            "submean 4, softmax"]


# ---- tables ----

def table(head, rows):
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def digest_part(results, name, d):
    """Bytes of a method's digests over those of K and V, as text."""
    share, total = results["digest_share"], 0
    for word in name.split(" + "):
        known = [digest for digest in share if word == digest or word.startswith(digest + ", ")]
        if known:
            total += share[max(known, key=len)][str(d)]
        elif word.startswith("tokens "):
            total += int(word.split()[1]) * share["tokens 1"][str(d)]
    return f"{total:.1%}" if total else "-"


def coverage_table(results):
    rows = []
    for name, shares in results["coverage"].items():
        if "0.125" not in shares or "of_oracle" not in shares["0.125"]:
            continue
        x = shares["0.125"]
        rows.append((x["of_oracle"]["mean"], [
            name, digest_part(results, name, 64), digest_part(results, name, 128), f"{x['mass']['mean']:.3f}",
            f"{x['of_oracle']['mean']:.3f}", f"{x['of_oracle']['p5']:.3f}", f"{x['of_oracle']['worst']:.3f} (layer {x['of_oracle']['where'][0]})",
            f"{x['recall']['mean']:.2f}" if "recall" in x else "-", f"{x['error']['mean']:.3f}"]))
    rows.sort(key=lambda row: -row[0])
    return table(["what chooses", "bytes, d = 64", "d = 128", "mass", "of the oracle's: mean", "5th percentile", "worst", "recall",
                  "error of the output"], [row for _, row in rows])


def shares_table(results):
    shares = sorted({s for row in results["coverage"].values() for s in row}, key=float)
    rows = [[name] + [f"{row[s]['of_oracle']['mean']:.3f} / {row[s]['of_oracle']['p5']:.3f}" for s in shares]
            for name, row in results["coverage"].items() if name in (*COMPARED, "InfLLM", "H2O", "random") and set(row) >= set(shares)]
    return table(["mean / 5th percentile at a share of"] + [f"{float(s):.3f}" for s in shares], rows)


def perplexity_table(results):
    rows = [(row["worse"], [name, f"{row['attended']:.3f}", f"{row['worse']:+.1%}", f"{row['kl']:.4f}", f"{row['same']:.3f}"])
            for name, shares in results["perplexity"].items() for share, row in shares.items()]
    return table(["what chooses", "attended", "perplexity", "KL of the logits", "same greedy token"],
                 [row for _, row in sorted(rows, key=lambda row: row[0])])


def first_table(results):
    rows = []
    for name, some in results["first"].items():
        mean = {key: sum(sum(x[key]) / len(x[key]) if isinstance(x[key], list) else x[key] for x in some) / len(some) for key in some[0]}
        rows.append([name, f"{mean['overlap']:.2f}", *[f"{mean[f'miss_{m}']:.3f}" for m in (1, 2, 4)], f"{mean['union']:.2f}",
                     f"{mean['union_overlap']:.2f}", *[f"{mean[f'union_miss_{m}']:.3f}" for m in (1, 2, 4)]])
    return table(["what chooses", "chosen again", "misses, slots 1x", "2x", "4x", "union of the KV heads, over one", "chosen again",
                  "misses, 1x", "2x", "4x"], rows)


def least(rows, wanted, key="same", below=False):
    """The least share attended that gives `wanted`, on the line between the two measurements around it; None: not reached."""
    points = sorted((row["attended"], row[key]) for row in rows)
    for i, (share, value) in enumerate(points):
        if (value <= wanted) if below else (value >= wanted):
            if i == 0:
                return share
            before, lower = points[i - 1]
            return before + (share - before) * (wanted - lower) / (value - lower)
    return None


def stops_table(results):
    def text(x):
        return "not reached" if x is None else f"{x:.3f}"
    rows = [[rule, text(least(some, 0.98)), text(least(some, 0.95)), text(least(some, 0.01, "worse", True)),
             "; ".join(f"{r['parameter']:g}: {r['attended']:.3f}, {r['same']:.3f}, {r['worse']:+.1%}" for r in some)]
            for rule, some in results["stops"].items()]
    return table(["rule, order", "least KV for 98 % of the tokens", "for 95 %", "for perplexity within 1 %",
                  "parameter: attended, same token, perplexity"], rows)


def keys_table(results):
    keys = results["passkeys"]
    found = sum(a["dense"] for a in keys["asked"])
    rows = {}
    for key, tried in keys["tried"].items():
        name, share = key.rsplit(" @ ", 1)
        rows.setdefault(name, {})[share] = f"{keys['found'][key]} of {tried}"
    shares = sorted({s for row in rows.values() for s in row}, key=float)
    return f"The dense model finds {found} of {len(keys['asked'])}.\n\n" + \
        table(["what chooses"] + [f"at {float(s):.4f}" for s in shares], [[n] + [row.get(s, "-") for s in shares] for n, row in rows.items()])


# ---- plots ----

def text(x, y, words, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def line(x1, y1, x2, y2, colour="#dddddd"):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def panel(title, across, curves, x_ticks, y_range, percent=False):
    """curves: {name: [(x, y)]}; x_ticks: [(x, label)], the first and last are the ends."""
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    (x0, _), (x1, _), (y0, y1) = x_ticks[0], x_ticks[-1], y_range

    def at(x, y):
        return LEFT + wide * (x - x0) / (x1 - x0), TOP + high * (1 - (min(max(y, y0), y1) - y0) / (y1 - y0))

    out = [text(LEFT + wide / 2, 18, title, more='font-weight="bold"'), text(LEFT + wide / 2, HEIGHT - 6, across)]
    for i in range(6):
        value = y0 + (y1 - y0) * i / 5
        y = at(x0, value)[1]
        out += [line(LEFT, y, LEFT + wide, y), text(LEFT - 6, y + 4, f"{value:.0%}" if percent else f"{value:g}", "end")]
    out += [text(at(x, y0)[0], TOP + high + 16, label) for x, label in x_ticks]
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[COMPARED.index(name) if name in COMPARED else i % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out += [line(LEFT + wide + 8, TOP + 10 + 16 * i, LEFT + wide + 24, TOP + 10 + 16 * i, colour),
                text(LEFT + wide + 28, TOP + 14 + 16 * i, name, "start")]
    return out


def layers_ticks(count):
    return [(i, str(i)) for i in (*range(0, count - 1, 5), count - 1)]


def panels(results):
    coverage, mean_of = results["coverage"], lambda lists: [sum(x) / len(x) for x in zip(*lists)]
    shares = sorted(next(iter(coverage.values())), key=float)
    ticks = [(i, f"1/{1 / float(s):.0f}") for i, s in enumerate(shares)]
    if len(shares) > 1:
        yield panel("Attention mass, of what the oracle covers", "share of the KV attended",
                    {n: [(i, coverage[n][s]["of_oracle"]["mean"]) for i, s in enumerate(shares)] for n in COMPARED[1:] if n in coverage},
                    ticks, (0.8, 1))
        yield panel("The same, 5th percentile of layers and heads", "share of the KV attended",
                    {n: [(i, coverage[n][s]["of_oracle"]["p5"]) for i, s in enumerate(shares)] for n in COMPARED[1:] if n in coverage},
                    ticks, (0.4, 1))
    some = [n for n in ("tokens 4 + mean", "mean, softmax", "box, softmax", "submean 4, softmax", "hash 128, max", "window only") if n in coverage]
    curves = {n: list(enumerate(coverage[n]["0.125"]["by_layer"])) for n in some}
    layers = len(results["needed"]["percentiles"])
    yield panel("Mass at 1/8, of the oracle's, by layer", "layer", curves, layers_ticks(layers), (0.4, 1))
    worse = {n: sorted((float(s), row["worse"]) for s, row in shares.items()) for n, shares in results["perplexity"].items() if n in COMPARED}
    worse = {n: [(i, y) for i, (_, y) in enumerate(points)] for n, points in worse.items() if len(points) > 1}
    if worse:
        last = [s for s in shares if any(s in row for row in results["perplexity"].values())]
        yield panel("Perplexity above the dense model's", "share of the KV attended", worse,
                    [(i, f"1/{1 / float(s):.0f}") for i, s in enumerate(last)], (0, 0.25), True)
    percentiles, blocks = results["needed"]["percentiles"], results["needed"]["blocks"]
    yield panel("Blocks for 95 % of the mass: steps and heads that need fewer", f"blocks, of {blocks}",
                {f"layer {i}": [(x, p / 20) for p, x in enumerate(percentiles[i])] for i in (0, 2, 5, 9, 12, 15, 18, 24, 29)},
                [(x, str(x)) for x in range(0, blocks + 1, blocks // 8)], (0, 1), True)
    if "first" in results:
        first = results["first"]
        yield panel("Blocks that the step before chose too, at 1/8", "layer",
                    {n: list(enumerate(mean_of([x["overlap"] for x in first[n]]))) for n in first}, layers_ticks(layers), (0, 1))
        for name in ("tokens 4 + mean", "mean, softmax"):
            curves = {f"{m}x, a KV head's own": list(enumerate(mean_of([x[f"miss_{m}"] for x in first[name]]))) for m in (1, 2, 4)}
            curves |= {f"{m}x, union of heads": list(enumerate(mean_of([x[f"union_miss_{m}"] for x in first[name]]))) for m in (1, 2, 4)}
            yield panel(f"Misses of a hot set: {name}", "layer", curves, layers_ticks(layers), (0, 0.5), True)
    if "stops" in results:
        yield panel("Same greedy token as the dense model", "share of the KV attended",
                    {rule: sorted((r["attended"], r["same"]) for r in rows) for rule, rows in results["stops"].items()
                     if rule.split(", ", 1)[1] in ("tokens 4 + mean", "oracle, mass") and len(rows) > 1 and not rule.startswith("certified")},
                    [(x / 10, f"{x / 10:g}") for x in range(0, 11, 2)], (0.85, 1), True)


def picture(results):
    drawn = list(panels(results))
    rows = (len(drawn) + 1) // 2
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{rows * HEIGHT}" font-family="sans-serif" font-size="11">',
           '<rect width="100%" height="100%" fill="white"/>']
    for i, parts in enumerate(drawn):
        out += [f'<g transform="translate({i % 2 * WIDTH} {i // 2 * HEIGHT})">', *parts, "</g>"]
    return "\n".join(out + ["</svg>"]) + "\n"


def main(path, folder):
    with open(path, encoding="utf-8") as file:
        results = json.load(file)
    parts = [("Mass at 1/8", coverage_table, "coverage"), ("Mass at other shares", shares_table, "coverage"),
             ("Perplexity", perplexity_table, "perplexity"), ("First experiment", first_table, "first"),
             ("Stop rules", stops_table, "stops"), ("Passkeys", keys_table, "passkeys")]
    with open(os.path.join(folder, "tables.md"), "w", encoding="utf-8") as file:
        for title, make, part in parts:
            if part in results:
                file.write(f"## {title}\n\n{make(results)}\n")
    with open(os.path.join(folder, "retrieval.svg"), "w", encoding="utf-8") as file:
        file.write(picture(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
