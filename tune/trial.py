"""One trial: the cells of a study with the values of a proposal, run round by round by Ray Tune."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray.tune
from ray.util.placement_group import get_current_placement_group

from rayfed.engine.session import Session
from rayfed.engine.weight_store import WeightStore
from rayfed.errors import ConfigError, unknown
from rayfed.executors.connection import Connection, Health
from rayfed.executors.kinds.base import kind_of
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.cluster_share import ClusterShare
from rayfed.experiment.study.coordinates import SEED
from rayfed.experiment.study.run_cell import MOST, CommonParts, Stop, StudyCell, run_cell
from rayfed.record.atomic_files import write_text
from rayfed.record.folder import digest_if_finished
from rayfed.record.readers import read_json, reading
from rayfed.record.recorded_run import RecordedRun
from rayfed.types import Row
from tune.experiment import Base
from tune.mean_rows import check_objectives, mean_of

REACHED = "reached.json"
NUMBER = "number"
VALUES = "values"
FOLDERS = "folders"


@dataclass(frozen=True, kw_only=True)
class Common:
    """Facts that all trials of a sweep share.

    Attributes:
        base: The experiment that is varied.
        folder: Folder of the sweep.
        here: Working folder in which the sweep was started, for relative paths in the config.
        objectives: Columns that every reported row must have.
        seeds: Experiment seeds of every trial.
        pauses: Rounds before the last one after which the scheduler may end a trial. Several seeds reach each
            of them one after the other, before any of them goes on.
    """

    base: Base
    folder: Path
    here: Path
    objectives: tuple[str, ...]
    seeds: tuple[int, ...]
    pauses: tuple[int, ...] = ()


Report = Callable[[Row], bool]
"""Hands over a row, and says whether the next one is wanted."""


class Rows:
    """The rows that a function reports in its own thread; it waits after each of them.

    Args:
        work: The function; it ends when a row that it reports is answered with False.
    """

    def __init__(self, work: Callable[[Report], None]) -> None:
        self._work = work
        self._rows: SimpleQueue[Row | BaseException | None] = SimpleQueue()
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self) -> Row | None:
        """The next row; None: there are no more.

        Raises:
            Exception: What the function raised.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._wanted.put(True)
        row = self._rows.get()
        if isinstance(row, BaseException):
            raise row
        return row

    def close(self) -> None:
        """Let the function end, and wait until it has."""
        if self._thread is not None:
            self._wanted.put(False)
            self._thread.join()

    def _report(self, row: Row) -> bool:
        self._rows.put(row)
        return self._wanted.get()

    def _run(self) -> None:
        try:
            self._work(self._report)
        except BaseException as err:  # raised in the thread that waits for a row
            self._rows.put(err)
        else:
            self._rows.put(None)


def _has(count: int, _: Mapping[str, Any], rows: Sequence[Row]) -> bool:
    """Whether there are so many rows."""
    return len(rows) >= count


