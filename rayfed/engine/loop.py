"""The round loop: samples clients, runs the round, evaluates the model, and makes the row of the round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from rayfed.columns import ACCURACY, metric_of
from rayfed.data.partition.partition import Partition
from rayfed.devices import as_made_here, with_fields_made_here
from rayfed.errors import (
    ConfigError,
    NobodyAnsweredError,
    RayFedError,
    ServerError,
    cause_of,
    one_line,
    place_of,
    shown,
)
from rayfed.evaluation.metrics import Evaluation, Round, evaluation, of_deployed, summary
from rayfed.evaluation.stopping import StopConfig, Stopping
from rayfed.evaluation.test_sets import EvaluationSet, Pack, unseen_sets
from rayfed.federation.client_tasks import (
    BY_CLASS,
    INSTEAD,
    PERSONAL,
    SETS,
    VALIDATED,
    adapt,
    deployed,
    evaluate,
    evaluate_pack,
)
from rayfed.federation.cohort import Answer, Cohort, Cost, Federation, Ledger
from rayfed.federation.executor import Executor
from rayfed.federation.local import Local
from rayfed.federation.privacy_accountant import Privacy
from rayfed.federation.server import Server
from rayfed.heterogeneity.capacity import draw_capacities
from rayfed.heterogeneity.faults import Faults
from rayfed.objective import Classification, Objective
from rayfed.sampling import uniform
from rayfed.sampling.base import Rule, candidates_of, sample
from rayfed.types import Params, Row, ServerState, Update


def headline(scores: Mapping[str, Evaluation], deploys: str) -> dict[str, float | str]:
    """Accuracy columns of a round: those of the model that the method deploys have no prefix.

    Those of other models begin with its name, except that the global model is the one that is scored on
    held-out domains and by unseen clients, whatever a method deploys.

    Args:
        scores: Evaluations by model: `global`, `personal`, or `adapted` (`rayfed.engine.loop`).
        deploys: Which of the first two the method deploys.
    """
    row: dict[str, float | str] = {}
    for model, scored in scores.items():
        columns = summary(scored)
        prefix = "" if model == deploys else f"{model}_"
        bare = ("held_out_", "unseen_") if model == "global" else ()
        row |= {name if name.startswith(bare) else prefix + name: v for name, v in columns.items()}
    return row


def fault_columns(faults: Faults | None, ledger: Ledger, state: ServerState) -> dict[str, Any]:
    """Columns of a round about faults: missing clients, and the virtual clock where there is one.

    The number of missing clients is left out where no faults are injected and all clients answered.
    """
    row: dict[str, Any] = {}
    if faults is not None or ledger.missing:
        row["missing"] = len(ledger.missing)
    if faults is not None and faults.has_clock:
        row |= {"virtual_seconds": ledger.seconds, "virtual_time": state.virtual_time}
    return row


def cost_columns(cost: Cost | None, ledger: Ledger) -> dict[str, int]:
    """Columns of a round about what training cost: steps and operations of all clients, what one trains."""
    steps = {"local_steps": ledger.steps, "local_examples": ledger.rows}
    if ledger.tokens:
        steps["local_tokens"] = ledger.tokens
    if ledger.learned:
        steps["local_learned"] = ledger.learned
    return steps if cost is None else {**steps, "flops": ledger.flops, "trained_params": ledger.trained}


NOTHING: Params = {}

TAG = "report_adapted"
"""Name of the exchange, and of the random streams of the batches."""


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The scores of clients that never train, after they adapted the final model.

    Attributes:
        sets: Test sets of the clients that never train, one for each client.
        steps: Number of optimization steps of a client (`evaluation.local_steps`).
    """

    sets: tuple[EvaluationSet, ...]
    steps: int


