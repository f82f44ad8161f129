"""The final table of a run, and the notes below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import correlation, fmean, stdev
from typing import Any

from rayfed.columns import (
    ACCURACY,
    DEPLOYED,
    FLOPS,
    GLOBAL,
    HELD_OUT,
    LOCAL_EXAMPLES,
    LOCAL_STEPS,
    MEAN,
    OVER_DOMAINS,
    PERSONAL,
    POOLED,
    SIGMA_CLIENT,
    SIGMA_TYPE,
    UNSEEN,
    WORST_DOMAIN,
    WORST_NAME,
    is_larger_better,
    is_pooled,
    level_words,
    metric_of,
    share_of,
)
from rayfed.evaluation.metrics import PERPLEXITY, perplexity, spread
from rayfed.evaluation.nonfinite import COLUMN
from rayfed.evaluation.stopping import column_in
from rayfed.federation.privacy_accountant import AUTO_DELTA
from rayfed.objective import LanguageModeling
from rayfed.record.recorded_run import MODELS, NO_CLIENT, NOBODY, RecordedRun
from rayfed.terminal.table_formats import Table

KINDS = {"adapters": "without_adapters", "head": "without_head"}
"""Kinds of trained tensors that are put back after the last round, with the columns of the scores."""


def final_scores(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Mean over domains of the deployed models and of the global one in a row's round; None: no score."""
    metric = metric_of(row) or ACCURACY
    deployed = row.get(OVER_DOMAINS.name(metric))
    return deployed, row.get(OVER_DOMAINS.name(metric, GLOBAL), deployed)


def adapter_note(whole: Sequence[float], bare: Sequence[float], half_width: float | None = None) -> str:
    """A note on whether a setting tests the adapters at all, from the models with and without them.

    What adapters add to all methods says nothing of the differences between these: the note compares the gain
    with the differences that can be seen, and the differences with adapters to those without.

    Args:
        whole: Score of each method, in percent.
        bare: The score of each with its adapters at their start values, in percent.
        half_width: Least difference that the seeds resolve, in points; None: that is not known.
    """
    gains = [score - without for score, without in zip(whole, bare, strict=True)]
    gain = fmean(gains)
    deviation = f" ± {stdev(gains):.1f}" if len(gains) > 1 else ""
    said = f"the adapters add {gain:.1f}{deviation} points (mean and deviation over the rows)"
    if half_width is None:
        seen = ""
    elif abs(gain) < half_width:
        seen = f", less than the {half_width:.1f} that can be seen: this setting does not test the adapters"
    else:
        seen = f", at least the {half_width:.1f} that can be seen: the adapters take part"
    if len(gains) < 2:
        return said + seen
    ranges = [max(scores) - min(scores) for scores in (whole, bare)]
    apart = f"; the rows differ by up to {ranges[0]:.1f} points, without adapters by up to {ranges[1]:.1f}"
    alike = ""
    if len(gains) > 2 and min(ranges) > 1e-9:
        alike = f" (correlation {correlation(whole, bare):+.2f})"
    return said + seen + apart + alike


