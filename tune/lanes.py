"""Client actors of a trial: they run in its resource bundles, for all its seeds and for later trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rayfed.executors.actor_pool import LaneExecutor
from rayfed.executors.actor_state import Lane
from rayfed.executors.client_actor import ClientActor
from rayfed.executors.worker import World
from rayfed.federation.executor import Call, Policy
from rayfed.types import Update


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Everything a lane needs to run the clients of one seed.

    Attributes:
        world: Data, model and method of the experiment, as a worker needs them.
        weights: Initial tensors.
        labels: Labels of the lane's metrics; None: it has no metrics.
    """

    world: World
    weights: Any
    labels: Mapping[str, str] | None = None


class TrialClient(ClientActor):
    """Client actor that can change to another seed or trial without a new process."""

    def __init__(self, name: str, stages: list[Any], chosen: int) -> None:
        """Start with one of the seeds.

        Args:
            name: Name of the actor.
            stages: Object references to `Stage`, one per seed.
            chosen: Index of the seed whose clients are run first.
        """
        stage: Stage = ray.get(stages[chosen])
        super().__init__(name, stage.world, stage.weights, stage.labels)
        self._stages = stages
        self._workers = {chosen: self._held}

    def become(self, stages: list[Any]) -> None:
        """Change to another trial and its first seed."""
        self._stages = stages
        self._workers.clear()
        self.choose(0)

    def choose(self, index: int) -> None:
        """Run clients of this seed from now on.

        A GPU holds the model and the examples of one seed only. On the CPU those of a former seed are kept:
        their frozen weights and examples are mapped memory, which all processes share.
        """
        if index not in self._workers:
            if self._device != "cpu":
                self._workers.clear()
            stage: Stage = ray.get(self._stages[index])
            self._hold(stage.world, stage.weights, stage.labels)
            self._workers[index] = self._held
        self._held = self._workers[index]

    def where(self) -> dict[str, Any]:
        """Node, process and GPUs of this lane."""
        return {**super().where(), "gpus": ray.get_gpu_ids()}


class Lanes:
    """The client actors of a trial, shared by its seeds."""

    def __init__(self, names: Sequence[str], options: Sequence[Mapping[str, Any]], policy: Policy) -> None:
        """Prepare lanes; their actors start in `serve`.

        Args:
            names: One per actor.
            options: Ray options of each actor.
            policy: What is done about failures.
        """
        self.names = list(names)
        self.policy = policy
        self._options = [dict(o) for o in options]
        self._stages: list[Any] = []
        self.chosen = 0
        self.lanes: list[Lane] = []

    def serve(self, stages: Sequence[Stage]) -> list[SeedExecutor]:
        """An executor for each seed of a trial; actors are started once and reused by later trials."""
        self._stages = [ray.put(stage) for stage in stages]
        self.chosen = 0
        if self.lanes:
            ray.get([lane.actor.become.remote(self._stages) for lane in self.lanes])
        executors = [SeedExecutor(self, k) for k in range(len(stages))]
        if not self.lanes:
            self.lanes = [Lane(name, own) for name, own in zip(self.names, self._options, strict=True)]
            for lane in self.lanes:
                self.start(lane)
        return executors

    def start(self, lane: Lane) -> None:
        """Start the actor of a lane with the seed that is chosen now."""
        actor = ray.remote(TrialClient).options(**lane.ray_options)
        lane.begin(actor.remote(lane.name, self._stages, self.chosen))

    def choose(self, index: int) -> None:
        """Run clients of this seed in the next calls."""
        if index != self.chosen:
            self.chosen = index
            for lane in self.lanes:
                lane.actor.choose.remote(index)  # actors run calls in the order in which they are sent

    def close(self) -> None:
        """End the actors."""
        for lane in self.lanes:
            ray.kill(lane.actor)
        self.lanes = []


class SeedExecutor(LaneExecutor):
    """Executor of one seed of a trial, with its own stores and the lanes of all seeds."""

    def __init__(self, shared: Lanes, index: int) -> None:
        super().__init__(shared.lanes, shared.policy)
        self._shared = shared
        self._index = index

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        self._shared.choose(self._index)
        self.use_lanes(self._shared.lanes)
        return super().map(calls)

    def _start(self, lane: Lane) -> None:
        self._shared.start(lane)

    def close(self) -> None:
        """Nothing to end: the actors belong to `Lanes`."""
