"""Time of scoring the global model on the test sets of many clients, one image each, in two actors.

LoRA on vit_mini; 50 clients train in a round. Prints the seconds of training and of scoring of each round
after the first, the medians, and the CPU seconds a round of driver and client actors, which other jobs of the
machine change little.

    python benchmarks/scoring_cost.py [--clients 10000] [--rounds 4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


TITLES = ("ray::DriverActor", "ray::rayfed:", "ray::ClientActor", "ray::fit", "ray::report")
"""Beginnings of the titles that Ray gives the driver and the client actors."""


def cpu_seconds() -> float:
    """CPU seconds that the driver and the client actors have used."""
    children = psutil.Process().children(recursive=True)
    ours = (child for child in children if " ".join(child.cmdline()).startswith(TITLES))
    return float(sum(sum(child.cpu_times()[:2]) for child in ours))


def write_images(folder: Path, count: int) -> None:
    """Random images of 32 x 32 pixels in ten classes of one domain."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(10):
        (folder / "all" / str(label)).mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "all" / str(i % 10) / f"{i:06d}.bmp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    from rayfed.config.schema import load_config
    from rayfed.engine.launch import launch
    from rayfed.engine.setup import prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", 2 * args.clients)
        config = load_config(
            [
                *("algorithm=fedavg", "tuning=lora", "data=image_folder", f"data.root={folder / 'images'}"),
                *(f"data.cache={folder}", "data.name=benchmark", "data.val=0", "data.test=0.5"),
                *(f"data.partition.clients_per_domain={args.clients}", "clients_per_round=50"),
                *("cluster.actors=2", "cluster.dashboard=false", "checkpoint.every=0", "tensorboard=false"),
                f"rounds={args.rounds + 1}",
            ]
        )
        setup = prepare(config)
        sizes = [len(setup.world.splits[one.id]["test"]) for one in setup.experiment.sets]
        print(f"{len(sizes)} test sets with {sum(sizes)} images, {len(setup.experiment.packs)} packs")
        (folder / "run" / "model").mkdir(parents=True)
        rows = []
        cpu = []
        for row in launch(setup, config, folder / "run"):
            rows.append(row)
            cpu.append(cpu_seconds())
        del rows[-1], cpu[-1]  # the last one is no round
    training = [row["seconds_training"] for row in rows[1:]]
    scoring = [row["seconds"] - row["seconds_training"] for row in rows[1:]]
    for one, other in zip(training, scoring, strict=True):
        print(f"training {one:.2f} s, scoring {other:.2f} s")
    print(f"training {statistics.median(training):.2f} s, scoring {statistics.median(scoring):.2f} s a round")
    print(f"CPU seconds a round: {(cpu[-1] - cpu[0]) / (len(cpu) - 1):.2f}")


if __name__ == "__main__":
    main()
