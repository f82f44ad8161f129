"""The table of all methods of a comparison: a row for each method, its scores in the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfed.columns import (
    ACCURACY,
    BYTES_DOWN,
    BYTES_UP,
    MEAN,
    OVER_DOMAINS,
    SIGMA_CLIENT,
    SIGMA_TYPE,
    WORST_DOMAIN,
    WORST_NAME,
    level_words,
    metric_of,
    share_of,
)
from rayfed.config.variants import differing_values, trained_otherwise
from rayfed.report.final_table import (
    KINDS,
    MODELS,
    RunTables,
    cell_without,
    cut_notes,
    fault_notes,
    final_scores,
    final_table,
    head_notes,
    last_evaluated,
    own_tensors,
    percent,
    privacy_notes,
    sample_note,
    scores_of,
    scores_without,
    some_clients,
    told_apart,
    total_cost,
    total_steps,
    unevaluated_note,
)
from rayfed.terminal.table_formats import Table

MOST_DOMAINS = 8
"""Largest number of domains that have a column each; the tables of the methods' own reports have them all."""

STATISTICS = (MEAN, OVER_DOMAINS, WORST_DOMAIN, SIGMA_TYPE, SIGMA_CLIENT)
"""Statistics of a round's row that have a column."""

COST = ("local steps", "on examples", "up + down, MB", "training, GFLOP", "trained parameters")
"""Cost of all rounds: training batches of all clients and examples in them, bytes in both directions,
operations of all clients, and what a client trains."""

HELD_OUT = "report_held_out"


@dataclass(frozen=True)
class _Scored:
    """One method: its run, and its last scored round.

    Attributes:
        name: The method.
        rounds: Finished rounds, and planned ones.
        row: Row of the last scored round; empty where no round was scored.
        metric: Name of the metric.
        scores: Rows of `clients.parquet` of that round with this metric.
        notes: Notes on missing clients and on values that are not finite.
        cost: Values of the columns `COST`, as text.
        without: Scores with tensors put back, by kind (`rayfed.report.final_table.scores_without`).
    """

    name: str
    rounds: tuple[int, int]
    row: Mapping[str, Any]
    metric: str
    scores: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    cost: tuple[str, ...]
    without: Mapping[str, Mapping[str, Any]] | None


def table_of_methods(folders: Sequence[Path]) -> Table:
    """Scores of several runs after their last scored rounds, one row for each method and kind of model.

    With `evaluation.table: clients`, the rows are those of the runs' own tables, one below the other.

    Args:
        folders: Folders of the runs; those that do not exist are left out.
    """
    folders = [folder for folder in folders if (folder / "config.yaml").exists()]
    runs = [RunTables(folder) for folder in folders]
    configs = [run.config for run in runs]
    config = configs[0]
    found = [_read(folder) for folder in folders]
    title = f"{', '.join(method.name for method in found)} on {config['data']['name']}, "
    title += f"{config['model']['name']}, {config['tuning']['name']}, seed {config['seed']}"
    sample = sample_note(config, next((method.scores for method in found if method.scores), ()))
    trained = {each["algorithm"]: (each["tuning"]["name"], each["train"]["optimizer"]) for each in configs}
    tunings = trained_otherwise(trained)
    notes = (
        *sample,
        *filter(None, (tunings, differing_values({each["algorithm"]: each for each in configs}))),
        *cut_notes(runs),
        *head_notes(runs),
        *own_tensors(configs),
    )
    notes = (*notes, *(f"{method.name}: {note}" for method in found for note in method.notes))
    if config["evaluation"].get("table") == "clients":
        tables = [final_table(folder) for folder in folders]
        return replace(
            tables[0], title=title, rows=[row for table in tables for row in table.rows], notes=notes
        )
    domains = list(dict.fromkeys(key for method in found for key in _domains(method)))
    domains = domains if len(domains) <= MOST_DOMAINS else []
    shown = tuple(KINDS) if any(method.without for method in found) else ()
    rows = tuple(row for method in found for row in _rows(method, domains, shown))
    names = (name + (" (held out)" if exchange == HELD_OUT else "") for exchange, name in domains)
    metric = next((method.metric for method in found if method.row), ACCURACY)
    examples = next((run.environment["examples"] for run in runs if "examples" in run.environment), "images")
    unit = " in percent" if share_of(metric) != 1 else ""
    notes = (f"{metric} on the test {examples}{unit}, after the last scored round", *notes)
    again = (KINDS[kind] for kind in shown)
    statistics = (level_words(metric) if column is MEAN else column.words for column in STATISTICS)
    columns = ("method", "round", *names, *statistics, *again, *COST)
    return Table(title, columns, rows, (*notes, *_of_some(found), *_alike(found)))


