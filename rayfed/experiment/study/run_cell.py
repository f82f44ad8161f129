"""Runs or continues one cell of a study in its folder; the same in this process and in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rayfed.config.schema import Config
from rayfed.engine.built_once import Shared
from rayfed.errors import StoppedEarlyError
from rayfed.experiment.finished_run import RoundRow
from rayfed.experiment.kept_session import session_of
from rayfed.experiment.runner import Runner
from rayfed.experiment.single_run import Show
from rayfed.record.claim import claim_again
from rayfed.record.readers import read_rows

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
    try:
        if (cell.place / "config.yaml").exists():
            with claim_again(cell.place) as claim:
                return Outcome(sha256=runner.start(config, claim).sha256)
        return Outcome(sha256=runner.start(config).sha256)
    except StoppedEarlyError:
        return Outcome(stopped=len(read_rows(cell.place)))
