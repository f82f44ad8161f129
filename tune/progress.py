"""Progress of a sweep: a line on the screen when a trial ends, and why it failed in the study."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.tune

from rayfed.errors import RayFedError, one_line
from rayfed.terminal.exit_code import STOP
from tune.report import number
from tune.study import SweepStudy


class Progress(ray.tune.Callback):
    """Tells how trials ended, and ends the sweep on request."""

    def __init__(self, study: SweepStudy, tell: Callable[[str], None]) -> None:
        """Begin to tell.

        Args:
            study: The study of the sweep.
            tell: Shows a line.
        """
        self._study, self._tell = study, tell
        self._objectives = tuple(study.search.sweep.objectives)
        self._rounds = study.search.config.rounds
        self._began = time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if STOP.is_set():  # Ray may swallow an exception raised by a signal handler
            raise KeyboardInterrupt

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        done = trial.last_result.get("round", 0)
        how = "finished" if done == self._rounds else f"stopped after round {done}"
        self._say(trial, how, [f"{name} {number(trial.last_result.get(name))}" for name in self._objectives])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        file = trial.pickled_error_file  # None, where Ray itself failed
        error = RayFedError("Ray could not run it") if file is None else pickle.loads(Path(file).read_bytes())
        cause = getattr(error, "cause", None) or error
        self._study.fail(trial.config["number"], f"{type(cause).__name__}: {one_line(cause)}")
        self._say(trial, "failed", [])

    def _say(self, trial: Any, how: str, scores: list[str]) -> None:
        values = [f"{key}={number(value)}" for key, value in trial.config["values"].items()]
        seconds = time.monotonic() - self._began
        head = f"{seconds:4.0f} s  trial {trial.config['number']:>3} {how}"
        self._tell("  ".join([head, *scores, *values]))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, as Ray's copy is never used."""
        return {}