class Trial(ray.tune.Trainable):
    """Reports one row per round, the mean over its seeds. Its process is reused for later trials."""

    def setup(self, config: dict[str, Any], common: Common) -> None:  # type: ignore[override]  # with_parameters
        """Begin the first trial of this process.

        Args:
            config: Number and values of the trial, and the folders of its cells.
            common: What all trials share.
        """
        logging.getLogger("ray").setLevel(logging.WARNING)  # else it logs every checkpoint
        self._common = common
        self._parts = CommonParts(most=max(MOST, len(common.seeds)))
        self._session = Session(Connection("", Health()), WeightStore())
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._rows.close()
        self._begin(new_config)
        return True

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._number = int(config[NUMBER])
        self._values = dict(config[VALUES])
        self._folders = [self._common.folder / folder for folder in config[FOLDERS]]
        self._reported = 0
        self._goes_on = True
        self._rows = Rows(self._run)

    def cleanup(self) -> None:
        self._rows.close()
        self._session.__exit__(None, None, None)

    def step(self) -> dict[str, Any]:
        """Row of the next round with scores; those that are on disk come first."""
        row = self._rows.next()
        assert row is not None  # the last row says that the trial is done
        return row

    def _run(self, report: Report) -> None:
        """Run the cells, or continue them; each row waits for the answer of Ray Tune."""
        if self._common.here.is_dir():
            os.chdir(self._common.here)  # Ray starts trials in another folder
        configs = [self._common.base.cell(self._values, seed) for seed in self._common.seeds]
        *others, last = [
            StudyCell(at={SEED: config.seed}, config=replace(config, output=str(folder)))
            for config, folder in zip(configs, self._folders, strict=True)
        ]
        rounds = last.config.rounds
        self._tell(report, RecordedRun(last.place).rounds, rounds)
        for end in (*(self._common.pauses if others else ()), rounds):
            for cell in others if self._goes_on else ():
                self._advance(cell, end, partial(_has, end))
            if self._goes_on:
                self._advance(last, end, partial(self._ends, report, end, rounds))
        self._tell(report, RecordedRun(last.place).rounds, rounds)

    def _ends(self, report: Report, end: int, rounds: int, _: Mapping[str, Any], rows: Sequence[Row]) -> bool:
        """Report the rows of the last cell so far; whether it ends, or waits for the other ones."""
        self._tell(report, rows, rounds)
        return not self._goes_on or len(rows) >= end

    def _advance(self, cell: StudyCell, end: int, stop: Stop) -> None:
        """Run a cell until a round, unless it is further."""
        rounds = cell.config.rounds
        is_there = end < rounds and len(RecordedRun(cell.place).rounds) >= end
        if is_there or digest_if_finished(cell.place, rounds):
            return
        seed = f"-seed-{cell.config.seed}" if len(self._common.seeds) > 1 else ""
        self._session.trial = self._common.folder.name, f"{self._number:04d}{seed}"
        show = Show(quiet=True, whole=self._common.folder)
        run_cell(replace(cell, stop=stop), self._parts, show, self._session, self._part(cell))

    def _part(self, cell: StudyCell) -> ClusterShare | None:
        """The actors for which Ray Tune has reserved bundles; None: the cell runs in this process."""
        if not kind_of(cell.config.cluster).needs_cluster:
            return None
        group = get_current_placement_group()
        assert group is not None  # Ray Tune always makes one
        actors = [bundle for bundle in group.bundle_specs if bundle]
        cpus, gpus = actors[0].get("CPU", 0.0), actors[0].get("GPU", 0.0)
        return ClusterShare(lanes=1, actors=len(actors), cpus=cpus, gpus=gpus)

    def _tell(self, report: Report, rows: Sequence[Row], rounds: int) -> None:
        """Report the rows that Ray Tune does not have yet, of rounds that all seeds have finished.

        Args:
            report: Hands a row to Ray Tune.
            rows: Rows of the last seed so far.
            rounds: Number of rounds of the trial.

        Raises:
            ConfigError: The last round lacks an objective.
            NonFiniteError: An objective is not finite.
        """
        names = self._common.objectives
        others = [RecordedRun(folder).rounds for folder in self._folders[:-1]]
        for of_round in zip(*others, rows, strict=False):
            row = mean_of(of_round, names)
            is_last = row["round"] == rounds
            digests = [digest_if_finished(folder, rounds) for folder in self._folders] if is_last else []
            if row["round"] <= self._reported or not all(digests) or not self._goes_on:
                continue
            check_objectives(row, names)
            if missing := [name for name in names if name not in row]:
                if not is_last:
                    continue
                known = [key for key, value in row.items() if isinstance(value, int | float)]
                raise ConfigError(unknown("objective", missing[0], known))
            self._reported = row["round"]
            final = {"sha256": digests[0]} if is_last else {}
            self._goes_on = report({**row, **final, "done": is_last})

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Note which round was reported; all else is in the folders of the cells."""
        write_text(Path(checkpoint_dir) / REACHED, json.dumps({"round": self._reported}))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue after the reported round; the cells may have later rounds already."""
        source = Path(str(checkpoint))
        with reading(source / REACHED):
            self._reported = int(read_json(source / REACHED, dict)["round"])
