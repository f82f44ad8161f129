"""The folder of one run, finished or not, as the page reads it: each table once, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rayfed.columns import (
    ACCURACY,
    ADAPTED,
    DEPLOYED,
    HELD_OUT,
    MEAN,
    PERSONAL,
    UNSEEN,
    VALIDATED,
    WORST_UNSEEN,
    ResultColumn,
    metric_of,
)
from rayfed.record.history import History
from rayfed.record.readers import DamagedError, read_bytes, read_footer, read_json, read_parquet, reading
from rayfed.report.final_table import MODELS, RunTables, last_evaluated, scores_without
from rayfed.report.protocols import Ties, selected_row
from rayfed.user_files import DocumentError, check_run_folder, parse_json

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = {"report_clients": "client", "report_domains": "domain", "report_held_out": "held out"}
"""Exchanges of the table `clients` that hold scores of the evaluation, and whose scores they are."""

NEVER_TRAIN = {
    "unseen clients": (MEAN, UNSEEN),
    WORST_UNSEEN.words: (WORST_UNSEEN, UNSEEN),
    "unseen clients, adapted": (MEAN, ADAPTED),
}
"""Columns of a round about clients that never train, with the beginnings of their names, by their words."""


class PageRun:
    """One run. Its files are read when they are needed.

    Args:
        path: Folder of the run.
        by_validation: Report the round with the best validation score instead of the last evaluated one.

    Raises:
        ConfigError: The folder holds no run.
        DamagedError: config.yaml is not that of a run.
    """

    def __init__(self, path: Path, by_validation: bool = False) -> None:
        check_run_folder(path)
        self.path = path
        self.by_validation = by_validation
        self.tables = RunTables(path)
        self._frames: dict[tuple[str, ...], pd.DataFrame] = {}
        self._history: dict[str, list[pa.Table]] | None = None
        with reading(path, f"{path}: holds no run (config.yaml is not that of a run)"):
            self.config: Mapping[str, Any] = self.tables.config
            self.method = str(self.config["algorithm"])
            self.data = str(self.config["data"]["name"])
            self.planned = int(self.config["rounds"])
            self.seed = int(self.config["seed"])

    def read(self) -> None:
        """Read what pages about several runs show.

        Raises:
            DamagedError: A file cannot be read.
        """
        _ = self.row, self.scores, self.clients, self.environment

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The row of every finished round."""
        return self.tables.rounds

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        path = self.path / "environment.json"
        return read_json(path, dict) if path.exists() else {}

    @cached_property
    def row(self) -> Mapping[str, Any]:
        """The row of the reported round; empty where no round was evaluated."""
        if self.by_validation and any(metric_of(row, VALIDATED) for row in self.rounds):
            return selected_row(self.rounds, self.ties)
        return last_evaluated(self.rounds) or next(
            (row for row in reversed(self.rounds) if self._prefixes(row)), {}
        )

    @property
    def ties(self) -> Ties:
        """The round that counts among those with the best validation score: the first or the last."""
        return "last" if self.config.get("evaluation", {}).get("ties") == "last" else "first"

    @staticmethod
    def _prefixes(row: Mapping[str, Any]) -> list[str]:
        return [prefix for prefix in (DEPLOYED, PERSONAL, HELD_OUT) if metric_of(row, prefix)]

    @property
    def prefix(self) -> str:
        """Prefix of the columns of a round with the scores of the clients."""
        return DEPLOYED if metric_of(self.row) else PERSONAL

    @cached_property
    def metric(self) -> str:
        """Name of the metric."""
        metrics = (metric_of(self.row, prefix) for prefix in (DEPLOYED, PERSONAL, HELD_OUT))
        return next((name for name in metrics if name), ACCURACY)

    def number(self, column: ResultColumn) -> float | None:
        """A number of the reported round; None if it has none."""
        value = self.row.get(column.name(self.metric, self.prefix))
        return float(value) if isinstance(value, int | float) else None

    @cached_property
    def without(self) -> dict[str, float]:
        """Mean over domains of the final global model without the tensors of a kind, by kind."""
        scores = scores_without(self.path, self.row) or {}
        return {kind: one["domains"] for kind, one in scores.items() if one["domains"] is not None}

    @property
    def held_out_score(self) -> float | None:
        """Mean over the domains of which no client has an example."""
        return self.row.get(MEAN.name(self.metric, HELD_OUT))

    @property
    def unseen(self) -> dict[str, float]:
        """Scores of the clients that never train, in the reported round; empty where all clients train."""
        names = {words: column.name(self.metric, of) for words, (column, of) in NEVER_TRAIN.items()}
        return {words: self.row[name] for words, name in names.items() if self.row.get(name) is not None}

    def columns_of(self, name: str) -> list[str]:
        """Names of the columns of a table; none where the run has no such table."""
        path = self.path / f"{name}.parquet"
        if path.exists():
            return list(read_footer(path).schema.to_arrow_schema().names)
        return list(dict.fromkeys(c for table in self._parts(name) for c in table.column_names))

    def frame(self, name: str, columns: Sequence[str]) -> pd.DataFrame:
        """Columns of a table; without rows where the run has no such table. Texts are categories.

        Of a run that is not finished, the rounds so far.

        Raises:
            DamagedError: The file cannot be read, or has no such columns.
        """
        key = (name, *columns)
        if key not in self._frames:
            import pyarrow as pa

            path = self.path / f"{name}.parquet"
            with reading(path):
                if path.exists():
                    table = read_parquet(path, columns)
                elif parts := self._parts(name):
                    table = pa.concat_tables(parts, promote_options="permissive").select(list(columns))
                else:
                    return pd.DataFrame(columns=list(columns))
                self._frames[key] = table.to_pandas(strings_to_categorical=True)
        return self._frames[key]

    def _parts(self, name: str) -> Sequence[pa.Table]:
        """Tables of this name in the history, one a round, of a run that has no tables yet."""
        if self._history is None:
            from rayfed.record.atomic_files import to_table

            self._history = {}
            for entry in History(self.path).entries():
                for each, rows in entry["tables"].items():
                    if rows:
                        self._history.setdefault(each, []).append(to_table(rows))
        return self._history.get(name, [])

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Scores of the evaluations.

        Returns:
            Columns round, of (`client`, `domain` or `held out`), name (of the client or domain), domain,
            model, metric, value (NaN where it was not finite).
        """
        columns = ["round", "exchange", "client", "domain", "model", "metric", "value"]
        scores = self.frame("clients", columns)
        scores = scores[scores["exchange"].isin(list(KINDS)) & scores["model"].isin(list(MODELS))]
        scores = scores.rename(columns={"client": "name"})
        scores["of"] = scores["exchange"].map(KINDS).astype(str)
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
        rows = rows[rows["round"] == self.row.get("round", 0)]
        rows = rows[(rows["of"] == of) & (rows["model"] == model) & (rows["metric"] == metric)]
        return rows.drop_duplicates("name").set_index("name")["value"]

    def of_clients(self, model: str) -> npt.NDArray[np.float64]:
        """Scores of all clients in the reported round, in the order of `now`, without those that are NaN."""
        return np.asarray(self.now("client", model, self.metric).dropna(), dtype=np.float64)

    @cached_property
    def test_sets(self) -> dict[str, str]:
        """The test set of every client: its own, or that of its domain, which other clients have too."""
        if self.tables.manifest is None:
            return {}
        rows = self.tables.manifest.group_by(["client", "split"], use_threads=False).aggregate([]).to_pylist()
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
        bare = (model for model in self.models if not metric_of(self.row, f"{model}_"))
        return next(bare, MODELS[0])

    def order(self, domains: Sequence[str]) -> list[str]:
        """Domains in the order of the data set."""
        known = [d for d in self.tables.domains if d in domains]
        return known + [d for d in dict.fromkeys(domains) if d not in known]

    @cached_property
    def clients(self) -> dict[str, str]:
        """Domain of every client, domain by domain, in the order of the data set."""
        places = {domain: place for place, domain in enumerate(self.tables.domains)}
        pairs = sorted(self.tables.owners.items(), key=lambda pair: (places.get(pair[1], 0), pair[0]))
        return dict(pairs)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Failures and what was done about them; of a run that is not finished, those so far."""
        path = self.path / "events.parquet"
        if path.exists():
            return [dict(row) for row in read_parquet(path).to_pylist()]
        lines = self.path / "events.jsonl"
        return list(_events(lines)) if lines.exists() else []

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the final tensors; empty where they are missing."""
        from rayfed.record.folder import digest_if_finished

        with suppress(DamagedError):
            return digest_if_finished(self.path, 1) if len(self.rounds) >= self.planned else ""
        return ""

    @property
    def commands(self) -> list[str]:
        """The command lines with which the run was started and continued."""
        commands = self.environment.get("commands")
        return [str(command) for command in commands] if isinstance(commands, list) else []


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of events.jsonl, whose last line may still be written."""
    for line in read_bytes(path).splitlines():
        with suppress(DocumentError):
            event = parse_json(line)
            if isinstance(event, dict):
                yield event
