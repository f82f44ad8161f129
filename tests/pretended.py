"""A pretended accelerator: tensors that say they are on another device, and hold memory of the CPU.

It has the rules of a GPU and no hardware: an operation on tensors of two devices raises, `.numpy()` raises, a
random generator of the CPU is refused for tensors of the device, which has another one, so that its dropout
differs, and it starts with its first tensor: before that, statistics of its memory raise. An operation that
has no deterministic kernel on CUDA raises where `torch.use_deterministic_algorithms` is on, and so does the
second derivative of an LSTM while cuDNN is on. It counts what costs time on a GPU: copies to the device
(`down`), copies from it (`up`), and synchronisations (`waits`), where the processor waits: for a value, for a
copy from the device, and for a copy to it unless that is made from pinned memory with `non_blocking=True`.
Everything is computed by the CPU kernels, so results must be those of the CPU.

    from tests.pretended import pretended

    with pretended() as device:
        torch.ones(3).to(device.name) * 2
        device.counts.down
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _device, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rayfed.fast import group
from tests.pretended_kernels import attention, lstm

aten = torch.ops.aten
UNNAMED = "privateuseone"  # what torch calls its device for extensions until that has a name
CAN_PRETEND = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result, or the shape of it, is a value that the processor must know."""

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that take indices of the CPU, which they copy to the device."""

SHAPING = {
    *(aten._unsafe_view.default, aten.detach.default, aten.empty.memory_format, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}
"""Operations besides those that torch calls views for which a GPU has nothing to compute."""

UNORDERED = {
    aten._adaptive_avg_pool2d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.grid_sampler_2d_backward.default,
    aten._ctc_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.histc.default,
    aten.median.dim,
    aten.scatter_reduce.two,
}
"""Operations that have no deterministic kernel on CUDA (documentation of use_deterministic_algorithms);
`nll_loss2d_forward` has one without a reduction."""

JOINING = {aten.cat.default, aten.stack.default}
"""Operations that do not take even a single number from another device."""


@dataclass
class Counts:
    """What was counted.

    Attributes:
        down: Copies to the device.
        up: Copies from the device.
        waits: Synchronisations.
        operations: Operations of the device.
        resets: Calls of `reset_peak_memory_stats`.
        kernels: Those of them that a GPU computes, which are all but views; also copies within the device.
        casts: Those kernels that change the type of a tensor.
    """

    down: int = 0
    up: int = 0
    waits: int = 0
    operations: int = 0
    resets: int = 0
    kernels: int = 0
    casts: int = 0

    def clear(self) -> None:
        vars(self).update(vars(Counts()))


@dataclass
class Device:
    """The pretended device while it is in use."""

    counts: Counts = field(default_factory=Counts)

    @property
    def name(self) -> str:
        return f"{TYPE}:0"


COUNTS = Counts()


class Runtime:
    """What the module of the device in torch has, with the errors of CUDA.

    Attributes:
        started: A tensor of the device was made in this block.
        draws_as_cpu: The device draws from the generator of the CPU.
        state: State of the generator of the device.
        unordered: Operations without a deterministic kernel that were run although these are refused.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, draws_as_cpu: bool = False) -> None:
        """What a new process finds."""
        self.started = False
        self.draws_as_cpu = draws_as_cpu
        self.unordered: list[str] = []
        self.manual_seed_all(0)

    def manual_seed_all(self, seed: int) -> None:
        """Called by torch.manual_seed; another stream than that of the CPU with this seed."""
        self.state = torch.Generator().manual_seed(seed ^ 0xD1CE).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.state = state.clone()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Kernels of the CPU draw from the generator of the device within the block."""
        if self.draws_as_cpu:
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        if not self.started:
            raise RuntimeError("Invalid device argument ")
        COUNTS.resets += 1


RUNTIME = Runtime()


@contextmanager
def pretended(draws_as_cpu: bool = False) -> Iterator[Device]:
    """Use the pretended device within the block, which starts it anew; counts begin at 0.

    Args:
        draws_as_cpu: Dropout draws what it draws on the CPU, which no GPU does: so that both can be compared.
    """
    if not CAN_PRETEND:
        pytest.skip(f"torch {torch.__version__} cannot pretend a device in Python; newer versions can")
    COUNTS.clear()
    RUNTIME.begin(draws_as_cpu)
    fused = patch.object(F, "scaled_dot_product_attention", attention)
    _device._device_constructors()  # torch keeps these functions once asked: it must know its own `empty`
    pinned = patch.object(torch, "empty", _empty)
    threads = patch.object(group, "_in_one_thread", _in_one_thread)
    with _Operations(), _Functions(), fused, pinned, patch.object(torch._VF, "lstm", lstm), threads:
        yield Device(COUNTS)
    if RUNTIME.unordered:
        raise RuntimeError(
            f"{RUNTIME.unordered[0]} does not have a deterministic implementation, but you set "
            f"'torch.use_deterministic_algorithms(True)'."
        )


def _register(wanted: str) -> str:
    """Register the device with torch and return its type, which another test may have chosen before.

    This must happen before the first backward pass of the process, in which autograd counts the devices.
    """
    found: str = torch._C._get_privateuse1_backend_name()
    if found != UNNAMED:
        return found
    if not CAN_PRETEND:
        return UNNAMED
    backend_registration._setup_privateuseone_for_python_backend(wanted)
    module = getattr(torch, wanted)
    module.get_amp_supported_dtype = list  # torch.utils.checkpoint asks for it, also on the CPU
    module.reset_peak_memory_stats = RUNTIME.reset_peak_memory_stats
    module.manual_seed_all = RUNTIME.manual_seed_all
    module.get_rng_state = RUNTIME.get_rng_state
    module.set_rng_state = RUNTIME.set_rng_state
    module._is_in_bad_fork = bool
    return wanted


TYPE = _register("pretended")


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(TYPE, 0),
            requires_grad=False,
        )
        made.inner = inner
        RUNTIME.started = True
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        COUNTS.waits += 1
        _check_recording()
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert pretended:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Sees each operation, without torch's compiler, which torch imports and calls for other modes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Operations(Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(torch.overrides.TorchFunctionMode):
    """torch.tensor fills its memory below the dispatcher, so the values are made on the CPU and copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _is_ours(kwargs.get("device")):
            rest = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
            made = func(*args, **rest).to(kwargs["device"])
            return made.requires_grad_(kwargs.get("requires_grad", False))
        return func(*args, **kwargs)


