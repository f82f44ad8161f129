"""Finds the rows of a method in tables of results, and its cost in docs/method_cost.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from markdown.extensions.toc import slugify

DOCS = Path(__file__).resolve().parent.parent


def rows(names: set[str]) -> str:
    """The rows of tables of results that begin with one of these names, under links to their sections.

    Args:
        names: Spellings of the method in lower case.

    Returns:
        Markdown for a page one folder below the start of the site; empty: no table has such a row.
    """
    blocks = []
    for file, page in pages():
        text = file.read_text(encoding="utf-8")
        for heading, table in _tables(text):
            if found := [row for row in table[2:] if _name(row) in names]:
                title = heading or text.partition("\n")[0].removeprefix("# ")
                anchor = f"#{slugify(heading, '-')}" if heading else ""
                link = f"From [{title}](../{page}{anchor}):"
                blocks.append("\n".join([link, "", *table[:2], *found]))
    return "\n\n".join(blocks)


def pages() -> list[tuple[Path, str]]:
    """The files with results, and their paths in the site."""
    measurements = sorted((DOCS.parent / "benchmarks" / "results").glob("*.md"))
    return [(DOCS / "results.md", "results.md"), *((file, f"results/{file.name}") for file in measurements)]


def cost(name: str) -> str:
    """Bytes that clients receive and send in a round, relative to FedAvg; empty: the method was not measured.

    Raises:
        KeyError: FedAvg itself was not measured.
    """
    with (DOCS / "method_cost.csv").open(encoding="utf-8", newline="") as file:
        measured = {row["algorithm"]: row for row in csv.DictReader(file)}
    if name not in measured:
        return ""
    row = measured[name]
    base = measured[row["base"]]
    lines = ["| | bytes a round | relative to FedAvg with the same tuning and model |", "|---|---:|---:|"]
    for key, title in (("bytes_up", "sent by all clients"), ("bytes_down", "received by all clients")):
        ratio = f"{int(row[key]) / int(base[key]):.2f}" if int(base[key]) else "-"
        lines.append(f"| {title} | {int(row[key]):,} | {ratio} |")
    where = f"Second round of three clients that hold all blocks, `{row['model']}`, `tuning={row['tuning']}`"
    command = "written by `python -m benchmarks.method_cost` into docs/method_cost.csv."
    return "\n".join([*lines, "", f"{where}; {command}"])


def _name(row: str) -> str:
    """The first cell of a row in lower case, without a remark in brackets."""
    return row.split("|")[1].partition(" (")[0].strip(" `*").lower()


def _tables(text: str) -> Iterator[tuple[str, list[str]]]:
    """Heading and lines of every table of a page."""
    heading = ""
    table: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            yield heading, table
            table = []
        if found := re.match(r"#{2,3} (.*)", line):
            heading = found[1]
