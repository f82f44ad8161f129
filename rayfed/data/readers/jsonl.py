"""Texts in files with a JSON object a line: data=jsonl data.root=FILE data.columns={prompt, ...}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import TextFiles, read_jsonl


@dataclass(frozen=True, kw_only=True)
class JSONLines(TextFiles):
    """Reads files with one JSON object a line, one list of objects, a list for each client, or LEAF's."""

    where: ClassVar[str] = "a file with one JSON object a line, or a folder with one for each split"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        return read_jsonl(path)


READER = JSONLines
