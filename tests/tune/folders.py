"""Reading and writing the folders of sweeps and of their cells."""

import json

import torch
from safetensors.torch import save_file

from rayfed.record.readers import read_rows

WALL = ("seconds", "seconds_training", "seconds_clients", "seconds_idle")


def rows(folder):
    """The rounds of a run, without what the clock says."""
    return [{k: v for k, v in row.items() if k not in WALL} for row in read_rows(folder)]


def cells(path):
    """The entries of study.json: coordinates, folder, sha256, stopped."""
    return json.loads((path / "study.json").read_text())["cells"]


def folders_of(path, **values):
    """The folders of the cells with these values; `__` stands for the point in a key."""
    wanted = {key.replace("__", "."): value for key, value in values.items()}
    return [path / cell["folder"] for cell in cells(path) if wanted.items() <= cell["coordinates"].items()]


def write_rounds(folder, found, finished):
    """What the searcher reads of a cell: its rounds, and where it is finished its final tensors."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}\n")
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    if finished:
        save_file({"x": torch.zeros(1)}, folder / "model" / "params.safetensors")
