"""The summary of one run: its scores, its cost, and which rules gave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rayfed.report.page.parts import Column, Kind, Section, Text, Tiles, in_bytes, in_time
from rayfed.report.page.run import PageRun
from rayfed.report.privacy import privacy_notes
from rayfed.report.run_tables import own_tensors
from rayfed.report.table import fault_notes, selection_notes, total_cost, total_steps

HEADLINES: Mapping[str, tuple[str, Kind]] = {
    "{}": ("mean over clients, %", "percent"),
    "{}_domain": ("mean over domains, %", "percent"),
    "worst_domain_{}": ("worst domain: {}, %", "percent"),
    "worst_tenth_{}": ("worst tenth of the clients, %", "percent"),
    "sigma_type": ("sigma_type, deviation over domains, points", "points"),
    "sigma_client": ("sigma_client, deviation over clients, points", "points"),
}
"""Columns of a round, the first `{}` being the metric, with their words, `{}` being the worst domain."""


def summary(run: PageRun) -> Section:
    """The numbers that matter most, and notes on the run."""
    return Section("Summary", [Tiles(title="Result", pairs=[*_pairs(run)]), Text(sentences=_rules(run))])


def _pairs(run: PageRun) -> Iterator[tuple[str, str]]:
    for key, (words, kind) in HEADLINES.items():
        if (value := run.number(key)) is not None:
            yield words.format(run.row.get(f"{run.prefix}worst_domain")), Column("", kind).show(value)
    for words, value in run.unseen.items():
        yield f"{words}, %", Column("", "percent").show(value)
    if run.held_out_score is not None:
        name = ", ".join(run.tables.held_out)
        yield f"held-out domain: {name}, %", Column("", "percent").show(run.held_out_score)
    yield "rounds", f"{len(run.rounds)} of {run.planned}"
    if run.clients:
        yield "clients", f"{len(run.clients):,}"
    for key, words in (("bytes_up", "sent by clients"), ("bytes_down", "received by clients")):
        yield words, in_bytes(sum(row.get(key) or 0 for row in run.rounds))
    yield from _training(run)
    yield "time", in_time(sum(row.get("seconds") or 0.0 for row in run.rounds))


def _training(run: PageRun) -> Iterator[tuple[str, str]]:
    """What training cost, where it was counted."""
    steps, rows = total_steps(run.rounds)
    if steps:
        yield "local steps of all clients", f"{steps:,}, on {rows:,} examples"
    gflops, trained = total_cost(run.rounds)
    if trained:
        yield "training of all clients, GFLOP", Column("", "number").show(gflops)
        yield "parameters that a client trains", Column("", "count").show(trained)


def _rules(run: PageRun) -> list[str]:
    """Which round is reported, and what happened on the way."""
    if not run.row:
        return ["No round was evaluated yet."]
    rule = f"the {run.ties} with the best validation score" if run.by_validation else "the last evaluated one"
    whose = "the clients' own models" if run.deployed == "personal" else "the global model"
    found = [f"Reported is the {run.metric} of {whose} after round {run.row['round']}, {rule}."]
    found += [f"{note}." for note in own_tensors([run.config])]
    others = () if run.by_validation else selection_notes(run.rounds)
    found += [f"Other rules: {note.partition('; ')[2]}." for note in others]
    notes = (*privacy_notes(run.config, run.rounds), *fault_notes(run.rounds))
    found += [note[0].upper() + note[1:] + "." for note in notes]
    if len(run.rounds) < run.planned:
        found.append(f"The run is not finished: {len(run.rounds)} of {run.planned} rounds.")
    if run.digest:
        found.append(f"SHA-256 digest of the final tensors: {run.digest}.")
    return found
