"""A run as its folder records it, finished or not: the one reader of its files, and of its reported round."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rayfed.columns import (
    ADAPTED,
    DEPLOYED,
    GLOBAL,
    GLOBAL_VALIDATED,
    HELD_OUT,
    MEAN,
    PERSONAL,
    UNSEEN,
    VALIDATED,
    WORST_UNSEEN,
    ResultColumn,
    is_larger_better,
    metric_of,
    metric_of_scores,
)
from rayfed.data.partition.manifest import META
from rayfed.evaluation.stopping import BestRound, Stopping, rule_of
from rayfed.objective import SEGMENTATION
from rayfed.record.folder import EVENTS, TENSORS, digest_if_finished
from rayfed.record.history import History
from rayfed.record.readers import (
    OWN_TENSORS,
    WITHOUT,
    DamagedError,
    read_bytes,
    read_footer,
    read_json,
    read_parquet,
    read_rows,
    read_tensors,
    read_yaml,
    reading,
    rows_so_far,
)
from rayfed.user_files import DocumentError, check_run_folder, parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd
    import pyarrow as pa

    from rayfed.types import Params, Row


Rule: TypeAlias = Literal["final", "last", "validation"]
"""A rule for the reported round: that of the final model, which is the best one by `checkpoint.best` where
that is set; the last evaluated one; or the one with the best validation score of the global model."""

Ties: TypeAlias = Literal["first", "last"]
"""The round that counts among those with the best validation score."""

EVALUATED = {"report_clients": "client", "report_domains": "domain", "report_held_out": "held out"}
"""Exchanges of the table `clients` that hold scores of the evaluation, and whose scores they are."""

MODELS = ("global", "personal")
"""Kinds of models that are scored."""

NEVER_TRAIN = {
    "unseen clients": (MEAN, UNSEEN),
    WORST_UNSEEN.words: (WORST_UNSEEN, UNSEEN),
    "unseen clients, adapted": (MEAN, ADAPTED),
}
"""Columns of a round about clients that never train, with the beginnings of their names, by their words."""

NO_CLIENT = "held_out"
"""Split of the examples of domains without clients."""

NOBODY: Mapping[str, int] = {}


def reported_round(rows: Sequence[Row], rule: Rule = "last", ties: Ties = "first") -> Row:
    """The row of the round that is reported of a run; empty where none was evaluated.

    Args:
        rows: The rows of its rounds.
        rule: `last`: the last evaluated round. `validation`: the one with the best validation score of the
            global model, mean over clients; the last evaluated one where no round was validated.
        ties: Which of several rounds with the best validation score.
    """
    if rule == "validation" and (best := _best_validated(rows, ties)):
        return best
    return next((row for row in reversed(rows) if _is_evaluated(row)), {})


def _is_evaluated(row: Row) -> bool:
    """Whether a round has scores on test examples, or has clients whose examples define none."""
    whose = (DEPLOYED, GLOBAL, PERSONAL, HELD_OUT, UNSEEN)
    return bool(row.get("clients_scored")) or any(metric_of(row, of) for of in whose)


def _best_validated(rows: Sequence[Row], ties: Ties) -> Row:
    """The row with the best validation score; where none is finite the last one that has any, or nothing.

    Where a method deploys the clients' own models, `val_...` is of these, and `global_val_...` of that one.
    """
    scored: list[tuple[float | None, Row]] = []
    for row in rows:
        of = GLOBAL_VALIDATED if metric_of(row, GLOBAL_VALIDATED) else VALIDATED
        if metric := metric_of(row, of):
            value = row[of + metric]
            sign = 1.0 if is_larger_better(metric) else -1.0
            scored.append((None if value is None else sign * value, row))
    if not scored:
        return {}
    fallback = scored[-1][1]
    if ties == "last":
        scored.reverse()
    known = ((value, row) for value, row in scored if value is not None)
    return max(known, key=lambda pair: pair[0], default=(0.0, fallback))[1]


class RecordedRun:
    """The folder of a run. Each file is read once, when it is needed.

    Whatever cannot be read raises a DamagedError that names the file.

    Attributes:
        path: The folder.
        rule: Which round is reported.
    """

    def __init__(self, path: Path, rule: Rule = "final") -> None:
        """Describe the run in a folder, of which nothing has to exist yet."""
        self.path = path
        self.rule = rule
        self._tables: dict[str, pa.Table | None] = {}
        self._rows: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._scores: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._frames: dict[tuple[str, ...], pd.DataFrame] = {}

    @classmethod
    def opened(cls, path: Path, rule: Rule = "final") -> RecordedRun:
        """The run in a folder, which has begun.

        Raises:
            ConfigError: The folder holds no run.
            DamagedError: config.yaml is not that of a run.
        """
        check_run_folder(path)
        run = cls(path, rule)
        with reading(path, f"{path}: holds no run (config.yaml is not that of a run)"):
            _ = run.method, run.data, run.planned, run.seed
        return run

    def read(self) -> None:
        """Read what tables of several runs need, so that what is damaged is said before they are made."""
        _ = self.reported, self.scores, self.clients, self.environment

    # What was run.

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys of config.yaml; empty where there is none."""
        path = self.path / "config.yaml"
        return read_yaml(path) if os.path.lexists(path) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The file environment.json; empty where there is none."""
        path = self.path / "environment.json"
        return read_json(path, dict) if path.exists() else {}

    def fact(self, name: str) -> Any:
        """An entry of environment.json, which every run has.

        Raises:
            DamagedError: The file is missing, or has no such entry.
        """
        path = self.path / "environment.json"
        facts = self.environment or read_json(path, dict)  # which says that it is missing
        with reading(path):
            return facts[name]

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.config["algorithm"])

    @property
    def data(self) -> str:
        """Name of the data set."""
        return str(self.config["data"]["name"])

    @property
    def planned(self) -> int:
        """Number of planned rounds."""
        return int(self.config["rounds"])

    @property
    def seed(self) -> int:
        """Seed of the experiment."""
        return int(self.config["seed"])

    @property
    def ties(self) -> Ties:
        """The round that counts among those with the best validation score (`evaluation.ties`)."""
        return "last" if self.config.get("evaluation", {}).get("ties") == "last" else "first"

    @cached_property
    def name(self) -> str:
        """Method, data and seed, for example `fedgcr on digits-five-mini, seed 0`."""
        return f"{self.method} on {self.data}, seed {self.seed}" if self.config else self.path.name

    def title(self, what: str, when: str = "") -> tuple[str, str]:
        """The two lines of a title: what is shown; then method, data, seed and round."""
        return what, self.name + (f", {when}" if when else "")

    @property
    def examples(self) -> str:
        """Word for the examples of the data set."""
        return str(self.environment.get("examples", "images"))

    @property
    def segmentation(self) -> bool:
        """Whether each pixel of an example has a label."""
        return bool(self.environment.get("task") == SEGMENTATION)

    @property
    def own_tensors(self) -> tuple[int, int]:
        """Numbers of clients that kept tensors in the run whose model was scored, and of scored clients."""
        counts = self.environment.get(OWN_TENSORS)
        return (counts["kept"], counts["clients"]) if counts else (0, 0)

    @property
    def commands(self) -> list[str]:
        """The command lines with which the run was started and continued."""
        commands = self.environment.get("commands")
        return [str(command) for command in commands] if isinstance(commands, list) else []

    # Its rounds, and the one that is reported.

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """The row of every finished round; none before the first one is finished.

        Raises:
            DamagedError: rounds.jsonl cannot be read, or is missing in a finished run.
        """
        return read_rows(self.path) if (self.path / TENSORS).exists() else rows_so_far(self.path)

    @cached_property
    def reported(self) -> Row:
        """The row of the reported round; empty where no round was evaluated."""
        return self.reported_by(self.rule)

    def reported_by(self, rule: Rule) -> Row:
        """The row that another rule would report."""
        if rule == "final":
            return self.best or reported_round(self.rounds, "last", self.ties)
        return reported_round(self.rounds, rule, self.ties)

    @property
    def best_by(self) -> str | None:
        """The column by which the best round is found, whose model is the final one; None: none is."""
        best = self.config.get("checkpoint", {}).get("best")
        return None if best is None else str(best)

    @cached_property
    def best(self) -> Row:
        """The row of the best round by `checkpoint.best`; empty where that is not set, or no round has it."""
        if self.best_by is None:
            return {}
        number = BestRound(self.best_by, self.ties, self.rounds).round
        return self.rounds[number - 1] if number else {}

    @property
    def final_round(self) -> int:
        """Number of the round after which the model was the final one; 0: none is finished."""
        last = self.rounds[-1]["round"] if self.rounds else 0
        return int(self.best.get("round", last))

    @cached_property
    def ended(self) -> Stopping:
        """The rule `stop`, which has seen all finished rounds."""
        return Stopping(rule_of(self.config), self.rounds)

    @property
    def by_validation(self) -> bool:
        """Whether validation selects the reported round."""
        return self.rule == "validation"

    @property
    def is_finished(self) -> bool:
        """Whether the last round is finished and the final tensors are written."""
        return self.has_all_rounds and (self.path / TENSORS).exists()

    @property
    def has_all_rounds(self) -> bool:
        """Whether the last round is finished: as many as planned, or that after which `stop` ends the run."""
        return len(self.rounds) >= self.planned or bool(self.ended.reason)

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return metric_of_scores(self.reported)

    @property
    def prefix(self) -> str:
        """Beginning of the columns of a round with the scores of the clients."""
        only_personal = not metric_of(self.reported) and metric_of(self.reported, PERSONAL)
        return PERSONAL if only_personal else DEPLOYED

    def number(self, column: ResultColumn) -> float | None:
        """A number of the reported round; None if it has none."""
        value = self.reported.get(column.name(self.metric, self.prefix))
        return float(value) if isinstance(value, int | float) else None

    @property
    def held_out_score(self) -> float | None:
        """Mean over the domains of which no client has an example."""
        value: float | None = self.reported.get(MEAN.name(self.metric, HELD_OUT))
        return value

    @property
    def unseen(self) -> dict[str, float]:
        """Scores of the clients that never train, in the reported round; empty where all clients train."""
        names = {words: column.name(self.metric, of) for words, (column, of) in NEVER_TRAIN.items()}
        row = self.reported
        return {words: row[name] for words, name in names.items() if row.get(name) is not None}

    def without_at(self, row: Row) -> Mapping[str, Mapping[str, Any]] | None:
        """Scores of the final model with the tensors of each kind put back to their start values.

        Args:
            row: The row of a round.

        Returns:
            By kind, `adapters` or `head`, with `clients`, `domains` and `by_domain`
            (`rayfed.engine.loop.score_without`); None where the model was not scored in this way, or the
            final model is that of another round.
        """
        path = self.path / WITHOUT
        if not row or not path.exists() or row["round"] != self.final_round:
            return None
        return {kind: found for kind, found in self._without.items() if kind in ("adapters", "head")}

    @cached_property
    def _without(self) -> dict[str, Any]:
        return read_json(self.path / WITHOUT, dict)

    @property
    def without(self) -> dict[str, float]:
        """Mean over domains of the final global model without the tensors of a kind, by kind."""
        scores = self.without_at(self.reported) or {}
        return {kind: one["domains"] for kind, one in scores.items() if one["domains"] is not None}

    # Its tables.

    def columns_of(self, table: str) -> list[str]:
        """Names of the columns of a table; none where the run has no such table."""
        path = self.path / f"{table}.parquet"
        if path.exists():
            return list(read_footer(path).schema.to_arrow_schema().names)
        return list(dict.fromkeys(name for part in self._parts(table) for name in part.column_names))

    @property
    def tables(self) -> dict[str, int]:
        """Number of rows of each Parquet file in the folder, by its name without the suffix."""
        return {file.stem: read_footer(file).num_rows for file in sorted(self.path.glob("*.parquet"))}

    def rows(self, table: str) -> Sequence[Mapping[str, Any]]:
        """Rows of a table; none where the run has no such table."""
        if table not in self._rows:
            whole = self._table(table)
            self._rows[table] = [] if whole is None else whole.to_pylist()
        return self._rows[table]

    def _table(self, table: str) -> pa.Table | None:
        """A table with all its columns; None where the run has no such table."""
        if table not in self._tables:
            path = self.path / f"{table}.parquet"
            self._tables[table] = read_parquet(path) if path.exists() else None
        return self._tables[table]

    def frame(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """Columns of a table; without rows where the run has no such table. Texts are categories.

        Of a run that is not finished, the rounds so far.

        Raises:
            DamagedError: The file cannot be read, or has no such columns.
        """
        key = (table, *columns)
        if key not in self._frames:
            import pandas as pd
            import pyarrow as pa

            path = self.path / f"{table}.parquet"
            with reading(path):
                if path.exists():
                    found = read_parquet(path, columns)
                elif parts := self._parts(table):
                    found = pa.concat_tables(parts, promote_options="permissive").select(list(columns))
                else:
                    return pd.DataFrame(columns=list(columns))
                self._frames[key] = found.to_pandas(strings_to_categorical=True)
        return self._frames[key]

    def _parts(self, table: str) -> Sequence[pa.Table]:
        """Tables of this name in the history, one a round, of a run that has no tables yet."""
        return self._history.get(table, [])

    @cached_property
    def _history(self) -> dict[str, list[pa.Table]]:
        from rayfed.record.atomic_files import to_table

        parts: dict[str, list[pa.Table]] = {}
        for entry in History(self.path).entries():
            for name, rows in entry["tables"].items():
                if rows:
                    parts.setdefault(name, []).append(to_table(rows))
        return parts

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Failures and what was done about them; of a run that is not finished, those so far."""
        path = self.path / "events.parquet"
        if path.exists():
            return [dict(row) for row in read_parquet(path).to_pylist()]
        lines = self.path / EVENTS
        return list(_events(lines)) if lines.exists() else []

    # Its scores.

    def scores_at(self, round: int) -> Sequence[Mapping[str, Any]]:
        """Rows of the table `clients` of one round; of a run that is not finished, from its history."""
        if round not in self._scores:
            now = self._rows_of_round(round)
            entry = None if now else History(self.path).entry(round)
            self._scores[round] = now if entry is None else entry["tables"].get("clients", [])
        return self._scores[round]

    def _rows_of_round(self, round: int) -> list[dict[str, Any]]:
        """Rows of clients.parquet of one round; chosen before they become objects, as there are many."""
        from rayfed.arrow_columns import column, numbers

        table = self._table("clients")
        if table is None:
            return []
        with reading(self.path / "clients.parquet"):
            now = numbers(table["round"].combine_chunks()) == round
            rows: list[dict[str, Any]] = table.filter(column(now.tolist(), "bool")).to_pylist()
        return rows

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Scores of the evaluations.

        Returns:
            Columns round, of (`client`, `domain` or `held out`), name (of the client or domain), domain,
            model, metric, value (NaN where it was not finite).
        """
        import pandas as pd

        columns = ["round", "exchange", "client", "domain", "model", "metric", "value"]
        scores = self.frame("clients", columns)
        scores = scores[scores["exchange"].isin(list(EVALUATED)) & scores["model"].isin(list(MODELS))]
        scores = scores.rename(columns={"client": "name"})
        scores["of"] = scores["exchange"].map(EVALUATED).astype(str)
        for key in ("name", "domain", "model", "metric"):
            scores[key] = scores[key].astype(str)
        scores["value"] = pd.to_numeric(scores["value"])
        return scores.drop(columns=["exchange"])

    def now(self, of: str, model: str, metric: str) -> pd.Series[float]:
        """Scores of the reported round by name, in the order of the data set.

        Args:
            of: `client`, `domain` or `held out`.
            model: `global` or `personal`.
            metric: Name of the metric, or `loss`.
        """
        rows = self.scores
        rows = rows[rows["round"] == self.reported.get("round", 0)]
        rows = rows[(rows["of"] == of) & (rows["model"] == model) & (rows["metric"] == metric)]
        return rows.drop_duplicates("name").set_index("name")["value"]

    def of_clients(self, model: str) -> npt.NDArray[np.float64]:
        """Scores of all clients in the reported round, in the order of `now`, without those that are NaN."""
        import numpy as np

        return np.asarray(self.now("client", model, self.metric).dropna(), dtype=np.float64)

    @cached_property
    def models(self) -> list[str]:
        """Kinds of model that were scored, of `global` and `personal`."""
        scored = set(self.scores["model"].unique())
        return [model for model in MODELS if model in scored]

    @property
    def deployed(self) -> str:
        """The kind of model whose scores are the columns of a round."""
        if self.prefix:
            return MODELS[-1]
        bare = (model for model in self.models if not metric_of(self.reported, f"{model}_"))
        return next(bare, MODELS[0])

    @cached_property
    def test_sets(self) -> dict[str, str]:
        """The test set of every client: its own, or that of its domain, which other clients have too."""
        if self.partition is None:
            return {}
        rows = self.partition.group_by(["client", "split"], use_threads=False).aggregate([]).to_pylist()
        own = {row["client"] for row in rows if row["split"] == "test"}
        return {name: name if name in own else f"domain:{domain}" for name, domain in self.clients.items()}

    def scored_alike(self, model: str) -> dict[str, str]:
        """By client, what it shares with all that have its test set and its model: one score.

        Args:
            model: `global` or `personal`.
        """
        scores = self.now("client", model, self.metric).dropna()
        alone = {str(name): str(name) for name in scores.index}
        if model != MODELS[0] or self.config.get("local", {}).get("stays"):
            return alone
        sets = {name: self.test_sets.get(name, name) for name in alone}
        own_set = [sets[str(name)] for name in scores.index]
        different = scores.groupby(own_set).nunique()  # clients that keep statistics have models that differ
        return {name: own if different[own] == 1 else name for name, own in sets.items()}

    # Who has which examples.

    @cached_property
    def partition(self) -> pa.Table | None:
        """Columns label, domain, client, split, index of `partition.parquet`; None where there is none."""
        path = self.path / "partition.parquet"
        columns = ["label", "domain", "client", "split", "index"]
        return read_parquet(path, columns) if path.exists() else None

    def partition_rows(self, *columns: str) -> list[dict[str, Any]]:
        """Rows of the partition, one for each example, with these columns.

        Raises:
            DamagedError: There is no partition.parquet.
        """
        partition = self.partition
        if partition is None:
            partition = read_parquet(self.path / "partition.parquet")  # which says that it is missing
        rows: list[dict[str, Any]] = partition.select(list(columns)).to_pylist()
        return rows

    @cached_property
    def about_partition(self) -> Mapping[str, Any]:
        """Facts that are stored with the partition: names of `classes`; `population`, clients by domain."""
        path = self.path / "partition.parquet"
        if not path.exists():
            return {}
        stored = (read_footer(path).metadata or {}).get(META, b"{}")
        with reading(path):
            return dict(parse_json(stored))

    @property
    def drawn_clients(self) -> Mapping[str, int]:
        """Number of clients of each domain of a virtual population; else empty."""
        return self.about_partition.get("population", NOBODY)

    @cached_property
    def domains(self) -> list[str]:
        """Names of the domains in the order of the data set, whose samples are stored domain by domain."""
        return [] if self.partition is None else domain_order(self.partition)

    def order(self, domains: Sequence[str]) -> list[str]:
        """Domains in the order of the data set."""
        known = [d for d in self.domains if d in domains]
        return known + [d for d in dict.fromkeys(domains) if d not in known]

    @cached_property
    def held_out(self) -> list[str]:
        """Domains of which no client has an example, in the order of the data set."""
        if self.partition is None:
            return []
        pairs = self.partition.group_by(["domain", "split"], use_threads=False).aggregate([]).to_pylist()
        names = {pair["domain"] for pair in pairs if pair["split"] == NO_CLIENT}
        return [name for name in self.domains if name in names]

    @cached_property
    def owners(self) -> dict[str, str]:
        """Domain of every client, in the order of the partition."""
        if self.partition is None:
            return {}
        pairs = self.partition.group_by(["client", "domain"], use_threads=False).aggregate([]).to_pylist()
        return {pair["client"]: pair["domain"] for pair in pairs if pair["client"]}

    @cached_property
    def clients(self) -> dict[str, str]:
        """Domain of every client, domain by domain, in the order of the data set."""
        places = {domain: place for place, domain in enumerate(self.domains)}
        pairs = sorted(self.owners.items(), key=lambda pair: (places.get(pair[1], 0), pair[0]))
        return dict(pairs)

    # Its final model.

    @cached_property
    def tensors(self) -> Params:
        """The final trainable tensors by global name."""
        return read_tensors(self.path / TENSORS)

    @cached_property
    def adapter(self) -> dict[str, Any]:
        """The description of the final adapter in PEFT's format; empty where there is none."""
        path = self.path / "model" / "adapter_config.json"
        return read_json(path, dict) if path.exists() else {}

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the final tensors; empty where they are missing."""
        with suppress(DamagedError):
            return digest_if_finished(self.path, 1) if self.has_all_rounds else ""
        return ""


def domain_order(partition: pa.Table) -> list[str]:
    """Domains of a partition in the order of the data set, whose samples are stored domain by domain."""
    first = partition.group_by("domain", use_threads=False).aggregate([("index", "min")]).to_pylist()
    return [row["domain"] for row in sorted(first, key=lambda row: row["index_min"])]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of events.jsonl, whose last line may still be written."""
    for line in read_bytes(path).splitlines():
        with suppress(DocumentError):
            event = parse_json(line)
            if isinstance(event, dict):
                yield event