def adaptation_of(
    steps: int, scored: Literal["all"] | int, seed: int, server: Server, partition: Partition
) -> Adaptation | None:
    """The scores to compute on unseen clients; None: none is asked for, or the method trains nothing.

    Args:
        steps: `evaluation.local_steps`.
        scored: Number of clients whose test sets are scored (`evaluation.clients`).
        server: Server half of the method.
        partition: Examples of each client.

    Raises:
        ConfigError: A number of steps is set, but all clients train.
    """
    if steps and not partition.unseen:
        raise ConfigError(
            f"evaluation.local_steps: {steps} has no effect, because all clients train; set "
            f"data.unseen_clients=0.2, or leave it out"
        )
    if not steps or not server.trains:
        return None
    return Adaptation(sets=unseen_sets(partition, scored, seed), steps=steps)


def score_adapted(
    wanted: Adaptation, local: Local, cohort: Cohort, state: ServerState, goal: Objective
) -> Evaluation:
    """Scores of the models that unseen clients would deploy after a few steps from the global model.

    Every evaluation begins anew: a client keeps nothing of it. It receives what every client receives in a
    broadcast, with all blocks and at the full rank. The traffic is not counted as the method's; how many
    clients have no score is recorded as `report_adapted_missing`.

    Args:
        wanted: The clients and the number of steps.
        local: Client half of the method, which trains.
        cohort: Clients of the round.
        state: State of the server after the round.
    """
    ids = tuple(one.id for one in wanted.sets)
    task = partial(adapt, local=local, steps=wanted.steps)
    try:
        updates = cohort.for_reporting(ids).run(task, state.broadcast(), tag=TAG)
        answers = {one.client: one for one in updates}
    except NobodyAnsweredError:
        answers = {}
    if len(answers) < len(ids):
        cohort.measure(**{f"{TAG}_missing": float(len(ids) - len(answers))})
    return evaluation(wanted.sets, answers, goal)


@dataclass(frozen=True, kw_only=True)
class RoundPlan(Federation):
    """Everything the loop needs except an executor and initial values; together they determine all results.

    Attributes:
        server: Server half of the method.
        local: Client half of the method.
        sets: Test sets, each scored once per evaluation.
        clients_per_round: Number of clients in a cohort, as far as `sampling` uses it.
        sampling: Draws the cohorts.
        sampling_name: Name of this rule.
        rates: Learning rate of the clients in each round, for the rows; empty: it does not change.
        evaluate_every: Score models in every n-th round and in the last one; 0: never.
        objective: The task, with its metrics over the examples of several test sets.
        population: Number of clients that train and are scored; 0: as many as `clients`.
        personal: Test sets of the clients whose personal models are scored in these rounds; empty: of none.
        validate: What else is scored: `validation_split` of these clients or sets, with the global model.
        validate_personal: The same with the models that the clients would deploy; empty: they deploy the
            global one.
        validation_split: Name of that split.
        capacity: Number of blocks each client can hold, by id; None: drawn anew in each round.
        packs: Small test sets that are scored in shared batches.
        privacy: Counts the privacy loss of the rounds; None: the experiment guarantees none.
        stop: When the run ends before its last round.
        adapting: Clients that never train and are also scored after a few local steps; None: there are none.
        parts: Start values of the trained tensors of each kind, with which the final model is scored again;
            empty where the whole network is trained; None: it is not scored again.
        before: What was sent to compute start values, in the traffic of the first round.
    """

    server: Server
    local: Local
    sets: tuple[EvaluationSet, ...]
    clients_per_round: int
    sampling: Rule = uniform.draw
    sampling_name: str = "uniform"
    rates: tuple[float, ...] = ()
    evaluate_every: int = 1
    objective: Objective = field(default_factory=Classification)
    population: int = 0
    personal: tuple[EvaluationSet, ...] = ()
    validate: tuple[EvaluationSet, ...] = ()
    validate_personal: tuple[EvaluationSet, ...] = ()
    validation_split: str = "val"
    capacity: Mapping[str, int] | None = None
    packs: tuple[Pack, ...] = ()
    privacy: Privacy | None = None
    stop: StopConfig = field(default_factory=StopConfig)
    adapting: Adaptation | None = None
    parts: Mapping[str, Params] | None = None
    before: tuple[Row, ...] = ()


