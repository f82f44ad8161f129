"""MedQuAD: medical questions with answers of nine institutes, in XML files by institute.

Ben Abacha and Demner-Fushman, A Question-Entailment Approach to Question Answering, BMC Bioinformatics 2019.
CC BY 4.0. The category of a sample is the type of its question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from rayfed.data.named.texts import ONE_CLASS, Sample, TextReader
from rayfed.data.text import Text
from rayfed.errors import DataError, one_line
from rayfed.objective import LANGUAGE_MODELING

INSTITUTE = re.compile(r"\d+_(?P<name>\w+?)(_QA(_XML)?)?")
"""Name of a folder: a number, the institute, and the kind of the files."""


@dataclass(frozen=True, kw_only=True)
class MedQuAD(TextReader):
    """Reads every question that has an answer; an institute is a domain."""

    task: ClassVar[str] = LANGUAGE_MODELING
    where: ClassVar[str] = "the folder of abachaa/MedQuAD that holds 1_CancerGov_QA and the other institutes"

    @cached_property
    def _files(self) -> Sequence[Path]:
        found = sorted(path for path in self._root.glob("*/*.xml") if INSTITUTE.fullmatch(path.parent.name))
        if not found:
            raise DataError(
                f"data.root: no file <number>_<institute>/*.xml in {self._root}; give {self.where}"
            )
        return found

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        found = [sample for path in self._files for sample in _of(path)]
        if not found:
            raise DataError(f"data.root: no question in {self._root} has an answer; give {self.where}")
        return found


def _of(path: Path) -> Iterator[Sample]:
    """The questions of a document that have answers."""
    match = INSTITUTE.fullmatch(path.parent.name)
    assert match is not None
    try:
        document = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as err:
        raise DataError(f"data.root: {path} cannot be read as XML ({one_line(err)})") from err
    for number, pair in enumerate(document.iter("QAPair")):
        question, answer = (" ".join((pair.findtext(tag) or "").split()) for tag in ("Question", "Answer"))
        if question and answer:
            asked = pair.find("Question")
            kind = (asked.get("qtype") if asked is not None else None) or ONE_CLASS
            yield Sample(
                text=Text(text=question, answer=answer),
                label=kind,
                name=f"{path.stem}-{number:02d}",
                domain=match["name"],
            )


READER = MedQuAD
