"""Figures of a sweep: scores of its trials, importance and values of hyperparameters, Pareto front."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.report import style
from tune.results import Outcome, Outcomes
from tune.searcher import load_study, quiet_optuna

log = logging.getLogger(__name__)

ENOUGH = 10
"""Smallest number of finished trials from which importances are estimated."""
LONGEST = 16
"""Largest number of characters of an option's name in a figure."""


def draw_figures(outcomes: Outcomes) -> dict[str, Path]:
    """Draw all figures that the finished trials allow.

    Returns:
        Files by title; empty where fewer than two trials are finished.
    """
    if len(outcomes.finished) < 2:
        return {}
    names = list(outcomes.sweep.objectives)
    drawn: dict[str, style.Drawing | None] = {}
    for name in names:
        suffix = "" if len(names) == 1 else f" of {name}"
        drawn[f"optimization history{suffix}"] = history(
            outcomes, name, f"optimization_history{_file(suffix)}"
        )
        drawn[f"parameter importance{suffix}"] = importance(
            outcomes, name, f"parameter_importance{_file(suffix)}"
        )
        drawn[f"parallel coordinates{suffix}"] = parallel(
            outcomes, name, f"parallel_coordinates{_file(suffix)}"
        )
    if len(names) == 2:
        drawn["pareto front"] = pareto(outcomes, (names[0], names[1]))
    return {title: drawing.save(outcomes.path) for title, drawing in drawn.items() if drawing}


def _file(suffix: str) -> str:
    return suffix.replace(" ", "_")


def _about(outcomes: Outcomes) -> str:
    seeds = f", mean over {len(outcomes.seeds)} seeds" if len(outcomes.seeds) > 1 else ""
    return f"{outcomes.path.name}: {len(outcomes.finished)} finished trials of {len(outcomes.trials)}{seeds}"


@style.in_style
def history(outcomes: Outcomes, name: str, file: str) -> style.Drawing:
    """Objective of every finished trial, and the best so far."""
    trials = outcomes.finished
    sign = 1 if outcomes.sweep.objectives[name] == "max" else -1
    numbers = [trial.number for trial in trials]
    values = np.array([trial.row[name] for trial in trials], dtype=float)
    best = sign * np.maximum.accumulate(sign * values)
    figure, axes = style.canvas(1, 1, (6.4, 3.2))
    axis = axes[0, 0]
    (points,) = axis.plot(numbers, values, "o", color=style.PALETTE[0], label="a trial")
    (steps,) = axis.step(numbers, best, where="post", color=style.PALETTE[3], label="best so far")
    axis.set(xlabel="trial", ylabel=name, xlim=(min(numbers) - 0.5, max(numbers) + 0.5))
    style.whole_numbers(axis.xaxis)
    axis.grid(axis="y", alpha=0.3)
    style.heading(figure, f"{name} of the trials", _about(outcomes))
    style.legend(figure, [points, steps])
    return style.Drawing(file, figure)


@style.in_style
def importance(outcomes: Outcomes, name: str, file: str) -> style.Drawing | None:
    """Share of the objective's variance that each hyperparameter explains (fANOVA); from ENOUGH trials on."""
    if len(outcomes.finished) < ENOUGH:
        return None
    from optuna.importance import get_param_importances

    place = list(outcomes.sweep.objectives).index(name)
    several = len(outcomes.sweep.objectives) > 1
    try:
        with quiet_optuna():
            target = (lambda trial: trial.values[place]) if several else None
            shares = get_param_importances(load_study(outcomes.path), target=target)
    except (ValueError, RuntimeError) as err:  # such as equal scores of all trials
        log.warning("no figure of parameter importance: %s", err)
        return None
    keys = list(shares)
    figure, axes = style.canvas(1, 1, (6.4, 1.3 + 0.26 * len(keys)))
    axis = axes[0, 0]
    axis.barh(range(len(keys)), [100 * shares[key] for key in keys], color=style.PALETTE[0])
    axis.set_yticks(range(len(keys)), keys)
    axis.set(xlabel=f"share of the variance of {name}, %", xlim=(0, 100), ylim=(len(keys) - 0.4, -0.6))
    style.heading(figure, "Importance of the hyperparameters", _about(outcomes))
    return style.Drawing(file, figure)


