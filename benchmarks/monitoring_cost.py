"""Cost of monitoring: pairs of the default run with and without it.

    python benchmarks/monitoring_cost.py [--repeats 3] [overrides ...]

With: metrics through Ray, TensorBoard and the dashboard; a request reads the metrics every ten seconds, as
Prometheus does. Prints seconds from the row of the first round to the digest (starting Ray and the actors is
not counted), seconds of the whole run, and the median ratios of the pairs, which should be at most 1.02.
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

from rayfed.config.schema import load_config
from rayfed.engine.session import launch
from rayfed.experiment.plan import prepared

SWITCHES = ("cluster.metrics", "tensorboard", "cluster.dashboard")
SCRAPE = 10.0  # seconds between two readings


def scrape(ended: threading.Event) -> None:
    """Read the metrics of this node now and then."""
    import ray

    while not ended.wait(SCRAPE):
        (node,) = ray.nodes()
        with suppress(OSError):
            urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}").read()


def seconds(overrides: list[str], folder: Path, on: bool) -> tuple[float, float]:
    """Of the rounds after the first one, and of everything."""
    config = load_config([*overrides, *(f"{key}={str(on).lower()}" for key in SWITCHES)])
    folder.mkdir()
    ended = threading.Event()
    began = time.perf_counter()
    setup = prepared(config)
    first = 0.0
    with launch(setup, folder) as rows:
        for row in rows:
            if row.get("round") == 1:
                first = time.perf_counter()
                if on:
                    threading.Thread(target=scrape, args=(ended,), daemon=True).start()
            if "sha256" in row:
                ended.set()
                rounds = time.perf_counter() - first
    return rounds, time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeats):
            took = {}
            for on in (True, False) if i % 2 else (False, True):
                took[on] = seconds(args.overrides, Path(folder) / f"{i}-{on}", on)
            ratios.append([a / b for a, b in zip(took[True], took[False], strict=True)])
            (rounds, whole), (bare_rounds, bare_whole) = took[True], took[False]
            print(
                f"rounds: with {rounds:.2f} s, without {bare_rounds:.2f} s, ratio {ratios[-1][0]:.3f}; "
                f"whole run: {whole:.2f} s, {bare_whole:.2f} s, ratio {ratios[-1][1]:.3f}",
                flush=True,
            )
    medians = [statistics.median(each) for each in zip(*ratios, strict=True)]
    print(f"median ratios: rounds {medians[0]:.3f}, whole run {medians[1]:.3f} (bar 1.02)")
