"""CLINC150: questions to an assistant, 150 intents in 10 domains; data_full.json and domains.json.

Larson et al., An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction, EMNLP 2019.
CC BY 3.0. Questions out of scope are left out. Every domain has its own 15 intents, so that a model that was
never trained on a domain cannot know its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rayfed.data.named.texts import Sample, TextReader, read_text
from rayfed.data.text import Text
from rayfed.errors import DataError
from rayfed.user_files import parse_json

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Clinc150(TextReader):
    """Reads the questions of all domains; `train` and `val` are for training, `test` is the test split."""

    where: ClassVar[str] = "the folder with data_full.json and domains.json of clinc/oos-eval"

    @property
    def _files(self) -> Sequence[Path]:
        return self._require_files("data_full.json", "domains.json")

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        questions, domains = (self._read(path) for path in self._files)
        of_intent = {intent: domain for domain, intents in domains.items() for intent in intents}
        found = []
        for split in SPLITS:
            for number, row in enumerate(questions.get(split, ())):
                if not (
                    isinstance(row, list) and len(row) == len(("text", "intent")) and row[1] in of_intent
                ):
                    raise DataError(
                        f"data.root: entry {number} of {split} is no [question, intent] with an intent of "
                        f"domains.json; give {self.where}"
                    )
                found.append(
                    Sample(
                        text=Text(text=row[0]),
                        label=row[1],
                        name=f"{split}-{number:05d}",
                        test=split == "test",
                        domain=of_intent[row[1]],
                    )
                )
        return found

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = parse_json(read_text(path))
        except ValueError as err:
            raise DataError(f"data.root: {path} is not JSON ({err}); give {self.where}") from err
        if not isinstance(found, dict):
            raise DataError(f"data.root: {path} is no JSON object; give {self.where}")
        return found


READER = Clinc150
