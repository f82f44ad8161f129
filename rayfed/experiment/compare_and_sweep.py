"""Several experiments of one call: a comparison over seeds, and a search for hyperparameters."""

from __future__ import annotations

import html
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, shown, unknown
from rayfed.experiment.experiment import Experiment, one_run
from rayfed.experiment.finished_run import Run
from rayfed.objective import SMALLER_IS_BETTER, is_larger_better, metric_in, scale_of, share_of
from rayfed.user_objects import title

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of several experiments on the same seeds.

    Attributes:
        runs: The runs of each experiment by its name, one for each seed.
        seeds: The seeds.
        path: Folder of all runs; None: nothing was written.
    """

    runs: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]
    path: Path | None

    @property
    def scores(self) -> pd.DataFrame:
        """The metric of each run: a row for each seed, a column for each experiment."""
        import pandas as pd

        values = {name: [run.metrics.get(run.metric) for run in runs] for name, runs in self.runs.items()}
        return pd.DataFrame(values, index=pd.Index(self.seeds, name="seed"))

    @property
    def table(self) -> pd.DataFrame:
        """Mean, standard deviation over the seeds, mean over domains and worst client of each experiment.

        `p` is the p-value of a two-sided paired t-test of its scores against those of the first experiment,
        where there are two seeds or more, and `p_corrected` the same, corrected by Holm for the number of
        these tests. `model` says whose scores these are (`Run.deployed`), where methods that
        deploy the clients' personal models are compared with methods that deploy the global one.
        """
        import pandas as pd
        from scipy.stats import ttest_rel

        from rayfed.evaluation.metrics import holm

        scores = self.scores
        first = scores.columns[0]
        rows = {}
        for name, runs in self.runs.items():
            metric = runs[0].metric
            row: dict[str, Any] = {
                "model": runs[0].deployed,
                metric: scores[name].mean(),
                "deviation": scores[name].std(ddof=1) if len(scores) > 1 else None,
            }
            for key in (f"{metric}_domain", f"worst_client_{metric}"):
                known = [run.metrics[key] for run in runs if run.metrics.get(key) is not None]
                row[key] = sum(known) / len(known) if known else None
            tested = name != first and len(scores) > 1 and (scores[name] != scores[first]).any()
            row["p"] = float(ttest_rel(scores[name], scores[first]).pvalue) if tested else None
            rows[name] = row
        corrected = holm({name: row["p"] for name, row in rows.items() if row["p"] is not None})
        for name, row in rows.items():
            row["p_corrected"] = corrected.get(name)
        if len({row["model"] for row in rows.values()}) == 1:
            for row in rows.values():
                del row["model"]
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the table, such as on settings in which the experiments differ."""
        from rayfed.config.schema import to_dict
        from rayfed.config.variants import differing_values
        from rayfed.report.final_table import some_clients

        values = differing_values({name: to_dict(runs[0].config) for name, runs in self.runs.items()})
        some = {name: some_clients(runs[0].metrics) for name, runs in self.runs.items()}
        whose = [f"{name}: scored are {words}" for name, words in some.items() if words]
        return [*([values] if values else []), *whose]

    @property
    def best(self) -> str:
        """Name of the experiment with the best mean."""
        means = self.scores.mean()
        metric = next(iter(self.runs.values()))[0].metric
        return str(means.idxmax() if is_larger_better(metric) else means.idxmin())

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page about all runs, under the names of the experiments, with their paired differences.

        Args:
            path: The file; None: report.html in the folder.

        Raises:
            ConfigError: There is no folder and no file is given, or the file belongs to something else.
        """
        from rayfed.report.page.render import NAME, write_report

        if path is None and self.path is None:
            raise ConfigError(
                "report: the runs were not written; give a file, such as .report('report.html')"
            )
        file = Path(path).expanduser() if path is not None else Path(str(self.path)) / NAME
        named = [(run._folder, name) for name, runs in self.runs.items() for run in runs]
        write_report([folder for folder, _ in named], file, [name for _, name in named])
        return file

    def plot(self) -> Any:
        """Draw the metric of each experiment over the rounds, the mean over the seeds and their range.

        Returns:
            A figure of matplotlib.
        """
        import pandas as pd

        from rayfed.report.style import shown_figure

        figure = shown_figure(6, 3.5)
        axes = figure.subplots()
        metric = next(iter(self.runs.values()))[0].metric
        share = share_of(metric)
        for name, runs in self.runs.items():
            scored = [run.history.set_index("round")[metric].dropna() * share for run in runs]
            seeds = pd.concat(scored, axis=1)
            [line] = axes.plot(seeds.index, seeds.mean(axis=1), marker=".", label=name)
            if len(runs) > 1:
                ends = (seeds.min(axis=1), seeds.max(axis=1))
                axes.fill_between(seeds.index, *ends, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{metric} %" if share != 1 else metric)
        axes.legend()
        return figure

    def latex(self) -> str:
        """The table for LaTeX (`booktabs`): shares in percent, three digits, names escaped."""
        from rayfed.terminal.table_formats import latex_text

        table = self.table
        metric = next(iter(self.runs.values()))[0].metric
        shares = [
            c for c in (metric, "deviation", f"{metric}_domain", f"worst_client_{metric}") if c in table
        ]
        table = table.assign(**{name: table[name] * share_of(metric) for name in shares})
        table.index = [latex_text(str(name)) for name in table.index]
        unit = r" (\%)" if share_of(metric) != 1 else ""
        table.columns = [latex_text(str(c)) + (unit if c in shares else "") for c in table.columns]
        return str(table.to_latex(float_format="%.3g", na_rep=""))

    def _repr_html_(self) -> str:
        """HTML of the table and its notes, for a notebook."""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return str(self.table.to_html(border=0)) + notes

    def __repr__(self) -> str:
        return "\n".join([f"<Comparison over {len(self.seeds)} seeds>", str(self.table), *self.notes])


def compare(
    experiments: Sequence[Experiment] | Mapping[str, Experiment],
    seeds: int | Sequence[int] = 1,
    output: str | Path | None = None,
    *,
    quiet: bool | None = None,
) -> Comparison:
    """Run experiments on the same seeds, one after the other, on one Ray.

    Runs that `output` holds from an earlier call are not repeated, and one that was interrupted is continued.

    Args:
        experiments: The experiments, or these by name; the first one is what the others are compared with.
        seeds: The seeds, or their number, counted from 0.
        output: Folder of all runs; None: nothing is written where you look.
        quiet: As of `Experiment.run`.

    Raises:
        ConfigError: There are fewer than two experiments, something in one of them is wrong, or the folder
            holds other files or runs of other experiments; what is wrong in an experiment is found before the
            first run.
    """
    named = dict(experiments) if isinstance(experiments, Mapping) else _by_method(experiments)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if len(named) < 2 or not chosen:
        what = f"{len(named)} experiments and {len(chosen)} seeds"
        raise ConfigError(f"compare: there are {what}; give two experiments or more, and one seed or more")
    for experiment in named.values():
        one_run(experiment.config())
    folder = None if output is None else Path(output).expanduser()
    runs: dict[str, list[Run]] = {name: [] for name in named}
    for seed, (name, experiment) in itertools.product(chosen, named.items()):
        place = None if folder is None else folder / f"{_as_folder(name)}-seed{seed}"
        one = experiment.changed(seed=seed)
        if place is not None and (place / "config.yaml").exists():
            runs[name].append(one.resume(place, quiet=quiet))
        else:
            runs[name].append(one.run(place, quiet=quiet))
    return Comparison(runs=runs, seeds=chosen, path=folder)


def _as_folder(name: str) -> str:
    """The name of an experiment as that of a folder."""
    return re.sub(r"[^\w.=,+-]+", "-", name)


def _by_method(experiments: Sequence[Experiment]) -> dict[str, Experiment]:
    """The experiments by their methods, and where two have the same by what differs, or a number."""
    if isinstance(experiments, Experiment):
        raise ConfigError("compare: one experiment cannot be compared; give a list of two or more")
    methods = [title(experiment.config().algorithm).replace(":", ".") for experiment in experiments]
    by_method: dict[str, Experiment] = {}
    for method, experiment in zip(methods, experiments, strict=True):
        alike = [each for name, each in zip(methods, experiments, strict=True) if name == method]
        what = experiment.differs_from(alike)
        name = f"{method} {what}" if what else method
        number = 2
        while (own := name if number == 2 and name not in by_method else f"{name}-{number}") in by_method:
            number += 1
        by_method[own] = experiment
    return by_method


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Finished trials of a search.

    Attributes:
        trials: Values of each trial by key, and its run.
        metric: The column by which trials were compared, such as `val_accuracy`.
    """

    trials: Sequence[tuple[Mapping[str, Any], Run]]
    metric: str

    @property
    def best(self) -> Mapping[str, Any]:
        """The values of the best trial."""
        return self._best[0]

    @property
    def run(self) -> Run:
        """The run of the best trial."""
        return self._best[1]

    @property
    def _best(self) -> tuple[Mapping[str, Any], Run]:
        sign = 1 if self._is_larger_better else -1
        return max(self.trials, key=lambda trial: sign * trial[1].metrics[self.metric])

    @property
    def _is_larger_better(self) -> bool:
        return larger_of(self.metric, self.trials[0][1].metric)

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the scores, such as on test sets with classes that clients do not have."""
        from rayfed.experiment.single_run import classes_in_words

        tested = classes_in_words(self.trials[0][1]._setup)
        return [tested] if tested else []

    @property
    def table(self) -> pd.DataFrame:
        """A row for each trial: its values and the score, the best one first."""
        import pandas as pd

        rows = [{**values, self.metric: run.metrics[self.metric]} for values, run in self.trials]
        return pd.DataFrame(rows).sort_values(self.metric, ascending=not self._is_larger_better)

    def _repr_html_(self) -> str:
        """HTML of the table and its notes, for a notebook."""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return str(self.table.to_html(border=0)) + notes

    def __repr__(self) -> str:
        value = self.run.metrics[self.metric] * scale_of(self.metric)
        first = f"<Sweep of {len(self.trials)} trials: {self.metric} {value:.4g} with {dict(self.best)}>"
        return "\n".join([first, *self.notes])


def larger_of(column: str, metric: str) -> bool:
    """Whether larger values of a column are better. Args: column: its name. metric: that of the runs."""
    if any(word in column for word in SMALLER_IS_BETTER):
        return False
    return is_larger_better(metric_in(column) or metric)


def _key(run: Run, objective: str | None) -> str:
    """The column by which trials are compared; where none is named that of validation, if a run has one.

    Raises:
        ConfigError: The run has no such column, or it is no number.
    """
    metric = run.metric
    if objective is None:
        return f"val_{metric}" if f"val_{metric}" in run.metrics else metric
    numbers = [name for name, value in run.metrics.items() if isinstance(value, int | float)]
    if objective not in numbers:
        raise ConfigError(unknown("sweep: objective", objective, numbers))
    return objective


def sweep(
    experiment: Experiment,
    space: Mapping[str, Any],
    trials: int = 20,
    *,
    objective: str | None = None,
    seed: int = 0,
    quiet: bool | None = True,
) -> Sweep:
    """Search hyperparameters with Optuna's tree-structured Parzen estimator, one trial after the other.

    Trials run in this process, because only it knows objects that were defined in it. The command
    `rayfed sweep` runs trials of named parts next to each other, ends bad ones early, and can be resumed.

    Trials are compared by the model that the method deploys, the clients' own models of `local` and `ditto`,
    on the validation splits of the clients, and on their test splits where no client has a validation split;
    `Sweep.metric` says which. With `evaluation={"validation": "domains"}` each model is validated on the
    validation examples of all clients of its domain, as it is tested where these share their test set. The
    first trial has the values of the experiment, where
    the space contains them. Where every key has a list, combinations are drawn without repetition.

    Args:
        experiment: What each trial changes.
        space: By key, such as `local.mu`: a list of values, or a pair (low, high): whole numbers, if both
            are, and of positive numbers the logarithm is drawn uniformly.
        trials: Number of trials; fewer are run where the lists have fewer combinations.
        objective: Another column of `Run.metrics` by which trials are compared, such as `val_loss` or
            `worst_client_accuracy`.
        seed: Seed of the search.
        quiet: As of `Experiment.run`.

    Raises:
        ConfigError: A key or a range is wrong, or something in a trial.
    """
    if not space or trials < 1:
        raise ConfigError(f"sweep: {trials} trials of {len(space)} keys; give at least one of both")
    for key, values in space.items():
        _check_range(key, values)
    validated = experiment.config().evaluation.validation or True  # which kind is the experiment's choice
    base = experiment.changed(**{"evaluation.validation": validated})
    one_run(base.config())
    own = _own_values(base, space)
    done: list[tuple[Mapping[str, Any], Run]] = []

    def score(values: Mapping[str, Any]) -> float:
        run = base.changed(**values).run(quiet=quiet)
        done.append((values, run))
        column = _key(run, objective)
        value: float = run.metrics[column]
        return -value if larger_of(column, run.metric) else value

    if all(isinstance(values, list) for values in space.values()):
        combinations = [dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())]
        random.Random(seed).shuffle(combinations)
        combinations.sort(key=lambda each: each != own)  # the experiment's own values, then the others
        for values in combinations[:trials]:
            score(values)
    else:
        _search(space, own, trials, seed, score)
    return Sweep(trials=done, metric=_key(done[0][1], objective))


def _search(
    space: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    trials: int,
    seed: int,
    score: Callable[[Mapping[str, Any]], float],
) -> None:
    """Let Optuna choose the values of each trial, after the experiment's own ones."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    if own is not None:
        places = {
            key: value.index(own[key]) if isinstance(value, list) else own[key]
            for key, value in space.items()
        }
        study.enqueue_trial(places)
    for _ in range(trials):
        trial = study.ask()
        study.tell(trial, score({key: _draw_value(trial, key, choices) for key, choices in space.items()}))


