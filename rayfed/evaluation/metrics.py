"""Statistics over clients and domains, computed from the scores of single test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayfed.cohort import Answer, ClientInfo
from rayfed.evaluation.protocol import EvaluationSet
from rayfed.types import Update


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy (a fraction) and mean loss on `num` examples."""

    accuracy: float
    loss: float
    num: int


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
        score = Score(
            accuracy=answer.metrics["accuracy"], loss=answer.metrics["loss"], num=answer.num_examples
        )
        clients.update(dict.fromkeys(unit.clients, score))
        if unit.clients:
            domains.setdefault(unit.domain, []).append(score)
        else:
            held_out[unit.domain] = score
    pooled = {domain: pool(scores) for domain, scores in domains.items()}
    return Evaluation(clients=clients, domains=pooled, held_out=held_out)


def pool(scores: Sequence[Score]) -> Score:
    """The score on all examples together."""
    num = sum(s.num for s in scores)
    accuracy = sum(s.accuracy * s.num for s in scores) / num
    return Score(accuracy=accuracy, loss=sum(s.loss * s.num for s in scores) / num, num=num)


def summary(scores: Evaluation) -> dict[str, float | str]:
    """The columns of a round.

    Returns:
        accuracy: unweighted mean over clients; accuracy_domain: unweighted mean over domains; sigma_client
            and
        sigma_type: population standard deviations over clients and over domains; worst_domain and its
            accuracy;
        worst_client_accuracy; loss: unweighted mean over clients; held_out_accuracy: mean over held-out
        domains. All accuracies and deviations are fractions.
    """
    row: dict[str, float | str] = {}
    if scores.clients:
        client = np.array([s.accuracy for s in scores.clients.values()])
        domain = {name: s.accuracy for name, s in scores.domains.items()}
        worst = min(domain, key=lambda name: domain[name])
        row |= {
            "accuracy": float(client.mean()),
            "accuracy_domain": float(np.mean(list(domain.values()))),
            "sigma_type": float(np.std(list(domain.values()))),
            "sigma_client": float(client.std()),
            "worst_domain": worst,
            "worst_domain_accuracy": domain[worst],
            "worst_client_accuracy": float(client.min()),
            "loss": float(np.mean([s.loss for s in scores.clients.values()])),
        }
    if scores.held_out:
        row["held_out_accuracy"] = float(np.mean([s.accuracy for s in scores.held_out.values()]))
    return row


def personal(
    previous: Evaluation | None, answers: Sequence[Answer], clients: Mapping[str, ClientInfo]
) -> Evaluation | None:
    """Scores of the clients' own models: those that answered now, the last known ones of the others.

    None where no client has ever scored a model of its own.
    """
    known = dict(previous.clients) if previous else {}
    for answer in answers:
        own = answer.metrics
        if "personal/accuracy" in own:
            known[answer.client] = Score(
                accuracy=own["personal/accuracy"], loss=own["personal/loss"], num=int(own["personal/num"])
            )
    if not known:
        return None
    ordered = {cid: known[cid] for cid in clients if cid in known}
    groups: dict[str, list[Score]] = {}
    for cid, score in ordered.items():
        groups.setdefault(clients[cid].domain, []).append(score)
    return Evaluation(clients=ordered, domains={d: pool(s) for d, s in groups.items()}, held_out={})