IN_ONE_THREAD = group._in_one_thread


def _in_one_thread(task: Any) -> Any:
    """The code of a client of a group, in whose thread the modes of torch have to be entered again."""
    with _Operations(), _Functions():
        return IN_ONE_THREAD(task)


REAL_EMPTY = torch.empty


def _empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """torch.empty, which pretends to pin memory of the CPU; threads that collect batches call it too."""
    made = REAL_EMPTY(*size, **kwargs)
    if pin_memory:
        made.pretended_pinned = True
    return made


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == TYPE


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


TAPE: list[Any] | None = None
"""Operations that are being recorded (`tests.pretended_graphs`); None: none are."""


def _note(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
    """Record an operation on the memory of the CPU behind the tensors of the device."""
    if TAPE is not None and not func.is_view:
        TAPE.append((func, args, dict(kwargs), tree_flatten(result)[0]))


def _check_recording() -> None:
    """Raise what CUDA raises where the processor waits while operations are recorded."""
    if TAPE is not None:
        raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    ours = [value for value in flat if isinstance(value, OnDevice)]
    asked = kwargs.get("device")
    if func is aten._to_copy.default:
        return _copied(func, args, kwargs)
    if func is aten.copy_.default:
        goes_on = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) and _is_pinned(args[1])
        _count_copy(isinstance(args[1], OnDevice), isinstance(args[0], OnDevice), goes_on)
        own = (_inner(args[0]), _inner(args[1]), *args[2:])
        result = func(*own, **kwargs)
        if isinstance(args[0], OnDevice):
            _note(func, own, kwargs, result)
        return args[0]
    if not ours and not _is_ours(asked):
        return func(*args, **kwargs)
    COUNTS.operations += 1
    COUNTS.kernels += not func.is_view and func not in SHAPING
    COUNTS.casts += func is aten._foreach_copy_.default and args[0][0].dtype != args[1][0].dtype
    _check_generators(flat)
    _check_one_device(func, args, flat)
    if func in WAITS or (func in INDEXING and _has_mask(args[1])):
        COUNTS.waits += 1
        _check_recording()
    return _computed(func, args, kwargs, ours)


