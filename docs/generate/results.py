"""Writes the tables of docs/results.md and of which_method.md from the files of benchmarks/results.

    python -m docs.generate.results

A file says what it shows in lines below its facts. A line may go on in the next ones, indented:

    - Reproduced: statement of a paper | what was found here
    - Finding: question | answer | another file
    - Speed: question | answer

A third part names further files, relative to this one and separated by commas. The tables stand between
comments, `<!-- results Speed -->` and `<!-- /results -->`. `<!-- results methods: SETTING -->` is the table
of one setting of which_method.json, which `benchmarks.which_method` writes, and
`<!-- results all methods -->` the table of all settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from rayfed.evaluation.metrics import holm
from rayfed.reproduce.results import judge

DOCS = Path(__file__).resolve().parent.parent
PAGE = DOCS / "results.md"
EVIDENCE = DOCS.parent / "benchmarks" / "results"
METHODS = "which_method.json"
BASE = "fedavg"
"""Method to which the others are compared, unless `bases` of a setting names another row."""
SGD = ", SGD"
"""Mark of a method that is compared with FedAvg with plain SGD."""
BLOCK = re.compile(r"(<!-- results ([^>]+?) -->\n).*?(<!-- /results -->)", re.DOTALL)
HEADS = {
    "Reproduced": ("statement of a paper", "here", "evidence"),
    "Finding": ("question", "answer", "evidence"),
    "Speed": ("question", "answer", "measured in"),
}
"""Titles of the columns by kind of line."""
LINE = re.compile(rf"^- ({'|'.join(HEADS)}): (.+(?:\n  .+)*)", re.MULTILINE)
Rows: TypeAlias = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Scores and cost of each run, by method and seed."""
LEVEL = 0.05
COST = ("bytes", "seconds")
FEWEST = 3  # seeds of a test
SAME = 1e-9
"""Points within which differences are equal, but for rounding."""


def page(text: str, evidence: Path = EVIDENCE) -> str:
    """The text of the page with all its tables written anew.

    Raises:
        KeyError: There is no such table.
    """

    def block(found: re.Match[str]) -> str:
        kind, _, setting = found[2].partition(": ")
        if kind == "methods":
            table = methods(setting, evidence)
        else:
            table = summary(evidence) if kind == "all methods" else statements(kind, evidence)
        return found[1] + table + found[3]

    return BLOCK.sub(block, text)


def statements(kind: str, evidence: Path = EVIDENCE) -> str:
    """The table of all lines of a kind, with links to their files.

    Raises:
        KeyError: There is no such kind.
    """
    heads = HEADS[kind]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|"]
    for file in sorted(evidence.rglob("*.md")):
        for name, text in LINE.findall(file.read_text(encoding="utf-8")):
            if name == kind:
                what, found, *more = re.sub(r"\n +", " ", text).split(" | ")
                others = [file.parent / path.strip() for path in ", ".join(more).split(",") if path.strip()]
                links = ", ".join(link(each) for each in (file, *others))
                lines.append(f"| {_moved(what, file)} | {_moved(found, file)} | {links} |")
    return "\n".join(lines) + "\n"


