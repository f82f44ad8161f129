"""Writes the tables and the picture of docs/architecture.md from the import contracts in pyproject.toml.

python -m docs.layers
"""

from __future__ import annotations

import ast
import re
import tomllib
from html import escape
from pathlib import Path

from tests.rings import table as rings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "layers.svg"
WIDTH = 980  # pixels
ROW = 36  # pixels between the tops of two layers
MARGIN = 20  # pixels
NOTES = 180  # pixels from the left side to the description of a package


def layers() -> list[list[str]]:
    """Names of the modules and packages of each layer of `rayfed`, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in row.split("|")] for row in rows]


def described(name: str) -> str:
    """The first sentence of the docstring of a module or package of `rayfed`, without its final dot."""
    folder = ROOT / "rayfed" / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def table() -> str:
    """One row for each module or package, from the top layer to the bottom one."""
    rows = [f"| `{name}` | {described(name)} |" for layer in layers() for name in layer]
    return "\n".join(["| `rayfed.` | what it is |", "|---|---|", *rows])


def picture() -> str:
    """The layers as an SVG drawing: every layer imports from those below it only."""
    rows = [["tune: sweeps", "algorithms: one file for each method"], *layers()]
    height = 2 * MARGIN + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="15">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for place, row in enumerate(rows):
        width = (WIDTH - 2 * MARGIN) / len(row)
        for column, name in enumerate(row):
            colour = "#dbe7f3" if place else "#fde9c9"
            parts += box(MARGIN + column * width, MARGIN + place * ROW, width, colour, name)
            if len(row) == 1:
                note = described(name).replace("`", "")
                parts.append(label(NOTES, MARGIN + place * ROW, note, 'font-size="12" fill="#333"'))
    return "\n".join([*parts, "</svg>", ""])


def box(left: float, top: float, width: float, colour: str, text: str) -> list[str]:
    """A rectangle of the drawing with a text at its left side."""
    shape = f'<rect x="{left + 2:.0f}" y="{top}" width="{width - 4:.0f}" height="{ROW - 6}" rx="4" '
    return [f'{shape}fill="{colour}" stroke="#5b7a99"/>', label(left + 14, top, text, 'font-weight="bold"')]


def label(left: float, top: float, text: str, style: str) -> str:
    """A text in the row of the drawing that begins at `top`."""
    return f'<text x="{left:.0f}" y="{top + ROW / 2 + 2:.0f}" {style}>{escape(text)}</text>'


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, rows in (("rings", rings()), ("modules", table())):
        block = f"<!-- {name} -->\n{rows}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*<!-- /{name} -->", lambda _, new=block: new, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    PICTURE.write_text(picture())
