"""The facts of an executor that runs, studies, sweeps and the doctor ask for, and how a config names it.

Each file here defines one as `EXECUTOR`, and so does a file of your own (CONTRIBUTING.md). Executors
differ for the rest of the code in the fields of `ExecutorKind` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from rayfed.devices import chosen_device
from rayfed.errors import ConfigError, shown
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.federation.executor import Executor, Policy
from rayfed.registry import EXECUTOR_FILES, Registry
from rayfed.user_objects import title

if TYPE_CHECKING:
    from rayfed.executors.worker import ClientContext, Weights

Factory: TypeAlias = "Callable[[ClientContext, Weights, Policy, torch.device], Executor]"
"""Makes an executor from what a process needs to run clients, the tensors of the initial model, the policy
for failures, and the device of the clients."""


def check_device(cluster: ClusterConfig) -> None:
    """Check that this machine has the device that `cluster.device` names.

    Raises:
        ConfigError: It does not; gives torch's reason.
    """
    chosen_device(cluster.device)


def in_one_process(cluster: ClusterConfig) -> str:
    """A few words that say that there is no cluster."""
    return f"none: everything in one process (cluster={title(cluster.executor)})"


@dataclass(frozen=True, kw_only=True)
class ExecutorKind:
    """A way to run the calls of clients, as `cluster.executor` names it: how it is made, and what it needs.

    Attributes:
        make: Makes it, in the process that runs the rounds, which closes it after them. None: the calls run
            on client actors, which `rayfed.engine.session` starts on a Ray cluster, together with a driver
            that runs the rounds.
        fits: Called with the section `cluster` before data and model are loaded; raises ConfigError, which
            names the key, where a value is not for this executor.
        describe: The cluster that it uses, in a few words, as the doctor prints it.
        clients_at_once: Number of clients that an executor which `make` makes computes at the same time, each
            with `cluster.threads` CPUs. The plan of the actors says it for client actors.
    """

    make: Factory | None
    fits: Callable[[ClusterConfig], None] = check_device
    describe: Callable[[ClusterConfig], str] = in_one_process
    clients_at_once: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.clients_at_once, int) or self.clients_at_once < 1:
            raise ConfigError(
                f"clients_at_once: {shown(self.clients_at_once)} is not a number of clients; write 1 or more"
            )

    @property
    def needs_cluster(self) -> bool:
        """Whether calls run on client actors of a Ray cluster, which is joined or started before a run."""
        return self.make is None

    def cpus(self, cluster: ClusterConfig) -> int:
        """CPUs with which a run in one process computes."""
        return cluster.threads * self.clients_at_once

    def asks_for_gpu(self, cluster: ClusterConfig) -> bool:
        """Whether the config wants clients on a GPU, or on the CPU, however little work they are."""
        return cluster.num_gpus is not None if self.needs_cluster else cluster.device != "auto"

    @property
    def key_for_gpu(self) -> str:
        """The key and the value that put clients on a GPU."""
        return "cluster.gpus_per_actor=1" if self.needs_cluster else "cluster.device=cuda"


EXECUTORS = Registry(
    files=EXECUTOR_FILES,
    attribute="EXECUTOR",
    key="cluster.executor",
    accepts=lambda value: isinstance(value, ExecutorKind),
    expected="an executor, such as EXECUTOR = ExecutorKind(make=InlineExecutor)",
)


def kind_of(cluster: ClusterConfig) -> ExecutorKind:
    """The facts of the executor that a config names.

    Raises:
        ConfigError: There is no such executor, or its module cannot be imported.
    """
    kind: ExecutorKind = EXECUTORS.load(cluster.executor)
    return kind
