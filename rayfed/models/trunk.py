"""Changes of a network that save memory or time, and features of its frozen part, which are computed once.

The changes are checkpointing, torch.compile and pooling by means. The features that were used last are in
memory, and others on disk, where several processes read them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, are_deterministic_algorithms_enabled, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.client_facts import Splits
from rayfed.devices import HOST, as_made_here, finish, kind_of
from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import is_trained_norm

WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Variable of torch's compiler; it is read when the compiler is first used."""


def has_trained_norms(model: nn.Module) -> bool:
    """Whether the model has BatchNorm layers that are trained, whose statistics are those of a batch."""
    return any(is_trained_norm(module) for module in model.modules() if isinstance(module, _BatchNorm))


def use_checkpointing(model: Backbone) -> None:
    """Keep the activations between the blocks only; those within a block are computed again when needed.

    Raises:
        ConfigError: The network offers no such mode, or its BatchNorm statistics would be updated twice.
    """
    moved = model.behaviour is not None and not model.behaviour.is_still
    if has_trained_norms(model) or moved:
        what = (
            "trained BatchNorm layers, whose statistics" if not moved else "tensors that passes move, which"
        )
        raise ConfigError(
            f"train.checkpointing: {model.label!r} has {what} a second forward pass would update twice; "
            f"leave it out, or use train.batch_size for less memory"
        )
    net: Any = model.net
    if model.num_blocks:
        model.stack.checkpointing = True
    elif hasattr(net, "set_grad_checkpointing"):
        try:
            net.set_grad_checkpointing(True)
        except AssertionError as err:
            raise ConfigError(_cannot_checkpoint(model)) from err
    else:
        raise ConfigError(_cannot_checkpoint(model))
    if model.text is not None and hasattr(model.text.tower, "transformer"):
        model.text.tower.transformer.grad_checkpointing = True


def _cannot_checkpoint(model: Backbone) -> str:
    return (
        f"train.checkpointing: {model.label!r} has no blocks between which activations could be kept; leave "
        f"it out, or use train.micro_batch for less memory"
    )


def use_compile(model: Backbone, device: str) -> None:
    """Compile the network of a backbone at its first call.

    The compiler starts as many processes as this process has threads, unless TORCHINDUCTOR_COMPILE_THREADS
    says another number; torch's own default is up to 32 for each client actor.

    Raises:
        ConfigError: This machine has no compiler for the device.
    """
    check_compiler(device)
    os.environ.setdefault(WORKERS, str(torch.get_num_threads()))
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)  # imports the compiler, and tells it too
    model.net.compile()


def check_compiler(device: str) -> None:
    """Check that torch.compile can make code: with a C++ compiler, and for GPUs also with triton.

    Raises:
        ConfigError: It cannot; names what is missing.
    """
    missing = ""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++")):
        missing = "a C++ compiler (g++, clang++ or $CXX)"
    elif device != "cpu" and find_spec("triton") is None:
        missing = "the package triton"
    if missing:
        raise ConfigError(f"train.compile: true needs {missing}, which is not installed; leave it out")


def use_mean_pooling(model: nn.Module) -> None:
    """Let adaptive average pooling be computed by `MeanPool`.

    Args:
        model: The model, on a GPU.
    """
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d:
            module.__class__ = MeanPool


class MeanPool(nn.AdaptiveAvgPool2d):
    """Adaptive average pooling by means of windows.

    The backward pass of torch's kernel for GPUs adds in any order, so that two runs differ in the last bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Means of windows, shape (B, C, h, w).

        Args:
            x: A map, shape (B, C, H, W).
        """
        wanted = self.output_size
        pair = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        high, wide = (_windows(size, parts or size) for size, parts in zip(x.shape[-2:], pair, strict=True))
        rows = [torch.stack([x[..., i, j].mean((-2, -1)) for j in wide], -1) for i in high]
        return torch.stack(rows, -2)


