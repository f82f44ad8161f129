"""The sections `cluster`, `evaluation` and `checkpoint` of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le

from rayfed.types import Count, NonNegative, Positive

ProtocolName: TypeAlias = Literal[
    "single",
    "leave_one_out",
    "few_shot",
    "unseen_clients",
    "cross_domain",
    "base_to_new",
    "cross_dataset",
]
"""Values of `protocol`; all but `single` are entries of `rayfed.config.variants.PROTOCOLS`."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section `cluster`: where clients run. Only `threads` can change a result.

    Attributes:
        executor: `ray`: on Ray actors; `inline`: everything in one process.
        device: Device of the clients with `inline`, and of the analysis of a run: `auto` (the first GPU that
            torch sees, else the CPU), `cpu`, `cuda` or `cuda:N`. GPUs of actors: `num_gpus`.
        address: Address of a running Ray cluster (host:port); none: that of RAY_ADDRESS, or else Ray is
            started on this machine.
        actors: Number of client actors; `auto`: as many as fit and can be used; `per_client`: one for each
            client.
        cpus_per_actor: CPUs of an actor; auto: one, or less if there are more actors than CPUs.
        gpus_per_actor: Share of a GPU of an actor; auto: all GPUs are shared evenly by as many actors as
            their memory holds, which is measured with one client before the actors start (docs/gpu.md); none
            for a small network, unless `num_gpus` is given.
        memory_per_actor: Memory of an actor in GB, for the number of actors with `auto`.
        threads: Threads of torch in an actor. They change results, because float sums depend on them.
        num_cpus: CPUs of a Ray that is started here; none: those of the machine.
        num_gpus: GPUs of a Ray that is started here; none: those of the machine.
        dashboard: Start Ray's dashboard with a Ray that is started here.
        metrics: Export metrics for Prometheus through Ray (docs/monitoring.md).
        connect_timeout: Seconds to wait for a cluster, or for actors to be placed.
    """

    executor: Literal["ray", "inline"] = "ray"
    device: str = "auto"
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
    """The section `evaluation`: which models are scored, and when.

    Attributes:
        every: Score the global model in every n-th round and in the last one; 0: never.
        clients: Number of clients whose test sets are scored with the global model, drawn once by the seed
            and so the same for all methods; all: every client's.
        personal: Also score the personal model of each client, on a split of its own.
        personal_split: That split: `test`, or `val`, on which FFT-GP scores personal models; a round that is
            selected by the same split makes these scores optimistic.
        validation: Also score the global model on the validation splits of the clients, by which a round can
            be selected.
        ties: Of the rounds with the highest validation score, the one that leave_one_out reports: the first,
            as in FedCLIP's code, or the last, as in the code of GA, which FFT-GP follows.
        local_steps: Clients that never train (`data.unseen_clients`) are also scored after this many
            optimisation steps from the global model; 0: not.
        model_of: Folder of a finished run with the same model, tuning and method, whose final model is
            scored; nothing is trained then. The classes may be others: the model makes its classifier from
            their names. Where the clients are the same, each is scored with the tensors that stayed at it.
            None: the experiment trains its own model.
        table: Rows of the final table: `domains`, or `clients` for statistics over clients of each model
            (average, worst and best tenth, variance).
    """

    every: Annotated[int, Ge(0)] = 1
    clients: Literal["all"] | Count = "all"
    personal: bool = False
    personal_split: Literal["test", "val"] = "test"
    validation: bool = False
    ties: Literal["first", "last"] = "first"
    local_steps: Annotated[int, Ge(0)] = 0
    model_of: str | None = None
    table: Literal["domains", "clients"] = "domains"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The section `checkpoint`: checkpoints from which a run is continued. It changes no result.

    Attributes:
        every: Write a checkpoint after every n-th round and after the last one; 0: only after the last one.
        keep: Number of checkpoints that are kept.
    """

    every: Annotated[int, Ge(0)] = 1
    keep: Count = 2
