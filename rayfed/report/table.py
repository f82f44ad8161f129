"""The final table of a run, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """The last row that has accuracies."""
    return next((row for row in reversed(rows) if "accuracy" in row), {})


def final_table(folder: Path) -> Table:
    """Accuracy by domain of the models a method deploys, with the statistics over domains and clients."""
    import pyarrow.parquet as pq
    import yaml

    config = yaml.safe_load((folder / "config.yaml").read_text())
    history = read_rows(folder)
    row = last_evaluated(history)
    scores = pq.read_table(folder / "clients.parquet").to_pylist() if row else []
    now = [s for s in scores if s["round"] == row["round"] and s["metric"] == "accuracy"]
    counts = _counts(folder)
    models = [m for m in ("global", "personal") if any(s["model"] == m for s in now)]
    columns = ("domain", "clients", "train images", "test images", *(f"{m} accuracy %" for m in models))
    rows = []
    for kind, suffix in (("report_domains", ""), ("report_held_out", " (held out)")):
        found = [s for s in now if s["exchange"] == kind]
        for domain in dict.fromkeys(s["client"] for s in found):
            values = {s["model"]: s["value"] for s in found if s["client"] == domain}
            cells = (_percent(values[m]) if m in values else "" for m in models)
            rows.append((domain + suffix, *counts.get(domain, ("", "", "")), *cells))
    title = f"{config['algorithm']} on {config['data']['name']}, {config['model']['name']}, "
    title += f"{config['tuning']['name']}, seed {config['seed']}, round {row.get('round', 0)}"
    return Table(title, columns, tuple(rows), (*_notes(row), *_fault_notes(history)))


def _notes(row: dict[str, Any]) -> list[str]:
    notes = []
    for prefix, name in (("", ""), ("global_", "global model: "), ("personal_", "personal models: ")):
        if f"{prefix}accuracy" in row:
            cell = {k: _percent(row[prefix + k]) for k in STATISTICS}
            worst = f"worst domain {row[prefix + 'worst_domain']} {cell['worst_domain_accuracy']}"
            notes.append(
                f"{name}mean over clients {cell['accuracy']}, over domains {cell['accuracy_domain']}; "
                f"sigma_type {cell['sigma_type']}, sigma_client {cell['sigma_client']}; {worst}"
            )
    if "held_out_accuracy" in row:
        notes.append(f"mean over held-out domains {_percent(row['held_out_accuracy'])}")
    return notes


def _fault_notes(history: Sequence[dict[str, Any]]) -> list[str]:
    """How many clients were missing over the run, and how long it took on the virtual clock."""
    notes = []
    if any("missing" in row for row in history):
        missing, drawn = (sum(row.get(key, 0) for row in history) for key in ("missing", "clients"))
        notes.append(f"missing: {missing} client visits over the run, with {drawn} clients drawn")
    if history and "virtual_time" in history[-1]:
        notes.append(f"virtual time {history[-1]['virtual_time']:.1f} s")
    return notes


STATISTICS = ("accuracy", "accuracy_domain", "sigma_type", "sigma_client", "worst_domain_accuracy")


def _counts(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Clients, training and test images of each domain, from the manifest."""
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


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest])
