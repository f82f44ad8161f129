"""Compares the finished cells of a table with the paper's numbers, and tests each of the paper's orderings.

The result is what `reproduction.json` holds; it is written as Markdown, CSV, LaTeX and HTML.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from rayfed.config import papers
from rayfed.config.papers import PaperTable
from rayfed.experiment.study.paired_tests import mean_and_error, p_of_t
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import exceeds_adapter_gain, head_notes
from rayfed.reproduce.cell_scores import (
    ADDED,
    EXAMPLES,
    FINAL,
    HALF,
    STEPS,
    WITHOUT,
    Folders,
    better,
    rule_of,
    unit,
)
from rayfed.reproduce.table_study import TableCell, TableStudy, is_harmless
from rayfed.terminal.table_formats import Table, fit_width

FORMAT = 1
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of the table: what is read from a run, which value is better, and its unit."""

    name: str
    score: str
    better: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number of the table.

    Attributes:
        setting, row, measure: What it belongs to.
        seeds: Number of finished seeds.
        mean: Mean over the seeds; None: no seed is finished, or a run does not have the score.
        sd: Sample standard deviation over the seeds; None for fewer than two.
        paper, paper_sd: The paper's number and its deviation; None: it prints none.
        paper_setting: Setting of the paper whose number it is; None: there is no number.
        difference: Ours minus the paper's.
    """

    setting: str
    row: str
    measure: str
    seeds: int
    mean: float | None
    sd: float | None
    paper: float | None
    paper_sd: float | None
    paper_setting: str | None
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """An ordering in the paper's numbers: by this measure, one row is better than another one.

    Attributes:
        setting, measure: What was compared.
        better, worse: The rows, as the paper orders them.
        paper_difference: Better minus worse in the paper.
        difference: The same in our runs, mean over the seeds that both rows have; None: there is none.
        seeds: Number of these seeds.
        p: Two-sided p-value of the paired t-test over them; None for fewer than two, or without a difference.
        verdict: holds, does not hold, or not decided.
    """

    setting: str
    measure: str
    better: str
    worse: str
    paper_difference: float
    difference: float | None
    seeds: int
    p: float | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table of a paper and ours; the keys of `reproduction.json`, which docs/many_runs.md describes."""

    format: int
    experiment: str
    scale: str
    reference: str
    where: str
    title: str
    overrides: Sequence[str]
    rows: Sequence[str]
    settings: Sequence[str]
    seeds: Sequence[int]
    measures: Sequence[Measure]
    selection: str
    cells: Sequence[Mapping[str, Any]]
    values: Sequence[Value]
    claims: Sequence[PaperClaim]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def value(self, setting: str, row: str, measure: str) -> Value:
        """The number of a cell."""
        key = (setting, row, measure)
        return next(v for v in self.values if (v.setting, v.row, v.measure) == key)


MUCH = 1.1
"""From this ratio of examples on, rows of a table are said to train unequally often."""

LEVEL = 0.05
"""Level of significance of the test of an ordering."""


@dataclass(frozen=True, kw_only=True)
class FinishedCell:
    """A finished cell of the table.

    Attributes:
        sha256: Digest of its final tensors.
        scores: Its scores by measure, in percent where the score is a share.
    """

    sha256: str
    scores: Mapping[str, float]


Finished = Mapping[TableCell, FinishedCell]

CellFolders = Mapping[TableCell, Folders]
"""Folders of the runs of each cell."""


def measures_of(asked: TableStudy) -> tuple[Measure, ...]:
    """The measures of a table; where the paper prints no numbers, the mean over the domains.

    What the table has no score for (`papers.PaperTable.scores`) is read from no run and stays empty.
    """
    names = {name: asked.table.scores.get(name, "") for name in asked.table.measures}
    if not names:
        folds = asked.first.protocol == "leave_one_out"
        score = "generalization" if folds else "accuracy_domain"
        names = {"mean over held-out domains" if folds else "mean over domains": score}
    return tuple(
        Measure(name=name, score=score, better=better(score), unit=unit(score))
        for name, score in names.items()
    )


