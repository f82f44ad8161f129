"""Runs experiments one after the other over one session, and those of a job with the runs of a protocol."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.schema import config_changes, to_dict
from rayfed.config.variants import PROTOCOLS
from rayfed.engine.score_finished_run import model_digest
from rayfed.engine.session import Session
from rayfed.errors import ConfigError, OutputClosedError, PartsFailedError, RayFedError, cause_of
from rayfed.experiment.finished_run import Run
from rayfed.experiment.plan import make_plan
from rayfed.experiment.single_run import (
    Show,
    advice,
    last_words,
    report,
    report_folds,
    run_alone,
)
from rayfed.record import claim as folders
from rayfed.record.atomic_files import write_text
from rayfed.record.folder import way_to_continue
from rayfed.record.readers import DamagedError, read_yaml
from rayfed.record.trackers import check_trackers

if TYPE_CHECKING:
    from rayfed.config.schema import Config
    from rayfed.engine.built_once import Shared
    from rayfed.experiment.plan import Plan
    from rayfed.record.claim import Claim


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
    """

    show: Show = field(default_factory=Show)
    session: Session = field(default_factory=Session)
    stays: bool = False
    resume: bool = False
    shared: Shared | None = None
    stop: Callable[[Path], bool] | None = None

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
            with _noting(claim.path, self.show), self._ray():
                return Run(claim.path, replace(self, resume=True).run(plan, claim), config)
        path, owner, plan = _prepare(config, joins=True, shared=self.shared)
        with self._ray():
            for setup in plan.setups if owner else ():
                self.session.check(config.cluster, setup)  # before `claim` moves the earlier run
            # Ray ends before the lock, if it ends with this run.
            with folders.claim(path, owner, config.overwrite) as own, _noting(path, self.show), self._ray():
                if own.earlier is not None:
                    self.show.tell(f"the run that was in {path} is in {own.earlier} now")
                return Run(path, self.run(plan, own), config)

    def _ray(self) -> AbstractContextManager[object]:
        """Ends Ray and the actors with the block, unless they stay."""
        return nullcontext() if self.stays else self.session

    def run(self, plan: Plan, claim: Claim) -> str:
        """Run a plan in a folder that this process may write to.

        If one of several folds fails, the others are run and reported nevertheless.

        Args:
            plan: The experiment, prepared.
            claim: The right to write into its folder.

        Returns:
            The SHA-256 digest of the final tensors; of a protocol, of those of all its runs.

        Raises:
            RayFedError: The run failed.
            PartsFailedError: Some of the folds failed; the message says which and why.
        """
        began = time.perf_counter()
        show = self.show
        if plan.setup is None:
            digest = self._folds(plan, claim)
        else:
            rule = {} if self.stop is None else {"stop": self.stop}
            digest = run_alone(plan.config, plan.setup, claim, show, self.resume, self.session, **rule)
            report(plan.path, show.tell_whole, plan.config.figures)
        if show.whole is None:
            last_words(plan.path, show.tell, plan.config.report)
        seconds = time.perf_counter() - began
        show.tell_whole(f"{plan.path}: {seconds:.0f} s, tensors sha256 {digest[:16]}")
        return digest

    def part(self, plan: Plan, whole: Path, alone: AbstractContextManager[object] | None = None) -> str:
        """Run an experiment that is part of another one or of a job, or continue it.

        With `resume`, a run that scored the model of another one begins anew if that model or its own config
        has changed since, such as by further rounds.

        Args:
            plan: The experiment, prepared.
            whole: Folder of which its folder is a part.
            alone: Held while the folder is claimed, where several threads run parts of `whole`.

        Returns:
            The digest, as of `run`.

        Raises:
            RayFedError: The run failed.
        """
        trained = plan.config.evaluation.model_of
        if trained is not None and not model_digest(trained):
            raise RayFedError(f"the run in {trained}, whose model would be scored, is not finished")
        continues = self.resume and (plan.path / "config.yaml").exists()
        if trained is not None:
            continues = continues and _scored_the_same(plan, trained)
        with ExitStack() as held:
            with alone or nullcontext():
                if continues:
                    own = held.enter_context(folders.claim_again(plan.path))
                else:
                    owner = folders.look(plan.path, True)
                    own = held.enter_context(folders.claim(plan.path, owner, True))
            return replace(self, resume=continues).run(plan, own)

    def _folds(self, plan: Plan, claim: Claim) -> str:
        """Run a protocol, such as one run per held-out domain. The digest combines those of all runs."""
        import yaml

        show, path = self.show, plan.path
        if self.resume:
            claim.take_over()
        write_text(path / "config.yaml", yaml.safe_dump(to_dict(plan.config), sort_keys=False))
        protocol = PROTOCOLS[plan.config.protocol]
        inside = replace(self, show=show.part_of(path))
        done, failed = inside._each(protocol.part, inside._parts_of(plan))
        finished = {name: fold.path for name, fold in plan.parts.items() if name in done}
        if finished:
            report_folds(plan.config, path, finished, show.tell)
        _raise_failures("run", failed, len(plan.parts), path)
        return hashlib.sha256("".join(done.values()).encode()).hexdigest()

    def _parts_of(self, plan: Plan) -> dict[str, Callable[[], str]]:
        """Calls that run each part of a plan, by name."""
        return {name: partial(self.part, each, plan.path) for name, each in plan.parts.items()}

    def _each(
        self, what: str, runs: Mapping[str, Callable[[], str]]
    ) -> tuple[dict[str, str], dict[str, Exception]]:
        """Run one after the other, those after a failed one, too; returns digests and errors by name."""
        done: dict[str, str] = {}
        failed: dict[str, Exception] = {}
        for number, (name, start) in enumerate(runs.items(), start=1):
            self.show.tell(f"\n{what} {number} of {len(runs)}: {name}")
            try:
                done[name] = start()
            except (ConfigError, OutputClosedError):
                raise
            except Exception as err:  # a method may raise anything
                if self.session.lost:
                    raise
                failed[name] = err
                self.show.tell(f"{what} {name} failed: {cause_of(err)}")
        return done, failed