def run_rounds(
    experiment: RoundPlan,
    executor: Executor,
    start: Params,
    state: ServerState | None = None,
    before: Iterable[Row] = (),
) -> Iterator[Round]:
    """Run the rounds of an experiment, and yield each when it is finished.

    Args:
        executor: Runs the calls of clients; it must hold the client stores that belong to `state`.
        start: Initial values of all tensors that are sent and trained.
        state: State of the server after an earlier round, to continue from; None: begin with the first round.
        before: Rows of the rounds until then, which the rule `stop` looks at.

    Raises:
        ConfigError: The rule `stop` names a metric that a scored round has not.
    """
    first = 0 if state is None else state.round + 1
    state = state or experiment.server.start(as_made_here(start))
    stopping = Stopping(experiment.stop, before)
    for r in range(first, experiment.rounds):
        if stopping.reason:
            return
        started = time.perf_counter()
        cohort = draw_cohort(experiment, executor, replace(state, round=r))
        cohort.ledger.transfers += experiment.before if r == 0 else ()
        state = replace(state, round=r)
        after = None
        if cohort.ids:
            with suppress(NobodyAnsweredError), server_errors(experiment.server, r):
                after = checked_state(
                    experiment.server, experiment.server.round(state, cohort, experiment.local)
                )
        state = close_round(experiment, state, cohort, after)
        state = with_fields_made_here(state, "params", "shared", "memory")  # as a checkpoint will have it
        trained = time.perf_counter()
        last = r + 1 == experiment.rounds or stopping.is_over(state.virtual_time)
        scores = scores_of(experiment, cohort, state, last)
        row = {"round": r + 1, **headline(scores, experiment.local.deploys), **cohort.ledger.metrics}
        if experiment.rates:
            row["lr"] = experiment.rates[r]
        if experiment.privacy:
            row["epsilon"] = experiment.privacy.epsilon(r + 1)
            row["delta"] = experiment.privacy.delta
        row |= {
            "clients": len(cohort.ids),
            "bytes_up": cohort.ledger.total("up"),
            "bytes_down": cohort.ledger.total("down"),
            **cost_columns(experiment.cost, cohort.ledger),
            **fault_columns(experiment.faults, cohort.ledger, state),
            "seconds": time.perf_counter() - started,
            "seconds_training": trained - started,
        }
        stopping.add(row)
        last = last or bool(stopping.reason)
        yield Round(state=state, row=row, ledger=cohort.ledger, scores=scores, last=last)


def checked_state(server: Server, state: Any) -> ServerState:
    """The state that a server half returned from its round.

    Raises:
        ServerError: It is none, as where `return` was forgotten.
    """
    if isinstance(state, ServerState):
        return state
    own = next((name for name in ("round", "aggregate") if name in vars(type(server))), "aggregate")
    raise ServerError(
        f"server: {type(server).__name__}.{own} returned {shown(state)}; return a ServerState, such as "
        f"that of super().{own}(...), or replace(state, params=...)"
    )


def scores_of(experiment: RoundPlan, cohort: Cohort, state: ServerState, last: bool) -> dict[str, Evaluation]:
    """Scores of the models of the server after a round, by name; empty: they are not due.

    Args:
        last: Whether it is known that the run ends after the round.
    """
    scores: dict[str, Evaluation] = {}
    if is_due(experiment.evaluate_every, cohort.round, last):
        scores["global"] = score_global(experiment, cohort, state)
        if experiment.adapting:
            goal = experiment.objective
            scores["adapted"] = score_adapted(experiment.adapting, experiment.local, cohort, state, goal)
        answers: list[Answer | Update] = []
        if experiment.personal and experiment.server.trains:
            answers = ask_deployed(experiment, cohort, state)
            if (own := _of_deployed(experiment, experiment.personal, answers, PERSONAL)).clients:
                scores["personal"] = own
        if experiment.validate:
            cohort.measure(**validation(experiment, cohort, state, answers))
    return scores


