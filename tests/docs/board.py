#!/usr/bin/python3
"""Draws docs/board.svg, which is the board of config/observe over a minute of work, and docs/top.svg, a screen of `ucmctl top` in it.

A daemon serves replays of ucm-bench, and a real Prometheus asks it each second. The queries of every panel then run as Grafana runs them.
Nothing is drawn that no query answered. $UCMD, $UCMCTL and $UCM_BENCH name other programs than those in build/.

board.py FILE leaves the answers in FILE. If FILE is there, it draws from them and runs nothing."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from xml.sax.saxutils import escape

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/integration"))
sys.dont_write_bytecode = True

import top  # noqa: E402
from daemon import UCMD, until  # noqa: E402
from plot import SECONDS, Plot, box, shown, text, top_of  # noqa: E402
from test_observe import OBSERVE, Prometheus, address_of, panels_of, serving  # noqa: E402
from test_top import UCM_BENCH  # noqa: E402

SCRAPE = "1s"
TIMES = {"__interval": "1s", "__rate_interval": "4s", "__range": f"{SECONDS}s"}  # as Grafana has them for that scrape interval
BATCH = (22, 56)  # when the second tenant works
TOP_AT = 40
NOBODY = 65534
OPTIONS = {"metrics.listen": "127.0.0.1:9471", "arena.size": "32MiB", "arena.slab": "4MiB", "nvme.size": "128MiB",
           "shared.gc_interval": "5s"}

# ---- the run ----


def replay(stack, daemon, model, seed, user):
    words = ["--speed", "200", "--limit", "1000000", "--model", model, "--seed", seed]
    process = subprocess.Popen([UCM_BENCH, "--socket", daemon.socket, "--quiet", "replay", *words], stdout=subprocess.DEVNULL, user=user)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def answers(board):
    """Of one run: what each panel's queries answer, by its id, and the screen of top."""
    us = os.getuid()
    other = NOBODY if us == 0 else us
    tenants = f"chat uid:{us}" + (f", batch uid:{other}" if us == 0 else "")
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="root."))
        backend = pathlib.Path(UCMD).parent / "ucmd-backend-directory"
        roots = f"process:kv capacity=2GiB write={root} buffer=8MiB -- {backend} {root}"
        daemon = serving(config=f"tenants: [{tenants}]\n", **OPTIONS, **{"shared.roots": roots})
        stack.callback(daemon.stop)
        assert " no-listener " not in daemon.log(), daemon.log()
        prometheus = Prometheus(address_of(daemon), SCRAPE)
        stack.callback(prometheus.stop)
        until(lambda: prometheus.api("query", query="ucmd_uptime_seconds")["result"], prometheus.said)
        begin = time.time()

        def wait(seconds):
            time.sleep(max(begin + seconds - time.time(), 0))
        wait(4)
        chat = replay(stack, daemon, "chat-8b", "1", us)
        wait(BATCH[0])
        batch = replay(stack, daemon, "batch-70b", "2", other)
        wait(TOP_AT)
        lines = top.screen(daemon.socket)
        wait(BATCH[1])
        assert batch.poll() is None, "it ended early"
        batch.terminate()
        wait(SECONDS + 1)
        assert chat.poll() is None, "it ended early"
        panels = {str(panel["id"]): list(series_of(prometheus, panel, begin, board)) for panel in panels_of(board)}
        return {"top": lines, "panels": panels}


def series_of(prometheus, panel, begin, board):
    """Each series: its name, and points of seconds and a value."""
    values = TIMES | {v["name"]: v.get("allValue") or v.get("query") for v in board["templating"]["list"]}
    for target in panel.get("targets", []):
        query = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: values[m[1] or m[2]], target["expr"])
        if target.get("instant"):
            found = prometheus.api("query", query=query, time=begin + SECONDS)["result"]
        else:
            found = prometheus.api("query_range", query=query, start=begin, end=begin + SECONDS, step=1)["result"]
        for result in found:
            name = re.sub(r"{{(\w+)}}", lambda m, of=result["metric"]: of.get(m[1], m[1]), target["legendFormat"])
            points = [(round(at - begin), float(value)) for at, value in result.get("values") or [result["value"]]]
            yield name, [p for p in points if math.isfinite(p[1])]


# ---- the picture ----

