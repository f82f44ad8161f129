"""Fits client actors onto the nodes, given how many a GPU holds, and reserves resources."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.errors import BusyError, ResourceError
from rayfed.executors.connection import Health
from rayfed.executors.memory_limits import OWN_MEMORY, free_memory
from rayfed.executors.ray_private import placement_group_of

GB = 1e9
TOGETHER = 2
"""Actors that `auto` starts on a GPU: their kernels take turns, and one prepares while the other computes."""

TOGETHER_WITH_MPS = 6
"""The same where MPS runs the kernels of all actors at once."""

FINEST = 1000  # smallest share of a CPU or GPU that is tried: 1/1000
Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Resources that the config asks for.

    Attributes:
        actors: auto, per_client or a number.
        cpus: CPUs of an actor, or auto.
        gpus: GPUs of an actor, or auto.
        memory: Bytes an actor may need.
        per_gpu: Most actors for which a GPU has memory; None: this was not measured.
        mps: NVIDIA's multi-process service serves the GPUs.
        joined: The nodes are those of a cluster that was joined, not of a Ray on this machine; for messages.
    """

    actors: Literal["auto", "per_client"] | int
    cpus: Literal["auto"] | float
    gpus: Literal["auto"] | float
    memory: float
    per_gpu: int | None = None
    mps: bool = False
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """Number of client actors that will be started, and the CPUs and GPUs of each."""

    actors: int
    cpus: float
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def node_resources() -> list[dict[str, float]]:
    """Resources of every node that is alive."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def own_node(num_cpus: int | None, num_gpus: int | None) -> dict[str, float]:
    """Resources of a Ray cluster that would be started on this machine, computed without starting it.

    They are never less than what Ray itself finds, apart from changes of the free memory. Ray reserves 30 %
    of the memory for its object store.
    """
    memory = free_memory()
    return {
        "CPU": float(num_cpus or os.cpu_count() or 1),
        "GPU": float(torch.cuda.device_count() if num_gpus is None else num_gpus),
        "memory": OWN_MEMORY * memory,
        "object_store_memory": (1 - OWN_MEMORY) * memory,
    }


def plan(wish: Wish, clients: int, per_round: int, nodes: Sequence[Resources]) -> ActorPlan:
    """Number and size of the client actors.

    Args:
        wish: What the config asks for.
        clients: Clients of the experiment.
        per_round: Clients in a round; more actors than that would be idle.
        nodes: Resources of every node: CPU, GPU, memory (bytes).

    Raises:
        ResourceError: They do not fit; the message says what the cluster has and what would fit.
    """
    count = _count(wish, clients, per_round, nodes)
    gpus = wish.gpus if wish.gpus != "auto" else _even_share(nodes, count)
    cpus = wish.cpus if wish.cpus != "auto" else _cpu_share(nodes, count, gpus, wish)
    actors = ActorPlan(actors=count, cpus=cpus, gpus=gpus)
    room = _room(nodes, actors, wish)
    if room < count:
        raise ResourceError(_refusal(actors, room, nodes, wish))
    return actors


@contextmanager
def reserve(actors: ActorPlan, timeout: float, health: Health) -> Iterator[list[dict[str, Any]]]:
    """Reserve the resources of all actors while the block runs; yields the Ray options of each actor.

    Inside a placement group (a trial of Ray Tune) the actors use its resources instead. The resources are
    released explicitly, because Ray does not always release those of a creator that died.

    Raises:
        BusyError: The cluster did not have the resources free within `timeout` seconds.
    """
    options: dict[str, Any] = {"num_cpus": actors.cpus, "num_gpus": actors.gpus}
    if get_current_placement_group() is not None:
        yield [dict(options) for _ in range(actors.actors)]
        return
    prefix = f"rayfed-{uuid.uuid4().hex[:12]}"
    try:
        strategies = _places(actors, timeout, prefix)
        yield [{**options, "scheduling_strategy": s} for s in strategies]
    finally:
        if not health.lost:
            _release(prefix)


GRAB = 5.0
"""Seconds in which the groups of the nodes must get the resources that the group of all actors released."""

PAUSE = 1.0  # longest pause in seconds before the next attempt, if another run was faster


def _places(actors: ActorPlan, timeout: float, prefix: str) -> list[PlacementGroupSchedulingStrategy]:
    """Reserve a bundle for each actor, all or none, in one placement group for each node.

    Ray's gcs_server computes without a pause while a group has lost one of its nodes and no other node has
    room. A group of one node can be removed when that node is lost. So the actors are placed in one group,
    which is replaced by a group for each of its nodes if it has several.
    """
    deadline = time.monotonic() + timeout
    while True:
        whole = placement_group([actors.bundle] * actors.actors, strategy="SPREAD", name=_name(prefix))
        if not whole.wait(max(0.0, deadline - time.monotonic())):
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise BusyError(
                f"cluster.actors: {actors.actors} actors with {actors.bundle} were not placed within "
                f"{timeout:g} s (cluster.connect_timeout); free now: {free or 'nothing'}; "
                f"wait for other jobs or ask for fewer"
            )
        nodes = list(placement_group_table(whole)["bundles_to_node_id"].values())
        if len(set(nodes)) == 1:
            return _bundles_of(whole, actors.actors)
        remove_placement_group(whole)
        own = {
            node: placement_group(
                [actors.bundle] * nodes.count(node),
                name=_name(prefix),
                bundle_label_selector=[{"ray.io/node-id": node}] * nodes.count(node),
            )
            for node in dict.fromkeys(nodes)
        }
        end = time.monotonic() + GRAB
        if all(group.wait(max(0.0, end - time.monotonic())) for group in own.values()):
            return [s for node, group in own.items() for s in _bundles_of(group, nodes.count(node))]
        _release(prefix)  # another run was faster; neither may wait for the other one with a part
        time.sleep(random.uniform(0.0, PAUSE))


def _bundles_of(group: PlacementGroup, count: int) -> list[PlacementGroupSchedulingStrategy]:
    return [
        PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i)
        for i in range(count)
    ]


def _name(prefix: str) -> str:
    return f"{prefix}:{uuid.uuid4().hex[:12]}"


def _release(prefix: str) -> None:
    """Remove all placement groups whose name begins with this prefix, also those of replaced actors."""
    for row in placement_group_table().values():
        if row["name"].startswith(f"{prefix}:") and row["state"] != "REMOVED":
            remove_placement_group(placement_group_of(row["placement_group_id"]))


def has_lost_its_node(options: Mapping[str, Any]) -> bool:
    """Whether the reservation of an actor with these Ray options was on a node that is gone."""
    strategy = options.get("scheduling_strategy")
    if strategy is None:
        return False
    return placement_group_table(strategy.placement_group).get("state") not in ("CREATED", "PENDING")


def reserve_again(options: Mapping[str, Any]) -> dict[str, Any]:
    """Ray options for the next actor of a lane, with a new reservation if the former one lost its node.

    The new one waits until a node has room, and is released with all others of its `reserve`.
    """
    if not has_lost_its_node(options):
        return dict(options)
    former = options["scheduling_strategy"].placement_group
    prefix = placement_group_table(former)["name"].rpartition(":")[0]
    remove_placement_group(former)  # it was on that node alone
    bundle = ActorPlan(actors=1, cpus=options["num_cpus"], gpus=options["num_gpus"]).bundle
    group = placement_group([bundle], name=_name(prefix))
    return {**options, "scheduling_strategy": _bundles_of(group, 1)[0]}


def _count(wish: Wish, clients: int, per_round: int, nodes: Sequence[Resources]) -> int:
    if isinstance(wish.actors, int):
        return wish.actors
    if wish.actors == "per_client":
        return clients
    gpus = wish.gpus if wish.gpus != "auto" else 0.0
    # If a share of a GPU is given, it determines how many actors fit; they then share the CPUs evenly.
    cpus = (1 / FINEST if gpus else 1.0) if wish.cpus == "auto" else wish.cpus
    most = min(per_round, _room(nodes, ActorPlan(actors=1, cpus=cpus, gpus=gpus), wish))
    total = int(sum(node.get("GPU", 0) for node in nodes))
    if total and wish.gpus == "auto":
        useful = TOGETHER_WITH_MPS if wish.mps else TOGETHER
        most = min(most, total * min(useful, wish.per_gpu or useful))
        most -= most % total if most > total else 0  # Ray packs shares, so that other GPUs would be idle
    return max(1, most)


def _even_share(nodes: Sequence[Resources], count: int) -> float:
    """The largest share 1/k of a GPU of which the nodes have `count`; 0 without GPUs."""
    total = sum(node.get("GPU", 0) for node in nodes)
    if not total:
        return 0.0
    return 1.0 / max(1, -(-count // int(total)))


def _cpu_share(nodes: Sequence[Resources], count: int, gpus: float, wish: Wish) -> float:
    """The largest share 1/k of a CPU with which `count` actors fit; 1/FINEST if they never fit."""
    for k in range(1, FINEST + 1):
        if _room(nodes, ActorPlan(actors=count, cpus=1 / k, gpus=gpus), wish) >= count:
            return 1 / k
    return 1 / FINEST


def _room(nodes: Sequence[Resources], actors: ActorPlan, wish: Wish) -> int:
    """Number of such actors that fit on the nodes; a share of a GPU cannot be split over two GPUs."""
    return sum(_room_on(node, actors, wish) for node in nodes)


def _room_on(node: Resources, actors: ActorPlan, wish: Wish) -> int:
    slack = 1e-9
    memory = wish.memory
    limits = [int(node.get("CPU", 0) / actors.cpus + slack)]
    if memory:
        limits.append(int(node.get("memory", float("inf")) // memory) if "memory" in node else limits[0])
    if actors.gpus:
        gpus = int(node.get("GPU", 0))
        by_share = int(1 / actors.gpus + slack)
        by_memory = by_share if wish.per_gpu is None else wish.per_gpu
        limits.append(gpus * min(by_share, by_memory) if actors.gpus <= 1 else int(gpus / actors.gpus))
    return min(limits)


def _refusal(actors: ActorPlan, room: int, nodes: Sequence[Resources], wish: Wish) -> str:
    total = {k: sum(node.get(k, 0) for node in nodes) for k in ("CPU", "GPU")}
    has = (
        f"{total['CPU']:g} CPU, {total['GPU']:g} GPU and {sum(n.get('memory', 0) for n in nodes) / GB:.0f} GB"
    )
    if actors.gpus and not total["GPU"]:
        where = "this machine" if len(nodes) == 1 and not wish.joined else "the cluster"
        return f"cluster.gpus_per_actor: {where} has no GPU; leave it out, or write cluster.gpus_per_actor=0"
    cpus = "" if wish.cpus == "auto" else f"{actors.cpus:g} CPU, "
    what = "1 actor with" if actors.actors == 1 else f"{actors.actors} actors, each with"
    verb = "does not fit" if actors.actors == 1 else "do not fit"
    measured = f" (whose memory holds {wish.per_gpu} actors)" if wish.per_gpu is not None else ""
    asked = f"{what} {cpus}{actors.gpus:.4g} GPU{measured} and {wish.memory / GB:g} GB"
    key = "cluster.gpus_per_actor" if actors.gpus else "cluster.actors"
    fits = [f"cluster.actors={room}"] if room else []
    if actors.gpus:
        other = replace(actors, gpus=_even_share(nodes, actors.actors))
        others = _room(nodes, other, wish)
        if others >= actors.actors:
            fits.append(f"cluster.gpus_per_actor={other.gpus:.4g}")
        elif others and not room:
            fits.append(f"cluster.gpus_per_actor={other.gpus:.4g} with cluster.actors={others}")
    one = "this cluster" if wish.joined else "this machine"
    machines = one if len(nodes) == 1 else f"{len(nodes)} nodes"
    if not fits:
        fits.append("fewer cluster.cpus_per_actor or cluster.memory_per_actor")
    return f"{key}: {asked}, {verb} {machines} with {has}; what would fit: {' or '.join(fits)}"
