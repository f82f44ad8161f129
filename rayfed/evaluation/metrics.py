"""Statistics over clients and domains, computed from the scores of single test sets."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rayfed.columns import is_larger_better
from rayfed.evaluation.test_sets import EvaluationSet
from rayfed.federation.client_tasks import BY_CLASS, OUTPUT, TARGET, over_set
from rayfed.federation.cohort import Answer, Ledger
from rayfed.objective import NUM, Classification, LanguageModeling, Objective
from rayfed.types import ServerState, Update

PERPLEXITY = "perplexity"
PLAIN = Classification()
T = TypeVar("T")

Numbers: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

MIN_CLIENTS_FOR_TENTHS = 10
"""Smallest number of clients for which the worst and best tenth are reported."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a model on one test set.

    Attributes:
        value: Value of the metric, a fraction; None: the targets of the set do not define it.
        loss: Mean loss.
        num: Number of examples, or of tokens, that value and loss are means over.
        metric: Name of the metric.
        more: Values of further metrics, by name; those that the targets do not define are left out.
    """

    value: float | None
    loss: float
    num: int
    metric: str = "accuracy"
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of the global model, or of the personal models of all clients.

    Attributes:
        clients: Scores by client; clients with a common test set have the same score.
        domains: Scores by domain, over all examples of its test sets.
        held_out: Scores by domain, for domains without clients.
        others: Number of clients by domain that have the score of their domain and are not in `clients`.
        unseen: Scores by client, for clients that never train; no other score counts them.
        by_class: Numbers of right predictions, of predictions and of examples of each class, over the test
            sets of all domains with clients, shape (3, C); None: they were not counted.
        whole: Metrics over the examples of all these test sets together, by name (`Objective.over_set`).
        unseen_whole: The same of the clients that never train.
        in_all: Number of clients of the experiment that train, of which some may have no score; 0: not known.
    """

    clients: Mapping[str, Score]
    domains: Mapping[str, Score]
    held_out: Mapping[str, Score]
    others: Mapping[str, int] = field(default_factory=dict)
    unseen: Mapping[str, Score] = field(default_factory=dict)
    by_class: Numbers | None = None
    whole: Mapping[str, float] = field(default_factory=dict)
    unseen_whole: Mapping[str, float] = field(default_factory=dict)
    in_all: int = 0

    def by_client(self) -> list[tuple[Score, int]]:
        """The scores of all clients, each with the number of clients that have it."""
        of_others = [(self.domains[domain], count) for domain, count in self.others.items()]
        return [*((score, 1) for score in self.clients.values()), *of_others]


def evaluation(
    sets: Sequence[EvaluationSet], answers: Mapping[str, Update], goal: Objective = PLAIN, in_all: int = 0
) -> Evaluation:
    """Scores by client and domain.

    Args:
        sets: Test sets.
        answers: Answers to `rayfed.federation.client_tasks.evaluate`, by id of the test set. Sets without
            examples or without an answer are left out.
        goal: The task, with the metrics over the examples of several sets.
        in_all: Number of clients of the experiment that train.
    """
    clients: dict[str, Score] = {}
    domains: dict[str, list[tuple[Score, Update]]] = {}
    held_out: dict[str, Score] = {}
    others: dict[str, int] = {}
    unseen: dict[str, Score] = {}
    of_unseen: list[Update] = []
    for unit in sets:
        answer = answers.get(unit.id)
        if answer is None or "loss" not in answer.metrics:  # it has no examples
            continue
        score = score_of(answer.metrics, goal, answer.num_examples)
        clients.update(dict.fromkeys(unit.clients, score))
        unseen.update(dict.fromkeys(unit.unseen, score))
        of_unseen += [answer] if unit.unseen else []
        if unit.is_held_out:
            held_out[unit.domain] = score
        elif unit.clients or unit.others:
            domains.setdefault(unit.domain, []).append((score, answer))
        if unit.others:
            others[unit.domain] = unit.others
    every = [answer for own in domains.values() for _, answer in own]
    counts = [answer.scored[BY_CLASS].double().numpy() for answer in every if BY_CLASS in answer.scored]
    return Evaluation(
        clients=clients,
        domains={domain: _over_sets(own, goal) for domain, own in domains.items()},
        held_out=held_out,
        others=others,
        unseen=unseen,
        by_class=sum(counts[1:], counts[0]) if counts else None,
        whole=over_sets(every, goal),
        unseen_whole=over_sets(of_unseen, goal),
        in_all=in_all,
    )