CELL_X, CELL_Y, HEAD, GAP, LINE = 45, 22, 62, 3, 12
COLOURS = ("#3b9b46", "#c98a00", "#3b7dd8", "#e0661b", "#d0384d", "#8d5bc0", "#149a9a", "#b0578a")
NAMED = {"green": COLOURS[0], "yellow": COLOURS[1], "blue": COLOURS[2], "red": COLOURS[4]}
STYLE = """<style>
text{fill:#24292f}.m,.e,.c{fill:#59636e}.e{text-anchor:end}.c,.v{text-anchor:middle}.t{font-weight:bold}
.b{fill:#f0f2f5}.p{fill:#fff;stroke:#d5dae0}.g{stroke:#e4e8ec;fill:none}.u{fill:#e4e8ec}
.l{fill:none;stroke-width:1.3;stroke-linejoin:round}.a{fill-opacity:.3}
@media(prefers-color-scheme:dark){text{fill:#dfe3e8}.m,.e,.c{fill:#9aa4b0}
.b{fill:#111418}.p{fill:#1a1e23;stroke:#30363d}.g{stroke:#2b3138}.u{fill:#2b3138}}
</style>
"""


def timeseries(panel, series, x, y, width, height):
    defaults = panel["fieldConfig"]["defaults"]
    unit, stacked = defaults["unit"], defaults["custom"]["stacking"]["mode"] == "normal"
    under, below, lines = {}, [], []
    for _, points in series:
        below.append([(at, under.get(at, 0)) for at, _ in points])
        lines.append([(at, under.get(at, 0) + value) for at, value in points])
        under.update(lines[-1] if stacked else ())
    high = defaults.get("max") or top_of(max(value for points in lines for _, value in points), unit)
    plot = Plot(x + 64, y + 24, width - 76, height - 46 - LINE * (1 + len(series)), high)
    yield from plot.values(unit)
    yield from plot.times()
    for n, points in reversed(list(enumerate(lines))):
        if stacked and any(value for _, value in series[n][1]):
            yield f'<path d="{plot.path(points)}{plot.path(below[n][::-1], "L")}z" class="a" fill="{COLOURS[n]}"/>\n'
        yield f'<path d="{plot.path(points)}" class="l" stroke="{COLOURS[n]}"/>\n'
    at, right = plot.y + plot.height + 16 + LINE, x + width - 12
    yield text(right - 78, at, "Last *", "e") + text(right, at, "Max", "e")
    for n, (name, points) in enumerate(series):
        at += LINE
        yield box(x + 10, at - 5, 12, 3, f'fill="{COLOURS[n]}"') + text(x + 27, at, name, width=width - 168)
        yield text(right - 78, at, shown(points[-1][1], unit), "e") + text(right, at, shown(max(v for _, v in points), unit), "e")


def stat(panel, series, x, y, width, height):
    defaults, value = panel["fieldConfig"]["defaults"], series[0][1][-1][1]
    colour = [step["color"] for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]][-1]
    yield text(x + width / 2, y + height / 2 + 20, shown(value, defaults["unit"]), "v", width * 0.95, 34, f' style="fill:{NAMED[colour]}"')


def state_timeline(panel, series, x, y, width, height):
    states = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    plot = Plot(x + 170, y + 26, width - 182, height - 62)
    high, seen = plot.height / len(series), {}
    yield from plot.times()
    for n, (name, points) in enumerate(series):
        yield text(x + 10, plot.y + high * (n + 0.5) + 4, name, width=155)
        for value, run in itertools.groupby(points, lambda point: f"{point[1]:.0f}"):
            left, *_, right = [plot.at(min(at, SECONDS))[0] for at, _ in run for at in (at, at + 1)]
            seen[value] = f'fill="{NAMED[states[value]["color"]]}"'
            yield box(left, plot.y + high * (n + 0.1), right - left, high * 0.8, seen[value])
    for n, value in enumerate(sorted(seen)):
        yield box(x + 10 + 90 * n, y + height - 14, 12, 3, seen[value]) + text(x + 27 + 90 * n, y + height - 9, states[value]["text"])


def bargauge(panel, series, x, y, width, height):
    high = (height - 30) / len(series)
    for n, (name, points) in enumerate(series):
        at, value, wide = y + 26 + n * high, points[-1][1], width - 125
        yield text(x + 10, at + high / 2 + 4, name) + box(x + 55, at + 3, wide, high - 6, 'class="u"')
        yield box(x + 55, at + 3, wide * value, high - 6, f'fill="{COLOURS[5]}"')
        yield text(x + width - 62, at + high / 2 + 4, shown(value, panel["fieldConfig"]["defaults"]["unit"]))


