"""Statistics over clients and domains, computed from the scores of single test sets."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.client_facts import ClientTable
from rayfed.evaluation.test_sets import EvaluationSet
from rayfed.federation.client_tasks import BY_CLASS
from rayfed.federation.cohort import Answer, Ledger
from rayfed.objective import METRICS, NUM, LanguageModeling, is_larger_better, metric_of
from rayfed.types import ServerState, Update

PERPLEXITY = "perplexity"

Numbers: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

MIN_CLIENTS_FOR_TENTHS = 10
"""Smallest number of clients for which the worst and best tenth are reported."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a model on one test set.

    Attributes:
        value: Value of the metric, a fraction.
        loss: Mean loss.
        num: Number of examples, or of tokens, that value and loss are means over.
        metric: Name of the metric.
    """

    value: float
    loss: float
    num: int
    metric: str = "accuracy"


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
    """

    clients: Mapping[str, Score]
    domains: Mapping[str, Score]
    held_out: Mapping[str, Score]
    others: Mapping[str, int] = field(default_factory=dict)
    unseen: Mapping[str, Score] = field(default_factory=dict)
    by_class: Numbers | None = None

    def by_client(self) -> list[tuple[Score, int]]:
        """The scores of all clients, each with the number of clients that have it."""
        of_others = [(self.domains[domain], count) for domain, count in self.others.items()]
        return [*((score, 1) for score in self.clients.values()), *of_others]


def evaluation(sets: Sequence[EvaluationSet], answers: Mapping[str, Update]) -> Evaluation:
    """Scores by client and domain.

    Args:
        sets: Test sets.
        answers: Answers to `rayfed.federation.client_tasks.evaluate`, by id of the test set. Sets without
            examples or without an answer are left out.
    """
    clients: dict[str, Score] = {}
    domains: dict[str, list[Score]] = {}
    held_out: dict[str, Score] = {}
    others: dict[str, int] = {}
    unseen: dict[str, Score] = {}
    counts: list[Numbers] = []
    for unit in sets:
        answer = answers.get(unit.id)
        if answer is None or not answer.num_examples:
            continue
        if metric_of(answer.metrics) is None:  # the targets of the set do not define it
            continue
        score = _score(answer.metrics, int(answer.metrics.get(NUM, answer.num_examples)))
        clients.update(dict.fromkeys(unit.clients, score))
        unseen.update(dict.fromkeys(unit.unseen, score))
        if unit.is_held_out:
            held_out[unit.domain] = score
        elif unit.clients or unit.others:
            domains.setdefault(unit.domain, []).append(score)
            counts += [answer.extra[BY_CLASS].numpy()] if BY_CLASS in answer.extra else []
        if unit.others:
            others[unit.domain] = unit.others
    pooled = {domain: pool(scores) for domain, scores in domains.items()}
    whole = sum(counts[1:], counts[0]) if counts else None
    rest = {"others": others, "unseen": unseen, "by_class": whole}
    return Evaluation(clients=clients, domains=pooled, held_out=held_out, **rest)  # type: ignore[arg-type]


def _score(metrics: Mapping[str, float], num: int, prefix: str = "") -> Score:
    """The score in the metrics of an answer, whose names begin with the prefix."""
    metric = metric_of(metrics, prefix) or METRICS[0]
    return Score(value=metrics[prefix + metric], loss=metrics[prefix + "loss"], num=num, metric=metric)


def pool(scores: Sequence[Score]) -> Score:
    """The score on the examples of all scores together."""
    num = max(1, sum(s.num for s in scores))
    value = sum(s.value * s.num for s in scores) / num
    loss = sum(s.loss * s.num for s in scores) / num
    return Score(value=value, loss=loss, num=num, metric=scores[0].metric)


