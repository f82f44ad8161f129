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

from rayfed.evaluation.family_tests import (
    MARGIN,
    PairedTest,
    TestedFamily,
    Verdict,
    resolution_in_words,
    run_family_tests,
)

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
COST = ("bytes", "seconds")
SCORES = ("mean", "worst client")
"""Scores of a row that are compared."""


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

    In brackets is the interval of the difference, for all methods together
    (`rayfed.evaluation.family_tests`). Differences that are better or worse by it are in bold. `2nd half` is
    what the mean gained in the second half of the rounds. Seconds are processor seconds of a round's
    training.

    Raises:
        KeyError: The setting was not run.
    """
    found = json.loads((evidence / METHODS).read_text(encoding="utf-8"))[setting]
    rows = _by_method(found["rows"])
    bases = found.get("bases", {})
    family = _family(rows, bases)
    tests = _by_name(rows, family)
    ranked = sorted(rows, key=lambda name: -_mean(rows[name], "mean"))
    lines = [
        f"| method | mean | worst client | spread | - {BASE} | 2nd half | MB | seconds a round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ranked:
        mine = rows[name]
        shown = [_percent(mine, "mean"), _percent(mine, "worst client"), _percent(mine, "spread")]
        shown += [_difference(tests[name]) if name != BASE else ""]
        shown += [f"{100 * (_mean(mine, 'mean') - _mean(mine, 'half')):+.1f}"]
        spent = found.get("seconds", {}).get(name)
        shown += [f"{_mean(mine, 'bytes') / 1e6:,.1f}", "-" if spent is None else f"{spent:.2f}"]
        lines.append(f"| `{name}`{SGD if name in bases else ''} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *_facts(found, rows, family)]) + "\n"


def _facts(found: Mapping[str, Any], rows: Rows, family: TestedFamily) -> Iterator[str]:
    """Sentences below a table of methods."""
    seeds = ", ".join(map(str, found["seeds"]))
    tests = _by_name(rows, family)
    kinds: tuple[Verdict, ...] = ("better", "worse", "as good")
    shown = [f"{kind}: {_names(own)}" for kind in kinds if (own := _having(tests, kind))]
    verdicts = f"Compared with `{BASE}` {'; '.join(shown)}." if shown else "All differences are open."
    alike = _having(tests, "same")
    same = f" The same scores in every seed, not tested: {_names(alike)}." if alike else ""
    steps = sorted(_mean(each, "steps") for each in rows.values())
    span = f"{steps[0]:,.0f}" + (f" to {steps[-1]:,.0f}" if steps[-1] > steps[0] else "")
    batches = f"{span} training batches of all clients"
    yield f"Seeds {seeds}, {found['clients']} clients, {found['rounds']} rounds, {batches}. {verdicts}{same}"
    if missing := found.get("unfinished"):
        yield ""
        yield f"Not run with all seeds: {_names(missing)}."
    yield ""
    yield _reach(family)
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


def _family(rows: Rows, bases: Mapping[str, str], score: str = "mean") -> TestedFamily:
    """The tests of all methods but FedAvg, each against its base, in points.

    Methods with all scores of their base in every seed are not tested.
    """
    names = [name for name in rows if name != BASE]
    return run_family_tests(
        [_differences(rows, name, bases, score) for name in names],
        margin=100 * MARGIN,
        same=[_is_same(rows, name, bases) for name in names],
    )


def _is_same(rows: Rows, name: str, bases: Mapping[str, str]) -> bool:
    every = [step for score in SCORES for step in _differences(rows, name, bases, score)]
    return bool(every) and not any(every)


def _by_name(rows: Rows, family: TestedFamily) -> dict[str, PairedTest]:
    return dict(zip((name for name in rows if name != BASE), family.tests, strict=True))


def _having(tests: Mapping[str, PairedTest], verdict: Verdict) -> list[str]:
    return [name for name, test in tests.items() if test.verdict == verdict]


def _reach(family: TestedFamily) -> str:
    """A sentence on the differences that the seeds resolve."""
    words = resolution_in_words(family, " points")
    return f"{words[0].upper()}{words[1:]}." if words else "With a single seed nothing is tested."


def _difference(test: PairedTest) -> str:
    if test.difference is None:
        return "not compared"
    if test.verdict == "same":
        return "same"
    text = f"{test.difference:+.1f}"
    if test.low is not None and test.high is not None:
        text += f" [{test.low:+.1f}, {test.high:+.1f}]"
    return f"**{text}**" if test.verdict in ("better", "worse") else text


def _percent(seeds: Mapping[int, Mapping[str, Any]], key: str) -> str:
    values = [100 * row[key] for row in seeds.values()]
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _mean(seeds: Mapping[int, Mapping[str, Any]], key: str) -> float:
    return fmean(row[key] for row in seeds.values())


def summary(evidence: Path = EVIDENCE) -> str:
    """The table of all settings: the mean of FedAvg, the difference of every other method to it, and cost.

    Bytes and seconds are relative to FedAvg, the means of their ratios over the settings. Below are the
    verdicts on the mean of each method, and on its worst client.
    """
    found = json.loads((evidence / METHODS).read_text(encoding="utf-8"))
    every = {setting: _by_method(each["rows"]) for setting, each in found.items()}
    bases = {setting: each.get("bases", {}) for setting, each in found.items()}
    families = {setting: _family(rows, bases[setting]) for setting, rows in every.items()}
    tests = {setting: _by_name(rows, families[setting]) for setting, rows in every.items()}
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
                shown.append(_difference(tests[setting][name]))
        there = [setting for setting, rows in every.items() if name in rows]
        sent = [_mean(every[each][name], "bytes") / _mean(every[each][BASE], "bytes") for each in there]
        shown += [f"{fmean(sent):.1f}", _ratio([found[each].get("seconds", {}) for each in there], name)]
        lines.append(f"| `{name}`{SGD if name in plain else ''} | {' | '.join(shown)} |")
    verdicts = [_verdicts(each, tests[each], families[each]) for each in every]
    for setting, rows in every.items():
        worst = _family(rows, bases[setting], "worst client")
        verdicts.append(_verdicts(f"{setting}, worst client", _by_name(rows, worst), worst))
    return "\n".join([*lines, "", *verdicts]) + "\n"


def _ratio(seconds: Sequence[Mapping[str, float]], name: str) -> str:
    """Mean over settings of a method's seconds as a multiple of FedAvg's; a dash where it was not timed."""
    ratios = [each[name] / each[BASE] for each in seconds if {name, BASE} <= each.keys()]
    return f"{fmean(ratios):.1f}" if ratios else "-"


def _verdicts(what: str, tests: Mapping[str, PairedTest], family: TestedFamily) -> str:
    """A line on the methods that are better, worse, as good and the same as FedAvg in a setting."""
    better, worse = _having(tests, "better"), _having(tests, "worse")
    good, same = _having(tests, "as good"), _having(tests, "same")
    text = f"- {what}: better than FedAvg: {_names(better) or 'none'}; worse: {_names(worse) or 'none'}"
    text += f"; as good, within {100 * MARGIN:g} point: {_names(good) or 'none'}"
    text += f"; {_names(same)}: the same scores in every seed, not tested" if same else ""
    return f"{text}; the others are open. {_reach(family)}"


if __name__ == "__main__":
    for file in (PAGE, EVIDENCE / "which_method.md"):
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
