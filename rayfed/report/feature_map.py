"""Where the final model of a finished run puts images of its clients' domains and of the unseen domain.

    python -m rayfed.report.feature_map RUN [RUN ...] [--images 300]

FFT-GP's Figure 7: t-SNE of the features before the head, training images of the clients (equal shares of
their domains) against as many of the unseen domain; one panel a run. The number is the proxy A-distance
(Ben-David et al., Analysis of Representations for Domain Adaptation, NIPS 2006, section 4): 0 where a linear
classifier cannot tell the two apart, 2 where it always can.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rayfed.analysis.reopen import Finished, Indices, command, evenly, mention, reopen
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.federation.cohort import Call
from rayfed.federation.local import Local
from rayfed.record.files import write_parquet
from rayfed.report.group_figures import read_table, save_figure
from rayfed.terminal.console import say
from rayfed.tuning.base import train_mode
from rayfed.types import Broadcast, Update

Vectors: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = Sequence[Mapping[str, Any]]
TITLE = "features of seen and of unseen domains"
SPLIT = "shown"
PERPLEXITY = 30.0


@torch.no_grad()
def represent(client: Client, sent: Broadcast, local: Local) -> Update:
    """Features (n, D) before the head, and labels, of the images to be shown."""
    local.prepare(client, sent)
    client.model.eval()
    batches = list(client.batches(SPLIT, shuffle=False))
    features = torch.cat([client.model.features(x).cpu() for x, _ in batches])
    train_mode(client.model)
    labels = torch.cat([y.cpu() for _, y in batches])
    return Update(client=client.id, extra={"features": features, "labels": labels})


def chosen(run: Finished, images: int) -> dict[str, tuple[bool, Indices]]:
    """By domain: whether it is unseen, and the rows to show.

    The seen domains have equal shares of `images`, or all their training images if these are fewer; the
    unseen ones together as many as the seen ones.

    Raises:
        ConfigError: No domain was held out.
    """
    partition = run.setup.partition
    if not partition.held_out:
        raise ConfigError(
            f"data.held_out: {str(run.folder)!r} has seen all domains; run it with data.held_out=DOMAIN, or "
            f"give one run of protocol=leave_one_out"
        )
    seen: dict[str, list[Indices]] = {}
    for client in partition.clients:
        seen.setdefault(client.domain, []).append(client.train)
    found = {
        domain: (False, evenly(np.concatenate(parts), images // len(seen))) for domain, parts in seen.items()
    }
    total = sum(len(rows) for _, rows in found.values())
    share = -(-total // len(partition.held_out))
    return found | {domain: (True, evenly(rows, share)) for domain, rows in partition.held_out.items()}


def features(folder: Path, images: int) -> list[dict[str, Any]]:
    """Rows of the table `features`, which is written: domain, unseen, label, place in the plane, features."""
    run = reopen(folder)
    shown = chosen(run, images)
    splits = {domain: {SPLIT: rows} for domain, (_, rows) in shown.items()}
    executor = InlineExecutor(replace(run.setup.world, splits=splits), run.setup.weights)
    task = partial(represent, local=run.setup.experiment.local)
    calls = [Call(domain, task, "features", run.state.broadcast()) for domain in shown]
    answers = [answer for answer in executor.map(calls) if answer is not None]
    x = torch.cat([answer.extra["features"] for answer in answers]).double().numpy()
    domains = [answer.client for answer in answers for _ in answer.extra["labels"]]
    labels = torch.cat([answer.extra["labels"] for answer in answers]).tolist()
    places = in_plane(x)
    rows = [
        {"domain": domain, "unseen": shown[domain][0], "label": label, "x": px, "y": py, "features": own}
        for domain, label, (px, py), own in zip(domains, labels, places.tolist(), x.tolist(), strict=True)
    ]
    write_parquet(folder / "features.parquet", rows)
    return rows


def in_plane(x: Vectors) -> Vectors:
    """t-SNE in two dimensions: perplexity 30, PCA start, always the same seed. Shape (n, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    places: Vectors = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(x)
    return places


def proxy_a_distance(x: Vectors, unseen: npt.NDArray[np.bool_]) -> float:
    """2 (1 - 2 e) with the balanced error e of a linear classifier on images it was not fitted to, >= 0.

    Args:
        x: Features, shape (n, D).
        unseen: What is to be told apart, shape (n,), at least five of each.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=5000))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    told = cross_val_predict(classifier, x, unseen, cv=folds)
    error = np.mean([(told[unseen == kind] != kind).mean() for kind in (False, True)])
    return max(0.0, float(2 * (1 - 2 * error)))


def feature_map(folder: Path) -> Path | None:
    """Draw the table `features`, where there is one."""
    return panels([folder]) if read_table(folder, "features") else None


def panels(folders: Sequence[Path]) -> Path:
    """One panel a run, in the folder of the first."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(folders), figsize=(5 * len(folders), 4.5), squeeze=False)
    for axis, folder in zip(axes[0], folders, strict=True):
        rows = read_table(folder, "features")
        for kind, colour in (("seen", "tab:blue"), ("unseen", "tab:red")):
            mine = [row for row in rows if row["unseen"] == (kind == "unseen")]
            names = ", ".join(dict.fromkeys(row["domain"] for row in mine))
            x, y = ([row[key] for row in mine] for key in ("x", "y"))
            axis.scatter(x, y, s=8, alpha=0.6, color=colour, label=f"{kind}: {names}")
        axis.set(xticks=[], yticks=[], title=f"{folder.name}: proxy A-distance {distance(rows):.2f}")
        axis.legend(fontsize=7)
    return save_figure(figure, folders[0], "feature_map")


def distance(rows: Rows) -> float:
    """Proxy A-distance between the seen and the unseen images of a table `features`."""
    x = np.array([row["features"] for row in rows])
    return proxy_a_distance(x, np.array([row["unseen"] for row in rows], dtype=np.bool_))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("rayfed.report.feature_map", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs with a held-out domain")
    parser.add_argument("--images", type=int, default=300, help="of the seen domains together")
    args = parser.parse_args(argv)

    def work() -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        if args.images < 50:
            raise ConfigError(f"--images: {args.images} is too few for t-SNE; at least 50")
        for folder in args.runs:
            say(f"{folder}: proxy A-distance {distance(features(folder, args.images)):.2f}")
        picture = panels(args.runs)
        mention(args.runs[0], TITLE, picture)
        say(str(picture))

    return command(work)


if __name__ == "__main__":
    sys.exit(main())