def compare(asked: TableStudy, finished: Finished, folders: CellFolders | None = None) -> Reproduction:
    """The table, from the cells that are finished.

    Args:
        finished: The finished cells.
        folders: Folders of the runs of the cells; None: these are not known.
    """
    folders = folders or {}
    measures = measures_of(asked)
    by_seed = _by_seed(asked, finished)
    values = tuple(
        _value(asked, setting, row, place, measure.name, by_seed[setting, row, measure.name])
        for setting in asked.settings
        for row in asked.rows
        for place, measure in enumerate(measures)
        if (setting, row, measure.name) in by_seed
    )
    claims = tuple(
        claim
        for setting in asked.settings
        for measure in measures
        if measure.score
        for claim in _claims(
            measure, [v for v in values if (v.setting, v.measure) == (setting, measure.name)], by_seed
        )
    )
    table = asked.table
    return Reproduction(
        format=FORMAT,
        experiment=table.name,
        scale=asked.scale,
        reference=table.reference,
        where=table.where,
        title=table.title,
        overrides=asked.overrides,
        rows=asked.rows,
        settings=asked.settings,
        seeds=asked.seeds,
        measures=measures,
        selection=rule_of(asked.first),
        cells=tuple(_cell(asked.path, cell, finished, folders.get(cell, {})) for cell in asked.configs),
        values=values,
        claims=claims,
        notes=tuple(_notes(asked, values, finished, folders)),
    )


def matching_setting(table: PaperTable, setting: str, scale: str) -> str:
    """The paper's setting whose numbers stand next to ours; empty: the paper prints none.

    It has the same name; at mini scale, where data sets differ, it is else the first one whose name contains
    ours, else the first one.
    """
    if setting in table.numbers or not table.numbers:
        return setting if table.numbers else ""
    if scale == papers.PAPER:
        return ""
    return next((name for name in table.numbers if setting in name), next(iter(table.numbers)))


def _by_seed(asked: TableStudy, finished: Finished) -> dict[tuple[str, str, str], dict[int, float]]:
    """Score by seed of every setting, row and measure; some cells of the paper's table may be left out."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for cell in asked.configs:
        scores = finished[cell].scores if cell in finished else {}
        for measure in measures_of(asked):
            seeds = found.setdefault((cell.setting, cell.row, measure.name), {})
            if measure.name in scores:
                seeds[cell.seed] = scores[measure.name]
    return found


def _value(
    asked: TableStudy, setting: str, row: str, place: int, measure: str, seeds: Mapping[int, float]
) -> Value:
    where = matching_setting(asked.table, setting, asked.scale)
    paper, paper_sd = _published_number(asked.table.numbers.get(where, {}).get(row), place)
    ours = list(seeds.values())
    mean = fmean(ours) if ours else None
    return Value(
        setting=setting,
        row=row,
        measure=measure,
        seeds=len(ours),
        mean=mean,
        sd=stdev(ours) if len(ours) > 1 else None,
        paper=paper,
        paper_sd=paper_sd,
        paper_setting=None if paper is None else where,
        difference=None if mean is None or paper is None else mean - paper,
    )


def _published_number(numbers: Any, place: int) -> tuple[float | None, float | None]:
    """The paper's number at this place and its deviation; of several numbers by domain, the last one."""
    if isinstance(numbers, Mapping):
        numbers = [by_domain[-1] for by_domain in numbers.values()]
    if not numbers or place >= len(numbers):
        return None, None
    number = numbers[place]
    mean, sd = number if isinstance(number, list) else (number, None)
    return float(mean), None if sd is None else float(sd)


def _claims(
    measure: Measure, values: Sequence[Value], by_seed: Mapping[tuple[str, str, str], Mapping[int, float]]
) -> Iterator[PaperClaim]:
    """Claims of the paper's numbers in a setting: the best row beats each, and each beats the next."""
    sign = 1 if measure.better == "higher" else -1
    ranked = sorted((v for v in values if v.paper is not None), key=lambda v: -sign * (v.paper or 0.0))
    pairs = [(ranked[0], other) for other in ranked[1:]] + list(itertools.pairwise(ranked[1:]))
    for first, second in pairs:
        assert first.paper is not None
        assert second.paper is not None
        if first.paper == second.paper:
            continue
        seeds = [by_seed[v.setting, v.row, v.measure] for v in (first, second)]
        common = sorted(seeds[0].keys() & seeds[1].keys())
        ours = [seeds[0][seed] - seeds[1][seed] for seed in common]
        verdict, p = judge([sign * difference for difference in ours])
        yield PaperClaim(
            setting=first.setting,
            measure=measure.name,
            better=first.row,
            worse=second.row,
            paper_difference=first.paper - second.paper,
            difference=fmean(ours) if ours else None,
            seeds=len(ours),
            p=p,
            verdict=verdict,
        )


