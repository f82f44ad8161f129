"""A search for hyperparameters: a study that grows by the trials that Optuna proposes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rayfed.config.schema import to_dict
from rayfed.errors import ConfigError, shown, unknown
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import PART, SEED, Key, Value, named_values, plain_value, row_of
from rayfed.experiment.study.described import Described, Fixed, Varied
from rayfed.experiment.study.run_cell import Stop
from rayfed.experiment.study.scores import larger_of
from rayfed.experiment.study.trials import Searched, State, Trial, Trials

if TYPE_CHECKING:
    import optuna


def sweep(  # noqa: PLR0913  (those of a study and those of a search)
    experiment: Varied,
    space: Mapping[str, Any],
    trials: int = 20,
    output: str | Path | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    at_once: int | Literal["auto"] = 1,
    together: int = 1,
    stop: Stop | None = None,
    objective: str | None = None,
    seed: int = 0,
    quiet: bool | None = True,
) -> Search:
    """Search hyperparameters with Optuna's tree-structured Parzen estimator.

    Trials are compared by the model that the method deploys, the clients' own models of `local` and `ditto`,
    on the validation splits of the clients, and on their test splits where no client has a validation split;
    `Search.score` says which. With `evaluation={"validation": "domains"}` each model is validated on the
    validation examples of all clients of its domain, as it is tested where these share their test set. The
    first trial has the values of the experiment, where the space contains them. Where every key has a list,
    combinations are drawn without repetition.

    Args:
        experiment: The experiment that each trial changes.
        space: By key, such as `local.mu`: a list of values, these by a name each, as objects need one, or a
            pair (low, high): whole numbers, if both are, and of positive numbers the logarithm is drawn
            uniformly.
        trials: Number of trials; fewer are run where the lists have fewer combinations.
        output: Folder of the study, in which the same call goes on; None: nothing is written where you look.
        seeds: The seeds of each trial, or their number, counted from 0; its score is the mean over them. One
            seed is that of the experiment.
        at_once: Number of runs side by side, as of `Study.run`.
        together: Number of trials that are proposed before any of them is scored, so that they can run side
            by side. The proposals depend on it.
        stop: As of `Study.run`; a trial that it ended is compared by its score until then.
        objective: Another column of `Run.metrics` by which trials are compared, such as `val_loss` or
            `worst_client_accuracy`.
        seed: Seed of the search.
        quiet: As of `Experiment.run`.

    Returns:
        The study of all trials; `best_params` has the values of the best one.

    Raises:
        ConfigError: A key or a range is wrong, or something in a trial.
        PartsFailedError: Trials failed; the others are finished.
    """
    search = Search(experiment, space, trials, seeds=seeds, together=together, objective=objective, seed=seed)
    search.run(output, at_once, stop, quiet)
    return search


@dataclass(kw_only=True)
class Point:
    """A point of the space, with a cell for each seed.

    Attributes:
        names: The name of each key's value, as in the coordinates.
        proposal: Optuna's trial, which is told the score; None: the point is one of a list.
        score: Mean over the seeds; None: not known, or it failed.
    """

    names: Mapping[str, Value]
    proposal: optuna.Trial | None = None
    score: float | None = None


class Search(Searched):
    """A study whose cells are the trials of a search, by their values and seeds; `run` proposes them."""

    def __init__(
        self,
        experiment: Varied,
        space: Mapping[str, Any],
        trials: int = 20,
        *,
        seeds: int | Sequence[int] = 1,
        together: int = 1,
        objective: str | None = None,
        seed: int = 0,
    ) -> None:
        """Describe a search; the arguments are those of `sweep`.

        Raises:
            ConfigError: A key, a range or a number is wrong.
        """
        config = experiment.config()
        every = [config.seed] if seeds == 1 else list(range(seeds)) if isinstance(seeds, int) else list(seeds)
        if not space or trials < 1 or not every or together < 1:
            what = f"{trials} trials of {len(space)} keys, {len(every)} seeds, {together} together"
            raise ConfigError(f"sweep: {what}; give at least one of each")
        if taken := {PART, SEED, "round"} & set(space):
            raise ConfigError(f"sweep: {min(taken)} cannot be searched; give seeds= for several seeds")
        self._space = {key: _choices(key, values) for key, values in space.items()}
        validated = config.evaluation.validation or True  # which kind is the experiment's choice
        self._base = experiment.changed(**{"evaluation.validation": validated})
        self._most, self._together, self._search_seed = trials, together, seed
        self._trial_seeds, self._objective = every, objective
        self._score: str | None = None
        super().__init__(self._first_cells(), names=(*space, SEED))

    def _begin(self, at_once: int | Literal["auto"]) -> None:
        """Propose the first trials.

        Raises:
            ConfigError: Fewer cells are proposed at a time than shall run side by side.
        """
        cells = self._first_cells()
        most = self._most * len(self._trial_seeds)
        if isinstance(at_once, int) and len(cells) < min(at_once, most):
            raise ConfigError(
                f"at_once: {at_once} cells cannot run side by side where {len(cells)} are proposed at a "
                f"time; give together={at_once}, which proposes trials in groups, or more seeds"
            )
        self.names, self.cells = (*self._space, SEED), cells

    def _first_cells(self) -> dict[Key, Described]:
        """Forget all trials, and propose the first ones; returns their cells."""
        self._points: list[Point] = []
        self._failed: Mapping[Key, str] = {}
        self._score = None
        self._proposals = self._propose()
        return self._next_cells()

    def _next_cells(self) -> dict[Key, Described]:
        """The cells of the trials that are proposed next; none: there are no more."""
        proposed = next(self._proposals, [])
        self._points += proposed
        return {key: cell for point in proposed for key, cell in self._cells_of(point)}

    def _cells_of(self, point: Point) -> Iterator[tuple[Key, Described]]:
        values = {
            key: choices[point.names[key]] if isinstance(choices, Mapping) else point.names[key]
            for key, choices in self._space.items()
        }
        config = self._base.changed(**values).config()
        for seed in self._trial_seeds:
            key = (*(point.names[name] for name in self._space), seed)
            yield key, Fixed(replace(config, seed=seed), self._base.given)

    def _grow(self, failed: Mapping[Key, str]) -> Study | None:
        """Score the trials that ended, and propose the next ones; trials with known values run no cell."""
        self._failed = failed
        known = {row_of(key, self.names) for key in self.cells}
        while True:
            for point in self._points:
                if point.score is None:
                    point.score = self._score_of(point)
            proposed = self._next_cells()
            new = {key: cell for key, cell in proposed.items() if key[:-1] not in known}
            if new:
                return Study(new, names=(*self._space, SEED))
            if not proposed:
                return None

    def _propose(self) -> Iterator[list[Point]]:
        """The trials, in groups that are proposed before any of them is scored."""
        own = self._own_values()
        if all(isinstance(choices, Mapping) for choices in self._space.values()):
            every = itertools.product(*self._space.values())
            points = [dict(zip(self._space, each, strict=True)) for each in every]
            random.Random(self._search_seed).shuffle(points)
            points.sort(key=lambda names: names != own)  # the experiment's own values, then the others
            yield [Point(names=names) for names in points[: self._most]]
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._search_seed))
        if own is not None:
            study.enqueue_trial({key: self._place(key, name) for key, name in own.items()})
        for first in range(0, self._most, self._together):
            asked = [self._ask(study) for _ in range(min(self._together, self._most - first))]
            yield asked
            for point in asked:
                assert point.proposal is not None  # they were asked for above
                if point.score is None:
                    study.tell(point.proposal, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(point.proposal, self._sign * point.score)

    def _ask(self, study: optuna.Study) -> Point:
        proposal = study.ask()
        names: dict[str, Value] = {}
        for key, choices in self._space.items():
            if isinstance(choices, Mapping):
                names[key] = list(choices)[proposal.suggest_int(key, 0, len(choices) - 1)]
            elif all(isinstance(end, int) for end in choices):
                low, high = map(int, choices)
                names[key] = proposal.suggest_int(key, low, high, log=low > 0)
            else:
                names[key] = proposal.suggest_float(key, *choices, log=choices[0] > 0)
        return Point(names=names, proposal=proposal)

    def _own_values(self) -> dict[str, Value] | None:
        """The names of the experiment's own values of the keys; None: the space does not contain them."""
        tree = to_dict(self._base.config())
        own: dict[str, Value] = {}
        for key, choices in self._space.items():
            node: Any = tree
            for part in key.split("."):
                node = node.get(part) if isinstance(node, Mapping) else None
            if isinstance(choices, Mapping):
                named = [name for name, value in choices.items() if value == node]
            else:
                kinds = (int,) if all(isinstance(end, int) for end in choices) else (int, float)
                named = [node] if type(node) in kinds and choices[0] <= node <= choices[1] else []
            if not named:
                return None
            own[key] = named[0]
        return own

    def _place(self, key: str, name: Value) -> Any:
        """The value that Optuna knows: its place in a list, or the number itself."""
        choices = self._space[key]
        return list(choices).index(name) if isinstance(choices, Mapping) else name

    def _score_of(self, point: Point) -> float | None:
        """The mean score over the seeds of a point; None: one of its cells failed or is not finite.

        Raises:
            ConfigError: The objective is no column of the results, or no number.
        """
        if not self.finished:
            return None
        if self._score is None:
            self._score = self._column()
        row = self._row(point)
        values = self._scores(None, {row: "trial"})["trial"]
        return None if values.isna().any() else float(values.mean())

    def _column(self) -> str:
        """The column by which trials are compared; where none is named, that of validation, if there is one.

        Raises:
            ConfigError: There is no such column, or it is no number.
        """
        wanted, metric = self._objective, self.metric
        numbers = [
            str(name)
            for name in self.results.select_dtypes("number").columns
            if name not in (*self.names, "round")
        ]
        if wanted is None:
            return f"val_{metric}" if f"val_{metric}" in numbers else metric
        if wanted not in numbers:
            raise ConfigError(unknown("sweep: objective", wanted, numbers))
        return wanted

    @property
    def _sign(self) -> int:
        """The factor that makes smaller scores the better ones."""
        return -1 if larger_of(self.score, self.metric) else 1

    def _row(self, point: Point) -> Key:
        return tuple(point.names[name] for name in self._space)

    @property
    def searched(self) -> Trials:
        """The trials so far, and what is searched."""
        score = self._score
        return Trials(
            objectives={} if score is None else {score: "min" if self._sign == 1 else "max"},
            space={key: _in_words(choices) for key, choices in self._space.items()},
            trials=[self._trial(number, point) for number, point in enumerate(self._points)],
        )

    def _trial(self, number: int, point: Point) -> Trial:
        row = self._row(point)
        keys = [key for key in self.cells if row_of(key, self.names) == row]
        reasons = [self._failed[key] for key in keys if key in self._failed]
        runs = [self.finished[key] for key in keys if key in self.finished]
        state: State = "failed" if reasons else "unfinished"
        if not reasons and len(runs) == len(keys):
            state = "finished" if all(run.sha256 for run in runs) else "stopped early"
        scores = {} if point.score is None or self._score is None else {self._score: point.score}
        return Trial(
            number=number, values=point.names, state=state, scores=scores, error="; ".join(reasons[:1])
        )


def _choices(key: str, values: Any) -> Mapping[Value, Any] | tuple[float, float]:
    """The values of a key by name, or a range of numbers.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(values, list | Mapping) and values:
        return {plain_value(key, name): value for name, value in named_values(f"sweep: {key}", values)}
    is_pair = isinstance(values, tuple) and len(values) == 2
    if is_pair and all(isinstance(end, int | float) for end in values) and values[0] < values[1]:
        return values
    raise ConfigError(
        f"sweep: {key}: {shown(values)} is neither a list of values nor a pair (low, high) of numbers with "
        "low < high"
    )


def _in_words(choices: Mapping[Value, Any] | tuple[float, float]) -> str:
    return f"one of {', '.join(map(str, choices))}" if isinstance(choices, Mapping) else str(choices)
