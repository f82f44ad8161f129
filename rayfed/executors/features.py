"""Frozen features on disk, which several processes of a node and several experiments read."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayfed.data.examples import Splits

FEATURES = "features"
"""Folder of the features, beside the prepared data, whose place is set by `data.cache`."""


class FeatureFolder(dict[Any, Tensor]):
    """Cache of the frozen features of a worker, which other workers of the node read, too.

    There is one file per split of a client: features depend on frozen weights and examples only, and are
    always computed in the same batches. Features that cannot be written are kept in memory only.
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
        super().__init__()
        self._device = device or torch.device("cpu")
        self._folder = folder
        self._splits = splits

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and self._file(key).exists():
            array = np.load(self._file(key), mmap_mode="r")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                super().__setitem__(key, torch.from_numpy(array).to(self._device))
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Tensor) -> None:
        super().__setitem__(key, value)
        with suppress(OSError):  # the disk is full, or the folder belongs to somebody else
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self._file(key), value.cpu().numpy())

    def _file(self, key: Any) -> Path:
        client, split, blocks = key
        rows = np.ascontiguousarray(self._splits[client][split], dtype=np.int64)
        name = hashlib.sha256(repr(blocks).encode() + rows.tobytes()).hexdigest()
        return self._folder / f"{name}.npy"


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
        device: Device of the worker.
        depends_on: Everything else that decides a bit of the features, such as a digest of the weights.
    """
    parts = (*depends_on, str(device), shard.name, torch.__version__)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return FeatureFolder(shard.parent / FEATURES / name[:32], splits, device)
