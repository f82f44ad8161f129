"""Runs the rounds of an experiment and records each one on disk when it is finished."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rayfed.engine.loop import RoundPlan, is_due, run_rounds, score_without
from rayfed.engine.setup import Setup
from rayfed.errors import ClusterError, LostStoreError, NonFiniteError, StorageError
from rayfed.evaluation.metrics import Evaluation, Round
from rayfed.evaluation.nonfinite import COLUMN, NonFinite, events, find, sentence
from rayfed.evaluation.stopping import BestRound, StopConfig
from rayfed.executors.worker import Weights
from rayfed.federation.cohort import Ledger
from rayfed.federation.executor import CallTiming, Event, Executor, Kept, OnNonFinite
from rayfed.models.language import library_names
from rayfed.models.named_tensors import global_name
from rayfed.objective import CLASSES
from rayfed.record.checkpoint import NOTHING, SOURCE, Checkpoints, RunInputs, restore
from rayfed.record.folder import LABELS, RunFolder
from rayfed.record.history import History
from rayfed.record.trackers.tracker import NO_TRACKING, Tracking, load_trackers
from rayfed.terminal.console import NONFINITE, SLOWEST, SLOWEST_SECONDS
from rayfed.terminal.exit_code import finishing
from rayfed.types import Params, Row, ServerState
from rayfed.user_files import without_nonfinite

log = logging.getLogger(__name__)

MOST_RESTARTS = 3  # times that a run goes back to a checkpoint because stores of clients were lost


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Settings for recording a run.

    Attributes:
        path: Folder of the run.
        domains: Domain of every client, by id.
        every: Save a checkpoint in every n-th round and in the last one; 0: only in the last one.
        keep: Number of checkpoints that are kept.
        best: The column of validation by which the best round is found, whose model is kept; None: the last
            round's is.
        ties: Which of several best rounds it is.
        resume: Continue after the last checkpoint in the folder.
        tensorboard: Also write the rounds for TensorBoard.
        tracking: Trackers to which the rounds are also sent.
        basis: Config and data digests, which are stored in every checkpoint.
        claim: Token in the marker of the folder, from the command that started this process; empty: the
            marker is not compared.
        on_nonfinite: Whether a loss or a global tensor that is NaN or infinite ends the run.
        stores: Files of the private stores with which clients begin, by id.
        files: Gives the contents of files, by name, with the final tensors in the format of another library.
    """

    path: Path
    domains: Mapping[str, str]
    every: int = 1
    keep: int = 2
    best: str | None = None
    ties: Literal["first", "last"] = "first"
    resume: bool = False
    tensorboard: bool = True
    tracking: Tracking = NO_TRACKING
    basis: RunInputs = NOTHING
    claim: str = ""
    on_nonfinite: OnNonFinite = "warn"
    stores: Mapping[str, Path] = field(default_factory=dict)
    files: Callable[[Params], Mapping[str, bytes]] | None = None

    @classmethod
    def of(cls, setup: Setup, path: Path, resume: bool, claim: str = "") -> RecordSettings:
        """The settings of an experiment."""
        design = setup.design
        files = getattr(setup.context.tuning, "adapter_files", None)
        about: dict[str, Any] = {"model_name": design.model.name}
        if setup.context.objective.tokens:
            about["names"] = library_names(setup.context.skeleton())
        if ends := getattr(setup.context.tuning, "fixed_ends", ()):
            about["fixed"] = start_values(setup.weights, ends)
        if getattr(setup.context.tuning, "needs_skeleton", False):
            about["skeleton"] = setup.context.skeleton
        return cls(
            path=path,
            domains=setup.partition.table.domain_of,
            every=design.checkpoint.every,
            keep=design.checkpoint.keep,
            best=design.checkpoint.best,
            ties=design.evaluation.ties,
            resume=resume,
            tensorboard=design.tensorboard,
            tracking=Tracking.of(load_trackers(design.trackers), design.described),
            basis=basis_of(setup),
            claim=claim,
            on_nonfinite=design.on_nonfinite,
            stores=setup.stores,
            files=partial(final_files, labels_of(setup), None if files is None else partial(files, **about)),
        )


def labels_of(setup: Setup) -> dict[str, str]:
    """The name of each output of a classifier by its number, as text; empty: the model classifies nothing."""
    classifies = setup.dataset.task in CLASSES and setup.context.objective.reads in CLASSES
    return {str(place): name for place, name in enumerate(setup.context.classes)} if classifies else {}


def final_files(
    labels: Mapping[str, str], adapters: Callable[[Params], Mapping[str, bytes]] | None, params: Params
) -> dict[str, bytes]:
    """Contents of the files next to the final tensors, by name.

    Args:
        labels: As of `labels_of`; they are what `from_pretrained` of transformers takes.
        adapters: Gives the final tensors in the format of another library; None: there is none.
        params: The final tensors.
    """
    files = dict(adapters(params)) if adapters else {}
    if labels:
        named = {"id2label": labels, "label2id": {name: int(place) for place, name in labels.items()}}
        files[LABELS] = json.dumps(named, indent=1, ensure_ascii=False).encode()
    return files


