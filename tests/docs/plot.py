"""What tests/docs/board.py draws with: words, boxes, numbers with a unit, and lines over time."""

import math
import re
from xml.sax.saxutils import escape

SECONDS = 75  # of a time axis
# A unit: its base, the names of its steps, and how many of the first name the value 1 is.
UNITS = {"s": (1e3, (" µs", " ms", " s"), 1e6), "percentunit": (math.inf, ("%",), 100), "bytes": (1024, (" B", " KiB", " MiB", " GiB"), 1),
         "Bps": (1e3, (" B/s", " kB/s", " MB/s", " GB/s"), 1), "ops": (1e3, (" ops/s", " K ops/s"), 1),
         "reqps": (1e3, (" req/s", " K req/s"), 1), "short": (1e3, ("", " K", " Mil"), 1)}


def shown(value, unit):
    base, names, factor = UNITS[unit]
    value, at = value * factor, names.index(" s") if value == 0 and " s" in names else 0
    while abs(value) >= base * 0.9995 and at + 1 < len(names):
        value, at = value / base, at + 1
    digits = f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + names[at]


def text(x, y, words, kind="", width=math.inf, size=11, more=""):
    """Smaller where it would be wider."""
    wide = 0.64 if kind == "t" else 0.56  # of a letter of a wide font
    size = min(size, round(width / len(words) / wide, 1)) if width < math.inf else size
    more += (f' class="{kind}"' if kind else "") + (f' font-size="{size:g}"' if size != 11 else "")
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{escape(words)}</text>\n'


def box(x, y, width, height, more):
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" {more}/>\n'


class Plot:
    """The area of a panel with a time axis. high: the value at its top."""

    def __init__(self, x, y, width, height, high=1):
        self.x, self.y, self.width, self.height, self.high = x, y, width, height, high

    def at(self, second, value=0):
        return round(self.x + second / SECONDS * self.width), round(self.y + self.height * (1 - value / self.high), 1)

    def path(self, points, begin="M"):
        """Each point relative to the one before. Where a second has no value, there is a gap."""
        out, last, before = "", None, None
        for second, value in points:
            x, y = self.at(second, value)
            if last is None or abs(second - before) > 1:
                out += f"{'M' if last else begin}{x} {y:g}"
            else:
                out += f"h{x - last[0]}" if y == last[1] else f"l{x - last[0]} {round(y - last[1], 1):g}".replace(" -", "-")
            last, before = (x, y), second
        return re.sub(r"h\d+(?:h\d+)+", lambda run: f"h{sum(map(int, run[0][1:].split('h')))}", out)

    def times(self):
        for second in range(0, SECONDS + 1, SECONDS // 3):
            kind = "e" if second == SECONDS else "c" if second else "m"
            yield text(self.at(second)[0], self.y + self.height + 12, f"{second // 60}:{second % 60:02}", kind, size=10)

    def values(self, unit):
        lines = [self.at(0, n * self.high / 4)[1] for n in range(5)]
        yield '<path d="' + "".join(f"M{self.x} {y:g}h{self.width}" for y in lines) + '" class="g"/>\n'
        for n in (0, 2, 4):
            yield text(self.x - 4, lines[n] + 4, shown(n * self.high / 4, unit), "e", size=10)


def top_of(value, unit):
    """A round number that is not below."""
    if value <= 0:
        return 1
    base = 1024 ** math.floor(math.log(value, 1024)) if unit == "bytes" and value >= 1024 else 1
    power = 10 ** math.floor(math.log10(value / base)) * base
    return next(n * power for n in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 10.24) if n * power >= value * 0.9999)