def ask_deployed(experiment: RoundPlan, cohort: Cohort, state: ServerState) -> list[Answer | Update]:
    """Answers with the scores of the models that clients would deploy, of all whose scores are wanted.

    A client that trained in this round has scored its model after its training. Each other one scores what it
    would deploy: what it kept for itself, or what the method makes of the present global model. This traffic
    is not counted as the method's; how many have no score is recorded as `report_personal_missing`.

    Args:
        cohort: Clients of the round, with what they answered.
        state: State of the server after the round.
    """
    answers: list[Answer | Update] = [*cohort.ledger.scores]
    known = of_deployed(answers, PERSONAL).keys() | of_deployed(answers, VALIDATED).keys()
    wanted = {one.id for one in (*experiment.personal, *experiment.validate_personal)}
    rest = tuple(experiment.clients.in_order(wanted - known))
    if not rest:
        return answers
    capacity = experiment.capacity
    if capacity is None:
        capacity = draw_capacities(rest, experiment.depth, experiment.seed, cohort.round)
    asked = replace(cohort, ids=rest, ledger=Ledger(), faults=None, capacity=capacity)
    sent = {cid: state.broadcast(blocks=asked.prefix(cid)) for cid in rest}
    found: Sequence[Update] = ()
    with suppress(NobodyAnsweredError):
        found = asked.run(partial(deployed, local=experiment.local), sent, tag="report_personal")
    if len(found) < len(rest):
        cohort.measure(report_personal_missing=float(len(rest) - len(found)))
    return [*answers, *found]


def _of_deployed(
    experiment: RoundPlan, sets: tuple[EvaluationSet, ...], answers: Sequence[Answer | Update], name: str
) -> Evaluation:
    """Scores of the models that clients would deploy. Args: name: as of `of_deployed`."""
    return evaluation(sets, of_deployed(answers, name), experiment.objective, len(experiment.clients))


@contextmanager
def server_errors(server: Server, round: int) -> Iterator[None]:
    """Turn errors of the block into one line: of arithmetic with the hyperparameters, of code with its place.

    Raises:
        ServerError: There was an error of arithmetic, or a mistake in the code of the method's server.
    """
    try:
        yield
    except ArithmeticError as err:
        keys = ", ".join(f"server.{k}={v}" for k, v in vars(server).items() if type(v) in (int, float))
        raise ServerError(
            f"round {round + 1}: the server's arithmetic failed ({type(err).__name__}: "
            f"{one_line(err)}); choose smaller values of {keys or 'train.lr'}, or a smaller train.lr"
        ) from err
    except Exception as err:  # a method may raise anything
        is_of_ray = type(err).__module__.startswith("ray.")
        if isinstance(err, RayFedError | OSError | MemoryError) or is_of_ray or not place_of(err):
            raise
        who = f"round {round + 1}: the server of {type(server).__name__}"
        raise ServerError(f"{who} failed: {cause_of(err)}") from err


def close_round(
    experiment: RoundPlan, state: ServerState, cohort: Cohort, after: ServerState | None
) -> ServerState:
    """The state after a round, with its virtual time.

    Where no client is available or none answers, only the virtual clock changes. If the channel has noise,
    the server gets the parameters with it as the mean; else the round would tell that none was drawn.

    Args:
        state: State of the server before the round.
        cohort: Clients of the round.
        after: What `Server.round` returned; None: no client is available, or none answered.
    """
    if not cohort.ids and cohort.faults is not None:
        cohort.ledger.seconds += cohort.faults.wait
    if after is None:
        after = state
        if experiment.channel.noisy_mean:
            mean = Update(client="", params=experiment.channel.noise_alone(state.round, state.params))
            after = experiment.server.aggregate(state, cohort.for_reporting(), [mean])
    return replace(after, virtual_time=state.virtual_time + cohort.ledger.seconds)


def is_due(every: int, round: int, last: bool) -> bool:
    """Whether an action of every `every`-th round and the last one is due in this round (0: never).

    Args:
        every: Distance between two such rounds.
        round: Round index, from 0.
        last: Whether it is the last one.
    """
    return bool(every) and ((round + 1) % every == 0 or last)


