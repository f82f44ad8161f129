"""Writes the results of a sweep: tables, the config of the best trial, and report.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from rayfed.columns import (
    ACCURACY,
    DEPLOYED,
    HELD_OUT,
    MEAN,
    OVER_DOMAINS,
    SIGMA_TYPE,
    WORST_DOMAIN,
    metric_of,
)
from rayfed.config.schema import to_dict
from rayfed.errors import count_of
from rayfed.experiment.study.trials import State
from rayfed.record.atomic_files import write_parquet, write_text
from rayfed.record.recorded_run import RecordedRun
from rayfed.terminal.table_formats import Table
from rayfed.types import Row
from rayfed.user_files import SCALARS
from tune.results import Outcome, Outcomes
from tune.sweep import sweep_names

SHOWN = (
    *((column, DEPLOYED) for column in (MEAN, OVER_DOMAINS, SIGMA_TYPE, WORST_DOMAIN)),
    (MEAN, HELD_OUT),
)
"""Columns of a round that the table of the best trial shows, and whose scores they are of."""

MOST_SHOWN = 5
"""Number of trials that the table of a sweep with one objective shows, the best ones."""


def write(outcomes: Outcomes) -> Table | None:
    """Write trials.parquet, rounds.parquet, best.yaml and front/.

    Returns:
        The table of the best trial; None where no trial is finished.
    """
    path = outcomes.path
    write_parquet(path / "trials.parquet", [_trial_row(outcomes, t) for t in outcomes.trials])
    rounds = [
        {"trial": t.number, "seed": seed, **row}
        for t in outcomes.trials
        for seed, folder in zip(outcomes.seeds, t.folders, strict=True)
        for row in RecordedRun(folder).rounds
    ]
    if rounds:
        write_parquet(path / "rounds.parquet", rounds)
    best = outcomes.best
    if best is None:
        return None
    _write_config(outcomes, best, path / "best.yaml")
    if len(outcomes.sweep.objectives) > 1:
        for trial in outcomes.front:
            _write_config(outcomes, trial, path / "front" / f"{trial.number:04d}.yaml")
    return table(outcomes)


def _write_config(outcomes: Outcomes, trial: Outcome, path: Path) -> None:
    """Write the config of a trial with its first seed, for `rayfed.run --config`."""
    config = to_dict(outcomes.base.config(trial.values, outcomes.seeds[0]))
    write_text(path, yaml.safe_dump({**config, "output": None, "overwrite": False}, sort_keys=False))


def _trial_row(outcomes: Outcomes, trial: Outcome) -> Row:
    row: Row = {"trial": trial.number, "state": trial.state, "rounds": trial.rounds}
    row |= {key: trial.row.get(key) for key in outcomes.sweep.objectives}
    parameters = outcomes.sweep.read_space().parameters
    row |= {p.key: _cell(trial.values.get(p.key), p.args if p.kind == "choice" else ()) for p in parameters}
    numbers = {k: v for k, v in trial.row.items() if k not in row and k != "round"}
    return {**row, "sha256": trial.sha256, "error": trial.error, **numbers}


def _cell(value: Any, options: Sequence[Any]) -> Any:
    """A value for a column with one data type: JSON text where the options have several types."""
    kinds = {float if isinstance(o, int) and not isinstance(o, bool) else type(o) for o in options}
    plain = kinds - {type(None)} <= {float} or len(kinds - {type(None)}) <= 1
    return value if plain and isinstance(value, SCALARS) else json.dumps(value)


def table(outcomes: Outcomes) -> Table | None:
    """Table of the five best trials and the default, or with several objectives of the Pareto front.

    None where no trial is finished.
    """
    best = outcomes.best
    default = outcomes.default
    if best is None:
        return None
    shown = outcomes.ranked[:MOST_SHOWN] if len(outcomes.sweep.objectives) == 1 else outcomes.front
    papers = "paper's default" if outcomes.sweep.name in sweep_names() else "default"
    columns = {_heading(t, best, default, papers): t for t in shown}
    if default is not None and default not in shown and default.row:
        columns[_heading(default, best, default, papers)] = default
    metric = metric_of(best.row) or ACCURACY
    others = (column.name(metric, of) for column, of in SHOWN)
    names = list(dict.fromkeys([*outcomes.sweep.objectives, *(n for n in others if n in best.row)]))
    rows = [(name, *(number(t.row.get(name)) for t in columns.values())) for name in names]
    for parameter in outcomes.sweep.read_space().parameters:
        values = [t.values.get(parameter.key, "-") for t in columns.values()]
        rows.append((parameter.key, *map(number, values)))
    counts = {state: sum(t.state == state for t in outcomes.trials) for state in get_args(State)}
    notes = (
        *_ties(outcomes, shown),
        *_ends(outcomes, best),
        f"{count_of(len(outcomes.trials), 'trial')}: "
        f"{', '.join(f'{n} {state}' for state, n in counts.items() if n)}; "
        f"round {best.rounds}, {count_of(len(outcomes.seeds), 'seed')} each",
        f"repeat the best: python -m rayfed.run --config {outcomes.path / 'best.yaml'}",
        f"its tensors: sha256 {best.sha256[:16]}",
    )
    goals = ", ".join(f"{direction} {name}" for name, direction in outcomes.sweep.objectives.items())
    return Table(f"{outcomes.sweep.name}: {goals}", ("", *columns), tuple(rows), notes)


def _ties(outcomes: Outcomes, shown: Sequence[Outcome]) -> Iterator[str]:
    """Notes on trials with the same score as one that is shown, and on scores that say nothing yet."""
    name = next(iter(outcomes.sweep.objectives))
    groups = [group for group in outcomes.ties if any(t in shown for t in group)]
    for group in groups:
        *most, last = (str(t.number) for t in group)
        yield (
            f"trials {', '.join(most)} and {last} have the same {name}, "
            f"{number(group[0].row[name])}; the earliest of them comes first"
        )
    best = outcomes.ranked[0]
    if any(best in group for group in groups) and best.rounds == 1:
        yield (
            "warning: one round cannot tell the best trials apart, so the best one is hardly more than the "
            "first one; search again with more rounds, for example rounds=10"
        )


def _ends(outcomes: Outcomes, best: Outcome) -> Iterator[str]:
    """Notes on values of the best trial that lie at an end of their range."""
    for parameter in outcomes.sweep.read_space().parameters:
        value = best.values.get(parameter.key)
        if (end := parameter.end_near(value)) is not None:
            yield (
                f"the best {parameter.key}, {number(value)}, is at the end {number(end)} of its range, so "
                f"better values may lie beyond: search a wider one with space.{parameter.key}"
            )


def _heading(trial: Outcome, best: Outcome, default: Outcome | None, papers: str) -> str:
    """Head of a trial's column; `papers` is the word for the default."""
    marks = ["best"] if trial is best else []
    marks += [papers] if trial is default else []
    return f"trial {trial.number}" + (f" ({', '.join(marks)})" if marks else "")


