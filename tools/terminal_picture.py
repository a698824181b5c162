"""Draws what a command prints as an SVG of a terminal: python tools/terminal_picture.py docs/plan.svg COMMAND

The picture in the README is made by `make picture` from the real command; a test compares its text with what
the command prints today.
"""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path

COLUMNS, WIDE, HIGH, EDGE = 80, 8.4, 18, 16
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def picture(command: str, printed: str) -> str:
    """Plain text in a dark window, the command first."""
    lines = [f"$ {command}", *printed.rstrip().splitlines()]
    width, height = COLUMNS * WIDE + 2 * EDGE, len(lines) * HIGH + 2 * EDGE
    rows = []
    for number, line in enumerate(lines):
        colour = "#8ae234" if number == 0 else "#e6e6e6"
        rows.append(
            f'<text x="{EDGE}" y="{EDGE + HIGH * (number + 0.75):g}" fill="{colour}" '
            f'textLength="{len(line) * WIDE:g}" lengthAdjust="spacingAndGlyphs">{escape(line)}</text>'
            if line
            else ""
        )
    drawn = "\n".join(filter(None, rows))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'font-family="{FONT}" font-size="14" xml:space="preserve">'
    )
    background = '<rect width="100%" height="100%" rx="8" fill="#1e1e1e"/>'
    return "\n".join([head, f"<title>{escape(command)}</title>", background, drawn, "</svg>", ""])


def main() -> int:
    target, *words = sys.argv[1:]
    shown = " ".join(f'"{word}"' if " " in word else word for word in words)
    printed = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False
    ).stdout
    Path(target).write_text(picture(shown, printed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
