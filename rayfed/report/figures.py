"""Figures of a run, drawn from its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rayfed.report.feature_map import TITLE as FEATURES
from rayfed.report.feature_map import feature_map
from rayfed.report.landscape import TITLE as LANDSCAPE
from rayfed.report.landscape import landscape
from rayfed.report.method_figures import (
    aggregation_weights,
    allocations,
    client_map,
    cluster_flow,
    gap_variance,
    partition_map,
    sample_map,
)
from rayfed.report.run_tables import RunTables
from rayfed.report.score_figures import (
    comparison,
    score_by_client,
    score_by_cost,
    score_by_domain,
    score_by_fold,
    score_by_fold_and_round,
    time_to_accuracy,
)
from rayfed.report.slopes import TITLE as SLOPES
from rayfed.report.slopes import gap_slopes
from rayfed.report.style import Drawing
from rayfed.terminal.stages import stage

FIGURES: Mapping[str, Callable[[RunTables], Drawing | None]] = {
    "methods that are compared": comparison,
    "labels and domains of the clients": partition_map,
    "score by domain": score_by_domain,
    "score by client": score_by_client,
    "score over traffic and time": score_by_cost,
    "score over virtual time": time_to_accuracy,
    "blocks by client and round": allocations,
    "aggregation weights": aggregation_weights,
    "variance of the generalization gaps": gap_variance,
    "groups of clients over the rounds": cluster_flow,
    "representations of clients": client_map,
    "representations of images": sample_map,
    LANDSCAPE: landscape,
    FEATURES: feature_map,
    SLOPES: gap_slopes,
}
"""All figures by title. Each is drawn if the run has the table that it needs."""


OF_FOLDS: Mapping[str, Callable[[RunTables], Drawing | None]] = {
    "score with each domain held out": score_by_fold,
    "score of the held-out domain over the rounds": score_by_fold_and_round,
}
"""Figures of the folder of protocol=leave_one_out, which has no tables of its own but folds."""


def draw_figures(folder: Path) -> dict[str, Path]:
    """Draw all figures for which a run has tables; returns the files by title."""
    stage("drawing the figures")
    run = RunTables(folder)
    drawn = {title: figure(run) for title, figure in {**FIGURES, **OF_FOLDS}.items()}
    return {title: drawing.save(folder) for title, drawing in drawn.items() if drawing}
