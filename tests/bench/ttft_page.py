#!/usr/bin/env python3
"""ttft.py's JSON as a table for docs/vllm.md (standard output) and as a plot: ttft_page.py ttft.json ttft.svg"""

import json
import sys
from xml.sax.saxutils import escape

COLOURS = {"recomputed": "#888888", "50 %": "#9ecae1", "80 %": "#4292c6", "100 %": "#08519c"}
WIDTH, HEIGHT, LEFT, TOP, BAR = 720, 300, 60, 40, 22


def table(rows):
    print("| tokens | hit | from | ms | sooner | at most | of bus + rest |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        rest = f"{r['at_most']:.1f} x | {r['of_ideal']:.2f}" if r["hit"] else "|"
        print(f"| {r['tokens']} | {r['hit']} % | {r['tier']} | {r['seconds'] * 1e3:.1f} | {r['sooner']:.1f} x | {rest} |")


def legend():
    """Words are short and far apart: a reader's font may be wider than ours."""
    words = ["recomputed", *(f"{name} from DRAM" if name == "100 %" else name for name in COLOURS if name != "recomputed")]
    for colour, word, x in zip(COLOURS.values(), words, (LEFT + 20, LEFT + 160, LEFT + 260, LEFT + 360)):
        yield (f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>'
               f'<text x="{x + 14}" y="17">{escape(word)}</text>')


def plot(rows, path):
    """Seconds relative to recomputing, from DRAM."""
    shown = [r for r in rows if r["tier"] != "NVMe"]
    lengths = sorted({r["tokens"] for r in shown})
    step = (WIDTH - LEFT) / len(lengths)
    scale = HEIGHT - TOP - 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in range(5):
        y = TOP + scale * i / 4
        out.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{100 - 25 * i} %</text>')
    for g, tokens in enumerate(lengths):
        group = sorted((r for r in shown if r["tokens"] == tokens), key=lambda r: r["hit"])
        whole = group[0]["seconds"]
        for i, r in enumerate(group):
            x, h = LEFT + g * step + 20 + i * (BAR + 8), scale * r["seconds"] / whole
            colour = COLOURS[f"{r['hit']} %" if r["hit"] else "recomputed"]
            out.append(f'<rect x="{x}" y="{TOP + scale - h}" width="{BAR}" height="{h}" fill="{colour}"/>'
                       f'<text x="{x + BAR / 2}" y="{TOP + scale - h - 4}" text-anchor="middle" font-size="9">'
                       f'{r["seconds"] * 1e3:.0f}</text>')
        out.append(f'<text x="{LEFT + g * step + 20 + 2 * (BAR + 8)}" y="{HEIGHT - 20}" text-anchor="middle">'
                   f'{tokens} tokens</text>')
    out += legend()
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 4}" font-size="10">time to first token, in ms over the bars</text></svg>')
    with open(path, "w") as f:
        f.write("\n".join(out) + "\n")


def main():
    with open(sys.argv[1]) as f:
        rows = [r for r in json.load(f)["rows"] if not r.get("one_request")]
    table(rows)
    plot(rows, sys.argv[2])


if __name__ == "__main__":
    main()
