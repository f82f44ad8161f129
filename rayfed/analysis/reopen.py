"""A finished run, opened again to look at its model: the same data, the same split, the final tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.config.schema import Config, load_run
from rayfed.data.client_data import Splits
from rayfed.engine.setup import Setup, prepare
from rayfed.errors import ConfigError
from rayfed.record.files import write_text
from rayfed.types import ServerState, is_statistic

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run from its folder.

    Attributes:
        folder: Where it is.
        config: As it was run.
        setup: Prepared again: data, partition, model.
        state: Holds the final tensors; its round is the one that would come next.
    """

    folder: Path
    config: Config
    setup: Setup
    state: ServerState


def reopen(folder: Path) -> Finished:
    """Prepare a finished run's experiment again and read its final tensors.

    Raises:
        ConfigError: It is not the folder of a finished run, its data have changed, or its model cannot be
            had from the folder alone.
    """
    from safetensors.torch import load_file

    tensors = folder / "model" / "params.safetensors"
    if not tensors.is_file():
        folds = sorted(path.parent.parent.name for path in folder.glob("*/model/params.safetensors"))
        hint = f"; give one of its runs: {', '.join(folds)}" if folds else ""
        raise ConfigError(f"{str(folder)!r} is not the folder of a finished run: no {tensors.name}{hint}")
    config = load_run(folder)
    setup = prepare(config)
    facts = json.loads((folder / "environment.json").read_text())
    for what, now in (("data", setup.dataset.digest), ("partition", setup.partition.digest)):
        if facts[f"{what}_digest"] != now:
            raise ConfigError(f"data: the {what} of {str(folder)!r} are not the same any more; run it again")
    params = dict(load_file(tensors))
    if config.train.batch_norm == "local" and _has_statistics(setup):
        raise ConfigError(
            "train.batch_norm: with 'local' the statistics stay with the clients and are not in the run's "
            "folder; only runs with 'average' can be looked at"
        )
    server = setup.experiment.server
    if not server.trains:
        raise ConfigError(f"algorithm: {config.algorithm!r} trains nothing, so there is nothing to look at")
    state = replace(server.start(params), round=config.rounds)
    return Finished(folder=folder, config=config, setup=setup, state=state)


def _has_statistics(setup: Setup) -> bool:
    return any(is_statistic(slot) for slot in setup.weights)


def thinned(splits: Mapping[str, Splits], images: int) -> dict[str, Splits]:
    """At most so many images of each split, evenly spaced, so that classes keep about their shares."""
    return {
        owner: {name: evenly(rows, images) for name, rows in parts.items()} for owner, parts in splits.items()
    }


def evenly(rows: Indices, count: int) -> Indices:
    """At most `count` of these rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def mention(folder: Path, title: str, picture: Path) -> None:
    """Show a picture in the report of the run, once."""
    report = folder / "report.md"
    text = report.read_text() if report.exists() else ""
    link = f"](figures/{picture.name})"
    if link not in text:
        write_text(report, f"{text}\n![{title}{link}\n")
