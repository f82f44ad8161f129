"""The section `cluster` of a config: where clients run, and on how much of a machine or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rayfed.types import Count, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section `cluster`: where clients run. Only `threads` can change a result.

    Attributes:
        executor: `ray`: on Ray actors; `inline`: everything in one process; or an executor of your own,
            `package.module:NAME` (CONTRIBUTING.md).
        device: Device of clients in one process, and of the analysis of a run: `auto` (the first GPU that
            torch sees, else the CPU), `cpu`, `cuda` or `cuda:N`. GPUs of actors: `num_gpus`.
        address: Address of a running Ray cluster (host:port); none: that of RAY_ADDRESS, or else Ray is
            started on this machine.
        actors: Number of client actors; `auto`: as many as fit and can be used; `per_client`: one for each
            client.
        cpus_per_actor: CPUs of an actor; auto: one, or less if there are more actors than CPUs.
        gpus_per_actor: Share of a GPU of an actor; auto: all GPUs are shared evenly by as many actors as
            their memory holds, which is measured with one client before the actors start (docs/gpu.md); none
            for a small network, unless `num_gpus` is given.
        memory_per_actor: Memory of an actor in GB, counted when actors are planned, neither reserved nor
            enforced.
        threads: Threads of torch and NumPy in an actor. They change results, because float sums depend on
            them.
        num_cpus: CPUs of a Ray that is started here; none: those of the machine.
        num_gpus: GPUs of a Ray that is started here; none: those of the machine.
        dashboard: Start Ray's dashboard with a Ray that is started here, which takes longer then.
        metrics: Export metrics for Prometheus through Ray (docs/watching.md).
        connect_timeout: Seconds to wait for a cluster, for the check of its nodes, or for places for actors.
        mixed_hardware: Use nodes of a cluster with several kinds of processors (or GPUs, if clients compute
            there), which round differently: results then depend on where each client ran.
    """

    executor: str = "ray"
    device: str = "auto"
    address: str | None = None
    actors: Literal["auto", "per_client"] | Count = "auto"
    cpus_per_actor: Literal["auto"] | Positive = "auto"
    gpus_per_actor: Literal["auto"] | NonNegative = "auto"
    memory_per_actor: Positive = 1.0
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    num_cpus: Count | None = None
    num_gpus: Annotated[int, Ge(0)] | None = None
    dashboard: bool = False
    metrics: bool = True
    connect_timeout: Positive = 30.0
    mixed_hardware: bool = False
