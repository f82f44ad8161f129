"""Why clients with a tuned model can, or cannot, share their passes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayfed.errors import one_line
from rayfed.fast.stacked import stackable
from rayfed.fast.whole import WholeStack, run_whole
from rayfed.models.backbone import Backbone
from rayfed.models.clip import ClipHead
from rayfed.models.named_tensors import PEFT_ADAPTER, RESIDUAL_LEAF, NamedTensor, bound
from rayfed.types import rank_axes

OWN_LAYERS = (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.ParameterDict, ClipHead)
"""Layers, and PEFT's container of vectors, whose trained tensors can differ by client in a joint pass."""

WHOLE_LAYERS = (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d)
"""Layers of networks of libraries whose tensors can differ by client in a joint pass of a whole network.

A network of a user may have others: it is tried (`_why_other_outputs`)."""

ERROR = 1e-3
"""Largest difference of a tried output, as a share of the largest output; rounding is far below it."""


def why_not_joint(model: Backbone, asked: bool = True) -> str:
    """Why clients with this model do not share a forward pass; empty: they do.

    Args:
        model: The tuned model, with or without values.
        asked: The config asks for groups; else whole networks are not tried, and have none.
    """
    if model.text is not None and {*model.net.modules()} & {*model.text.modules()}:
        return "the text tower and the network have trained layers in common"
    trained = stackable(model)
    is_whole = trains_whole(model)
    parts = (model.text, model.exits, model.gc_net, model.adapter)
    if is_whole and (any(part is not None for part in parts) or any(rank_axes(name) for name in trained)):
        return "most of the model is trained, so that clients have no trunk in common"
    apart = {
        m for whole in model.modules() if isinstance(whole, nn.MultiheadAttention) for m in whole.modules()
    }
    for name, entry in trained.items():
        if f".{PEFT_ADAPTER}" in entry.path:
            return f"PEFT computes the adapter {name} with the same values for all examples"
        if entry.is_buffer and entry.leaf != RESIDUAL_LEAF:
            return f"{name} is a statistic over the images of a batch"
        if is_whole:
            fits = model.is_own or isinstance(entry.module, WHOLE_LAYERS)
        else:
            fits = isinstance(entry.module, OWN_LAYERS) or entry.leaf in ("prompt", RESIDUAL_LEAF)
        if not fits or entry.module in apart:
            kind = type(entry.module).__name__
            return f"{name} belongs to a layer of type {kind}, which takes the same values for all images"
    if model.gc_net is not None and model.gc_net.mix == "scramble":
        return "tuning.prompt_mix=scramble mixes the images of a batch"
    if model.behaviour is not None and (why := model.behaviour.why_alone):
        return why
    if model.user_sets_modes if is_whole else model.has_own_modes:
        return "the network has its own train(), which is called for each client"
    if (why := _other_randomness(model)) or not is_whole:
        return why
    return _why_other_outputs(model, trained) if asked else "train.group=auto leaves whole networks alone"


def trains_whole(model: Backbone) -> bool:
    """Whether most of a network is trained, so that clients have no part of it in common.

    Args:
        model: The tuned model, with or without values.
    """
    trained = sum(t.tensor.numel() for t in stackable(model).values() if not t.is_buffer)
    return 2 * trained > sum(p.numel() for p in model.parameters())


@torch.no_grad()
def _why_other_outputs(model: Backbone, trained: Mapping[str, NamedTensor]) -> str:
    """Why a pass for two clients with different values does not give the output of each; empty: it does."""
    modes = [(module, module.training) for module in model.modules()]
    values = {name: (t.tensor.detach(), t.tensor.detach() * 0.5) for name, t in trained.items()}
    x = model.sample(4)
    if x.is_floating_point():
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    try:
        with torch.random.fork_rng(devices=[]):
            if _draws_itself(model, x):
                return "the network draws random numbers itself, not in layers of nn.Dropout"
            model.eval()
            parts = []
            for k in range(2):
                with bound(trained.values(), (values[name][k] for name in trained)):
                    parts.append(model(x.chunk(2)[k]))
            with bound(trained.values(), (WholeStack(torch.stack(values[name])) for name in trained)):
                found = run_whole(model, x, 2)
        other = "the network gives other outputs for several clients at once"
        return "" if _are_near(found, torch.cat(parts)) else other
    except Exception as err:  # code of a user, which may do anything with its tensors
        return f"the network cannot run for several clients at once ({type(err).__name__}: {one_line(err)})"
    finally:
        for module, mode in modes:
            vars(module)["training"] = mode


def _are_near(found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs differ by less than `ERROR`; without values, whether their shapes are equal."""
    if found.shape != expected.shape:
        return False
    return expected.is_meta or bool((found - expected).abs().max() <= ERROR * expected.abs().max())


def _draws_itself(model: Backbone, x: Tensor) -> bool:
    """Whether a network in train mode draws random numbers although its dropout layers do not."""
    for module in model.modules():
        vars(module)["training"] = not isinstance(module, nn.Dropout)
    before = torch.get_rng_state()
    model(x)
    return not torch.equal(before, torch.get_rng_state())


def _other_randomness(model: Backbone) -> str:
    for module in model._modes()[1]:
        kind = type(module).__name__
        if "Drop" in kind and not isinstance(module, nn.Dropout):
            rate = getattr(module, "p", getattr(module, "drop_prob", 0.0))
            if rate:
                return f"{kind} draws random numbers for the images of a batch together"
    return ""