def start_values(weights: Weights, ends: tuple[str, ...]) -> Params:
    """Start values of the tensors whose global names end so, floats as float32, by global name.

    Args:
        weights: All tensors of the initial model, by module name.
        ends: Ends of the wanted names.
    """
    found = {}
    for slot, array in weights.items():
        if (name := global_name(slot)).endswith(ends):
            value = torch.from_numpy(np.array(array))
            value = value.view(torch.bfloat16) if value.dtype == torch.int16 else value
            found[name] = value.float() if value.is_floating_point() else value
    return found


def basis_of(setup: Setup) -> RunInputs:
    """The config of an experiment, and the digests of its images, its partition and its traces."""
    data = {"data_digest": setup.dataset.digest, "partition_digest": setup.partition.digest}
    faults = setup.design.faults
    if traces := [file for file in (faults.trace, faults.devices, faults.sessions) if file]:
        content = b"".join(Path(file).read_bytes() for file in traces)
        data["trace_digest"] = hashlib.sha256(content).hexdigest()
    data |= {f"{key}{SOURCE}": record["digest"] for key, record in setup.design.objects.items()}
    return RunInputs(config=setup.design.described, data=data)


class Watch(Protocol):
    """Receives the events and rounds of a run, such as metrics for Prometheus; cannot change the run."""

    def event(self, event: Event) -> None: ...
    def round(
        self,
        row: Row,
        ledger: Ledger,
        scores: Mapping[str, Evaluation],
        visits: Sequence[CallTiming],
        actors: int,
    ) -> None: ...


def record_rounds(
    experiment: RoundPlan,
    executor: Executor,
    start: Params,
    keeping: RecordSettings,
    watch: Watch | None = None,
) -> Generator[Row, None, None]:
    """Run all rounds and record each one when it is finished.

    If the run ends early, all finished rounds are on disk, with a checkpoint of the last one. If stores of
    clients are lost with a node, the rounds since the last checkpoint are repeated.

    Args:
        executor: Runs the calls of clients.
        start: Initial values of all tensors that are sent and trained.
        keeping: Folder and settings for recording.
        watch: Receives the events and rounds.

    Yields:
        The row of each round, with the slowest client added, which is not recorded; then a row with the
        digest of the final tensors.

    Raises:
        ConfigError: Another process writes to the folder, or no checkpoint in it can be used.
        ClientError: A client failed, and the policy says to raise.
        StorageError: A file cannot be written.
        StoppedError: The executor was stopped.
        NonFiniteError: A loss or a global tensor is not finite, and the config says to raise; the rounds
            before it are kept.
    """
    folder = RunFolder(keeping.path, keeping.domains, keeping.tensorboard, keeping.tracking, keeping.claim)
    checkpoints = Checkpoints(keeping.path, keeping.keep, keeping.basis)

    def note(event: Event) -> None:
        folder.event(event)
        if watch is not None:
            watch.event(event)

    executor.on_event = note
    with folder.lock():
        resume = keeping.resume
        for _ in range(1 + MOST_RESTARTS):
            saved = checkpoints.load(start, folder.history.complete) if resume else None
            folder.begin(saved.state.round + 1 if saved else 0)
            restore(saved.stores if saved else keeping.stores, executor)
            before = _rows_before(experiment, keeping, folder.history)
            best = None if keeping.best is None else BestRound(keeping.best, keeping.ties, before)
            checkpoints.best = best.round if best else 0
            keeper = _Keeper(checkpoints, executor, keeping, folder.history, best)
            state = saved.state if saved else None
            visits: list[CallTiming] = []
            executor.on_visit = visits.append
            try:
                with _saved_early(keeper, folder):
                    for done in run_rounds(experiment, executor, start, state, before):
                        with finishing():  # else a row could have no checkpoint
                            done, row = _record(done, keeper, folder, visits, experiment.clients, watch)
                            state = done.state
                            keeper.finished(done)
                        yield row
                    state = keeper.back_to_best(start, state)
                    folder.write_without(
                        None if state is None else score_without(experiment, executor, state)
                    )
                    params = start if state is None else state.params
                    digest = folder.finish(params, keeping.files(params) if keeping.files else None)
            except LostStoreError as err:
                log.warning("%s; going back to the last checkpoint", err)
                note(Event(kind="store_lost", action="restart", client=err.client, message=str(err)))
                resume = True
            else:
                yield {"sha256": digest}
                return
        raise ClusterError(f"the stores of clients were lost {1 + MOST_RESTARTS} times; giving up")


