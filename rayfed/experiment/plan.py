"""Prepares and checks all runs of a command before anything is written, and runs them in turn."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.schema import Config, changes, to_dict
from rayfed.config.variants import PROTOCOLS, comparisons, trained_otherwise
from rayfed.data.config import DataConfig
from rayfed.data.shards import Dataset
from rayfed.engine.built_once import Shared
from rayfed.engine.measurement import check_resources
from rayfed.engine.score_finished_run import model_digest
from rayfed.engine.setup import Setup, dataset_of, prepare
from rayfed.errors import ConfigError, OutputClosedError, PartsFailedError, RayFedError, one_line
from rayfed.experiment.equal_steps import batches_of, factors_beside, with_passes
from rayfed.experiment.single_run import Show, last_words, report, report_folds, run_alone, tell_clients
from rayfed.federation.method_registry import METHODS
from rayfed.record import claim as folders
from rayfed.record.files import write_text
from rayfed.record.readers import DamagedError, read_yaml
from rayfed.terminal.table_formats import fitted, terminal_width

if TYPE_CHECKING:
    from rayfed.data.partition.partition import ClientSplit
    from rayfed.engine.session import Session
    from rayfed.record.claim import Claim


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked experiment.

    Attributes:
        config: Its config.
        path: Its folder.
        setup: The prepared experiment; None for a protocol, which consists of its runs only.
        parts: The runs of the protocol, such as folds by held-out domain, or the algorithms that it is
            compared with, by name.
    """

    config: Config
    path: Path
    setup: Setup | None = None
    parts: Mapping[str, Plan] = field(default_factory=dict)

    @property
    def setups(self) -> tuple[Setup, ...]:
        """The prepared experiment, or those of all folds; not those of compared methods."""
        if self.setup is not None:
            return (self.setup,)
        return tuple(setup for fold in self.parts.values() for setup in fold.setups)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are run on the same data, the main one first."""
        if self.setup is None:
            return next(iter(self.parts.values())).methods
        return self.config.algorithm, *self.parts

    @property
    def in_words(self) -> str:
        """The methods with their rounds, why one without training is among them, and which lack their tuning.

        For example `fedavg, afl (3 rounds each)`, or `fedclip (3 rounds), zero_shot (1 round); ...`.
        """
        if self.setup is None:
            return next(iter(self.parts.values())).in_words
        rounds = [self.config.rounds, *(part.config.rounds for part in self.parts.values())]
        if len(set(rounds)) == 1:
            each = " each" if len(rounds) > 1 else ""
            return f"{', '.join(self.methods)} ({_rounds(rounds[0])}{each}){self._notes}"
        pairs = zip(self.methods, rounds, strict=True)
        return ", ".join(f"{name} ({_rounds(count)})" for name, count in pairs) + self._notes

    @property
    def _notes(self) -> str:
        """Notes on what a user may not expect of the compared methods; or nothing."""
        every = (self.config, *(part.config for part in self.parts.values()))
        tunings = trained_otherwise({c.algorithm: (c.tuning["name"], c.train.optimizer) for c in every})
        return self._reference + (f"; {tunings}" if tunings else "")

    @property
    def _reference(self) -> str:
        """Says where the reference without training comes from that a model's config brings; or nothing."""
        name = self.config.compare
        if not isinstance(name, str) or name not in self.parts or METHODS.load(name, "compare").server.trains:
            return ""
        return (
            f"; {name} trains nothing, it is the reference that model={self.config.model.name} brings: "
            f"compare=[] leaves it out"
        )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def make_plan(config: Config, path: Path, shared: Shared | None = None) -> Plan:
    """Prepare an experiment and all others that it runs; nothing is written to `path`.

    Args:
        config: The experiment.
        path: Its folder.
        shared: What was made for other experiments of the command.

    Raises:
        ConfigError: One of the experiments cannot be run.
    """
    if config.protocol in PROTOCOLS:
        shared = shared or Shared()
        runs = _runs(config, path, shared)
        parts = {name: make_plan(run, Path(str(run.output)), shared) for name, run in runs.items()}
        return Plan(config=config, path=path, parts=parts)
    others = comparisons(config, path)
    if others:
        shared = shared or Shared()
    parts = {name: make_plan(other, Path(str(other.output)), shared) for name, other in others.items()}
    setup = prepare(config, shared=shared)
    if config.equal_steps:
        parts = _trained_equally(config, setup, others, parts, shared)
    check_resources(config.cluster, setup, path, config.checkpoint.keep + 1)
    return Plan(config=config, path=path, setup=setup, parts=parts)


