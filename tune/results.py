"""Results of a sweep, read from its folder: from the study and the run folders of its trials."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial, TrialState

from rayfed.config.schema import to_dict
from rayfed.record.files import write_parquet, write_text
from rayfed.record.folder import finished
from rayfed.record.readers import read_rows
from rayfed.report.table import Table
from tune.experiment import Base
from tune.folder import ERROR, Row, trial_folder
from tune.searcher import REFUSED, load_study
from tune.space import SCALARS, Space
from tune.sweep import Sweep
from tune.trial import mean_of

STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}
SHOWN = ("accuracy", "accuracy_domain", "sigma_type", "worst_domain_accuracy", "held_out_accuracy")
DEFAULT = 0
"""Number of the trial with the paper's values, which is proposed first."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one trial.

    Attributes:
        number: Index in the order of proposals.
        state: finished, stopped early, failed or unfinished.
        values: Hyperparameters by config key.
        row: Columns of its last round, means over seeds; empty where no round was run.
        sha256: SHA-256 digest of the final tensors of the first seed; empty unless finished.
        error: First line of the error with which it failed, else empty.
    """

    number: int
    state: str
    values: Mapping[str, Any]
    row: Row
    sha256: str
    error: str

    @property
    def rounds(self) -> int:
        return int(self.row.get("round", 0))


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """All trials of a sweep, in the order of their proposals.

    Attributes:
        path: Folder of the sweep.
        sweep: Space, objectives, searcher, scheduler and budget.
        base: The experiment that was varied.
        seeds: Experiment seeds of every trial.
        trials: Results of the trials.
    """

    path: Path
    sweep: Sweep
    base: Base
    seeds: tuple[int, ...]
    trials: tuple[Outcome, ...]

    @property
    def finished(self) -> list[Outcome]:
        """Trials that ran all rounds and have every objective."""
        names = self.sweep.objectives
        return [
            t
            for t in self.trials
            if t.state == "finished" and all(is_score(t.row.get(name)) for name in names)
        ]

    @property
    def best(self) -> Outcome | None:
        """The best finished trial by the first objective, the earlier of equal ones; None: there is none."""
        name, direction = next(iter(self.sweep.objectives.items()))
        sign = 1 if direction == "max" else -1
        return max(self.finished, key=lambda t: (sign * t.row[name], -t.number), default=None)

    @property
    def default(self) -> Outcome | None:
        """The trial with the paper's values."""
        return next((t for t in self.trials if t.number == DEFAULT), None)

    @property
    def front(self) -> list[Outcome]:
        """Pareto front: finished trials that no other trial dominates in the objectives."""
        signs = {n: 1 if d == "max" else -1 for n, d in self.sweep.objectives.items()}
        points = [(t, [s * t.row[n] for n, s in signs.items()]) for t in self.finished]
        return [
            t for t, own in points if not any(_dominates(other, own) for _, other in points if other != own)
        ]


def is_score(value: object) -> bool:
    """Whether an objective has a value that trials can be compared by."""
    return isinstance(value, int | float) and math.isfinite(value)


def _dominates(other: Sequence[float], own: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(other, own, strict=True))


def read_outcomes(path: Path, sweep: Sweep, base: Base, seeds: tuple[int, ...]) -> Outcomes:
    """Read the results of a sweep, finished or not, from its folder."""
    space = sweep.read_space()
    rounds = base.config({}).rounds
    study = load_study(path).get_trials(deepcopy=False)
    known = [t for t in study if t.state is not TrialState.WAITING and REFUSED not in t.user_attrs]
    trials = tuple(_outcome(path, t, space, seeds, (rounds, tuple(sweep.objectives))) for t in known)
    return Outcomes(path=path, sweep=sweep, base=base, seeds=seeds, trials=trials)


def _outcome(
    path: Path, trial: FrozenTrial, space: Space, seeds: tuple[int, ...], whole: tuple[int, tuple[str, ...]]
) -> Outcome:
    folder = trial_folder(path, trial.number)
    state = STATES[trial.state]
    rows = [read_rows(f) if (f / "result.json").exists() else [] for f in seed_folders(folder, seeds)]
    done = min(map(len, rows))
    scored = [mean_of([r[i] for r in rows], whole[1]) for i in range(done)]
    full = [row for row in scored if all(name in row for name in whole[1])]
    error = folder / ERROR
    return Outcome(
        number=trial.number,
        state=state,
        values=decode(trial, space),
        row=(full or scored or [{}])[-1],
        sha256=finished(next(iter(seed_folders(folder, seeds))), whole[0]) if state == "finished" else "",
        error=error.read_text().strip().splitlines()[0] if state == "failed" and error.exists() else "",
    )


def seed_folders(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """The run folders of a trial, one per seed."""
    return [folder / f"seed-{seed}" for seed in seeds]


def decode(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """The values of a trial; labels that Optuna stores are turned into the options they stand for."""
    from optuna.trial import FixedTrial

    complete = all(p.key in trial.params for p in space.parameters if not p.when)
    return space.suggest(FixedTrial(trial.params)) if complete else dict(trial.params)


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
        for seed, folder in zip(
            outcomes.seeds, seed_folders(trial_folder(path, t.number), outcomes.seeds), strict=True
        )
        if (folder / "result.json").exists()
        for row in read_rows(folder)
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
    """Table of the best trial and the paper's default, or with several objectives of the Pareto front.

    None where no trial is finished.
    """
    best = outcomes.best
    default = outcomes.default
    if best is None:
        return None
    shown = [best] if len(outcomes.sweep.objectives) == 1 else outcomes.front
    columns = {_heading(t, best, default): t for t in shown}
    if default is not None and default not in shown and default.row:
        columns[_heading(default, best, default)] = default
    names = list(dict.fromkeys([*outcomes.sweep.objectives, *(n for n in SHOWN if n in best.row)]))
    rows = [(name, *(number(t.row.get(name)) for t in columns.values())) for name in names]
    for parameter in outcomes.sweep.read_space().parameters:
        values = [t.values.get(parameter.key, "-") for t in columns.values()]
        rows.append((parameter.key, *map(number, values)))
    counts = {state: sum(t.state == state for t in outcomes.trials) for state in STATES.values()}
    notes = (
        f"{len(outcomes.trials)} trials: {', '.join(f'{n} {state}' for state, n in counts.items() if n)}; "
        f"round {best.rounds}, {len(outcomes.seeds)} seed(s) each",
        f"repeat the best: python -m rayfed.run --config {outcomes.path / 'best.yaml'}",
        f"its tensors: sha256 {best.sha256[:16]}",
    )
    goals = ", ".join(f"{direction} {name}" for name, direction in outcomes.sweep.objectives.items())
    return Table(f"{outcomes.sweep.name}: {goals}", ("", *columns), tuple(rows), notes)


def _heading(trial: Outcome, best: Outcome, default: Outcome | None) -> str:
    marks = ["best"] if trial is best else []
    marks += ["paper's default"] if trial is default else []
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
