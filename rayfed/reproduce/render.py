"""Writes the table of a job as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields

from rayfed.report.table import Table
from rayfed.reproduce.results import FAILS, HOLDS, OPEN, Measure, PaperClaim, Reproduction, Value
from rayfed.terminal.fitting import fitted

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


def markdown(found: Reproduction) -> str:
    """The table, the orderings and the notes as Markdown; our best is bold, our second-best is underlined."""
    lines = [f"# {title_of(found)}", ""]
    for setting in found.settings:
        lines += [f"## {setting}", "", *_markdown_head(found.measures)]
        for row, values in ranked_rows(found, setting):
            cells = [row, _seeds(found, setting, row)]
            for value, rank in values:
                text = {1: "**{}**", 2: "<u>{}</u>"}.get(rank, "{}").format(ours(value))
                cells += [text, paper(value), number(value.difference, sign=True)]
            lines.append(_line(cells))
        lines.append("")
    if found.claims:
        lines += ["## Orderings in the paper's numbers", "", f"{verdicts(found)}.", ""]
        lines += [_line(CLAIM_COLUMNS), _line(["---"] * 3 + ["---:"] * 4 + ["---"])]
        lines += [_line(claim_cells(claim)) for claim in found.claims]
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in found.notes)]) + "\n"


def _markdown_head(measures: Sequence[Measure]) -> list[str]:
    titles = [title for measure in measures for title in columns_of(measure)]
    return [_line(["row", "seeds", *titles]), _line(["---", "---:", *["---:"] * len(titles)])]


def text(found: Reproduction, width: int | None = None) -> str:
    """The table, the orderings and the notes for a terminal with lines of `width`; None: no limit."""
    titles = [
        "setting",
        "row",
        "seeds",
        *(title for m in found.measures for title in (m.name, "paper", "difference")),
    ]
    lines = []
    for setting in found.settings:
        for row, values in ranked_rows(found, setting):
            cells = [c for v, _ in values for c in (ours(v), paper(v), number(v.difference, sign=True))]
            lines.append((setting, row, _seeds(found, setting, row), *cells))
    parts = [Table(title_of(found), tuple(titles), tuple(lines)).text(width)]
    if found.claims:
        claims = tuple(claim_cells(claim) for claim in found.claims)
        parts.append(
            Table(f"orderings in the paper's numbers: {verdicts(found)}", CLAIM_COLUMNS, claims).text(width)
        )
    return "\n\n".join([*parts, "\n".join(fitted(note, width) for note in found.notes)])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _seeds(found: Reproduction, setting: str, row: str) -> str:
    done = sum(
        (cell["setting"], cell["row"]) == (setting, row) and cell["sha256"] is not None
        for cell in found.cells
    )
    return str(done)


def csv_values(found: Reproduction) -> str:
    """One line for each setting, row and measure, as CSV, with the rule by which rounds are chosen."""
    names = [field.name for field in fields(Value)]
    return _csv([*names, "selection"], [{**asdict(v), "selection": found.selection} for v in found.values])


def csv_claims(found: Reproduction) -> str:
    """One line for each ordering, as CSV."""
    return _csv([field.name for field in fields(PaperClaim)], [asdict(claim) for claim in found.claims])


def _csv(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def escaped(text: str) -> str:
    r"""A text for LaTeX.

    >>> escaped("q_1 & 5 %")
    'q\\_1 \\& 5 \\%'
    """
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def latex(found: Reproduction) -> str:
    """One `tabular` for each setting (package booktabs); best bold, second-best underlined."""
    lines = [f"% {title_of(found)}", "% needs \\usepackage{booktabs}"]
    for setting in found.settings:
        heads = [f"{escaped(m.name)} & paper" for m in found.measures]
        lines += [f"% {setting}", f"\\begin{{tabular}}{{l{'rr' * len(found.measures)}}}", "\\toprule"]
        lines += [" & ".join(["", *heads]) + " \\\\", "\\midrule"]
        for row, values in ranked_rows(found, setting):
            cells = [escaped(row)]
            for value, rank in values:
                text = ours(value).replace("±", "$\\pm$")
                text = {1: f"\\textbf{{{text}}}", 2: f"\\underline{{{text}}}"}.get(rank, text)
                cells += [text, paper(value).replace("±", "$\\pm$")]
            lines.append(" & ".join(cells) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", ""]
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
        *(_html_table(found, setting) for setting in found.settings),
    ]
    if found.claims:
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in CLAIM_COLUMNS)
        rows = (
            "<tr>"
            + "".join(f'<td class="text">{html.escape(cell)}</td>' for cell in claim_cells(claim))
            + "</tr>"
            for claim in found.claims
        )
        caption = f"Orderings in the paper's numbers: {verdicts(found)}"
        parts.append(_html(html.escape(caption), head, rows))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    return "\n".join([*parts, f"<ul>{notes}</ul></body></html>"]) + "\n"


def _html_table(found: Reproduction, setting: str) -> str:
    titles = ["row", "seeds", *(title for measure in found.measures for title in columns_of(measure))]
    rows = []
    for row, values in ranked_rows(found, setting):
        cells = [f'<th scope="row">{html.escape(row)}</th>', f"<td>{_seeds(found, setting, row)}</td>"]
        for value, rank in values:
            text = {1: "<b>{}</b>", 2: "<u>{}</u>"}.get(rank, "{}").format(ours(value))
            cells += [
                f"<td>{cell}</td>" for cell in (text, paper(value), number(value.difference, sign=True))
            ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)
    return _html(html.escape(setting), head, rows)


def _html(caption: str, head: str, rows: Iterable[str]) -> str:
    body = "".join(rows)
    return (
        f'<div class="wide"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
