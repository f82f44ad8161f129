"""Texts in Parquet files: data=parquet data.root=FILE data.columns={text, label, client, domain, ...}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import TextFiles, orders_in_parquet, read_parquet


@dataclass(frozen=True, kw_only=True)
class Parquet(TextFiles):
    """Reads Parquet files."""

    where: ClassVar[str] = "a Parquet file, or a folder with a file for each split"
    fills: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        return read_parquet(path)

    @cached_property
    def _orders(self) -> Mapping[str, Sequence[str]]:
        """Those of dictionary columns, where all files have the same."""
        found = [orders_in_parquet(path) for path in self._files]
        return {
            name: order for name, order in found[0].items() if all(own.get(name) == order for own in found)
        }


READER = Parquet
