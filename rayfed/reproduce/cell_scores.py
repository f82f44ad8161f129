"""Scores of the finished cells of a paper's table, read from the folders of their runs.

They have the names that `scores` in configs/papers/*.yaml may have. A name is a column
of the selected round, such as `accuracy_domain` or `loss`; `domain K`, the score of the global model
on the K-th domain; one of `average`, `worst tenth`, `best tenth` and `variance` over the clients;
`numbers_trained`; `without adapters` and `without head`, the mean over domains of the final model with these
tensors put back to their start values; over the rounds `geometric mean COLUMN` and `rounds COLUMN < COLUMN`,
the percentage of rounds in which the first one is lower; or, where each domain is held out in turn, a measure
of `rayfed.report.protocols.MEASURES`: its mean over the held-out domains, or with a number behind it (such as
`generalization 2`) that of the second held-out domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any, TypeAlias

from rayfed.columns import ACCURACY, better_values, metric_of
from rayfed.evaluation.metrics import spread
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import final_scores, total_steps
from rayfed.report.protocols import MEASURES, fold_of
from rayfed.report.protocols import scores as means_of_fold

if TYPE_CHECKING:
    from rayfed.config.schema import Config, Request

TRAINED = "numbers_trained"
STEPS, EXAMPLES = "local steps", "local examples"
FINAL, ADDED = "final model", "adapters add"
HALF = "after half of the rounds"
WITHOUT = {"without adapters": "adapters", "without head": "head"}
"""Scores of the final model with tensors at their start values, with the kinds of `score_without`."""
MEAN, ROUNDS = "geometric mean ", "rounds "
SPREAD = {"average": "average", "worst tenth": "worst", "best tenth": "best", "variance": "variance"}
"""Statistics over clients, with their attributes of `rayfed.evaluation.metrics.Spread`."""


def better(score: str) -> str:
    """Whether a `higher` or a `lower` value of a score is better."""
    if score.startswith(ROUNDS):
        return "higher"
    return "lower" if score.removeprefix(MEAN) == TRAINED or better_values(score) == "smaller" else "higher"


def is_by_position(score: str) -> bool:
    """Whether a score is that of one domain, which is named by its position.

    >>> is_by_position("domain 2"), is_by_position("generalization 1"), is_by_position("accuracy_domain")
    (True, True, False)
    """
    return score.rpartition(" ")[2].isdecimal()


def unit(score: str) -> str:
    """Unit of a score: percent, or a number."""
    if score.startswith(MEAN):
        return "as in the column"
    return {TRAINED: "numbers", "variance": "percent squared"}.get(score, "percent")


def rule_of(config: Request) -> str:
    """The rule by which the round of a run is chosen, in words."""
    if config.protocol == "leave_one_out" or config.evaluation.validation:
        ties = config.evaluation.ties
        return f"the {ties} round with the highest validation accuracy of the global model, mean over clients"
    return "the last evaluated round"


Folders: TypeAlias = Mapping[str, Path]
"""The runs of a cell: by held-out domain, in the order of the data set; else one under the empty name."""


def read_scores(
    runs: Folders, config: Config, wanted: Iterable[str], order: Sequence[str] = ()
) -> dict[str, float]:
    """Scores of a finished cell.

    Args:
        runs: Folders of its runs.
        wanted: Names of scores.
        order: Domains in the order in which they are counted; none: the order of the data set.

    Returns:
        The scores by name, fractions in percent; those that the runs do not have are left out.
    """
    if "" in runs:
        return _of_run(runs[""], tuple(wanted), tuple(order))
    return _of_folds(runs, config, tuple(wanted), tuple(order))


def read_steps(runs: Folders) -> dict[str, float]:
    """Training batches of all clients of a finished cell, and examples in them, of all its runs."""
    each = [total_steps(RecordedRun(folder).rounds) for folder in runs.values()]
    return {STEPS: float(sum(steps for steps, _ in each)), EXAMPLES: float(sum(rows for _, rows in each))}


def read_half(runs: Folders) -> dict[str, float]:
    """Percent of the mean over domains after the last round that a cell had after half of its rounds.

    A low share says that more rounds would change the table. Where each domain is held out in turn, both
    scores are means over the folds of that on the domain that the fold holds out.

    Returns:
        The share as `HALF`; nothing where the first half was not evaluated, or the last score is 0.
    """
    pairs = [_half_and_last(folder, held_out=bool(name)) for name, folder in runs.items()]
    halves = [half for half, _ in pairs if half is not None]
    total = sum(last or 0.0 for _, last in pairs)
    return {HALF: 100 * sum(halves) / total} if total and len(halves) == len(pairs) else {}


def _half_and_last(path: Path, *, held_out: bool) -> tuple[float | None, float | None]:
    """Scores of a run in the last evaluated round of its first half, and in its last evaluated round."""
    run = RecordedRun(path)
    rows = [row for row in run.rounds if metric_of(row)]
    first = [row for row in rows if 2 * row["round"] <= rows[-1]["round"]]
    if not first:
        return None, None
    if held_out:
        half, last = (means_of_fold(run, row)[1].get("generalization") for row in (first[-1], rows[-1]))
        return half, last
    return final_scores(first[-1])[0], final_scores(rows[-1])[0]


def read_without(runs: Folders) -> dict[str, float]:
    """Scores of a cell's final model in percent, as it is and without adapters and head.

    They are means over domains; where each domain is held out in turn, means over the folds of the scores on
    the domain that the fold holds out. `ADDED` is what adapters add to the global model.

    Returns:
        The scores by name; those that the cell does not have, or not in every fold, are left out, and all of
        them where nothing was put back.
    """
    each = [
        _without_of_fold(folder, name) if name else _without_of_run(folder) for name, folder in runs.items()
    ]
    common = [key for key in each[0] if all(key in one for one in each)]
    found = {key: 100 * fmean(one[key] for one in each) for key in common}
    return found if found.keys() & WITHOUT.keys() else {}


def _without_of_run(path: Path) -> dict[str, float]:
    run = RecordedRun(path)
    deployed, whole = final_scores(run.reported)
    kinds = {kind: found["domains"] for kind, found in (run.without_at(run.reported) or {}).items()}
    return _named_without(deployed, whole, kinds)


def _without_of_fold(path: Path, held_out: str) -> dict[str, float]:
    run = RecordedRun(path)
    whole = means_of_fold(run, run.reported)[1].get("generalization")
    without = run.without_at(run.reported) or {}
    kinds = {kind: found["by_domain"].get(held_out) for kind, found in without.items()}
    return _named_without(whole, whole, kinds)


def _named_without(
    deployed: float | None, whole: float | None, kinds: Mapping[str, float | None]
) -> dict[str, float]:
    """The fractions of a run by name; `whole` and `kinds` are of the global model."""
    bare = kinds.get("adapters")
    added = None if whole is None or bare is None else whole - bare
    found = {FINAL: deployed, **{name: kinds.get(kind) for name, kind in WITHOUT.items()}, ADDED: added}
    return {name: value for name, value in found.items() if value is not None}


def _of_run(path: Path, wanted: Sequence[str], order: Sequence[str]) -> dict[str, float]:
    run = RecordedRun(path, "validation")  # the last round, where none was validated
    row, metric = run.reported, run.metric
    if not row:
        return {}
    now = [score for score in run.scores_at(row["round"]) if score["metric"] == metric]
    domains = {s["client"]: s["value"] for s in now if _is(s, "report_domains", "global")}
    names = order or [name for name in run.domains if name in domains]
    found = {key: value for key, value in row.items() if isinstance(value, float)}
    if metric != ACCURACY:  # the names of the papers' files are those of accuracies
        found |= {key.replace(metric, ACCURACY): value for key, value in found.items()}
    found |= {
        f"domain {place}": domains[name] for place, name in enumerate(names, start=1) if name in domains
    }
    scores = {name: 100 * found[name] for name in wanted if found.get(name) is not None}
    scores |= _over_clients(now, wanted) | _over_rounds(run.rounds, wanted)
    return scores | _trained_values(run, wanted)


def _is(score: Mapping[str, Any], exchange: str, model: str) -> bool:
    return score["exchange"] == exchange and score["model"] == model and score["value"] is not None


def _over_clients(now: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, float]:
    """Statistics over the clients' percentages: of their personal models, where these were scored."""
    if not set(wanted) & SPREAD.keys():
        return {}
    for model in ("personal", "global"):
        if values := [100 * score["value"] for score in now if _is(score, "report_clients", model)]:
            level = spread(values)
            return {name: getattr(level, key) for name, key in SPREAD.items() if name in wanted}
    return {}


