"""Names in the folder of a run."""

from __future__ import annotations

COMPARE = "compare"
"""The folders of the other runs of `compare` are in here, one for each algorithm."""

FOLDERS = ("checkpoints", COMPARE, "figures", "history", "model", "tensorboard")
"""Folders that a run makes in its folder."""

ROWS = "rounds.jsonl"
"""One JSON object for each finished round."""

OWN_TENSORS = "own_tensors"
"""Entry of environment.json: how many of the scored clients kept tensors in the run whose model is scored."""
