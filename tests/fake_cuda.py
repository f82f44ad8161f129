"""CUDA without a GPU: tensors on `cuda` have a type and a shape and no values.

torch's FakeTensorMode finds shapes, types and devices with the rules of CUDA, so that an operation with
tensors of two devices, or one that CUDA does not have, raises. What is on the CPU is computed. autograd asks
CUDA for a context, so a backward pass there is not made: all gradients are zero, and so is what comes back to
the CPU. Each read of a value is noted with the function of the project that makes it.

    with fake_cuda() as noted:
        play(overrides, "cuda:0")
    noted.reads
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_flatten

from tests.pretended import Mode

ROOT = Path(__file__).parent.parent
PACKAGES = ("rayfed", "algorithms")
aten = torch.ops.aten

FUSED = {aten._fused_sgd_.default, aten._fused_adam_.default, aten._fused_adamw_.default}
"""Operations in place for which FakeTensorMode has no rules: they change values and no shapes."""

RUNTIME = {
    "mem_get_info": lambda *_: (10**10, 10**10),
    "get_rng_state": lambda *_: None,
    "set_rng_state": lambda *_: None,
    "get_device_name": lambda *_: "fake",
    "synchronize": lambda *_: None,
}
"""Functions of torch.cuda that need a GPU."""


class FakeCuda(Mode):
    """Sends operations of CUDA to FakeTensorMode, and computes the others.

    Attributes:
        reads: Functions of the project that read a value, as `file:function`.
        operations: Number of operations of CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: set[str] = set()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        asked = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if asked != "cuda" and not any(isinstance(value, FakeTensor) for value in flat):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.operations += 1
        if func is aten._local_scalar_dense.default:
            self.reads.add(_reader())
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        if func is aten._to_copy.default and asked == "cpu":
            with unset_fake_temporarily():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return args[0].zero_()
        if func in FUSED:
            _check_devices(func, flat)
            return None
        return func(*args, **kwargs)


def _check_devices(func: Any, flat: list[Any]) -> None:
    found = {value.device.type for value in flat if isinstance(value, Tensor)}
    if found != {"cuda"}:
        raise RuntimeError(f"{func} needs all tensors on cuda, and found {sorted(found)}")


def _reader() -> str:
    """The innermost function of the project that is being called."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES:
            return f"{file.relative_to(ROOT).as_posix()}:{frame.name}"
    return "tests"


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Pretend that `cuda` has a GPU within the block."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    bits = torch.are_deterministic_algorithms_enabled()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # an LSTM asks it for the driver
            for name, function in RUNTIME.items():
                stack.enter_context(patch.object(torch.cuda, name, function))
            stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
            stack.enter_context(patch.object(torch.utils, "swap_tensors", _keep))
            stack.enter_context(patch.object(torch.nn.RNNBase, "flatten_parameters", lambda _: None))
            stack.enter_context(patch.object(Tensor, "backward", _backward))
            stack.enter_context(patch.object(torch.autograd, "grad", _grad))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))
            yield stack.enter_context(FakeCuda())
    finally:
        torch.use_deterministic_algorithms(bits)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def _keep(one: Tensor, other: Tensor) -> None:
    """Called where a parameter of two modules moves a second time: it is there already."""
    assert (one.device, one.dtype) == (other.device, other.dtype)


REAL_BACKWARD, REAL_GRAD = Tensor.backward, torch.autograd.grad


def _backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
    """Gradients of zero for the parameters from which a tensor of CUDA was computed."""
    if not isinstance(self, FakeTensor):
        REAL_BACKWARD(self, *args, **kwargs)
        return
    if self.grad_fn is None:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    seen, waiting = set(), [self.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            zero = torch.zeros_like(node.variable)
            node.variable.grad = zero if node.variable.grad is None else node.variable.grad + zero
        waiting += [following for following, _ in node.next_functions]


def _grad(outputs: Any, inputs: Any, *args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
    wanted = [inputs] if isinstance(inputs, Tensor) else inputs
    if not isinstance(wanted[0], FakeTensor):
        return REAL_GRAD(outputs, inputs, *args, create_graph=create_graph, **kwargs)
    return tuple(torch.zeros_like(value, requires_grad=create_graph) for value in wanted)
