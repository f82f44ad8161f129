"""The round loop: samples clients, runs the round, evaluates the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from rayfed.clients import ClientTable
from rayfed.engine.adapted import Adapting, score_adapted
from rayfed.engine.columns import cost_columns, fault_columns, headline
from rayfed.engine.sampling import sample
from rayfed.errors import NobodyAnsweredError, ServerError, one_line
from rayfed.evaluation.metrics import Evaluation, Score, evaluation, personal
from rayfed.evaluation.test_sets import EvaluationSet, Pack
from rayfed.federation.channel import OPEN, Channel
from rayfed.federation.cohort import Cohort, Sampling
from rayfed.federation.cost import Cost
from rayfed.federation.executor import Executor
from rayfed.federation.local import Local
from rayfed.federation.privacy import Privacy
from rayfed.federation.server import Server
from rayfed.federation.visit import SETS, evaluate, evaluate_pack
from rayfed.heterogeneity.capacity import draw_capacities
from rayfed.heterogeneity.faults import Faults
from rayfed.objective import METRICS, metric_of
from rayfed.record.round import Round
from rayfed.types import Params, ServerState, Update


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything the loop needs except an executor and initial values; together they determine all results.

    Attributes:
        server: Server half of the method.
        local: Client half of the method.
        clients: Facts about every client, by id, in the order in which updates are summed.
        sets: Test sets, each scored once per evaluation.
        seed: Seed of the experiment.
        rounds: Total number of rounds.
        clients_per_round: Number of clients in a cohort; not used where `sampling` is one_per_domain.
        sampling: How cohorts are drawn: `clients_per_round` uniformly, each client independently with the
            same probability (poisson), or one client of each domain.
        rates: Learning rate of the clients in each round, for the rows; empty: it does not change.
        evaluate_every: Score the global model in every n-th round and in the last one; 0: never.
        validate: What else the global model is scored on: the validation splits of these clients or sets,
            each with the number of clients that it counts for.
        depth: Number of blocks of the backbone.
        capacity: Number of blocks each client can hold, by id; None: drawn anew in each round.
        ranks: Rank of the LoRA adapters of each client, by id; empty: that of the tuning for all.
        block_bytes: Size of the frozen weights of each block in bytes.
        faults: Faults to inject; None: no faults.
        group: Number of clients that share their passes in training.
        packs: Small test sets that are scored in shared batches.
        channel: What happens to answers between training and the sum.
        privacy: Counts the privacy loss of the rounds; None: the experiment guarantees none.
        cost: Floating-point operations and trained numbers of a visit; None: they are not counted.
        adapting: Clients that never train and are also scored after a few local steps; None: there are none.
    """

    server: Server
    local: Local
    clients: ClientTable
    sets: tuple[EvaluationSet, ...]
    seed: int
    rounds: int
    clients_per_round: int
    sampling: Sampling = "uniform"
    rates: tuple[float, ...] = ()
    evaluate_every: int = 1
    validate: Mapping[str, int] = field(default_factory=dict)
    depth: int = 0
    capacity: Mapping[str, int] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    block_bytes: tuple[int, ...] = ()
    faults: Faults | None = None
    group: int = 1
    packs: tuple[Pack, ...] = ()
    channel: Channel = OPEN
    privacy: Privacy | None = None
    cost: Cost | None = None
    adapting: Adapting | None = None


def run_rounds(
    experiment: Experiment,
    executor: Executor,
    start: Params,
    state: ServerState | None = None,
    known: Mapping[str, Score] | None = None,
) -> Iterator[Round]:
    """Run the rounds of an experiment, and yield each when it is finished.

    Args:
        experiment: The experiment.
        executor: Runs the calls of clients; it must hold the client stores that belong to `state`.
        start: Initial values of all tensors that are sent and trained.
        state: State of the server after an earlier round, to continue from; None: begin with the first round.
        known: Last known scores of the clients' personal models at that round.
    """
    first = 0 if state is None else state.round + 1
    state = state or experiment.server.start(start)
    own = Evaluation(clients=known, domains={}, held_out={}) if known else None
    for r in range(first, experiment.rounds):
        started = time.perf_counter()
        cohort = make_cohort(experiment, executor, r, state.virtual_time)
        state = advance(experiment, replace(state, round=r), cohort)
        trained = time.perf_counter()
        scores: dict[str, Evaluation] = {}
        if is_due(experiment.evaluate_every, r, experiment.rounds):
            scores["global"] = score_global(experiment, cohort, state)
            if experiment.adapting:
                scores["adapted"] = score_adapted(experiment.adapting, experiment.local, cohort, state)
            if experiment.validate:
                cohort.measure(**validation(experiment, cohort, state))
        if own := personal(own, cohort.ledger.scores, experiment.clients):
            scores["personal"] = own
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
        yield Round(state=state, row=row, ledger=cohort.ledger, scores=scores)


