"""Losses, scores and global tensors that are NaN or infinite: where they are, and what to say about them.

Looked for once a round among numbers that the driver has anyway, never among batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayfed.evaluation.metrics import Evaluation
from rayfed.federation.cohort import Answer
from rayfed.federation.executor import Event
from rayfed.types import Params

KIND = "nonfinite"
COLUMN = "nonfinite"
"""Column of a round, only where there is something to say: how many numbers were not finite."""

MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A number that is not finite.

    Attributes:
        what: Which one, such as `start/loss` or `tensor head.weight`.
        exchange: In which exchange it came up; `server` for global tensors.
        client: Whose it is; empty for the server's.
    """

    what: str
    exchange: str
    client: str = ""


def find(
    answers: Sequence[Answer], scores: Mapping[str, Evaluation], params: Params, row: Mapping[str, Any]
) -> list[NonFinite]:
    """Everything of a round that is not finite.

    Args:
        answers: Metrics of the clients' answers.
        scores: Evaluations by model.
        params: Global tensors after the round.
        row: The row of the round, for what nothing else explains.
    """
    found = [*_of_answers(answers), *_of_scores(scores), *_of_tensors(params)]
    known = {each.client for each in found if each.exchange != "report"}
    # Scores of models of clients that trained came with their answers.
    nonfinite = [e for e in found if not (e.what.startswith("personal ") and e.client in known)]
    if not nonfinite:
        nonfinite = [NonFinite(what=key, exchange="round") for key, value in row.items() if _is_bad(value)]
    return nonfinite


def events(nonfinite: Iterable[NonFinite], round: int, action: str) -> Iterator[Event]:
    """A row of events.parquet for each. Args: round: from 0. action: nothing or raise."""
    for each in nonfinite:
        yield Event(
            kind=KIND,
            action=action,
            round=round,
            exchange=each.exchange,
            client=each.client,
            message=f"{each.what} is not finite",
        )


def sentence(nonfinite: Sequence[NonFinite]) -> str:
    """One-line summary of the values that are not finite, without advice."""
    mine, others = [e for e in nonfinite if e.client], [e for e in nonfinite if not e.client]
    clients = list(dict.fromkeys(each.client for each in mine))
    parts = []
    if clients:
        more = f" and {len(clients) - MOST_NAMED} more" if len(clients) > MOST_NAMED else ""
        parts.append(f"{_list(mine)} of {', '.join(clients[:MOST_NAMED])}{more}")
    if others:
        parts.append(_list(others))
    return f"not finite: {'; '.join(parts)}"


def _list(nonfinite: Sequence[NonFinite]) -> str:
    return ", ".join(list(dict.fromkeys(each.what for each in nonfinite))[:MOST_NAMED])


def _of_answers(answers: Sequence[Answer]) -> Iterator[NonFinite]:
    for answer in answers:
        for name, value in answer.metrics.items():
            if _is_bad(value):
                yield NonFinite(what=name, exchange=answer.exchange, client=answer.client)


def _of_scores(scores: Mapping[str, Evaluation]) -> Iterator[NonFinite]:
    for model, scores_of_set in scores.items():
        drawn = {domain: scores_of_set.domains[domain] for domain in scores_of_set.others}
        for where in (scores_of_set.clients, drawn, scores_of_set.held_out, scores_of_set.unseen):
            for name, score in where.items():
                for what, value in (("loss", score.loss), (score.metric, score.value)):
                    if _is_bad(value):  # None: the examples do not define it
                        yield NonFinite(what=f"{model} {what}", exchange="report", client=name)


def _of_tensors(params: Params) -> Iterator[NonFinite]:
    values = [v for v in params.values() if v.is_floating_point()]
    if values and not torch.isfinite(torch.nn.utils.get_total_norm(values, norm_type=float("inf"))):
        for name, value in params.items():
            if not torch.isfinite(value).all():
                yield NonFinite(what=f"tensor {name}", exchange="server")


def _is_bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
