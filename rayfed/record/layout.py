"""Names in the folder of a run."""

from __future__ import annotations

from pathlib import Path

COMPARE = "compare"
"""The folders of the other runs of `compare` are in here, one for each algorithm."""

ROWS = "rounds.jsonl"
"""One JSON object for each finished round."""

FORMER_ROWS = "result.json"
"""The same in the folders of earlier versions, which are still read."""

OWN_TENSORS = "own_tensors"
"""Entry of environment.json: how many of the scored clients kept tensors in the run whose model is scored."""


def rows_file(folder: Path) -> Path:
    """The file with the rounds of a run, which need not exist: rounds.jsonl, or result.json of old runs."""
    former = folder / FORMER_ROWS
    return former if former.exists() and not (folder / ROWS).exists() else folder / ROWS
