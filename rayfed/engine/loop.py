"""The round loop: choose clients, run a round, score the result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rayfed.errors import NobodyAnsweredError, ServerError, one_line
from rayfed.evaluation.metrics import Evaluation, Score, evaluation, personal, summary
from rayfed.evaluation.test_sets import EvaluationSet
from rayfed.federation.cohort import ClientInfo, Cohort, Ledger
from rayfed.federation.executor import Executor, Task
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.federation.visit import evaluate
from rayfed.heterogeneity.capacity import draw
from rayfed.heterogeneity.faults import Faults
from rayfed.objective import METRICS, metric_of
from rayfed.record.round import Round
from rayfed.seeds import generator
from rayfed.types import Params, ServerState, Update


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What the loop must know; together with an executor and start values it determines every result.

    Attributes:
        server: Driver half of the method.
        local: Client half.
        clients: Facts about every client, by id, in the order in which updates are summed.
        sets: Test sets, each scored once per evaluation.
        seed: Seed of the experiment.
        rounds: Rounds to run.
        clients_per_round: Size of a cohort (per domain where `sampling` is one_per_domain it is not used).
        sampling: How a cohort is drawn.
        evaluate_every: Score the global model in every such round and in the last one; 0: never.
        validate: Also score it on the clients' validation splits.
        depth: Blocks of the backbone.
        capacity: Blocks each client can hold; None: drawn anew each round.
        block_bytes: Size of the frozen weights of each block.
        faults: Faults to inject; None: none.
    """

    server: Server
    local: Local
    clients: Mapping[str, ClientInfo]
    sets: tuple[EvaluationSet, ...]
    seed: int
    rounds: int
    clients_per_round: int
    sampling: Literal["uniform", "one_per_domain"] = "uniform"
    evaluate_every: int = 1
    validate: bool = False
    depth: int = 0
    capacity: Mapping[str, int] | None = None
    block_bytes: tuple[int, ...] = ()
    faults: Faults | None = None


def run(
    experiment: Experiment,
    executor: Executor,
    start: Params,
    state: ServerState | None = None,
    known: Mapping[str, Score] | None = None,
) -> Iterator[Round]:
    """Run the rounds after `state` (from the start without one) and yield each when it is finished.

    Args:
        experiment: What to run.
        executor: Where; its clients have the stores that belong to `state`.
        start: Start values of what travels.
        state: What the server carried after an earlier round.
        known: Last known scores of the clients' own models, which belong to `state` too.
    """
    first = 0 if state is None else state.round + 1
    state = state or experiment.server.start(start)
    own = Evaluation(clients=known, domains={}, held_out={}) if known else None
    for r in range(first, experiment.rounds):
        began = time.perf_counter()
        cohort = make_cohort(experiment, executor, r)
        state = advance(experiment, replace(state, round=r), cohort)
        trained = time.perf_counter()
        scores: dict[str, Evaluation] = {}
        if is_due(experiment.evaluate_every, r, experiment.rounds):
            scores["global"] = score_global(experiment, cohort, state)
            if experiment.validate:
                cohort.measure(**validation(experiment, cohort, state))
        if own := personal(own, cohort.ledger.scores, experiment.clients):
            scores["personal"] = own
        row = {"round": r + 1, **headline(scores, experiment.local.deploys), **cohort.ledger.metrics}
        row |= {
            "clients": len(cohort.ids),
            "bytes_up": cohort.ledger.total("up"),
            "bytes_down": cohort.ledger.total("down"),
            **fault_columns(experiment.faults, cohort.ledger, state),
            "seconds": time.perf_counter() - began,
            "seconds_training": trained - began,
        }
        yield Round(state=state, row=row, ledger=cohort.ledger, scores=scores)


def advance(experiment: Experiment, state: ServerState, cohort: Cohort) -> ServerState:
    """The state after a round: the same one, but for the clock, where nobody is there or nobody answers.

    Raises:
        ServerError: The server's arithmetic failed.
    """
    after = state
    if cohort.ids:
        try:
            after = experiment.server.round(state, cohort, experiment.local)
        except NobodyAnsweredError:
            pass
        except ArithmeticError as err:
            values = vars(experiment.server).items()
            keys = ", ".join(f"server.{k}={v}" for k, v in values if type(v) in (int, float))
            raise ServerError(
                f"round {cohort.round + 1}: the server's arithmetic failed ({type(err).__name__}: "
                f"{one_line(err)}); choose smaller values of {keys or 'train.lr'}, or a smaller train.lr"
            ) from err
    return replace(after, virtual_time=state.virtual_time + cohort.ledger.seconds)