def over_sets(answers: Sequence[Update], goal: Objective) -> dict[str, float]:
    """Metrics over the examples of several test sets together, by name, but for undefined ones.

    Args:
        answers: Answers with the outputs for the examples of each set, and their targets.
    """
    kept = [answer.scored for answer in answers if OUTPUT in answer.scored]
    if not goal.over_set or not kept:
        return {}
    output, y = (torch.cat([own[name] for own in kept]) for name in (OUTPUT, TARGET))
    return over_set(goal, output, y)


def _over_sets(own: Sequence[tuple[Score, Update]], goal: Objective) -> Score:
    """The score of the examples of a domain together."""
    pooled = pool([score for score, _ in own])
    if not goal.over_set or len(own) == 1:
        return pooled
    whole = over_sets([answer for _, answer in own], goal)
    value = whole.get(goal.metric) if goal.metric in goal.over_set else pooled.value
    more = {name: value for name, value in pooled.more.items() if name not in goal.over_set}
    more |= {name: value for name, value in whole.items() if name != goal.metric}
    return replace(pooled, value=value, more=more)


def score_of(metrics: Mapping[str, float], goal: Objective, num: int) -> Score:
    """The score in the metrics of an answer.

    Args:
        metrics: As of `rayfed.federation.client_tasks.score`, with a loss.
        num: Number of examples.
    """
    main = goal.metric
    more = {name: value for name, value in metrics.items() if name not in {main, "loss", NUM}}
    return Score(
        value=metrics.get(main),
        loss=metrics["loss"],
        num=int(metrics.get(NUM, num)),
        metric=main,
        more=more,
    )


def pool(scores: Sequence[Score]) -> Score:
    """The means over the examples of all scores together, of those in which a value is defined."""
    names = dict.fromkeys(name for s in scores for name in s.more)
    more = {name: _pooled([(s.more[name], s.num) for s in scores if name in s.more]) for name in names}
    return Score(
        value=_pooled([(s.value, s.num) for s in scores if s.value is not None]),
        loss=_pooled([(s.loss, s.num) for s in scores]) or 0.0,
        num=max(1, sum(s.num for s in scores)),
        metric=scores[0].metric,
        more={name: value for name, value in more.items() if value is not None},
    )


def _pooled(values: Sequence[tuple[float, int]]) -> float | None:
    """Mean of values by their numbers of examples; None: there is none."""
    num = max(1, sum(count for _, count in values))
    return sum(value * count for value, count in values) / num if values else None


def summary(scores: Evaluation) -> dict[str, float | str]:
    """Columns of a round's row of results.

    Returns:
        accuracy: unweighted mean over clients; accuracy_domain: unweighted mean over domains; sigma_client
        and sigma_type: population standard deviations over clients and over domains; worst_domain and
        worst_domain_accuracy: name and accuracy of the worst domain; worst_client_accuracy;
        worst_tenth_accuracy and best_tenth_accuracy: means over a tenth of the clients, for ten clients or
        more; loss: unweighted mean over clients; held_out_accuracy: unweighted mean over held-out domains;
        unseen_accuracy and unseen_worst_accuracy: unweighted mean and minimum over clients that never train.
        clients_scored: number of clients that these are statistics of; clients_in_all: number of clients that
        train; clients_defined: those of the first whose test examples define the metric, where it is not all.
        Further metrics of the task, each its unweighted mean over clients.
        For classes of texts macro_f1 and mcc, over the examples of all domains (`of_classes`).
        For language models perplexity: the exponential of the mean loss over the tokens of all domains.
        All accuracies and deviations are fractions. For a task with another metric, its name replaces
        `accuracy`. A metric over sets, such as auc, is that over the examples of all clients together, and
        auc_domain the mean of those over the examples of each domain; sigma_client, worst_client_auc and the
        tenths are of the clients' own values.
    """
    row: dict[str, float | str] = {}
    if by_client := scores.by_client():
        counts = np.array([count for _, count in by_client])
        losses = np.array([score.loss for score, _ in by_client])
        row |= {
            **_of_clients(scores),
            "loss": _mean(losses, counts),
            **_further(scores),
            **_perplexity(scores, by_client[0][0].metric),
            **({} if scores.by_class is None else of_classes(scores.by_class)),
            "clients_scored": int(counts.sum()),
            **({"clients_in_all": scores.in_all} if scores.in_all else {}),
        }
    if defined := [s for s in scores.held_out.values() if s.value is not None]:
        row[f"held_out_{defined[0].metric}"] = float(np.mean([s.value for s in defined]))
    if values := [s.value for s in scores.unseen.values() if s.value is not None]:
        metric = next(iter(scores.unseen.values())).metric
        row |= {
            f"unseen_{metric}": scores.unseen_whole.get(metric, float(np.mean(values))),
            f"unseen_worst_{metric}": worst_of(metric, values),
        }
    return row


