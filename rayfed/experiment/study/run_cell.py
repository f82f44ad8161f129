"""Runs or continues one cell of a study in its folder; the same in this process and in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from rayfed.config.config_changes import config_changes
from rayfed.config.schema import to_dict
from rayfed.engine.built_once import Memo
from rayfed.engine.score_finished_run import model_digest
from rayfed.engine.session import Session
from rayfed.errors import StoppedEarlyError
from rayfed.experiment.finished_run import RoundRow
from rayfed.experiment.plan import make_plan
from rayfed.experiment.runner import Runner
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.cluster_share import ClusterShare
from rayfed.record import claim as folders
from rayfed.record.readers import DamagedError
from rayfed.record.recorded_run import RecordedRun

if TYPE_CHECKING:
    from rayfed.config.schema import Config

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


MOST = 2
"""Pairs of a data set and a seed whose parts are kept in memory for other cells."""


@dataclass
class CommonParts:
    """Parts that cells of one process have in common, such as data sets, partitions and models.

    Kept is what cells with one of the last pairs of a data set and a seed used.

    Attributes:
        most: Number of these pairs.
        alone: Held while a cell is prepared and its folder is claimed, as several threads run cells.
        asking: Held while the user's rule is asked, for the same reason.
    """

    most: int = MOST
    alone: Lock = field(default_factory=Lock)
    asking: Lock = field(default_factory=Lock)
    shared: Memo = field(default_factory=Memo)
    _pairs: list[str] = field(default_factory=list)

    def of(self, config: Config) -> Memo:
        """The parts of earlier cells that the next one may use."""
        data = config.data
        pair = f"{data.name}, {data.reader}, {data.root}, seed {config.seed}"
        self._pairs = [*(each for each in self._pairs if each != pair), pair][-self.most :]
        self.shared.use_for(pair, self._pairs)
        return self.shared


def run_cell(
    cell: StudyCell, common: CommonParts, show: Show, session: Session, part: ClusterShare | None = None
) -> Outcome:
    """Run a cell, or continue it after its last checkpoint.

    A cell that scored the model of another run begins anew if that model, or its own config, has changed.

    Args:
        cell: The cell.
        common: What it shares with other cells.
        show: What is shown of its rounds.
        session: Ray and the actors that it uses.
        part: Its part of the cluster; None: it may use the whole.

    Raises:
        RayFedError: It failed; its finished rounds are in its folder.
    """

    def stop(path: Path) -> bool:
        assert cell.stop is not None  # else this function is not used
        with common.asking:
            return bool(cell.stop(cell.at, [RoundRow(row) for row in RecordedRun(path).rounds]))

    config = replace(cell.config, overwrite=False)
    continues = (cell.place / "config.yaml").exists()
    if (trained := config.evaluation.model_of) is not None and continues:
        continues = _scored_the_same(cell.place, config, trained)
        config = replace(config, overwrite=not continues)
    with ExitStack() as held:
        with common.alone:
            plan = make_plan(config, cell.place, common.of(config))
            if continues:
                claim = held.enter_context(folders.claim_again(cell.place))
            else:
                owner = folders.look(cell.place, config.overwrite)
                claim = held.enter_context(folders.claim(cell.place, owner, config.overwrite))
        if part is not None:
            cluster = part.of(config.cluster, plan.setup.experiment.clients_per_round)
            plan = plan.on(cluster)
        runner = Runner(
            show=show,
            session=session,
            stays=True,
            resume=continues,
            stop=None if cell.stop is None else stop,
        )
        try:
            return Outcome(sha256=runner.run(plan, claim))
        except StoppedEarlyError:
            return Outcome(stopped=len(RecordedRun(cell.place).rounds))


def _scored_the_same(place: Path, config: Config, trained: str) -> bool:
    """Whether the run in a folder scored the present model of another run, with this config."""
    try:
        before = RecordedRun(place).config
    except DamagedError:
        return False
    if not before or any(config_changes(before, to_dict(config))):
        return False
    return model_digest(str(place)) == model_digest(trained)
