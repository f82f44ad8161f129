"""Decides how many cells of a study run at once, and where: in this process, in others, or on one Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rayfed.devices import chosen_device
from rayfed.errors import ConfigError, cause_of
from rayfed.executors.kinds.base import kind_of
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.lanes import Beside, Lanes, OneAfterTheOther
from rayfed.experiment.study.process_lane import ProcessLane, objects_in
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.experiment.study.worker_process import packed, with_values
from rayfed.terminal.console import stage

if TYPE_CHECKING:
    from rayfed.config.schema import Config
    from rayfed.executors.cluster_config import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """The number of cells that run at once, and where they run.

    Attributes:
        size: Their number; `auto`: as many as the cluster has room for.
        cells: Number of cells that wait.
        cluster: The section `cluster` that all of them have, of whose Ray each gets a part; None: each has a
            process without Ray, or it is one cell at a time.
        why: Why it is one, where `auto` asked for more; may be empty.
    """

    size: int | Literal["auto"] = 1
    cells: int = 1
    cluster: ClusterConfig | None = None
    why: str = ""

    @contextmanager
    def lanes(self, show: Show, common: CommonParts) -> Iterator[Lanes]:
        """Runs cells while the block runs.

        Args:
            show: What is shown of the rounds, where cells run one after the other.
            common: What was made for the cells already.

        Raises:
            ConfigError: The cluster does not answer, or has no room for so many cells.
        """
        if self.cluster is not None:
            from rayfed.experiment.study.on_ray import lanes_on_ray

            quiet = replace(show, quiet=True)
            with lanes_on_ray(self.cluster, self.cells, self.size, quiet, common) as on_ray:
                yield on_ray
        elif self.size == 1:
            yield OneAfterTheOther(show, common)
        else:
            assert isinstance(self.size, int)  # `auto` is for a cluster
            stage(f"running {self.size} cells side by side")
            beside = Beside([ProcessLane() for _ in range(self.size)])
            try:
                yield beside
            finally:
                beside.end()


def side_by_side(at_once: int | Literal["auto"], configs: Sequence[Config], stop: Any) -> SideBySide:
    """The way in which cells run at once.

    Args:
        at_once: What the user asked for.
        configs: The cells that wait.
        stop: The rule that may end a cell, which travels to the processes, too.

    Raises:
        ConfigError: The number is wrong, or these cells cannot run side by side.
    """
    if at_once != "auto" and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
        raise ConfigError(f"at_once: {at_once!r} is neither a number of 1 or more nor 'auto'")
    if at_once == 1 or len(configs) < 2:
        return SideBySide()
    if reason := why_not_beside(configs, stop):
        if at_once == "auto":
            return SideBySide(why=f"cells run one after the other: {reason}")
        raise ConfigError(f"at_once: {at_once} is impossible: {reason}; leave out at_once")
    cluster = configs[0].cluster
    if kind_of(cluster).needs_cluster:
        return SideBySide(size=at_once, cells=len(configs), cluster=cluster)
    if at_once != "auto":
        return SideBySide(size=min(at_once, len(configs)))
    if any(chosen_device(config.cluster.device).type != "cpu" for config in configs):
        return SideBySide(why="cells run one after the other: they use one GPU; at_once=2 shares it")
    cpus = max(kind_of(config.cluster).cpus(config.cluster) for config in configs)
    return SideBySide(size=max(1, min(len(configs), _cores() // cpus)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why_not_beside(configs: Sequence[Config], stop: Any) -> str:
    """The reason why cells cannot run side by side; empty: they can.

    Cells on Ray share one cluster, and are started from this process. Others are sent to processes.
    """
    if any(kind_of(config.cluster).needs_cluster for config in configs):
        first = vars(configs[0].cluster)
        for config in configs[1:]:
            for key, value in vars(config.cluster).items():
                if value != first[key]:
                    return (
                        f"cluster.{key} is {first[key]} in one cell and {value} in another one, and cells "
                        f"side by side share one cluster; give all the same cluster"
                    )
        return ""
    every = {name: known for config in configs for name, known in objects_in(config).items()}
    for name, known in every.items():
        if why := _why_not_sent(with_values({name: known})):
            return f"{name} cannot be sent to another process ({why})"
    if stop is not None and (why := _why_not_sent(stop)):
        return f"stop cannot be sent to another process ({why})"
    return ""


def _why_not_sent(value: Any) -> str:
    try:
        packed(value)
    except Exception as err:  # pickling calls code of the user
        return cause_of(err)
    return ""