def draw_cohort(experiment: RoundPlan, executor: Executor, state: ServerState) -> Cohort:
    """Draw the clients of a round, and their capacities where these are drawn in each round.

    What a rule asks of clients is in the ledger of the cohort.

    Args:
        executor: Runs the calls of clients.
        state: State of the server at the beginning of the round, with its index.

    Raises:
        ServerError: The rule failed, or drew what cannot be drawn.
    """
    empty = cohort_of(experiment, executor, state.round, (), state.virtual_time)
    candidates = candidates_of(
        experiment.clients,
        experiment.clients_per_round,
        empty.faults,
        state.round,
        partial(_losses, experiment, empty, state),
    )
    ids = sample(candidates, experiment.sampling, experiment.seed, state.round, experiment.sampling_name)
    drawn = cohort_of(experiment, executor, state.round, ids, state.virtual_time)
    return replace(drawn, ledger=empty.ledger)


def _losses(experiment: RoundPlan, empty: Cohort, state: ServerState, ids: Sequence[str]) -> dict[str, float]:
    """The loss of the global model on the training examples of clients, for a rule that draws by it.

    Args:
        empty: A cohort of the round without clients, whose ledger counts the traffic.
        state: State of the server at the beginning of the round.
        ids: Ids of the clients.
    """
    asked = cohort_of(experiment, empty.executor, state.round, tuple(ids), state.virtual_time)
    asked = replace(asked, ledger=empty.ledger)
    sent = {cid: state.broadcast(blocks=asked.prefix(cid)) for cid in ids}
    task = partial(evaluate, split="train", local=experiment.local)
    answers: Sequence[Update] = ()
    with suppress(NobodyAnsweredError):
        answers = asked.run(task, sent, tag="draw")
    return {one.client: one.metrics["loss"] for one in answers}


def cohort_of(
    experiment: RoundPlan, executor: Executor, round: int, ids: tuple[str, ...], time: float = 0.0
) -> Cohort:
    """A cohort of these clients in a round.

    Args:
        executor: Runs the calls of clients.
        round: Round index, from 0.
        ids: The clients, in client order.
        time: Virtual seconds at the beginning of the round.
    """
    faults = experiment.faults.at(time) if experiment.faults is not None else None
    capacity = experiment.capacity
    if capacity is None:
        capacity = draw_capacities(ids, experiment.depth, experiment.seed, round)
    return Cohort.of_round(
        experiment, round=round, ids=ids, capacity=capacity, executor=executor, faults=faults
    )


def score_without(
    experiment: RoundPlan, executor: Executor, state: ServerState
) -> dict[str, dict[str, Any]] | None:
    """Score the final model with the trained tensors of each kind put back to their start values.

    The test sets are those of every round. Nothing of it is counted or kept.

    Args:
        executor: Runs the calls; it holds the stores of the clients after the last round.
        state: State of the server after the last round.

    Returns:
        By kind, `clients` and `domains`, the mean scores over these, and `by_domain`, the score of each
        domain, those that no client owns included; None: this was not asked for. A kind is left out where a
        test set could not be scored.
    """
    if experiment.parts is None:
        return None
    without: dict[str, dict[str, Any]] = {}
    for kind, start in experiment.parts.items():
        cohort = cohort_of(experiment, executor, state.round, (), state.virtual_time)
        scores = score_global(experiment, cohort, state, start)
        if "report_missing" in cohort.ledger.metrics:
            continue
        row = summary(scores)
        domains = {name: score.value for name, score in (*scores.domains.items(), *scores.held_out.items())}
        metric = metric_of(row) or ACCURACY
        means = {"clients": row.get(metric), "domains": row.get(f"{metric}_domain")}
        without[kind] = {**means, "by_domain": domains}
    return without


def score_global(
    experiment: RoundPlan, cohort: Cohort, state: ServerState, instead: Params | None = None
) -> Evaluation:
    """Score the global model on all test sets; this traffic is not counted as the method's.

    Args:
        cohort: Clients of the round.
        instead: Values to use in place of those of the server and the clients, by global name.
    """
    ids = tuple(s.id for s in experiment.sets)
    answers = score_on(experiment, cohort, ids, state, "test", "report", instead or {})
    return evaluation(experiment.sets, answers, experiment.objective, _population(experiment))


def _population(experiment: RoundPlan) -> int:
    return experiment.population or len(experiment.clients)