def _of_clients(scores: Evaluation) -> dict[str, float | str]:
    """Statistics of the metric over the clients, and the domains, that define it; none where none does."""
    defined = [(score.value, count) for score, count in scores.by_client() if score.value is not None]
    domain = {name: s.value for name, s in scores.domains.items() if s.value is not None}
    metric = scores.by_client()[0][0].metric
    if not defined and metric not in scores.whole:
        return {}
    sign = 1.0 if is_larger_better(metric) else -1.0
    row: dict[str, float | str] = {}
    client, counts = (np.array(values) for values in zip(*(defined or [(0.0, 0)]), strict=True))
    mean = _mean(client, counts) if defined else math.nan
    row[metric] = scores.whole.get(metric, mean)
    if domain:
        worst = min(domain, key=lambda name: sign * domain[name])
        row |= {
            f"{metric}_domain": float(np.mean(list(domain.values()))),
            "sigma_type": float(np.std(list(domain.values()))),
        }
    if defined:
        row["sigma_client"] = float(np.sqrt(_mean((client - mean) ** 2, counts)))
    if domain:
        row |= {"worst_domain": worst, f"worst_domain_{metric}": domain[worst]}
    if defined:
        row |= {
            f"worst_client_{metric}": sign * float((sign * client).min()),
            **_tails(client, counts, metric),
        }
    if counts.sum() < sum(count for _, count in scores.by_client()):
        row["clients_defined"] = int(counts.sum())
    return row


def _further(scores: Evaluation) -> dict[str, float]:
    """Further metrics of a task: those of sets over all examples, others their means over clients."""
    by_client = scores.by_client()
    names = sorted({name for score, _ in by_client for name in score.more} | scores.whole.keys())
    row = {}
    for name in names:
        known = [(score.more[name], count) for score, count in by_client if name in score.more]
        if name in scores.whole and name != by_client[0][0].metric:
            row[name] = scores.whole[name]
        elif known:
            row[name] = _mean(*(np.array(values) for values in zip(*known, strict=True)))
    return row


def worst_of(metric: str, values: Sequence[float]) -> float:
    """The worst of some scores of a metric."""
    return min(values) if is_larger_better(metric) else max(values)


def _perplexity(scores: Evaluation, metric: str) -> dict[str, float]:
    """The exponential of the mean loss over all tokens of a language model; nothing for other tasks."""
    if metric != LanguageModeling.metric:
        return {}
    return {PERPLEXITY: perplexity(pool(list(scores.domains.values())).loss)}


def of_classes(counts: Numbers) -> dict[str, float]:
    """Macro F1 and Matthews' correlation coefficient of predictions.

    F1 of a class is 2 right / (predicted + true), and 0 where it is predicted for examples of other classes
    only; classes that are neither predicted nor true are left out of the mean, as scikit-learn does. The
    coefficient for several classes is that of Gorodkin, Comparing two K-category assignments by a
    K-category correlation coefficient, 2004; 0 where its denominator is.

    Args:
        counts: Numbers of right predictions, of predictions and of examples of each class, shape (3, C).

    >>> of_classes(np.array([[2.0, 0.0], [3.0, 0.0], [2.0, 1.0]]))
    {'macro_f1': 0.4, 'mcc': 0.0}
    """
    right, predicted, true = counts
    there = predicted + true > 0
    num = true.sum()
    spread_of = [num**2 - (each**2).sum() for each in (predicted, true)]
    below = math.sqrt(spread_of[0] * spread_of[1])
    above = num * right.sum() - (predicted * true).sum()
    f1 = 2 * right[there] / (predicted + true)[there]
    return {"macro_f1": float(f1.mean()), "mcc": float(above / below) if below else 0.0}


