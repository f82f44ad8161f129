"""Divides a Ray cluster among the cells of a study that run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rayfed.errors import ResourceError, count_of
from rayfed.executors.kinds.base import kind_of

if TYPE_CHECKING:
    from rayfed.executors import cluster
    from rayfed.executors.cluster_config import ClusterConfig

GB = 1e9

MOST = 1_000_000
"""More clients than any node has room for."""


@dataclass(frozen=True, kw_only=True)
class ClusterShare:
    """Division of a cluster among the cells that run side by side.

    Attributes:
        lanes: Number of cells at the same time.
        actors: Client actors of each cell.
        cpus, gpus: CPUs and GPUs of each actor.
    """

    lanes: int
    actors: int
    cpus: float
    gpus: float

    def of(self, whole: ClusterConfig, clients: int) -> ClusterConfig:
        """The section `cluster` of a cell; never more actors than clients in a round.

        Args:
            whole: The section without the division.
            clients: Clients in a round of the cell.
        """
        actors = max(1, min(self.actors, clients))
        return replace(whole, actors=actors, cpus_per_actor=self.cpus, gpus_per_actor=self.gpus)


def share(
    wanted: ClusterConfig,
    cells: int,
    nodes: Sequence[Mapping[str, float]],
    at_once: int | Literal["auto"] = "auto",
) -> ClusterShare:
    """Divide the nodes among cells: as many at once as there is room for, with few actors each.

    A cell with one actor never waits for its slowest client, so that many small cells use a cluster best.

    Args:
        wanted: The section `cluster` of the config; `actors` is the number of actors of each cell.
        cells: Number of cells that are to be run.
        nodes: Resources of every node: CPU, GPU, memory (bytes).
        at_once: Number of cells at the same time; `auto`: as many as there is room for.

    Raises:
        ResourceError: No actor of the wanted size fits on the nodes, or not those of so many cells.
    """
    from rayfed.executors.cluster import Wish, plan

    kind = kind_of(wanted)
    if not kind.needs_cluster:
        lanes = 1 if at_once == "auto" else min(cells, at_once)  # processes
        return ClusterShare(lanes=lanes, actors=kind.clients_at_once, cpus=1.0, gpus=0.0)
    wish = Wish(
        actors="auto",
        cpus=wanted.cpus_per_actor,
        gpus=wanted.gpus_per_actor,
        memory=wanted.memory_per_actor * GB,
    )
    whole: cluster.ActorPlan = plan(wish, MOST, MOST, nodes)
    actors = wanted.actors if isinstance(wanted.actors, int) else 0
    room = max(1, whole.actors // max(1, actors))
    lanes = min(cells, room if at_once == "auto" else at_once)
    each = actors or max(1, whole.actors // lanes)
    if lanes * each > whole.actors:  # they fit with smaller shares of a CPU or a GPU, or not at all
        try:
            whole = plan(replace(wish, actors=lanes * each), MOST, MOST, nodes)
        except ResourceError as err:
            what = f"{count_of(lanes, 'cell')} with {count_of(each, 'actor')} each"
            raise ResourceError(f"at_once: {what} do not fit; {err}") from err
    return ClusterShare(lanes=lanes, actors=each, cpus=whole.cpus, gpus=whole.gpus)