def own_tensors(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note on methods whose clients keep tensors (`local.stays`); none where there is no such method.

    Args:
        configs: The configs of the runs of a table.
    """
    keeping = dict.fromkeys(str(own["algorithm"]) for own in configs if own.get("local", {}).get("stays"))
    what = "clients are scored with the tensors that stay at them, all else with initial values of these"
    return (f"{', '.join(keeping)}: {what}",) if keeping else ()


def reporting_rule(run: RecordedRun) -> str:
    """The rule of the reported round of a run, such as `the last evaluated one`."""
    if run.by_validation:
        return f"the {run.ties} with the best validation score"
    if run.best:
        column = column_in(run.best, str(run.best_by))
        return f"the {run.ties} with the best {column}, whose model is the final one"
    return "the last evaluated one"


def end_notes(run: RecordedRun) -> Iterator[str]:
    """Notes on a run whose reported round is not the last one, or that a rule ended before its last round."""
    if run.best and not run.by_validation:
        yield f"reported: round {run.best['round']}, {reporting_rule(run)} (checkpoint.best)"
    if run.ended.reason:
        yield f"the run ended after round {run.ended.round} of {run.planned}: {run.ended.reason}"


LAST_ROUND = "scored: the last evaluated round"
"""The rule of the reported round in tables that select none by validation."""


def head_notes(
    runs: Iterable[RecordedRun], rule: str = LAST_ROUND, names: Mapping[Path, str] | None = None
) -> tuple[str, ...]:
    """A note on the heads of the models of a table, and on the round and the split that it reports.

    Args:
        runs: The runs of the table.
        rule: The rule of the reported round; empty: another note says it.
        names: What a run is called, by its folder; None: by its algorithm.
    """
    methods: dict[str, dict[str, None]] = {}
    splits: dict[str, None] = {}
    for run in runs:
        if head := run.environment.get("head"):
            name = run.method if names is None else names[run.path]
            methods.setdefault(head, {})[name] = None
        if split := run.environment.get("test_split"):
            splits[split] = None
    heads_text = next(iter(methods)) if len(methods) == 1 else ""
    heads_text = heads_text or "; ".join(f"{head} with {', '.join(names)}" for head, names in methods.items())
    split = f"the test split is the split {', '.join(splits)} of the data set" if splits else ""
    parts = [f"head: {heads_text}" if heads_text else "", rule, split]
    note = "; ".join(part for part in parts if part)
    return (note,) if heads_text else ()


def cut_notes(runs: Iterable[RecordedRun]) -> tuple[str, ...]:
    """Notes on texts that were too long for the models of a table; none where all are whole."""
    return tuple(dict.fromkeys(found for run in runs if (found := run.environment.get("texts_cut"))))


def span(numbers: Sequence[int]) -> str:
    """Words for the rounds from the first to the last of these."""
    first, last = min(numbers), max(numbers)
    return f"round {first}" if first == last else f"rounds {first} to {last}"


WHERE = {
    "server": "noise added by the server to the mean",
    "client": "of one that takes part in every round; noise added by each client to its own answer",
}
"""Where the noise was added, by `privacy.noise_at`."""


def privacy_notes(config: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note on the guarantee after the last finished round; nothing where no noise was added.

    Args:
        config: The config of the run.
        history: Its rows by round.
    """
    if not history or (epsilon := history[-1].get("epsilon")) is None:
        return
    section = config["privacy"]
    delta = history[-1]["delta"]
    auto = (
        f" (privacy.delta=auto: {AUTO_DELTA[section['noise_at']]})" if section.get("delta") == "auto" else ""
    )
    at = f"at delta {delta:.3g}{auto} after round {history[-1]['round']}"
    yield (
        f"differential privacy of clients: epsilon {epsilon:.3g} {at}; "
        f"{WHERE[section['noise_at']]}; counted by {section['accountant']}; of this run alone, "
        f"and only towards those who do not know its seed: the noise is drawn from it"
    )


DOMAINS = {"report_domains": "", "report_held_out": " (held out)"}
"""Words after the name of a domain in a table, by the exchange in which it was scored."""


def _class_notes(row: Mapping[str, Any]) -> Iterator[str]:
    """A note on scores over all test texts that are no means over examples, where there are any."""
    for prefix, name in ((DEPLOYED, ""), (GLOBAL, "global model: ")):
        if row.get(f"{prefix}macro_f1") is not None:
            f1, mcc = row[f"{prefix}macro_f1"], row[f"{prefix}mcc"]
            yield f"{name}over all test texts: macro F1 {percent(f1)} %, MCC {mcc:.3f}"


def _losses(run: RecordedRun) -> dict[tuple[str, str], float | None]:
    """Mean loss by model and domain in the reported round."""
    return {
        (s["model"], s["client"]): s["value"]
        for s in run.scores_at(run.reported["round"])
        if s["metric"] == "loss" and s["exchange"] in DOMAINS
    }


def _perplexity_of(loss: float | None) -> str:
    return "" if loss is None else f"{perplexity(loss):.1f}"


def final_table(run: RecordedRun) -> Table:
    """Scores of the global and personal models by domain, with statistics over domains and clients as notes.

    With `evaluation.table: clients`, the table has one row per model with statistics over clients instead.
    """
    config, history, row, metric = run.config, run.rounds, run.reported, run.metric
    now = [s for s in run.scores_at(row["round"]) if s["metric"] == metric] if row else []
    title = f"{run.method} on {run.data}, {config['model']['name']}, "
    title += f"{config['tuning']['name']}, seed {run.seed}, "
    title += f"round {row['round']}" if row else "not evaluated"
    models = [m for m in MODELS if any(s["model"] == m for s in now)]
    by_clients = config["evaluation"].get("table") == "clients"
    ends = (*end_notes(run),)
    others = () if by_clients or run.best else (*selection_notes(history),)
    about = (
        *cut_notes([run]),
        *ends,
        *head_notes([run], "" if others or run.best else LAST_ROUND),  # they say which round is reported
        *own_tensors([config]),
        *notes_without(run),
        *cost_notes(history),
    )
    about = about if row else (*unevaluated_note(config, len(history)), *about)
    after = (*about, *privacy_notes(config, history), *fault_notes(history))
    if by_clients:
        held = run.partition_rows("client", "split")
        tests = Counter(row["client"] for row in held if row["split"] == "test")
        table = client_table(title, run.method, metric, now, tests, run.drawn_clients)
        return replace(table, notes=(*sample_note(config, now), *_unseen_notes(row), *after))
    without = run.without_at(row) or {}
    shown = [kind for kind in KINDS if without]
    what = run.examples
    counts = _counts(run)
    rows = []
    columns = (
        "domain",
        "clients",
        f"train {what}",
        f"test {what}",
        *(f"{m} {metric}{unit_of(metric)}" for m in models),
    )
    columns += tuple(KINDS[kind] for kind in shown)
    losses = _losses(run) if metric == LanguageModeling.metric and row else {}
    columns += tuple(f"{m} {PERPLEXITY}" for m in models if losses)
    for kind, suffix in DOMAINS.items():
        of_kind = [s for s in now if s["exchange"] == kind]
        for domain in dict.fromkeys(s["client"] for s in of_kind):
            values = {s["model"]: s["value"] for s in of_kind if s["client"] == domain}
            cells = (percent(values[m], metric) if m in values else "" for m in models)
            again = (cell_without(without, kind, domain, metric) for kind in shown)
            writes = (_perplexity_of(losses.get((m, domain))) for m in models if losses)
            rows.append((domain + suffix, *counts.get(domain, ("", "", "")), *cells, *again, *writes))
    notes = (*_notes(row), *_class_notes(row), *sample_note(config, now), *others, *after)
    return Table(title, columns, tuple(rows), notes)


def cell_without(
    without: Mapping[str, Mapping[str, Any]], kind: str, domain: str | None = None, metric: str = ACCURACY
) -> str:
    """Score of the final model without the tensors of a kind, as text; empty where there is none.

    Args:
        without: The scores by kind, of `RecordedRun.without_at`.
        kind: The kind.
        domain: A domain; None: the mean over domains.
        metric: The metric of the scores.
    """
    found = without.get(kind, {})
    scores = {None: found.get("domains"), **found.get("by_domain", {})}
    return percent(scores[domain], metric) if kind in without and domain in scores else ""


def notes_without(run: RecordedRun) -> Iterator[str]:
    """A note on the scores of the final model with some trained tensors put back to their start values."""
    without, metric = run.without_at(run.reported), run.metric
    if without:
        means = (f"{KINDS[kind]} {percent(found['domains'], metric)}" for kind, found in without.items())
        yield f"global model with tensors at their start values, mean over domains: {', '.join(means)}"
    elif without is not None:
        yield "without_adapters, without_head: empty, because the whole network is what is trained"


def unevaluated_note(config: Mapping[str, Any], finished: int) -> Iterator[str]:
    """A note that nothing was evaluated, and what to set so that it is.

    Args:
        config: The config of the run.
        finished: Number of finished rounds.
    """
    every = config["evaluation"].get("every", 1)
    what = f"evaluation.every={every}"
    if every and finished < config["rounds"]:
        what += f", and {finished} of {config['rounds']} rounds are finished"
    yield (
        f"nothing was evaluated ({what}): run again with evaluation.every=1, which scores the model after "
        f"every round"
    )


def _notes(row: dict[str, Any]) -> list[str]:
    notes = []
    if row.get("clients_scored") and not metric_of(row):
        notes.append(f"the metric is defined by the test examples of none of {row['clients_scored']} clients")
    whose = {DEPLOYED: "", GLOBAL: "global model: ", PERSONAL: "personal models: "}
    for prefix, name in whose.items():
        if metric := metric_of(row, prefix):
            worst = row.get(WORST_NAME.name(of=prefix))
            parts = {
                f"{level_in_words(row, metric, prefix)} ": MEAN,
                ", over domains ": OVER_DOMAINS,
                f"; {SIGMA_TYPE.words} ": SIGMA_TYPE,
                f", {SIGMA_CLIENT.words}{_defined_in_words(row, prefix)} ": SIGMA_CLIENT,
                f"; {WORST_DOMAIN.words} {worst} ": WORST_DOMAIN,
            }
            values = {words: row.get(column.name(metric, prefix)) for words, column in parts.items()}
            shown = (words + percent(value, metric) for words, value in values.items() if value is not None)
            notes.append(name + "".join(shown))
    return [*notes, *_unseen_notes(row)]


def level_in_words(row: Mapping[str, Any], metric: str, prefix: str = "") -> str:
    """Words for the score of a round, such as `mean over clients`, or `mean over 40 of 200 clients`.

    Args:
        row: Row of the round.
        metric: The metric of the score.
        prefix: Beginning of the names of the columns: of the deployed model, or `global_` or `personal_`.
    """
    words = level_words(metric)
    some = some_clients(row, prefix)
    if not some:
        return words
    return f"{POOLED} of {some}" if is_pooled(metric) else f"mean over {some}"


def some_clients(row: Mapping[str, Any], prefix: str = "") -> str:
    """Of how many clients a score is, such as `40 of 200 clients`; empty: of all of them."""
    scored, in_all = row.get(f"{prefix}clients_scored"), row.get(f"{prefix}clients_in_all")
    return f"{scored} of {in_all} clients" if scored and in_all and scored < in_all else ""


def _defined_in_words(row: Mapping[str, Any], prefix: str) -> str:
    """Number of clients that define the metric, in brackets; empty: all that were scored."""
    defined = row.get(f"{prefix}clients_defined")
    return "" if defined is None else f" ({defined} of {row[f'{prefix}clients_scored']} clients)"


LAST = 5
"""Evaluated rounds at the end of a run over which scores are averaged, as many as FedGCR's code scores."""

BEST_OF = 4
"""The same for FedRA, whose code evaluates the last four rounds and does not say which one it reports."""


def selection_notes(history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Notes on the reported round, and on what other rules would report; nothing for a short run."""
    scored = [row for row in history if metric_of(row)][-LAST:]
    metric = metric_of(scored[-1]) or ACCURACY if scored else ACCURACY
    key = OVER_DOMAINS.name(metric)
    values = [(row["round"], row[key]) for row in scored if row.get(key) is not None]
    if len(values) < LAST:
        return
    last = [value for _, value in values]
    sign = 1 if is_larger_better(metric) else -1
    best, place = max((sign * value, -number) for number, value in values[-BEST_OF:])
    best *= sign
    yield (
        f"reported: the last evaluated round; its mean over domains, averaged over the last {LAST} as in "
        f"FedGCR's code {percent(fmean(last), metric)}, over the last {BEST_OF} as in FedRA's "
        f"{percent(fmean(last[-BEST_OF:]), metric)}; the best of these {BEST_OF} {percent(best, metric)} "
        "(round "
        f"{-place})"
    )


def sample_note(config: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note where models were scored on the test sets of some clients only.

    Args:
        config: The config of the run.
        scores: Rows of clients.parquet of one round and one metric. They are of all clients, whatever
            `evaluation.clients` says, where the clients of a domain share its test images.
    """
    wanted = config["evaluation"].get("clients", "all")
    scored = sum(s["exchange"] == "report_clients" and s["model"] == "global" for s in scores)
    if wanted != "all" and 0 < scored <= wanted:
        yield f"models scored on {scored} clients (evaluation.clients), the same for all methods"


def total_cost(history: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Cost of training in these rounds: operations in GFLOP, and the numbers that a client trains.

    Both are 0 where nothing trained, and for runs that did not count them.
    """
    return FLOPS.total(history) / 1e9, max((row.get("trained_params") or 0 for row in history), default=0)


def total_steps(history: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Training batches of all clients in these rounds, and examples in them; 0 where nothing trained."""
    return int(LOCAL_STEPS.total(history)), int(LOCAL_EXAMPLES.total(history))


def cost_notes(history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Notes on what training cost; nothing where it was not counted."""
    steps, rows = total_steps(history)
    if steps:
        yield f"trained: {steps:,} local steps of all clients, on {rows:,} examples{_tokens(history)}"
    gflops, trained = total_cost(history)
    if trained:
        yield f"training: {gflops:,.1f} GFLOP of all clients; a client trains up to {trained:,} parameters"


def _tokens(history: Sequence[Mapping[str, Any]]) -> str:
    """Tokens of the training batches of texts, and how many each second of training; empty for other data."""
    tokens = sum(row.get("local_tokens") or 0 for row in history)
    seconds = sum(row.get("seconds_training") or 0 for row in history)
    learned = sum(row.get("local_learned") or 0 for row in history)
    speed = f", {tokens / seconds:,.0f} a second" if seconds else ""
    taught = f" ({learned:,} of them learned)" if learned else ""
    return f" with {tokens:,} tokens{taught}{speed}" if tokens else ""


def fault_notes(history: Sequence[dict[str, Any]]) -> list[str]:
    """Notes on missing clients over the run and on virtual time, where there are any."""
    notes = []
    if any("missing" in row for row in history):
        missing, drawn = (sum(row.get(key, 0) for row in history) for key in ("missing", "clients"))
        silent = missing >= drawn and not total_cost(history)[0]
        nobody = "; no client answered in any round, so nothing was trained" if silent else ""
        notes.append(f"missing: {missing} client visits over the run, with {drawn} clients drawn{nobody}")
    if bad := [row["round"] for row in history if row.get(COLUMN)]:
        count = sum(row.get(COLUMN, 0) for row in history)
        which = f"round {bad[0]}" if len(bad) == 1 else f"{len(bad)} rounds, first {bad[0]}, last {bad[-1]}"
        notes.append(f"not finite: {count} losses, scores or tensors in {which} (events.parquet says whose)")
    if history and "virtual_time" in history[-1]:
        notes.append(f"virtual time {history[-1]['virtual_time']:.1f} s")
    return notes


def _unseen_notes(row: dict[str, Any]) -> Iterator[str]:
    for prefix, what in ((HELD_OUT, "held-out domains"), (UNSEEN, "unseen clients")):
        if metric := metric_of(row, prefix):
            yield f"mean over {what} {percent(row[prefix + metric], metric)}"


def client_table(
    title: str,
    algorithm: str,
    metric: str,
    scores: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
    drawn: Mapping[str, int] = NOBODY,
) -> Table:
    """Table with the columns of FFT-GP's Table 10, level and spread of the clients' scores, by model.

    Args:
        title: Title of the table.
        algorithm: Algorithm, for the names of the rows.
        scores: Rows of clients.parquet of one round and this metric.
        counts: Test examples by client.
        drawn: Number of clients of a virtual population by domain, which have the score of their domain.

    Returns:
        Average, mean of the worst and of the best tenth of the clients (the number rounded down, at least
        one), and population variance, all of percentages by client; then the mean over all test examples,
        which stays empty where clients share their test examples.
    """
    columns = (
        f"{metric}{unit_of(metric)}",
        "clients",
        "average",
        "worst 10%",
        "best 10%",
        "variance",
        "over examples",
    )
    rows = []
    for model in MODELS:
        own = {s["client"]: share_of(metric) * s["value"] for s in scores if _is_client(s, model)}
        domains = {
            s["client"]: share_of(metric) * s["value"]
            for s in scores
            if _is_score(s, "report_domains", model)
        }
        if own := own or of_drawn(domains, drawn):
            weights = [counts.get(cid, 0) for cid in own]
            level = spread(sorted(own.values()))
            ends = (level.worst, level.best) if is_larger_better(metric) else (level.best, level.worst)
            numbers = [level.average, *ends, level.variance]
            if sum(weights):
                numbers.append(sum(v * n for v, n in zip(own.values(), weights, strict=True)) / sum(weights))
            cells = [in_words(number, metric) for number in numbers] + [""] * (
                len(columns) - 2 - len(numbers)
            )
            rows.append((f"{algorithm}, {model}", str(len(own)), *cells))
    return Table(title, columns, tuple(rows))


def of_drawn(domains: Mapping[str, float], drawn: Mapping[str, int]) -> dict[str, float]:
    """Domain scores of a virtual population, one pseudo-client for each domain."""
    return {f"{name} {i}": value for name, value in domains.items() for i in range(drawn.get(name, 0))}


def _is_client(score: Mapping[str, Any], model: str) -> bool:
    return _is_score(score, "report_clients", model)


def _is_score(score: Mapping[str, Any], exchange: str, model: str) -> bool:
    return score["exchange"] == exchange and score["model"] == model and score["value"] is not None


def _counts(run: RecordedRun) -> dict[str, tuple[str, str, str]]:
    """Numbers of clients, training and test examples of each domain, as text, from the partition."""
    counts: dict[str, tuple[set[str], list[int]]] = {}
    for row in run.partition_rows("domain", "client", "split"):
        clients, images = counts.setdefault(row["domain"], (set(), [0, 0]))
        if row["client"]:
            clients.add(row["client"])
        images[0] += row["split"] == "train"
        images[1] += row["split"] in ("test", NO_CLIENT)
    drawn = run.drawn_clients
    return {d: (str(len(c) or drawn.get(d) or ""), str(n[0]), str(n[1])) for d, (c, n) in counts.items()}


def percent(value: float | None, metric: str = ACCURACY) -> str:
    """A score as text: a share in percent with one digit after the point, any other with four digits.

    >>> percent(0.123), percent(None), percent(12.3456, "mae")
    ('12.3', 'not finite', '12.35')
    """
    return "not finite" if value is None else in_words(share_of(metric) * value, metric)


def in_words(value: float, metric: str) -> str:
    """A number in the unit in which a metric is shown."""
    return f"{value:.1f}" if share_of(metric) != 1 else f"{value:.4g}"


def unit_of(metric: str) -> str:
    """Unit of a metric after its name in headings, with a space before it."""
    return " %" if share_of(metric) != 1 else ""
