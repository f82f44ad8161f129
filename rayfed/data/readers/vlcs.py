"""VLCS in its two public layouts.

  <root>/<domain>/<class>/<image>                         as in DomainBed
  <root>/<DOMAIN>/{train,crossval,test}/<0..4>/<image>    as first released, with an official test split
  <root>/<DOMAIN>/full/<0..4>/<image>                     the same images again; read if they are alone

DOMAIN is CALTECH, LABELME, PASCAL or SUN; the numbers stand for bird, car, chair, dog, person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayfed.data.readers.image_folder import ImageFolder, Place, subfolders

NAMES = {"CALTECH": "Caltech101", "LABELME": "LabelMe", "PASCAL": "VOC2007", "SUN": "SUN09"}
CLASSES = ("bird", "car", "chair", "dog", "person")
HALVES = ("train", "crossval", "test")
ALIASES = NAMES | {str(number): name for number, name in enumerate(CLASSES)}


@dataclass(frozen=True, kw_only=True)
class Vlcs(ImageFolder):
    """Reads VLCS. Names and keys are those of DomainBed; those of the first release contain the split too."""

    aliases: dict[str, str] = field(default_factory=ALIASES.copy, init=False)

    def _place(self, path: str) -> Place | None:
        place = super()._place(path)
        if place is None or place.class_name not in (*HALVES, "full"):
            return place
        half = place.class_name
        number, _, rest = place.rest.partition("/")
        if not rest or (half == "full" and self._has_halves(path.split("/", 1)[0])):
            return None
        return Place(place.domain, self._name(number), f"{half}/{rest}", half == "test")

    def _path(self, key: str) -> Path:
        domain, class_name, rest = key.split("/", 2)
        half, _, file = rest.partition("/")
        if half not in (*HALVES, "full"):
            return super()._path(key)
        return self._inside(self._folder(), domain, half, class_name) / file

    def _class_names(self, root: Path, domains: Sequence[str]) -> set[str]:
        names = super()._class_names(root, domains)
        return names - {*HALVES, "full"} | (set(CLASSES) if names & {*HALVES, "full"} else set())

    def _has_halves(self, domain: str) -> bool:
        return bool({*HALVES} & {*subfolders(self._folder() / domain)})


READER = Vlcs
