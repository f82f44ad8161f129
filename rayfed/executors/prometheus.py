"""Metrics of a run for Prometheus: the driver sets them after each round, each actor those of its memory.

Labels name the run, and for some metrics a split and a domain. They never name a client, so that the number
of time series does not grow with the number of clients. Ray puts `ray_` before every name and adds labels of
the process.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch
from ray.util import metrics as ray_metrics

from rayfed.columns import LOSS, MEAN, SIGMA_CLIENT, SIGMA_TYPE, VALIDATED, metric_of
from rayfed.evaluation.metrics import Evaluation, summary
from rayfed.federation.cohort import Ledger
from rayfed.federation.executor import CallTiming, Event

RUN = ("run", "algorithm", "trial")
SCORED = (*RUN, "split", "domain")
ALL = "all"
"""Value of the label `domain` for means over all clients."""

ROUND = {
    "rayfed_round": "Rounds that are finished",
    "rayfed_round_seconds": "Seconds of the last round",
    "rayfed_training_seconds": "Seconds of the last round without its evaluation",
    "rayfed_round_bytes_up": "Bytes from clients to the server in the last round",
    "rayfed_round_bytes_down": "Bytes from the server to clients in the last round",
    "rayfed_actors": "Client actors",
    "rayfed_idle_share": "Share of the last round in which client actors were idle",
    "rayfed_queue_share": "Share of the time of calls that was spent in queues and transfers",
    f"rayfed_{SIGMA_TYPE.pattern}": "Standard deviation of the score over domains, as a fraction",
    f"rayfed_{SIGMA_CLIENT.pattern}": "Standard deviation of the score over clients, as a fraction",
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
    "rayfed_weights_clipped": "Aggregation weights that a method clipped to [0, 1]",
    "rayfed_bytes_up": "Bytes from clients to the server",
    "rayfed_bytes_down": "Bytes from the server to clients",
}
"""Totals since the driver was started. They are gauges because Ray omits counters that are still zero."""

VISIT = "rayfed_visit_seconds"
VISIT_BUCKETS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]

MEMORY = {
    "rayfed_actor_rss_bytes": "Resident memory of a client actor, shared weights included",
    "rayfed_actor_uss_bytes": "Private memory of a client actor",
    "rayfed_actor_gpu_bytes": "Bytes that torch has allocated on the GPU of a client actor",
    "rayfed_actor_gpu_peak_bytes": "Largest number of bytes that torch has allocated there",
}
"""Gauges that every client actor sets."""

COLUMNS = {
    "round": "rayfed_round",
    "seconds": "rayfed_round_seconds",
    "seconds_training": "rayfed_training_seconds",
    "bytes_up": "rayfed_round_bytes_up",
    "bytes_down": "rayfed_round_bytes_down",
    **{column.pattern: f"rayfed_{column.pattern}" for column in (SIGMA_TYPE, SIGMA_CLIENT)},
    "cluster_accuracy": "rayfed_cluster_accuracy",
}
"""Columns of rounds.jsonl that are exported unchanged, and their metrics."""

WEIGHTED = ("aggregation", "fairness")
"""Tables of a round that hold the aggregation weights."""

MEMORY_PAUSE = 5.0  # seconds between two measurements of an actor's memory, which take milliseconds each
REPEAT_PAUSE = 1.0  # seconds; Ray drops a gauge that was not set for two of its reports


class Gauges:
    """Gauges whose last values are set again every second, so that Ray keeps them during long rounds."""

    def __init__(self, texts: Mapping[str, str], keys: tuple[str, ...], labels: Mapping[str, str]) -> None:
        """Args: texts: descriptions by name. keys: names of labels. labels: the constant labels."""
        self._gauges = {name: ray_metrics.Gauge(name, text, keys) for name, text in texts.items()}
        self._labels = dict(labels)
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        _repeated.add(self)
        if not _repeater.is_alive():
            with suppress(RuntimeError):  # another thread has just started it
                _repeater.start()

    def set(self, name: str, value: float, **tags: str) -> None:
        self._last[name, tuple(tags.items())] = value
        self._gauges[name].set(value, {**self._labels, **tags})

    def repeat(self) -> None:
        """Set every gauge to its last value again."""
        for (name, tags), value in list(self._last.items()):
            self._gauges[name].set(value, {**self._labels, **dict(tags)})


def _repeat() -> None:
    while True:
        time.sleep(REPEAT_PAUSE)
        _repeat_all()


def _repeat_all() -> None:
    # A separate function, because a loop's variable would keep its last gauges alive while it sleeps.
    for gauges in list(_repeated):
        gauges.repeat()


_repeated: weakref.WeakSet[Gauges] = weakref.WeakSet()
_repeater = threading.Thread(target=_repeat, name="rayfed-metrics", daemon=True)


class Metrics:
    """The driver's metrics of one run."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Args: labels: run, algorithm and trial."""
        self._round = Gauges(ROUND, RUN, labels)
        self._scores = Gauges(SCORES, SCORED, labels)
        self._counts = Gauges(COUNTS, RUN, labels)
        self._totals = dict.fromkeys(COUNTS, 0.0)
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
        visits: Sequence[CallTiming],
        actors: int,
    ) -> None:
        """Set the metrics of a finished round.

        Args:
            row: Its row in rounds.jsonl.
            ledger: Its traffic, missing clients and tables.
            scores: Evaluations by model.
            visits: Timings of its answered calls.
            actors: Number of client actors.
        """
        for column, name in COLUMNS.items():
            if row.get(column) is not None:  # None: the value was not finite
                self._round.set(name, row[column])
        for name, value in shares(visits, actors, row["seconds"]).items():
            self._round.set(name, value)
        self._round.set("rayfed_actors", actors)
        weights = [r["weight"] for t in WEIGHTED for r in ledger.tables.get(t, ()) if "weight" in r]
        if weights:
            self._round.set("rayfed_weight_min", min(weights))
            self._round.set("rayfed_weight_max", max(weights))
        for (split, domain), (value, loss) in (score_gauges(scores) | validation_scores(row)).items():
            self._scores.set("rayfed_score", value, split=split, domain=domain)
            self._scores.set("rayfed_loss", loss, split=split, domain=domain)
        self._add("rayfed_retries", 0)
        self._add("rayfed_weights_clipped", row.get("weights_clipped", 0))
        self._add("rayfed_dropped", len(ledger.missing))
        self._add("rayfed_bytes_up", row["bytes_up"])
        self._add("rayfed_bytes_down", row["bytes_down"])
        for visit in visits:
            self._visits.observe(visit.seconds)

    def _add(self, name: str, more: float) -> None:
        self._totals[name] += more
        self._counts.set(name, self._totals[name])


