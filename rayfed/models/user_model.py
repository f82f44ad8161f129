"""Networks that a user hands over, as backbones: their heads, blocks by their path, values that travel apart.

A network stays as it is: the layer whose output it returns becomes the head, and a list of equal blocks at a
path becomes one whose blocks can be left out (`rayfed.models.fit_network`). Names of tensors are the user's
own, except that those of blocks begin with `blocks.<j>.` and those of the head with `head.`, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rayfed import user_objects
from rayfed.errors import ConfigError, one_line, place_of, shown, unknown
from rayfed.models.backbone import Backbone, NoHead
from rayfed.models.blocks import BlockStack, has_uniform_blocks
from rayfed.models.deep_copy import deep_copy
from rayfed.seeds import derive, use_seed

FIND: Literal["auto"] = "auto"
"""The head is the last layer, if its output is that of the network."""


@dataclass(frozen=True, kw_only=True)
class _Said:
    """Facts about a network that cannot be seen from outside, as a user says them."""

    head: str | None = FIND
    blocks: str | None = None
    features: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: int | None = None


@dataclass(frozen=True, init=False)
class Model:
    """A network of a user, with what cannot be seen from outside.

    Attributes:
        net: An `nn.Module`, or a function without arguments that makes one, which is better for large ones.
        said: The other arguments.
    """

    net: Any
    said: _Said

    def __init__(
        self,
        net: nn.Module | Callable[[], nn.Module],
        *,
        head: str | None = FIND,
        blocks: str | None = None,
        features: str | None = None,
        mean: tuple[float, ...] | float | None = None,
        std: tuple[float, ...] | float | None = None,
        size: int | None = None,
    ) -> None:
        """Describe a network.

        Args:
            net: The network, or a function that makes it.
            head: Name of the module that turns features into the output, a linear layer or a 1 x 1
                convolution, such as `fc`; None: no part of it is one; `auto`: the last layer, if the output
                is its output.
            blocks: Path of the list of equal blocks, such as `encoder.layers`, which capacities count.
            features: Name of the method that maps inputs to what the head gets; None: calling the network.
            mean: Mean by channel that images are normalized with, after 0..255 became 0..1; None: they are
                not.
            std: Standard deviation by channel.
            size: Side in pixels to which image files are resized; None: 224.
        """
        both = tuple(
            None if v is None else (v,) if isinstance(v, int | float) else tuple(v) for v in (mean, std)
        )
        own = _Said(head=head, blocks=blocks, features=features, mean=both[0], std=both[1], size=size)
        object.__setattr__(self, "net", net)
        object.__setattr__(self, "said", own)


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Switch off torch's fused encoder layers, which read weights of linear layers without calling them.

    An adapter of such a layer would be left out when the network is scored. The switch belongs to the
    process, and networks round otherwise without it, so it is put back: no result depends on what ran before.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _call_adapted_layers(body: nn.Module) -> None:
    """Let encoder layers of torch whose linear layers have adapters call these, whoever calls the network."""
    for module in body.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            parts = (module.linear1, module.linear2)
            if any(type(part) is not nn.Linear for part in parts):
                module.register_forward_pre_hook(_leave)  # a layer with a hook has no fused form


def _leave(module: nn.Module, args: Any) -> None:
    """Leave the inputs as they are."""


class OwnNet(nn.Module):
    """A network of a user without its head; maps inputs to features, shape (B, width, ...).

    Args:
        body: The network, whose head is an identity, if it has one.
        blocks: Path of its blocks; None: it has none that can be left out.
        features: Name of the method that maps inputs to features; None: `forward`.
    """

    def __init__(self, body: nn.Module, blocks: str | None, features: str | None) -> None:
        super().__init__()
        if blocks is not None:
            stack = _Blocks(*body.get_submodule(blocks).children())
            owner = body.get_submodule(blocks.rpartition(".")[0])
            stack.read = isinstance(owner, nn.TransformerEncoder | nn.TransformerDecoder)
            setattr(owner, blocks.rpartition(".")[2], stack)
            self.blocks = stack  # first, so that the names of its tensors begin with `blocks.`
        self.body = body
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch; shape (B, ...) of inputs as the user's network takes them.

        The network gets a copy, because it may change its input in place and methods pass a batch twice.
        """
        call = self.body if self.features is None else getattr(self.body, self.features)
        with every_layer_called():
            return output_of(call(x.clone()))

    def train(self, mode: bool = True) -> OwnNet:
        """As of nn.Module; evaluation mode is what the network's own `eval()` makes of it."""
        super().train(mode)
        if not mode and _overrides(self.body, "eval"):
            self.body.eval()
        return self

    def after_blocks(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Features from tokens between the blocks, by what follows the blocks.

        Args:
            x: The batch from which the tokens were computed; what comes before the blocks is computed again.
            tokens: Shape (B, N, D).
        """
        with self.blocks.replaced(tokens):
            features: Tensor = self(x)
        return features


def _overrides(module: nn.Module, name: str) -> bool:
    """Whether a module, or its class, has another method in place of that of nn.Module."""
    return name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name)


class _Blocks(BlockStack):
    """Blocks of a user's network.

    Attributes:
        read: The first block may be looked at although others are left out: torch's own encoder reads the
            settings of its attention before it iterates over the blocks.
    """

    read = False

    def __getitem__(self, index: Any) -> Any:
        if self.read and index == 0:
            return self._modules["0"]
        return super().__getitem__(index)


class OwnBackbone(Backbone):
    """The backbone of a user's network.

    Attributes:
        place: Path of the head in the network; None: it has none.
        example: Shape and type of one input.
        scales: Whether inputs that are floats are normalized, too.
    """

    place: str | None = None
    example: tuple[tuple[int, ...], torch.dtype] = ((), torch.float32)
    scales = False
    _trains_whole = False
    _has_own_modes = False
    _user_sets_modes = False

    @property
    def is_own(self) -> bool:
        return True

    @property
    def with_blocks(self) -> str:
        return (
            "name the list of its equal blocks, such as rayfed.Model(net, blocks='encoder.layers'), set "
            "tuning.targets"
        )

    def requires_grad_(self, requires_grad: bool = True) -> OwnBackbone:
        """As of nn.Module; parameters that the user froze stay frozen."""
        fixed = self._fixed()
        super().requires_grad_(requires_grad)
        for name, parameter in self.named_parameters():
            if name in fixed:
                parameter.requires_grad_(False)
        return self

    def _fixed(self) -> frozenset[str]:
        """Names of the parameters that the user froze, as they were before a tuning scheme changed them."""
        if not hasattr(self, "_frozen_by_user"):
            self._frozen_by_user = frozenset(n for n, p in self.named_parameters() if not p.requires_grad)
        return self._frozen_by_user

    def refresh(self) -> None:
        """As of Backbone; also notes whether the network trains as its user left it."""
        super().refresh()
        fixed = self._fixed()
        self._trains_whole = all(p.requires_grad or n in fixed for n, p in self.named_parameters())
        self._has_own_modes = any(_overrides(module, "train") for module in self.net.modules())
        body: nn.Module = self.net.body  # type: ignore[assignment]
        evaluates = _overrides(body, "eval")  # torch calls that of the network alone
        self._has_own_modes |= evaluates
        self._user_sets_modes = evaluates or any(_overrides(module, "train") for module in body.modules())

    @property
    def has_own_modes(self) -> bool:
        """Whether a module of the network decides itself what its training mode is."""
        return self._has_own_modes

    @property
    def user_sets_modes(self) -> bool:
        return self._user_sets_modes

    def train(self, mode: bool = True) -> OwnBackbone:
        """Put the network into training or evaluation mode.

        A network that trains as its user left it (`tuning=full`) gets its own `train()`, as in plain PyTorch:
        dropout between trained layers is on, normalization of which nothing trains uses the batch. Under
        other tuning schemes the frozen parts behave as in evaluation (`Backbone.train`), and what the
        network's own `train()` leaves in the other mode stays there.
        """
        if self._trains_whole and not self._has_own_modes:
            for module in self._modes()[0]:
                vars(module)["training"] = mode
            self.training = mode
            return self
        if self._trains_whole:
            self.training = mode
            for child in self.children():
                child.train(mode)
            return self
        if not self._has_own_modes:
            super().train(mode)
            return self
        self.net.train(mode)
        against = [module for module in self.net.modules() if module.training != mode]
        super().train(mode)
        for module in against:
            module.training = not mode
        return self

    def deployed(self) -> nn.Module:
        """A copy of the user's network, with its head and the present values."""
        whole: OwnBackbone = deep_copy(self)
        body: nn.Module = whole.net.body  # type: ignore[assignment]
        if self.place is not None:
            body.set_submodule(self.place, whole.head)
        _call_adapted_layers(body)
        return body

    def sample(self, rows: int) -> Tensor:
        shape, kind = self.example
        return torch.zeros(rows, *shape, dtype=kind, device=self.head.weight.device)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A user's network, ready to be built in any process. Values travel apart from it.

    Attributes:
        label: Its name in the config.
        make: Makes the network; None: `shape` is copied.
        shape: The network without values; None: `make` makes it.
        values: The network with its values, which stays in the process where it was handed over.
        said: What the user says about it.
        place: Where it was defined.
        width: Number of outputs of a network without head; 0: not known yet.
        example: Shape and type of one input.
        stacks: Whether a list `blocks` of the network becomes one whose blocks can be left out.
        notes: What was not taken for what it looks like, and why; for the header of a run.
    """

    label: str
    make: Callable[[], nn.Module] | None = None
    shape: nn.Module | None = None
    values: nn.Module | None = None
    said: _Said = _Said()
    place: str = ""
    width: int = 0
    example: tuple[tuple[int, ...], torch.dtype] = ((), torch.float32)
    stacks: bool = True
    notes: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "values": None}

    def __repr__(self) -> str:
        return f"Network({self.label!r}, {self.said}, {self.width}, {self.example}, {self.stacks})"

    def net(self, seed: int) -> nn.Module:
        """A new network: with a copy of the values, or without them under torch.device("meta").

        Args:
            seed: Seed of the experiment, for a function that draws values.

        Raises:
            ConfigError: The function fails, or returns something else.
        """
        if self.make is None:
            bare = torch.empty(0).device.type == "meta" or self.values is None
            original = self.shape if bare else self.values
            assert original is not None
            return copy_network(original, values=not bare)
        try:
            with use_seed(derive(seed, "model")):
                net = self.make()
        except Exception as err:
            if isinstance(err, RuntimeError) and torch.empty(0).device.type == "meta":
                raise  # it is built with values then
            what = f"{type(err).__name__}: {one_line(err)}{place_of(err)}"
            raise ConfigError(f"model: the function {self.label!r} raised {what}") from err
        if not isinstance(net, nn.Module):
            raise ConfigError(
                f"model: the function {self.label!r} returned {shown(net)}, no nn.Module{self.place}"
            )
        _check_parameters(net, self.place)
        return net

    def build(self, classes: int, seed: int) -> OwnBackbone:
        """The backbone.

        Args:
            classes: Number of outputs that the task needs, for messages.
            seed: As of `net`.
        """
        return self.split(self.net(seed), classes)

    def split(self, body: nn.Module, classes: int = 1) -> OwnBackbone:
        """The backbone of a network of this kind, which becomes a part of it.

        Args:
            body: As of `net`.
            classes: As of `build`.
        """
        hints = self.said
        _check_said(self, body, dict(body.named_modules()))
        head: Any = None
        if hints.head not in (None, FIND):
            head = body.get_submodule(hints.head or "")
            body.set_submodule(hints.head or "", nn.Identity())
        blocks = hints.blocks
        if blocks is None and self.stacks and has_uniform_blocks(body):
            blocks = "blocks"
        net = OwnNet(body, blocks, hints.features)
        model = OwnBackbone(net, head if head is not None else NoHead(self.width or classes), self.label)
        model.place = hints.head if head is not None else None
        model.task = ""
        model.example = self.example
        model.size = hints.size or 224
        model.scales = hints.mean is not None or hints.std is not None
        model.mean, model.std = _by_channel(hints.mean, 0.0), _by_channel(hints.std, 1.0)
        return model


def _by_channel(values: tuple[float, ...] | None, otherwise: float) -> Any:
    """Values for each channel; one counts for all three of an image."""
    values_by_channel = values or (otherwise,)
    return values_by_channel * 3 if len(values_by_channel) == 1 else values_by_channel


def output_of(output: Any) -> Tensor:
    """The tensor in what a network returns: itself, `logits` or `out` of an object, or a tuple's only one.

    Raises:
        TypeError: There is none, or more than one.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple | list) else []
    if len(parts) == 1:
        return parts[0]
    kind = type(output).__name__
    if parts:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise TypeError(f"returns a {kind} of tensors of shapes {shapes}; return the outputs alone")
    raise TypeError(f"returns {kind}, in which there is no tensor of outputs; return a tensor")


