"""Time of scoring the global model on the test sets of many clients, one image each, in two actors.

LoRA on vit_mini; 50 clients train in a round, with `--train` images each. Prints the seconds of training, of
scoring and of all of each round after the first, which includes its files and the checkpoint; the medians;
the CPU seconds a round of driver and client actors, which other jobs of the machine change little; and last
how many times as long as its training a round takes.

    python benchmarks/scoring_cost.py [--clients 10000] [--train 1] [--rounds 4]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
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
    parser.add_argument("--train", type=int, default=1, help="training images of a client")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    from rayfed.config.schema import load_config
    from rayfed.engine.session import launch
    from rayfed.experiment.plan import prepared

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", (args.train + 1) * args.clients)
        config = load_config(
            [
                *("algorithm=fedavg", "tuning=lora", "data=image_folder", f"data.root={folder / 'images'}"),
                *(f"data.cache={folder}", "data.name=benchmark", "data.val=0"),
                *(f"data.test={1 / (args.train + 1)}", "data.partition.scheme=by_domain"),
                *(f"data.partition.clients_per_domain={args.clients}", "clients_per_round=50"),
                *("cluster.actors=2", "cluster.dashboard=false", f"rounds={args.rounds + 1}"),
            ]
        )
        setup = prepared(config)
        sizes = [len(setup.context.splits[one.id]["test"]) for one in setup.experiment.sets]
        print(f"{len(sizes)} test sets with {sum(sizes)} images, {len(setup.experiment.packs)} packs")
        trained = [len(setup.context.splits[client]["train"]) for client in setup.experiment.clients]
        print(f"{min(trained)} to {max(trained)} training images of a client")
        (folder / "run" / "model").mkdir(parents=True)
        rows = []
        cpu = []
        ended = []
        with launch(setup, folder / "run") as found:
            for row in found:
                rows.append(row)
                cpu.append(cpu_seconds())
                ended.append(time.perf_counter())
        rounds = args.rounds + 1  # after the rows of rounds there is one with the digest
    whole = [after - before for before, after in itertools.pairwise(ended[:rounds])]
    training = [row["seconds_training"] for row in rows[1:rounds]]
    scoring = [row["seconds"] - row["seconds_training"] for row in rows[1:rounds]]
    for one, other, both in zip(training, scoring, whole, strict=True):
        print(f"training {one:.2f} s, scoring {other:.2f} s, round {both:.2f} s")
    print(f"training {statistics.median(training):.2f} s, scoring {statistics.median(scoring):.2f} s a round")
    print(f"CPU seconds a round: {(cpu[rounds - 1] - cpu[0]) / args.rounds:.2f}")
    ratio = statistics.median(both / one for both, one in zip(whole, training, strict=True))
    print(f"a round takes {ratio:.2f} times as long as its training")


if __name__ == "__main__":
    main()