def summary(scores: Evaluation) -> dict[str, float | str]:
    """Columns of a round's row of results.

    Returns:
        accuracy: unweighted mean over clients; accuracy_domain: unweighted mean over domains; sigma_client
        and sigma_type: population standard deviations over clients and over domains; worst_domain and
        worst_domain_accuracy: name and accuracy of the worst domain; worst_client_accuracy;
        worst_tenth_accuracy and best_tenth_accuracy: means over a tenth of the clients, for ten clients or
        more; loss: unweighted mean over clients; held_out_accuracy: unweighted mean over held-out domains;
        unseen_accuracy and unseen_worst_accuracy: unweighted mean and minimum over clients that never train.
        For classes of texts macro_f1 and mcc, over the examples of all domains (`of_classes`).
        For language models perplexity: the exponential of the mean loss over the tokens of all domains.
        All accuracies and deviations are fractions. For a task with another metric, its name replaces
        `accuracy`.
    """
    row: dict[str, float | str] = {}
    if by_client := scores.by_client():
        client = np.array([score.value for score, _ in by_client])
        counts = np.array([count for _, count in by_client])
        losses = np.array([score.loss for score, _ in by_client])
        level = _mean(client, counts)
        domain = {name: s.value for name, s in scores.domains.items()}
        metric = by_client[0][0].metric
        sign = 1.0 if is_larger_better(metric) else -1.0
        worst = min(domain, key=lambda name: sign * domain[name])
        row |= {
            metric: level,
            f"{metric}_domain": float(np.mean(list(domain.values()))),
            "sigma_type": float(np.std(list(domain.values()))),
            "sigma_client": float(np.sqrt(_mean((client - level) ** 2, counts))),
            "worst_domain": worst,
            f"worst_domain_{metric}": domain[worst],
            f"worst_client_{metric}": sign * float((sign * client).min()),
            **_tails(client, counts, metric),
            "loss": _mean(losses, counts),
            **_perplexity(scores, metric),
            **({} if scores.by_class is None else of_classes(scores.by_class)),
        }
    if scores.held_out:
        metric = next(iter(scores.held_out.values())).metric
        row[f"held_out_{metric}"] = float(np.mean([s.value for s in scores.held_out.values()]))
    if scores.unseen:
        metric = next(iter(scores.unseen.values())).metric
        values = [s.value for s in scores.unseen.values()]
        row |= {
            f"unseen_{metric}": float(np.mean(values)),
            f"unseen_worst_{metric}": worst_of(metric, values),
        }
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


def personal(
    previous: Evaluation | None, answers: Sequence[Answer], clients: ClientTable
) -> Evaluation | None:
    """Scores of the clients' personal models: from this round's answers, else the last known ones.

    Args:
        previous: Scores up to the round before; None: there are none.
        answers: Metrics that clients returned in this round.
        clients: All clients, by id, in order.

    Returns:
        The scores; None where no client has scored a personal model yet.
    """
    known = dict(previous.clients) if previous else {}
    for answer in answers:
        own = answer.metrics
        if "personal/loss" in own and metric_of(own, "personal/"):
            known[answer.client] = _score(own, int(own["personal/num"]), "personal/")
    if not known:
        return None
    ordered = {cid: known[cid] for cid in clients.in_order(known)}
    groups: dict[str, list[Score]] = {}
    for cid, score in ordered.items():
        groups.setdefault(clients[cid].domain, []).append(score)
    return Evaluation(clients=ordered, domains={d: pool(s) for d, s in groups.items()}, held_out={})


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round.

    Attributes:
        state: State of the server after the round.
        row: Its row in rounds.jsonl.
        ledger: Its traffic, metrics of clients and tables of the method.
        scores: Evaluations by model (`global`, `personal`); only of models that were scored.
    """

    state: ServerState
    row: dict[str, Any]
    ledger: Ledger
    scores: dict[str, Evaluation] = field(default_factory=dict)


def holm(tests: Mapping[Any, float | None]) -> dict[Any, float | None]:
    """P of several tests, corrected by Holm (1979); one without p counts as a test that shows nothing.

    Where all differences with a corrected p below 0.05 are called real, the probability that one or more of
    them are chance is below 5 %, whatever the number of tests.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    found: dict[Any, float | None] = dict.fromkeys(tests)
    most = 0.0
    ranked = sorted((p, place, name) for place, (name, p) in enumerate(tests.items()) if p is not None)
    for place, (p, _, name) in enumerate(ranked):
        most = max(most, min(1.0, (len(tests) - place) * p))
        found[name] = most
    return found
