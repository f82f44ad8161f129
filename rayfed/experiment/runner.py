"""Runs experiments one after the other over one session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.engine.session import Session
from rayfed.executors.kinds.base import kind_of
from rayfed.experiment.finished_run import Run
from rayfed.experiment.plan import make_plan
from rayfed.experiment.single_run import (
    Show,
    advice,
    last_words,
    report,
    run_alone,
)
from rayfed.record import claim as folders
from rayfed.record.trackers.tracker import check_trackers

if TYPE_CHECKING:
    from rayfed.config.schema import Config
    from rayfed.engine.built_once import Memo
    from rayfed.experiment.plan import Plan
    from rayfed.record.claim import Claim
    from rayfed.types import Row


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs experiments one after the other; each takes over Ray and the actors of the one before.

    Attributes:
        show: What is shown.
        session: Ray and the actors.
        stays: Ray and the actors stay after an experiment that `start` ran; else they end with it.
        resume: Continue the runs in their folders; what is finished is not repeated.
        shared: What was made for other experiments of this process; None: nothing is kept for others.
        stop: Called after each round of a run alone with its folder; True ends the run.
        on_round: Called after each round with its row and the run so far, before the next one begins.
    """

    show: Show = field(default_factory=Show)
    session: Session = field(default_factory=Session)
    stays: bool = False
    resume: bool = False
    shared: Memo | None = None
    stop: Callable[[Path], bool] | None = None
    on_round: Callable[[Row, Run], None] | None = None

    def start(self, config: Config, claim: Claim | None = None) -> Run:
        """Run one experiment, and write its tables, figures and report.

        Args:
            config: Its checked config. With `claim`, `output` is the folder of the run that is continued.
            claim: The right to write into the folder of an earlier run, which is continued after its last
                checkpoint; for a finished one only tables and report are written again. None: a new run.

        Raises:
            ConfigError: Something in the input is wrong, or the folder holds files of others; found before
                any actor starts.
            ClientError: A client failed.
        """
        if claim is not None:
            check_trackers(config.trackers)
            check_cluster(config)
            plan = make_plan(config, claim.path, self.shared)
            with advise_on_interrupt(claim.path, self.show), self._ray():
                return Run(claim.path, replace(self, resume=True).run(plan, claim), config)
        path, owner, plan = _prepare(config, joins=True, shared=self.shared)
        with self._ray():
            if owner:
                self.session.check(config.cluster, plan.setup)  # before `claim` moves the earlier run
            # Ray ends before the lock, if it ends with this run.
            with (
                folders.claim(path, owner, config.overwrite) as own,
                advise_on_interrupt(path, self.show),
                self._ray(),
            ):
                if own.earlier is not None:
                    self.show.tell(f"the run that was in {path} is in {own.earlier} now")
                return Run(path, self.run(plan, own), config)

    def _ray(self) -> AbstractContextManager[object]:
        """Ends Ray and the actors with the block, unless they stay."""
        return nullcontext() if self.stays else self.session

    def run(self, plan: Plan, claim: Claim) -> str:
        """Run a plan in a folder that this process may write to.

        Args:
            plan: The experiment, prepared.
            claim: The right to write into its folder.

        Returns:
            The SHA-256 digest of the final tensors.

        Raises:
            RayFedError: The run failed.
        """
        began = time.perf_counter()
        show = self.show
        given: dict[str, Any] = {} if self.stop is None else {"stop": self.stop}
        if (call := self.on_round) is not None:
            so_far = Run(plan.path, "", plan.config, setup=plan.setup)
            given["on_round"] = lambda row: call(row, so_far)
        digest = run_alone(plan.config, plan.setup, claim, show, self.resume, self.session, **given)
        report(plan.path, show.tell_whole, plan.config.figures)
        if show.whole is None:
            last_words(plan.path, show.tell, plan.config.report)
        seconds = time.perf_counter() - began
        show.tell_whole(f"{plan.path}: {seconds:.0f} s, tensors sha256 {digest[:16]}")
        return digest


@contextmanager
def advise_on_interrupt(path: Path, show: Show) -> Iterator[None]:
    """Add advice about the run in a folder to an interruption that has none, as after the rounds."""
    try:
        yield
    except KeyboardInterrupt as err:
        if not getattr(err, "__notes__", ()):
            err.add_note(advice(path, show))
        raise


def check(config: Config) -> None:
    """Check an experiment as before its run: config, data, model and folder; nothing is started or written.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds an earlier run or files of others.
    """
    _prepare(config)


def _prepare(config: Config, joins: bool = False, shared: Memo | None = None) -> tuple[Path, str, Plan]:
    """Folder of a new run, token of the run that is in it, and the experiment with all that it runs.

    Args:
        joins: Also check that the cluster answers, before data and model are loaded.
        shared: What was made for other experiments of this process.
    """
    check_trackers(config.trackers)
    path = Path(config.output) if config.output else new_folder_name(config)
    folders.check_own_folder(path)
    owner = folders.look(path, config.overwrite)
    if joins:
        check_cluster(config)
    return path, owner, make_plan(config, path, shared)


def check_cluster(config: Config) -> None:
    """Check that the cluster answers that the run would join.

    Raises:
        ConfigError: It does not.
    """
    cluster = config.cluster
    if kind_of(cluster).needs_cluster and (cluster.address or os.environ.get("RAY_ADDRESS")):
        from rayfed.executors.connection import check_address

        check_address(cluster.address, cluster.connect_timeout)


def new_folder_name(config: Config) -> Path:
    """A new folder in runs/, named for the method, the data, the seed and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
