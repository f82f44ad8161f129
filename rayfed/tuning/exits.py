"""Early exits: classifiers after every few blocks, in addition to the parameters of another scheme.

Kim et al., DepthFL, ICLR 2023 [kim2023depthfl], section 3, with linear exits on the frozen final norm as in
the baseline of FedRA [su2024fedra], section 4.1. A client has the exits whose blocks it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.blocks import ExitHeads, can_exit
from rayfed.tuning.base import TUNINGS, Tuning
from rayfed.types import Count


@dataclass(frozen=True, kw_only=True)
class Exits:
    """Train early exits and the parameters of an inner scheme.

    Attributes:
        inner: The inner scheme: its `name` and its fields.
        every: Number of blocks between exits.
        variant: `paper`: exit k is after block `every * k`, or after the last block before it that the client
            holds, and the deepest exit of a client is its classifier. `authors_code` (of FedRA): exit k is
            after `every * k + 1` blocks, and the head is the last exit of every client at any depth.
        predict: Prediction in evaluation: `ensemble` uses the mean of the logits of all exits, `last` the
            logits of the last exit.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"exits"})

    inner: dict[str, Any] = field(default_factory=lambda: {"name": "lora"})
    every: Count = 3
    variant: Literal["paper", "authors_code"] = "paper"
    predict: Literal["ensemble", "last"] = "ensemble"

    def apply(self, model: Backbone) -> Backbone:
        depth = len(model.stack)
        if not can_exit(model.net):
            raise ConfigError(
                f"tuning.name: exits do not work on {model.label!r}, which has no final norm for them; use "
                f"vit_mini, vit_base_patch16_224 or mixer_b16_224"
            )
        model = _scheme(self.inner).apply(model)
        paper = self.variant == "paper"
        model.exits = ExitHeads(
            self.spans(depth), model.width, model.num_classes, not paper, self.predict == "last"
        )
        if paper:
            model.head.requires_grad_(False)
        return model

    def spans(self, depth: int) -> list[tuple[int, int]]:
        """First and last block of the span of each exit.

        Args:
            depth: Number of blocks of the model.
        """
        if self.variant == "paper":
            return [(j, min(j + self.every, depth) - 1) for j in range(0, depth, self.every)]
        return [(j, j) for j in range(self.every, depth, self.every)]


def _scheme(section: Mapping[str, Any]) -> Tuning:
    values = dict(section)
    if values.get("name", "exits") == "exits":
        raise ConfigError(
            "tuning.inner.name: must name the scheme that gets exits, such as lora, full or head"
        )
    cls = TUNINGS.load(values.pop("name"), "tuning.inner.name")
    scheme: Tuning = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return scheme


TUNING = Exits
