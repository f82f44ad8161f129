"""What Prometheus can know of a run. The driver tells after every round, every actor about its own memory.

Labels are of the run, and of a split and a domain where a metric has them; never of a client, so that a
thousand clients make no more time series than ten. Ray puts `ray_` before every name and adds the process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from ray.util import metrics as ray_metrics

from rayfed.cohort import Ledger, Visit
from rayfed.evaluation.metrics import Evaluation
from rayfed.failures import Event

RUN = ("run", "algorithm", "trial")
SCORED = (*RUN, "split", "domain")
ALL = "all"
"""Domain of a mean over clients."""

ROUND = {
    "rayfed_round": "Rounds that are finished",
    "rayfed_round_seconds": "Seconds of the last round",
    "rayfed_training_seconds": "Seconds of the last round without its evaluation",
    "rayfed_round_bytes_up": "Bytes from clients to the server in the last round",
    "rayfed_round_bytes_down": "Bytes from the server to clients in the last round",
    "rayfed_actors": "Client actors",
    "rayfed_idle_share": "Share of the last round in which client actors played nobody",
    "rayfed_queue_share": "Share of the time of calls that they spent in queues and on the wire",
    "rayfed_sigma_type": "Standard deviation of the score over domains, as a fraction",
    "rayfed_sigma_client": "Standard deviation of the score over clients, as a fraction",
    "rayfed_cluster_accuracy": "Share of clients in a cluster of their own domain",
    "rayfed_weight_min": "Smallest aggregation weight of the last round",
    "rayfed_weight_max": "Largest aggregation weight of the last round",
}
"""Gauges that the driver sets."""

SCORES = {
    "rayfed_score": "Accuracy, or the task's other metric, as a fraction",
    "rayfed_loss": "Mean loss",
}
"""Gauges by split and domain."""

COUNTS = {
    "rayfed_dropped": "Clients that were called in a round and left out of it",
    "rayfed_retries": "Calls that were repeated after a failure",
    "rayfed_bytes_up": "Bytes from clients to the server",
    "rayfed_bytes_down": "Bytes from the server to clients",
}
"""Totals since the driver was started. Gauges, because Ray shows no counter that was never raised."""

VISIT = "rayfed_visit_seconds"
VISIT_BUCKETS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]

MEMORY = {
    "rayfed_actor_rss_bytes": "Resident memory of a client actor, shared weights included",
    "rayfed_actor_uss_bytes": "Memory that a client actor has to itself",
    "rayfed_actor_gpu_bytes": "Bytes that torch has allocated on the GPU of a client actor",
    "rayfed_actor_gpu_peak_bytes": "Most bytes that torch ever had allocated there",
}
"""Gauges that every client actor sets."""

COLUMNS = {
    "round": "rayfed_round",
    "seconds": "rayfed_round_seconds",
    "seconds_training": "rayfed_training_seconds",
    "bytes_up": "rayfed_round_bytes_up",
    "bytes_down": "rayfed_round_bytes_down",
    "sigma_type": "rayfed_sigma_type",
    "sigma_client": "rayfed_sigma_client",
    "cluster_accuracy": "rayfed_cluster_accuracy",
}
"""Columns of result.json that are metrics as they are."""

WEIGHTED = ("aggregation", "fairness")
"""Tables of a round that hold the weights of its mean."""

MEMORY_PAUSE = 5.0  # seconds between two looks at an actor's memory, which cost milliseconds each


class Metrics:
    """The driver's metrics of one run."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Args: labels: run, algorithm and trial."""
        self._round = gauges(ROUND, RUN, labels)
        self._scores = gauges(SCORES, SCORED, labels)
        self._counts, self._totals = gauges(COUNTS, RUN, labels), dict.fromkeys(COUNTS, 0.0)
        self._visits = ray_metrics.Histogram(
            VISIT, "Seconds of a client's work in a call", VISIT_BUCKETS, RUN
        )
        self._visits.set_default_tags(dict(labels))

    def event(self, event: Event) -> None:
        """Count a failure."""
        if event.action == "retry":
            self._add("rayfed_retries", 1)

    def round(
        self,
        row: Mapping[str, Any],
        ledger: Ledger,
        scores: Mapping[str, Evaluation],
        visits: Sequence[Visit],
        actors: int,
    ) -> None:
        """Tell about a finished round.

        Args:
            row: Its line in result.json.
            ledger: What happened in it.
            scores: Evaluation by model.
            visits: Its answered calls.
            actors: How many client actors there are.
        """
        for column, name in COLUMNS.items():
            if column in row:
                self._round[name].set(row[column])
        for name, value in shares(visits, actors, row["seconds"]).items():
            self._round[name].set(value)
        self._round["rayfed_actors"].set(actors)
        weights = [r["weight"] for t in WEIGHTED for r in ledger.tables.get(t, ()) if "weight" in r]
        if weights:
            self._round["rayfed_weight_min"].set(min(weights))
            self._round["rayfed_weight_max"].set(max(weights))
        for (split, domain), (value, loss) in scored(scores).items():
            tags = {"split": split, "domain": domain}
            self._scores["rayfed_score"].set(value, tags)
            self._scores["rayfed_loss"].set(loss, tags)
        self._add("rayfed_retries", 0)
        self._add("rayfed_dropped", len(ledger.missing))
        self._add("rayfed_bytes_up", row["bytes_up"])
        self._add("rayfed_bytes_down", row["bytes_down"])
        for visit in visits:
            self._visits.observe(visit.seconds)

    def _add(self, name: str, more: float) -> None:
        self._totals[name] += more
        self._counts[name].set(self._totals[name])


