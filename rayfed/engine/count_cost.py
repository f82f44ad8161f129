"""Counts the operations of a step of training from shapes, for the columns and the plans of a run.

Costs are counted once for each kind of model and each number of its blocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.client_facts import ByClient
from rayfed.errors import one_line
from rayfed.executors.worker import ClientContext
from rayfed.federation.cohort import Cost, Load
from rayfed.models.backbone import Backbone
from rayfed.models.deep_copy import deep_copy
from rayfed.tuning.base import trainable

ROWS = 2, 4
"""Rows of the batches that are counted; trained BatchNorm layers refuse a batch of one."""


SMALL = 5_000_000
"""Most numbers of a network that is given zeros to be counted: computing takes less time than the compiler of
torch takes to be imported, which kernels without values do."""


def step_operations(model: Backbone, keeps_features: bool) -> tuple[int, int]:
    """Operations of one forward and backward pass: those of any batch, and those of each of its rows.

    Counted are matrix products, convolutions and attention, a product and its sum as two operations, as
    torch's own counter does; a part of the network without trained tensors is not gone through backward.
    Only what a class prompt needs of a text tower does not depend on the number of rows.

    Args:
        model: The tuned model with its active blocks; best on the meta device, where nothing is computed.
        keeps_features: Features of a frozen network are computed once for the whole run, so that a step
            begins with them.
    """
    if model.head.weight.is_meta and sum(p.numel() for p in model.parameters()) <= SMALL:
        with suppress(RuntimeError):  # a part of a user's own may keep tensors that are no buffers
            small = _with_zeros(model)
            with _product_by_product():
                return _step(small, keeps_features)
    return _step(model, keeps_features)


@contextmanager
def _product_by_product() -> Iterator[None]:
    """In this block, attention is computed by single products, as without values, so that each is counted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _step(model: Backbone, keeps_features: bool) -> tuple[int, int]:
    few = _operations(model, ROWS[0], keeps_features)
    if not model.text_is_live:
        return 0, few // ROWS[0]
    each = (_operations(model, ROWS[1], keeps_features) - few) // (ROWS[1] - ROWS[0])
    return few - ROWS[0] * each, each


def _with_zeros(model: Backbone) -> Backbone:
    """A copy of a model without values, in which every value is zero."""
    zeros: dict[int, Any] = {}
    for parameter in model.parameters():
        value = torch.zeros(parameter.shape, dtype=parameter.dtype)
        zeros[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        zeros[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    copied: Backbone = deep_copy(model, zeros)
    return copied


def _operations(model: Backbone, rows: int, keeps_features: bool) -> int:
    model.train()
    x = _batch(model, rows)
    if keeps_features and (model.has_frozen_features or model.gc_net is not None):
        model.frozen_features(x)  # remembered for this batch
    with _Counter() as counter:
        output = model(x)
        outputs = output if isinstance(output, list | tuple) else [output]
        torch.stack([out.sum() for out in outputs]).sum().backward()
    model.zero_grad()
    return counter.total


class _Counter(TorchDispatchMode):
    """Adds up the operations in its block by the formulas of torch's own counter.

    That counter also imports torch's compiler, which takes longer than everything else before the first batch
    of a small network.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.total = 0
        self._formulas = flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the mark that keeps torch.compile out imports it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula: Any = self._formulas.get(func.overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def _batch(model: Backbone, rows: int) -> Tensor:
    return model.sample(rows)


log = logging.getLogger(__name__)

MOST_SIZES = 6
"""Largest number of different sizes that are counted one by one; of more, the smallest and the largest."""

_COUNTED: dict[str, dict[int, Load]] = {}
"""Counts of this process by kind of model, because one command may prepare many experiments."""


def count_cost(
    model: Backbone, context: ClientContext, capacity: Mapping[str, int] | None, depth: int
) -> Cost | None:
    """The cost of the visits of an experiment; None if a part of the model cannot be counted.

    Args:
        model: The tuned model, best without values; its active blocks are the same afterwards.
        context: What the model was made from, and the settings of local optimization.
        capacity: Number of blocks of each client; None: drawn anew in each round.
        depth: Number of blocks that capacities count; 0: the model is always whole.
    """
    keeps = context.train.cache_features is not False
    sizes = _sizes(capacity, depth) if depth else ()
    kind = repr((context.model, context.tuning, context.num_classes, keeps, sizes))
    if kind not in _COUNTED:
        try:
            _COUNTED[kind] = _loads(model, keeps, sizes)
        except RuntimeError as err:  # what a user's part does without values is not known
            log.info("the operations of training are not counted: %s", one_line(err))
            return None
    loads = _COUNTED[kind]
    return Cost(loads, max(loads))


def _loads(model: Backbone, keeps: bool, sizes: tuple[int, ...]) -> dict[int, Load]:
    """The cost of the model with its first blocks, by their number; sizes: empty for the whole model."""
    whole = model.num_blocks
    if len(sizes) > 1 or whole < 3 or not _are_alike(model):
        return _count(model, keeps, sizes or (whole,))
    # Two counts of small models give that of the whole one.
    one, two = _count(model, keeps, (1, 2)).values()
    parts = {part: (getattr(one, part), getattr(two, part)) for part in ("step", "row", "trained")}
    load = {part: first + (whole - 1) * (second - first) for part, (first, second) in parts.items()}
    return {whole: Load(**load)}


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