def judge(differences: Sequence[float]) -> tuple[str, float | None]:
    """Whether a row is better than another one, by a two-sided paired t-test over seeds.

    Args:
        differences: By seed, how much better the row is; negative: it is worse.

    Returns:
        holds (p below `LEVEL`, better), does not hold (p below it, worse) or not decided; and p, which is
        None for fewer than two seeds or where all differences are zero.
    """
    if len(differences) < 2 or not any(differences):
        return OPEN, None
    mean, error = mean_and_error(np.asarray(differences))
    p = p_of_t(mean / error, len(differences)) if error else 0.0  # equal differences have no deviation
    if p >= LEVEL:
        return OPEN, p
    return (HOLDS if fmean(differences) > 0 else FAILS), p


def _cell(path: Path, cell: TableCell, finished: Finished, folders: Folders) -> dict[str, Any]:
    """A cell as plain values; folders are relative to that of the study."""
    places = {part: folder.relative_to(path.absolute()).as_posix() for part, folder in folders.items()}
    done = finished.get(cell)
    return {
        **cell._asdict(),
        **({"path": places[""]} if "" in places else {"parts": places}),
        "sha256": done.sha256 if done else None,
        "scores": dict(done.scores) if done else {},
    }


def _finished_in(asked: TableStudy, finished: Finished, setting: str, row: str) -> list[Mapping[str, float]]:
    """The scores of the finished cells of a row in a setting, by seed."""
    cells = [cell for cell in asked.configs if (cell.setting, cell.row) == (setting, row)]
    return [finished[cell].scores for cell in cells if cell in finished]


def _steps(asked: TableStudy, finished: Finished) -> Iterator[str]:
    """Steps of the rows of each setting, and the override that makes them equal if they differ."""
    for setting in asked.settings:
        rows = {}
        for name in asked.rows:
            found = _finished_in(asked, finished, setting, name)
            found = [scores for scores in found if STEPS in scores]
            if found:
                rows[name] = [fmean(scores[key] for scores in found) for key in (STEPS, EXAMPLES)]
        each = "; ".join(f"{name} {steps:,.0f} on {n:,.0f}" for name, (steps, n) in rows.items())
        if each:
            yield f"{setting}: local steps of all clients and rounds, and examples in them: {each}"
        trained = {name: n for name, (_, n) in rows.items() if n}
        if trained and max(trained.values()) > MUCH * min(trained.values()):
            most = max(trained, key=lambda name: trained[name])
            least = min(trained, key=lambda name: trained[name])
            yield (
                f"{setting}: {most} trains on {trained[most] / trained[least]:.1f} times as many examples as "
                f"{least}; equal_steps=true lets the other rows make more passes"
            )


def _shares(asked: TableStudy, finished: Finished) -> Iterator[str]:
    """A sentence on each setting: how much of its last score each row had after half of the rounds."""
    for setting in asked.settings:
        rows = {}
        for name in asked.rows:
            found = _finished_in(asked, finished, setting, name)
            if shares := [scores[HALF] for scores in found if HALF in scores]:
                rows[name] = fmean(shares)
        if rows:
            each = "; ".join(f"{name} {share:.0f} %" for name, share in rows.items())
            yield f"{setting}: share of the last score that was there after half of the rounds: {each}"


def _apart(asked: TableStudy, finished: Finished) -> Iterator[str]:
    """Words on each setting whose rows differ by no more than what the adapters add, and on the columns."""
    there = {name for cell in finished.values() for name in cell.scores}
    if kinds := [name for name in WITHOUT if name in there]:
        where = "the held-out domains" if asked.first.protocol == "leave_one_out" else "domains"
        put_back = "with these tensors at their start values"
        yield f"{', '.join(kinds)}: the final model {put_back}, mean over {where} and seeds"
    for setting in asked.settings:
        rows = {}
        for name in asked.rows:
            found = _finished_in(asked, finished, setting, name)
            if found := [scores for scores in found if {FINAL, ADDED} <= scores.keys()]:
                rows[name] = [fmean(scores[key] for scores in found) for key in (FINAL, ADDED)]
        yield from alike(setting, rows)


