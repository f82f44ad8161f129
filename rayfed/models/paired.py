"""Modules that change what blocks of both towers of a CLIP model do, and are registered in both.

`BlockStack.use_change` calls `image_block` instead of each block of the image tower, and `TextSide` calls
`text_block` instead of those of the text tower. Letters in shapes: B images or texts, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.clip import ImageTower, TextSide


class CoupledPrompts(nn.Module):
    """MaPLe: prompts of both towers, new ones before each of the first blocks.

    Those of the image tower are linear functions of those of the text tower. They are appended to the tokens
    before the first block that runs and removed after the last one; the text tower has them before the name.

    Attributes:
        prompts: Those of the text tower, shape (depth, M, text width).
        couplings: The linear functions, one for each block.
    """

    def __init__(self, depth: int, length: int, widths: tuple[int, int], init_std: float) -> None:
        super().__init__()
        image, text = widths
        self.prompts = nn.Parameter(torch.empty(depth, length, text))
        nn.init.normal_(self.prompts, std=init_std)
        self.couplings = nn.ModuleList(nn.Linear(text, image) for _ in range(depth))

    def forward(self, context: None, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of the class prompts before the first block, as of `rayfed.models.prompters`."""
        return self.prompts[0]

    def image_block(
        self, block: nn.Module, run: Any, index: int, x: Tensor, first: bool, last: bool
    ) -> Tensor:
        """Tokens (B, N, width) after a block of the image tower."""
        depth, length, _ = self.prompts.shape
        if first or index < depth:
            place = min(index, depth - 1)
            prompts = self.couplings[place](self.prompts[place]).to(x.dtype)
            x = torch.cat((x if first else x[:, :-length], prompts.expand(len(x), -1, -1)), dim=1)
        x = run(x)
        return x[:, :-length] if last else x

    def text_block(self, block: nn.Module, run: Any, index: int, x: Tensor) -> Tensor:
        """Tokens (B, N, text width) after a block of the text tower."""
        depth, length, _ = self.prompts.shape
        if 0 < index < depth:
            prompts = self.prompts[index].to(x.dtype).expand(len(x), -1, -1)
            x = torch.cat((x[:, :1], prompts, x[:, 1 + length :]), dim=1)
        after: Tensor = run(x)
        return after


class PairedBottleneck(nn.Module):
    """The layers of an adapter that belong to one tower."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden)
        self.up = nn.Linear(hidden, width)


class PairedAdapters(nn.Module):
    """MMA: adapters parallel to the last blocks of both towers, which have the middle layers in common.

    Attributes:
        image: Layers of the image tower, from the first adapted block to its last.
        text: Those of the text tower.
        shared: Middle layers; one for each pair of blocks, counted from the last.
        scale: Factor of what an adapter adds.
    """

    def __init__(
        self, count: int, hidden: int, widths: tuple[int, int], depths: tuple[int, int], scale: float
    ) -> None:
        super().__init__()
        self.image, self.text = (
            nn.ModuleList(PairedBottleneck(width, hidden) for _ in range(count)) for width in widths
        )
        self.shared = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        self.scale = scale
        self._before = depths[0] - count, depths[1] - count
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def image_block(self, block: Any, run: Any, index: int, x: Tensor, first: bool, last: bool) -> Tensor:
        """Tokens (B, N, width) after a block of the image tower."""
        return self._after(self.image, index - self._before[0], block, run, x)

    def text_block(self, block: Any, run: Any, index: int, x: Tensor) -> Tensor:
        """Tokens (B, N, text width) after a block of the text tower."""
        return self._after(self.text, index - self._before[1], block, run, x)

    def _after(self, ends: nn.ModuleList, place: int, block: Any, run: Any, x: Tensor) -> Tensor:
        after: Tensor = run(x)
        if place < 0:
            return after
        own: Any = ends[place]
        # The gradient of the adapter's parameters is that of an output without the factor, which keeps steps
        # from being as small as it; the gradient of x has the factor.
        x = x.detach() + self.scale * (x - x.detach())
        hidden = torch.relu(self.shared[place](torch.relu(own.down(block.ln_1(x)))))
        added = own.up(hidden)
        return after + self.scale * added.detach() + (added - added.detach())


def both_towers(model: Backbone, text: TextSide) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers of blocks, and widths of their tokens, of the image and the text tower.

    Raises:
        ConfigError: The image tower has no blocks.
    """
    net: Any = model.net
    if not (isinstance(net, ImageTower) and model.num_blocks):
        raise ConfigError(
            f"tuning.name: this tuning changes blocks of both towers, and the image tower of {model.label!r} "
            f"has none; use clip_mini or clip_vit_b_16"
        )
    return (model.num_blocks, text.num_blocks), (net.visual.transformer.width, text.token_width)


def pair(model: Backbone, text: TextSide, module: nn.Module) -> None:
    """Register a module in both towers of a model."""
    net: Any = model.net
    net.paired = text.paired = module
