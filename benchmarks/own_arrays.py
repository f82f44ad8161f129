"""Compares 10,000 clients that are handed over as arrays with a reader of one file of the same images.

    python benchmarks/own_arrays.py --examples 33 --repeats 3

Prints processor seconds and peak memory of preparing the data, each in its own process, one after the
other. With 33 images of 32 x 32 pixels for each client the images take one gigabyte.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rayfed.data.listing import Listing
from rayfed.data.preparation import prepare
from rayfed.data.shards import open_dataset
from rayfed.data.user_data import own_data

CLIENTS = 10_000
SIDE = 32
CLASSES = 10
WAYS = ("arrays", "file")


@dataclass(frozen=True)
class File:
    """Reads images from one .npy file.

    Attributes:
        path: The file, shape (N, 32, 32, 3), uint8.
        images: Its content, mapped.
    """

    path: Path
    images: npt.NDArray[np.uint8]
    name: str = "file"
    sparse: ClassVar[bool] = True

    def fingerprint(self) -> str:
        """Size and time of the file."""
        found = self.path.stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def scan(self) -> Listing:
        """All images, with their clients."""
        number = len(self.images)
        each = number // CLIENTS
        return Listing(
            name=self.name,
            classes=tuple(map(str, range(CLASSES))),
            domains=("all",),
            keys=[f"all/{i // each}/{i}" for i in range(number)],
            labels=labels(number),
            domain=np.zeros(number, np.int64),
            test=np.zeros(number, bool),
            fingerprint=self.fingerprint(),
            owners=[str(i // each) for i in range(number)],
        )

    def decode(self, listing: Listing, index: int, size: int) -> npt.NDArray[np.uint8]:
        """One image."""
        image: npt.NDArray[np.uint8] = self.images[index]
        return image


def labels(number: int) -> npt.NDArray[np.int64]:
    """A class for each image."""
    return np.arange(number) % CLASSES


def measured(way: str, path: Path, cache: Path) -> dict[str, float]:
    """Processor seconds, and peak memory of the process in gigabytes. Args: way: one of WAYS."""
    images = np.load(path, mmap_mode=None if way == "arrays" else "r")
    data: Any = File(path, images)
    if way == "arrays":
        each = len(images) // CLIENTS
        chosen = labels(len(images))
        rows = (slice(i * each, (i + 1) * each) for i in range(CLIENTS))
        data = {str(i): (images[own], chosen[own]) for i, own in enumerate(rows)}
    started = time.process_time()
    found = open_dataset(prepare(own_data(data) if way == "arrays" else data, SIDE, cache))
    seconds = time.process_time() - started
    assert len(found.images) == len(images)
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> None:
    """Measure both ways in turn, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=33, help="images of each client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help="measure one way in this process")
    given = parser.parse_args()
    if given.one:
        way, folder = given.one
        with tempfile.TemporaryDirectory() as cache:
            print(json.dumps(measured(way, Path(folder) / "images.npy", Path(cache))))
        return
    with tempfile.TemporaryDirectory() as folder:
        shape = (CLIENTS * given.examples, SIDE, SIDE, 3)
        np.save(Path(folder) / "images.npy", np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(given.repeats):
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, folder]
                found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    for way, runs in found.items():
        seconds, peak = (median(run[key] for run in runs) for key in ("seconds", "peak"))
        print(f"{way:6}  {seconds:.2f} processor seconds, at most {peak:.2f} GB")


if __name__ == "__main__":
    main()
