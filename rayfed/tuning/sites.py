"""Layers of a block by name: what the field `sites` of a tuning scheme chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from rayfed.errors import ConfigError, shown
from rayfed.models.backbone import Backbone

LAST = {
    "l0": (
        *(r"attn\.proj", r"mlp_tokens\.fc2", r"attention\.output\.dense", r"attn\.c_proj"),
        *(r"self_attn\.(o|out)_proj", r"attention\.out_lin", r"attention\.dense", r"attn\.Wo"),
    ),
    "l1": (
        *(r"mlp\.fc2", r"mlp_channels\.fc2", r"mlp\.c_proj", r"output\.dense", r"mlp\.down_proj"),
        *(r"ffn\.lin2", r"mlp\.dense_4h_to_h", r"mlp\.Wo", r"fc2"),
    ),
}
"""Regular expressions for the last linear layer of each half of a block (Su et al., FedRA, 2024).

They cover transformers and mixers, and of transformers' networks for texts BERT, RoBERTa, ELECTRA, DeBERTa,
DistilBERT, ModernBERT, GPT-2, GPT-NeoX, OPT, Llama and those that are built like it. CLIP models of open_clip
have l1 only: PyTorch's attention reads the weight of its projection without calling the layer, so an adapter
there would have no effect.
"""


def called_layers(
    module: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...]
) -> dict[str, nn.Module]:
    """The layers of these types that a forward pass calls, by name within the module.

    Left out are the layers inside PyTorch's attention, and the joint layer of queries, keys and values of
    timm's BEiT family: the attention reads their weights without calling them.

    Args:
        module: A network or a block.
        kinds: Classes of layers.
    """
    everything = dict(module.named_modules())
    read = tuple(f"{n}." for n, m in everything.items() if isinstance(m, nn.MultiheadAttention))
    read += tuple(f"{n}.qkv" for n, m in everything.items() if reads_qkv(m))
    found = {n: m for n, m in everything.items() if isinstance(m, kinds)}
    return {n: m for n, m in found.items() if not n.startswith(read)}


def reads_qkv(attention: nn.Module) -> bool:
    """Whether this is an attention of timm that puts the bias of its layer `qkv` together from parts."""
    has_parts = getattr(attention, "q_bias", None) is not None
    return has_parts and not getattr(attention, "qkv_bias_separate", False)


def chosen_layers(model: Backbone, sites: Sequence[str], named: Mapping[str, Sequence[str]]) -> list[str]:
    """Names, within a block, of the linear layers that `tuning.sites` chooses, in alphabetical order.

    Args:
        sites: Names of groups of layers, or regular expressions that match whole names of layers.
        named: Regular expressions of each group, by its name. A group may be absent in a model.

    Raises:
        ConfigError: The model has no uniform blocks, an expression matches no layer, or nothing is chosen.
    """
    layers = list(called_layers(model.stack.get_submodule("0"), nn.Linear))
    chosen = sorted({layer for site in sites for layer in _matches(site, layers, named, model.label)})
    if not chosen:
        missed = f"{list(sites)} match no linear layer in a block of {model.label!r}"
        what = missed if sites else "is empty"
        raise ConfigError(f"tuning.sites: {what}; choose {_choices(named, layers)}")
    return chosen


def named_layers(
    model: Backbone, wanted: str | Sequence[str], kinds: tuple[type[nn.Module], ...]
) -> list[str]:
    """Names, within the network, of the layers that `tuning.targets` chooses, in the order of the network.

    The rules are PEFT's: one text is a regular expression that matches a whole name, or `all-linear`; of a
    list, each text is a name or the end of one, after a dot.

    Args:
        wanted: The value of `tuning.targets`, in the names that a user's network has.
        kinds: Types of layers that can be chosen.

    Raises:
        ConfigError: A text matches no layer of these types, or one whose weights are read without calling it.
    """
    every = {own_name(n): (n, m) for n, m in model.net.named_modules() if n}
    can = {own_name(n): n for n in called_layers(model.net, kinds)}
    if wanted == "all-linear":
        found = [n for n in can if isinstance(every[n][1], nn.Linear)]
    elif isinstance(wanted, str):
        found = [n for n in every if _fits(wanted, n)]
    else:
        found = [n for n in every if any(n == each or n.endswith(f".{each}") for each in wanted)]
    chosen = [n for n in found if n in can]
    read = [n for n in found if isinstance(every[n][1], kinds) and n not in can]
    if read and not chosen:
        raise ConfigError(
            f"tuning.targets: {read[0]!r} of {model.label!r} is part of an attention of torch, which "
            "reads its "
            f"weights without calling it, so that an adapter would have no effect; choose from: "
            f"{_list_names(can)}"
        )
    if not chosen:
        raise ConfigError(_no_match(wanted, model, can))
    return [can[n] for n in chosen]


def own_name(name: str) -> str:
    """The name that a module of a network has for its user."""
    return name.removeprefix("body.")


def exactly(names: Sequence[str]) -> str:
    """A regular expression that matches these full names."""
    return "|".join(map(re.escape, names))


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as err:
        raise ConfigError(f"tuning.targets: {pattern!r} is not a regular expression: {err}") from err


def _no_match(wanted: object, model: Backbone, can: Mapping[str, str]) -> str:
    names = _list_names(can)
    return f"tuning.targets: {shown(wanted)} matches no layer of {model.label!r}; choose from: {names}"


def _list_names(names: Mapping[str, str]) -> str:
    few = list(names)[:MOST_NAMED]
    return ", ".join(few) + (f" and {len(names) - len(few)} more" if len(names) > len(few) else "")


MOST_NAMED = 20
"""Layers that a message lists."""


def in_every_block(layers: Sequence[str]) -> str:
    r"""A regular expression that matches the full names of these layers in all blocks.

    >>> print(in_every_block(["mlp.fc2"]))
    blocks\.\d+\.(mlp\.fc2)
    """
    return rf"blocks\.\d+\.({'|'.join(map(re.escape, layers))})"


def _matches(site: str, layers: list[str], named: Mapping[str, Sequence[str]], label: str) -> list[str]:
    patterns = named.get(site, (site,))
    try:
        matching = [layer for layer in layers if any(re.fullmatch(p, layer) for p in patterns)]
    except re.error as err:
        raise ConfigError(f"tuning.sites: {site!r} is not a regular expression: {err}") from err
    if not matching and site not in named:
        raise ConfigError(
            f"tuning.sites: {site!r} matches no linear layer in a block of {label!r}; "
            f"choose {_choices(named, layers)}"
        )
    return matching


def _choices(named: Mapping[str, Sequence[str]], layers: Sequence[str]) -> str:
    return f"{', '.join(named)} or from: {', '.join(layers)}"
