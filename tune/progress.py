"""Progress of a sweep on the screen: one line when a trial ends."""

from __future__ import annotations

import time
from typing import Any

import ray.tune

from rayfed.terminal.console import say
from rayfed.terminal.exit_code import STOP
from tune.report import number


class Progress(ray.tune.Callback):
    """Prints how trials ended, and ends the sweep on request.

    Attributes:
        shown: Whether to print. It is an attribute of the class and therefore not saved in Ray's snapshot, so
            that a resumed sweep may have another value.
    """

    shown = True

    def __init__(self, objectives: tuple[str, ...], rounds: int) -> None:
        """Print these columns.

        Args:
            objectives: Columns of the results.
            rounds: Number of rounds of a whole trial.
        """
        self._objectives = objectives
        self._rounds = rounds
        self._began = time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if STOP.is_set():  # Ray may swallow an exception raised by a signal handler
            raise KeyboardInterrupt

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        done = trial.last_result.get("round", 0)
        how = "finished" if done == self._rounds else f"stopped after round {done}"
        self._say(trial, how, [f"{name} {number(trial.last_result.get(name))}" for name in self._objectives])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, "failed", [])

    def _say(self, trial: Any, how: str, scores: list[str]) -> None:
        if not Progress.shown:
            return
        values = [f"{key}={number(value)}" for key, value in trial.config["values"].items()]
        seconds = time.monotonic() - self._began
        say("  ".join([f"{seconds:4.0f} s  trial {trial.config['number']:>3} {how}", *scores, *values]))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_began"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _began=time.monotonic())
