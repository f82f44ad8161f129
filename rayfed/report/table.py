"""The final table of a run, read from its folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfed.evaluation.metrics import spread
from rayfed.evaluation.nonfinite import COLUMN
from rayfed.objective import METRICS, metric_of
from rayfed.record.history import History


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column is a name, the others are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [
            f"# {self.title}",
            "",
            _line(self.columns),
            _line(["---", *["---:"] * (len(self.columns) - 1)]),
        ]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes)]) + "\n"

    def text(self) -> str:
        widths = [max(len(r[i]) for r in (self.columns, *self.rows)) for i in range(len(self.columns))]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        body = [_aligned(row, widths) for row in self.rows]
        return "\n".join([self.title, rule, _aligned(self.columns, widths), rule, *body, rule, *self.notes])


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of result.json."""
    return [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]


def last_evaluated(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last row that has scores."""
    return next((row for row in reversed(rows) if metric_of(row)), {})


def final_table(folder: Path) -> Table:
    """Scores by domain of the models a method deploys, with the statistics over domains and clients.

    With `evaluation.table: clients`, instead a row for each model with statistics over clients.
    """
    import yaml

    config = yaml.safe_load((folder / "config.yaml").read_text())
    history = read_rows(folder)
    row = last_evaluated(history)
    metric = metric_of(row) or METRICS[0]
    now = [s for s in _scores(folder, row["round"]) if s["metric"] == metric] if row else []
    title = f"{config['algorithm']} on {config['data']['name']}, {config['model']['name']}, "
    title += f"{config['tuning']['name']}, seed {config['seed']}, round {row.get('round', 0)}"
    models = [m for m in MODELS if any(s["model"] == m for s in now)]
    if config["evaluation"].get("table") == "clients":
        table = client_table(title, config["algorithm"], metric, now, test_counts(folder))
        return replace(table, notes=(*_held_out_note(row), *_fault_notes(history)))
    what, counts, rows = _examples(folder), _counts(folder), []
    columns = ("domain", "clients", f"train {what}", f"test {what}", *(f"{m} {metric} %" for m in models))
    for kind, suffix in (("report_domains", ""), ("report_held_out", " (held out)")):
        found = [s for s in now if s["exchange"] == kind]
        for domain in dict.fromkeys(s["client"] for s in found):
            values = {s["model"]: s["value"] for s in found if s["client"] == domain}
            cells = (_percent(values[m]) if m in values else "" for m in models)
            rows.append((domain + suffix, *counts.get(domain, ("", "", "")), *cells))
    return Table(title, columns, tuple(rows), (*_notes(row), *_fault_notes(history)))


def _scores(folder: Path, round: int) -> list[dict[str, Any]]:
    """Rows of clients.parquet of one round; of a run that still goes on, from its history."""
    import pyarrow.parquet as pq

    file = folder / "clients.parquet"
    found = pq.read_table(file).to_pylist() if file.exists() else []
    now = [score for score in found if score["round"] == round]
    return now or (History(folder).read(round) or {"tables": {}})["tables"].get("clients", [])


def _notes(row: dict[str, Any]) -> list[str]:
    notes = []
    for prefix, name in (("", ""), ("global_", "global model: "), ("personal_", "personal models: ")):
        if metric := metric_of(row, prefix):
            statistics = (metric, f"{metric}_domain", "sigma_type", "sigma_client", f"worst_domain_{metric}")
            clients, domains, by_type, by_client, worst = (_percent(row[prefix + k]) for k in statistics)
            notes.append(
                f"{name}mean over clients {clients}, over domains {domains}; sigma_type {by_type}, "
                f"sigma_client {by_client}; worst domain {row[prefix + 'worst_domain']} {worst}"
            )
    return [*notes, *_held_out_note(row)]


def _fault_notes(history: Sequence[dict[str, Any]]) -> list[str]:
    """How many clients were missing over the run, and how long it took on the virtual clock."""
    notes = []
    if any("missing" in row for row in history):
        missing, drawn = (sum(row.get(key, 0) for row in history) for key in ("missing", "clients"))
        notes.append(f"missing: {missing} client visits over the run, with {drawn} clients drawn")
    if bad := [row["round"] for row in history if row.get(COLUMN)]:
        count = sum(row.get(COLUMN, 0) for row in history)
        which = f"round {bad[0]}" if len(bad) == 1 else f"{len(bad)} rounds, first {bad[0]}, last {bad[-1]}"
        notes.append(f"not finite: {count} losses, scores or tensors in {which} (events.parquet says whose)")
    if history and "virtual_time" in history[-1]:
        notes.append(f"virtual time {history[-1]['virtual_time']:.1f} s")
    return notes


def _held_out_note(row: dict[str, Any]) -> Iterator[str]:
    if metric := metric_of(row, "held_out_"):
        yield f"mean over held-out domains {_percent(row[f'held_out_{metric}'])}"


def client_table(
    title: str,
    algorithm: str,
    metric: str,
    scores: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
) -> Table:
    """The columns of FFT-GP's Table 10: how good and how equal clients are, one row for each model.

    Args:
        title: Heading.
        algorithm: Name of the rows.
        metric: What is averaged.
        scores: Rows of clients.parquet of one round and this metric.
        counts: Test examples by client.

    Returns:
        Average, mean of the worst and of the best tenth of the clients (the number rounded down, at least
        one), and population variance, all of percentages by client; then the mean over all test examples,
        which stays empty where clients share their test examples.
    """
    columns = (f"{metric} %", "clients", "average", "worst 10%", "best 10%", "variance", "over examples")
    rows = []
    for model in MODELS:
        own = {s["client"]: 100 * s["value"] for s in scores if _is_client(s, model)}
        if own:
            values, weights = sorted(own.values()), [counts.get(cid, 0) for cid in own]
            found = spread(values)
            numbers = [found.average, found.worst, found.best, found.variance]
            if sum(weights):
                numbers.append(sum(v * n for v, n in zip(own.values(), weights, strict=True)) / sum(weights))
            cells = [f"{number:.1f}" for number in numbers] + [""] * (len(columns) - 2 - len(numbers))
            rows.append((f"{algorithm}, {model}", str(len(own)), *cells))
    return Table(title, columns, tuple(rows))


def _is_client(score: Mapping[str, Any], model: str) -> bool:
    return score["exchange"] == "report_clients" and score["model"] == model and score["value"] is not None


MODELS = ("global", "personal")


def test_counts(folder: Path) -> dict[str, int]:
    """Test examples of each client that has its own, from the manifest."""
    import pyarrow.parquet as pq

    manifest = pq.read_table(folder / "partition.parquet", columns=["client", "split"]).to_pylist()
    return dict(Counter(row["client"] for row in manifest if row["split"] == "test"))


def _examples(folder: Path) -> str:
    """What examples are called."""
    path = folder / "environment.json"
    return str(json.loads(path.read_text()).get("examples", "images")) if path.exists() else "images"


def _counts(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Clients, training and test examples of each domain, from the manifest."""
    import pyarrow.parquet as pq

    manifest = pq.read_table(folder / "partition.parquet", columns=["domain", "client", "split"]).to_pylist()
    counts: dict[str, tuple[set[str], list[int]]] = {}
    for row in manifest:
        clients, images = counts.setdefault(row["domain"], (set(), [0, 0]))
        if row["client"]:
            clients.add(row["client"])
        images[0] += row["split"] in ("train", "val")
        images[1] += row["split"] in ("test", "held_out")
    return {d: (str(len(c) or ""), str(n[0]), str(n[1])) for d, (c, n) in counts.items()}


def _percent(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{100 * value:.1f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest])
