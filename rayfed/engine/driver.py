"""The driver actor: it runs the round loop on its node, and owns the client actors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rayfed.engine.loop import Experiment
from rayfed.engine.recorded import Keeping, Watch, record_rounds
from rayfed.errors import StoppedError
from rayfed.executors.failures import Policy
from rayfed.executors.worker import World
from rayfed.types import Row

if TYPE_CHECKING:
    from rayfed.executors.actors import RayExecutor


class DriverActor:
    """The driver as a Ray actor: it runs one experiment after the other on its client actors.

    These end with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: RayExecutor | None = None

    def __repr__(self) -> str:
        return f"rayfed:driver:{self._name}"

    def start(
        self,
        experiment: Experiment,
        world: World,
        weights: list[Any],
        actors: Mapping[str, dict[str, Any]],
        policy: Policy,
        labels: Mapping[str, str] | None,
    ) -> Iterator[int]:
        """Start the client actors, or change those that run to this experiment, and wait for their models.

        Args:
            experiment: The experiment whose rounds are run next.
            world: What its client actors need.
            weights: Object reference of the initial tensors, in a list so that Ray does not read it.
            actors: Ray options of each client actor, by its name.
            policy: What is done when a client or an actor fails.
            labels: Labels of the metrics for Prometheus; None: no metrics.

        Yields:
            The number of actors that are ready, once for each of them.
        """
        import torch

        from rayfed.executors.actors import RayExecutor
        from rayfed.executors.metrics import Metrics

        torch.set_num_threads(world.threads)
        self._experiment = experiment
        self._ended = threading.Event()
        self._executor = RayExecutor(
            world, weights[0], list(actors), list(actors.values()), policy, labels, before=self._executor
        )
        self._watch: Watch | None = Metrics(labels) if labels else None
        try:
            yield from self._executor.starting()
        except BaseException:  # `stop` waits for this; GeneratorExit is raised where the command has ended
            self._ended.set()
            raise

    def rounds(self, start: Any, keeping: Keeping) -> Iterator[Row]:
        """Run and record all rounds; yields a row per round, then the digest of the final tensors."""
        from rayfed.executors.trim import Trim, leave_out_of_garbage_collection
        from rayfed.executors.wire import unpack

        assert self._executor is not None  # `start` was called
        params = {name: value.clone() for name, value in unpack(start).items()}
        leave_out_of_garbage_collection()
        trim = Trim()
        try:
            for row in record_rounds(self._experiment, self._executor, params, keeping, self._watch):
                trim.now_and_then()
                yield row
        except StoppedError:
            return
        finally:
            self._ended.set()

    def stop(self, patience: float) -> bool:
        """End the rounds early; returns whether they ended within `patience` seconds."""
        if self._executor is None:
            return True
        self._executor.stop()
        return self._ended.wait(patience)
