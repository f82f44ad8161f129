"""Draws every figure from small real runs, and writes the page docs/figures.md with one picture of each.

python -m benchmarks.gallery [--runs DIR]

The runs need about five minutes on two cores. With --runs they are kept in a folder, and runs that are
finished there are not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rayfed.record.readers import STUDY
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.feature_map import TITLE as FEATURES
from rayfed.report.figures import FIGURES, OF_FOLDS, OF_METHODS, compare_runs
from rayfed.report.landscape import TITLE as LANDSCAPE
from rayfed.report.method_runs import runs_in
from rayfed.report.slopes import TITLE as SLOPES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "figures.md"
IMAGES = ROOT / "docs" / "images" / "figures"
SMALL = ("cluster=inline", "data.limit=150", "rounds=8", "tensorboard=false")
RUNS = {
    "fedgcr": (
        *("algorithm=fedgcr", "compare=[fedavg,afl]"),
        *("data.partition.split_test=true", "data.test=0.3"),
    ),
    "fft_gp": ("algorithm=fft_gp_clip", "server.compare=true", "data.held_out=street", "data.val=10"),
    "folds": (
        *("algorithm=fedavg", "compare=[fedavg,afl]", "protocol=leave_one_out", "data.val=10"),
        "data.domains=[plain,street,fonts]",
    ),
    "fedra": ("algorithm=fedra", "capacity=[4,3,2,2,1]", "faults.seconds_per_example=0.01"),
}
"""Runs by name, with their overrides."""
SWEEP = ("sweep=fedgcr", "trials=12", "rounds=2", "data.limit=40")
SEEDS = 3
CAPTIONS = {
    "methods that are compared": (
        "fedgcr",
        "One curve per method of a run with `compare=[...]`. With several run folders per method, "
        "`rayfed.report.figures.compare_runs` draws the mean over seeds and a band from "
        "the lowest to the highest score.",
    ),
    "score with each domain held out": (
        "folds",
        "A run with `protocol=leave_one_out`: for each held-out domain the score in the round selected "
        "on validation data, on that domain and on those of the clients, and the mean over all folds. With "
        "`compare=[...]`, one bar per method.",
    ),
    "score of the held-out domain over the rounds": (
        "folds",
        "The same run: one curve per fold, of the main method, and their mean.",
    ),
    "labels and domains of the clients": (
        "fedgcr",
        "The classes of each client and its number of training samples. For segmentation, only the numbers.",
    ),
    "score by domain": (
        "fft_gp",
        "Test score and loss over the rounds. The curve of a domain without clients is dashed. A band shows "
        "the range from the lowest to the highest client of a domain, if they differ.",
    ),
    "score by client": (
        "fedgcr",
        "The clients of the last evaluated round in ascending order; the dashed line is their mean.",
    ),
    "score over traffic and time": (
        "fedgcr",
        "The score against its cost: bytes sent and received, and seconds on this machine, both summed "
        "over the rounds.",
    ),
    "score over virtual time": (
        "fedra",
        "The score over virtual time, for runs with the [virtual clock](realism.md#virtual-time).",
    ),
    "blocks by client and round": (
        "fedra",
        "The blocks of the model that clients of limited capacity hold and train.",
    ),
    "aggregation weights": (
        "fedgcr",
        "One panel per domain; each client's name is at its last weight.",
    ),
    "variance of the generalization gaps": (
        "fft_gp",
        "The bold curve belongs to the method's own weights. With FAA, set `server.compare=true`.",
    ),
    "groups of clients over the rounds": (
        "fedgcr",
        "Each band is one group. Methods number groups anew in every round; here a group keeps its "
        "number as long as most of its clients stay.",
    ),
    "representations of clients": (
        "fedgcr",
        "Each digit is the client's group in the last round, numbered as in the figure above.",
    ),
    "representations of images": (
        "fedgcr",
        "Each digit is the class of the image.",
    ),
    LANDSCAPE: (
        "fft_gp",
        "`python -m rayfed.report.landscape RUN`: all clients train one more round, and the plotted plane "
        "goes through their models.",
    ),
    FEATURES: (
        "fft_gp",
        "`python -m rayfed.report.feature_map RUN`: t-SNE of the features before the head, and how "
        "well a linear classifier separates unseen from seen domains.",
    ),
    SLOPES: (
        "fft_gp",
        "`python -m rayfed.report.slopes RUN`: all clients train one more round, and the gap of each, the "
        "loss of the mean model minus that of its own model on its validation data, is measured under other "
        "weights.",
    ),
    "optimization history": (
        "sweep",
        "The score of every finished trial of a [sweep](many_runs.md#search-hyperparameters).",
    ),
    "parameter importance": (
        "sweep",
        "Computed by Optuna with fANOVA, for sweeps with at least ten finished trials.",
    ),
    "parallel coordinates": (
        "sweep",
        "One line per trial and one axis per hyperparameter; the best trial is bold.",
    ),
    "methods over seeds": (
        "seeds",
        "Drawn by `compare_runs` from three seeds of each method.",
    ),
}
"""Run and explanation of every figure, by title."""
INTRODUCTION = """\
# Figures

