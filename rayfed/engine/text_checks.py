"""Checks of a model with the texts of its run, before it starts: tokens, and the library's logits."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayfed.data.shards import Dataset
from rayfed.data.text import TYPE_BITS, Inputs
from rayfed.data.tokenizer import load_tokenizer
from rayfed.errors import ConfigError, one_line
from rayfed.models.backbone import Backbone
from rayfed.models.language import TextHead, TextNet

TEXTS = 2
"""Texts whose logits are compared with those of the library."""

MOST_TOKENS = 64
"""Tokens of these texts that are read at most."""

TOLERANCE = 1e-4
"""Largest difference of logits, as a share of the largest logit; the same layers differ by rounding only."""

GIVEN = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the outputs of a tokenizer that a network gets."""


def check_tokens(model: Backbone, dataset: Dataset) -> Backbone:
    """The model, whose network has a row of its embedding for every token of the texts, and for its type.

    Args:
        model: The model; it needs no values.

    Raises:
        ConfigError: It lacks some; names the token and the first text with it.
    """
    inputs = dataset.images
    if not isinstance(inputs, Inputs) or not isinstance(model.net, TextNet) or not len(inputs.tokens):
        return model
    trunk = model.net.trunk
    rows = len(trunk.get_input_embeddings().weight)
    if int(inputs.tokens.max()) < rows:
        return model
    tokens, types = inputs.tokens & (1 << TYPE_BITS) - 1, inputs.tokens >> TYPE_BITS
    tables = [("token", tokens, rows)]
    tables += [
        ("type", types, len(module.weight))
        for name, module in trunk.named_modules()
        if name.endswith("token_type_embeddings") and isinstance(module, nn.Embedding) and model.net.types
    ]
    for what, numbers, known in tables:
        if not len(beyond := np.flatnonzero(numbers >= known)):
            continue
        place = int(beyond[0])
        text = dataset.keys[int(np.searchsorted(inputs.starts, place, side="right")) - 1]
        word = load_tokenizer(str(model.tokenizer)).convert_ids_to_tokens(int(tokens[place]))
        number = f"type {numbers[place]}, of token" if what == "type" else f"token {numbers[place]}"
        raise ConfigError(
            f"model.name: the tokenizer of {model.label!r} has {number} ({word!r}), as in text {text}, and "
            f"the network's embedding has {known} rows for a {what}; take a tokenizer and a network that "
            f"belong together, or resize the embedding and save the network again"
        )
    return model


def check_logits(model: Backbone, dataset: Dataset, rows: NDArray[np.int64]) -> None:
    """Check that a network gives the logits of the library's own model for the first texts of a client.

    Adapters that a tuning scheme put into the layers are in both.

    Args:
        model: The model with its values.
        rows: Numbers of the texts of a client.

    Raises:
        ConfigError: The network fails, or its logits are others.
    """
    inputs, net, head = dataset.images, model.net, model.head
    if not isinstance(inputs, Inputs) or not isinstance(net, TextNet):
        return
    _check_given(model, net)
    model.eval()
    kind = type(vars(net)["whole"]).__name__
    for row in [row for row in rows.tolist() if inputs.lengths[row]][:TEXTS]:
        tokens = torch.from_numpy(inputs.tokens[inputs.starts[row] : inputs.starts[row + 1]].copy())
        try:
            differs, largest = difference(net, head, tokens[:MOST_TOKENS].long())
        except Exception as err:  # networks of the library raise almost anything
            raise ConfigError(
                f"model.name: {model.label!r} fails with a text of {dataset.name!r} "
                f"({type(err).__name__}: {one_line(err)[:200]}); its type {kind} is not supported"
            ) from err
        if not differs <= TOLERANCE * largest + 1e-6:
            raise ConfigError(
                f"model.name: {model.label!r} would not give the logits of the library, whose largest for a "
                f"text of {dataset.name!r} is {largest:.3g}: they differ by {differs:.3g}; {kind} computes "
                f"something that is not supported; choose another model"
            )


def _check_given(model: Backbone, net: TextNet) -> None:
    """Refuse a network that takes what its tokenizer returns and what is not stored with the texts."""
    takes = inspect.signature(net.trunk.forward).parameters
    names = load_tokenizer(str(model.tokenizer)).model_input_names
    if others := [name for name in names if name in takes and name not in GIVEN]:
        raise ConfigError(
            f"model.name: {model.label!r} takes {', '.join(others)} of its tokenizer, which is not "
            f"supported; choose another model"
        )


@torch.no_grad()
def difference(net: TextNet, head: nn.Module, tokens: Tensor) -> tuple[float, float]:
    """The difference of logits from those of the library's own model with the same values.

    The library's model runs the same layers in its own way, and makes the logits of what they return with its
    own code; its classifier gets the values of ours.

    Args:
        net: A network with values, in evaluation mode.
        head: Its head, in evaluation mode.
        tokens: The tokens of one text, without pads, int64, shape (L,).

    Returns:
        The largest difference, and the largest logit of the library, both absolute.
    """
    whole = vars(net)["whole"].eval()
    ours = head(net(tokens[None]))
    if isinstance(head, TextHead):
        _give(head, whole, ours.shape[-1])
    path, _, leaf = net.path.rpartition(".")
    owner, settings = vars(net.trunk.get_submodule(path)), whole.config
    pads = settings.pad_token_id
    owner[leaf] = nn.ModuleList(net.blocks.children())
    settings.pad_token_id = None  # so that a token of the text that stands for pads is none
    try:
        mask = torch.ones(1, len(tokens), dtype=torch.long, device=tokens.device)
        theirs = whole(**net.named(tokens[None]), attention_mask=mask).logits
    finally:
        owner[leaf] = net.blocks
        settings.pad_token_id = pads
    if ours.shape != theirs.shape:
        return float("inf"), float(theirs.abs().max())
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def _give(head: TextHead, whole: Any, classes: int) -> None:
    """Give the library's classifier the values of ours."""
    names = {head.plan.last: head, **({head.plan.hidden: head.dense} if head.plan.hidden else {})}
    for name, own in names.items():
        parent, _, leaf = name.rpartition(".")
        assert own is not None
        layer = nn.Linear(own.in_features, own.out_features, bias=own.bias is not None)
        layer.weight.data = own.weight.detach()
        if own.bias is not None:
            layer.bias.data = own.bias.detach()
        setattr(whole.get_submodule(parent), leaf, layer)
    whole.num_labels = whole.config.num_labels = classes
