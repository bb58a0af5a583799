#!/usr/bin/env python3
"""plot_copy.py COPY.JSON...: the figures of `ucm-bench copy --json` as an SVG on standard output."""

import json
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 470, 330, 55, 40, 15, 45
COLOURS = {"dma": "#1f77b4", "sm": "#d62728", "staged": "#2ca02c", "auto": "#222222", "auto+ring": "#ff7f0e"}
PANELS = [
    ("Idle: load", "share of one large DMA", lambda row: row["idle_load"]["ratio"]),
    ("Idle: dump", "share of one large DMA", lambda row: row["idle_dump"]["ratio"]),
    ("Beside a worker that computes: load", "share of one large DMA", lambda row: row["busy_load"]["ratio"]),
    ("Beside a worker that computes: dump", "share of one large DMA", lambda row: row["busy_dump"]["ratio"]),
    ("What the worker keeps while loads run", "of its speed", lambda row: row["busy_load"]["worker_keeps"]),
    ("What the worker keeps while dumps run", "of its speed", lambda row: row["busy_dump"]["worker_keeps"]),
    ("Both directions at once, idle", "share of the two-way bus", lambda row: row["both_ratio"]),
    ("Short kernels while loads run", "their p99 alone, of that beside", lambda row: 1 / row["chain_p99_ratio"]),
]


def size(fragment):
    return f"{fragment >> 20} MiB" if fragment >= 1 << 20 else f"{fragment >> 10} KiB"


def text(x, y, words, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def line(x1, y1, x2, y2, colour):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def panel(title, unit, curves, fragments):
    """curves: {strategy: {fragment: value}}; the axes' ends are 0 and 1.05."""
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(fragment, value):
        return LEFT + wide * (fragments.index(fragment) + 0.5) / len(fragments), TOP + high * (1 - min(value, 1.05) / 1.05)

    out = [text(LEFT + wide / 2, 18, title, more='font-weight="bold"'),
           text(14, TOP + high / 2, unit, more=f'transform="rotate(-90 14 {TOP + high / 2:.1f})"')]
    for tenth in range(0, 11, 2):
        y = at(fragments[0], tenth / 10)[1]
        out += [line(LEFT, y, LEFT + wide, y, "#dddddd"), text(LEFT - 6, y + 4, f"{tenth / 10:.1f}", "end")]
    out += [text(at(fragment, 0)[0], TOP + high + 16, size(fragment)) for fragment in fragments]
    for strategy, curve in curves.items():
        colour = COLOURS.get(strategy, "#9467bd")
        points = [at(fragment, curve[fragment]) for fragment in fragments if fragment in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 3"' if strategy.startswith("auto") else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return out


def legend(strategies):
    out = []
    for i, strategy in enumerate(strategies):
        out += [line(LEFT + 90 * i, 14, LEFT + 90 * i + 24, 14, COLOURS.get(strategy, "#9467bd")),
                text(LEFT + 90 * i + 30, 18, strategy, "start")]
    return out


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: plot_copy.py COPY.JSON...")
    rows = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            found = json.load(file).get("rows", [])
        if not found:
            sys.exit(f"{path} has no rows: it is to come from 'ucm-bench copy --json'")
        rows += found
    fragments = sorted({row["fragment"] for row in rows})
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    panels = [one for one in PANELS if "idle" in one[0].lower() or "busy_load" in rows[0]]
    high = 30 + (len(panels) + 1) // 2 * HEIGHT
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{high}" '
          f'viewBox="0 0 {2 * WIDTH} {high}" font-family="sans-serif" font-size="11">')
    print('<rect width="100%" height="100%" fill="white"/>')
    print("\n".join(legend(strategies)))
    for i, (title, unit, value) in enumerate(panels):
        curves = {one: {row["fragment"]: value(row) for row in rows if row["strategy"] == one} for one in strategies}
        print(f'<g transform="translate({i % 2 * WIDTH} {30 + i // 2 * HEIGHT})">')
        print("\n".join(panel(title, unit, curves, fragments)))
        print("</g>")
    print("</svg>")


if __name__ == "__main__":
    main()
