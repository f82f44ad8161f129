"""GSM8K: word problems with worked answers that end with `#### n`; train.jsonl and test.jsonl.

Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021. MIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from rayfed.data.named.texts import ONE_CLASS, Sample, TextReader, read_jsonl
from rayfed.data.text import Text
from rayfed.errors import DataError
from rayfed.objective import LANGUAGE_MODELING


@dataclass(frozen=True, kw_only=True)
class GSM8K(TextReader):
    """Reads both files; the second is the official test split."""

    task: ClassVar[str] = LANGUAGE_MODELING
    where: ClassVar[str] = "the folder with train.jsonl and test.jsonl of openai/grade-school-math"

    @property
    def _files(self) -> Sequence[Path]:
        return self._require_files("train.jsonl", "test.jsonl")

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        found = []
        for path in self._files:
            for number, row in enumerate(read_jsonl(path)):
                parts = [row.get("question"), row.get("answer")]
                if not all(isinstance(part, str) for part in parts):
                    raise DataError(
                        f"data.root: row {number + 1} of {path} has no question and answer; give {self.where}"
                    )
                text = Text(text=str(parts[0]), answer=str(parts[1]))
                name = f"{path.stem}-{number:05d}"
                found.append(Sample(text=text, label=ONE_CLASS, name=name, test=path.stem == "test"))
        return found


READER = GSM8K
