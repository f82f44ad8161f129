"""Texts in Parquet files: data=parquet data.root=FILE data.columns={text, label, client, domain, ...}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import TextFiles, read_parquet


@dataclass(frozen=True, kw_only=True)
class Parquet(TextFiles):
    """Reads Parquet files."""

    where: ClassVar[str] = "a Parquet file, or a folder with a file for each split"
    fills: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        return read_parquet(path)


READER = Parquet