def _own_values(experiment: Experiment, space: Mapping[str, Any]) -> dict[str, Any] | None:
    """The experiment's own values of the keys of a space; None: the space does not contain them."""
    from rayfed.config.schema import to_dict

    tree = to_dict(experiment.config())
    own = {}
    for key, values in space.items():
        node: Any = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if not _contains(values, node):
            return None
        own[key] = node
    return own


def _contains(values: Any, value: Any) -> bool:
    """Whether a list has a value, or a range, of whole numbers if both its ends are."""
    if isinstance(values, list):
        return value in values
    kinds = (int,) if all(isinstance(end, int) for end in values) else (int, float)
    return type(value) in kinds and bool(values[0] <= value <= values[1])


def _check_range(key: str, values: Any) -> None:
    is_pair = (
        isinstance(values, tuple) and len(values) == 2 and all(isinstance(v, int | float) for v in values)
    )
    if isinstance(values, list) and values:
        return
    if not is_pair or not values[0] < values[1]:
        raise ConfigError(
            f"sweep: {key}: {shown(values)} is neither a list of values nor a pair (low, high) of numbers "
            "with low < high"
        )


def _draw_value(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return values[trial.suggest_int(key, 0, len(values) - 1)]
    kind = trial.suggest_int if all(isinstance(value, int) for value in values) else trial.suggest_float
    return kind(key, *values, log=values[0] > 0)
