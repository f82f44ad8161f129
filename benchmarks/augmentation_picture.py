"""Draws a batch of training images under each random change and under all of them.

python -m benchmarks.augmentation_picture [--output FILE] [overrides]

Overrides are those of `rayfed.run`; by default the images are those of the embedded data set. For example
  python -m benchmarks.augmentation_picture --output pacs.png data=pacs data.root=PACS model.size=96
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from rayfed.config.schema import load_config
from rayfed.data.augmentation import Augmentation
from rayfed.data.data_config import AugmentConfig
from rayfed.data.examples import Normalizer
from rayfed.experiment.plan import prepared
from rayfed.report import style

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "augmentation.png"
SEED = 3
IMAGES = 10
SMALL = (
    *("algorithm=fedavg", "tuning=head", "model.pretrained=false", "data.domains=[street]", "data.limit=150"),
    "data.augment=[crop,flip,rotate,randaugment,jitter,grayscale]",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.augmentation_picture", description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, help="file to write")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    setup = prepared(load_config([*SMALL, *args.overrides]))
    augment = setup.context.augment
    if augment is None:
        raise SystemExit("data.augment: nothing is chosen, so there is nothing to draw")
    rows = setup.partition.trainers[0].train[:IMAGES]
    draw(setup.dataset.images[rows], augment, args.output)


def draw(images: NDArray[np.uint8], augment: AugmentConfig, path: Path) -> None:
    """Write a picture with one row for the images, one for each change, and one for all changes.

    Args:
        images: uint8, shape (n, size, size, 3).
        augment: The changes.
        path: File to write.
    """
    batch = Normalizer((0, 0, 0), (1, 1, 1))(torch.from_numpy(images))
    single = {name: AugmentConfig(**{name: getattr(augment, name)}) for name in augment.names}
    parts = {"as stored": batch}
    parts |= {name: changed(batch, config) for name, config in single.items()}
    parts["all of them"] = changed(batch, augment)
    figure = style.in_style(grid)(parts)
    figure.savefig(path, dpi=110)


def changed(batch: Tensor, config: AugmentConfig) -> Tensor:
    """The batch, shape (n, 3, size, size) with values in [0, 1], after the changes."""
    return Augmentation.of(config, batch.shape[-1], (0, 0, 0), (1, 1, 1))(batch, SEED)


def grid(rows: dict[str, Tensor]) -> Figure:
    """One row of images for each entry, with its name on the left."""
    count = len(next(iter(rows.values())))
    figure = Figure(figsize=(1.2 + 0.75 * count, 0.75 * len(rows)))
    axes = figure.subplots(len(rows), count, squeeze=False)
    left = 1.2 / (1.2 + 0.75 * count)
    figure.subplots_adjust(left=left, right=1, top=1, bottom=0, wspace=0.04, hspace=0.04)
    for line, (name, batch) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, batch, strict=True):
            axis.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            axis.set(xticks=[], yticks=[])
            axis.set_frame_on(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure


if __name__ == "__main__":
    main()
