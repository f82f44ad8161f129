"""Inputs of a trained network as its user has them: images, files and texts become what training gave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayfed.data.data_config import Resize
from rayfed.data.image_file import read_image, to_square
from rayfed.data.shards import Dataset
from rayfed.data.text import PAD, Inputs, with_types
from rayfed.data.tokenizer import TYPES, load_tokenizer
from rayfed.devices import HOST
from rayfed.executors.worker import converter
from rayfed.objective import LANGUAGE_MODELING

if TYPE_CHECKING:
    from rayfed.engine.setup import Setup
    from rayfed.models.backbone import Backbone


@dataclass(frozen=True)
class RawInputs:
    """A hook before the forward pass of a network; tensors and what a tokenizer returns pass as they are.

    Attributes:
        convert: Makes inputs of the network from a batch of stored ones, as `converter` says.
        shape: Shape of one stored input; empty: tokens.
        size: Side of an image in pixels, or most tokens of a text.
        resize: How images become squares.
        tokenizer: Folder or name of the model whose tokenizer makes tokens; None: it takes no texts.
        side: End at which a text that is too long is cut: left or right.
    """

    convert: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    size: int
    resize: Resize
    tokenizer: str | None
    side: str

    @classmethod
    def of(cls, setup: Setup, model: Backbone, dataset: Dataset) -> RawInputs:
        """The hook of a model. Args: setup: its experiment. dataset: the examples of that."""
        wanted = setup.design.data.resize
        learns = setup.context.objective.reads == LANGUAGE_MODELING
        return cls(
            convert=converter(dataset, setup.context.objective.pixels, model, HOST),
            shape=() if isinstance(dataset.images, Inputs) else tuple(dataset.images.shape[1:]),
            size=model.size,
            resize=model.resize if wanted == "auto" else wanted,
            tokenizer=model.tokenizer,
            side=setup.design.data.truncate or ("left" if learns else "right"),
        )

    def __call__(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the forward pass with prepared inputs; None: they are prepared already."""
        if not given or isinstance(given[0], Tensor | Mapping):
            return None
        batch = given[0] if self._is_batch(given[0]) else [given[0]]
        if not len(batch) or isinstance(batch[0], Tensor):
            return None
        stored = self._tokens(batch) if self.tokenizer is not None else self._values(batch)
        device = next(module.parameters()).device
        return (self.convert(stored).to(device), *given[1:]), named

    def _values(self, batch: Sequence[Any]) -> Tensor:
        """Images or other values as they are stored, shape (B, ...)."""
        return torch.from_numpy(np.stack([self._value(each) for each in batch]))

    def _is_batch(self, given: Any) -> bool:
        """Whether a value is several inputs; an array with the dimensions of one is one."""
        if isinstance(given, np.ndarray):
            return given.ndim > len(self.shape)
        return isinstance(given, list | tuple)

    def _value(self, given: Any) -> NDArray[Any]:
        from PIL import Image

        if isinstance(given, str | Path):
            return read_image(Path(given).expanduser(), self.size, self.resize)
        if isinstance(given, Image.Image):
            return to_square(given, self.size, self.resize)
        value = np.asarray(given)
        if value.shape == self.shape or value.dtype != np.uint8 or value.ndim not in (2, 3):
            return value
        return to_square(Image.fromarray(value), self.size, self.resize)

    def _tokens(self, batch: Sequence[Any]) -> Tensor:
        """Tokens of texts or of pairs of texts, shape (B, L), with pads behind them."""
        assert self.tokenizer is not None
        tokenizer = load_tokenizer(self.tokenizer)
        pieces = tokenizer.backend_tokenizer
        pieces.enable_truncation(self.size, direction=self.side)
        made = [pieces.encode(*([text] if isinstance(text, str) else text)) for text in batch]
        has_types = TYPES in tokenizer.model_input_names
        rows = [with_types(each.ids, each.type_ids if has_types else [0] * len(each.ids)) for each in made]
        tokens = [torch.from_numpy(np.asarray(row)) for row in rows]
        return nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