def link(file: Path) -> str:
    """A link from a page of docs/ to a file, named after it.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if not file.is_file():
        raise FileNotFoundError(file)
    return f"[{file.stem.replace('_', ' ')}]({os.path.relpath(file, DOCS)})"


def _moved(text: str, file: Path) -> str:
    """A text of a file with its relative links as they are from docs/."""
    return re.sub(r"\]\(([^):#]+)", lambda m: f"]({os.path.relpath(file.parent / m[1], DOCS)}", text)


def methods(setting: str, evidence: Path = EVIDENCE) -> str:
    """The table of a setting: scores, cost and the difference to FedAvg of every method, best mean first.

    In brackets is the p of a two-sided paired t-test over the seeds, corrected by Holm for the number of
    methods, unless it is 1. Differences larger than chance are in bold. `2nd half` is what the mean gained in
    the second half of the rounds. Seconds are processor seconds of a round's training.

    Raises:
        KeyError: The setting was not run.
    """
    found = json.loads((evidence / METHODS).read_text(encoding="utf-8"))[setting]
    rows = _by_method(found["rows"])
    bases = found.get("bases", {})
    tests = _corrected(rows, bases)
    ranked = sorted(rows, key=lambda name: -_mean(rows[name], "mean"))
    lines = [
        f"| method | mean | worst client | spread | - {BASE} | 2nd half | MB | seconds a round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ranked:
        mine = rows[name]
        shown = [_percent(mine, "mean"), _percent(mine, "worst client"), _percent(mine, "spread")]
        shown += [_difference(_differences(rows, name, bases), tests.get(name)) if name != BASE else ""]
        shown += [f"{100 * (_mean(mine, 'mean') - _mean(mine, 'half')):+.1f}"]
        spent = found.get("seconds", {}).get(name)
        shown += [f"{_mean(mine, 'bytes') / 1e6:,.1f}", "-" if spent is None else f"{spent:.2f}"]
        lines.append(f"| `{name}`{SGD if name in bases else ''} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *_facts(found, rows, tests, bases)]) + "\n"


def _facts(
    found: Mapping[str, Any], rows: Rows, tests: Mapping[str, float | None], bases: Mapping[str, str]
) -> Iterator[str]:
    """Sentences below a table of methods."""
    seeds = ", ".join(map(str, found["seeds"]))
    shown = [name for name, p in tests.items() if p is not None and p < LEVEL]
    larger = f"Larger than chance: {_names(shown)}." if shown else "No difference is larger than chance."
    alike = [name for name in tests if not any(_differences(rows, name, bases)) and name not in bases]
    same = f" The same scores as `{BASE}` in every seed: {_names(alike)}." if alike else ""
    steps = sorted(_mean(each, "steps") for each in rows.values())
    span = f"{steps[0]:,.0f}" + (f" to {steps[-1]:,.0f}" if steps[-1] > steps[0] else "")
    batches = f"{span} training batches of all clients"
    yield f"Seeds {seeds}, {found['clients']} clients, {found['rounds']} rounds, {batches}. {larger}{same}"
    if missing := found.get("unfinished"):
        yield ""
        yield f"Not run with all seeds: {_names(missing)}."
    yield ""
    yield needed(len(found["seeds"]), len(tests))
    yield ""
    yield f"`{found['command']}`, commit {found['commit']}, {found['processor']}, {found['date']}."


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _by_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["seed"]] = row
    return found


def _differences(rows: Rows, name: str, bases: Mapping[str, str], score: str = "mean") -> list[float]:
    """Score of a method minus that of the row it is compared with, by seed, in points."""
    mine, base = rows[name], rows.get(bases.get(name, BASE), {})
    return [100 * (mine[seed][score] - base[seed][score]) for seed in sorted(mine.keys() & base.keys())]


def pvalue(differences: Sequence[float]) -> float | None:
    """Probability, by a two-sided paired t-test over seeds, of differences as large as these by chance.

    Scores of few examples take few values, so that the differences of two seeds are often equal by chance.
    None: there are fewer than three, or all are equal.
    """
    if len(differences) < FEWEST or max(differences) - min(differences) < SAME:
        return None
    return judge(differences)[1]


def needed(seeds: int, tests: int) -> str:
    """A sentence on the least difference that is larger than chance, in the first step of Holm.

    >>> needed(3, 37)
    'Of 37 tests with 3 seeds, the first takes a mean difference of 15.7 times its deviation over the seeds.'
    """
    from scipy.stats import t

    if seeds < FEWEST:
        return f"With fewer than {FEWEST} seeds nothing is tested."
    least = t.isf(LEVEL / 2 / tests, seeds - 1) / seeds**0.5
    return (
        f"Of {tests} tests with {seeds} seeds, the first takes a mean difference of {least:.1f} times its "
        f"deviation over the seeds."
    )


def _difference(differences: Sequence[float], p: float | None) -> str:
    if not differences:
        return "not compared"
    text = f"{fmean(differences):+.1f}"
    if p is None or p >= 0.9995:
        return text
    text += " (p < 0.001)" if p < 0.001 else f" (p {p:.3f})"
    return f"**{text}**" if p < LEVEL else text


def _percent(seeds: Mapping[int, Mapping[str, Any]], key: str) -> str:
    values = [100 * row[key] for row in seeds.values()]
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _mean(seeds: Mapping[int, Mapping[str, Any]], key: str) -> float:
    return fmean(row[key] for row in seeds.values())


def summary(evidence: Path = EVIDENCE) -> str:
    """The table of all settings: the mean of FedAvg, the difference of every other method to it, and cost.

    Bytes and seconds are relative to FedAvg, the means of their ratios over the settings. Below are the
    methods whose mean, and those whose worst client differs from FedAvg's by more than chance.
    """
    found = json.loads((evidence / METHODS).read_text(encoding="utf-8"))
    every = {setting: _by_method(each["rows"]) for setting, each in found.items()}
    bases = {setting: each.get("bases", {}) for setting, each in found.items()}
    tests = {setting: _corrected(rows, bases[setting]) for setting, rows in every.items()}
    plain = {name for each in bases.values() for name in each}
    heads = ["method", *every, *COST]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    names = dict.fromkeys(name for rows in every.values() for name in rows)
    for name in sorted(names, key=lambda name: (name != BASE, name)):
        shown = []
        for setting, rows in every.items():
            if name not in rows:
                shown.append("")
            elif name == BASE:
                shown.append(_percent(rows[name], "mean"))
            else:
                apart = _differences(rows, name, bases[setting])
                shown.append(_difference(apart, tests[setting].get(name)))
        there = [setting for setting, rows in every.items() if name in rows]
        sent = [_mean(every[each][name], "bytes") / _mean(every[each][BASE], "bytes") for each in there]
        shown += [f"{fmean(sent):.1f}", _ratio([found[each].get("seconds", {}) for each in there], name)]
        lines.append(f"| `{name}`{SGD if name in plain else ''} | {' | '.join(shown)} |")
    worst = {setting: _corrected(rows, bases[setting], "worst client") for setting, rows in every.items()}
    verdicts = [_verdict(each, tests[each], every[each], bases[each]) for each in every]
    verdicts += [_verdict(each, worst[each], every[each], bases[each], "worst client") for each in every]
    reach = dict.fromkeys(needed(len(every[each][BASE]), len(tests[each])) for each in every)
    return "\n".join([*lines, "", *verdicts, "", *reach]) + "\n"


def _ratio(seconds: Sequence[Mapping[str, float]], name: str) -> str:
    """Mean over settings of a method's seconds as a multiple of FedAvg's; a dash where it was not timed."""
    ratios = [each[name] / each[BASE] for each in seconds if {name, BASE} <= each.keys()]
    return f"{fmean(ratios):.1f}" if ratios else "-"


def _verdict(
    setting: str,
    tests: Mapping[str, float | None],
    rows: Rows,
    bases: Mapping[str, str],
    score: str = "mean",
) -> str:
    """A line on the methods that are better or worse than FedAvg by more than chance in a setting."""
    shown = [name for name, p in tests.items() if p is not None and p < LEVEL]
    better = [name for name in shown if fmean(_differences(rows, name, bases, score)) > 0]
    worse = [name for name in shown if name not in better]
    what = setting if score == "mean" else f"{setting}, {score}"
    return f"- {what}: better than FedAvg: {_names(better) or 'none'}; worse: {_names(worse) or 'none'}."


def _corrected(rows: Rows, bases: Mapping[str, str], score: str = "mean") -> dict[str, float | None]:
    """Corrected p by method, of its difference to FedAvg."""
    return holm({name: pvalue(_differences(rows, name, bases, score)) for name in rows if name != BASE})


if __name__ == "__main__":
    for file in (PAGE, EVIDENCE / "which_method.md"):
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