def _of_some(found: Sequence[_Scored]) -> Iterator[str]:
    """Notes on methods whose scores are not those of all clients."""
    for method in found:
        if method.row and (some := some_clients(method.row)):
            yield f"{method.name}: scored are {some}"


def _alike(found: Sequence[_Scored]) -> Iterator[str]:
    """A note where the methods differ by no more than what the adapters add to the score.

    Methods are compared by the models that they deploy; what adapters add was measured on the global ones.
    """
    scores, gains = [], []
    for method in found:
        deployed, score = final_scores(method.row)
        without = (method.without or {}).get("adapters", {}).get("domains")
        if deployed is not None and score is not None and without is not None:
            scores.append(100 * deployed)
            gains.append(100 * (score - without))
    if len(scores) < 2:
        return
    apart, why = told_apart(scores, gains)
    if not apart:
        yield (
            f"this setting cannot tell the methods apart: {why} (mean over domains less without_adapters, "
            f"mean over the methods)"
        )


def _read(folder: Path) -> _Scored:
    run = RunTables(folder)
    config = run.config
    history = run.rounds
    row = last_evaluated(history)
    metric = metric_of(row) or ACCURACY
    scores = scores_of(folder, row["round"]) if row else []
    rounds = (history[-1]["round"] if history else 0, config["rounds"])
    notes = [*privacy_notes(config, history), *fault_notes(history), *frozen_notes(config)]
    notes = notes if row else [*unevaluated_note(config, len(history)), *notes]
    if rounds[0] < rounds[1]:
        notes = [f"{rounds[0]} of {rounds[1]} rounds are finished", *notes]
    return _Scored(
        name=config["algorithm"],
        rounds=rounds,
        row=row,
        metric=metric,
        scores=[score for score in scores if score["metric"] == metric],
        notes=notes,
        cost=_cost(history),
        without=scores_without(folder, row),
    )


def frozen_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """A note on methods whose messages contain frozen blocks."""
    cache = config.get("server", {}).get("frozen_cache")
    if cache not in (None, "preinstalled"):
        yield f"bytes include the frozen blocks that clients download (server.frozen_cache={cache})"


def _cost(history: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    gflops, trained = total_cost(history)
    sent = (BYTES_UP.total(history) + BYTES_DOWN.total(history)) / 1e6
    steps = (f"{number:,}" if number else "" for number in total_steps(history))
    return *steps, f"{sent:,.1f}", *((f"{gflops:,.1f}", f"{trained:,}") if trained else ("", ""))


def _domains(method: _Scored) -> Iterator[tuple[str, str]]:
    """Exchange and name of every scored domain, those that clients own first."""
    for exchange in ("report_domains", HELD_OUT):
        for score in method.scores:
            if score["exchange"] == exchange:
                yield exchange, score["client"]


def _rows(
    method: _Scored, domains: Sequence[tuple[str, str]], shown: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    row = method.row
    scored = {score["model"] for score in method.scores}
    for model in [model for model in MODELS if model in scored] or MODELS[:1]:
        mine = [score for score in method.scores if score["model"] == model]
        values = {(score["exchange"], score["client"]): score["value"] for score in mine}
        cells = [percent(values[key]) if key in values else "" for key in domains]
        prefix = f"{model}_" if metric_of(row, f"{model}_") else ""  # none: the model that is deployed
        keys = [column.name(method.metric, prefix) for column in STATISTICS]
        cells += [percent(row[key]) if key in row else "" for key in keys]
        worst = 2 + len(domains) + STATISTICS.index(WORST_DOMAIN)
        label = f"{method.name}, {model} models" if model == "personal" else method.name
        if model == "global" and prefix:
            label = f"{method.name}, global model"
        full = [label, str(row.get("round", "")), *cells]
        if name := row.get(WORST_NAME.name(of=prefix)):
            full[worst] = f"{name} {full[worst]}"
        without = {} if model == "personal" else method.without or {}
        yield (*full, *(cell_without(without, kind) for kind in shown), *method.cost)
