"""The rule that ends a run before its last round (`stop`), and the best round (`checkpoint.best`).

Both look at the rows of the rounds only, in their order, so that a run that is continued ends after the same
round as one that was never interrupted, and whoever reads a folder finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from rayfed.columns import GLOBAL_VALIDATED, LOSS, VALIDATED, better_values, metric_of, scale_of
from rayfed.errors import ConfigError, count_of, unknown
from rayfed.types import Count, Row

AUTO = "auto"
"""The column of the metric of the task on validation examples."""


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """The section `stop`: when a run ends before its last round. Nothing is set by default.

    Attributes:
        metric: The column of a round that `patience` and `target` look at, such as `val_loss`; auto: the
            metric of the task on validation examples.
        patience: The run ends when so many scored rounds in a row were no better than the best one before;
            None: it does not.
        min_delta: Smallest difference that counts as better, in the unit of the metric: 0.01 is a point of
            accuracy.
        target: The run ends after the first round in which the metric is as good as this; None: it does not.
        virtual_seconds: The run ends after the first round at whose end so many seconds have passed on the
            virtual clock (`faults`); None: it does not.
    """

    metric: str = AUTO
    patience: Count | None = None
    min_delta: Annotated[float, Ge(0)] = 0.0
    target: float | None = None
    virtual_seconds: Annotated[float, Gt(0)] | None = None

    @property
    def watches(self) -> bool:
        """Whether it looks at a metric."""
        return self.patience is not None or self.target is not None


def without_effect(rule: StopConfig) -> tuple[str, ...]:
    """A sentence for the header where the rule is set in part, and ends nothing; else none."""
    if rule == StopConfig() or rule.watches or rule.virtual_seconds is not None:
        return ()
    return ("stop ends nothing, as neither its patience, nor its target, nor its virtual_seconds is set",)


def column_in(row: Row, metric: str) -> str | None:
    """The column of a row that `metric`, a column or `auto`, names; None: the round has none."""
    if metric != AUTO:
        return metric if metric in row else None
    name = metric_of(row, VALIDATED)
    return VALIDATED + name if name else None


def is_of_validation(metric: str) -> bool:
    """Whether a column, or `auto`, is of validation examples."""
    return metric == AUTO or metric.startswith((VALIDATED, GLOBAL_VALIDATED))


def _goodness(row: Row, column: str) -> float | None:
    """The value of a column, with the sign with which larger is better; None: it is not finite."""
    value = row[column]
    if value is None or value != value or value in (float("inf"), -float("inf")):
        return None
    return float(value) if better_values(column) == "larger" else -float(value)


def is_share(column: str) -> bool:
    """Whether the values of a column are fractions, which the screen shows in percent."""
    return not column.endswith(LOSS.pattern) and scale_of(column) != 1


def _shown(value: float, column: str) -> str:
    """A value as the screen shows it."""
    return f"{value * scale_of(column):.4g}%" if is_share(column) else f"{value:.4g}"


class Stopping:
    """The rounds of one run so far, as the rule `stop` sees them.

    Attributes:
        reason: Why the run ended, as a clause that names the key; empty: it goes on.
        key: The key of `stop` that ended it; empty: it goes on.
        round: The round after which it ended; 0: it goes on.
    """

    def __init__(self, rule: StopConfig, rows: Iterable[Row] = ()) -> None:
        """Begin with the first round. Args: rows: those of the rounds that are finished."""
        self._rule = rule
        self._best: tuple[float, int] | None = None
        self._waited = 0
        self.reason = self.key = ""
        self.round = 0
        for row in rows:
            self.add(row)

    def is_over(self, virtual_time: float) -> bool:
        """Whether the virtual clock ends the run. Args: virtual_time: seconds at the end of a round."""
        most = self._rule.virtual_seconds
        return most is not None and virtual_time >= most

    def add(self, row: Row) -> None:
        """Look at the next round.

        Args:
            row: Its row in rounds.jsonl; a metric that is not finite may be None or NaN, and is no better.

        Raises:
            ConfigError: The round was scored, and has no such metric.
        """
        if self.reason:
            return
        rule = self._rule
        if self.is_over(row.get("virtual_time", 0.0)):
            text = f"{row['virtual_time']:.4g} of {rule.virtual_seconds:.4g} virtual seconds passed"
            self._end(row, "virtual_seconds", text)
        column = column_in(row, rule.metric) if rule.watches else None
        if rule.watches and column is None and row.get("clients_scored"):
            numbers = [name for name, value in row.items() if isinstance(value, int | float)]
            raise ConfigError(unknown("stop.metric", rule.metric, numbers))
        if self.reason or column is None:
            return
        sign = 1.0 if better_values(column) == "larger" else -1.0
        value = _goodness(row, column)
        if value is not None and rule.target is not None and value >= sign * rule.target:
            self._end(row, "target", f"{column} is {_shown(sign * value, column)}")
        self._wait(row, column, value, sign)

    def _wait(self, row: Row, column: str, value: float | None, sign: float) -> None:
        """Count the scored rounds that were no better than the best one before."""
        if value is not None and (self._best is None or value > self._best[0] + self._rule.min_delta):
            self._best, self._waited = (value, row["round"]), 0
            return
        self._waited += 1
        if self._rule.patience is not None and self._waited >= self._rule.patience and not self.reason:
            if self._best is None:
                text = f"{column} is not finite in {count_of(self._waited, 'scored round')}"
            else:
                best, number = sign * self._best[0], self._best[1]
                text = f"{column} has its best value, {_shown(best, column)}, in round {number}"
                text = f"{text}, with {count_of(self._waited, 'scored round')} after it"
            self._end(row, "patience", text)

    def _end(self, row: Row, key: str, text: str) -> None:
        self.key, self.reason, self.round = key, f"{text} (stop.{key})", row["round"]


class BestRound:
    """The best of the rounds of one run so far, by `checkpoint.best`.

    Attributes:
        round: Its number, from 1; 0: no round has a finite value.
    """

    def __init__(
        self, metric: str, ties: Literal["first", "last"] = "first", rows: Iterable[Row] = ()
    ) -> None:
        """Begin with the first round.

        Args:
            metric: A column of validation, or `auto`.
            ties: Which of several rounds with the best value it is (`evaluation.ties`).
            rows: Rows of the rounds that are finished.
        """
        self._metric = metric
        self._ties = ties
        self._best: float | None = None
        self.round = 0
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> bool:
        """Look at the next round; returns whether it is the best one so far."""
        column = column_in(row, self._metric)
        value = None if column is None else _goodness(row, column)
        if value is None:
            return False
        if self._best is None or value > self._best or (value == self._best and self._ties == "last"):
            self._best, self.round = value, row["round"]
            return True
        return False


def rule_of(config: Mapping[str, Any]) -> StopConfig:
    """The rule in a config as plain containers; nothing is set in those of earlier versions."""
    return StopConfig(**(config.get("stop") or {}))