def _record(
    done: Round,
    keeper: _Keeper,
    folder: RunFolder,
    visits: list[CallTiming],
    clients: Container[str],
    watch: Watch | None,
) -> tuple[Round, Row]:
    """Write a finished round into the folder.

    Args:
        clients: Ids of the clients; calls of other test sets have no client.

    Returns:
        The round as it was written, and its row with what is only shown: the slowest client.
    """
    executor = keeper.executor
    nonfinite, done = _find_nonfinite(done, keeper.keeping.on_nonfinite, executor.on_event)
    done = replace(done, row={**done.row, **busy(visits, executor.actors, done.row["seconds"])})
    slowest_visits = slowest([visit for visit in visits if visit.client in clients])
    folder.add(done)
    if watch is not None:
        watch.round(done.row, done.ledger, done.scores, visits, executor.actors)
    visits.clear()
    return done, {**done.row, **slowest_visits, **({NONFINITE: sentence(nonfinite)} if nonfinite else {})}


def _rows_before(experiment: RoundPlan, keeping: RecordSettings, history: History) -> list[Row]:
    """Rows of the finished rounds, if they say when the run ends or which is the best one; else none."""
    looks_back = experiment.stop != StopConfig() or keeping.best is not None
    return [entry["row"] for entry in history.entries()] if looks_back else []


@contextmanager
def _saved_early(keeper: _Keeper, folder: RunFolder) -> Iterator[None]:
    """Where the block is left early, save the last finished round and write the tables."""
    try:
        yield
    except BaseException:
        # Errors of saving must not hide the first error; a store may have been lost with its node.
        with suppress(StorageError, LostStoreError):
            keeper.save_last()
        with suppress(StorageError):
            folder.write_tables()
        raise


def _find_nonfinite(
    done: Round, policy: OnNonFinite, note: Callable[[Event], None]
) -> tuple[list[NonFinite], Round]:
    """Find the values of a round that are NaN or infinite, and record them as events.

    Returns:
        The findings, and the round with empty cells in their place.

    Raises:
        NonFiniteError: There is such a value, and the policy says to raise.
    """
    nonfinite = find(done.ledger.scores, done.scores, done.state.params, done.row)
    if not nonfinite:
        return [], done
    for event in events(nonfinite, done.state.round, "raise" if policy == "raise" else "nothing"):
        note(event)
    if policy == "raise":
        raise NonFiniteError(
            f"round {done.row['round']}: {sentence(nonfinite)}; on_nonfinite=raise ends the run here: try a "
            f"smaller train.lr, or train.clip_norm=1"
        )
    return nonfinite, replace(done, row={**without_nonfinite(done.row), COLUMN: len(nonfinite)})


def busy(visits: Sequence[CallTiming], actors: int, seconds: float) -> dict[str, float]:
    """Busy and idle time of the actors in a round, in seconds that are summed over the actors.

    Args:
        visits: The calls of clients.
        actors: Number of actors; 0: the calls run in this process.
        seconds: Length of the round.

    Returns:
        seconds_clients: calls of clients; seconds_idle: the rest of the round.
    """
    worked = sum(visit.seconds for visit in visits)
    return {"seconds_clients": worked, "seconds_idle": max(0.0, max(actors, 1) * seconds - worked)}


def slowest(visits: Sequence[CallTiming]) -> Row:
    """The client that worked longest in a round, and its seconds; shown only, as timings are not results."""
    seconds: dict[str, float] = {}
    for visit in visits:
        seconds[visit.client] = seconds.get(visit.client, 0.0) + visit.seconds
    if not seconds:
        return {}
    name = max(seconds, key=lambda client: seconds[client])
    return {SLOWEST: name, SLOWEST_SECONDS: seconds[name]}


@dataclass
class _Keeper:
    """Saves checkpoints when they are due, and one of the last finished round when a run ends early."""

    checkpoints: Checkpoints
    executor: Executor
    keeping: RecordSettings
    history: History
    best: BestRound | None = None
    unsaved: tuple[Round, dict[str, Kept]] | None = None

    def finished(self, done: Round) -> None:
        # References to the stores after this round; the next round replaces the stores.
        self.unsaved = done, self.executor.stores()
        is_best = self.best is not None and self.best.add(done.row)
        if is_best:
            self.checkpoints.best = done.row["round"]
        if is_best or done.last or is_due(self.keeping.every, done.state.round, last=done.last):
            self.save_last()

    def back_to_best(self, start: Params, last: ServerState | None) -> ServerState | None:
        """Go back to the state and the stores after the best round.

        Args:
            start: Initial tensors of the experiment.
            last: State after the last round, which stays where it is the best one, or none is.

        Raises:
            ConfigError: The checkpoint of the best round cannot be used.
        """
        if self.best is None or not self.best.round or last is None or self.best.round == last.round + 1:
            return last
        saved = self.checkpoints.of_round(self.best.round, start)
        restore(saved.stores, self.executor)
        return saved.state

    def save_last(self) -> None:
        if self.unsaved is not None:
            done, stores = self.unsaved
            seal = self.history.digest(done.state.round + 1)
            self.checkpoints.save(done.state, stores, self.executor, seal)
            self.unsaved = None
