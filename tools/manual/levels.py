"""Drawing of the package's levels for docs/architecture.md, from tools/import_graph.py.

python tools/manual/levels.py       write docs/images/levels.svg
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # for use as a script

from import_graph import LEVELS, PACKAGE  # noqa: E402

DRAWING = ROOT / "docs" / "images" / "levels.svg"
WIDTH, ROW, GAP, LETTER = 860, 46, 10, 8.6  # pixels
STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
.level { fill: #59636e; text-anchor: start; font-size: 12px; }
rect { fill: #ddf4ff; stroke: #54aeff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .level { fill: #9198a1; } rect { fill: #12263f; stroke: #388bfd; }
}"""


def svg() -> str:
    """Return the drawing: a row of boxes for each level, the lowest at the bottom."""
    height = ROW * len(LEVELS) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Levels of selftask: each package imports only what is below it</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, names in enumerate(LEVELS):
        top = height - ROW * (number + 1)
        lines.append(f'<text class="level" x="4" y="{top + 21}">{number}</text>')
        lines += _row(sorted(names), top)
    return "\n".join([*lines, "</svg>", ""])


def _row(names: list[str], top: int) -> list[str]:
    """Return the boxes of one level, centered."""
    widths = [round(len(name) * LETTER) + 24 for name in names]
    left = (WIDTH - sum(widths) - GAP * (len(names) - 1)) // 2
    lines = []
    for name, width in zip(names, widths, strict=True):
        lines.append(f'<rect x="{left}" y="{top}" width="{width}" height="32" rx="6"/>')
        lines.append(f'<text x="{left + width // 2}" y="{top + 21}">{escape(name)}</text>')
        left += width + GAP
    return lines


def packages() -> list[tuple[int, str, str]]:
    """Return level, name and first line of the docstring of every package and module."""
    rows = []
    for number, names in enumerate(LEVELS):
        for name in sorted(names):
            folder, file = PACKAGE / name / "__init__.py", PACKAGE / f"{name}.py"
            path = folder if folder.is_file() else file
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append((number, name, doc.partition("\n")[0]))
    return rows


if __name__ == "__main__":
    DRAWING.write_text(svg(), encoding="utf-8")
    print(f"wrote {DRAWING.relative_to(ROOT)}")