def alike(setting: str, rows: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """A sentence on how far the rows of a setting differ, against what their adapters add; none of one row.

    Args:
        setting: The setting.
        rows: By row, the score of the final model in percent, and what the adapters add to it.
    """
    if len(rows) < 2:
        return
    scores, added = zip(*rows.values(), strict=True)
    bare = [score - gain for score, gain in rows.values()]
    apart, why = exceeds_adapter_gain(scores, added)
    said = f"{setting}: {'; '.join(rows)}: {why} (mean over the rows)"
    said += f"; without adapters they differ by {max(bare) - min(bare):.1f}"
    yield said if apart else f"{said}; this setting cannot tell them apart"


def _notes(
    asked: TableStudy, values: Sequence[Value], scores: Finished, folders: CellFolders
) -> Iterator[str]:
    """Sentences below the table."""
    seeds = ", ".join(map(str, asked.seeds))
    yield f"ours: mean and sample standard deviation over the seeds {seeds}"
    if len(scores) < len(asked.configs):
        yield f"{len(scores)} of {len(asked.configs)} cells are finished"
    yield f"round of a run: {rule_of(asked.first)}; the paper: {asked.table.selection}"
    runs = {
        path: cell.row for cell in asked.configs if cell in scores for path in folders.get(cell, {}).values()
    }
    yield from head_notes(map(RecordedRun, runs), rule="", names=runs)
    if asked.scale == papers.MINI:
        yield (
            "mini scale: data and models that ship with RayFed stand for those of the paper, so that "
            "differences to its numbers are no measure of fidelity; only the orderings can be compared"
        )
    yield from _steps(asked, scores)
    yield from _shares(asked, scores)
    yield from _apart(asked, scores)
    others = {v.setting: v.paper_setting for v in values if v.paper_setting not in (None, v.setting)}
    yield from (f"next to {ours}: the paper's numbers for {theirs}" for ours, theirs in others.items())
    unread = [measure.name for measure in measures_of(asked) if not measure.score]
    if unread:
        yield f"not read from a run: {', '.join(unread)}"
    yield (
        f"an ordering holds, or does not hold, where a two-sided paired t-test over the seeds gives "
        f"p < {LEVEL}; p is not corrected for the number of orderings"
    )
    if changed := [text for text in asked.overrides if not is_harmless(text.partition("=")[0])]:
        yield f"changed in all cells: {' '.join(changed)}"
    where = " at the scale of the paper" if asked.scale == papers.MINI else ""
    yield from (f"our choice{where}: {choice}" for choice in asked.table.choices)


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
        cells += [_without(found, setting, row, kind) for kind in without(found)]
        rows.append(tuple(cells))
    return Table(setting, ("row", "seeds", *titles, *without(found)), tuple(rows), ranks=marks)


def without(found: Reproduction) -> list[str]:
    """Columns of the final model without adapters and without head that a cell has and no measure is."""
    more = WITHOUT.keys() - {measure.name for measure in found.measures}
    return [kind for kind in WITHOUT if kind in more and any(kind in cell["scores"] for cell in found.cells)]


def _without(found: Reproduction, setting: str, row: str, kind: str) -> str:
    """Mean and deviation over the seeds of the final model without this kind of tensors."""
    mine = [cell["scores"] for cell in found.cells if (cell["setting"], cell["row"]) == (setting, row)]
    values = [scores[kind] for scores in mine if kind in scores]
    deviation = f" ± {number(stdev(values))}" if len(values) > 1 else ""
    return number(fmean(values)) + deviation if values else "-"


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
    titles += without(found)
    rows = [(setting, *row) for setting in found.settings for row in _table(found, setting).rows]
    parts = [Table(title_of(found), ("setting", "row", "seeds", *titles), tuple(rows)).text(width)]
    if found.claims:
        parts.append(_orderings(found, f"orderings in the paper's numbers: {verdicts(found)}").text(width))
    return "\n\n".join([*parts, "\n".join(fit_width(note, width) for note in found.notes)])


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
    """One `tabular` for each setting (package booktabs), and one of the orderings with their verdicts.

    The best is bold, the second-best underlined.
    """
    columns = ("", *(title for measure in found.measures for title in (measure.name, "paper")))
    lines = [f"% {title_of(found)}", "% needs \\usepackage{booktabs}"]
    for setting in found.settings:
        rows: list[tuple[str, ...]] = []
        marks: dict[tuple[int, int], int] = {}
        for i, (row, values) in enumerate(ranked_rows(found, setting)):
            marks |= {(i, 2 * k + 1): rank for k, (_, rank) in enumerate(values)}
            rows.append((row, *(cell for value, _ in values for cell in (ours(value), paper(value)))))
        lines.append(Table(setting, columns, tuple(rows), ranks=marks).latex())
    if found.claims:
        lines.append(_orderings(found, f"orderings in the paper's numbers: {verdicts(found)}").latex())
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
