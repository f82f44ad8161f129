"""The sections of an experiment that say where it runs, what is scored and what is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rayfed.types import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where clients run; nothing here changes a result.

    Attributes:
        executor: Ray actors, or everything in this process.
        address: A running Ray cluster (host:port); none: RAY_ADDRESS, else a cluster of our own on this
            machine.
        actors: Number of client actors; `auto` fits the cluster; `per_client`: each client has its own.
        cpus_per_actor: CPUs an actor occupies; auto: one, or less where more actors are asked for than there
            are.
        gpus_per_actor: Share of a GPU an actor occupies; auto: all GPUs are shared out evenly.
        memory_per_actor: GB an actor may need; limits `auto`.
        threads: torch threads of an actor. Part of the result: float sums depend on it.
        num_cpus: CPUs of a cluster of our own; none: what the machine has.
        num_gpus: GPUs of a cluster of our own; none: what the machine has.
        dashboard: Start Ray's dashboard with a cluster of our own.
        metrics: Tell Prometheus about the run, through Ray (docs/monitoring.md).
        connect_timeout: Seconds to wait for a cluster, or for actors to be placed.
    """

    executor: Literal["ray", "inline"] = "ray"
    address: str | None = None
    actors: Literal["auto", "per_client"] | Count = "auto"
    cpus_per_actor: Literal["auto"] | Positive = "auto"
    gpus_per_actor: Literal["auto"] | NonNegative = "auto"
    memory_per_actor: Positive = 1.0
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    num_cpus: Count | None = None
    num_gpus: Annotated[int, Ge(0)] | None = None
    dashboard: bool = True
    metrics: bool = True
    connect_timeout: Positive = 30.0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is scored when.

    Attributes:
        every: Score the global model in every such round and in the last one; 0: never.
        personal: Also score the model each client would deploy, on its own test split.
        validation: Also score the global model on the clients' validation splits, to choose a round by.
        table: The final table has a row for each domain, or (`clients`) for each model the statistics over
            clients: average, worst and best tenth, variance.
    """

    every: Annotated[int, Ge(0)] = 1
    personal: bool = False
    validation: bool = False
    table: Literal["domains", "clients"] = "domains"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept for going on after a crash; nothing here changes a result.

    Attributes:
        every: Write a checkpoint after every such round, and after the last one; 0: only after the last one.
        keep: How many of the last checkpoints stay.
    """

    every: Annotated[int, Ge(0)] = 1
    keep: Count = 2
