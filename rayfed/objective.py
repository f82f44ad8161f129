"""What a model has to do with an example: say its class, outline an organ, guess the next character.

A data set is made for one task. Clients find its objective in `client.objective`: an algorithm asks it for
the loss, and need not know which one it is. (A `Task` in `rayfed.federation.cohort` is another thing: a
client's work.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from rayfed.errors import ConfigError, unknown

if TYPE_CHECKING:  # data and reports look here, and do without torch
    from torch import Tensor

CLASSIFICATION, SEGMENTATION, NEXT_CHARACTER = "classification", "segmentation", "next_character"
EMPTY = 1e-5
"""Keeps Dice finite where neither side has a pixel; the value of the GRACE authors' code."""


@dataclass(frozen=True)
class Objective:
    """Classification of images, and what the other tasks change about it.

    Attributes:
        task: Its name, in data sets, models and messages.
        metric: The score that tables are about, a fraction; the larger the better.
        examples: What examples are called in tables.
        pixels: Whether inputs are images, to be normalised as the model wants them; else they are symbols.
    """

    task: ClassVar[str] = CLASSIFICATION
    metric: ClassVar[str] = "accuracy"
    examples: ClassVar[str] = "images"
    pixels: ClassVar[bool] = True

    def layout(self, size: int) -> np.dtype[Any]:
        """What a prepared example consists of: `input`, and `target` where a label does not say it all.

        Args:
            size: Of the model's input.
        """
        return np.dtype([("input", "u1", (size, size, 3))])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean over the batch of what training makes small: cross entropy.

        Args:
            output: What the model answers, shape (B, C).
            y: Targets, shape (B,).
        """
        return _cross_entropy(output, y)

    def scores(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Sums over the examples of a batch, by name: `loss`, the metric, and others to report.

        Args:
            output: What the model answers, shape (B, C).
            y: Targets, shape (B,).
        """
        return {
            "loss": _cross_entropy(output, y, "sum").item(),
            self.metric: float((output.argmax(-1) == y).sum()),
        }


@dataclass(frozen=True)
class Segmentation(Objective):
    """A class for every pixel. Loss: mean of cross entropy and soft Dice; metric: Dice of the object.

    As in the released code of GRACE (Zhang et al., MICCAI 2023), except that both are means over examples, so
    that a score does not depend on the batch, and that the metric leaves the background out, whose Dice is
    near 1; `dice_mean2` has the mean of both.
    """

    task: ClassVar[str] = SEGMENTATION
    metric: ClassVar[str] = "dice"
    examples: ClassVar[str] = "slices"

    def layout(self, size: int) -> np.dtype[Any]:
        return np.dtype([("input", "u1", (size, size, 3)), ("target", "u1", (size, size))])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """See the base; output of shape (B, C, H, W), targets (B, H, W)."""
        return self._losses(output, y).mean()

    def scores(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """See the base; output of shape (B, C, H, W), targets (B, H, W), 0 the background."""
        classes = output.shape[1]
        every = dice(_one_hot(output.argmax(1), classes), _one_hot(y, classes))
        return {
            "loss": self._losses(output, y).sum().item(),
            self.metric: every[:, 1:].mean(1).sum().item(),
            "dice_mean2": every.mean(1).sum().item(),
        }

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        by_pixel = _cross_entropy(output, y, "none").flatten(1).mean(1)
        overlap = dice(output.softmax(1), _one_hot(y, output.shape[1])).mean(1)
        return (by_pixel + 1 - overlap) / 2


@dataclass(frozen=True)
class NextCharacter(Objective):
    """The character that follows a window of text: inputs are positions in an alphabet, labels are too."""

    task: ClassVar[str] = NEXT_CHARACTER
    examples: ClassVar[str] = "windows"
    pixels: ClassVar[bool] = False

    def layout(self, size: int) -> np.dtype[Any]:
        return np.dtype([("input", "u1", (size,))])


OBJECTIVES: Mapping[str, Objective] = {o.task: o for o in (Objective(), Segmentation(), NextCharacter())}
METRICS = tuple(dict.fromkeys(o.metric for o in OBJECTIVES.values()))


def objective(task: str) -> Objective:
    """The objective of a task.

    Raises:
        ConfigError: There is no such task.
    """
    if task not in OBJECTIVES:
        raise ConfigError(unknown("task", task, OBJECTIVES))
    return OBJECTIVES[task]


def metric_of(scores: Mapping[str, Any], prefix: str = "") -> str | None:
    """Which metric these scores hold under `prefix + metric`; None: none."""
    return next((name for name in METRICS if prefix + name in scores), None)


def dice(a: Tensor, b: Tensor) -> Tensor:
    """2 |A and B| / (|A| + |B|) of each example and class, shape (B, C).

    Args:
        a: Membership of each pixel in each class, 0 to 1, shape (B, C, ...).
        b: The same.
    """
    a, b = a.flatten(2), b.flatten(2)
    return 2 * (a * b).sum(2) / (a.sum(2) + b.sum(2) + EMPTY)


def _cross_entropy(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(output, y, reduction=reduction)


def _one_hot(y: Tensor, classes: int) -> Tensor:
    import torch.nn.functional as F

    return F.one_hot(y, classes).movedim(-1, 1).float()


def symbols(rows: npt.NDArray[Any], device: str = "cpu") -> Tensor:
    """Stored symbols as a model reads them: int64, shape (B, length)."""
    import torch

    return torch.from_numpy(rows).to(device).long()