def copy_network(net: nn.Module, values: bool) -> nn.Module:
    """A copy of a network, which has no memory in common with it.

    Args:
        values: Parameters and buffers have values; otherwise they are on the meta device.
    """
    memo: dict[int, Any] = {}
    for parameter in net.parameters():
        value = parameter.detach().clone() if values else torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in net.buffers():
        memo[id(buffer)] = buffer.detach().clone() if values else torch.empty_like(buffer, device="meta")
    copied: nn.Module = deep_copy(net, memo)
    return copied


def _check_parameters(net: nn.Module, place: str) -> None:
    """Raise ConfigError unless the network has parameters, all with a size. Args: place: its definition."""
    for name, parameter in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(parameter):
            layer = type(net.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"model: {name} of {type(net).__name__} has no size before the first batch ({layer} is "
                f"lazy); give the sizes, or call the network once with a batch before you hand it over{place}"
            )
    if next(net.parameters(), None) is None:
        raise ConfigError(
            f"model: {type(net).__name__} has no parameters, so nothing of it can be trained{place}; give a "
            f"network with layers"
        )


def of_module(net: nn.Module) -> Network:
    _check_parameters(net, user_objects.place(type(net)))
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"model: {name} of {type(net).__name__} is on {tensor.device}; hand over the network on the "
                f"CPU, net.cpu(), RayFed moves copies of it to the devices"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"model: {name} of {type(net).__name__} has no values (it is on the meta device)"
            )
    for name, module in net.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, torch.optim.Optimizer):
                raise ConfigError(
                    f"model: {f'{name}.' if name else ''}{leaf} of {type(net).__name__} is an optimizer; "
                    "clients make "
                    f"their own (train.optimizer), remove it from the network"
                )
    try:
        shape = copy_network(net, values=False)
        import cloudpickle

        cloudpickle.dumps(shape)
    except Exception as err:
        raise ConfigError(
            f"model: {type(net).__name__} cannot be sent to other processes ({type(err).__name__}: "
            f"{one_line(err)}){user_objects.place(type(net))}; remove what cannot be pickled, or give a "
            "function that makes it"
        ) from err
    return Network(label=type(net).__name__, shape=shape, values=net)


