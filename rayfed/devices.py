"""Moves tensors between the CPU and a device, with one copy for all tensors of a type, and reads numbers."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from rayfed.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
K = TypeVar("K")
D = TypeVar("D", bound="DataclassInstance")
Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Deterministic: TypeAlias = Literal["auto"] | bool

USABLE = 0.9
"""Share of a GPU's memory that is planned with; the rest is for other users and for fragmentation."""

FROZEN_BY_PYTHON = gc.get_freeze_count()
"""Objects that Python itself leaves out of garbage collection; Python 3.12 does so with a few hundred."""

ALLOCATION = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables by which a user sets how torch allocates; every version since 2.6 reads the last one."""

HOST = torch.device("cpu")
"""Where messages between processes, stores of clients and the state of the server are."""

ALIGNMENT = 64
"""Bytes: the address of every tensor that torch makes on the CPU is a multiple of this."""


def as_made_here(value: T) -> T:
    """A nested value whose tensors on the CPU lie in memory as those that torch makes itself.

    They are contiguous, and their addresses are multiples of `ALIGNMENT`. Tensors of which this is not true
    are copied, each once wherever it occurs; if there are none, the value itself is returned.

    Libraries choose by both how they compute, and so how they round: torch adds the columns of a transposed
    matrix in another order, and MKL multiplies matrices at other addresses in another order on processors
    that are not Intel's. A tensor that comes from elsewhere lies where its way put it: a view stays one in
    one process, but is a part of a message on Ray, and mapped files and arrays of NumPy begin anywhere.

    Args:
        value: Tensors and anything else, in dicts, lists and tuples.
    """
    there = {id(tensor): _made_here(tensor) for tensor in _tensors(value) if not _is_made_here(tensor)}
    result: T = _replace(value, there) if there else value
    return result


def with_fields_made_here(value: D, *names: str) -> D:
    """A dataclass with the tensors of these fields as of `as_made_here`; the same one if they are so."""
    came = tuple(getattr(value, name) for name in names)
    held = as_made_here(came)
    return value if held is came else replace(value, **dict(zip(names, held, strict=True)))


def _made_here(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def _is_made_here(tensor: Tensor) -> bool:
    if tensor.device != HOST or tensor.layout != torch.strided or not tensor.numel():
        return True
    if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
        return False
    return 1 not in tensor.shape or tensor.stride() == _contiguous_strides(tensor.shape)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape; those of a view may differ in dimensions of size 1."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def move(value: T, device: torch.device) -> T:
    """A nested value with its tensors on a device; the value itself where they are there already.

    All tensors of a data type travel as one packed tensor, and are views of it afterwards. Those that go to a
    device are packed in pinned memory, if it can read that while the CPU goes on. A tensor without dimensions
    moves to the CPU only: operations of a device take such numbers from the CPU, and optimizers count their
    steps there.

    Args:
        value: Tensors and anything else, in dicts, lists and tuples.
        device: Where the tensors are wanted.
    """
    waiting: dict[torch.dtype, dict[int, Tensor]] = {}
    for tensor in _tensors(value):
        if tensor.device != device and (tensor.ndim or device == HOST):
            waiting.setdefault(tensor.dtype, {})[id(tensor)] = tensor
    there: dict[int, Tensor] = {}
    for tensors in waiting.values():
        there |= _moved_together(tensors, device)
    result: T = _replace(value, there) if there else value
    return result


def _moved_together(tensors: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    """The tensors on the device, by the same keys; all have one data type.

    Those that are all parts of a packed tensor on a device, such as `clone_all` makes, travel as that one.
    What is packed on the CPU depends on the placement of clients; no place on a device may follow from it.
    """
    packs = packs_of({key: tensor for key, tensor in tensors.items() if tensor.device != HOST})
    packed = {key for parts in packs.values() for key in parts}
    rest = {key: tensor for key, tensor in tensors.items() if key not in packed}
    wholes = [base_of(parts).detach() for parts in packs.values()]
    flat = [*wholes, *(tensor.detach().reshape(-1) for tensor in rest.values())]
    if any(part.device != HOST for part in flat) or not can_pin(device):
        moved = torch.cat(flat).to(device)
    else:
        staging = torch.empty(sum(map(len, flat)), dtype=flat[0].dtype, pin_memory=True)
        moved = torch.cat(flat, out=staging).to(device, non_blocking=True)
    there: dict[int, Tensor] = {}
    start = 0
    for whole, parts in zip(wholes, packs.values(), strict=True):
        for key, part in parts.items():
            place = start + part.storage_offset() - whole.storage_offset()
            there[key] = moved.as_strided(part.shape, part.stride(), place)
        start += len(whole)
    return there | _unpack(moved[start:] if packs else moved, rest)


def packs_of(tensors: Mapping[K, Tensor]) -> dict[int, dict[K, Tensor]]:
    """Tensors that together are all of a packed tensor, by the id of that one and their keys."""
    found: dict[int, dict[K, Tensor]] = {}
    for key, tensor in tensors.items():
        whole = tensor._base
        if whole is None or whole.ndim != 1:
            continue
        if whole.is_contiguous() and whole.dtype == tensor.dtype:
            found.setdefault(id(whole), {})[key] = tensor
    return {
        which: parts
        for which, parts in found.items()
        if sum(part.numel() for part in parts.values()) == len(base_of(parts))
    }


def base_of(parts: Mapping[K, Tensor]) -> Tensor:
    """The packed tensor that these are parts of."""
    whole = next(iter(parts.values()))._base
    assert whole is not None
    return whole


def _unpack(packed: Tensor, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Views of a packed tensor in the shapes of the tensors, by the same keys."""
    parts = packed.split([tensor.numel() for tensor in tensors.values()]) if tensors else ()
    return {key: part.view(tensor.shape) for (key, tensor), part in zip(tensors.items(), parts, strict=True)}


