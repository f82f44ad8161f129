"""The columns of results: what each of them holds, its unit, and which of its values are better.

A column of a round is a statistic of the metric of the task, such as `worst_domain_accuracy`. Its beginning
says whose scores it is of: `personal_worst_domain_accuracy`; without one, of the models that the method
deploys. Columns that a method adds have no entry here, and are described by their names. Over seeds and parts
of a protocol, columns of numbers are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rayfed.errors import ConfigError, shown
from rayfed.objective import METRICS, NUM, Task

Kind: TypeAlias = Literal["text", "percent", "points", "bytes", "seconds", "count", "number", "p"]
"""Content of a column. `percent`: fractions, shown in percent; `points`: differences and deviations of
fractions, shown in percentage points; `p`: probabilities of a test."""

ACCURACY = next(iter(METRICS))
"""The metric of a run that was not evaluated."""


@dataclass(frozen=True, kw_only=True)
class ResultColumn:
    """A column of the rows of rounds.

    Attributes:
        pattern: Its name without the beginning that says whose scores it is of; `{}` stands for the metric.
        words: What it holds, for people; may be the name.
        about: The statistic, where the words are a name.
        meaning: The same as a sentence of a glossary; empty: the words say it.
        kind: What its values are. Scores are `percent` and their deviations `points`, unless the metric is
            no share.
        better: Which values are better; None: as the metric has it, or none are.
        sums: Whether the value of several rounds is the sum of theirs; else it is that of one of them.
    """

    pattern: str
    words: str
    about: str = ""
    meaning: str = ""
    kind: Kind = "number"
    better: Literal["larger", "smaller"] | None = None
    sums: bool = False

    def name(self, metric: str = "", of: str = "") -> str:
        """Its name in the rows of a run. Args: metric: that of the run. of: whose scores, a beginning."""
        return of + self.pattern.format(metric)

    def total(self, rows: Iterable[Mapping[str, Any]]) -> float:
        """The sum over rounds; those without a value count as 0."""
        return sum(row.get(self.pattern) or 0 for row in rows)


DEPLOYED, GLOBAL, PERSONAL = "", "global_", "personal_"
"""Beginnings of the names of scores on test examples: of the models that are deployed, and of the others."""

VALIDATED, GLOBAL_VALIDATED = "val_", "global_val_"
"""The same on validation examples: of the deployed models, and of the global one where that is another."""

HELD_OUT, UNSEEN, ADAPTED = "held_out_", "unseen_", "adapted_unseen_"
"""The same of the global model on domains without clients and on clients that never train, and of the models
that these would deploy after a few steps."""

BEGINNINGS = (GLOBAL_VALIDATED, ADAPTED, GLOBAL, PERSONAL, VALIDATED, HELD_OUT, UNSEEN)

POOLED = "over all examples"
"""The words of `MEAN` for a metric over all examples."""

MEAN = ResultColumn(
    pattern="{}",
    words="mean over clients",
    meaning="each client counts once, however many examples it has",
    kind="percent",
)
OVER_DOMAINS = ResultColumn(
    pattern="{}_domain",
    words="mean over domains",
    meaning="each domain counts once, with the mean over its clients",
    kind="percent",
)
WORST_DOMAIN = ResultColumn(
    pattern="worst_domain_{}",
    words="worst domain",
    meaning="the domain with the lowest score",
    kind="percent",
)
WORST_NAME = ResultColumn(pattern="worst_domain", words="name of the worst domain", kind="text")
WORST_CLIENT = ResultColumn(pattern="worst_client_{}", words="worst client", kind="percent")
WORST_TENTH = ResultColumn(pattern="worst_tenth_{}", words="worst tenth of the clients", kind="percent")
BEST_TENTH = ResultColumn(pattern="best_tenth_{}", words="best tenth of the clients", kind="percent")
WORST_UNSEEN = ResultColumn(pattern="worst_{}", words="worst unseen client", kind="percent")
SIGMA_TYPE = ResultColumn(
    pattern="sigma_type",
    words="sigma_type",
    about="deviation over domains",
    meaning="population standard deviation over domains of their scores, in percentage points; 0: the "
    "model is equally good for all domains",
    kind="points",
    better="smaller",
)
SIGMA_CLIENT = ResultColumn(
    pattern="sigma_client",
    words="sigma_client",
    about="deviation over clients",
    meaning="population standard deviation over clients of their scores, in percentage points",
    kind="points",
    better="smaller",
)
LOSS = ResultColumn(pattern="loss", words="loss", about="mean over clients", better="smaller")
BYTES_UP = ResultColumn(
    pattern="bytes_up", words="sent by clients", kind="bytes", better="smaller", sums=True
)
BYTES_DOWN = ResultColumn(
    pattern="bytes_down", words="received by clients", kind="bytes", better="smaller", sums=True
)
SECONDS = ResultColumn(pattern="seconds", words="time", kind="seconds", better="smaller", sums=True)
LOCAL_STEPS = ResultColumn(
    pattern="local_steps", words="local steps of all clients", kind="count", better="smaller", sums=True
)
LOCAL_EXAMPLES = ResultColumn(
    pattern="local_examples", words="examples in them", kind="count", better="smaller", sums=True
)
FLOPS = ResultColumn(
    pattern="flops", words="operations of all clients", kind="number", better="smaller", sums=True
)
LOCAL_TOKENS = ResultColumn(
    pattern="local_tokens", words="tokens in them", kind="count", better="smaller", sums=True
)
MISSING = ResultColumn(pattern="missing", words="missing clients", kind="count", better="smaller", sums=True)

COLUMNS = (
    *(MEAN, OVER_DOMAINS, SIGMA_TYPE, SIGMA_CLIENT, WORST_NAME, WORST_DOMAIN, WORST_CLIENT),
    *(WORST_TENTH, BEST_TENTH, WORST_UNSEEN, LOSS),
    ResultColumn(pattern="perplexity", words="perplexity", about="of all tokens", better="smaller"),
    ResultColumn(pattern="macro_f1", words="macro F1", about="over all test texts", kind="percent"),
    ResultColumn(pattern="mcc", words="MCC", about="over all test texts", better="larger"),
    ResultColumn(pattern="round", words="round", kind="count"),
    ResultColumn(pattern="clients", words="clients that were drawn", kind="count"),
    ResultColumn(pattern="clients_scored", words="clients that were scored", kind="count"),
    ResultColumn(pattern="clients_in_all", words="clients that train", kind="count"),
    ResultColumn(pattern="clients_defined", words="clients that define the metric", kind="count"),
    ResultColumn(pattern="lr", words="learning rate"),
    ResultColumn(pattern="epsilon", words="epsilon", about="of differential privacy", better="smaller"),
    ResultColumn(pattern="delta", words="delta", about="of differential privacy", better="smaller"),
    *(BYTES_UP, BYTES_DOWN, LOCAL_STEPS, LOCAL_EXAMPLES, LOCAL_TOKENS, FLOPS),
    ResultColumn(
        pattern="trained_params", words="parameters that a client trains", kind="count", better="smaller"
    ),
    MISSING,
    ResultColumn(
        pattern="nonfinite", words="numbers that are not finite", kind="count", better="smaller", sums=True
    ),
    ResultColumn(
        pattern="virtual_seconds",
        words="virtual time of the round",
        kind="seconds",
        better="smaller",
        sums=True,
    ),
    ResultColumn(pattern="virtual_time", words="virtual time", kind="seconds", better="smaller"),
    SECONDS,
    *(
        ResultColumn(pattern=f"seconds_{name}", words=words, kind="seconds", better="smaller", sums=True)
        for name, words in {
            "training": "clients and server",
            "clients": "calls of clients",
            "idle": "time in which no call ran",
        }.items()
    ),
)
"""All columns that the engine writes, in the order in which most rows have them."""

Unit: TypeAlias = Literal["steps", "examples", "flops", "bytes"]
"""Unit of the work of which methods that are compared may have as much as each other (`equal`)."""

WORK: Mapping[str, tuple[ResultColumn, ...]] = {
    "steps": (LOCAL_STEPS,),
    "examples": (LOCAL_EXAMPLES,),
    "tokens": (LOCAL_TOKENS,),
    "flops": (FLOPS,),
    "bytes": (BYTES_UP, BYTES_DOWN),
}
"""The columns of a round that say how much work it was, by unit."""


def work_in(unit: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """The work of some rounds in a unit of `WORK`; 0 where it was not counted."""
    return float(sum(column.total(rows) for column in WORK[unit]))


def is_result(name: str) -> bool:
    """Whether a column has the same value whenever a run is repeated, as durations have not."""
    return not name.startswith((SECONDS.pattern, "slowest"))


SMALLER_IS_BETTER = ("sigma", "loss", "perplexity", "bytes", "seconds", "time", "variance")
"""Words in the names of columns of methods of which smaller values are better, whatever the metric."""


def column_of(name: str) -> ResultColumn | None:
    """The description of a column by its name in a row; None: a method, or a task of a user, added it."""
    rests = [name, *(name.removeprefix(each) for each in BEGINNINGS if name.startswith(each))]
    for rest in rests:
        for column in COLUMNS:
            metrics: Iterable[str] = METRICS if "{}" in column.pattern else ("",)
            if any(rest == column.pattern.format(metric) for metric in metrics):
                return column
    return None


OF_SETS = ("perplexity", "macro_f1", "mcc")
"""Columns of tasks that ship; a metric of a user's task may have these names."""

