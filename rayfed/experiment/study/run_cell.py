"""Runs or continues one cell of a study in its folder; the same in this process and in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rayfed.config.schema import Config, config_changes, to_dict
from rayfed.engine.built_once import Shared
from rayfed.engine.score_finished_run import model_digest
from rayfed.errors import StoppedEarlyError
from rayfed.experiment.finished_run import RoundRow
from rayfed.experiment.kept_session import session_of
from rayfed.experiment.runner import Runner
from rayfed.experiment.single_run import Show
from rayfed.record.claim import claim_again
from rayfed.record.readers import DamagedError, read_rows, read_yaml

Stop: TypeAlias = Callable[[Mapping[str, Any], Sequence[RoundRow]], bool]
"""Gets the coordinates of a cell and the rows of its rounds so far; True ends the cell."""


@dataclass(frozen=True, kw_only=True)
class StudyCell:
    """A cell that can be run.

    Attributes:
        at: Its coordinates by name.
        config: Its experiment, whose `output` is the folder of the cell.
        stop: Called after each round; None: it runs all its rounds.
    """

    at: Mapping[str, Any]
    config: Config
    stop: Stop | None = None

    @property
    def place(self) -> Path:
        """Its folder."""
        return Path(str(self.config.output))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a cell.

    Attributes:
        sha256: Digest of its final tensors; empty: it did not finish.
        stopped: The round after which `stop` ended it; 0: it did not.
        failed: Why it failed; empty: it did not.
    """

    sha256: str = ""
    stopped: int = 0
    failed: str = ""


@dataclass
class CommonParts:
    """Parts that cells of one process have in common; the cells run one after the other.

    The data set is kept; partitions and models are kept for the cells of one seed.
    """

    shared: Shared = field(default_factory=Shared)
    _seed: int | None = None

    def of(self, config: Config) -> Shared:
        """The parts of earlier cells that the next one may use."""
        if self._seed not in (None, config.seed):
            self.shared.forget("partition", "model", "shape")
        self._seed = config.seed
        return self.shared


def run_cell(cell: StudyCell, common: CommonParts, show: Show) -> Outcome:
    """Run a cell, or continue it after its last checkpoint.

    A cell that scored the model of another run begins anew if that model, or its own config, has changed.

    Args:
        cell: The cell.
        common: What it shares with the cells before it.
        show: What is shown of its rounds.

    Raises:
        RayFedError: It failed; its finished rounds are in its folder.
    """

    def stop(path: Path) -> bool:
        assert cell.stop is not None  # else this function is not used
        return bool(cell.stop(cell.at, [RoundRow(row) for row in read_rows(path)]))

    runner = Runner(
        show=show,
        session=session_of(cell.config),
        stays=True,
        shared=common.of(cell.config),
        stop=None if cell.stop is None else stop,
    )
    config = replace(cell.config, overwrite=False)
    goes_on = (cell.place / "config.yaml").exists()
    if (trained := config.evaluation.model_of) is not None and goes_on:
        goes_on = _scored_the_same(cell.place, config, trained)
        config = replace(config, overwrite=not goes_on)
    try:
        if goes_on:
            with claim_again(cell.place) as claim:
                return Outcome(sha256=runner.start(config, claim).sha256)
        return Outcome(sha256=runner.start(config).sha256)
    except StoppedEarlyError:
        return Outcome(stopped=len(read_rows(cell.place)))


def _scored_the_same(place: Path, config: Config, trained: str) -> bool:
    """Whether the run in a folder scored the present model of another run, with this config."""
    try:
        before = read_yaml(place / "config.yaml")
    except DamagedError:
        return False
    if any(config_changes(before, to_dict(config))):
        return False
    return model_digest(str(place)) == model_digest(trained)