@style.in_style
def parallel(outcomes: Outcomes, name: str, file: str) -> style.Drawing | None:
    """Hyperparameters of every finished trial, one vertical scale each; the colour shows the objective.

    The lines of better trials lie over those of worse ones, and the best one is bold.
    """
    import matplotlib as mpl

    trials = outcomes.finished
    keys = [key for key in dict.fromkeys(k for t in trials for k in t.values) if _differs(trials, key)]
    if not keys:
        return None
    sign = 1 if outcomes.sweep.objectives[name] == "max" else -1
    trials = sorted(
        trials, key=lambda trial: (sign * trial.row[name], -trial.number)
    )  # the table names the first
    values = [trial.row[name] for trial in trials]
    colours = mpl.cm.ScalarMappable(mpl.colors.Normalize(min(values), max(values)), "viridis")
    figure, axes = style.canvas(1, 1, (2.4 + 1.25 * len(keys), 4.0))
    axis = axes[0, 0]
    scales = [_scale(trials, key) for key in keys]
    for trial in trials:
        heights = [
            s[0][_text(trial.values[key])] if key in trial.values else math.nan
            for key, s in zip(keys, scales, strict=True)
        ]
        width = 3.0 if trial is trials[-1] else 1.2
        colour = colours.to_rgba(trial.row[name])
        axis.plot(range(len(keys)), heights, "-", marker="o", color=colour, linewidth=width)
    for place, (_, ticks) in enumerate(scales):
        axis.axvline(place, color="black", linewidth=0.8, zorder=0)
        for height, text in ticks:
            axis.text(place + 0.05, height, text, fontsize=style.FONT - 2, va="bottom", **_halo())
    axis.set_xticks(range(len(keys)), [key.replace(".", ".\n") for key in keys])
    axis.set(yticks=[], xlim=(-0.2, len(keys) - 0.3), ylim=(-0.06, 1.1))
    axis.spines["left"].set_visible(False)
    figure.colorbar(colours, ax=axis, label=name)
    style.heading(figure, f"Hyperparameters of the trials; the best {name} is bold", _about(outcomes))
    return style.Drawing(file, figure)


def _halo() -> dict[str, Any]:
    from matplotlib.patheffects import withStroke

    return {"path_effects": [withStroke(linewidth=2, foreground="white")]}


def _differs(trials: Sequence[Outcome], key: str) -> bool:
    return len({_text(trial.values.get(key, "")) for trial in trials}) > 1


def _text(value: Any) -> str:
    """A value as it is written at a scale."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _scale(trials: Sequence[Outcome], key: str) -> tuple[dict[str, float], list[tuple[float, str]]]:
    """Height from 0 to 1 of every value of a hyperparameter, and the ticks of its scale.

    Positive numbers over more than a factor of 30 are on a logarithmic scale; options that are no numbers are
    evenly spaced.
    """
    values = [trial.values[key] for trial in trials if key in trial.values]
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        low, high = min(values), max(values)
        turn = math.log if low > 0 and high / low > 30 else float
        width = (turn(high) - turn(low)) or 1.0
        heights = {_text(v): (turn(v) - turn(low)) / width for v in values}
        return heights, [(0.0, _text(low)), (1.0, _text(high))]
    ordered = sorted(
        values, key=lambda v: (not isinstance(v, int | float), v if isinstance(v, int | float) else 0)
    )
    words = list(dict.fromkeys(_text(v) for v in ordered))
    heights = {word: place / max(len(words) - 1, 1) for place, word in enumerate(words)}
    return heights, [(height, word) for word, height in heights.items()]


@style.in_style
def pareto(outcomes: Outcomes, names: tuple[str, str]) -> style.Drawing:
    """Two objectives of every finished trial, and those that no other trial dominates."""
    front = {trial.number for trial in outcomes.front}
    figure, axes = style.canvas(1, 1, (6.4, 4.0))
    axis = axes[0, 0]
    kinds = (("other trials", False, style.GREY), ("Pareto front", True, style.PALETTE[3]))
    entries = []
    for label, inside, colour in kinds:
        own = [t for t in outcomes.finished if (t.number in front) == inside]
        x, y = ([trial.row[name] for trial in own] for name in names)
        entries += axis.plot(x, y, "o", color=colour, label=label)
    axis.set(xlabel=names[0], ylabel=names[1])
    axis.grid(alpha=0.3)
    best = [trial for trial in outcomes.finished if trial.number in front]
    style.heading(figure, f"{names[0]} and {names[1]} of the trials", _about(outcomes))
    style.legend(figure, entries)
    places = [(trial.row[names[0]], trial.row[names[1]]) for trial in best]
    style.place_labels(axis, places, [f"trial {trial.number}" for trial in best])
    return style.Drawing("pareto_front", figure)
