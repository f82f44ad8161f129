"""Conversion between tensors and numpy arrays, for functions that accept both and return the same kind."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = Any
"""A tensor, a numpy array or a nested list of numbers."""


def to_numpy(values: Array) -> npt.NDArray[np.float64]:
    """A float64 array of numbers on the CPU, where the server's are."""
    return np.asarray(values.detach() if isinstance(values, Tensor) else values, dtype=np.float64)


def like(result: npt.NDArray[np.float64], *inputs: Array) -> Array:
    """The result as a float64 tensor if any input is a tensor, else as a numpy array."""
    return torch.from_numpy(result) if any(isinstance(value, Tensor) for value in inputs) else result


def to_tensors(*values: Array) -> tuple[tuple[Tensor, ...], Callable[[Tensor], Array]]:
    """All values as tensors with the data type and device of the first one, and a function for the result.

    Where no value is a tensor, all become float64 tensors and the function converts the result to numpy.
    """
    if not any(isinstance(value, Tensor) for value in values):
        return tuple(torch.from_numpy(to_numpy(v)) for v in values), lambda result: result.numpy()[()]
    first = values[0] if isinstance(values[0], Tensor) else torch.from_numpy(to_numpy(values[0]))
    rest = (torch.as_tensor(value, dtype=first.dtype, device=first.device) for value in values[1:])
    return (first, *rest), lambda result: result
