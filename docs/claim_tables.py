"""Writes the tables of benchmarks/results/claims/*.md from scores by seed, and these from finished jobs.

    python -m docs.claim_tables                 the tables of the pages from the .csv files of that folder
    python -m docs.claim_tables JOB [JOB ...]   first the scores from these folders of `rayfed.reproduce`

A table stands between two comments, of which the first says what its columns are:

    <!-- table all_blocks, Average: FedRA; AllLarge; AllLarge - FedRA -->
    <!-- /table -->

The columns are rows of that experiment by one measure; without a measure they are measures of its only row.
There is a line for each setting, with - where a row was not run. `A` is the mean and the sample standard
deviation over the seeds; `A - B` the mean difference over the seeds, `A / B` the geometric mean of the
quotient and `A - 50` the distance to a number, each with its verdict, its interval, and the number of seeds
in which it is above 0 (above 1). Settings behind `|`, as `one - other`, add a line with such a test of their
difference. The tests of a table are a family (`rayfed.evaluation.family_tests`); where it has quotients, too,
both kinds are one each, and share the probability of an error. Below a table of the first measure is a
sentence for each setting whose rows were scored without adapters, too.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from rayfed.config.compose import folder
from rayfed.config.papers import tables
from rayfed.evaluation.family_tests import (
    LEVEL,
    MARGIN,
    PairedTest,
    TestedFamily,
    resolution_in_words,
    run_family_tests,
)
from rayfed.report.final_table import adapter_note
from rayfed.reproduce.cell_scores import better, unit

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "claims"
TABLE = re.compile(r"(<!-- table (\w+)(?:, (.+?))?: (.+?) -->\n).*?(<!-- /table -->)", re.DOTALL)
COLUMNS = ("setting", "row", "seed", "measure", "value")
BARE = "without adapters"
"""Measure of the final model with the adapters put back to their start values."""

Scores = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
"""By row and measure: by setting: the score of each seed."""


def collect(job: Path) -> Path:
    """Write the scores of a job of `rayfed.reproduce` to a file of this folder, named after its table.

    A setting with a cell that is not finished keeps the scores that the file has of it, as do rows that the
    job does not have.

    Args:
        job: Folder of the job.

    Returns:
        The file.
    """
    found = json.loads((job / "reproduction.json").read_text())
    file = FOLDER / f"{found['experiment'].rpartition('/')[2]}.csv"
    lines: dict[str, list[list[str]]] = {}
    if file.exists():
        with file.open(newline="") as stream:
            for line in csv.reader(stream):
                lines.setdefault(line[0], []).append(line)
    for setting in found["settings"]:
        cells = [cell for cell in found["cells"] if cell["setting"] == setting]
        if all(cell["scores"] for cell in cells):
            ordered = sorted(cells, key=lambda cell: (found["rows"].index(cell["row"]), cell["seed"]))
            mine = {cell["row"] for cell in cells}
            kept = [line for line in lines.get(setting, []) if line[1] not in mine]
            lines[setting] = kept + [
                [setting, cell["row"], str(cell["seed"]), measure, f"{value:.6g}"]
                for cell in ordered
                for measure, value in cell["scores"].items()
            ]
    lines.pop(COLUMNS[0], None)
    with file.open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([COLUMNS, *itertools.chain(*lines.values())])
    return file


def read(name: str) -> Scores:
    """The scores of a table by seed."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    with (FOLDER / f"{name}.csv").open() as stream:
        for line in csv.DictReader(stream):
            by_setting = found.setdefault((line["row"], line["measure"]), {})
            by_setting.setdefault(line["setting"], {})[int(line["seed"])] = float(line["value"])
    return found


def page(text: str) -> str:
    """The text of a page with all its tables written anew."""
    return TABLE.sub(lambda m: m[1] + _table(m[2], m[3], m[4]) + m[5], text)


def _table(name: str, measure: str | None, what: str) -> str:
    if not (FOLDER / f"{name}.csv").exists():
        return f"No job of this table is finished: `python -m rayfed.reproduce claims/{name}`.\n"
    scores = read(name)
    columns, _, pairs = what.partition(" | ")
    names = columns.split("; ")
    settings = list(dict.fromkeys(setting for by_setting in scores.values() for setting in by_setting))
    cells = {(line, column): _steps(column, line, measure, scores) for line in settings for column in names}
    for pair in filter(None, pairs.split("; ")):
        one, other = pair.split(" - ")
        for column in names:
            cells[pair, column] = _change(cells[one, column], cells[other, column])
    scored = [measure or _parts(column)[0] for column in names]
    tests, families = _tested(cells, dict(zip(names, (_score(name, each) for each in scored), strict=True)))
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for line in dict.fromkeys(line for line, _ in cells):
        own = (_cell(column, cells[line, column], tests.get((line, column))) for column in names)
        lines.append(f"| {line} | {' | '.join(own)} |")
    notes = []
    for sign, family in families.items():
        of = "quotients, in logarithms: " if sign == QUOTIENT else ""
        if resolved := resolution_in_words(family):
            notes.append(f"- {of}{resolved}")
    if measure == next(iter(scores))[1]:
        half = families[DIFFERENCE].resolution if DIFFERENCE in families else None
        known = half[0] if half else None
        notes += [
            f"- {each}" for setting in settings for each in _adapters(setting, names, measure, scores, known)
        ]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