def _computed(func: Any, args: Any, kwargs: Mapping[str, Any], ours: list[OnDevice]) -> Any:
    """The result of an operation, by the kernel of the CPU."""
    there = {**kwargs, "device": "cpu"} if "device" in kwargs else dict(kwargs)
    _check_order(func, args)
    with RUNTIME.drawing() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext():
        own, rest = tree_map(_inner, args), tree_map(_inner, there)
        result = func(*own, **rest)
    _note(func, own, rest, result)
    known = {id(value.inner): value for value in ours}  # an operation in place gives back its argument

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else OnDevice(value)

    return tree_map(outer, result)


def _copied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    asked = kwargs.get("device")
    before = isinstance(args[0], OnDevice)
    after = before if asked is None else _is_ours(asked)
    _count_copy(before, after, kwargs.get("non_blocking") and _is_pinned(args[0]))
    COUNTS.casts += before and after and kwargs.get("dtype") not in (None, args[0].dtype)
    rest = {**kwargs, **({} if asked is None else {"device": "cpu"})}
    result = func(_inner(args[0]), **rest)
    if before and after:
        _note(func, (_inner(args[0]),), rest, result)
    if before != after and result is _inner(args[0]):
        result = result.clone()
    return OnDevice(result) if after else result


def _count_copy(before: bool, after: bool, goes_on: Any) -> None:
    """Count a copy: `goes_on` if the processor need not wait for one to the device."""
    if before != after:
        _check_recording()
    if after and not before:
        COUNTS.down += 1
        COUNTS.waits += not goes_on
    elif before and not after:
        COUNTS.up += 1
        COUNTS.waits += 1
    COUNTS.kernels += before and after


def _is_pinned(value: Any) -> bool:
    whole = value if value._base is None else value._base
    return getattr(whole, "pretended_pinned", False)


def _check_one_device(func: Any, args: Any, flat: list[Any]) -> None:
    """Raise what CUDA raises where an operation has tensors of two devices."""
    if not any(isinstance(value, OnDevice) for value in flat):
        return
    others = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)]
    if func not in JOINING:
        written = args[0] if args and str(func).partition(".")[0].endswith("_") else None
        others = [value for value in others if value.dim() or value is written]
    if others and func in INDEXING and isinstance(args[0], OnDevice):
        COUNTS.down += 1
        COUNTS.waits += 1
        return
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, pretended:0 and "
            f"cpu! ({func}, shapes on the CPU: {[tuple(value.shape) for value in others]})"
        )


def _check_order(func: Any, args: Any) -> None:
    """Note an operation that adds in any order, where CUDA raises an error.

    It is raised at the end of the block: a backward pass on an unknown device ends the process instead.
    """
    summed = func is not aten.nll_loss2d_forward.default or args[3]
    if torch.are_deterministic_algorithms_enabled() and func in UNORDERED and summed:
        RUNTIME.unordered.append(str(func))


def _check_generators(flat: list[Any]) -> None:
    if any(isinstance(value, torch.Generator) for value in flat):
        raise RuntimeError("Expected a 'pretended' device type for generator but found 'cpu'")


def _has_mask(indices: Any) -> bool:
    return any(value is not None and value.dtype in (torch.bool, torch.uint8) for value in indices)