def _over_rounds(history: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, float]:
    """Statistics over the rounds that have the columns: geometric means, and percentages of rounds."""
    found = {}
    for name in wanted:
        if name.startswith(MEAN):
            column = name.removeprefix(MEAN)
            values = [row[column] for row in history if row.get(column) is not None]
            if values:
                found[name] = geometric_mean(values)
        elif name.startswith(ROUNDS):
            first, second = name.removeprefix(ROUNDS).split(" < ")
            below = [row[first] < row[second] for row in history if {first, second} <= row.keys()]
            if below:
                found[name] = 100 * fmean(below)
    return found


def _trained_values(run: RecordedRun, wanted: Sequence[str]) -> dict[str, float]:
    """Number of trained values, where it is wanted."""
    if TRAINED not in wanted:
        return {}
    return {TRAINED: float(run.fact(TRAINED))}


def _of_folds(runs: Folders, config: Config, wanted: Sequence[str], order: Sequence[str]) -> dict[str, float]:
    names = list(order or config.data.domains or runs)
    folds = [fold_of(runs[name], config.algorithm, name) for name in names]
    scores = _trained_values(folds[0].run, wanted)
    for name in wanted:
        measure, _, place = name.rpartition(" ")
        if not place.isdecimal():
            measure, place = name, ""
        if measure not in MEASURES:
            continue
        values = [100 * fold.measures[measure] for fold in folds if measure in fold.measures]
        if place:
            values = values[int(place) - 1 : int(place)]
        if values:
            scores[name] = sum(values) / len(values)
    return scores
