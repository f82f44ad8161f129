"""Writes the table of a job as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields

from rayfed.reproduce.results import FAILS, HOLDS, OPEN, Measure, PaperClaim, Reproduction, Value
from rayfed.terminal.fitting import fitted
from rayfed.terminal.table import Table

CLAIM_COLUMNS = (
    "setting",
    "measure",
    "the paper's order",
    "the paper's difference",
    "ours",
    "seeds",
    "p",
    "verdict",
)


def title_of(found: Reproduction) -> str:
    """The title of the table."""
    return f"{found.reference}, {found.where}: {found.title} ({found.scale} scale)"


def number(value: float | None, sign: bool = False) -> str:
    """A number with two digits after the point; large ones without; empty for None.

    >>> number(1.234), number(1.0, sign=True), number(152_000.0), number(None)
    ('1.23', '+1.00', '152,000', '')
    """
    if value is None:
        return ""
    digits = ",.0f" if abs(value) >= 10_000 else ".2f"
    return f"{value:{'+' if sign else ''}{digits}}"


def ours(value: Value) -> str:
    """Our mean and deviation over seeds."""
    deviation = "" if value.sd is None else f" ± {number(value.sd)}"
    return "-" if value.mean is None else number(value.mean) + deviation


def paper(value: Value) -> str:
    """The paper's number and its deviation."""
    deviation = "" if value.paper_sd is None else f" ± {number(value.paper_sd)}"
    return "-" if value.paper is None else number(value.paper) + deviation


def ranks(found: Reproduction, setting: str, measure: Measure) -> dict[str, int]:
    """Rows with our best (1) and second-best (2) mean, as they are printed; of one row, none."""
    values = [(v.row, v.mean) for v in _of(found, setting, measure) if v.mean is not None]
    levels = sorted({number(mean) for _, mean in values}, key=_as_number, reverse=measure.better == "higher")
    if len(levels) < 2:
        return {}
    return {row: levels.index(number(mean)) + 1 for row, mean in values if number(mean) in levels[:2]}


def _as_number(text: str) -> float:
    return float(text.replace(",", ""))


def _of(found: Reproduction, setting: str, measure: Measure) -> list[Value]:
    return [v for v in found.values if (v.setting, v.measure) == (setting, measure.name)]


def ranked_rows(found: Reproduction, setting: str) -> Iterator[tuple[str, list[tuple[Value, int]]]]:
    """Every row of a setting, with its value of each measure and their ranks: 1, 2, or 0 for others."""
    ranked = [ranks(found, setting, measure) for measure in found.measures]
    there = {v.row for v in found.values if v.setting == setting}
    for row in (name for name in found.rows if name in there):
        values = [found.value(setting, row, measure.name) for measure in found.measures]
        yield row, [(value, rank.get(row, 0)) for value, rank in zip(values, ranked, strict=True)]


def columns_of(measure: Measure) -> tuple[str, str, str]:
    """Titles of the three columns of a measure."""
    arrow = "higher is better" if measure.better == "higher" else "lower is better"
    return f"{measure.name} ({arrow})", "paper", "difference"


def claim_cells(claim: PaperClaim) -> tuple[str, ...]:
    """The cells of an ordering, in the order of `CLAIM_COLUMNS`."""
    p = "" if claim.p is None else f"{claim.p:.3f}"
    return (
        claim.setting,
        claim.measure,
        f"{claim.better} before {claim.worse}",
        number(claim.paper_difference, sign=True),
        number(claim.difference, sign=True) or "-",
        str(claim.seeds),
        p,
        claim.verdict,
    )


def verdicts(found: Reproduction) -> str:
    """Numbers of orderings that hold, do not hold, and are not decided, in words."""
    counts = [sum(c.verdict == kind for c in found.claims) for kind in (HOLDS, FAILS, OPEN)]
    return f"{counts[0]} hold, {counts[1]} do not hold, {counts[2]} are not decided"


