"""Draws a t-SNE map of features of images under the model of a finished run, and how well they separate.

FFT-GP's Figure 7: t-SNE of the features before the head, for training images of the clients (equal numbers of
each domain) and as many images of the unseen domain. Their separation is measured by the proxy A-distance
(Ben-David et al., Analysis of Representations for Domain Adaptation, NIPS 2006, section 4): 0 if a linear
classifier cannot distinguish them, 2 if it always can.

FedRA's Figure 5: t-SNE of the features of test images of some classes. Their separation is measured by the
share of images whose nearest neighbour is of the same class.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.record.atomic_files import write_parquet
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.reopen import Indices, ReopenedRun, evenly, reopen
from rayfed.report.report_md import add_figure
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.tuning.base import train_mode
from rayfed.types import Broadcast, Update
from rayfed.user_files import user_folder

Vectors: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = Sequence[Mapping[str, Any]]
SPLIT = "shown"
PERPLEXITY = 30.0
MOST_CLASSES = 10
"""Number of classes whose images are shown, as in FedRA's Figure 5."""


@torch.no_grad()
def represent(client: Client, sent: Broadcast, local: Local) -> Update:
    """Task that returns features before the head, shape (n, D), and labels of the split SPLIT."""
    local.prepare(client, sent)
    client.model.eval()
    batches = list(client.batches(SPLIT, shuffle=False))
    features = torch.cat([client.model.features(x).flatten(1).cpu() for x, _ in batches])
    train_mode(client.model)
    labels = torch.cat([y.cpu() for _, y in batches])
    return Update(client=client.id, extra={"features": features, "labels": labels})


