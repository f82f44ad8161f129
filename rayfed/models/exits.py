"""Early exits: classifiers on the tokens between blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ExitHeads(nn.ModuleDict):
    """Linear classifiers within a network, each on the final norm and pooling of the tokens it sees.

    An exit belongs to a span of blocks, and is named after it: `0-2`. It sits after the last active block of
    its span, and does not exist for a model without such a block.
    """

    def __init__(
        self, spans: Iterable[tuple[int, int]], width: int, num_classes: int, has_head: bool, last_only: bool
    ) -> None:
        """Make one classifier per span.

        Args:
            spans: First and last block of each exit, ascending.
            width: Size of the features.
            num_classes: Width of every exit.
            has_head: Whether the network's own head is the last exit of every model.
            last_only: Predict with the last exit only, not with the mean over all of them.
        """
        self.spans = {f"{first}-{last}": range(first, last + 1) for first, last in spans}
        super().__init__({name: nn.Linear(width, num_classes) for name in self.spans})
        self.has_head, self.last_only = has_head, last_only

    def places(self, active: tuple[int, ...]) -> dict[str, int]:
        """The block after which each exit sits, by exit, for those that a model with these blocks has."""
        found = {name: [j for j in active if j in span] for name, span in self.spans.items()}
        return {name: inside[-1] for name, inside in found.items() if inside}

    def decide(self, outputs: list[Tensor]) -> Tensor:
        """The prediction of a model with these outputs."""
        return outputs[-1] if self.last_only else torch.stack(outputs).mean(0)

    def logits(self, net: Any, head: nn.Module, x: Tensor) -> list[Tensor]:
        """Logits of every exit, each (B, C), from the first to the last."""
        places = self.places(net.blocks.active)
        with net.blocks.tapped(set(places.values())) as tokens:
            features = net(x)
        outputs = [
            self[name](net.forward_head(net.norm(tokens[j]), pre_logits=True)) for name, j in places.items()
        ]
        if self.has_head:
            outputs.append(head(features))
        return outputs
