"""Early exits: classifiers on the tokens between blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ExitHeads(nn.ModuleDict):
    """Linear classifiers on the tokens between blocks, after the network's final norm and pooling.

    An exit belongs to a span of blocks and is named after it, e.g. `0-2`. It reads the tokens after the last
    active block of its span; a model without an active block in the span does not have the exit.
    """

    def __init__(
        self, spans: Iterable[tuple[int, int]], width: int, num_classes: int, has_head: bool, last_only: bool
    ) -> None:
        """Make one classifier for each span.

        Args:
            spans: First and last block of each exit, ascending.
            width: Number of features.
            num_classes: Number of logits of each exit.
            has_head: Whether the network's own head is an additional, last exit.
            last_only: Whether to predict with the last exit only, not with the mean over all exits.
        """
        self.spans = {f"{first}-{last}": range(first, last + 1) for first, last in spans}
        super().__init__({name: nn.Linear(width, num_classes) for name in self.spans})
        self.has_head = has_head
        self.last_only = last_only

    def places(self, active: tuple[int, ...]) -> dict[str, int]:
        """The block whose tokens each exit reads, by name of the exit; without the exits that do not exist.

        Args:
            active: Indices of the blocks that the model has.
        """
        blocks = {name: [j for j in active if j in span] for name, span in self.spans.items()}
        return {name: inside[-1] for name, inside in blocks.items() if inside}

    def decide(self, outputs: list[Tensor]) -> Tensor:
        """The logits (B, C) that predictions are made from: of the last exit, or the mean of all.

        Args:
            outputs: Logits (B, C) of each exit.
        """
        return outputs[-1] if self.last_only else torch.stack(outputs).mean(0)

    def features(self, net: Any, x: Tensor) -> list[Tensor]:
        """Features (B, width) of every exit, from the first to the last, and of the network's head.

        Args:
            net: The network, whose blocks are a `BlockStack`.
            x: A batch of images.
        """
        places = self.places(net.blocks.active)
        with net.blocks.tapped(set(places.values())) as tokens:
            features = net(x)
        return [*(_after_blocks(net, x, tokens[j]) for j in places.values()), features]

    def logits(self, features: list[Tensor], head: nn.Module, active: tuple[int, ...]) -> list[Tensor]:
        """Logits (B, C) of every exit, from the first to the last.

        Args:
            features: What `features` returned.
            head: The network's own head.
            active: Indices of the blocks that computed them.
        """
        classifiers = [*(self[name] for name in self.places(active)), *([head] if self.has_head else [])]
        return [classifier(z) for classifier, z in zip(classifiers, features, strict=False)]


def can_exit(net: Any) -> bool:
    """Whether features can be made from the tokens between the blocks of a network."""
    return hasattr(net, "after_blocks") or (hasattr(net, "norm") and hasattr(net, "forward_head"))


def _after_blocks(net: Any, x: Tensor, tokens: Any) -> Tensor:
    """Features (B, width) from tokens (B, N, D), by what follows the blocks of a network.

    Args:
        net: The network.
        x: The batch from which the tokens were computed.
        tokens: The tokens.
    """
    if hasattr(net, "after_blocks"):
        own: Tensor = net.after_blocks(x, tokens)
        return own
    features: Tensor = net.forward_head(net.norm(tokens), pre_logits=True)
    return features
