"""Runs cells of a study side by side on one Ray, each with its own driver and client actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from rayfed.engine.session import Session
from rayfed.errors import ClusterError, OutputClosedError, cause_of, count_of
from rayfed.experiment.kept_session import end_session
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.cluster_share import ClusterShare, share
from rayfed.experiment.study.lanes import Beside
from rayfed.experiment.study.run_cell import CommonParts, Outcome, StudyCell, run_cell
from rayfed.terminal.console import Screen, stage, use_screen
from rayfed.terminal.exit_code import STOP

if TYPE_CHECKING:
    from rayfed.executors.cluster_config import ClusterConfig


class RayLane:
    """Runs one cell at a time on its part of the cluster; the next cell takes over its actors.

    Args:
        session: Its actors, on the Ray of all lanes.
        part: Its part of the cluster.
        common: What cells have in common.
        show: What is shown of the rounds.
    """

    def __init__(self, session: Session, part: ClusterShare, common: CommonParts, show: Show) -> None:
        self._session, self._part, self._common, self._show = session, part, common, show

    def run(self, cell: StudyCell) -> Outcome:
        """Run a cell, and wait for its end."""
        try:
            return run_cell(cell, self._common, self._show, self._session, self._part)
        except OutputClosedError:
            raise
        except Exception as err:  # a method may raise anything
            return Outcome(failed=cause_of(err))

    def end(self) -> None:
        """Nothing: the sessions end what they have started, after their threads."""


@contextmanager
def lanes_on_ray(
    cluster: ClusterConfig, cells: int, at_once: int | Literal["auto"], show: Show, common: CommonParts
) -> Iterator[Beside]:
    """Start or join Ray, and run cells on it while the block runs.

    Where the block is left early, the cells that run save their last finished round.

    Args:
        cluster: The section `cluster` that all cells have.
        cells: Their number.
        at_once: Number of lanes; `auto`: as many as there is room for.
        show: What is shown of the rounds.
        common: What cells have in common.

    Raises:
        ConfigError: No cluster answers at the address.
        ResourceError: The cluster has no room for so many cells.
        ClusterError: Ray could not be started on this machine.
    """
    from rayfed.engine.weight_store import WeightStore
    from rayfed.executors.cluster import node_resources
    from rayfed.executors.connection import connection

    end_session()  # the actors of earlier runs of this process would hold a part of the cluster
    numbers = (cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout)
    with connection(cluster.address, *numbers) as link, ExitStack() as held:
        part = share(cluster, cells, node_resources(), at_once)
        stage(
            f"running {count_of(part.lanes, 'cell')} side by side, with {count_of(part.actors, 'actor')} each"
        )
        held.enter_context(use_screen(Screen()))  # what each of them starts is not said
        store = WeightStore()
        sessions = [held.enter_context(Session(link, store)) for _ in range(part.lanes)]

        def look() -> None:
            if link.health.lost:
                raise ClusterError(link.health.lost)

        beside = Beside([RayLane(session, part, common, show) for session in sessions], look)
        try:
            yield beside
        except BaseException:
            with _asked_to_stop():
                beside.end()
            raise
        beside.end()


@contextmanager
def _asked_to_stop() -> Iterator[None]:
    """While the block runs, cells end after their last finished round."""
    asked = STOP.is_set()
    STOP.set()
    try:
        yield
    finally:
        if not asked:
            STOP.clear()