def _trained_equally(
    config: Config,
    setup: Setup,
    others: Mapping[str, Config],
    parts: Mapping[str, Plan],
    shared: Shared | None,
) -> dict[str, Plan]:
    """The plans of the compared methods, with more passes where they would train less than the main one.

    Raises:
        ConfigError: Nothing is compared, or no whole number of passes makes them equal.
    """
    if not parts:
        raise ConfigError("equal_steps: nothing is compared; add compare=[NAME], or leave out equal_steps")
    batches = {config.algorithm: batches_of((setup,))}
    batches |= {name: batches_of(part.setups) for name, part in parts.items()}
    factors = factors_beside(config.algorithm, batches)
    longer = {name: with_passes(other, name, factors[name]) for name, other in others.items()}
    return {name: make_plan(other, Path(str(other.output)), shared) for name, other in longer.items()}


def first_run(config: Config) -> Config:
    """The experiment itself, or the first run of its protocol.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """
    if config.protocol not in PROTOCOLS:
        return config
    return next(iter(_runs(config, Path(config.output or "run"), Shared()).values()))


def _runs(config: Config, path: Path, shared: Shared) -> dict[str, Config]:
    """The runs of a protocol by name."""

    def open_data(data: DataConfig) -> Dataset:
        return dataset_of(replace(config, data=data), shared)

    return PROTOCOLS[config.protocol].parts(config, open_data, path)


def run(plan: Plan, claim: Claim, show: Show, resume: bool, session: Session) -> str:
    """Run a plan in a folder that this process may write to.

    If one of several methods or folds fails, the others are run and reported nevertheless.

    Args:
        plan: The experiment, prepared.
        claim: The right to write into its folder.
        show: What is shown.
        resume: Continue the run in the folder; what is finished is not repeated.
        session: Ray and the actors of the command.

    Returns:
        The SHA-256 digest of the final tensors; of a protocol, of those of all its runs.

    Raises:
        RayFedError: The run failed.
        PartsFailedError: Some of the methods or folds failed; the message says which and why.
    """
    began = time.perf_counter()
    if plan.setup is None:
        digest = _folds(plan, claim, show, resume, session)
    elif plan.parts:
        digest = _comparison(plan, claim, show, resume, session)
    else:
        digest = run_alone(plan.config, plan.setup, claim, show, resume, session)
        report(plan.path, show.tell_whole, (), plan.config.figures)
    if show.whole is None:
        last_words(plan.path, show.tell, plan.config.report)
    seconds = time.perf_counter() - began
    show.tell_whole(f"{plan.path}: {seconds:.0f} s, tensors sha256 {digest[:16]}")
    return digest


def _comparison(plan: Plan, claim: Claim, show: Show, resume: bool, session: Session) -> str:
    """Run the main method in the folder of the run, and the others in folders inside it."""
    assert plan.setup is not None  # a comparison has a main method
    setup = plan.setup
    path = plan.path
    show.tell_whole(f"comparing {plan.in_words}")
    tell_clients(setup, show.about_clients(setup.partition.digest))
    inside = show.part_of(path)
    runs: dict[str, Callable[[], str]] = {
        plan.config.algorithm: partial(run_alone, plan.config, setup, claim, inside, resume, session)
    }
    for name, part in plan.parts.items():
        runs[name] = partial(run_part, part, path, inside, resume, session)
    done, failed = _each("method", runs, show, session)
    report(path, show.tell_whole, tuple(plan.parts), plan.config.figures)
    _raise_failures("method", failed, len(runs), show.whole or path)
    return done[plan.config.algorithm]


def _folds(plan: Plan, claim: Claim, show: Show, resume: bool, session: Session) -> str:
    """Run a protocol, such as one run for each held-out domain. The digest combines those of all runs."""
    import yaml

    path = plan.path
    if resume:
        claim.take_over()
    write_text(path / "config.yaml", yaml.safe_dump(to_dict(plan.config), sort_keys=False))
    protocol = PROTOCOLS[plan.config.protocol]
    show.tell_whole(f"{protocol.doing.format(names=', '.join(plan.parts))}: {plan.in_words}")
    _describe_all(plan, show)
    inside = show.part_of(path)
    runs: dict[str, Callable[[], str]] = {
        name: partial(run_part, fold, path, inside, resume, session) for name, fold in plan.parts.items()
    }
    done, failed = _each(protocol.part, runs, show, session)
    finished = {name: fold.path for name, fold in plan.parts.items() if name in done}
    if finished:
        report_folds(plan.config, path, finished, show.tell)
    _raise_failures("run", failed, len(runs), path)
    return hashlib.sha256("".join(done.values()).encode()).hexdigest()


