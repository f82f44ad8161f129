"""Tables of a run for its figures, the order of its domains and the words of its titles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.objective import SEGMENTATION
from rayfed.record.readers import (
    OWN_TENSORS,
    WITHOUT,
    read_json,
    read_parquet,
    read_table,
    read_yaml,
    rows_so_far,
)
from rayfed.report.style import UNKNOWN, Look, looks

if TYPE_CHECKING:
    import pyarrow as pa

HELD_OUT = "held_out"


class RunTables:
    """The folder of a run, each file of which is read at most once.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tables: dict[str, Sequence[Mapping[str, Any]]] = {}

    def rows(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Rows of a table; none where the run has no such table."""
        if name not in self._tables:
            self._tables[name] = read_table(self.path, name)
        return self._tables[name]

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.path / "config.yaml"
        return read_yaml(path) if path.exists() else {}

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """The row of every round; none before the first."""
        return rows_so_far(self.path)

    @cached_property
    def manifest(self) -> pa.Table | None:
        """Columns label, domain, client, split, index of `partition.parquet`."""
        path = self.path / "partition.parquet"
        columns = ["label", "domain", "client", "split", "index"]
        return read_parquet(path, columns) if path.exists() else None

    @cached_property
    def segmentation(self) -> bool:
        path = self.path / "environment.json"
        return path.exists() and read_json(path, dict).get("task") == SEGMENTATION

    @cached_property
    def own_tensors(self) -> tuple[int, int]:
        """Numbers of clients that kept tensors in the run whose model was scored, and of scored clients."""
        path = self.path / "environment.json"
        found = read_json(path, dict).get(OWN_TENSORS) if path.exists() else None
        return (found["kept"], found["clients"]) if found else (0, 0)

    @cached_property
    def owners(self) -> dict[str, str]:
        """Domain of every client, in the order of the manifest."""
        if self.manifest is None:
            return {}
        pairs = self.manifest.group_by(["client", "domain"], use_threads=False).aggregate([]).to_pylist()
        return {pair["client"]: pair["domain"] for pair in pairs if pair["client"]}

    @cached_property
    def held_out(self) -> list[str]:
        """Domains of which no client has an image, in the order of the data set."""
        if self.manifest is None:
            return []
        pairs = self.manifest.group_by(["domain", "split"], use_threads=False).aggregate([]).to_pylist()
        names = {pair["domain"] for pair in pairs if pair["split"] == HELD_OUT}
        return [name for name in self.domains if name in names]

    @cached_property
    def domains(self) -> dict[str, Look]:
        """The look of every domain, in the order of the data set."""
        return {} if self.manifest is None else looks(domain_order(self.manifest))

    def look(self, domain: str) -> Look:
        return self.domains.get(domain, UNKNOWN)

    @cached_property
    def name(self) -> str:
        """Method, data and seed, for example `fedgcr on digits-five-mini, seed 0`."""
        if not self.config:
            return self.path.name
        return f"{self.config['algorithm']} on {self.config['data']['name']}, seed {self.config['seed']}"

    def title(self, what: str, when: str = "") -> tuple[str, str]:
        """The two lines of a title: what is shown; then method, data, seed and round."""
        return what, self.name + (f", {when}" if when else "")


KINDS = {"adapters": "without_adapters", "head": "without_head"}
"""Kinds of trained tensors that are put back after the last round, with the columns of the scores."""


def scores_without(folder: Path, row: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Scores of the final model with the tensors of each kind put back to their start values.

    Args:
        folder: Folder of a run.
        row: The row of the round that is reported.

    Returns:
        By kind, `clients`, `domains` and `by_domain` (`rayfed.engine.loop.score_without`); None where the
        model was not scored in this way, or the round is not the last one.
    """
    path = folder / WITHOUT
    if not row or not path.exists() or row["round"] != rows_so_far(folder)[-1]["round"]:
        return None
    return {kind: found for kind, found in read_json(path, dict).items() if kind in KINDS}


def own_tensors(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note on methods whose clients keep tensors (`local.stays`); none where there is no such method.

    Args:
        configs: The configs of the runs of a table.
    """
    keeping = dict.fromkeys(str(own["algorithm"]) for own in configs if own.get("local", {}).get("stays"))
    what = "clients are scored with the tensors that stay at them, all else with initial values of these"
    return (f"{', '.join(keeping)}: {what}",) if keeping else ()


def domain_order(manifest: pa.Table) -> list[str]:
    """Domains of a manifest in the order of the data set, whose samples are stored domain by domain."""
    first = manifest.group_by("domain", use_threads=False).aggregate([("index", "min")]).to_pylist()
    return [row["domain"] for row in sorted(first, key=lambda row: row["index_min"])]


def span(numbers: Sequence[int]) -> str:
    """Words for the rounds from the first to the last of these."""
    first, last = min(numbers), max(numbers)
    return f"round {first}" if first == last else f"rounds {first} to {last}"