QUOTIENT, DIFFERENCE = " / ", " - "
"""Signs of tested columns."""

Cells = Mapping[tuple[str, str], Mapping[int, float]]
"""By line and column: a number for each seed."""


def _score(name: str, measure: str) -> str:
    """The score of a measure of an experiment; the measure itself where nothing is known of it."""
    table = tables(folder()).get(f"claims/{name}")
    return table.scores.get(measure, measure) if table is not None else measure


def _tested(
    cells: Cells, scores: Mapping[str, str]
) -> tuple[dict[tuple[str, str], PairedTest], dict[str, TestedFamily]]:
    """The tests of a table by line and column, and its families by sign.

    Args:
        scores: The score that a column shows.
    """
    signs = {place: _tested_sign(column, place[0]) for place in cells if (column := place[1])}
    kinds = dict.fromkeys(sign for place, sign in signs.items() if sign and cells[place])
    found: dict[tuple[str, str], PairedTest] = {}
    families: dict[str, TestedFamily] = {}
    for sign in kinds:
        places = [place for place, own in signs.items() if own == sign and cells[place]]
        lower = [better(scores[column]) == "lower" for _, column in places]
        percent = all(unit(scores[column]) == "percent" for _, column in places)
        turned = [
            {seed: -step if down else step for seed, step in cells[place].items()}
            for place, down in zip(places, lower, strict=True)
        ]
        families[sign] = run_family_tests(
            turned,
            margin=100 * MARGIN if percent and sign == DIFFERENCE else None,
            level=1 - (1 - LEVEL) / len(kinds),
            same=[bool(steps) and not any(steps.values()) for steps in turned],
        )
        for place, down, each in zip(places, lower, families[sign].tests, strict=True):
            ends = (each.low, each.high)
            if down and each.low is not None and each.high is not None:
                ends = (-each.high, -each.low)
            found[place] = replace(each, low=ends[0], high=ends[1])
    return found, families


def _tested_sign(column: str, line: str) -> str:
    """The sign of a tested cell: of its column; of a column without one the change between two settings."""
    return _parts(column)[1] or (DIFFERENCE if DIFFERENCE in line else "")


def _change(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The difference of a column between two settings, by seed."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def _adapters(
    setting: str, names: Sequence[str], measure: str, scores: Scores, half_width: float | None
) -> Iterator[str]:
    """Words on what the adapters add to the rows of a setting. Args: half_width: as of `adapter_note`."""
    whole, bare = [], []
    rows = []
    for name in names:
        own, without = (scores.get((name, key), {}).get(setting, {}) for key in (measure, BARE))
        if common := own.keys() & without.keys():
            rows.append(name)
            whole.append(fmean(own[seed] for seed in common))
            bare.append(fmean(without[seed] for seed in common))
    if len(rows) > 1:
        yield f"{setting}: {'; '.join(rows)}: {adapter_note(whole, bare, half_width)}"


def _steps(column: str, setting: str, measure: str | None, scores: Scores) -> dict[int, float]:
    """By seed: the score of a column, its difference, or the logarithm of its quotient."""
    first, sign, second = _parts(column)
    a = _seeds(first, setting, measure, scores)
    if not sign:
        return dict(a)
    b = dict.fromkeys(a, float(second)) if second.isdecimal() else _seeds(second, setting, measure, scores)
    common = sorted(a.keys() & b.keys())
    if sign == " / ":
        return {seed: math.log(a[seed] / b[seed]) for seed in common}
    return {seed: a[seed] - b[seed] for seed in common}


def _parts(column: str) -> tuple[str, str, str]:
    """The first part of a column, its sign and its second part."""
    return next((p for sign in (" / ", " - ") if (p := column.partition(sign))[1]), (column, "", ""))


def _cell(column: str, steps: Mapping[int, float], test: PairedTest | None) -> str:
    if not steps:
        return "-"
    if test is not None:
        return _in_words(list(steps.values()), test, _parts(column)[1] == QUOTIENT)
    mean = fmean(steps.values())
    digits = 2 if mean >= 1 else 4
    return f"{mean:.{digits}f}" + (f" ± {stdev(steps.values()):.{digits}f}" if len(steps) > 1 else "")


def _in_words(steps: Sequence[float], test: PairedTest, quotient: bool) -> str:
    """The mean of differences over seeds, with its test; of logarithms, the quotient that it stands for."""

    def shown(value: float) -> str:
        return f"{math.exp(value):.2f}" if quotient else f"{value:+.2f}"

    ends = "" if test.low is None or test.high is None else f", {shown(test.low)} to {shown(test.high)}"
    counted = f"{sum(step > 0 for step in steps)} of {len(steps)}"
    return f"{shown(fmean(steps))} ({test.verdict}{ends}, {counted})"


def _seeds(name: str, setting: str, measure: str | None, scores: Scores) -> Mapping[int, float]:
    """Scores by seed of a row by this measure, or of a measure of the only row."""
    key = (name, measure) if measure else next(key for key in scores if key[1] == name)
    return scores[key].get(setting, {})


def main(jobs: Sequence[str]) -> None:
    for job in jobs:
        sys.stdout.write(f"{collect(Path(job))}\n")
    for file in sorted(FOLDER.glob("*.md")):
        file.write_text(page(file.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