def number(value: Any) -> str:
    """A value as text; floats with four significant digits.

    >>> number(0.123456), number(None), number("lora"), number(8)
    ('0.1235', '-', 'lora', '8')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(outcomes: Outcomes) -> dict[str, Any]:
    """Results as plain containers, for `--json`."""

    def plain(trial: Outcome | None) -> dict[str, Any] | None:
        if trial is None:
            return None
        return {
            "trial": trial.number,
            "state": trial.state,
            "values": dict(trial.values),
            "row": trial.row,
            "sha256": trial.sha256,
            **({"error": trial.error} if trial.error else {}),
        }

    return {
        "path": str(outcomes.path),
        "objectives": dict(outcomes.sweep.objectives),
        "seeds": list(outcomes.seeds),
        "best": plain(outcomes.best),
        "default": plain(outcomes.default),
        "front": [t.number for t in outcomes.front],
        "trials": [plain(t) for t in outcomes.trials],
    }


def report(outcomes: Outcomes, best: Table, pictures: Mapping[str, Path]) -> None:
    """Write report.md with tables of the best trial and of all trials, and the figures."""
    names = list(outcomes.sweep.objectives)
    keys = [p.key for p in outcomes.sweep.read_space().parameters]
    rows = tuple(
        (
            str(t.number),
            t.state,
            str(t.rounds),
            *(number(t.row.get(name)) for name in names),
            *(number(t.values.get(key)) for key in keys),
        )
        for t in outcomes.trials
    )
    everything = Table("All trials", ("trial", "state", "rounds", *names, *keys), rows)
    drawn = "".join(f"\n![{title}](figures/{file.name})\n" for title, file in pictures.items())
    write_text(outcomes.path / "report.md", f"{best.markdown()}\n{everything.markdown()}{drawn}")
