"""Time to prepare a data set, compared with decoding it with Pillow; time of a second start; memory by size.

    python benchmarks/prepare_data.py --root ../shared/data/PACS

Decoding is a plain loop: open, convert to RGB, resize to the size of the model if it differs, into an array.
Preparing does the same in the threads it would use, and makes the shard. Both are repeated in turns; the
first turn warms the disk's cache and is not counted. Memory is that of anonymous pages while a
process prepares synthetic images of 64 x 64 pixels, each number of images in its own process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.data.preparation import prepare
from rayfed.data.readers.image_folder import ImageFolder
from rayfed.data.shards import open_dataset

COUNTS = (2_500, 5_000, 10_000, 20_000)


def decode(source: ImageFolder, root: Path, size: int) -> float:
    """Seconds to decode every image once, one after the other."""
    keys = source.scan().keys
    began = time.perf_counter()
    for key in keys:
        with Image.open(root / key) as image:
            rgb = image.convert("RGB")
        np.asarray(rgb if rgb.size == (size, size) else rgb.resize((size, size), Image.Resampling.BICUBIC))
    return time.perf_counter() - began


def prepared(source: ImageFolder, size: int, cache: Path) -> tuple[float, float, int]:
    """Seconds to prepare, seconds of a second start, files of the data set that the second start opened."""
    began = time.perf_counter()
    prepare(source, size, cache)
    first = time.perf_counter() - began
    opened: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None
    )
    began = time.perf_counter()
    open_dataset(prepare(source, size, cache))
    second = time.perf_counter() - began
    watching = False
    return first, second, sum(str(source.root) in name for name in opened)


def memory(count: int) -> None:
    """Prepare `count` images and print by how many MB anonymous memory rose."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "data"
        cache = Path(folder) / "cache"
        cache.mkdir()
        rng = np.random.default_rng(0)
        for number in range(count):
            place = root / f"d{number % 2}" / f"c{number % 5}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(place / f"{number}.jpg")
        source = ImageFolder(name="synthetic", root=str(root))
        prepare(source, 32, cache)  # imports and thread stacks
        before = anonymous()
        peak = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.01):
                peak = max(peak, anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        prepare(source, 64, cache)
        done.set()
        watcher.join()
        print(f"{(max(peak, anonymous()) - before) / 1000:.1f}")


def anonymous() -> int:
    """Anonymous resident memory of this process in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="../shared/data/PACS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[227, 224])
    parser.add_argument(
        "--counts", type=int, nargs="*", default=list(COUNTS), help="images to measure memory with"
    )
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory(args.memory)
        return
    root = Path(args.root).absolute()
    source = ImageFolder(name="pacs", root=str(root))
    print(f"{len(source.scan().keys)} images of {root.name}")
    for size in args.sizes:
        rows = []
        for _ in range(args.repeats + 1):
            plain = decode(source, root, size)
            with tempfile.TemporaryDirectory() as cache:
                rows.append((plain, *prepared(source, size, Path(cache))))
        plain, first, second, opened = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        ratio = statistics.median(row[1] / row[0] for row in rows[1:])
        print(
            f"size {size}: Pillow {plain:.2f} s, prepare {first:.2f} s, ratio {ratio:.2f} (limit 1.3); "
            f"second start {second:.3f} s (limit 0.5), image files opened {opened:.0f}"
        )
    for count in args.counts:
        command = [sys.executable, __file__, "--memory", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        data = count * 64 * 64 * 3 / 1e6
        print(f"{count:>6} images of 64 x 64 ({data:.0f} MB): {done.stdout.strip()} MB more at the peak")


if __name__ == "__main__":
    main()