def advance(experiment: Experiment, state: ServerState, cohort: Cohort) -> ServerState:
    """The state after a round.

    Where no client is available or none answers, only the virtual clock changes. If the channel has noise,
    the server gets the parameters with it as the mean; otherwise the round would tell that nobody was drawn.

    Raises:
        ServerError: The server's arithmetic failed.
    """
    after = None
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
    elif cohort.faults is not None:
        cohort.ledger.seconds += cohort.faults.wait
    if after is None:
        after = state
        if experiment.channel.noisy_mean:
            mean = Update(client="", params=experiment.channel.noise_alone(state.round, state.params))
            after = experiment.server.aggregate(state, cohort.for_reporting(), [mean])
    return replace(after, virtual_time=state.virtual_time + cohort.ledger.seconds)


def is_due(every: int, round: int, rounds: int) -> bool:
    """Whether an action of every `every`-th round and the last one is due in this round (0: never).

    Args:
        every: Distance between two such rounds.
        round: Round index, from 0.
        rounds: Total number of rounds.
    """
    return bool(every) and ((round + 1) % every == 0 or round + 1 == rounds)


def make_cohort(experiment: Experiment, executor: Executor, round: int, time: float = 0.0) -> Cohort:
    """Sample the clients of a round, and their capacities where these are drawn in each round.

    Args:
        experiment: The experiment.
        executor: Runs the calls of clients.
        round: Round index, from 0.
        time: Virtual seconds at the beginning of the round.
    """
    faults = experiment.faults.at(time) if experiment.faults is not None else None
    ids = sample(
        experiment.clients,
        experiment.clients_per_round,
        experiment.sampling,
        faults,
        experiment.seed,
        round,
    )
    capacity = experiment.capacity
    if capacity is None:
        capacity = draw_capacities(ids, experiment.depth, experiment.seed, round)
    return Cohort(
        round=round,
        ids=ids,
        clients=experiment.clients,
        seed=experiment.seed,
        rounds=experiment.rounds,
        depth=experiment.depth,
        capacity=capacity,
        executor=executor,
        ranks=experiment.ranks,
        block_bytes=experiment.block_bytes,
        faults=faults,
        group=experiment.group,
        channel=experiment.channel,
        cost=experiment.cost,
    )


def score_global(experiment: Experiment, cohort: Cohort, state: ServerState) -> Evaluation:
    """Score the global model on all test sets; this traffic is not counted as the method's."""
    ids = tuple(s.id for s in experiment.sets)
    answers = score_on(experiment, cohort, ids, state, "test", "report")
    others = {name for a in answers.values() for name in a.metrics} - {*METRICS, "loss", "num"}
    for name in sorted(others):  # metrics of further predictions, such as that of the last exit
        values = [a.metrics[name] for a in answers.values() if name in a.metrics]
        cohort.measure(**{name: sum(values) / len(values)})
    return evaluation(experiment.sets, answers)


def score_on(
    experiment: Experiment, cohort: Cohort, ids: tuple[str, ...], state: ServerState, split: str, tag: str
) -> dict[str, Update]:
    """Score the global model on these sets; records how many have no score as `<tag>_missing`.

    Returns:
        Answers by id of the set.
    """
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
            answers += cohort.for_reporting(lone).run(task, plain, tag=tag)
    if packed:
        with suppress(NobodyAnsweredError):
            together = cohort.for_reporting(tuple(packed))
            for answer in together.run(partial(evaluate_pack, split=split), sent, tag=tag):
                answers += unpacked(packed[answer.client], answer)
    if len(answers) < len(ids):
        cohort.measure(**{f"{tag}_missing": float(len(ids) - len(answers))})
    return {answer.client: answer for answer in answers}


def unpacked(pack: Pack, answer: Update) -> Iterator[Update]:
    """The answers of the sets of a pack."""
    columns = {name: values.tolist() for name, values in answer.extra[SETS].items()}
    for place, (name, num) in enumerate(pack.sizes.items()):
        metrics = {"num": num, **{metric: values[place] for metric, values in columns.items()}}
        yield Update(client=name, num_examples=num, metrics=metrics)


def validation(experiment: Experiment, cohort: Cohort, state: ServerState) -> dict[str, float]:
    """Metric and loss of the global model on the validation splits, as `val_<metric>` and `val_loss`.

    Both are means over the clients that have validation examples, each with the same weight.
    """
    counts = experiment.validate
    answers = score_on(experiment, cohort, tuple(counts), state, "val", "report_validation")
    scored = [(a.metrics, counts[a.client]) for a in answers.values() if metric_of(a.metrics)]
    metric = metric_of(scored[0][0]) if scored else None
    names = (metric, "loss") if metric else ()
    total = sum(count for _, count in scored)
    return {f"val_{name}": float(sum(one[name] * n for one, n in scored)) / total for name in names}
