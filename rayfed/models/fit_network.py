"""Finds head and blocks of a user's network, and checks before a run that it fits data, task and tuning.

What is found is proved on inputs of the user: the network with its head and its blocks taken apart must
compute what the whole network computes, in training and in evaluation mode, at its start values and at
others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError, one_line, place_of
from rayfed.models.backbone import Backbone
from rayfed.models.blocks import has_uniform_blocks
from rayfed.models.examine import draws_of, is_close, perturb
from rayfed.models.user_model import (
    FIND,
    Network,
    OwnBackbone,
    copy_network,
    every_layer_called,
    of_module,
    output_of,
)
from rayfed.objective import Objective
from rayfed.seeds import derive, use_seed

LARGE = 100.0
"""Factor of the values of a head under which it is looked at."""


def fit(network: Network, x: Tensor, seed: int) -> Network:
    """The network with its head found and its blocks checked, by passes of a few examples.

    Args:
        x: Inputs as the network gets them, shape (B, ...).

    Raises:
        ConfigError: The network cannot take the inputs, or what the user says about it is wrong; the message
            names the line of the user's code.
    """
    network = _with_own_values(network, seed)
    net = network.net(seed)
    passed = _another(network, net, seed).eval()  # what a first pass changes stays at its start in `net`
    hints = network.said
    call = passed if hints.features is None else getattr(passed, hints.features)
    before = _names_of_tensors(passed)
    try:
        with torch.no_grad(), every_layer_called(), use_seed(derive(seed, "fit")):
            returned = call(x.clone())
    except Exception as err:
        shape = f"{tuple(x.shape[1:])}, {str(x.dtype).removeprefix('torch.')}"
        raise ConfigError(
            f"model: {network.label!r} does not take inputs of shape {shape}: {type(err).__name__}: "
            f"{one_line(err)}{place_of(err) or network.place}{_about_whole_numbers(x)}"
        ) from err
    _check_nothing_made(network, passed, before)
    try:
        output = output_of(returned)
    except TypeError as err:
        raise ConfigError(f"model: {network.label!r} {err}{network.place}") from err
    if output.ndim == 0 or len(output) != len(x):
        raise ConfigError(
            f"model: {network.label!r} returns a tensor of shape {tuple(output.shape)} for {len(x)} "
            "examples; the "
            f"first dimension must be that of the examples{network.place}"
        )
    width = int(output.shape[1] if output.ndim > 1 else 1)
    return _proved(replace(network, width=width, example=(tuple(x.shape[1:]), x.dtype)), net, x, seed)


def _with_own_values(network: Network, seed: int) -> Network:
    """The network, or one with copied values where its function hands out the same tensors each time.

    Such a function gives a network that its user holds as well; clients would write into it.
    """
    if network.make is None:
        return network
    try:
        with torch.device("meta"):
            bare = network.net(seed)
    except (ConfigError, RuntimeError):
        bare = None
    if bare is not None and all(p.is_meta for p in bare.parameters()):
        return network  # it makes all its tensors itself
    first, second = network.net(seed), network.net(seed)
    known = {id(tensor) for tensor in (*first.parameters(), *first.buffers())}
    if not known.intersection(id(tensor) for tensor in (*second.parameters(), *second.buffers())):
        return network
    copied = of_module(first)
    return replace(network, make=None, shape=copied.shape, values=copied.values)


def _proved(network: Network, net: nn.Module, x: Tensor, seed: int) -> Network:
    """The network with a head and blocks for which it computes what it computes without taking it apart.

    Args:
        network: The network as its user describes it.
        net: The network with its start values, which are changed.
        x: Inputs as the network gets them, shape (B, ...).

    Raises:
        ConfigError: What the user says about it is wrong.
    """
    said = network.said
    head = _candidate(network, net, x, seed) if said.head == FIND else said.head
    found = [replace(network, said=replace(said, head=head))]
    if said.head == FIND and head is not None:
        found.append(replace(network, said=replace(said, head=None)))
    if said.blocks is None and has_uniform_blocks(net):
        found += [replace(each, stacks=False) for each in found]
    reasons: list[str] = []
    for each in found:
        in_parts = each.said.head is not None or each.said.blocks is not None
        in_parts = in_parts or (each.stacks and has_uniform_blocks(net))
        why = _difference(each, net, x, seed) if in_parts else ""
        if not why:
            return replace(each, notes=tuple(reasons[:1]))
        reasons.append(_not_taken(each, why))
    if said.head not in (None, FIND):
        raise ConfigError(
            f"model: the output of {network.label!r} is not that of its module {said.head!r}; name another "
            f"head=, or head=None{network.place}"
        )
    if said.blocks is not None:
        raise ConfigError(
            f"model: {network.label!r} computes something else with the blocks of {said.blocks!r} as a list "
            f"that is gone through once; name other blocks, or leave them out{network.place}"
        )
    raise AssertionError  # what nothing is taken out of does not differ


def _not_taken(network: Network, why: str) -> str:
    """A sentence: what was not taken for head and blocks, and why."""
    head = network.said.head
    part = f"its module {head!r} is not its head" if head is not None else "its list of blocks is not one"
    return f"model: {part}, because {why}; say head= or blocks= (rayfed.Model) to choose"


def _difference(network: Network, net: nn.Module, x: Tensor, seed: int) -> str:
    """The difference of a network from itself with head and blocks taken apart; empty: there is none.

    Args:
        network: Says what is taken apart.
        net: The network with its start values.
        x: Inputs.
    """
    whole = _another(network, net, seed)
    try:
        apart = network.split(_another(network, net, seed))
        apart.refresh()
    except ConfigError:
        raise
    except Exception as err:
        return f"it cannot be taken out ({type(err).__name__})"
    returns = _head_returns(network, whole)
    for draw in draws_of(whole, x):
        if draw:
            perturb_alike(whole, apart, network.said.head, derive(seed, "head", draw))
        for mode in (False, True):
            when = f"{'other' if draw else 'its start'} values in {'training' if mode else 'evaluation'}"
            try:
                one = _pass(whole, x, mode, seed)
            except Exception:  # `first_pass` says so, or other values are out of the network's range
                continue
            try:
                other = _pass(apart, x, mode, seed)
            except Exception as err:
                return f"the network fails without it ({type(err).__name__}: {one_line(err)})"
            if returns is not None and not returns.is_output(one):
                return f"with {when} the network returns something else than it"
            if one.shape != other.shape or not is_close(one, other):
                return f"with {when} the output is another one"
    if not _trains_alike(network, net, x, seed):
        return "the network computes other gradients with it"
    return ""


def _trains_alike(network: Network, net: nn.Module, x: Tensor, seed: int) -> bool:
    """Whether a network has the same gradients with its head and its blocks taken apart.

    They differ where it computes its outputs under `torch.no_grad()`, or where a hook changes the gradient
    of its outputs.

    Args:
        network: Says what is taken apart.
        net: The network with its start values.
        x: Inputs.
    """
    one, other = _another(network, net, seed), _another(network, net, seed)
    names = dict(other.named_parameters())  # splitting keeps the parameters, and changes their names
    apart = network.split(other)
    apart.refresh()
    try:
        wanted = _gradients(one, dict(one.named_parameters()), x, seed)
    except Exception:  # `first_pass` says so
        return True
    try:
        found = _gradients(apart, names, x, seed)
    except Exception:
        return False
    return wanted.keys() == found.keys() and all(is_close(wanted[name], found[name]) for name in wanted)


def _gradients(
    net: nn.Module, parameters: Mapping[str, nn.Parameter], x: Tensor, seed: int
) -> dict[str, Tensor]:
    """Gradients of the sum of squared outputs in training mode, by name; empty: the outputs have none."""
    net.train()
    with torch.enable_grad(), every_layer_called(), use_seed(derive(seed, "gradients")):
        loss = output_of(net(x.clone())).square().sum()
        if loss.requires_grad:
            loss.backward()
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


def _another(network: Network, net: nn.Module, seed: int) -> nn.Module:
    """A copy of a network with its values; made anew where it cannot be copied."""
    try:
        return copy_network(net, values=True)
    except Exception:
        return network.net(seed)


@torch.no_grad()
def _pass(net: nn.Module, x: Tensor, mode: bool, seed: int) -> Tensor:
    """Outputs of a pass in training or evaluation mode, with the same random numbers each time."""
    net.train(mode)
    with every_layer_called(), use_seed(derive(seed, "pass")):
        return output_of(net(x.clone()))


class _HeadReturns:
    """Notes what a module returned in a pass of a network, to tell whether the network returned it, too."""

    def __init__(self, module: nn.Module) -> None:
        self._returned: list[tuple[Any, int, Any]] = []
        module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        kept = output.detach().clone() if isinstance(output, Tensor) else None
        self._returned.append((output, getattr(output, "_version", 0), kept))

    def is_output(self, output: Tensor) -> bool:
        """Whether the module was called once and the network returned the tensor as it was."""
        returned, self._returned = self._returned, []
        if len(returned) != 1:
            return False
        tensor, version, kept = returned[0]
        same = tensor is output and output._version == version
        return same and torch.equal(output.nan_to_num(), kept.nan_to_num())


def _head_returns(network: Network, net: nn.Module) -> _HeadReturns | None:
    """Watches the head of a network; None: it has none, or another method makes its features."""
    head = network.said.head
    if head is None or network.said.features is not None:
        return None
    return _HeadReturns(net.get_submodule(head))


def perturb_alike(whole: nn.Module, apart: OwnBackbone, head: str | None, seed: int) -> None:
    """Change the values of a network at random, and those of the same network taken apart alike.

    Those of the head become large, so that what limits an output has something to limit.
    """
    perturb(whole, seed)
    with torch.no_grad():
        for parameter in whole.get_submodule(head).parameters() if head else ():
            parameter.mul_(LARGE)
    own = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
    values = dict(own)
    body: nn.Module = apart.net.body  # type: ignore[assignment]
    with torch.no_grad():
        for name, tensor in (*body.named_parameters(), *body.named_buffers()):
            if name in values and values[name].shape == tensor.shape:
                tensor.copy_(values[name])
        for name, tensor in (*apart.head.named_parameters(), *apart.head.named_buffers()):
            if head is not None and f"{head}.{name}" in values:
                tensor.copy_(values[f"{head}.{name}"])


def _names_of_tensors(net: nn.Module) -> set[str]:
    """Names of the parameters and buffers of a network."""
    return {name for name, _ in (*net.named_parameters(), *net.named_buffers())}


def _check_nothing_made(network: Network, net: nn.Module, before: set[str]) -> None:
    """Raise ConfigError where a first pass made tensors. Args: before: names of those that were there."""
    if made := sorted(_names_of_tensors(net) - before):
        raise ConfigError(
            f"model: {network.label!r} makes {made[0]!r} in its first forward, when optimizers and messages "
            f"are made already; make it in __init__{network.place}"
        )


def _about_whole_numbers(x: Tensor) -> str:
    """Advice for a network that does not take its inputs, where these are whole numbers; else empty."""
    if x.is_floating_point():
        return ""
    return "; whole numbers stay so, for embeddings: for other layers give floats, e.g. x.astype('float32')"


def _candidate(network: Network, net: nn.Module, x: Tensor, seed: int) -> str | None:
    """Name of the layer that can be a head: the one that returned the output, else the last with parameters.

    Args:
        network: The network as its user describes it.
        net: The network with its start values.
        x: Inputs.
    """
    leaves = [
        n for n, m in net.named_modules() if not any(m.children()) and any(True for _ in m.parameters())
    ]
    fits = [name for name in leaves if name and _can_be_head(net.get_submodule(name))]
    whole = _another(network, net, seed)
    returned = {name: _HeadReturns(whole.get_submodule(name)) for name in fits}
    with suppress(Exception):  # `fit` has said what is wrong
        output = _pass(whole, x, False, seed)
        for name, layer in returned.items():
            if layer.is_output(output):
                return name
    return leaves[-1] if leaves and leaves[-1] in fits else None


def _can_be_head(module: nn.Module) -> bool:
    pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
    return type(module) is nn.Linear or pointwise


def loss_of(objective: Objective, output: Any, y: Tensor) -> Tensor:
    """Loss of a batch, a scalar: the sum over the exits of a model that has several.

    Args:
        output: What the model returned: outputs, shape (B, ...), or a list of these.
        y: Targets, shape (B, ...).
    """
    several = output if isinstance(output, list) else [output]
    return torch.stack([objective.loss(each, y) for each in several]).sum()


def _first_loss(
    model: Backbone, objective: Objective, output: Any, y: Tensor, hint: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the first examples, and their scores by name; arguments as in `first_pass`."""
    several = output if isinstance(output, list) else [output]
    try:
        with warnings.catch_warnings():  # torch only warns where it compares every output with every target
            warnings.filterwarnings("error", message="Using a target size")
            return loss_of(objective, output, y), objective.check(model.predict(output), y)
    except ConfigError:
        raise
    except Exception as err:
        what = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
        raise ConfigError(
            f"task: the loss of {objective.task!r} cannot be computed from outputs of shape "
            f"{tuple(several[0].shape)} and "
            f"targets of shape {tuple(y.shape)}, {str(y.dtype).removeprefix('torch.')}: {what}{hint}"
        ) from err