def clone_all(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Detached copies of tensors, by the same keys, where the tensors are.

    On a device those of a data type are made in one operation, and are views of one packed tensor.
    """
    copies = {key: value.detach().clone() for key, value in tensors.items() if value.device == HOST}
    alike: dict[tuple[torch.device, torch.dtype], dict[K, Tensor]] = {}
    for key, value in tensors.items():
        if key not in copies:
            alike.setdefault((value.device, value.dtype), {})[key] = value.detach()
    for some in alike.values():
        copies |= _unpack(torch.cat([value.reshape(-1) for value in some.values()]), some)
    return {key: copies[key] for key in tensors}


@cache
def can_pin(device: torch.device) -> bool:
    """Whether memory of the CPU can be pinned, so that the device copies it while the CPU goes on."""
    if device == HOST:
        return False
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError, AssertionError):
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _replace(value: Any, there: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return there.get(id(value), value)
    if isinstance(value, Mapping):
        return {key: _replace(item, there) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, there) for item in value)
    return value


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Numbers as Python has them; those on a device are read together, so that it is waited for once.

    Args:
        values: Numbers, or tensors of one element.
    """
    tensors = [value.detach().reshape(()) for value in values if isinstance(value, Tensor)]
    exact = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in tensors)
    kind = torch.float32 if exact else torch.float64
    read = iter(torch.stack([t.to(kind) for t in tensors]).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def total(values: Iterable[float]) -> float:
    """The sum, added from the first to the last; `sum` rounds otherwise since Python 3.12."""
    result = 0.0
    for value in values:
        result += value
    return result


class CountedDraws:
    """Numbers of dropout on a device in one call of a client, which are made by counting.

    A mask follows from the seed of the call, the layer, and how often that layer drew before in the call
    (`rayfed.fast.kernels`), whatever else the process does.
    """

    def __init__(self, seed: int) -> None:
        """Args: seed: seed of the call."""
        self._seed = seed
        self._drawn: dict[int, int] = {}
        self._there: Tensor | None = None

    def next(self, layer: int) -> int:
        """Number of times that this layer drew before; one more is counted."""
        before = self._drawn.get(layer, 0)
        self._drawn[layer] = before + 1
        return before

    @staticmethod
    def all_on(clients: Sequence[CountedDraws], device: torch.device) -> list[Tensor]:
        """Seeds on a device, int64, shape (1,) each: those of several clients are copied there at once.

        A single one is written there, because a copy would be one more in each call.
        """
        new = [client for client in clients if client._there is None]
        if len(new) == 1:
            new[0]._there = torch.full((1,), new[0]._seed, dtype=torch.int64, device=device)
        elif new:
            every = move(torch.tensor([client._seed for client in new]), device)
            for client, own in zip(new, every.split(1), strict=True):
                client._there = own
        return [client._there for client in clients if client._there is not None]

    def drawn(self, layer: int) -> int:
        """Number of times that this layer drew."""
        return self._drawn.get(layer, 0)

    def advance(self, times: Mapping[int, int]) -> None:
        """Count further draws of layers."""
        for layer, more in times.items():
            self._drawn[layer] = self._drawn.get(layer, 0) + more

    @property
    def state(self) -> dict[int, int]:
        """Number of times that each layer drew; a copy."""
        return dict(self._drawn)

    @state.setter
    def state(self, drawn: dict[int, int]) -> None:
        self._drawn = drawn


class _Current:
    """Clients whose calls this process computes.

    Attributes:
        clients: Clients whose rows are computed, in the order of their rows.
        seeds: Their seeds on the device, int64, shape (K,), once they were asked for.
        counts: Counts of each layer that are added to theirs, int64, shape (layers, K); None: nothing.
    """

    clients: tuple[CountedDraws, ...] = ()
    seeds: Tensor | None = None
    counts: Tensor | None = None


def counted() -> tuple[CountedDraws, ...]:
    """Those of the clients whose rows are computed now, in this order; empty: outside of calls."""
    return _Current.clients


def counted_seeds(device: torch.device) -> Tensor:
    """Seeds of the clients of `counted` on a device, int64, shape (K,)."""
    if _Current.seeds is None:
        parts = CountedDraws.all_on(counted(), device)
        _Current.seeds = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _Current.seeds


def counts_before(layer: int) -> Tensor | None:
    """Counts of a layer on the device that are added to those of the clients of `counted`, shape (K,)."""
    return None if _Current.counts is None else _Current.counts[layer]


def count_for(
    clients: Iterable[CountedDraws], seeds: Tensor | None = None, counts: Tensor | None = None
) -> None:
    """Let dropout draw for these clients from now on, as `torch.set_rng_state` does for a stream.

    Args:
        seeds: On a device, in place of theirs, int64, shape (K,); None: their own.
        counts: On a device, added to those of each layer, int64, shape (layers, K); None: nothing.
    """
    _Current.clients = tuple(clients)
    _Current.seeds = seeds
    _Current.counts = counts


@contextmanager
def counting(
    clients: Iterable[CountedDraws], seeds: Tensor | None = None, counts: Tensor | None = None
) -> Iterator[None]:
    """Let dropout draw for these clients within the block; arguments as of `count_for`."""
    before = counted()
    count_for(clients, seeds, counts)
    try:
        yield
    finally:
        count_for(before)


class RepeatedDraws:
    """A context in which dropout draws what it would draw when this is made; can be entered repeatedly.

    What was counted before the context is known again after it.
    """

    def __init__(self) -> None:
        self._clients = counted()
        self._then = [client.state for client in self._clients]
        self._before = self._clients
        self._after: list[dict[int, int]] = []

    def __enter__(self) -> None:
        self._before = counted()
        self._after = [client.state for client in self._clients]
        self._set(self._then)
        count_for(self._clients)

    def __exit__(self, *_: object) -> None:
        count_for(self._before)
        self._set(self._after)

    def _set(self, states: Sequence[Mapping[int, int]]) -> None:
        for client, state in zip(self._clients, states, strict=True):
            client.state = dict(state)


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of a device after the block, so that it can be repeated."""
    cpu = torch.get_rng_state()
    own = random_state(device)
    with RepeatedDraws():
        try:
            yield
        finally:
            torch.set_rng_state(cpu)
            set_random_state(device, own)


def random_state(device: torch.device) -> Tensor | None:
    """State of the random stream of a device, on the CPU; None for the CPU, and where torch keeps none."""
    module = _module(device)
    known = device != HOST and hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    return module.get_rng_state(device) if known else None


def set_random_state(device: torch.device, state: Tensor | None) -> None:
    """Continue the random stream of a device from a state (`random_state`); nothing is done with None."""
    if state is not None:
        _module(device).set_rng_state(state, device)


def seeded_state(device: torch.device, seed: int) -> Tensor | None:
    """The state with which `rayfed.seeds.use_seed` begins the stream of a device, which is left as it was."""
    before = random_state(device)
    if before is None:
        return None
    _module(device).manual_seed_all(seed)
    state = random_state(device)
    set_random_state(device, before)
    return state


def why_no_cuda() -> str:
    """Torch's reason why it cannot use a GPU, in one line; empty: it can use one."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as err:
        return " ".join(str(err).split()).removesuffix(".")
    return "torch.cuda.is_available() is False"


def chosen_device(name: str) -> torch.device:
    """The device that `cluster.device` names.

    Args:
        name: `auto` (the first GPU that torch sees, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: There is no such device; gives torch's reason.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else HOST
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (name == "cuda" or number.isdecimal())):
        raise ConfigError(f"cluster.device: {name!r} is not 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and (reason := why_no_cuda()):
        raise ConfigError(
            f"cluster.device: {name!r} cannot be used: {reason}; write cluster.device=cpu, or install a "
            f"driver and a torch that fit each other (docs/gpu.md)"
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"cluster.device: {name!r} does not exist: torch sees {torch.cuda.device_count()}")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else HOST


def set_products(device: torch.device, precision: Precision) -> None:
    """Choose, for this process, how a device multiplies matrices of float32; a CPU always does it exactly.

    Args:
        precision: `tf32` allows products of 10 bits, any other value does not.

    Raises:
        ConfigError: The device cannot compute in this precision.
    """
    if precision == "bf16":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch only warns where a device has no products of bfloat16
                torch.autocast(device.type, torch.bfloat16)
        except (AssertionError, RuntimeError, UserWarning) as err:
            raise ConfigError(
                f"train.precision: 'bf16' needs automatic mixed precision, which torch does not have for the "
                f"device {device.type!r}; set fp32"
            ) from err
    if device != HOST:
        fast = precision == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay in float32


def set_deterministic(device: torch.device, wanted: Deterministic) -> None:
    """Choose, for this process, whether every operation must give the same bits each time it is run.

    On a GPU attention is computed by flash attention, memory-efficient attention or plain products, in this
    order. cuDNN's attention is left out: some versions of torch put it first on some GPUs.

    Args:
        wanted: True: an operation without such a kernel raises. `auto`: True on a GPU, False on the CPU.
    """
    on = device != HOST if wanted == "auto" else wanted
    if device != HOST:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if on != torch.are_deterministic_algorithms_enabled():
        _use_deterministic_algorithms(on)


def _use_deterministic_algorithms(on: bool) -> None:
    """Ask torch for deterministic kernels, and its compiler where that has been imported.

    `torch.use_deterministic_algorithms` imports the compiler, which takes a process as long as torch itself;
    `rayfed.models.trunk.use_compile` tells the compiler what is wanted.
    """
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(on)
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")


def use_threads(count: int) -> None:
    """Let torch and the libraries with which NumPy multiplies matrices compute with so many threads.

    Sums depend on the number. NumPy's own would be the number of CPUs in a user's process, and the one that
    Ray chooses in an actor.
    """
    torch.set_num_threads(count)
    for library in _libraries_of_numpy():
        library.set_num_threads(count)


@cache
def _libraries_of_numpy() -> tuple[Any, ...]:
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


PROCESS = threading.RLock()
"""Held by the thread that uses what its process has once: settings of torch and random streams."""


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put the settings of torch that a run chooses for its process back after the block, which runs alone.

    These are the number of threads, also that of NumPy, the precision of products, deterministic kernels and
    the kinds of attention. A run in a user's process, such as a notebook, must not change what follows it
    there. They and the random streams belong to the process, so a block of another thread waits until this
    one has ended.
    """
    with PROCESS:
        yield from _settings_restored()


def _settings_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    of_numpy = [library.get_num_threads() for library in _libraries_of_numpy()]
    products = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    tf32, attention = torch.backends.cudnn.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for library, count in zip(_libraries_of_numpy(), of_numpy, strict=True):
            library.set_num_threads(count)
        torch.set_float32_matmul_precision(products)
        if deterministic != torch.are_deterministic_algorithms_enabled():
            _use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced


def _module(device: torch.device) -> Any:
    """The module of torch for a type of device, such as torch.cuda; None: there is none."""
    return getattr(torch, device.type, None)


def _start_once(device: torch.device) -> Any:
    """As `_module`, once the device has started in this process.

    Before its first tensor CUDA refuses to reset statistics ("Invalid device argument") and reports zeros.
    """
    torch.empty(0, device=device)
    return _module(device)


def kind_of(device: torch.device) -> str:
    """Name of the hardware of a device, as far as results depend on it, such as `NVIDIA H100 80GB HBM3`."""
    query = getattr(_start_once(device), "get_device_name", None)
    return device.type if query is None else str(query(device))


def finish(device: torch.device) -> None:
    """Wait until a device has computed what was queued, so that its time can be taken."""
    if hasattr(module := _module(device), "synchronize"):
        module.synchronize(device)


def free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where torch cannot say."""
    query = getattr(_start_once(device), "mem_get_info", None)
    return None if query is None else int(query(device)[0])


def limit_memory(device: torch.device, share: float) -> None:
    """Let torch take its part of a device's memory only, so that it cannot starve other processes there.

    To be called before the first tensor on the device. Freed memory can be used again for tensors of any size
    (`expandable_segments`), unless the user has set how torch allocates.

    Args:
        share: Share of it that this process was given; 1: there is no limit.

    Raises:
        RuntimeError: The device has no memory for this process, or takes no other process.
    """
    if not os.environ.keys() & ALLOCATION:
        os.environ[ALLOCATION[-1]] = "expandable_segments:True"
    set_fraction = getattr(_start_once(device), "set_per_process_memory_fraction", None)
    if set_fraction is not None and device != HOST:
        set_fraction(USABLE * share if share < 1 else 1.0, device)


def reserved_memory(device: torch.device) -> int:
    """Bytes that torch has taken of a device for tensors; 0 where it cannot say."""
    query = getattr(_start_once(device), "memory_reserved", None)
    return 0 if query is None else int(query(device))


def give_back(device: torch.device) -> None:
    """Give memory of a device back that this process does not use; nothing is done for the CPU.

    Raises:
        RuntimeError: The device has failed, now or in an operation that was not waited for.
    """
    if device == HOST:
        return
    hidden = gc.get_freeze_count() > FROZEN_BY_PYTHON
    gc.unfreeze()  # objects that a client actor leaves out of garbage collection may hold tensors
    gc.collect()
    if hidden:
        gc.freeze()
    module = _module(device)
    if hasattr(module, "synchronize"):
        module.synchronize(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Give unused memory of a device back, and begin anew to note the largest one (`peak_memory`)."""
    if hasattr(module := _start_once(device), "empty_cache"):
        module.empty_cache()
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Largest memory in bytes that torch had reserved on a device since `reset_peak`; None: it cannot say.

    What the driver of the device itself needs in each process is not included.
    """
    query = getattr(_start_once(device), "max_memory_reserved", None)
    return None if query is None else int(query(device))


def total_memory(device: torch.device) -> int | None:
    """All memory of a device in bytes; None where torch cannot say."""
    query = getattr(_start_once(device), "mem_get_info", None)
    return None if query is None else int(query(device)[1])
