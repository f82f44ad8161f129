"""Statistics over clients and domains, computed from the scores of single test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfed.evaluation.test_sets import EvaluationSet
from rayfed.federation.cohort import Answer, ClientInfo
from rayfed.objective import METRICS, metric_of
from rayfed.types import Update

TEN = 10  # clients from which on a tenth is somebody


@dataclass(frozen=True, kw_only=True)
class Score:
    """The task's metric (a fraction) and mean loss on `num` examples."""

    value: float
    loss: float
    num: int
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of one model, or of every client's own model.

    Attributes:
        clients: By client; clients that share a test set share its score.
        domains: By domain, pooled over the examples of its test sets.
        held_out: By domain that no client owns.
    """

    clients: Mapping[str, Score]
    domains: Mapping[str, Score]
    held_out: Mapping[str, Score]


def evaluation(sets: Sequence[EvaluationSet], answers: Mapping[str, Update]) -> Evaluation:
    """Scores by client and domain from the answers of evaluation sets, by id.

    Sets that are empty or did not answer are left out.
    """
    clients: dict[str, Score] = {}
    domains: dict[str, list[Score]] = {}
    held_out: dict[str, Score] = {}
    for unit in sets:
        answer = answers.get(unit.id)
        if answer is None or not answer.num_examples:
            continue
        score = _score(answer.metrics, answer.num_examples)
        clients.update(dict.fromkeys(unit.clients, score))
        if unit.clients:
            domains.setdefault(unit.domain, []).append(score)
        else:
            held_out[unit.domain] = score
    pooled = {domain: pool(scores) for domain, scores in domains.items()}
    return Evaluation(clients=clients, domains=pooled, held_out=held_out)


def _score(metrics: Mapping[str, float], num: int, prefix: str = "") -> Score:
    """The score among a client's metrics, whose names begin with the prefix."""
    metric = metric_of(metrics, prefix) or METRICS[0]
    return Score(value=metrics[prefix + metric], loss=metrics[prefix + "loss"], num=num, metric=metric)


def pool(scores: Sequence[Score]) -> Score:
    """The score on all examples together."""
    num = sum(s.num for s in scores)
    value = sum(s.value * s.num for s in scores) / num
    loss = sum(s.loss * s.num for s in scores) / num
    return Score(value=value, loss=loss, num=num, metric=scores[0].metric)


def summary(scores: Evaluation) -> dict[str, float | str]:
    """The columns of a round.

    Returns:
        accuracy: unweighted mean over clients; accuracy_domain: unweighted mean over domains; sigma_client
        and sigma_type: population standard deviations over clients and over domains; worst_domain and
        worst_domain_accuracy; worst_client_accuracy; worst_tenth_accuracy and best_tenth_accuracy: with ten
        clients or more; loss: unweighted mean over clients; held_out_accuracy: mean over held-out domains.
        All accuracies and deviations are fractions. For a task with another metric its name takes the place
        of `accuracy`.
    """
    row: dict[str, float | str] = {}
    if scores.clients:
        client = np.array([s.value for s in scores.clients.values()])
        domain = {name: s.value for name, s in scores.domains.items()}
        metric = next(iter(scores.clients.values())).metric
        worst = min(domain, key=lambda name: domain[name])
        row |= {
            metric: float(client.mean()),
            f"{metric}_domain": float(np.mean(list(domain.values()))),
            "sigma_type": float(np.std(list(domain.values()))),
            "sigma_client": float(client.std()),
            "worst_domain": worst,
            f"worst_domain_{metric}": domain[worst],
            f"worst_client_{metric}": float(client.min()),
            **_tails(client, metric),
            "loss": float(np.mean([s.loss for s in scores.clients.values()])),
        }
    if scores.held_out:
        metric = next(iter(scores.held_out.values())).metric
        row[f"held_out_{metric}"] = float(np.mean([s.value for s in scores.held_out.values()]))
    return row


def _tails(values: npt.NDArray[np.float64], metric: str) -> dict[str, float]:
    if len(values) < TEN:
        return {}
    found = spread(values.tolist())
    return {f"worst_tenth_{metric}": found.worst, f"best_tenth_{metric}": found.best}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How evenly accuracies are spread over clients, in the unit of the accuracies (variance: its square).

    Attributes:
        average: Plain mean over clients.
        worst, best: Means of the worst and of the best tenth of the clients.
        variance: Population variance.
    """

    average: float
    worst: float
    best: float
    variance: float


def spread(accuracies: Sequence[float], tenth: float = 0.1) -> Spread:
    """Statistics of q-FFL's tables (Li et al., ICLR 2020, Table 1); a tenth is at least one client."""
    ordered = np.sort(np.asarray(accuracies, dtype=np.float64))
    tail = max(1, int(tenth * len(ordered)))
    return Spread(
        average=float(ordered.mean()),
        worst=float(ordered[:tail].mean()),
        best=float(ordered[-tail:].mean()),
        variance=float(ordered.var()),
    )


def dice(predicted: Sequence[int], truth: Sequence[int], label: int = 1, smooth: float = 1e-5) -> float:
    """Dice score of one label in a segmentation: twice the overlap over the sum of both sizes.

    Args:
        predicted: Label of each pixel.
        truth: The same, as it should be.
        label: Whose score; the foreground by default.
        smooth: Added to the denominator, as in GRACE's code, so that a label nobody has scores 0.
    """
    p, t = np.asarray(predicted) == label, np.asarray(truth) == label
    return float(2 * (p & t).sum() / (p.sum() + t.sum() + smooth))


def personal(
    previous: Evaluation | None, answers: Sequence[Answer], clients: Mapping[str, ClientInfo]
) -> Evaluation | None:
    """Scores of the clients' own models: those that answered now, the last known ones of the others.

    None where no client has ever scored a model of its own.
    """
    known = dict(previous.clients) if previous else {}
    for answer in answers:
        own = answer.metrics
        if "personal/loss" in own:
            known[answer.client] = _score(own, int(own["personal/num"]), "personal/")
    if not known:
        return None
    ordered = {cid: known[cid] for cid in clients if cid in known}
    groups: dict[str, list[Score]] = {}
    for cid, score in ordered.items():
        groups.setdefault(clients[cid].domain, []).append(score)
    return Evaluation(clients=ordered, domains={d: pool(s) for d, s in groups.items()}, held_out={})