class Memory:
    """The memory of one client actor."""

    def __init__(self, labels: Mapping[str, str], device: str) -> None:
        self._gauges = Gauges(MEMORY, RUN, labels)
        self._process = psutil.Process()
        self._device = device
        self._measured = -MEMORY_PAUSE  # time of the last measurement

    def measure(self) -> None:
        """Measure it and set the gauges, unless that was done less than MEMORY_PAUSE seconds ago."""
        now = time.monotonic()
        if now - self._measured < MEMORY_PAUSE:
            return
        self._measured = now
        memory = self._process.memory_full_info()
        self._gauges.set("rayfed_actor_rss_bytes", memory.rss)
        self._gauges.set("rayfed_actor_uss_bytes", memory.uss)
        if self._device != "cpu":
            self._gauges.set("rayfed_actor_gpu_bytes", torch.cuda.memory_allocated(self._device))
            self._gauges.set("rayfed_actor_gpu_peak_bytes", torch.cuda.max_memory_allocated(self._device))


def labels_of(run: str, algorithm: str, trial: str = "none") -> dict[str, str]:
    """The labels that every metric of a run has; `run` is the name of its folder, or of the sweep's."""
    return {"run": run, "algorithm": algorithm, "trial": trial}


def shares(visits: Sequence[CallTiming], actors: int, seconds: float) -> dict[str, float]:
    """Share of the round in which actors were idle, and share of the time of calls that was waiting."""
    worked = sum(v.seconds for v in visits)
    waited = sum(v.waited for v in visits)
    return {
        "rayfed_idle_share": min(1.0, max(0.0, 1 - worked / (actors * seconds))) if actors * seconds else 0.0,
        "rayfed_queue_share": waited / (worked + waited) if worked + waited else 0.0,
    }


def score_gauges(scores: Mapping[str, Evaluation]) -> dict[tuple[str, str], tuple[float, float]]:
    """Score and loss by split (test, held_out, personal) and domain; `all` is the mean over clients."""
    gauges: dict[tuple[str, str], tuple[float, float]] = {}
    for model, one in scores.items():
        split = "test" if model == "global" else model
        for name, score in one.domains.items():
            gauges[split, name] = (_number(score.value), score.loss)
        if one.by_client():
            row = summary(one)
            metric = metric_of(row)
            value = math.nan if metric is None else float(row[metric])
            gauges[split, ALL] = (value, float(row["loss"]))
        for name, score in one.held_out.items():
            gauges["held_out", name] = (_number(score.value), score.loss)
    return gauges


def _number(value: float | None) -> float:
    """A score, or NaN where the examples do not define it."""
    return math.nan if value is None else value


def validation_scores(row: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """Score and loss on the validation splits, if the run computes them."""
    metric = metric_of(row, VALIDATED)
    if metric is None:
        return {}
    score, loss = (row[column.name(metric, VALIDATED)] for column in (MEAN, LOSS))
    return {} if None in (score, loss) else {("val", ALL): (score, loss)}  # None: it was not finite