A run writes its figures to `figures/` and shows them in `report.md`. Each figure is drawn only from tables in
the run folder, and only if the run has the table that the figure needs. A domain has the same colour and
marker in all figures of a run, by its position in the data set; the same holds for methods that are compared.
The colours are suitable for readers with colour-blindness. Scores are in percent, as in the terminal.
`figures=false` leaves all figures out.

`python -m benchmarks.gallery` writes this page from runs that are too small to compare methods.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gallery", description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder in which the runs are kept")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        runs: Path = args.runs or Path(scratch)
        run_all(runs)
        shutil.rmtree(IMAGES, ignore_errors=True)
        parts = [INTRODUCTION]
        for title, (run, words) in CAPTIONS.items():
            name = picture(title, runs / run)
            parts.append(
                f"## {title[0].upper()}{title[1:]}\n\n{words}\n\n![{title}](images/figures/{name})\n"
            )
        PAGE.write_text("\n".join(parts))


def run_all(runs: Path) -> None:
    """Run what is not there yet."""
    for name, overrides in RUNS.items():
        start(runs / name, "rayfed.run", *SMALL, *overrides)
    for name in ("fedgcr", "fedavg"):
        for seed in range(SEEDS):
            method = (f"algorithm={name}", "tuning=gc_prompt", "compare=[]", f"seed={seed}")
            start(runs / "seeds" / name / str(seed), "rayfed.run", *SMALL, *method)
    start(runs / "sweep", "tune.run", *SWEEP)
    tools = {"landscape": ["--points", "15"], "feature_map": ["--images", "200"], "slopes": []}
    analysed = first_run(runs / "fft_gp")
    for tool, options in tools.items():
        if not (analysed / "figures" / f"{tool}.png").exists():
            call(f"rayfed.report.{tool}", str(analysed), *options)


def start(path: Path, command: str, *overrides: str) -> None:
    if not (path / "report.md").exists():
        call(command, *overrides, f"output={path}")


def call(command: str, *arguments: str) -> None:
    print(command, *arguments, flush=True)
    subprocess.run([sys.executable, "-m", command, *arguments], cwd=ROOT, check=True, capture_output=True)


def first_run(folder: Path) -> Path:
    """The folder of the first run of a study; of a run, its own."""
    return next(runs_in(folder).seeds[0].each())[2] if (folder / STUDY).exists() else folder


def picture(title: str, run: Path) -> str:
    """Draw a figure, or copy it from a sweep, into the images of the page; returns the name of its file."""
    name = f"{title.replace(' ', '_')}.png".replace("'", "")
    if run.name == "sweep":
        IMAGES.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / "figures" / name, IMAGES / name)
        return name
    if run.name == "seeds":
        drawing = compare_runs({path.name: sorted(path.iterdir()) for path in sorted(run.iterdir())})
    elif title in (several := {**OF_METHODS, **OF_FOLDS}):
        drawing = several[title](runs_in(run).seeds[0])
    else:
        drawing = FIGURES[title](RecordedRun(first_run(run)))
    if drawing is None:
        raise RuntimeError(f"{run} has no table for the figure {title!r}")
    drawing.write(IMAGES / name)
    return name


if __name__ == "__main__":
    main()