def perplexity(loss: float) -> float:
    """The exponential of a mean loss over tokens; infinite where it is too large for a number."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


def _mean(values: Numbers, counts: Counts) -> float:
    """Mean of values that occur these numbers of times."""
    return float((values * counts).sum() / counts.sum())


def _tails(values: Numbers, counts: Counts, metric: str) -> dict[str, float]:
    """Means of the worst and of the best tenth of values that occur these numbers of times."""
    if counts.sum() < MIN_CLIENTS_FOR_TENTHS:
        return {}
    order = np.argsort(values if is_larger_better(metric) else -values, kind="stable")
    ordered, of_each = values[order], counts[order]
    tail = tail_of(int(counts.sum()))
    lowest = np.diff(np.minimum(np.cumsum(of_each), tail), prepend=0)
    highest = np.diff(np.minimum(np.cumsum(of_each[::-1]), tail), prepend=0)[::-1]
    worst, best = (_mean(ordered[taken > 0], taken[taken > 0]) for taken in (lowest, highest))
    return {f"worst_tenth_{metric}": worst, f"best_tenth_{metric}": best}


def tail_of(clients: int, tenth: float = 0.1) -> int:
    """Number of clients in the worst and in the best tail."""
    return max(1, int(tenth * clients))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Distribution of accuracies over clients, in the unit of the accuracies (variance: in its square).

    Attributes:
        average: Unweighted mean over clients.
        worst, best: Means of the worst and of the best tenth of the clients.
        variance: Population variance.
    """

    average: float
    worst: float
    best: float
    variance: float


def spread(accuracies: Sequence[float], tenth: float = 0.1) -> Spread:
    """Statistics of q-FFL's tables (Li et al., ICLR 2020, Table 1).

    Args:
        accuracies: One per client.
        tenth: Share of the clients in the worst and in the best tail; a tail has at least one client.
    """
    ordered = np.sort(np.asarray(accuracies, dtype=np.float64))
    tail = tail_of(len(ordered), tenth)
    return Spread(
        average=float(ordered.mean()),
        worst=float(ordered[:tail].mean()),
        best=float(ordered[-tail:].mean()),
        variance=float(ordered.var()),
    )


def dice(predicted: Sequence[int], truth: Sequence[int], label: int = 1, smooth: float = 1e-5) -> float:
    """Dice score of one label in a segmentation: twice the overlap over the sum of both sizes.

    Args:
        predicted: Predicted label of each pixel.
        truth: True label of each pixel.
        label: The label to score; by default the foreground.
        smooth: Added to the denominator, as in the released GRACE code, so that the score of a label that
            occurs in neither is 0.
    """
    p = np.asarray(predicted) == label
    t = np.asarray(truth) == label
    return float(2 * (p & t).sum() / (p.sum() + t.sum() + smooth))


def of_deployed(answers: Iterable[Answer | Update], name: str) -> dict[str, Update]:
    """Answers of clients about the models that they would deploy, by client.

    Args:
        answers: Answers of clients in this round, of which later ones count.
        name: Beginning of the names of the wanted scores (`Client.deployed_on`).
    """
    found: dict[str, Update] = {}
    for answer in answers:
        metrics, scored = _named(answer.metrics, name), _named(answer.scored, name)
        if "loss" in metrics:
            num = int(metrics[NUM])
            found[answer.client] = Update(
                client=answer.client, num_examples=num, metrics=metrics, scored=scored
            )
    return found


def _named(values: Mapping[str, T], name: str) -> dict[str, T]:
    """Values whose names begin with `name/`, by the rest of the name."""
    start = f"{name}/"
    return {key[len(start) :]: value for key, value in values.items() if key.startswith(start)}


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round.

    Attributes:
        state: State of the server after the round.
        row: Its row in rounds.jsonl.
        ledger: Its traffic, metrics of clients and tables of the method.
        scores: Evaluations by model (`global`, `personal`); only of models that were scored.
        last: Whether the run ends after it.
    """

    state: ServerState
    row: dict[str, Any]
    ledger: Ledger
    scores: dict[str, Evaluation] = field(default_factory=dict)
    last: bool = False
