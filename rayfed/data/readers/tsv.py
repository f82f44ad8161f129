"""Texts in TSV files, such as those of GLUE: data=tsv data.root=FILE data.columns={text, label, ...}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import TextFiles, read_csv


@dataclass(frozen=True, kw_only=True)
class TSV(TextFiles):
    """Reads files with values between tabs and a header; quotation marks as `has_quotes` says."""

    where: ClassVar[str] = "a TSV file, or a folder with a file for each split, such as train.tsv and dev.tsv"
    suffixes: ClassVar[tuple[str, ...]] = (".tsv",)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        return read_csv(path, "\t")


READER = TSV
