"""The table of all methods of a comparison: a row for each method, its scores in the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    Unit,
    level_words,
    metric_of,
    share_of,
    work_in,
)
from rayfed.config.variants import differing_values, trained_otherwise
from rayfed.record.recorded_run import MODELS, RecordedRun
from rayfed.report.final_table import (
    KINDS,
    LAST_ROUND,
    adapter_note,
    cell_without,
    cut_notes,
    end_notes,
    fault_notes,
    final_scores,
    final_table,
    head_notes,
    own_tensors,
    percent,
    privacy_notes,
    sample_note,
    some_clients,
    total_cost,
    total_steps,
    unevaluated_note,
)
from rayfed.report.work_notes import equal_notes
from rayfed.terminal.table_formats import Table

MOST_DOMAINS = 8
"""Largest number of domains that have a column each; the tables of the methods' own reports have them all."""

STATISTICS = (MEAN, OVER_DOMAINS, WORST_DOMAIN, SIGMA_TYPE, SIGMA_CLIENT)
"""Statistics of a round's row that have a column."""

TOKENS = "tokens"
COST = ("local steps", "on examples", TOKENS, "up + down, MB", "training, GFLOP", "trained parameters")
"""Cost of all rounds: training batches of all clients, examples and tokens in them, bytes in both directions,
operations of all clients, and what a client trains."""

HELD_OUT = "report_held_out"


def table_of_methods(runs: Sequence[RecordedRun], equal: Unit | None = None) -> Table:
    """Scores of several runs after their last scored rounds, one row for each method and kind of model.

    With `evaluation.table: clients`, the rows are those of the runs' own tables, one below the other.

    Args:
        runs: The runs; those whose folder does not exist are left out.
        equal: What the methods were to have as much of; None: nothing.
    """
    runs = [run for run in runs if run.config]
    configs = [run.config for run in runs]
    config = configs[0]
    title = f"{', '.join(run.method for run in runs)} on {runs[0].data}, "
    title += f"{config['model']['name']}, {config['tuning']['name']}, seed {runs[0].seed}"
    scored = [run for run in runs if run.reported]
    sample = sample_note(config, next((own for run in scored if (own := _scores(run))), ()))
    trained = {each["algorithm"]: (each["tuning"]["name"], each["train"]["optimizer"]) for each in configs}
    tunings = trained_otherwise(trained)
    notes = (
        *sample,
        *filter(None, (tunings, differing_values({each["algorithm"]: each for each in configs}))),
        *cut_notes(runs),
        *head_notes(runs, "" if any(run.best for run in runs) else LAST_ROUND),
        *own_tensors(configs),
    )
    notes = (*notes, *(f"{run.method}: {note}" for run in runs for note in _notes(run)))
    if config["evaluation"].get("table") == "clients":
        tables = [final_table(run) for run in runs]
        return replace(
            tables[0], title=title, rows=[row for table in tables for row in table.rows], notes=notes
        )
    domains = list(dict.fromkeys(key for run in runs for key in _domains(run)))
    domains = domains if len(domains) <= MOST_DOMAINS else []
    shown = tuple(KINDS) if any(run.without_at(run.reported) for run in runs) else ()
    rows = tuple(row for run in runs for row in _rows(run, domains, shown))
    names = (name + (" (held out)" if exchange == HELD_OUT else "") for exchange, name in domains)
    metric = scored[0].metric if scored else ACCURACY
    examples = next((run.environment["examples"] for run in runs if "examples" in run.environment), "images")
    unit = " in percent" if share_of(metric) != 1 else ""
    notes = (f"{metric} on the test {examples}{unit}, after the last scored round", *notes)
    again = (KINDS[kind] for kind in shown)
    statistics = (level_words(metric) if column is MEAN else column.words for column in STATISTICS)
    columns = ("method", "round", *names, *statistics, *again, *COST)
    place = columns.index(TOKENS)
    if not any(row[place] for row in rows if len(row) > place):
        columns, *rest = (tuple(each[:place] + each[place + 1 :]) for each in (columns, *rows))
        rows = tuple(rest)
    work = equal_notes([{run.method: [run.rounds] for run in runs}], equal) if equal else ()
    return Table(title, columns, rows, (*notes, *_of_some(scored), *work, *_adapters(scored)))


