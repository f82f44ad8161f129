"""Writes the tables of benchmarks/results/claims/*.md from scores by seed, and these from finished jobs.

    python -m docs.claim_tables                 the tables of the pages from the .csv files of that folder
    python -m docs.claim_tables JOB [JOB ...]   first the scores from these folders of `rayfed.reproduce`

A table stands between two comments, of which the first says what its columns are:

    <!-- table all_blocks, Average: FedRA; AllLarge; AllLarge - FedRA -->
    <!-- /table -->

The columns are rows of that experiment by one measure; without a measure they are measures of its only row.
There is a line for each setting, with - where a row was not run. `A` is the mean and the sample standard
deviation over the seeds; `A - B` the mean difference over the seeds, `A / B` the geometric mean of the
quotient and `A - 50` the distance to a number, each with the p of a two-sided paired t-test (of the
logarithms for a quotient) and the number of seeds in which it is above 0 (above 1). Settings behind `|`,
as `one - other`, add a line with such a test of their difference. Below a table of the first measure is a
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
from pathlib import Path
from statistics import fmean, stdev

from rayfed.reproduce.results import alike, judge

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
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for setting in settings:
        steps = [_steps(column, setting, measure, scores) for column in names]
        lines.append(f"| {setting} | {' | '.join(map(_cell, names, steps))} |")
    for pair in filter(None, pairs.split("; ")):
        one, other = ([_steps(c, s, measure, scores) for c in names] for s in pair.split(" - "))
        lines.append(f"| {pair} | {' | '.join(map(_change, names, one, other))} |")
    if measure == next(iter(scores))[1]:
        notes = [f"- {note}" for setting in settings for note in _alike(setting, names, measure, scores)]
        lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def _alike(setting: str, names: Sequence[str], measure: str, scores: Scores) -> Iterator[str]:
    """Words on how far the rows of a setting differ, against what their adapters add."""
    rows = {}
    for name in names:
        whole, bare = (scores.get((name, key), {}).get(setting, {}) for key in (measure, BARE))
        if common := whole.keys() & bare.keys():
            rows[name] = [fmean(whole[seed] for seed in common), fmean(whole[s] - bare[s] for s in common)]
    yield from alike(setting, rows)


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


def _cell(column: str, steps: Mapping[int, float]) -> str:
    if not steps:
        return "-"
    sign = _parts(column)[1]
    if sign:
        return _tested(list(steps.values()), sign == " / ")
    mean = fmean(steps.values())
    digits = 2 if mean >= 1 else 4
    return f"{mean:.{digits}f}" + (f" ± {stdev(steps.values()):.{digits}f}" if len(steps) > 1 else "")


def _change(column: str, one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The difference of a column between two settings."""
    steps = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    return _tested(steps, _parts(column)[1] == " / ")


def _tested(steps: Sequence[float], quotient: bool) -> str:
    """The mean of differences over seeds, with its test; of logarithms, the quotient that it stands for."""
    middle = f"{math.exp(fmean(steps)):.2f}" if quotient else f"{fmean(steps):+.2f}"
    p = judge(steps)[1]
    shown = "p -" if p is None else "p < 0.001" if p < 0.001 else f"p {p:.3f}"
    return f"{middle} ({shown}, {sum(step > 0 for step in steps)} of {len(steps)})"


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
