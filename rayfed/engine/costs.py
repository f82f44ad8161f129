"""Counts what training costs, once for each kind of model and each number of its blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from rayfed.clients import ByClient
from rayfed.errors import one_line
from rayfed.executors.worker import World
from rayfed.federation.cost import Cost, Load
from rayfed.models.backbone import Backbone
from rayfed.models.operations import step_operations
from rayfed.tuning.base import trainable

log = logging.getLogger(__name__)

MOST_SIZES = 6
"""Largest number of different sizes that are counted one by one; of more, the smallest and the largest."""

_COUNTED: dict[str, dict[int, Load]] = {}
"""Counts of this process by kind of model, because one command may prepare many experiments."""


def count_cost(model: Backbone, world: World, capacity: Mapping[str, int] | None, depth: int) -> Cost | None:
    """The cost of the visits of an experiment; None if a part of the model cannot be counted.

    Args:
        model: The tuned model, best without values; its active blocks are the same afterwards.
        world: What the model was made from, and the settings of local optimisation.
        capacity: Number of blocks of each client; None: drawn anew in each round.
        depth: Number of blocks that capacities count; 0: the model is always whole.
    """
    keeps = world.train.cache_features is not False
    sizes = _sizes(capacity, depth) if depth else ()
    kind = repr((world.model, world.tuning, world.num_classes, keeps, sizes))
    if kind not in _COUNTED:
        try:
            _COUNTED[kind] = _loads(model, keeps, sizes)
        except RuntimeError as err:  # what a part of somebody's own does without values is not known
            log.info("the operations of training are not counted: %s", one_line(err))
            return None
    loads = _COUNTED[kind]
    return Cost(world.train, loads, max(loads))


def _loads(model: Backbone, keeps: bool, sizes: tuple[int, ...]) -> dict[int, Load]:
    """The cost of the model with its first blocks, by their number; sizes: empty for the whole model."""
    whole = model.num_blocks
    if len(sizes) > 1 or whole < 3 or not _are_alike(model):
        return _count(model, keeps, sizes or (whole,))
    # Two counts of small models give that of the whole one.
    one, two = _count(model, keeps, (1, 2)).values()
    parts = {part: (getattr(one, part), getattr(two, part)) for part in ("step", "row", "trained")}
    found = {part: first + (whole - 1) * (second - first) for part, (first, second) in parts.items()}
    return {whole: Load(**found)}


def _are_alike(model: Backbone) -> bool:
    """Whether each block costs the same: none has an exit or is changed by a module, and all train alike."""
    if model.exits is not None or getattr(model.net, "paired", None) is not None:
        return False
    trained: Counter[int | None] = Counter()
    for entry in model.tensors().values():
        trained[entry.block] += entry.tensor.numel() if entry.is_trained else 0
    return len({trained[block] for block in model.active}) == 1


def _count(model: Backbone, keeps: bool, sizes: Iterable[int]) -> dict[int, Load]:
    everything = model.active
    loads = {}
    for number in sizes:
        if everything:
            model.active = everything[:number]
        step, row = step_operations(model, keeps)
        loads[number] = Load(step, row, sum(p.numel() for p in trainable(model).values()))
    if everything:
        model.active = everything
    return loads


def _sizes(capacity: Mapping[str, int] | None, depth: int) -> tuple[int, ...]:
    if capacity is None:
        return 1, depth
    values = capacity.different if isinstance(capacity, ByClient) else capacity.values()
    sizes = sorted({*values, depth})
    return tuple(sizes) if len(sizes) <= MOST_SIZES else (sizes[0], depth)
