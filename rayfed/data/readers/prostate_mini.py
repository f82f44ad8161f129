"""The embedded data set prostate-mini: volumes with a gland, a bladder above and a rectum below it.

Synthetic prostate MRI of six sites; the shapes are not anatomical. The data set is a segmentation problem of
the same form as Fed-Prostate, with differences between sites (contrast, noise, brightness of the coil, size
of the gland), which runs without a download.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, resources
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.formats.slices import Volume, make_volume, usable_slices
from rayfed.data.source import Decoded, Listing
from rayfed.objective import SEGMENTATION
from rayfed.seeds import generator

SIDE = 48
"""Height and width of a volume in pixels."""
DEPTH = 8
"""Number of slices of a volume."""


@dataclass(frozen=True)
class Site:
    """Number of patients of a site, and properties of its scanner.

    Attributes:
        cases: Number of patients.
        gland: Intensity of the gland relative to the tissue around it.
        noise: Standard deviation of the noise, relative to the tissue.
        coil: Relative difference of brightness between the two ends of the vertical axis.
        radius: Mean radius of the gland in pixels.
        gain: Factor on all intensities; standardising removes it.
    """

    cases: int
    gland: float
    noise: float
    coil: float
    radius: float
    gain: float


SITES = {
    "RUNMC": Site(cases=10, gland=1.5, noise=0.15, coil=0.0, radius=9, gain=100),
    "BMC": Site(cases=10, gland=1.4, noise=0.2, coil=0.4, radius=8, gain=400),
    "HCRUDB": Site(cases=9, gland=1.6, noise=0.3, coil=0.0, radius=11, gain=60),
    "UCL": Site(cases=8, gland=1.3, noise=0.2, coil=-0.4, radius=8, gain=250),
    "BIDMC": Site(cases=8, gland=0.6, noise=0.2, coil=0.2, radius=10, gain=900),
    "HK": Site(cases=8, gland=1.5, noise=0.4, coil=0.6, radius=7, gain=150),
}


def make_case(site: str, number: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Make the intensities, float32, and the mask, uint8, of a patient, both (SIDE, SIDE, DEPTH).

    Args:
        site: Name of the site.
        number: Number of the patient within the site, from 0.
    """
    look = SITES[site]
    rng = generator(0, "prostate_mini", site, number)
    y, x, z = np.meshgrid(np.arange(SIDE), np.arange(SIDE), np.arange(DEPTH), indexing="ij")
    middle = np.array([SIDE / 2, SIDE / 2]) + rng.uniform(-5, 5, 2)
    radii = look.radius * rng.uniform(0.8, 1.2, 2)
    height = rng.uniform(2.2, 3.4)
    centre = DEPTH / 2 - 0.5 + rng.uniform(-0.5, 0.5)
    across = ((y - middle[0]) / radii[0]) ** 2 + ((x - middle[1]) / radii[1]) ** 2
    mask = across + ((z - centre) / height) ** 2 < 1
    bladder = ((y - middle[0] + 1.6 * radii[0]) / 5) ** 2 + ((x - middle[1]) / 9) ** 2 < 1
    rectum = ((y - middle[0] - 1.5 * radii[0]) / 4) ** 2 + ((x - middle[1] - rng.uniform(-3, 3)) / 5) ** 2 < 1
    body = ((y - SIDE / 2) / 22) ** 2 + ((x - SIDE / 2) / 23) ** 2 < 1
    volume = np.where(body, 1.0, 0.1)
    for part, brightness in ((bladder & body, 1.9), (rectum & body, 0.3), (mask, look.gland)):
        volume[part] = brightness
    volume *= 1 + look.coil * (y / SIDE - 0.5)
    volume = np.abs(volume + look.noise * rng.standard_normal(volume.shape))
    return (look.gain * volume).astype(np.float32), mask.astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class ProstateMini:
    """Six sites with 8 to 10 patients each, and about 5 slices of 48 x 48 pixels for each patient."""

    name: str

    task: ClassVar[str] = SEGMENTATION

    def fingerprint(self) -> str:
        out = hashlib.sha256(f"numpy={metadata.version('numpy')}\n".encode())
        for file in ("readers/prostate_mini.py", "formats/slices.py"):
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