def _about_head(model: Backbone) -> str:
    """Advice where no head was found that could train; else empty."""
    if (
        not isinstance(model, OwnBackbone)
        or model.place is not None
        or any(p.requires_grad for p in model.net.parameters())
    ):
        return ""
    return " No layer of it is a head, a linear layer or 1 x 1 convolution that returns the output as it is"


def first_pass(
    model: Backbone,
    objective: Objective,
    batch: tuple[Tensor, Tensor],
    outputs: int,
    where: str,
    hint: str = "",
) -> None:
    """Check with one forward and backward pass that network, task and tuning fit the data.

    Args:
        model: A copy of the tuned model, which training changes.
        batch: Inputs and targets of one or a few examples.
        outputs: Number of outputs that the targets need; 0: not known.
        where: What names model and data in messages.
        hint: Ends the message about a loss that cannot be computed.

    Raises:
        ConfigError: The first thing that does not fit.
    """
    x, y = batch
    model.train()
    try:
        output = model(x)
    except Exception as err:
        what = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
        raise ConfigError(
            f"model: {where} failed in training with inputs of shape {tuple(x.shape)}: {what}"
        ) from err
    first = output[0] if isinstance(output, list) else output
    if outputs and first.ndim > 1 and first.shape[1] < outputs:
        raise ConfigError(
            f"model: {where} has {first.shape[1]} outputs, and the targets have {outputs} classes; give it "
            f"{outputs} outputs, or correct the labels"
        )
    loss, scores = _first_loss(model, objective, output, y, hint)
    wrong = next((name for name, each in scores.items() if len(each) != len(y)), None)
    if wrong is not None:
        raise ConfigError(f"task: {wrong} must be one number for each example, shape ({len(y)},)")
    if not bool(torch.isfinite(loss)):
        raise ConfigError(
            f"task: the loss of {objective.task!r} is {float(loss)} for the first examples of {where}"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"model: the loss does not depend on any trained parameter of {where}; does it compute under "
            f"torch.no_grad(), or does it train nothing?{_about_head(model)}"
        )
    try:
        loss.backward()
    except Exception as err:
        what = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
        raise ConfigError(
            f"task: no gradient of the loss of {objective.task!r} can be computed for {where}: {what}"
        ) from err
    unused = [
        n for n, e in model.tensors().items() if e.is_trained and not e.is_buffer and e.tensor.grad is None
    ]
    if unused:
        count = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
        raise ConfigError(
            f"model: {unused[0]}{count} of {where} would be trained and gets no gradient, because the "
            "output does not "
            f"depend on it; freeze it with requires_grad_(False), or use it"
        )
