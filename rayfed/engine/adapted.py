"""Scores clients that never train, after a few local steps from the global model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rayfed.config.schema import Config
from rayfed.data.partition.partition import Partition
from rayfed.errors import ConfigError, NobodyAnsweredError
from rayfed.evaluation.metrics import Evaluation, evaluation
from rayfed.evaluation.test_sets import EvaluationSet, unseen_sets
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.federation.visit import adapt
from rayfed.types import ServerState

TAG = "report_adapted"
"""Name of the exchange, and of the random streams of the batches."""


@dataclass(frozen=True, kw_only=True)
class Adapting:
    """What is scored.

    Attributes:
        sets: Test sets of the clients that never train, one for each client.
        steps: Number of optimisation steps of a client (`evaluation.local_steps`).
    """

    sets: tuple[EvaluationSet, ...]
    steps: int


def adapting(config: Config, server: Server, partition: Partition) -> Adapting | None:
    """What an experiment scores; None: nothing, because it is not asked for or the method trains nothing.

    Raises:
        ConfigError: A number of steps is set, but all clients train.
    """
    steps = config.evaluation.local_steps
    if steps and not partition.unseen:
        raise ConfigError(
            f"evaluation.local_steps: {steps} has no effect, because all clients train; set "
            f"data.unseen_clients=0.2, or leave it out"
        )
    if not steps or not server.trains:
        return None
    return Adapting(sets=unseen_sets(partition, config.evaluation.clients, config.seed), steps=steps)


def score_adapted(wanted: Adapting, local: Local, cohort: Cohort, state: ServerState) -> Evaluation:
    """Scores of the models that unseen clients would deploy after a few steps from the global model.

    Every evaluation begins anew: a client keeps nothing of it. It receives what every client receives in a
    broadcast, with all blocks and at the full rank. The traffic is not counted as the method's; how many
    clients have no score is recorded as `report_adapted_missing`.

    Args:
        wanted: The clients and the number of steps.
        local: Client half of the method, which trains.
        cohort: Clients of the round.
        state: State of the server after the round.
    """
    ids = tuple(one.id for one in wanted.sets)
    task = partial(adapt, local=local, steps=wanted.steps)
    try:
        found = cohort.for_reporting(ids).run(task, state.broadcast(), tag=TAG)
        answers = {one.client: one for one in found}
    except NobodyAnsweredError:
        answers = {}
    if len(answers) < len(ids):
        cohort.measure(**{f"{TAG}_missing": float(len(ids) - len(answers))})
    return evaluation(wanted.sets, answers)
