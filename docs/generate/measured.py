"""Finds the rows of a method in tables of other pages, and its cost in docs/method_cost.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from markdown.extensions.toc import slugify

DOCS = Path(__file__).resolve().parent.parent


def rows(page: str, names: set[str]) -> str:
    """The rows of the tables of a page that begin with one of these names, under links to their sections.

    Args:
        page: File name of the page in docs/.
        names: Spellings of the method in lower case.

    Returns:
        Markdown for a page one folder below the start of the site; empty: its tables have no such row.
    """
    blocks = []
    for heading, table in _tables((DOCS / page).read_text(encoding="utf-8")):
        found = [row for row in table[2:] if _name(row) in names]
        if found:
            link = f"From [{heading}](../{page}#{slugify(heading, '-')}):"
            blocks.append("\n".join([link, "", *table[:2], *found]))
    return "\n\n".join(blocks)


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