def choose_images(run: ReopenedRun, images: int) -> dict[str, tuple[bool, Indices]]:
    """For each domain whether it is unseen, and the row numbers of the images to use.

    Each seen domain has an equal share of `images`, or all its training images if these are fewer; the unseen
    domains together have as many images as the seen ones.

    Raises:
        ConfigError: No domain was held out.
    """
    partition = run.setup.partition
    if not partition.held_out:
        domains = run.setup.dataset.domains
        folder = str(run.recorded.path)
        more = f"python -m rayfed.run --config {folder}/config.yaml data.held_out={domains[-1]} output=NEW"
        raise ConfigError(
            f"data.held_out: {folder!r} has seen all domains; hold out one of {', '.join(domains)} "
            f"with {more}, or give one run of protocol=leave_one_out"
        )
    training = partition.domain_training()
    seen_rows = {domain: (False, evenly(rows, images // len(training))) for domain, rows in training.items()}
    total = sum(len(rows) for _, rows in seen_rows.values())
    share = -(-total // len(partition.held_out))
    return seen_rows | {domain: (True, evenly(rows, share)) for domain, rows in partition.held_out.items()}


def chosen_by_class(run: ReopenedRun, images: int) -> dict[str, tuple[bool, Indices]]:
    """As `choose_images`, for test images: equally many of the first MOST_CLASSES classes, of all domains.

    Raises:
        ConfigError: The run has no test images.
    """
    tests = run.setup.partition.domain_tests()
    labels = run.setup.dataset.labels
    every = np.concatenate([np.empty(0, dtype=np.int64), *tests.values()])
    present = np.unique(labels[every])[:MOST_CLASSES]
    if not len(present):
        raise ConfigError(f"data.test: {str(run.recorded.path)!r} has no test images; run with data.test=0.2")
    kept = [evenly(every[labels[every] == label], images // len(present)) for label in present]
    rows = {domain: np.intersect1d(own, np.concatenate(kept)) for domain, own in tests.items()}
    return {domain: (False, own) for domain, own in rows.items() if len(own)}


def features(folder: Path, images: int, by_class: bool = False) -> list[dict[str, Any]]:
    """Compute and write the table features.parquet of a run.

    Args:
        folder: Folder of a finished run, with a held-out domain unless `by_class`.
        images: Number of images of all seen domains together, or of all classes.
        by_class: Choose test images by class (FedRA's Figure 5) instead of images of seen and unseen domains.

    Returns:
        Its rows: domain, unseen, label, name of the class, coordinates x and y in the plane, features.
    """
    run = reopen(folder)
    shown = chosen_by_class(run, images) if by_class else choose_images(run, images)
    splits = {domain: {SPLIT: rows} for domain, (_, rows) in shown.items()}
    context = replace(run.setup.context, splits=splits)
    executor = InlineExecutor(context, run.setup.weights, device=run.device)
    task = partial(represent, local=run.setup.experiment.local)
    calls = [Call(domain, task, "features", run.state.broadcast()) for domain in shown]
    stage("computing the features")
    answers = [answer for answer in executor.map(calls) if answer is not None]
    x = torch.cat([answer.extra["features"] for answer in answers]).double().numpy()
    domains = [answer.client for answer in answers for _ in answer.extra["labels"]]
    labels = torch.cat([answer.extra["labels"] for answer in answers]).tolist()
    stage(f"computing t-SNE of {len(x)} images")
    places = in_plane(x)
    classes = run.setup.dataset.classes
    rows = [
        {
            "domain": domain,
            "unseen": shown[domain][0],
            "label": label,
            "class": classes[label],
            "x": px,
            "y": py,
            "features": own,
        }
        for domain, label, (px, py), own in zip(domains, labels, places.tolist(), x.tolist(), strict=True)
    ]
    write_parquet(folder / "features.parquet", rows)
    return rows


def in_plane(x: Vectors) -> Vectors:
    """t-SNE in two dimensions with perplexity 30, PCA initialization and a fixed seed; shape (n, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    places: Vectors = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(x)
    return places


def proxy_a_distance(x: Vectors, unseen: npt.NDArray[np.bool_]) -> float:
    """Proxy A-distance 2 (1 - 2 e), at least 0, with the cross-validated balanced error e of a classifier.

    Args:
        x: Features, shape (n, D).
        unseen: Whether each image is of the unseen domain, shape (n,); at least five of each kind.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=5000))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    predicted = cross_val_predict(classifier, x, unseen, cv=folds)
    error = np.mean([(predicted[unseen == kind] != kind).mean() for kind in (False, True)])
    return max(0.0, float(2 * (1 - 2 * error)))


def same_class_share(rows: Rows) -> float:
    """Share of the images of a table `features` whose nearest neighbour in the features is of their class."""
    x = np.array([row["features"] for row in rows])
    labels = np.array([row["label"] for row in rows])
    squares = (x**2).sum(1)
    between = squares[:, None] + squares[None] - 2 * x @ x.T
    np.fill_diagonal(between, np.inf)
    return float((labels[between.argmin(1)] == labels).mean())


def distance(rows: Rows) -> float:
    """Proxy A-distance between the seen and the unseen images of a table `features`."""
    x = np.array([row["features"] for row in rows])
    return proxy_a_distance(x, np.array([row["unseen"] for row in rows], dtype=np.bool_))


USAGE = """\
python -m rayfed.report.feature_map RUN [RUN ...] [--images 300]
    [--by domain] [--debug]

Draws where the models of finished runs put images of seen and of unseen
domains, or test images of ten classes, for example
  python -m rayfed.report.feature_map runs/mine runs/other
  python -m rayfed.report.feature_map runs/mine --by class
"""
MEANING = (
    "Proxy A-distance: 0 if a linear classifier cannot tell images of seen from images of unseen domains, "
    "2 if it always can"
)
SEEN: Mapping[str, Any] = {"marker": "o", "s": 14, "linewidths": 0}
UNSEEN: Mapping[str, Any] = {"marker": "D", "s": 18, "linewidths": 0.6, "edgecolors": "black"}
UNSEEN_MARK = " (unseen)"
TITLE = "features of seen and of unseen domains"


def feature_map(run: RecordedRun) -> style.Drawing | None:
    """Draw the table `features` of a run; None where there is none."""
    return panels([run]) if run.rows("features") else None


@style.in_style
def panels(runs: Sequence[RecordedRun]) -> style.Drawing:
    """Draw one panel per run: seen and unseen domains, or, where no image is of an unseen domain, classes.

    A domain has the same colour in all figures of the run; unseen domains are diamonds with a black edge.
    """
    figure, axes = style.canvas(1, len(runs), (1.8 + 4.0 * len(runs), 4.6))
    tables = [run.rows("features") for run in runs]
    entries: dict[str, Any] = {}
    by_class = not any(row["unseen"] for rows in tables for row in rows)
    for axis, run, rows in zip(axes[0], runs, tables, strict=True):
        entries |= _classes(axis, rows) if by_class else _domains(axis, rows, runs[0])
        title = "\n".join(textwrap.wrap(run.name, 46))
        axis.set(xticks=[], yticks=[], title=f"{title}\n{separation(rows)}")
        axis.set(xlabel="first coordinate", ylabel="second coordinate")
    what = "test images by class" if by_class else "seen and unseen domains"
    meaning = () if by_class else (MEANING,)
    style.heading(figure, f"Features of {what} under the final model (t-SNE)", *meaning)
    style.legend(
        figure,
        [entries[name] for name in sorted(entries, key=_unseen_last)],
        "class" if by_class else "domain",
    )
    return style.Drawing("feature_map", figure)


def _unseen_last(name: str) -> bool:
    return name.endswith(UNSEEN_MARK)


def separation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Separation of the images of a table `features`, in words."""
    if any(row["unseen"] for row in rows):
        return f"proxy A-distance {distance(rows):.2f}"
    return f"nearest neighbour of the same class: {100 * same_class_share(rows):.0f} %"


def _domains(axis: Any, rows: Sequence[Mapping[str, Any]], first: RecordedRun) -> dict[str, Any]:
    """Draw the images by domain; entries of the legend by name."""
    entries, looks = {}, style.looks(first.domains)
    for domain in dict.fromkeys(row["domain"] for row in sorted(rows, key=lambda row: row["unseen"])):
        own = [row for row in rows if row["domain"] == domain]
        x, y = ([row[key] for row in own] for key in ("x", "y"))
        unseen = own[0]["unseen"]
        look = looks.get(domain, style.UNKNOWN)
        axis.scatter(x, y, color=look.colour, alpha=0.8, **(UNSEEN if unseen else SEEN))
        name = domain + (UNSEEN_MARK if unseen else "")
        entries[name] = style.line_of(look, name)
        edge = "black" if unseen else look.colour
        entries[name].set(linestyle="", marker="D" if unseen else "o", markeredgecolor=edge)
    return entries


def _classes(axis: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Draw the images by class; entries of the legend by name."""
    known = style.looks(dict.fromkeys(row["class"] for row in sorted(rows, key=lambda row: row["label"])))
    entries = {}
    for name, look in known.items():
        own = [row for row in rows if row["class"] == name]
        x, y = ([row[key] for row in own] for key in ("x", "y"))
        axis.scatter(x, y, color=look.colour, marker=look.marker, s=14, alpha=0.8)
        entries[name] = style.line_of(look, name)
        entries[name].set_linestyle("")
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.feature_map", USAGE)
    parser.add_argument("runs", type=user_folder, nargs="+", help="finished runs, with a held-out domain")
    parser.add_argument(
        "--by", choices=("domain", "class"), default="domain", help="by class, no domain must be held out"
    )
    parser.add_argument(
        "--images", type=int, default=300, help="number of images of all seen domains together"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        if args.images < 50:
            raise ConfigError(f"--images: {args.images} is too few for t-SNE; at least 50")
        with use_screen(screen_of()):
            for folder in args.runs:
                say(f"{folder}: {separation(features(folder, args.images, args.by == 'class'))}")
        drawing = panels([RecordedRun(run) for run in args.runs])
        say(str(add_figure(args.runs[0], TITLE, drawing)))

    return run_guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