@contextmanager
def _noting(path: Path, show: Show) -> Iterator[None]:
    """Add advice about the run in a folder to an interruption that has none, as after the rounds."""
    try:
        yield
    except KeyboardInterrupt as err:
        if not getattr(err, "__notes__", ()):
            err.add_note(advice(path, show))
        raise


def _scored_the_same(plan: Plan, trained: str) -> bool:
    """Whether the run in a folder scored the present model of another run, with the present config."""
    try:
        before = read_yaml(plan.path / "config.yaml")
    except DamagedError:
        return False
    if any(config_changes(before, to_dict(plan.config))):
        return False
    return model_digest(str(plan.path)) == model_digest(trained)


def _raise_failures(what: str, failed: Mapping[str, Exception], count: int, whole: Path) -> None:
    """Raise an error that names every run that failed.

    Raises:
        PartsFailedError: There is one.
    """
    if not failed:
        return
    reasons = "; ".join(f"{name}: {cause_of(err)}" for name, err in failed.items())
    error = PartsFailedError(f"{len(failed)} of {count} {what}s failed: {reasons}")
    error.add_note(f"what is finished is kept; continue with: {way_to_continue(whole)}")
    raise error from next(iter(failed.values()))


def check(config: Config) -> None:
    """Check an experiment as before its run: config, data, model and folder; nothing is started or written.

    Args:
        config: Its checked config.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds an earlier run or files of others.
    """
    _prepare(config)


def _prepare(config: Config, joins: bool = False, shared: Shared | None = None) -> tuple[Path, str, Plan]:
    """Folder of a new run, token of the run that is in it, and the experiment with all that it runs.

    Args:
        config: Its checked config.
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
    if cluster.executor == "ray" and (cluster.address or os.environ.get("RAY_ADDRESS")):
        from rayfed.executors.connection import check_address

        check_address(cluster.address, cluster.connect_timeout)


def new_folder_name(config: Config) -> Path:
    """A new folder in runs/, named for the method, the data, the seed and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
