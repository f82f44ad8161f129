"""One trial: an experiment that Ray Tune runs round by round, and that can resume from its run folders."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.tune
import torch
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.config.schema import Config
from rayfed.engine.measure_client import inline_device
from rayfed.engine.setup import Setup, prepare
from rayfed.errors import ConfigError, NonFiniteError, unknown
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.prometheus import Metrics, labels_of
from rayfed.federation.executor import Executor
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import read_json, reading
from rayfed.types import Row
from tune.experiment import Base
from tune.folder import ERROR, restore, resumable, rows_of, trial_folder
from tune.lanes import Lanes, Stage
from tune.shared import FrozenWeights, join, sharing_features

REACHED = "reached.json"
NUMBER = "number"
VALUES = "values"


@dataclass(frozen=True, kw_only=True)
class Common:
    """Data that all trials of a sweep share.

    Attributes:
        base: The experiment that is varied.
        folder: Folder of the sweep.
        here: Working folder in which the sweep was started, for relative paths in the config.
        objectives: Columns that every reported row must have.
        seeds: Experiment seeds of every trial; all of them run each round before the next one begins.
        frozen: Backbones in the object store.
    """

    base: Base
    folder: Path
    here: Path
    objectives: tuple[str, ...]
    seeds: tuple[int, ...]
    frozen: FrozenWeights


class Trial(ray.tune.Trainable):
    """Reports one row per round, the mean over its seeds. Its process is reused for later trials."""

    def setup(self, config: dict[str, Any], common: Common) -> None:  # type: ignore[override]  # with_parameters
        """Begin the first trial of this process.

        Args:
            config: Number and values of the trial.
            common: Data that all trials share.
        """
        logging.getLogger("ray").setLevel(logging.WARNING)  # else it logs every checkpoint
        self._common = common
        self._lanes: Lanes | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._end()
        self._begin(new_config)
        return True

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._number = int(config[NUMBER])
        self._values = dict(config[VALUES])
        self._path = trial_folder(self._common.folder, self._number)
        self._runs: list[Iterator[Row]] = []
        self._reported = 0

    def _end(self) -> None:
        for run in self._runs:
            run.close()  # type: ignore[attr-defined]  # closing the generator writes its tables
        self._runs = []

    def cleanup(self) -> None:
        self._end()
        if self._lanes is not None:
            self._lanes.close()

    def step(self) -> dict[str, Any]:
        """Row of the next round with scores; after a crash, rounds on disk come first."""
        try:
            return self._next()
        except Exception as err:
            write_text(self._path / ERROR, f"{type(err).__name__}: {err}\n")
            raise

    def _next(self) -> dict[str, Any]:
        self._runs = self._runs or self._open()
        while True:
            rows = [next(run) for run in self._runs]
            number = rows[0]["round"]
            last = number == self._rounds
            row = mean_of(rows, self._common.objectives)
            check_objectives(row, self._common.objectives)
            missing = [name for name in self._common.objectives if name not in row]
            if missing and last:
                known = [key for key, value in row.items() if isinstance(value, int | float)]
                raise ConfigError(unknown("objective", missing[0], known))
            if last:
                row["sha256"], *_ = [next(run)["sha256"] for run in self._runs]
            if last or (number > self._reported and not missing):
                self._reported = number
                return {**row, "done": last}

    def _open(self) -> list[Iterator[Row]]:
        """Prepare the experiment of every seed, and return the rows of each."""
        if self._common.here.is_dir():
            os.chdir(self._common.here)  # Ray starts trials in another folder
        base = self._common.base
        configs = [replace(base.config(self._values, seed), output=None) for seed in self._common.seeds]
        self._rounds = configs[0].rounds
        self._algorithm = configs[0].algorithm
        self._path.mkdir(parents=True, exist_ok=True)
        (self._path / ERROR).unlink(missing_ok=True)
        setups = [prepare(config, self._common.frozen.build) for config in configs]
        torch.set_num_threads(setups[0].world.threads)
        executors = self._executors(configs[0], setups)
        seeds = self._common.seeds
        paths = [self._path / f"seed-{seed}" for seed in seeds]
        watches = [Metrics(self._labels(seed)) if configs[0].cluster.metrics else None for seed in seeds]
        return [rows_of(*each) for each in zip(configs, setups, paths, executors, watches, strict=True)]

    def _labels(self, seed: int) -> dict[str, str]:
        """Labels of the metrics of one seed's run; the seed is left out where a trial has one seed."""
        trial = self._path.name + (f"-seed-{seed}" if len(self._common.seeds) > 1 else "")
        return labels_of(self._common.folder.name, self._algorithm, trial)

    def _executors(self, config: Config, setups: Sequence[Setup]) -> Sequence[Executor]:
        frozen = [self._common.frozen.of(setup.world) for setup in setups]
        worlds = [sharing_features(s.world, backbone) for s, backbone in zip(setups, frozen, strict=True)]
        if config.cluster.executor == "inline":
            pairs = zip(worlds, setups, strict=True)
            device, _ = inline_device(setups[0], config.cluster)  # the sweep has said why
            return [InlineExecutor(world, s.weights, config.failures, device) for world, s in pairs]
        stages = [
            Stage(
                world=world,
                weights=join(setup.weights, backbone),
                labels=self._labels(seed) if config.cluster.metrics else None,
            )
            for world, setup, backbone, seed in zip(worlds, setups, frozen, self._common.seeds, strict=True)
        ]
        if self._lanes is None:
            self._lanes = self._start_lanes(config, setups[0])
        self._lanes.policy = config.failures
        served = self._lanes.serve(stages)
        self._write_placement(self._lanes)
        return served

    def _start_lanes(self, config: Config, setup: Setup) -> Lanes:
        """Client actors in the bundles that Ray Tune reserved for this trial."""
        group = get_current_placement_group()
        assert group is not None  # Ray Tune always makes one
        clients = list(setup.experiment.clients)
        bundles = [bundle for bundle in group.bundle_specs if bundle]
        if config.cluster.actors == "per_client" and len(clients) != len(bundles):
            raise ConfigError(
                f"cluster.actors: per_client needs the same number of clients in every trial; this one has "
                f"{len(clients)} instead of {len(bundles)}"
            )
        lanes = (
            clients if config.cluster.actors == "per_client" else [f"{i:02d}" for i in range(len(bundles))]
        )
        options = [
            {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i),
            }
            for i, bundle in enumerate(bundles)
        ]
        pid = os.getpid()  # actors are reused by later trials, so their names contain no trial number
        return Lanes([f"rayfed:trial-{pid}:clients:{lane}" for lane in lanes], options, config.failures)

    def _write_placement(self, lanes: Lanes) -> None:
        """Write to placement.json on which nodes the trial's actors are."""
        group = get_current_placement_group()
        places = ray.get([lane.actor.where.remote() for lane in lanes.lanes])
        facts = {"bundles": group.bundle_specs if group else [], "lanes": places}
        write_text(self._path / "placement.json", json.dumps(facts, indent=1) + "\n")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy everything with which the trial can continue after this round on any node."""
        target = Path(checkpoint_dir)
        for folder in sorted(self._path.glob("seed-*")):
            for name in resumable(folder):
                (target / folder.name / name.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, target / folder.name / name)
        write_text(target / REACHED, json.dumps({"round": self._reported}))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue after the round of a checkpoint; the run folders may contain later rounds already."""
        self._end()
        source = Path(str(checkpoint))
        with reading(source / REACHED):
            self._reported = int(read_json(source / REACHED, dict)["round"])
        for folder in sorted(source.glob("seed-*")):
            here = self._path / folder.name
            if not (here / "config.yaml").exists():  # the trial was on another node
                restore(folder, here)