def _of_some(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Notes on methods whose scores are not those of all clients."""
    for run in runs:
        if some := some_clients(run.reported):
            yield f"{run.method}: scored are {some}"


def _adapters(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Notes on what one seed resolves, and on what the adapters add to the score.

    Methods are compared by the models that they deploy; what adapters add was measured on the global ones.
    """
    if len(runs) > 1:
        yield "one seed: no difference between methods can be told from chance; several seeds make a study"
    whole, bare = [], []
    for run in runs:
        _, score = final_scores(run.reported)
        without = run.without.get("adapters")
        if score is not None and without is not None:
            whole.append(100 * score)
            bare.append(100 * without)
    if len(whole) > 1:
        yield adapter_note(whole, bare)


def _scores(run: RecordedRun) -> list[Mapping[str, Any]]:
    """Rows of the table `clients` of the reported round, which has one, with the metric of the run."""
    return [s for s in run.scores_at(run.reported["round"]) if s["metric"] == run.metric]


def _notes(run: RecordedRun) -> Iterator[str]:
    """Notes on rounds that are left, on missing clients, and on values that are not finite."""
    yield from end_notes(run)
    if not run.has_all_rounds:
        yield f"{len(run.rounds)} of {run.planned} rounds are finished"
    if not run.reported:
        yield from unevaluated_note(run.config, len(run.rounds))
    yield from privacy_notes(run.config, run.rounds)
    yield from fault_notes(run.rounds)
    yield from frozen_notes(run.config)


def frozen_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """A note on methods whose messages contain frozen blocks."""
    cache = config.get("server", {}).get("frozen_cache")
    if cache not in (None, "preinstalled"):
        yield f"bytes include the frozen blocks that clients download (server.frozen_cache={cache})"


def _cost(history: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    gflops, trained = total_cost(history)
    sent = (BYTES_UP.total(history) + BYTES_DOWN.total(history)) / 1e6
    counts = (*total_steps(history), int(work_in("tokens", history)))
    steps = (f"{number:,}" if number else "" for number in counts)
    return *steps, f"{sent:,.1f}", *((f"{gflops:,.1f}", f"{trained:,}") if trained else ("", ""))


def _domains(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Exchange and name of every scored domain, those that clients own first."""
    for exchange in ("report_domains", HELD_OUT):
        for score in _scores(run) if run.reported else ():
            if score["exchange"] == exchange:
                yield exchange, score["client"]


def _rows(
    run: RecordedRun, domains: Sequence[tuple[str, str]], shown: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    row, scores = run.reported, _scores(run) if run.reported else []
    scored = {score["model"] for score in scores}
    for model in [model for model in MODELS if model in scored] or MODELS[:1]:
        mine = [score for score in scores if score["model"] == model]
        values = {(score["exchange"], score["client"]): score["value"] for score in mine}
        cells = [percent(values[key]) if key in values else "" for key in domains]
        prefix = f"{model}_" if metric_of(row, f"{model}_") else ""  # none: the model that is deployed
        keys = [column.name(run.metric, prefix) for column in STATISTICS]
        cells += [percent(row[key]) if key in row else "" for key in keys]
        worst = 2 + len(domains) + STATISTICS.index(WORST_DOMAIN)
        label = f"{run.method}, {model} models" if model == "personal" else run.method
        if model == "global" and prefix:
            label = f"{run.method}, global model"
        full = [label, str(row.get("round", "")), *cells]
        if name := row.get(WORST_NAME.name(of=prefix)):
            full[worst] = f"{name} {full[worst]}"
        without = {} if model == "personal" else run.without_at(row) or {}
        yield (*full, *(cell_without(without, kind) for kind in shown), *_cost(run.rounds))