OF_CLIENTS = (
    "client",
    "domain",
    "train",
    "val",
    "test",
    "split",
    "model",
    "exchange",
    "metric",
    "value",
    NUM,
)
"""Columns of the tables of clients and examples."""


def check_metrics(task: Task) -> None:
    """Check that the metrics of a user's task have names that nothing else has.

    Raises:
        ConfigError: A name is no text, is there twice, or is that of another column of results.
    """
    names = [*task.metrics, *task.over_set]
    taken = {column.pattern for column in COLUMNS} | {f"{names[0]}_domain"}
    of_metric = {column.pattern.removesuffix("{}") for column in COLUMNS} - taken - {"", "worst_"}
    for place, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            why = "is no text that can be printed"
        elif name in names[:place]:
            why = "is there twice"
        elif name in {*taken, *OF_CLIENTS} - {*OF_SETS} or name.startswith((*BEGINNINGS, *of_metric)):
            why = "is, or begins as, the name of another column of results"
        else:
            continue
        raise ConfigError(f"task.metrics: {shown(name)} {why}; give the metric another name")


def metric_of(row: Mapping[str, Any], of: str = DEPLOYED) -> str | None:
    """Name of the metric of which a row has the mean over clients; None: of none.

    It comes before the loss; further metrics of the task, whose names may be those of others, come after it.

    Args:
        row: The columns of a round, in their order.
        of: Whose scores.
    """
    for column in row:
        if column == of + LOSS.pattern:
            return None
        if column.startswith(of) and column.removeprefix(of) in METRICS:
            return column.removeprefix(of)
    return None