class Memory:
    """The memory of one client actor."""

    def __init__(self, labels: Mapping[str, str], device: str) -> None:
        self._gauges, self._process = gauges(MEMORY, RUN, labels), psutil.Process()
        self._device, self._looked = device, -MEMORY_PAUSE

    def look(self) -> None:
        """Tell how much it is, now and then."""
        now = time.monotonic()
        if now - self._looked < MEMORY_PAUSE:
            return
        self._looked, found = now, self._process.memory_full_info()
        self._gauges["rayfed_actor_rss_bytes"].set(found.rss)
        self._gauges["rayfed_actor_uss_bytes"].set(found.uss)
        if self._device != "cpu":
            self._gauges["rayfed_actor_gpu_bytes"].set(torch.cuda.memory_allocated(self._device))
            self._gauges["rayfed_actor_gpu_peak_bytes"].set(torch.cuda.max_memory_allocated(self._device))


def gauges(texts: Mapping[str, str], keys: tuple[str, ...], labels: Mapping[str, str]) -> dict[str, Any]:
    """A gauge of each name, with the labels that never change."""
    return {
        name: ray_metrics.Gauge(name, t, keys).set_default_tags(dict(labels)) for name, t in texts.items()
    }


def shares(visits: Sequence[Visit], actors: int, seconds: float) -> dict[str, float]:
    """How much of a round the actors were idle, and how much of their time calls were waiting."""
    worked, waited = sum(v.seconds for v in visits), sum(v.waited for v in visits)
    return {
        "rayfed_idle_share": min(1.0, max(0.0, 1 - worked / (actors * seconds))) if actors * seconds else 0.0,
        "rayfed_queue_share": waited / (worked + waited) if worked + waited else 0.0,
    }


def scored(scores: Mapping[str, Evaluation]) -> dict[tuple[str, str], tuple[float, float]]:
    """Score and loss by split (test, held_out, personal) and domain; `all` is the mean over clients."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for model, one in scores.items():
        split = "test" if model == "global" else model
        for name, score in one.domains.items():
            found[split, name] = (score.value, score.loss)
        if one.clients:
            everybody = one.clients.values()
            value, loss = sum(s.value for s in everybody), sum(s.loss for s in everybody)
            found[split, ALL] = (value / len(everybody), loss / len(everybody))
        for name, score in one.held_out.items():
            found["held_out", name] = (score.value, score.loss)
    return found