def run_part(
    plan: Plan,
    whole: Path,
    show: Show,
    resume: bool,
    session: Session,
    alone: AbstractContextManager[object] | None = None,
) -> str:
    """Run an experiment that is part of another one or of a job, or continue it.

    Args:
        plan: The experiment, prepared.
        whole: Folder of which its folder is a part.
        show: What is shown.
        resume: Continue the run in its folder, if there is one. A run that scored the model of another one
            begins anew if that model or its own config has changed since, such as by further rounds.
        session: Ray and the actors of the command.
        alone: Held while the list of files of `whole` is written to, where several threads run parts of it.

    Returns:
        The digest, as of `run`.

    Raises:
        RayFedError: The run failed.
    """
    trained = plan.config.evaluation.model_of
    if trained is not None and not model_digest(trained):
        raise RayFedError(f"the run in {trained}, whose model would be scored, is not finished")
    again = resume and (plan.path / "config.yaml").exists()
    if trained is not None:
        again = again and _scored_the_same(plan, trained)
    with ExitStack() as held:
        with alone or nullcontext():
            if again:
                own = held.enter_context(folders.claim_again(plan.path))
            else:
                seen = folders.look(plan.path, True)
                own = held.enter_context(folders.claim(plan.path, seen, True, whole))
        return run(plan, own, show, again, session)


def _scored_the_same(plan: Plan, trained: str) -> bool:
    """Whether the run in a folder scored the present model of another run, with the present config."""
    try:
        before = read_yaml(plan.path / "config.yaml")
    except DamagedError:
        return False
    return not any(changes(before, to_dict(plan.config))) and model_digest(str(plan.path)) == model_digest(
        trained
    )


def _each(
    what: str, runs: Mapping[str, Callable[[], str]], show: Show, session: Session
) -> tuple[dict[str, str], dict[str, Exception]]:
    """Run one after the other, those after a failed one, too; returns digests and errors by name."""
    done: dict[str, str] = {}
    failed: dict[str, Exception] = {}
    for number, (name, start) in enumerate(runs.items(), start=1):
        show.tell(f"\n{what} {number} of {len(runs)}: {name}")
        try:
            done[name] = start()
        except (ConfigError, OutputClosedError):
            raise
        except Exception as err:  # a method may raise anything
            if session.lost:
                raise
            failed[name] = err
            show.tell(f"{what} {name} failed: {one_line(err)}")
    return done, failed


def _raise_failures(what: str, failed: Mapping[str, Exception], count: int, whole: Path) -> None:
    """Raise an error that names every run that failed.

    Raises:
        PartsFailedError: There is one.
    """
    if not failed:
        return
    reasons = "; ".join(f"{name}: {one_line(err) or type(err).__name__}" for name, err in failed.items())
    error = PartsFailedError(f"{len(failed)} of {count} {what}s failed: {reasons}")
    error.add_note(f"what is finished is kept; continue with: python -m rayfed.resume {whole}")
    raise error from next(iter(failed.values()))


def _describe_all(plan: Plan, show: Show) -> None:
    """Show one table of the clients of all runs, where a client has the same examples in each of them.

    Nothing for a single run, which shows its own table. Where some clients never train, a line names them for
    each run, as they may be others in each.
    """
    from rayfed.data.partition.groups import partition_of
    from rayfed.data.partition.manifest import describe

    setups = plan.setups
    if len(setups) == 1 or len({setup.dataset.digest for setup in setups}) > 1:
        return
    data = replace(plan.config.data, held_out=None, shots=None, unseen_clients=None)
    try:
        whole = partition_of(setups[0].dataset, data, plan.config.seed)
    except ConfigError:
        return
    if whole.drawn is not None:
        return
    known = {_examples(client) for client in whole.clients}
    if not all(_examples(client) in known for setup in setups for client in setup.partition.clients):
        return
    show.tell(describe(whole, setups[0].dataset, terminal_width()))
    names = {client.id for client in whole.clients}
    if any(client.id not in names for setup in setups for client in setup.partition.clients):
        show.tell("in each fold, the clients of the other domains are numbered anew")
    _tell_unseen(plan, show)
    show.described.update(setup.partition.digest for setup in setups)


def _tell_unseen(plan: Plan, show: Show) -> None:
    """Name the clients of each run of a protocol that never train."""
    from rayfed.data.partition.manifest import never_train

    for name, setup in zip(plan.parts, plan.setups, strict=True):
        if setup.partition.unseen:
            show.tell(fitted(f"{name}: {never_train(setup.partition)}", terminal_width()))


def _examples(client: ClientSplit) -> tuple[object, ...]:
    """Domain and examples of a client, to find it under another id."""
    return client.domain, *(tuple(getattr(client, split)) for split in ("train", "val", "test"))
