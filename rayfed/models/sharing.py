"""One copy of the frozen weights per machine: models built without values, mapped onto shared arrays."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rayfed.models.backbone import global_name

M = TypeVar("M", bound=nn.Module)
Arrays = Mapping[str, npt.NDArray[Any]]

log = logging.getLogger(__name__)


def dump(model: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """All parameters and all buffers, also those a state dict leaves out, by module name.

    Frozen parameters are views, so that nothing large is copied; what can change is copied.
    """
    arrays = {}
    for name, (module, leaf, tensor) in _tensors(model):
        array = tensor.detach().cpu().numpy()
        arrays[name] = array.copy() if _is_private(module, leaf, tensor) else array
    return arrays


def skeleton(build: Callable[[], M]) -> M:
    """A model without values, for `attach`. A constructor that needs values is run for real instead.

    Args:
        build: Builds the model; called under torch.device("meta") first.
    """
    try:
        with torch.device("meta"):
            return build()
    except RuntimeError as err:  # NotImplementedError, which meta kernels raise, is one of these
        log.debug("built with values, because the constructor needs them: %s", err)
        return build()


def attach(model: nn.Module, tensors: Arrays) -> None:
    """Give a model the values of `dump`, in place.

    Frozen parameters become views of the arrays without a copy. Mapped memory is writable in practice, and a
    write would change it for every process of the machine: trainable parameters and every buffer are cloned.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape or type, or would be left without values.
    """
    mine = dict(_tensors(model))
    _check(mine, tensors)
    tied: dict[Tensor, nn.Parameter] = {}
    for name, (module, leaf, old) in mine.items():
        value = _as_tensor(tensors[name])
        if leaf in module._buffers:
            module._buffers[leaf] = value.clone()
            continue
        if old not in tied:
            value = value.clone() if old.requires_grad else value
            tied[old] = nn.Parameter(value, requires_grad=old.requires_grad)
        setattr(module, leaf, tied[old])
    _check_no_meta(model)


def checksum(model: nn.Module) -> str:
    """Digest of the frozen parameters: names, shapes and bytes, in the order of their global names."""
    frozen = {global_name(name): p for name, p in model.named_parameters() if not p.requires_grad}
    out = hashlib.sha256()
    for name in sorted(frozen):
        array = frozen[name].detach().cpu().contiguous().numpy()
        out.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        out.update(array.reshape(-1).view(np.uint8).data)
    return out.hexdigest()


Place = tuple[nn.Module, str, Tensor]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Place]]:
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, (module, leaf, tensor)


def _is_private(module: nn.Module, leaf: str, tensor: Tensor) -> bool:
    return leaf in module._buffers or tensor.requires_grad


def _as_tensor(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _check(mine: Mapping[str, Place], tensors: Arrays) -> None:
    odd = sorted(mine.keys() ^ tensors.keys())
    if odd:
        what = "not among the shared tensors" if odd[0] in mine else "unknown to the model"
        raise ValueError(f"{odd[0]!r} is {what} ({len(odd)} names do not match)")
    for name, (_, _, old) in mine.items():
        new = tensors[name]
        kind = str(old.dtype).removeprefix("torch.")
        if tuple(old.shape) != new.shape or kind != str(new.dtype):
            raise ValueError(f"{name!r} is {kind} {tuple(old.shape)}, but {new.dtype} {new.shape} was shared")


def _check_no_meta(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{prefix}.{leaf} is a plain tensor, which cannot be shared: register a buffer"
                )
