"""Figures of sweeps: scales of hyperparameters."""

import numpy as np
import pytest

from tune.figures import _scale
from tune.results import Outcome


def trials(*values):
    return [
        Outcome(number=i, state="finished", values=v, row={}, sha256="", error="")
        for i, v in enumerate(values)
    ]


def test_every_value_has_a_place_on_its_scale():
    """Numbers by their size, over a wide range by their logarithm; options, null among them, evenly."""
    assert _scale(trials({"a": 2}, {"a": 4}, {"a": 3}), "a")[0] == {"2": 0, "4": 1, "3": 0.5}
    wide = _scale(trials({"a": 0.01}, {"a": 0.1}, {"a": 1.0}), "a")[0]
    assert list(wide.values()) == pytest.approx([0, 0.5, 1])
    heights, ticks = _scale(trials({"a": 10}, {"a": None}, {"a": 2}, {}), "a")
    assert heights == {"2": 0, "10": 0.5, "null": 1}
    assert [text for _, text in ticks] == ["2", "10", "null"]
    assert np.isfinite(list(heights.values())).all()
