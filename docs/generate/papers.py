"""The page of each paper: its tables and figures with commands, published numbers and what was chosen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from docs.generate import bibliography
from rayfed.config.compose import folder
from rayfed.config.papers import MINI, PaperTable, tables


def pages() -> dict[str, str]:
    """Text of the page of every paper and of the list of them, by its path in the site.

    The experiments about claims (benchmarks/results/claims) are those of no paper and have no page here.
    """
    papers: dict[str, list[PaperTable]] = {}
    for table in tables(folder()).values():
        papers.setdefault(table.name.partition("/")[0], []).append(table)
    papers = {name: found for name, found in papers.items() if any(table.small for table in found)}
    rows = [
        f"| [{name}]({name}.md) | {bibliography.citation(found[0].reference)} |"
        for name, found in papers.items()
    ]
    index = "\n".join([INDEX, "", "| name | paper |", "|---|---|", *rows, ""])
    return {"papers/index.md": index} | {
        f"papers/{name}.md": page(name, found) for name, found in papers.items()
    }


INDEX = """# Tables of the papers

Every table and figure of these papers is an experiment. Choose a paper; each of its tables has the command
that runs it below its title. A name that ends in `/mini` is the same matrix on data and models that ship with
RayFed, and needs no download:

```bash
python -m rayfed.reproduce fedra/table1 --scale mini --dry-run   # the cells and an estimate, runs nothing
python -m rayfed.reproduce fedra/table1 --scale mini             # all of it; goes on after a stop
python -m rayfed.run experiment=fedra/table1/mini row=FedRA      # one cell
```

[A paper's table](../many_runs.md#a-papers-table) says what the table shows, and what a row, a setting
and a scale are."""


def page(name: str, found: Sequence[PaperTable]) -> str:
    """The page of one paper.

    Args:
        name: File name of the paper in configs/papers.
        found: Its tables, and the experiments that repeat the rows of one of them.
    """
    reference = found[0].reference
    parts = [
        f"# `{name}`: tables and figures\n",
        f"[{reference}] {bibliography.citation(reference)}\n",
    ]
    parts += [section(table) for table in found if table.small]
    if others := [table for table in found if not table.small]:
        names = [f"- `experiment={table.name}`: the rows of {table.where}" for table in others]
        parts += ["## Other experiments\n", *names, ""]
    return "\n".join(parts)


def section(table: PaperTable) -> str:
    """One table or figure of a paper."""
    commands = [
        ["rayfed.reproduce", table.name, "--dry-run"],
        ["rayfed.reproduce", table.name, "--scale", MINI],
        ["rayfed.run", f"experiment={table.name}/{MINI}", f"row={next(iter(table.rows))}"],
    ]
    facts = {
        "Data": table.data,
        "Seeds": ", ".join(str(seed) for seed in table.seeds),
        "Selection": table.selection,
        "Figure": f"`{table.figure}`" if table.figure else "",
    }
    lines = [f"## {table.where}: {table.title} {{#{table.name.partition('/')[2]}}}", "", "```bash"]
    lines += [shlex.join(["python", "-m", *command]) for command in commands]
    lines += ["```", "", *(f"- {key}: {value}" for key, value in facts.items() if value), ""]
    for setting, rows in table.numbers.items():
        lines += [f"Published numbers, setting `{setting}`:", "", *numbers(table.measures, rows), ""]
    if table.choices:
        lines += [
            "What the paper leaves open, and what was chosen:",
            "",
            *(f"- {text}" for text in table.choices),
            "",
        ]
    return "\n".join(lines)


def numbers(measures: Sequence[str], rows: Mapping[str, Any]) -> list[str]:
    """Published numbers as a table; a pair is a mean and its standard deviation."""
    cells = {row: _cells(values) for row, values in rows.items()}
    width = max(len(values) for values in cells.values())
    titles = measures if len(measures) == width else [f"value {place + 1}" for place in range(width)]
    head = [f"| row | {' | '.join(titles)} |", "|---|" + "---:|" * width]
    return head + [f"| {row} | {' | '.join(values)} |" for row, values in cells.items()]


def _cells(values: Any) -> list[str]:
    """The cells of one row: of a mapping by unseen domain one cell for each of them."""
    if isinstance(values, Mapping):
        return [f"{name}: {', '.join(_number(value) for value in row)}" for name, row in values.items()]
    return [_number(value) for value in values]


def _number(value: Any) -> str:
    """A number, or a mean and its standard deviation."""
    return " ± ".join(f"{each:,}" for each in value) if isinstance(value, Sequence) else f"{value:,}"
