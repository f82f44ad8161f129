"""BANKING77: questions of customers of a bank, 77 intents; train.csv and test.csv with text and category.

Casanueva et al., Efficient Intent Detection with Dual Sentence Encoders, NLP4ConvAI 2020. CC BY 4.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from rayfed.data.named.texts import Sample, TextReader, read_csv
from rayfed.data.text import Text
from rayfed.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Banking77(TextReader):
    """Reads both files; the second is the official test split."""

    where: ClassVar[str] = (
        "the folder with train.csv and test.csv of PolyAI's task-specific-datasets, banking_data"
    )

    @property
    def _files(self) -> Sequence[Path]:
        return self._require_files("train.csv", "test.csv")

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        found = []
        for path in self._files:
            for number, row in enumerate(read_csv(path)):
                if not {"text", "category"} <= row.keys():
                    raise DataError(f"data.root: {path} has no columns text and category; give {self.where}")
                name = f"{path.stem}-{number:05d}"
                text = Text(text=row["text"].strip())
                found.append(Sample(text=text, label=row["category"], name=name, test=path.stem == "test"))
        return found


READER = Banking77
