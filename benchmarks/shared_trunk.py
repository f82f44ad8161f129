"""Time of `compare` of three methods that train only the head, over the time of the first one alone.

    python -m benchmarks.shared_trunk --images 100 --rounds 3 --repeats 3

Both are whole commands on Ray, from the start of Python to the report. They alternate, each time with an
empty folder of frozen features. The weights are random, as the time does not depend on them. The benchmark
also checks that the first method has the same tensors in both. The last line is `ratio X`, the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rayfed.federation.params import digest
from rayfed.models.trunk import FEATURES
from rayfed.record.readers import read_tensors

METHODS = ("fedavg", "afl", "fedprox")


def seconds_of(method: str, output: Path, cache: Path, fixed: Sequence[str]) -> float:
    """Seconds of one command, without features from earlier ones."""
    shutil.rmtree(cache / FEATURES, ignore_errors=True)
    command = [sys.executable, "-m", "rayfed.run", *fixed, method, f"output={output}", "overwrite=true"]
    began = time.perf_counter()
    subprocess.run([*command, f"data.cache={cache}", "--quiet"], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a model of timm")
    parser.add_argument("--images", type=int, default=100, help="images of each of the five domains")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    fixed = [
        f"model={options.model}", "model.pretrained=false", "tuning=head", f"data.limit={options.images}",
        f"rounds={options.rounds}", "cluster.dashboard=false", "tensorboard=false",
    ]  # fmt: skip
    asked = {"alone": f"algorithm={METHODS[0]}", "three": f"compare=[{','.join(METHODS)}]"}
    spent: dict[str, list[float]] = {name: [] for name in asked}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = [text for text in fixed if not text.startswith("rounds")] + ["rounds=1"]
        seconds_of(asked["alone"], folder / "warm", folder / "cache", prepared)
        for number in range(1, options.repeats + 1):
            for what, method in asked.items():
                spent[what].append(seconds_of(method, folder / what, folder / "cache", fixed))
            print(
                f"repeat {number}: alone {spent['alone'][-1]:.1f} s, three {spent['three'][-1]:.1f} s",
                flush=True,
            )
        first = [folder / "alone", folder / "three" / "cells" / f"{METHODS[0]}-seed0"]
        tensors = {digest(read_tensors(each / "model" / "params.safetensors")) for each in first}
    print(f"same tensors of {METHODS[0]} in both: {len(tensors) == 1}")
    ratio = statistics.median(spent["three"]) / statistics.median(spent["alone"])
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