def fault_columns(faults: Faults | None, ledger: Ledger, state: ServerState) -> dict[str, Any]:
    """How many clients were missing, and the virtual clock, where there can be something to say."""
    row: dict[str, Any] = {}
    if faults is not None or ledger.missing:
        row["missing"] = len(ledger.missing)
    if faults is not None and faults.has_clock:
        row |= {"virtual_seconds": ledger.seconds, "virtual_time": state.virtual_time}
    return row


def is_due(every: int, round: int, rounds: int) -> bool:
    """Whether something done `every` so many rounds, and in the last one, is done in this one."""
    return bool(every) and ((round + 1) % every == 0 or round + 1 == rounds)


def make_cohort(experiment: Experiment, executor: Executor, round: int) -> Cohort:
    """The clients of a round, drawn from the round's own stream."""
    ids, capacity = sample(experiment, round), experiment.capacity
    return Cohort(
        round=round,
        ids=ids,
        clients=experiment.clients,
        seed=experiment.seed,
        rounds=experiment.rounds,
        depth=experiment.depth,
        capacity=draw(ids, experiment.depth, experiment.seed, round) if capacity is None else capacity,
        executor=executor,
        block_bytes=experiment.block_bytes,
        faults=experiment.faults,
    )


def sample(experiment: Experiment, round: int) -> tuple[str, ...]:
    """Ids of the cohort, in client order: all, a uniform draw, or one client of each domain.

    Only clients that are available are drawn; where they are too few, all of them take part.
    """
    faults = experiment.faults
    ids = [cid for cid in experiment.clients if faults is None or faults.is_available(round, cid)]
    rng = generator(experiment.seed, "sample", round)
    if experiment.sampling == "one_per_domain":
        groups: dict[str, list[str]] = {}
        for cid in ids:
            groups.setdefault(experiment.clients[cid].domain, []).append(cid)
        chosen = {group[int(rng.integers(len(group)))] for group in groups.values()}
    elif experiment.clients_per_round >= len(ids):
        chosen = set(ids)
    else:
        chosen = set(rng.choice(ids, size=experiment.clients_per_round, replace=False).tolist())
    return tuple(cid for cid in ids if cid in chosen)


def score_global(experiment: Experiment, cohort: Cohort, state: ServerState) -> Evaluation:
    """Score the global model on every test set; what we look at is not what the method costs."""
    ids = tuple(s.id for s in experiment.sets)
    task = partial(evaluate, split="test", local=experiment.local)
    answers = look(cohort, ids, task, state, "report")
    others = {name for a in answers.values() for name in a.metrics} - {*METRICS, "loss", "num"}
    for name in sorted(others):  # another way to predict, such as the last exit alone
        found = [a.metrics[name] for a in answers.values() if name in a.metrics]
        cohort.measure(**{name: sum(found) / len(found)})
    return evaluation(experiment.sets, answers)


def look(cohort: Cohort, ids: tuple[str, ...], task: Task, state: ServerState, tag: str) -> dict[str, Update]:
    """Let everybody score the global model; answers by id. Says in the round's row how many are lacking."""
    answers: Sequence[Update] = ()
    with suppress(NobodyAnsweredError):
        answers = cohort.looking(ids).run(task, state.broadcast(), tag=tag)
    if len(answers) < len(ids):
        cohort.measure(**{f"{tag}_missing": float(len(ids) - len(answers))})
    return {answer.client: answer for answer in answers}


def validation(experiment: Experiment, cohort: Cohort, state: ServerState) -> dict[str, float]:
    """Score and loss of the global model on the validation splits, means over the clients that have one."""
    task = partial(evaluate, local=experiment.local)
    answers = look(cohort, cohort.all_ids, task, state, "report_validation")
    found = [a.metrics for a in answers.values() if metric_of(a.metrics)]
    metric = metric_of(found[0]) if found else None
    names = (metric, "loss") if metric else ()
    return {f"val_{name}": float(sum(one[name] for one in found)) / len(found) for name in names}


def headline(scores: Mapping[str, Evaluation], deploys: str) -> dict[str, Any]:
    """The accuracy columns: of the model the method deploys, and of the other one under its own name."""
    row: dict[str, Any] = {}
    for model, found in scores.items():
        columns = summary(found)
        prefix = "" if model == deploys else f"{model}_"
        row |= {name if name.startswith("held_out") else prefix + name: v for name, v in columns.items()}
    return row
