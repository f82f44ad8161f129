"""Methods on 1,000 clients, 50 in a round: run to their table, killed with SIGKILL and continued on the way.

    python -m benchmarks.thousand_clients [--methods fedgcr fedclip fft_gp fedra] [--rounds 3]

Each method runs on random images, of which a client has two for training, one for validation and one for
tests: in one process; then on two actors until the command is killed after its first round, and on by
`rayfed.resume`. Prints a row for each method. The exit code is 1 if a run fails, or if its tensors or the
scores of its clients are not those of the run that was not killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = ("fedgcr", "fedclip", "fft_gp", "fedra")
CLIENTS = 1000
DOMAINS = 5
IMAGES = 4  # of a client
PATIENCE = 900  # seconds for one command
ROUND = Path("checkpoints", "round-000001", "checkpoint.json")


def write_images(folder: Path) -> None:
    """Random images of 32 x 32 pixels in ten classes of five domains."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(CLIENTS * IMAGES):
        target = folder / f"domain{i % DOMAINS}" / str(i // DOMAINS % 10)
        target.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(target / f"{i:06d}.bmp")


def command(method: str, rounds: int, folder: Path, name: str, *more: str) -> list[str]:
    return [
        *("rayfed.run", f"algorithm={method}", "data=image_folder", f"data.root={folder / 'images'}"),
        *(f"data.cache={folder / 'cache'}", "data.name=random", "data.val=0.25", "data.test=0.25"),
        *("data.partition.scheme=by_domain", f"data.partition.clients_per_domain={CLIENTS // DOMAINS}"),
        *("clients_per_round=50", f"rounds={rounds}", "cluster.dashboard=false", "figures=false"),
        *(f"output={folder / method / name}", *more),
    ]


def started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(words: list[str]) -> str:
    """Output of a command.

    Raises:
        RuntimeError: It failed.
    """
    process = started(words)
    said, _ = process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {said.strip().splitlines()[-1]}")
    return said


def kill_after_a_round(words: list[str], run: Path) -> None:
    """Start a run and kill its command once the first checkpoint is complete.

    Raises:
        RuntimeError: It ended before.
    """
    process = started(words)
    until = time.monotonic() + PATIENCE
    while not (run / ROUND).exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise RuntimeError(f"no round was finished: {process.communicate()[0][-300:]}")
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def row(method: str, rounds: int, folder: Path) -> tuple[str, bool]:
    """A row of the table, and whether everything held."""
    from benchmarks.same_results import digests, read_rows

    began = time.perf_counter()
    said = ended(command(method, rounds, folder, "whole", "cluster=inline"))
    seconds = time.perf_counter() - began
    killed = folder / method / "killed"
    kill_after_a_round(command(method, rounds, folder, "killed", "cluster.actors=2"), killed)
    before = len(read_rows(killed))
    table = ended(["rayfed.resume", str(killed)])
    one, other = digests(folder / method / "whole"), digests(killed)
    same = all(one[key] == other[key] for key in ("tensors", "clients"))
    good = same and before < rounds and all("mean over clients" in text for text in (said, table))
    last = read_rows(killed)[-1]
    cells = f"{seconds:.0f} s | {last['seconds']:.1f} s | {before} of {rounds} | {'yes' if same else 'NO'}"
    return f"| {method} | {cells} |", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    failed = False
    print("| method | in one process | last round on two actors | rounds before the kill | same bytes |")
    print("|---|---:|---:|---:|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name) / "images")
        for method in args.methods:
            try:
                line, good = row(method, args.rounds, Path(name))
            except RuntimeError as err:
                line, good = f"| {method} | FAILED: {err} |", False
            print(line, flush=True)
            failed |= not good
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
