"""Figures of sweeps: scales of hyperparameters."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tune.figures import _scale, parallel
from tune.results import Outcome, Outcomes


def trials(*values):
    return [Outcome(number=i, state="finished", values=v, row={}) for i, v in enumerate(values)]


def test_every_value_has_a_place_on_its_scale():
    """Numbers by their size, over a wide range by their logarithm; options, null among them, evenly."""
    assert _scale(trials({"a": 2}, {"a": 4}, {"a": 3}), "a")[0] == {"2": 0, "4": 1, "3": 0.5}
    wide = _scale(trials({"a": 0.01}, {"a": 0.1}, {"a": 1.0}), "a")[0]
    assert list(wide.values()) == pytest.approx([0, 0.5, 1])
    heights, ticks = _scale(trials({"a": 10}, {"a": None}, {"a": 2}, {}), "a")
    assert heights == {"2": 0, "10": 0.5, "null": 1}
    assert [text for _, text in ticks] == ["2", "10", "null"]
    assert np.isfinite(list(heights.values())).all()


def test_of_equal_trials_the_figure_marks_the_one_that_the_table_calls_the_best(tmp_path):
    found = [
        replace(trial, row={"accuracy": score}, scores={"accuracy": score})
        for trial, score in zip(trials({"a": 1}, {"a": 2}, {"a": 3}), (0.5, 0.7, 0.7), strict=True)
    ]
    sweep = SimpleNamespace(objectives={"accuracy": "max"}, searcher="random", trials=3, name="mine")
    outcomes = Outcomes(path=tmp_path, sweep=sweep, base=None, seeds=(0,), trials=tuple(found))
    assert outcomes.best.number == 1
    [axis, _] = parallel(outcomes, "accuracy", "parallel").figure.axes
    [bold] = [line for line in axis.lines if line.get_linewidth() == 3.0]
    assert bold.get_ydata() == [0.5]  # of the value 2, between 1 and 3
