"""The embedded data set prostate-mini: synthetic volumes, see `rayfed.data.embedded.prostate_mini`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, resources
from typing import ClassVar

import numpy as np

from rayfed.data.embedded.prostate_mini import SITES, make_case
from rayfed.data.formats.slices import Volume, make_volume, usable_slices
from rayfed.data.source import Decoded, Listing
from rayfed.objective import SEGMENTATION


@dataclass(frozen=True, kw_only=True)
class ProstateMini:
    """Six sites with 8 to 10 patients each, and about 5 slices of 48 x 48 pixels for each patient."""

    name: str

    task: ClassVar[str] = SEGMENTATION

    def fingerprint(self) -> str:
        out = hashlib.sha256(f"numpy={metadata.version('numpy')}\n".encode())
        for file in ("embedded/prostate_mini.py", "formats/slices.py"):
            out.update(resources.files("rayfed.data").joinpath(file).read_bytes())
        return f"prostate_mini/1:{out.hexdigest()}"

    def scan(self) -> Listing:
        keys = [
            f"{key}/{place}" for key, volume in self._volumes.items() for place in usable_slices(volume.mask)
        ]
        sites = list(SITES)
        return Listing(
            name=self.name,
            classes=("background", "prostate"),
            domains=tuple(sites),
            keys=keys,
            labels=np.ones(len(keys), dtype=np.int64),
            domain=np.array([sites.index(key.split("/")[0]) for key in keys], dtype=np.int64),
            test=np.zeros(len(keys), dtype=np.bool_),
            fingerprint=self.fingerprint(),
            grouped=True,
        )

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        key, _, place = listing.keys[index].rpartition("/")
        return self._volumes[key].slice(int(place), size)

    @cached_property
    def _volumes(self) -> dict[str, Volume]:
        return {
            f"{name}/Case{number:02d}": make_volume(*make_case(name, number))
            for name, site in SITES.items()
            for number in range(site.cases)
        }


READER = ProstateMini
