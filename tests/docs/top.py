"""A screen of `ucmctl top`, taken from a terminal, and the picture of it. tests/docs/board.py runs it."""

import re
from xml.sax.saxutils import escape

from test_top import UCMCTL, Terminal

ROWS, COLUMNS = 32, 120  # the fewest columns that cut off no title
WIDE, HIGH, LEFT, HEAD = 7.2, 17, 14, 28  # of a character, a line, the margin and the bar above
ESCAPE = re.compile(r"\x1b\[[^A-Za-z]*[A-Za-z]")


def screen(socket):
    """Its lines: the third screen, so that what came before has left the rates."""
    terminal = Terminal(UCMCTL, "--socket", socket, "top", "--interval", "2", rows=ROWS, columns=COLUMNS)
    try:
        for _ in range(3):
            frame = terminal.until(r"lookup +.*?\x1b\[J")
        terminal.write("q")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    return [ESCAPE.sub("", line).rstrip() for line in frame.rpartition("\x1b[H")[2].split("\r\n")[:-1]]


def drawn(lines):
    """Dark in both schemes, as a terminal is. textLength keeps columns in line, whatever font a reader has."""
    width, height = round(COLUMNS * WIDE + 2 * LEFT), HEAD + HIGH * len(lines) + 18
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12" '
           'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,\'DejaVu Sans Mono\',monospace">\n'
           f"<title>A screen of ucmctl top</title>\n"
           f'<rect width="{width}" height="{height}" rx="6" fill="#1e2227"/>\n'
           f'<path d="M0 {HEAD - 4}H{width}" stroke="#444b54"/>\n'
           f'<text x="{width / 2:g}" y="17" text-anchor="middle" fill="#9aa4b0">$ ucmctl top</text>\n'
           '<g fill="#e2e6ea" xml:space="preserve">\n')
    for at, line in enumerate(lines):
        heads = ' font-weight="bold"' if at == 0 or re.match(" *(TENANT|NS) ", line) else ""
        if line:
            yield (f'<text x="{LEFT}" y="{HEAD + HIGH * (at + 1)}" textLength="{len(line) * WIDE:.1f}" '
                   f'lengthAdjust="spacingAndGlyphs"{heads}>{escape(line)}</text>\n')
    yield "</g>\n</svg>\n"
