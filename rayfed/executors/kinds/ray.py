"""Client actors on the machines of a Ray cluster, or on this machine."""

from __future__ import annotations

from rayfed.errors import ConfigError
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.kinds.base import ExecutorKind


def check_no_device(cluster: ClusterConfig) -> None:
    """Check that the config names no device, as Ray gives each actor its own.

    Raises:
        ConfigError: It names one; says which keys are for GPUs of actors.
    """
    if cluster.device != "auto":
        raise ConfigError(
            f"cluster.device: {cluster.device!r} is for cluster=inline; actors get the GPUs of "
            f"cluster.num_gpus, and with cluster.num_gpus=0 they run on the CPU"
        )


def which_cluster(cluster: ClusterConfig) -> str:
    """A few words about the cluster: that it is started here, or its address."""
    from rayfed.executors.connection import address_of, is_our_own

    if is_our_own(cluster.address):
        return "started on this machine (neither cluster.address nor RAY_ADDRESS is set)"
    return f"joined: {address_of(cluster.address)}"


EXECUTOR = ExecutorKind(make=None, fits=check_no_device, describe=which_cluster)
