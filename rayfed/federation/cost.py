"""What training costs a client: floating-point operations and trained numbers, known from its examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from rayfed.federation.train_config import TrainConfig
from rayfed.types import Broadcast


@dataclass(frozen=True)
class Load:
    """Cost of a model with some number of blocks.

    Attributes:
        step: Operations of one step, whatever the number of rows in its batch.
        row: Operations of each row of a batch, forward and backward.
        trained: Numbers that are trained.
    """

    step: int
    row: int
    trained: int


@dataclass(frozen=True)
class Cost:
    """Cost of a visit in which a client trains.

    Attributes:
        train: Settings of local optimisation.
        loads: Cost of the model by its number of blocks; others are interpolated, which is exact where all
            blocks are alike.
        depth: Number of blocks of the whole model.
    """

    train: TrainConfig
    loads: Mapping[int, Load]
    depth: int

    def visit(self, sent: Broadcast, num_examples: int) -> tuple[int, int]:
        """Operations of the steps of a visit, and the numbers that the client trains.

        Args:
            sent: The message, which says what blocks the client holds.
            num_examples: Training examples of the client.
        """
        load = self.load(sent.blocks)
        steps, rows = self.train.steps(num_examples), self.train.examples(num_examples)
        return steps * load.step + rows * load.row, load.trained

    def load(self, blocks: Collection[int] | None) -> Load:
        """Cost of the model with these blocks; None: all of them."""
        number = self.depth if blocks is None else len(blocks)
        if number in self.loads:
            return self.loads[number]
        known = sorted(self.loads)
        parts = ([getattr(self.loads[n], part) for n in known] for part in ("step", "row", "trained"))
        step, row, trained = (round(float(np.interp(number, known, values))) for values in parts)
        return Load(step=step, row=row, trained=trained)
