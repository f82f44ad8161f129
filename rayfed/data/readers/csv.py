"""Texts in CSV files: data=csv data.root=FILE data.columns={text, label, client, domain, ...}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import TextFiles, read_csv


@dataclass(frozen=True, kw_only=True)
class CSV(TextFiles):
    """Reads files with comma-separated values and a header."""

    where: ClassVar[str] = (
        "a CSV file, or a folder with a file for each split, such as train.csv and test.csv"
    )
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        return read_csv(path)


READER = CSV
