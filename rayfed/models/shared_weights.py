"""Share one copy of the frozen weights among the processes of a machine.

One process dumps a model into arrays; the others build the model without values and attach these arrays.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from rayfed.devices import as_made_here
from rayfed.models.named_tensors import global_name

if TYPE_CHECKING:
    from rayfed.models.behaviour import Behaviour

M = TypeVar("M", bound=nn.Module)
Arrays = Mapping[str, npt.NDArray[Any]]

TRUNKS = ("net.", "text.tower.")
"""Module names of a `Backbone` that begin so belong to its network or its text tower."""

INITIALIZERS = frozenset(
    getattr(Tensor, name)
    for name in ("normal_", "uniform_", "erfinv_", "clamp_", "mul_", "add_", "fill_", "zero_")
)
"""Methods with which constructors draw and scale start values; they change nothing but values."""

log = logging.getLogger(__name__)


class _NoStartValues(TorchFunctionMode):
    """Leaves out the start values of tensors without memory, because their kernels take longest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in INITIALIZERS or getattr(func, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


def dump(model: nn.Module, half: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Arrays of all parameters and all buffers of a model by name, also of buffers outside its state dict.

    Arrays of frozen parameters are views of the model's memory; trainable parameters and buffers are copied,
    and so are frozen ones in another layout than that of `as_made_here`, which an array might not keep on its
    way to another process.

    Args:
        half: Round the frozen weights and biases of linear layers, attention and convolutions in the network
            and in a text tower to bfloat16, in which their products are computed. Their arrays are int16,
            because numpy has no such type.
    """
    arrays = {}
    for name, (module, leaf, tensor) in _tensors(model):
        value = tensor.detach().cpu()
        if half and name not in _moves(model) and _is_half_weight(name, module, tensor):
            arrays[name] = value.to(torch.bfloat16).view(torch.int16).numpy()
        else:
            is_private = leaf in module._buffers or tensor.requires_grad or name in _moves(model)
            arrays[name] = value.numpy().copy() if is_private else as_made_here(value).numpy()
    return arrays


def _moves(model: nn.Module) -> frozenset[str]:
    """Names of tensors that training moves although no optimizer trains them, such as a teacher's weights."""
    behaviour: Behaviour | None = getattr(model, "behaviour", None)
    return frozenset() if behaviour is None else behaviour.moves


def half_names(model: nn.Module) -> set[str]:
    """Names of the parameters that `dump` rounds to bfloat16 under `half`."""
    names = {name for name, parts in _tensors(model) if _is_half_weight(name, parts[0], parts[2])}
    return names - _moves(model)


def as_array(value: Tensor, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A value in the form that an array of `dump` has."""
    value = value.detach().cpu()
    return (value.to(torch.bfloat16).view(torch.int16) if like.dtype == np.int16 else value).numpy()


def skeleton(build: Callable[[], M]) -> M:
    """Build a model without values, for `attach`; or with values, if its constructor reads them.

    Args:
        build: Builds the model. It is called under torch.device("meta"), and again without it if that fails.
    """
    try:
        with torch.device("meta"), _NoStartValues():
            return build()
    except RuntimeError as err:  # NotImplementedError, which meta kernels raise, is one of these
        log.debug("built with values, because the constructor needs them: %s", err)
        return build()


def attach(model: nn.Module, tensors: Arrays) -> None:
    """Set the values of a model to the arrays of `dump`, in place.

    Frozen parameters become views of the arrays, without a copy but for small ones, which Ray puts anywhere.
    Trainable parameters, buffers and what else training moves are cloned, because a write into shared memory
    would change them in every process of the machine.

    Args:
        model: A model of the same structure, with or without values.
        tensors: Arrays by name.

    Raises:
        ValueError: A name is missing or unknown, a shape or type differs, or a tensor would have no values.
    """
    mine = dict(_tensors(model))
    _check_names_and_shapes(mine, tensors)
    tied: dict[Tensor, Tensor] = {}
    for name, (module, leaf, old) in mine.items():
        value = _as_tensor(tensors[name])
        if _is_half(old, tensors[name]):
            value = value.view(torch.bfloat16)
        if leaf in module._buffers:
            module._buffers[leaf] = tied.setdefault(old, value.clone())
            continue
        if old not in tied:
            is_private = old.requires_grad or name in _moves(model)
            value = value.clone() if is_private else as_made_here(value)
            tied[old] = nn.Parameter(value, requires_grad=old.requires_grad)
        setattr(module, leaf, tied[old])
    _check_no_meta(model)


def checksum(model: nn.Module, besides: Mapping[str, Tensor] = MappingProxyType({})) -> str:
    """sha256 of the frozen parameters: global names, types, shapes and bytes, in the order of the names.

    Args:
        besides: Other tensors of it that count, by name.
    """
    moves = _moves(model)
    frozen: dict[str, Tensor] = {
        global_name(name): p
        for name, p in model.named_parameters()
        if not p.requires_grad and name not in moves
    }
    frozen |= {global_name(name): value for name, value in besides.items()}
    out = hashlib.sha256()
    for name in sorted(frozen):
        value = frozen[name].detach().cpu().contiguous()
        kind = str(value.dtype).removeprefix("torch.")
        out.update(f"{name}|{kind}|{tuple(value.shape)}|".encode())
        if value.numel():  # torch cannot view an empty array of NumPy as bytes
            out.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return out.hexdigest()


Place = tuple[nn.Module, str, Tensor]
"""The module that owns a tensor, the name of its attribute, and the tensor."""


def _tensors(model: nn.Module) -> Iterator[tuple[str, Place]]:
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, (module, leaf, tensor)


def _is_half_weight(name: str, module: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is a frozen weight or bias of a product, in the network or the text tower.

    What is added elsewhere, such as positions and class tokens, stays in float32, and with it the sum over
    the blocks.
    """
    of_product = isinstance(module, nn.Linear | _ConvNd | nn.MultiheadAttention)
    return of_product and not tensor.requires_grad and name.startswith(TRUNKS)


def _is_half(old: Tensor, array: npt.NDArray[Any]) -> bool:
    """Whether an array of `dump` has the bits of bfloat16 for this tensor."""
    return old.is_floating_point() and array.dtype == np.int16


def _as_tensor(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _check_names_and_shapes(mine: Mapping[str, Place], tensors: Arrays) -> None:
    unmatched = sorted(mine.keys() ^ tensors.keys())
    if unmatched:
        what = "not among the shared tensors" if unmatched[0] in mine else "unknown to the model"
        raise ValueError(f"{unmatched[0]!r} is {what} ({len(unmatched)} names do not match)")
    for name, (_, _, old) in mine.items():
        new = tensors[name]
        kind = str(old.dtype).removeprefix("torch.")
        same = kind == str(new.dtype) or _is_half(old, new)
        if tuple(old.shape) != new.shape or not same:
            raise ValueError(f"{name!r} is {kind} {tuple(old.shape)}, but {new.dtype} {new.shape} was shared")


def _check_no_meta(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{prefix}.{leaf} is a plain tensor, which cannot be shared: register it as a buffer"
                )