def check_objectives(row: Row, objectives: Sequence[str]) -> None:
    """End a trial whose objective is not finite: it failed, and the searcher learns nothing from it.

    Raises:
        NonFiniteError: Names the objective and the round.
    """
    bad = [name for name in objectives if name in row and row[name] is None]
    if bad:
        raise NonFiniteError(f"{bad[0]} is not finite in round {row['round']}; narrow the space of train.lr")


def mean_of(rows: Sequence[Row], objectives: Sequence[str]) -> Row:
    """One row for all seeds: the mean of every number, and the standard deviation of the objectives.

    >>> mean_of([{"round": 1, "accuracy": 0.25, "worst": "a"}, {"round": 1, "accuracy": 0.75, "worst": "b"}],
    ...     ["accuracy"])
    {'round': 1, 'accuracy': 0.5, 'accuracy_std': 0.25}
    """
    if len(rows) == 1:
        return dict(rows[0])
    merged: Row = {}
    for key, first in rows[0].items():
        values: list[Any] = [row.get(key) for row in rows]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            mean = sum(values) / len(values)
            merged[key] = int(mean) if isinstance(first, int) and mean == int(mean) else mean
            if key in objectives:
                merged[f"{key}_std"] = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        elif None in values and any(isinstance(v, int | float) for v in values):
            merged[key] = None  # of one seed it was not finite, so the mean is not
        elif all(v == first for v in values):
            merged[key] = first
    return merged