def _windows(size: int, parts: int) -> list[slice]:
    """The windows of adaptive pooling, which overlap where the size is no multiple of their number."""
    return [slice(k * size // parts, -(-(k + 1) * size // parts)) for k in range(parts)]


FEATURES = "features"
"""Folder of the features, next to the prepared data, whose place is set by `data.cache`."""

REVISION = 2
"""Number of the way in which networks compute features. A change of any bit of them needs the next one, so
that features which an earlier version wrote are not read."""

MAPPED = 4_000_000
"""Bytes from which a file is mapped instead of read: a process may hold few open files."""

WRITTEN = (100_000, 0.001)
"""Bytes and seconds that stand for the last file before one was written."""


class FeatureFolder:
    """Files of frozen features, one for each split of a client.

    Features depend on frozen weights and examples only, and are always computed in the same batches, so any
    process may read those that another one wrote.

    Attributes:
        written: Bytes of the file that was written last, and the seconds that it took.
    """

    def __init__(
        self, folder: Path, splits: Mapping[str, Splits], device: torch.device | None = None
    ) -> None:
        """Use a folder.

        Args:
            folder: Folder for this backbone, data set and batch size.
            splits: Row numbers by client and split.
            device: Device of the worker, where it wants the features; None: the CPU.
        """
        self.written: tuple[int, float] = WRITTEN
        self._device = device or torch.device("cpu")
        self._folder = folder
        self._splits = splits

    def read(self, key: Any) -> Tensor | None:
        """Features by client, split and blocks; None if no file has them, or it cannot be read."""
        file = self._file(key)
        try:
            array = np.load(file, mmap_mode="r" if file.stat().st_size >= MAPPED else None)
        except (OSError, ValueError, EOFError):
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return as_made_here(torch.from_numpy(array)).to(self._device)

    def write(self, key: Any, value: Tensor) -> None:
        """Write features, unless they are there, or the disk is full or the folder is not ours."""
        file = self._file(key)
        if file.exists():
            return
        began = time.perf_counter()
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(file, value.cpu().numpy())
            self.written = (value.nbytes, time.perf_counter() - began)

    def seconds(self, size: int) -> float:
        """Estimate of the seconds for a file of this many bytes, which is not less than for a smaller one."""
        size_before, seconds = self.written
        return seconds * max(1.0, size / max(1, size_before))

    def _file(self, key: Any) -> Path:
        client, split, blocks = key
        rows = np.ascontiguousarray(self._splits[client][split], dtype=np.int64)
        name = hashlib.sha256(repr(blocks).encode() + rows.tobytes()).hexdigest()
        return self._folder / f"{name}.npy"


class FeatureCache(MutableMapping[Any, Tensor]):
    """The frozen features of a worker, by client, split and blocks.

    Those that were not used for the longest time leave the memory where they need more than the budget. They
    are written to disk if that takes less time than computing them took, and computed again otherwise.
    """

    def __init__(self, budget: float, folder: FeatureFolder | None = None, shared: bool = False) -> None:
        """Make an empty cache.

        Args:
            budget: Most bytes in memory.
            folder: Where features are on disk; None: nowhere.
            shared: Write all features to disk at once, because other experiments read them there.
        """
        self._budget = budget
        self._folder = folder
        self._shared = shared
        self._bytes = 0
        self._held: OrderedDict[Any, tuple[Tensor, float]] = OrderedDict()  # with the seconds they took
        self._missed: dict[Any, float] = {}  # when a key was asked for in vain

    def __getitem__(self, key: Any) -> Tensor:
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][0]
        found = self._folder.read(key) if self._folder else None
        if found is None:
            self._missed[key] = time.perf_counter()
            raise KeyError(key)
        self._hold(key, found, 0.0)
        return found

    def __setitem__(self, key: Any, value: Tensor) -> None:
        if key in self._missed and value.device != HOST:
            finish(value.device)  # otherwise the time of the launches would be taken, not that of the work
        now = time.perf_counter()
        if self._folder and self._shared:
            self._folder.write(key, value)
        self._hold(key, value, now - self._missed.pop(key, now))

    def __delitem__(self, key: Any) -> None:
        value, _ = self._held.pop(key)
        self._bytes -= value.nbytes

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def _hold(self, key: Any, value: Tensor, seconds: float) -> None:
        if key in self._held:
            del self[key]
        self._held[key] = (value, seconds)
        self._bytes += value.nbytes
        while self._bytes > self._budget:
            oldest, (old, took) = next(iter(self._held.items()))
            del self[oldest]
            if self._folder and took > self._folder.seconds(old.nbytes):
                self._folder.write(oldest, old)


def _write_whole(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a .npy file completely or not at all, whoever else writes the same one."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def feature_folder(
    shard: Path, splits: Mapping[str, Splits], device: torch.device, *depends_on: object
) -> FeatureFolder:
    """The features of one backbone on one prepared data set.

    Args:
        shard: The file of the prepared data.
        splits: Row numbers by client and split.
        device: Device of the worker; features of another kind of GPU, or of other kernels, differ.
        depends_on: Everything else that decides a bit of the features, such as a digest of the weights.
    """
    computed_by = str(device) if device == HOST else (kind_of(device), are_deterministic_algorithms_enabled())
    fused = torch.backends.mha.get_fastpath_enabled()  # torch's encoder layers round otherwise with it
    parts = (*depends_on, computed_by, fused, shard.name, torch.__version__, REVISION)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return FeatureFolder(shard.parent / FEATURES / name[:32], splits, device)
