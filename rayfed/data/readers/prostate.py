"""Prostate MRI of six sites (Fed-Prostate) as released with SAML: NIfTI volumes, one folder for each site.

Liu, Dou, Heng, Shape-aware Meta-learning for Generalizing Prostate MRI Segmentation, MICCAI 2020.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.formats.slices import Volume, make_volume, usable_slices
from rayfed.data.source import BadImageError, Decoded, Listing
from rayfed.errors import ConfigError, DataError
from rayfed.objective import SEGMENTATION

SITES = {
    "RUNMC": ("ISBI",),
    "BMC": ("ISBI_1.5",),
    "HCRUDB": ("I2CVB",),
    "UCL": (),
    "BIDMC": (),
    "HK": (),
}
"""The sites A to F of the papers in this order, with other names of their folders."""
LAYOUT = "<root>/<site>/<case>.nii.gz with <case>_segmentation.nii.gz"
SUFFIX = ".nii.gz"
MASK = "_segmentation"
KEPT = 8
"""Number of volumes that stay in memory while slices are prepared."""
_LOADING = Lock()


@dataclass(frozen=True)
class Case:
    """The two NIfTI files of a patient."""

    image: Path
    mask: Path


@dataclass(frozen=True, kw_only=True)
class Prostate:
    """Reads the slices that show the prostate, except the first and the last slice of a volume.

    Sites are in the order of the papers, A to F; sites without a folder are left out.
    """

    name: str
    root: str | None

    task: ClassVar[str] = SEGMENTATION

    def fingerprint(self) -> str:
        out = hashlib.sha256()
        for key, case in self._cases.items():
            for path in (case.image, case.mask):
                about = path.stat()
                out.update(f"{key}/{path.name}|{about.st_size}|{about.st_mtime_ns}\n".encode())
        return f"prostate/1:{out.hexdigest()}"

    def scan(self) -> Listing:
        domains = list(dict.fromkeys(key.split("/")[0] for key in self._cases))
        keys = [
            f"{key}/{place:03d}"
            for key, case in self._cases.items()
            for place in usable_slices(_read(case.mask, DataError))
        ]
        if not keys:
            raise DataError(f"data.root: no slice of the {len(self._cases)} cases shows a prostate")
        return Listing(
            name=self.name,
            classes=("background", "prostate"),
            domains=tuple(domains),
            keys=keys,
            labels=np.ones(len(keys), dtype=np.int64),
            domain=np.array([domains.index(key.split("/")[0]) for key in keys], dtype=np.int64),
            test=np.zeros(len(keys), dtype=np.bool_),
            fingerprint=self.fingerprint(),
            grouped=True,
        )

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        key, _, place = listing.keys[index].rpartition("/")
        with _LOADING:  # so that only one thread loads a volume
            volume = self._volume(key)
        return volume.slice(int(place), size)

    @cached_property
    def _volume(self) -> Callable[[str], Volume]:
        return lru_cache(KEPT)(lambda key: _volume(self._cases[key]))

    @cached_property
    def _cases(self) -> dict[str, Case]:
        """All cases by `site/case`."""
        root = self._folder()
        folders = {site: [root / name for name in (site, *others)] for site, others in SITES.items()}
        present = {site: next((f for f in names if f.is_dir()), None) for site, names in folders.items()}
        cases = {
            f"{site}/{name}": case
            for site, folder in present.items()
            if folder is not None
            for name, case in _cases_of(folder).items()
        }
        if not cases:
            raise DataError(f"data.root: no cases in {root}; expected {LAYOUT}, sites {', '.join(SITES)}")
        return cases

    def _folder(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}, laid out as {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        if not folder.is_dir():
            raise DataError(
                f"data.root: folder {folder} does not exist; give the folder laid out as {LAYOUT}"
            )
        return folder


def _cases_of(folder: Path) -> dict[str, Case]:
    """Cases of a site by name; `_Segmentation` counts as `_segmentation`."""
    files = {path.name.lower().removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    cases = {}
    for name, path in files.items():
        if name.endswith(MASK):
            continue
        case = path.name.removesuffix(SUFFIX)
        if name + MASK not in files:
            raise DataError(f"{path} has no mask: {case}{MASK}{SUFFIX} is not in the same folder")
        cases[case] = Case(image=path, mask=files[name + MASK])
    return cases


def _volume(case: Case) -> Volume:
    image, mask = (_read(path, BadImageError) for path in (case.image, case.mask))
    try:
        return make_volume(image, mask)
    except ValueError as err:
        raise BadImageError(f"{case.image}: {err}") from err


def _read(path: Path, kind: type[DataError]) -> NDArray[Any]:
    """Read a NIfTI volume as an array of shape (H, W, D).

    Args:
        kind: Type of the error to raise if the file cannot be read.

    Raises:
        ConfigError: nibabel is not installed.
    """
    try:
        import nibabel
    except ImportError as err:
        message = "data.reader: 'prostate' needs nibabel; install rayfed-sim[segmentation]"
        raise ConfigError(message) from err
    broken = (OSError, EOFError, ValueError, zlib.error, nibabel.filebasedimages.ImageFileError)
    try:
        volume = np.asanyarray(nibabel.Nifti1Image.from_filename(path).dataobj)
    except broken as err:
        raise kind(f"{path} is not a NIfTI volume ({err})") from err
    return volume.swapaxes(0, 1)


READER = Prostate