def _table(found: Reproduction, setting: str) -> Table:
    """The rows of a setting, with our value, the paper's and the difference for each measure."""
    titles = [title for measure in found.measures for title in columns_of(measure)]
    rows: list[tuple[str, ...]] = []
    marks: dict[tuple[int, int], int] = {}
    for i, (row, values) in enumerate(ranked_rows(found, setting)):
        cells = [row, _seeds(found, setting, row)]
        for value, rank in values:
            marks[i, len(cells)] = rank
            cells += [ours(value), paper(value), number(value.difference, sign=True)]
        rows.append(tuple(cells))
    return Table(setting, ("row", "seeds", *titles), tuple(rows), ranks=marks)


def _orderings(found: Reproduction, title: str) -> Table:
    rows = tuple(claim_cells(claim) for claim in found.claims)
    return Table(title, CLAIM_COLUMNS, rows, left=frozenset({0, 1, 2, 7}))


def markdown(found: Reproduction) -> str:
    """The table, the orderings and the notes as Markdown; our best is bold, our second-best is underlined."""
    parts = [f"# {title_of(found)}\n", *(_table(found, setting).markdown("##") for setting in found.settings)]
    if found.claims:
        orderings = _orderings(found, "Orderings in the paper's numbers")
        parts.append(orderings.markdown("##", lead=f"{verdicts(found)}."))
    return (
        "\n".join([*(part.rstrip("\n") + "\n" for part in parts), *(f"- {note}" for note in found.notes)])
        + "\n"
    )


def text(found: Reproduction, width: int | None = None) -> str:
    """The table, the orderings and the notes for a terminal with lines of `width`; None: no limit."""
    titles = [title for measure in found.measures for title in (measure.name, "paper", "difference")]
    rows = [(setting, *row) for setting in found.settings for row in _table(found, setting).rows]
    parts = [Table(title_of(found), ("setting", "row", "seeds", *titles), tuple(rows)).text(width)]
    if found.claims:
        parts.append(_orderings(found, f"orderings in the paper's numbers: {verdicts(found)}").text(width))
    return "\n\n".join([*parts, "\n".join(fitted(note, width) for note in found.notes)])


def _seeds(found: Reproduction, setting: str, row: str) -> str:
    done = sum(
        (cell["setting"], cell["row"]) == (setting, row) and cell["sha256"] is not None
        for cell in found.cells
    )
    return str(done)


def csv_values(found: Reproduction) -> str:
    """One line for each setting, row and measure, as CSV, with the rule by which rounds are chosen."""
    return _csv(
        Value, ({**asdict(value), "selection": found.selection} for value in found.values), "selection"
    )


def csv_claims(found: Reproduction) -> str:
    """One line for each ordering, as CSV."""
    return _csv(PaperClaim, map(asdict, found.claims))


def _csv(kind: type, rows: Iterable[Mapping[str, object]], *more: str) -> str:
    """Objects of a dataclass, a line each, with further columns; empty cells for None."""
    columns = (*(field.name for field in fields(kind)), *more)
    cells = (tuple("" if row[name] is None else str(row[name]) for name in columns) for row in rows)
    return Table("", columns, tuple(cells)).csv()


def latex(found: Reproduction) -> str:
    """One `tabular` for each setting (package booktabs); best bold, second-best underlined."""
    columns = ("", *(title for measure in found.measures for title in (measure.name, "paper")))
    lines = [f"% {title_of(found)}", "% needs \\usepackage{booktabs}"]
    for setting in found.settings:
        rows: list[tuple[str, ...]] = []
        marks: dict[tuple[int, int], int] = {}
        for i, (row, values) in enumerate(ranked_rows(found, setting)):
            marks |= {(i, 2 * k + 1): rank for k, (_, rank) in enumerate(values)}
            rows.append((row, *(cell for value, _ in values for cell in (ours(value), paper(value)))))
        lines.append(Table(setting, columns, tuple(rows), ranks=marks).latex())
    return "\n".join(lines)


STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: auto; padding: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child, td.text { text-align: left; }
caption { text-align: left; font-weight: bold; }
"""


def page(found: Reproduction) -> str:
    """The table, the orderings and the notes as an HTML page that loads nothing."""
    title = html.escape(title_of(found))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>',
        f"<body><h1>{title}</h1>",
        *(_table(found, setting).html() for setting in found.settings),
    ]
    if found.claims:
        parts.append(_orderings(found, f"Orderings in the paper's numbers: {verdicts(found)}").html())
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    return "\n".join([*parts, f"<ul>{notes}</ul></body></html>"]) + "\n"
