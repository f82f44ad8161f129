"""Writes a page as one HTML file without any request, and its numbers as JSON.

A file that is no such page is never replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError
from rayfed.record.atomic_files import write_text
from rayfed.report.page.charts import thin
from rayfed.report.page.parts import Figure, Page, Part, Section
from rayfed.report.style import DARK_PALETTE, PALETTE
from rayfed.terminal.console import stage
from rayfed.terminal.table_formats import Table
from rayfed.user_files import check_own

if TYPE_CHECKING:
    from jinja2 import Environment


GENERATOR = "RayFed report"
"""Name of the maker in the page and its JSON; files without it are never replaced."""
MOST_ROWS = 60
"""Largest number of rows of the table behind a figure; of more, evenly spaced ones are shown."""
MOST_COLUMNS = 40
"""The same for its columns."""


def html(page: Page, numbers: str = "") -> str:
    """The page: one HTML document that loads nothing.

    Args:
        numbers: `json_text(page)` where it was made already.
    """
    names = _names(page)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            names=names,
            generator=GENERATOR,
            css=_resource("page.css"),
            js=_resource("page.js"),
            light=PALETTE,
            dark=DARK_PALETTE,
            hover=_script(
                _json({names[id(part)]: _hover(part) for part in _parts(page) if isinstance(part, Figure)})
            ),
            twin=_script(numbers or json_text(page)),
            part_id=id,
            kind_of=lambda part: type(part).__name__,
            behind=behind,
            options=options,
        )
    )


def twin(page: Page) -> dict[str, Any]:
    """The numbers of the page as plain containers: each figure and table, with all its rows."""
    names = _names(page)

    def plain(sections: Sequence[Section]) -> list[dict[str, Any]]:
        shown = [(s.name, [part for part in s.parts if isinstance(part, Figure | Table)]) for s in sections]
        return [
            {"name": name, "parts": [_plain(part, names[id(part)]) for part in parts]}
            for name, parts in shown
        ]

    return {
        "generator": GENERATOR,
        "title": page.title,
        "about": page.subtitle,
        "runs": [dict(fact) for fact in page.facts],
        "sections": plain(page.sections),
        "chapters": [{"name": c.name, "sections": plain(c.sections)} for c in page.chapters],
    }


def json_text(page: Page) -> str:
    """The same as the text of a file."""
    return _json(twin(page)) + "\n"


def behind(figure: Figure) -> Table | None:
    """The table behind a figure, of which rows and columns are left out if there are many; None: none."""
    if not figure.columns:
        return None
    across = [0, *(1 + i for i in thin(len(figure.columns) - 1, MOST_COLUMNS))]
    down = thin(len(figure.rows), MOST_ROWS)
    rows = [[figure.rows[i][j] for j in across] for i in down]
    title = figure.title
    if len(down) < len(figure.rows) or len(across) < len(figure.columns):
        title += f" (evenly spaced rows and columns; the JSON has all {len(figure.rows)} rows)"
    return Table(title, [figure.columns[j] for j in across], rows)


def options(grid: Table, name: str) -> list[str]:
    """Values of a column of a table, in order of appearance, as text."""
    place = [head.name for head in grid.heads].index(name)
    return list(dict.fromkeys(row[place] for row in grid.texts[1:]))


def _parts(page: Page) -> Iterator[Part]:
    for sections in (page.sections, *(chapter.sections for chapter in page.chapters)):
        for section in sections:
            yield from section.parts


def _names(page: Page) -> dict[int, str]:
    """A name for every part that is unique on the page, by the part's identity."""
    return {id(part): f"part{number}" for number, part in enumerate(_parts(page), start=1)}


def _hover(figure: Figure) -> dict[str, Any]:
    """Data with which the script of the page names the point under the pointer."""
    return {"kind": figure.hover, **figure.places}


def _plain(part: Figure | Table, name: str) -> dict[str, Any]:
    heads = part.heads if isinstance(part, Table) else part.columns
    columns = [{"name": column.name, "holds": column.kind} for column in heads]
    return {
        "id": name,
        "title": part.title,
        "caption": part.caption,
        "columns": columns,
        "rows": part.rows,
    }


def _json(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


def _script(text: str) -> str:
    """JSON as it can stand in a script element."""
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Plain containers with None for floats that are not finite, and floats with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    loader = DictLoader({"page.html.j2": _resource("page.html.j2")})
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _resource(name: str) -> str:
    return resources.files("rayfed.report.page").joinpath(name).read_text(encoding="utf-8")


HTML, JSON, TEX = ".html", ".json", ".tex"
NAME = f"report{HTML}"
"""The file in the folder of a run."""


def command(path: Path) -> str:
    """The command that writes the page about a folder, to be shown to the user."""
    import shlex

    return f"python -m rayfed.report {shlex.quote(str(path))}"


def page_file(runs: Sequence[Path], out: Path | None) -> Path:
    """The file that is written.

    Args:
        runs: The folders.
        out: What the user asked for; None: `report.html` in the folder, or here for several folders.

    Raises:
        ConfigError: It does not end in .html, or is in no folder.
    """
    if out is None:
        return runs[0] / NAME if len(runs) == 1 else Path(NAME)
    if out.suffix != HTML:
        raise ConfigError(f"--out: {str(out)!r} does not end in {HTML}, as the name of the page has to")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(out.parent)!r}; make it first")
    return out


def write_report(
    runs: Sequence[Path],
    file: Path,
    names: Sequence[str] = (),
    against: str | None = None,
    margin: float | None = None,
) -> None:
    """Write the page about the runs in these folders, and a JSON file with the same numbers next to it.

    Where methods have several seeds, a file of LaTeX has the tables of means and of tested differences.

    Args:
        runs: Folders of runs, comparisons, folds, sweeps or reproduced tables.
        names: What the run in each folder is called (`page_of`).
        against: The method that the others are compared with (`page_of`).
        margin: Largest difference that counts as equally good (`page_of`).

    Raises:
        ConfigError: A folder holds no run, or there is a file that is no page of RayFed.
        DamagedError: A file in a folder cannot be read.
        StorageError: A file cannot be written.
    """
    from rayfed.report.page.several import latex_of, page_of

    twin, tables = file.with_suffix(JSON), file.with_suffix(TEX)
    for each in (file, twin, tables):
        check_own("--out", each, GENERATOR)
    stage("reading the runs")
    page = page_of(runs, names, against, margin)
    stage("writing the page")
    numbers = json_text(page)
    write_text(file, html(page, numbers))
    write_text(twin, numbers)
    if means := latex_of(page):
        write_text(tables, f"% {GENERATOR}; needs \\usepackage{{booktabs}}\n{means}")
