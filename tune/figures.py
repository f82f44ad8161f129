"""Figures of a sweep: Optuna's plots of the study on disk."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.record.files import write_whole
from tune.results import Outcomes
from tune.searcher import load_study, quiet_optuna

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)


def draw_figures(outcomes: Outcomes) -> dict[str, Path]:
    """Draw all figures that the finished trials allow.

    Returns:
        Files by title; empty where fewer than two trials are finished.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    if len(outcomes.finished) < 2:
        return {}
    drawn: dict[str, Path] = {}
    (outcomes.path / "figures").mkdir(exist_ok=True)
    for title, figure in _figures(load_study(outcomes.path), list(outcomes.sweep.objectives)):
        path = outcomes.path / "figures" / f"{title.replace(' ', '_')}.png"
        try:
            _save(figure, path)
        except (
            ValueError,
            RuntimeError,
        ) as err:  # such as importance if all scores are equal
            log.warning("no figure of %s: %s", title, err)
        else:
            drawn[title] = path
    return drawn


def _figures(study: optuna.Study, names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    from optuna.visualization import matplotlib as drawings

    for i, name in enumerate(names):
        # With one objective Optuna uses the value itself, and also shows trials that were stopped early.
        target: Any = None if len(names) == 1 else (lambda trial, i=i: trial.values[i])
        label = {"target": target, "target_name": name}
        suffix = "" if len(names) == 1 else f" of {name}"

        def one(draw: Any, label: dict[str, Any] = label) -> Any:
            return draw(study, **label)

        yield f"optimization history{suffix}", lambda one=one: one(drawings.plot_optimization_history)  # type: ignore[misc]
        yield f"parameter importance{suffix}", lambda one=one: one(drawings.plot_param_importances)  # type: ignore[misc]
        yield f"parallel coordinates{suffix}", lambda one=one: one(drawings.plot_parallel_coordinate)  # type: ignore[misc]
    if 2 <= len(names) <= 3:
        yield "pareto front", lambda: drawings.plot_pareto_front(study, target_names=names)


def _save(figure: Callable[[], Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    with quiet_optuna(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            axes = figure()
            canvas = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
            canvas.set_size_inches(9, 5)
            write_whole(path, lambda p: canvas.savefig(p, dpi=120, format="png", bbox_inches="tight"))
        finally:
            plt.close("all")