def _check_said(network: Network, net: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    hints = network.said
    if hints.head not in (None, FIND) and hints.head not in modules:
        raise ConfigError(unknown("model: head", hints.head, [name for name in modules if name]))
    if hints.head not in (None, FIND) and not isinstance(modules[hints.head or ""], nn.Linear | nn.Conv2d):
        kind = type(modules[hints.head or ""]).__name__
        raise ConfigError(
            f"model: head={hints.head!r} is of type {kind}, no linear layer or convolution; name one, or "
            "head=None"
        )
    if hints.features is not None and not callable(getattr(net, hints.features, None)):
        raise ConfigError(
            f"model: features={hints.features!r} is no method of {type(net).__name__}{network.place}"
        )
    if hints.features is not None and hints.head in (None, FIND):
        raise ConfigError(
            f"model: features={hints.features!r} needs head=, the module that gets these features"
        )
    if hints.blocks is None:
        return
    if hints.blocks not in modules:
        lists = [n for n, m in modules.items() if isinstance(m, nn.Sequential | nn.ModuleList)]
        raise ConfigError(unknown("model: blocks", hints.blocks, lists))
    found = modules[hints.blocks]
    holder = nn.Module()
    holder.blocks = found
    if not has_uniform_blocks(holder):
        raise ConfigError(
            f"model: blocks={hints.blocks!r} is no list of blocks of one type with tensors of the same "
            "shapes, "
            f"which could be left out one by one{network.place}"
        )
