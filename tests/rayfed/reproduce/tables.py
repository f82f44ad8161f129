"""FedGCR's Table 5 for tests, and scores that nobody measured."""

import math
from functools import cache

from rayfed.reproduce.results import FinishedCell
from rayfed.reproduce.table_study import table_study

SMALL_TABLE = (
    "data.limit=60",
    "rounds=2",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "tensorboard=false",
    "cluster=inline",
)
"""Overrides with which a cell takes about a second."""


@cache
def ablation(seeds=1):
    """All four rows at mini scale; nothing is run."""
    return table_study("fedgcr/table5", "mini", seeds)


def scored(cell, scores):
    """A finished cell with these scores by measure."""
    return FinishedCell(sha256=f"digest of {cell}", scores=scores)


def finished_as(asked, by_row):
    """These numbers by seed for every measure of these rows; NaN: the cell is not finished."""
    measures = ("Avg", "sigma_type", "sigma_client")
    return {
        cell: scored(cell, dict.fromkeys(measures, by_row[cell.row][cell.seed]))
        for cell in asked.configs
        if cell.row in by_row
        and cell.seed < len(by_row[cell.row])
        and not math.isnan(by_row[cell.row][cell.seed])
    }
