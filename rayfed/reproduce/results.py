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
from typing import Any, TypeAlias

from rayfed.config import papers
from rayfed.config.papers import PaperTable
from rayfed.evaluation.family_tests import (
    LEVEL,
    MARGIN,
    VERDICTS,
    TestedFamily,
    Verdict,
    resolution_in_words,
    run_family_tests,
)
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import adapter_note, head_notes
from rayfed.reproduce.cell_scores import (
    ADDED,
    EXAMPLES,
    FINAL,
    HALF,
    STEPS,
    WITHOUT,
    Folders,
    better,
    is_by_position,
    rule_of,
    unit,
)
from rayfed.reproduce.table_study import TableCell, TableStudy, is_harmless
from rayfed.terminal.table_formats import Table, fit_width

FORMAT = 2


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
        low, high: Interval of this difference, of all orderings of the table together; None: there is none.
        p: For all orderings of the table; None for fewer than two seeds.
        verdict: Of the row that is better in the paper: `better` here, too, `worse`, `as good`, `open`, or
            `same`.
        seeds_needed: Number of seeds that would decide an open ordering; None: it is decided, or very many.
    """

    setting: str
    measure: str
    better: str
    worse: str
    paper_difference: float
    difference: float | None
    seeds: int
    low: float | None
    high: float | None
    p: float | None
    verdict: Verdict
    seeds_needed: int | None


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

MARGIN_OF = {"percent": 100 * MARGIN}
"""Largest difference of rows that count as equally good, by the unit of a measure."""


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
    tested = _tested_measures(asked, measures, by_seed)
    families = {
        measure.name: _tested(measure, _orderings_of(asked, measure, values), by_seed, finished, len(tested))
        for measure in tested
    }
    claims = tuple(
        claim
        for setting in asked.settings
        for measure in tested
        for claim in families[measure.name][0]
        if claim.setting == setting
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
        notes=tuple(
            _notes(asked, values, finished, folders, {name: each for name, (_, each) in families.items()})
        ),
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


Ordering: TypeAlias = tuple[Value, Value]
"""Two rows of a setting, as the paper orders them: the better one, and the other."""

BySeed: TypeAlias = Mapping[tuple[str, str, str], Mapping[int, float]]


def _tested_measures(asked: TableStudy, measures: Sequence[Measure], by_seed: BySeed) -> tuple[Measure, ...]:
    """The measures whose orderings have a counterpart here.

    Those that are read from no run have none, and at mini scale single domains, which are other ones than the
    paper's. Where runs are finished, nor have those that none of these has.
    """
    begun = any(by_seed.values())
    scored = {name for (_, _, name), seeds in by_seed.items() if seeds}
    return tuple(
        measure
        for measure in measures
        if measure.score
        and not (asked.scale == papers.MINI and is_by_position(measure.score))
        and (measure.name in scored or not begun)
    )


def _orderings_of(asked: TableStudy, measure: Measure, values: Sequence[Value]) -> list[Ordering]:
    """Orderings of the paper by a measure, in each setting: the best row beats each, and each the next."""
    sign = 1 if measure.better == "higher" else -1
    found = []
    for setting in asked.settings:
        own = [v for v in values if (v.setting, v.measure) == (setting, measure.name)]
        ranked = sorted((v for v in own if v.paper is not None), key=lambda v: -sign * (v.paper or 0.0))
        pairs = [(ranked[0], other) for other in ranked[1:]] + list(itertools.pairwise(ranked[1:]))
        found += [(first, second) for first, second in pairs if first.paper != second.paper]
    return found


def _tested(
    measure: Measure,
    orderings: Sequence[Ordering],
    by_seed: BySeed,
    finished: Finished,
    families: int,
) -> tuple[list[PaperClaim], TestedFamily]:
    """The claims of a measure, tested as a family; the families of a table share the probability of an error.

    Args:
        families: Their number.
    """
    differences = []
    for pair in orderings:
        one, other = (by_seed[v.setting, v.row, v.measure] for v in pair)
        differences.append({seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())})
    family = run_family_tests(
        differences,
        larger=measure.better == "higher",
        margin=MARGIN_OF.get(measure.unit),
        level=1 - (1 - LEVEL) / families,
        same=[
            bool(each) and not any(each.values()) and _same_bytes(pair, finished)
            for pair, each in zip(orderings, differences, strict=True)
        ],
    )
    claims = []
    for (first, second), each in zip(orderings, family.tests, strict=True):
        assert first.paper is not None
        assert second.paper is not None
        claims.append(
            PaperClaim(
                setting=first.setting,
                measure=measure.name,
                better=first.row,
                worse=second.row,
                paper_difference=first.paper - second.paper,
                difference=each.difference,
                seeds=each.seeds,
                low=each.low,
                high=each.high,
                p=None if each.p_corrected is None else min(1.0, families * each.p_corrected),
                verdict=each.verdict,
                seeds_needed=each.needed,
            )
        )
    return claims, family


def _same_bytes(pair: Ordering, finished: Finished) -> bool:
    """Whether both rows have the same tensors in the end, for each seed."""
    digests: list[dict[int, str]] = [
        {
            cell.seed: done.sha256
            for cell, done in finished.items()
            if (cell.setting, cell.row) == (v.setting, v.row)
        }
        for v in pair
    ]
    return digests[0] == digests[1] != {} and all(digests[0].values())


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
                f"{least}; equal=examples gives the other rows more rounds"
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


def _adapters(asked: TableStudy, finished: Finished, families: Mapping[str, TestedFamily]) -> Iterator[str]:
    """Words on the columns without tensors, and on each setting: what the adapters add to its rows."""
    there = {name for cell in finished.values() for name in cell.scores}
    if kinds := [name for name in WITHOUT if name in there]:
        where = "the held-out domains" if asked.first.protocol == "leave_one_out" else "domains"
        put_back = "with these tensors at their start values"
        yield f"{', '.join(kinds)}: the final model {put_back}, mean over {where} and seeds"
    half = _resolved(measures_of(asked), families)
    for setting in asked.settings:
        rows = {}
        for name in asked.rows:
            found = _finished_in(asked, finished, setting, name)
            if found := [scores for scores in found if {FINAL, ADDED} <= scores.keys()]:
                rows[name] = [fmean(scores[key] for scores in found) for key in (FINAL, ADDED)]
        if len(rows) > 1:
            whole, added = zip(*rows.values(), strict=True)
            bare = [score - gain for score, gain in zip(whole, added, strict=True)]
            yield f"{setting}: {'; '.join(rows)}: {adapter_note(whole, bare, half)}"


def _resolved(measures: Sequence[Measure], families: Mapping[str, TestedFamily]) -> float | None:
    """Median half of an interval of the first measure in percent of which larger values are better."""
    for measure in measures:
        found = families.get(measure.name)
        if (measure.better, measure.unit) == ("higher", "percent") and found is not None and found.resolution:
            return found.resolution[0]
    return None


def _notes(
    asked: TableStudy,
    values: Sequence[Value],
    scores: Finished,
    folders: CellFolders,
    families: Mapping[str, TestedFamily],
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
    yield from _adapters(asked, scores, families)
    others = {v.setting: v.paper_setting for v in values if v.paper_setting not in (None, v.setting)}
    yield from (f"next to {ours}: the paper's numbers for {theirs}" for ours, theirs in others.items())
    unread = [measure.name for measure in measures_of(asked) if not measure.score]
    if unread:
        yield f"not read from a run: {', '.join(unread)}"
    if families:
        yield (
            f"an ordering: is the row that is better in the paper better here? Intervals and p hold for all "
            f"orderings of the table together ({100 * LEVEL:g} %); as good: within {100 * MARGIN:g} point "
            f"of 0 (measures in percent); seeds needed: would decide an open one four times of five, if the "
            f"difference is ours"
        )
    units = {measure.name: " points" if measure.unit == "percent" else "" for measure in measures_of(asked)}
    for name, family in families.items():
        if resolved := resolution_in_words(family, units[name]):
            yield f"{name}: {resolved}"
    left = [m.name for m in measures_of(asked) if m.score and m.name not in families and asked.table.numbers]
    if left:
        yield f"orderings without a counterpart here, not tested: {', '.join(left)}"
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
    "interval",
    "seeds",
    "p",
    "verdict",
    "seeds needed",
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
        interval(claim.low, claim.high),
        str(claim.seeds),
        p,
        claim.verdict,
        "" if claim.seeds_needed is None else str(claim.seeds_needed),
    )


def interval(low: float | None, high: float | None) -> str:
    """An interval in words; empty where there is none."""
    return "" if low is None or high is None else f"{number(low, sign=True)} to {number(high, sign=True)}"


def verdicts(found: Reproduction) -> str:
    """Numbers of orderings by verdict, in words."""
    kinds = (*VERDICTS, *(["same"] if any(c.verdict == "same" for c in found.claims) else []))
    counts = (f"{sum(c.verdict == kind for c in found.claims)} {kind}" for kind in kinds)
    return f"the row that is better in the paper is here: {', '.join(counts)}"


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
    return Table(title, CLAIM_COLUMNS, rows, left=frozenset({0, 1, 2, 8}))


def markdown(found: Reproduction) -> str:
    """The table, the orderings and the notes as Markdown; our best is bold, our second-best is underlined."""
    parts = [f"# {title_of(found)}\n", *(_table(found, setting).markdown("##") for setting in found.settings)]
    if found.claims:
        orderings = _orderings(found, "Orderings in the paper's numbers")
        parts.append(orderings.markdown("##", lead=f"{verdicts(found)[0].upper()}{verdicts(found)[1:]}."))
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
        parts.append(_orderings(found, f"orderings in the paper's numbers; {verdicts(found)}").text(width))
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
        lines.append(_orderings(found, f"orderings in the paper's numbers; {verdicts(found)}").latex())
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
        parts.append(_orderings(found, f"Orderings in the paper's numbers; {verdicts(found)}").html())
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    return "\n".join([*parts, f"<ul>{notes}</ul></body></html>"]) + "\n"
