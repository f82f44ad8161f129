"""Data shared by all trials of a sweep: frozen weights in the object store, frozen features on disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from rayfed.executors.worker import World
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.sharing import attach, dump, skeleton
from rayfed.record.files import write_whole
from rayfed.tuning.base import apply_tuning

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Frozen:
    """The weights of one backbone without tuning, in the object store.

    Attributes:
        ref: Object reference to all its tensors by module name.
        digest: SHA-256 digest of the tensors.
    """

    ref: Any
    digest: str


@dataclass(frozen=True)
class FrozenWeights:
    """Backbones in the object store.

    Attributes:
        by_key: Backbones by `key_of` their world.
    """

    by_key: Mapping[str, Frozen] = field(default_factory=dict)

    def of(self, world: World) -> Frozen | None:
        """The backbone of an experiment; None: it is not in the object store."""
        return self.by_key.get(key_of(world))

    def build(self, world: World) -> Backbone:
        """As `world.build()`, with frozen tensors mapped from the object store if they are there.

        Then no file of weights is read. The frozen tensors of the result are memory shared with other
        processes and must not be changed; `dump` and `export` copy the trained ones.
        """
        frozen = self.of(world)
        if frozen is None:
            return world.build()
        bare = replace(world.model, pretrained=False)
        model = skeleton(lambda: build_backbone(bare, world.classes or world.num_classes, world.seed))
        model.requires_grad_(False)
        attach(model, ray.get(frozen.ref))
        return apply_tuning(model, world.tuning, world.seed)


def key_of(world: World) -> str:
    """Text that identifies the weights of a backbone without tuning."""
    return repr((world.model, world.classes, world.num_classes, world.seed))


def put_frozen(worlds: list[World]) -> FrozenWeights:
    """Build each backbone once and put it into the object store."""
    by_key: dict[str, Frozen] = {}
    for world in worlds:
        if key_of(world) not in by_key:
            model = build_backbone(world.model, world.classes or world.num_classes, world.seed)
            arrays = dump(model.requires_grad_(False))
            by_key[key_of(world)] = Frozen(ray.put(arrays), digest_of(arrays))
    return FrozenWeights(by_key)


def digest_of(arrays: Mapping[str, Array]) -> str:
    """SHA-256 hex digest of names, data types, shapes and bytes."""
    out = hashlib.sha256()
    for name in sorted(arrays):
        out.update(f"{name}|{arrays[name].dtype}|{arrays[name].shape}|".encode())
        out.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return out.hexdigest()


class JoinedWeights(Mapping[str, Array]):
    """All tensors of a tuned model; those of the backbone are stored by object reference.

    It is small to send: a process that reads it maps the backbone from the object store of its node.
    """

    def __init__(self, ref: Any, own: Mapping[str, Array], names: Mapping[str, str]) -> None:
        """Join tensors.

        Args:
            ref: Object reference to the tensors of the backbone.
            own: All other tensors, by name.
            names: Name in the backbone, by name in the tuned model.
        """
        self._ref = ref
        self._own = dict(own)
        self._names = dict(names)
        self._mapped: Mapping[str, Array] | None = None

    def __getitem__(self, name: str) -> Array:
        if name in self._own:
            return self._own[name]
        if self._mapped is None:
            self._mapped = ray.get(self._ref)
        return self._mapped[self._names[name]]

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedWeights, (self._ref, self._own, self._names)

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._names

    def __len__(self) -> int:
        return len(self._own) + len(self._names)


def joined(weights: Mapping[str, Array], frozen: Frozen | None) -> Mapping[str, Array]:
    """The weights of a tuned model, with references instead of tensors that are in the object store.

    Args:
        weights: `Setup.weights` of a model built by `FrozenWeights.build`.
        frozen: Its backbone; None: it is not in the object store.
    """
    if frozen is None:
        return weights
    places = {_place(array): name for name, array in ray.get(frozen.ref).items()}
    names = {name: places[_place(array)] for name, array in weights.items() if _place(array) in places}
    return JoinedWeights(frozen.ref, {n: a for n, a in weights.items() if n not in names}, names)


def _place(array: Array) -> tuple[int, Any]:
    return array.__array_interface__["data"][0], array.shape


class FeatureFolder(dict[Any, Tensor]):
    """Cache of frozen features of a worker, which other processes of the node and later trials read, too.

    There is one file per split of a client: features depend on frozen weights and examples only, and are
    always computed in the same batches.
    """

    def __init__(self, folder: Path, splits: Mapping[str, Mapping[str, Any]]) -> None:
        """Use a folder.

        Args:
            folder: Folder for this backbone, data set and batch size.
            splits: Row numbers by client and split.
        """
        super().__init__()
        self._folder = folder
        self._splits = splits

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and self._file(key).exists():
            array = np.load(self._file(key), mmap_mode="r")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                super().__setitem__(key, torch.from_numpy(array))
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Tensor) -> None:
        super().__setitem__(key, value)
        self._folder.mkdir(parents=True, exist_ok=True)

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.save(file, value.numpy())

        write_whole(self._file(key), write)

    def _file(self, key: Any) -> Path:
        client, split, blocks = key
        rows = np.ascontiguousarray(self._splits[client][split], dtype=np.int64)
        name = hashlib.sha256(repr(blocks).encode() + rows.tobytes()).hexdigest()
        return self._folder / f"{name}.npy"


def feature_folder(world: World, frozen: Frozen | None, device: str) -> FeatureFolder | None:
    """Cache for features of this backbone on this data; None where there is no digest of its weights."""
    if frozen is None:
        return None
    parts = (
        frozen.digest,
        world.model,
        world.shard.name,
        world.train.eval_batch_size,
        world.threads,
        world.train.compile,
    )
    name = hashlib.sha256(repr((*parts, device, torch.__version__)).encode()).hexdigest()
    return FeatureFolder(_features_of(world) / name[:32], world.splits)


def _features_of(world: World) -> Path:
    """Folder beside the prepared data, which is set by `data.cache`."""
    return world.shard.parent / "features"
