"""Resources of a trial as Ray bundles, and the number of trials that a cluster holds at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray.tune import PlacementGroupFactory

from rayfed.devices import HOST
from rayfed.errors import ResourceError
from rayfed.executors.cluster import GB, ActorPlan, Resources, Wish, plan
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.kinds.base import kind_of
from rayfed.mps import mps_runs

SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Facts, besides its config, that determine the resources of a trial.

    Attributes:
        clients: Number of clients of the experiment.
        per_round: Number of clients that train at the same time.
        together: Number of trials that should run at the same time if they fit.
        nodes: Resources of every node: CPU, GPU, memory (bytes).
        on_cpu: Client actors take no GPU unless `cluster.gpus_per_actor` gives their share.
    """

    clients: int
    per_round: int
    together: int
    nodes: tuple[Resources, ...]
    on_cpu: bool = False


def lanes(cluster: ClusterConfig, demand: Demand) -> ActorPlan:
    """Number and size of the client actors of one trial.

    `cluster.actors=auto` divides the cluster between the trials that run at the same time, with at least one
    actor each; a number, or `per_client`, applies to every trial.

    Raises:
        ResourceError: One trial alone does not fit; the message suggests values that do.
    """
    wish = Wish(
        actors=cluster.actors,
        cpus=cluster.cpus_per_actor,
        gpus=0 if demand.on_cpu and cluster.gpus_per_actor == "auto" else cluster.gpus_per_actor,
        memory=cluster.memory_per_actor * GB,
        mps=mps_runs(),
    )
    if wish.actors != "auto":
        return plan(wish, demand.clients, demand.per_round, demand.nodes)
    whole = plan(wish, demand.clients, demand.per_round * demand.together, demand.nodes)
    together = min(demand.together, whole.actors)
    return replace(whole, actors=max(1, min(demand.per_round, whole.actors // together)))


def bundles(cluster: ClusterConfig, demand: Demand) -> list[dict[str, float]]:
    """The bundles of one trial: its driver, then its client actors.

    With client actors the driver mostly waits and reserves nothing; without them it does the work, on one GPU
    or on `cluster.gpus_per_actor` of one.

    Raises:
        ResourceError: No node can hold a bundle.
    """
    kind = kind_of(cluster)
    if kind.needs_cluster:
        actors = lanes(cluster, demand)
        return [{}, *([actors.bundle] * actors.actors)]
    most = max(node.get("CPU", 0) for node in demand.nodes)
    cpus = kind.cpus(cluster)
    if cpus > most:
        fits = max(1, int(most) // kind.clients_at_once)
        raise ResourceError(
            f"cluster.threads: a trial in one process with {cpus} threads does not fit: the "
            f"largest node has {most:g} CPU; what would fit: cluster.threads={fits}"
        )
    gpus = _gpus_of_a_process(cluster, demand)
    return [{"CPU": float(cpus), **({"GPU": gpus} if gpus else {})}]


def _gpus_of_a_process(cluster: ClusterConfig, demand: Demand) -> float:
    """The GPUs that a trial in one process reserves; Ray hides all others from it."""
    has_gpus = any(node.get("GPU", 0) >= 1 for node in demand.nodes)
    if demand.on_cpu or cluster.device == HOST.type or not has_gpus:
        return 0.0
    return 1.0 if cluster.gpus_per_actor == "auto" else cluster.gpus_per_actor


def factory(cluster: ClusterConfig, demand: Demand) -> PlacementGroupFactory:
    """The bundles of one trial as Ray Tune's placement group factory."""
    return PlacementGroupFactory(bundles(cluster, demand), strategy="PACK")


def at_once(wanted: Sequence[Resources], nodes: Sequence[Resources], most: int) -> int:
    """Number of groups of these bundles that the nodes hold at the same time, at most `most`; first fit."""
    free = [_Free(node) for node in nodes]
    for count in range(most):
        if not all(any(node.take(bundle) for node in free) for bundle in wanted):
            return count
    return most


class _Free:
    """Free resources of a node; a fraction of a GPU must be on one GPU."""

    def __init__(self, node: Resources) -> None:
        self._cpus = node.get("CPU", 0.0)
        self._gpus = [1.0] * int(node.get("GPU", 0))

    def take(self, bundle: Resources) -> bool:
        """Reserve a bundle; False where it does not fit."""
        cpus = bundle.get("CPU", 0.0)
        gpus = bundle.get("GPU", 0.0)
        if cpus > self._cpus + SLACK:
            return False
        if gpus:
            whole = math.ceil(gpus)
            share = min(gpus, 1.0)
            fits = [i for i, free in enumerate(self._gpus) if free + SLACK >= share][:whole]
            if len(fits) < whole:
                return False
            for i in fits:
                self._gpus[i] -= share
        self._cpus -= cpus
        return True


def in_words(wanted: Sequence[Resources], together: int) -> str:
    """Resources of a trial and number of trials, in one line for the user."""

    def text(bundle: Resources) -> str:
        return " and ".join(f"{value:.3g} {name}" for name, value in bundle.items())

    own, *actors = wanted
    what = f"one process, {text(own)}"
    if actors:
        what = f"{len(actors)} client actors with {text(actors[0])} each"
    return f"{together} trials at a time, each: {what}"