def heatmap(panel, series, x, y, width, height):
    """A row a bucket: what it counts and the one below does not. A column is three seconds. Rows of zeros at both ends are left out."""
    bounds, columns = sorted((float(name), dict(points)) for name, points in series), range(2, SECONDS, 3)
    counts = [(le, [max(points.get(at, 0) - less.get(at, 0), 0) for at in columns])
              for (_, less), (le, points) in zip([(0, {}), *bounds], bounds)]
    used = [n for n, (_, row) in enumerate(counts) if any(row)]
    counts = counts[used[0]:used[-1] + 1]
    plot, most = Plot(x + 64, y + 26, width - 76, height - 46), max(max(row) for _, row in counts)
    wide, high, shades = plot.width / len(columns), plot.height / len(counts), {}
    yield from plot.times()
    for n, (le, row) in enumerate(counts):
        at = plot.y + plot.height - high * (n + 1)
        yield text(plot.x - 4, at + high / 2 + 4, shown(le, panel["options"]["yAxis"]["unit"]), "e", size=10)
        for column, count in enumerate(row):
            if count:
                cell = f"M{plot.x + wide * column:.0f} {at:.0f}h{wide - 1:.0f}v{high - 1:.0f}h-{wide - 1:.0f}z"
                shades.setdefault(math.ceil(8 * math.sqrt(count / most)), []).append(cell)
    for shade, cells in sorted(shades.items()):
        yield f'<path d="{"".join(cells)}" fill="{COLOURS[3]}" opacity="{shade / 8}"/>\n'


KINDS = {"timeseries": timeseries, "stat": stat, "state-timeline": state_timeline, "bargauge": bargauge, "heatmap": heatmap}


def placed(board):
    """Each panel in the grid, moved up to the one above it, as Grafana moves it."""
    ends = [0] * 24
    for panel in sorted(panels_of(board), key=lambda p: (p["gridPos"]["y"], p["gridPos"]["x"])):
        x, wide, high = (panel["gridPos"][name] for name in "xwh")
        y = max(ends[x:x + wide])
        ends[x:x + wide] = [y + high] * wide
        yield panel, x * CELL_X + GAP, HEAD + y * CELL_Y + GAP, wide * CELL_X - 2 * GAP, high * CELL_Y - 2 * GAP


def drawn(board, panels):
    width, height = 24 * CELL_X, max(y + high for _, _, y, _, high in placed(board)) + 2 * GAP
    fields = [f"{v['label']}: {v['query'] if v['type'] == 'textbox' else 'All'}"
              for v in board["templating"]["list"] if v["type"] != "datasource"]
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
           f"<title>{escape(board['title'])}</title>\n{STYLE}" + box(0, 0, width, height, 'class="b"'))
    yield text(10, 24, board["title"], "t", size=17) + text(width - 10, 24, "; ".join(fields), "e")
    yield text(10, 46, f"{SECONDS} s of ucm-bench replay on one host. Drawn by a script from the board's queries; "
                       "Grafana's own look differs.", "m")
    for panel, x, y, wide, high in placed(board):
        if panel["type"] == "row":
            yield text(x + 6, y + 13, panel["title"], "t", size=14)
            continue
        yield box(x, y, wide, high, 'class="p" rx="3"') + text(x + 8, y + 15, panel["title"], "t", wide - 12, 12)
        series = [s for s in panels[str(panel["id"])] if s[1]]
        if series:
            yield from KINDS[panel["type"]](panel, series, x, y, wide, high)
        else:
            yield text(x + wide / 2, y + high / 2 + 8, "no data", "c")
    yield "</svg>\n"


def main(kept=None):
    board = json.loads((OBSERVE / "ucmd-board.json").read_text(encoding="utf-8"))
    if kept and os.path.exists(kept):
        found = json.loads(pathlib.Path(kept).read_text(encoding="utf-8"))
    else:
        found = answers(board)
        pathlib.Path(kept or os.devnull).write_text(json.dumps(found), encoding="utf-8")
    for name, parts in (("board", drawn(board, found["panels"])), ("top", top.drawn(found["top"]))):
        (TOP / f"docs/{name}.svg").write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
