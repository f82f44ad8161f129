"""Initial tensors of many experiments in Ray's object store, in which equal tensors are stored once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt
import ray

from rayfed.engine.built_once import digest_of

Array = npt.NDArray[Any]


class StoredWeights(Mapping[str, Array]):
    """Tensors by name, each an object reference: small to send, mapped from the store when read."""

    def __init__(self, references: Mapping[str, Any]) -> None:
        """Take the references.

        Args:
            references: Object reference of each tensor, by name.
        """
        self._references = dict(references)
        self._arrays: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if not self._arrays:
            self._arrays = dict(zip(self._references, ray.get(list(self._references.values())), strict=True))
        return self._arrays[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWeights, (self._references,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)


class WeightStore:
    """Objects of a job's experiments in the object store, by the digest of their content.

    The frozen backbone is the same for all seeds and methods, so that it is there once, whatever is tuned on
    it. Several threads may use it.
    """

    def __init__(self) -> None:
        self._references: dict[str, Any] = {}
        self._lock = threading.Lock()

    def put(self, weights: Mapping[str, Array]) -> StoredWeights:
        """Put those tensors into the object store that are not there yet.

        Args:
            weights: All initial tensors of a model, by name.

        Returns:
            The same tensors, as references.
        """
        with self._lock:
            return StoredWeights({name: self._reference(array) for name, array in weights.items()})

    def _reference(self, array: Array) -> Any:
        key = digest_of({"": array})
        if key not in self._references:
            self._references[key] = ray.put(array)
        return self._references[key]

    def __len__(self) -> int:
        """Number of different tensors."""
        return len(self._references)
