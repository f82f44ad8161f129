"""Client actors of a trial: they live in its bundles, serve all its seeds, and the trials after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray

from rayfed.executors.actors import ClientActor, RayExecutor
from rayfed.executors.failures import Policy
from rayfed.executors.lane import Lane
from rayfed.executors.metrics import Memory
from rayfed.executors.worker import Worker, World
from rayfed.federation.executor import Call
from rayfed.types import Update
from tune.shared import Frozen, feature_folder


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a lane needs to play the clients of one seed.

    Attributes:
        world: The experiment as a worker sees it.
        weights: Its start tensors.
        frozen: Its backbone in the object store, if it is there.
        labels: Of the lane's metrics; none: it has no metrics.
    """

    world: World
    weights: Any
    frozen: Frozen | None
    labels: Mapping[str, str] | None = None

    def worker(self, device: str) -> Worker:
        worker = Worker(self.world, self.weights, device)
        share_features(worker, self.world, self.frozen, device)
        return worker


def share_features(worker: Worker, world: World, frozen: Frozen | None, device: str) -> None:
    """Let a worker keep frozen features where other processes of the node find them."""
    folder = feature_folder(world, frozen, device)
    if folder is not None:
        worker.cache = folder


class TrialClient(ClientActor):
    """A lane that can change from seed to seed and from trial to trial without a new process."""

    def __init__(self, name: str, stages: list[Any], chosen: int) -> None:
        """Args: name: of the actor. stages: references, one per seed. chosen: whose turn it is."""
        stage: Stage = ray.get(stages[chosen])
        super().__init__(name, stage.world, stage.weights, stage.labels)
        self._device = self._worker._device
        share_features(self._worker, stage.world, stage.frozen, self._device)
        self._stages, self._workers = stages, {chosen: self._worker}

    def become(self, stages: list[Any]) -> None:
        """Serve another trial, its first seed first."""
        self._stages, self._workers = stages, {}
        self.choose(0)

    def choose(self, index: int) -> None:
        """Serve one of the seeds."""
        if index not in self._workers:
            del self._worker  # no call may be played by another seed should this fail
            stage: Stage = ray.get(self._stages[index])
            self._workers[index] = stage.worker(self._device)
            if stage.labels:
                self._memory = Memory(stage.labels, self._device)
        self._worker = self._workers[index]

    def where(self) -> dict[str, Any]:
        """Node, process and GPUs of this lane."""
        return {**super().where(), "gpus": ray.get_gpu_ids()}


class Lanes:
    """The client actors of a trial, whichever seed they serve."""

    def __init__(self, names: Sequence[str], options: Sequence[Mapping[str, Any]], policy: Policy) -> None:
        """Args: names: one actor each. options: its Ray options. policy: what is done about failures."""
        self.names, self._options, self.policy = list(names), [dict(o) for o in options], policy
        self._stages: list[Any] = []
        self.chosen = 0
        self.lanes: list[Lane] = []

    def serve(self, stages: Sequence[Stage]) -> list[SeedExecutor]:
        """An executor for each seed of a trial; actors are started once and then change over."""
        self._stages, self.chosen = [ray.put(stage) for stage in stages], 0
        if self.lanes:
            ray.get([lane.actor.become.remote(self._stages) for lane in self.lanes])
        executors = [SeedExecutor(self, k) for k in range(len(stages))]
        if not self.lanes:
            self.lanes = [Lane(name, own) for name, own in zip(self.names, self._options, strict=True)]
            for lane in self.lanes:
                self.start(lane)
        return executors

    def start(self, lane: Lane) -> None:
        """Start the actor of a lane, serving the seed whose turn it is."""
        actor = ray.remote(TrialClient).options(**lane.ray_options)
        lane.begin(actor.remote(lane.name, self._stages, self.chosen))

    def choose(self, index: int) -> None:
        """Let the next calls play clients of this seed."""
        if index != self.chosen:
            self.chosen = index
            for lane in self.lanes:
                lane.actor.choose.remote(index)  # actors take calls in the order in which they were sent

    def close(self) -> None:
        for lane in self.lanes:
            ray.kill(lane.actor)
        self.lanes = []


class SeedExecutor(RayExecutor):
    """One seed of a trial on lanes it shares with the others: stores are its own, actors are not."""

    def __init__(self, shared: Lanes, index: int) -> None:
        # The actors are not its own, so neither is what they are started with.
        super().__init__(cast("World", None), None, (), (), shared.policy)
        self._shared, self._index = shared, index

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        self._shared.choose(self._index)
        self.lanes = self._shared.lanes
        self.home = {lane.name.rsplit(":", 1)[-1]: lane for lane in self.lanes}
        return super().map(calls)

    def _start(self, lane: Lane) -> None:
        self._shared.start(lane)

    def close(self) -> None:
        """The lanes go on without this seed."""