def score_on(
    experiment: RoundPlan,
    cohort: Cohort,
    ids: tuple[str, ...],
    state: ServerState,
    split: str,
    tag: str,
    instead: Params = NOTHING,
) -> dict[str, Update]:
    """Score the global model on these sets; records how many have no score as `<tag>_missing`.

    Values of `instead`, by global name, are used in place of those of the server and the clients.

    Returns:
        Answers by id of the set.
    """
    sent_instead = {name: value for name, value in instead.items() if name in state.params}
    staying = {name: value for name, value in instead.items() if name not in state.params}
    state = replace(state, params={**state.params, **sent_instead})
    wanted = set(ids)
    packed = {p.id: p for p in experiment.packs if p.split == split and wanted.issuperset(p.sizes)}
    inside = {i for p in packed.values() for i in p.sizes}
    lone = tuple(i for i in ids if i not in inside)
    plain = state.broadcast()
    sizes = {i: torch.tensor(list(p.sizes.values())) for i, p in packed.items()}
    sent = {i: replace(plain, shared={**plain.shared, SETS: own}) for i, own in sizes.items()}
    answers: list[Update] = []
    if lone:
        with suppress(NobodyAnsweredError):
            task = partial(evaluate, split=split, local=experiment.local)
            broadcast = replace(plain, shared={**plain.shared, INSTEAD: staying}) if staying else plain
            answers += cohort.for_reporting(lone).run(task, broadcast, tag=tag)
    if packed:
        with suppress(NobodyAnsweredError):
            together = cohort.for_reporting(tuple(packed))
            for answer in together.run(partial(evaluate_pack, split=split), sent, tag=tag):
                answers += unpack(packed[answer.client], answer, experiment.objective)
    if len(answers) < len(ids):
        cohort.measure(**{f"{tag}_missing": float(len(ids) - len(answers))})
    return {answer.client: answer for answer in answers}


def unpack(pack: Pack, answer: Update, goal: Objective) -> Iterator[Update]:
    """The answers of the sets of a pack, with the metrics that they define. Args: goal: the task."""
    columns = {name: values.tolist() for name, values in answer.extra[SETS].items()}
    sizes = list(pack.sizes.values())
    kept = {
        what: list(values if what == BY_CLASS else values.split(sizes))
        for what, values in answer.scored.items()
    }
    for place, (name, num) in enumerate(pack.sizes.items()):
        own = {metric: values[place] for metric, values in columns.items()}
        undefined = {metric for metric in goal.over_set if own[metric] != own[metric]}  # NaN
        metrics = {"num": num, **{metric: value for metric, value in own.items() if metric not in undefined}}
        scored = {what: values[place] for what, values in kept.items()}
        yield Update(client=name, num_examples=num, metrics=metrics, scored=scored)


def validation(
    experiment: RoundPlan, cohort: Cohort, state: ServerState, answers: Sequence[Answer | Update]
) -> dict[str, float]:
    """Metrics and loss on the validation examples, as `val_<metric>` and `val_loss`.

    They are of the model that the method deploys. Where it deploys the clients' own models, those of the
    global one are `global_val_<metric>` and `global_val_loss`, and `val_clients` is the number of clients
    whose models they are of. Both are means over the clients that have validation examples, each with the
    same weight, but for metrics over sets, which are over all these examples.

    Args:
        cohort: Clients of the round.
        answers: Of `ask_deployed`.
    """
    split, sets = experiment.validation_split, experiment.validate
    found = score_on(experiment, cohort, tuple(s.id for s in sets), state, split, "report_validation")
    shared = evaluation(sets, found, experiment.objective, _population(experiment))
    if not experiment.validate_personal:
        return _validated(shared, "val_")
    own = _of_deployed(experiment, experiment.validate_personal, answers, VALIDATED)
    return {**_validated(own, "val_"), **_validated(shared, "global_val_")}


def _validated(scores: Evaluation, prefix: str) -> dict[str, float]:
    """Columns of validation. Args: prefix: beginning of their names."""
    row = summary(scores)
    names = {metric_of(row): None, "loss": None, "clients_scored": None}
    return {
        prefix + name.removesuffix("_scored"): row[name]  # type: ignore[misc]  # these are numbers
        for name in names
        if name and name in row
    }