def metric_of_scores(row: Mapping[str, Any]) -> str:
    """Name of the metric of the scores in a row, whosever they are; accuracy where it has none."""
    of_test = (DEPLOYED, PERSONAL, HELD_OUT, GLOBAL, UNSEEN, VALIDATED)
    return next((name for of in of_test if (name := metric_of(row, of))), ACCURACY)


def metric_in(column: str) -> str | None:
    """Name of the metric whose words are in the name of a column, the longest of several; None: of none.

    Of `worst_domain_rmse` it is `rmse`, and not `mse`.
    """
    return max((name for name in METRICS if f"_{name}_" in f"_{column}_"), key=len, default=None)


def is_larger_better(metric: str) -> bool:
    """Whether larger scores of this metric are better."""
    return metric not in METRICS or METRICS[metric].larger


def better_values(name: str) -> Literal["larger", "smaller"] | None:
    """The values of a column that are better, larger or smaller ones; None: its name does not say it.

    >>> better_values("worst_domain_accuracy"), better_values("gap_variance"), better_values("beta")
    ('larger', 'smaller', None)
    """
    column = column_of(name)
    if column is not None and column.better is not None:
        return column.better
    if any(word in name for word in SMALLER_IS_BETTER):
        return "smaller"
    metric = metric_in(name)
    return None if metric is None else "larger" if is_larger_better(metric) else "smaller"


def share_of(metric: str) -> float:
    """Factor of the scores of a metric on the screen: 100 for shares, which are shown in percent."""
    return 100.0 if metric in METRICS and METRICS[metric].percent else 1.0


def scale_of(column: str) -> float:
    """As `share_of`, for a column with the name of a metric in its own, such as `worst_domain_mae`."""
    return share_of(metric_in(column) or ACCURACY)


def level_words(metric: str) -> str:
    """Words for the score of a run without prefix, such as `mean over clients`."""
    return POOLED if is_pooled(metric) else MEAN.words


def is_pooled(metric: str) -> bool:
    """Whether the score of a run is over the examples of all clients together, and no mean over clients."""
    return metric in METRICS and METRICS[metric].pooled
