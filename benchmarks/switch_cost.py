"""What checkpoints, or watching a run, cost: the default run with and without, in pairs.

    python benchmarks/switch_cost.py checkpoints|monitoring [--repeats 3] [overrides ...]

`checkpoints`: one after every round against one at the end. `monitoring`: metrics through Ray, TensorBoard
and the dashboard against none of them; a request reads the metrics every ten seconds, as Prometheus does.
Prints seconds from the row of the first round to the digest (starting Ray and the actors is not counted), the
seconds of the whole run, and the median ratios of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from rayfed.config import load_config
from rayfed.launch import launch
from rayfed.setup import prepare

SWITCHES = {
    "checkpoints": (["checkpoint.every=1"], ["checkpoint.every=0"]),
    "monitoring": (
        ["cluster.metrics=true", "tensorboard=true", "cluster.dashboard=true"],
        ["cluster.metrics=false", "tensorboard=false", "cluster.dashboard=false"],
    ),
}
BARS = {"checkpoints": 1.05, "monitoring": 1.02}
SCRAPE = 10.0  # seconds between two readings


def scrape(ended: threading.Event) -> None:
    """Read the metrics of this node now and then."""
    import ray

    while not ended.wait(SCRAPE):
        (node,) = ray.nodes()
        with suppress(OSError):
            urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}").read()


def seconds(overrides: list[str], folder: Path, is_read: bool) -> tuple[float, float]:
    """Of the rounds after the first one, and of everything."""
    config = load_config(overrides)
    folder.mkdir()
    ended, began = threading.Event(), time.perf_counter()
    setup, first = prepare(config), 0.0
    for row in launch(setup, config, folder):
        if row.get("round") == 1:
            first = time.perf_counter()
            if is_read:
                threading.Thread(target=scrape, args=(ended,), daemon=True).start()
        if "sha256" in row:
            ended.set()
            rounds = time.perf_counter() - first
    return rounds, time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("switch", choices=SWITCHES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeats):
            took = {}
            for on in (True, False) if i % 2 else (False, True):
                own = SWITCHES[args.switch][0 if on else 1]
                read = on and args.switch == "monitoring"
                took[on] = seconds([*args.overrides, *own], Path(folder) / f"{i}-{on}", read)
            ratios.append([a / b for a, b in zip(took[True], took[False], strict=True)])
            (rounds, whole), (bare_rounds, bare_whole) = took[True], took[False]
            print(
                f"rounds: with {rounds:.2f} s, without {bare_rounds:.2f} s, ratio {ratios[-1][0]:.3f}; "
                f"whole run: {whole:.2f} s, {bare_whole:.2f} s, ratio {ratios[-1][1]:.3f}",
                flush=True,
            )
    medians = [statistics.median(each) for each in zip(*ratios, strict=True)]
    print(f"median ratios: rounds {medians[0]:.3f}, whole run {medians[1]:.3f} (bar {BARS[args.switch]})")
