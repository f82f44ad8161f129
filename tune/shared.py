"""Data shared by all trials of a sweep: frozen weights in the object store, frozen features on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import ray

from rayfed.engine.built_once import digest_of
from rayfed.executors.worker import World
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.shared_weights import attach, dump, skeleton
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


def sharing_features(world: World, frozen: Frozen | None) -> World:
    """The world of workers that keep frozen features on disk, for other workers and later trials."""
    return world if frozen is None else replace(world, features=frozen.digest, shares_features=True)


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


def join(weights: Mapping[str, Array], frozen: Frozen | None) -> Mapping[str, Array]:
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
