"""Estimates memory and cost of an experiment from shapes, and refuses one that cannot run.

Costs are counted once for each kind of model and each number of its blocks. A model that is to be scored on
other data (`evaluation.model_of`) must have been trained on classes that fit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.client_facts import ByClient
from rayfed.config.design import Design
from rayfed.data.partition.partition import Partition
from rayfed.errors import ConfigError, ResourceError, one_line
from rayfed.executors.worker import ClientContext
from rayfed.federation.cohort import Cost, Load
from rayfed.federation.local import Local
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.deep_copy import deep_copy
from rayfed.objective import LANGUAGE_MODELING, Objective
from rayfed.tuning.base import trainable
from rayfed.types import num_bytes

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


T = TypeVar("T")
GB = 1e9
COPIES = 4
"""Copies of a trained tensor: its value, its gradient, the optimizer's momentum and the server's value."""

MOST_BLOCKS = 1000
REPEATS = ("depth", "num_blocks", "num_layers", "layers")
"""Options of a model that give its number of blocks or layers."""


def check_counts(design: Design) -> None:
    """Refuse models with so many blocks that building them would take very long.

    Raises:
        ConfigError: Names the option.
    """
    for name in REPEATS:
        value = design.model.options.get(name)
        if isinstance(value, int) and value > MOST_BLOCKS:
            raise ConfigError(
                f"model.options.{name}: {value} is more than {MOST_BLOCKS} blocks; choose fewer"
            )


def measurable(design: Design, build: Callable[[], T]) -> T:
    """Call `build`, which builds a model without values.

    Raises:
        ConfigError: Its tensors are larger than any memory; names the key with the largest number.
    """
    try:
        return build()
    except (RuntimeError, OverflowError, MemoryError) as err:
        reason = one_line(err)[:200] or type(err).__name__
        raise ConfigError(f"{_largest(design)}: the model cannot be built: {reason}") from err


def check_memory(design: Design, model: nn.Module, size: int, partition: Partition) -> None:
    """Refuse an experiment that cannot fit into the memory of this machine.

    Args:
        model: The tuned model without values.
        size: Side of its input in pixels; 0 for tasks without images.
        partition: Examples of each client, for the size of the largest batch.

    Raises:
        ResourceError: Names needed and free memory, and the key that needs most.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in (*model.parameters(), *model.buffers()) if not p.requires_grad]
    longest = partition.longest
    batch, key = max(
        (min(getattr(design.train, name), longest), name) for name in ("batch_size", "eval_batch_size")
    )
    parts = {
        _largest(design): num_bytes(frozen) + COPIES * num_bytes(trained),
        f"train.{key}: {batch}": batch * (3 * size**2 * 4 + _logit_bytes(model)),
    }
    need = sum(parts.values())
    free = psutil.virtual_memory().available
    if need > free:
        culprit = max(parts, key=lambda name: parts[name])
        raise ResourceError(
            f"{culprit}: model, gradients and one batch need about {need / GB:.1f} GB of memory, "
            f"{free / GB:.1f} GB are free; choose a smaller number or a smaller model"
        )


def _logit_bytes(model: nn.Module) -> int:
    """Bytes of the logits of a text and of their logarithms; 0 for all but language models."""
    if not isinstance(model, Backbone) or model.task != LANGUAGE_MODELING:
        return 0
    return 2 * 4 * model.size * model.num_classes


def check_micro_batch(design: Design, local: Local, whole_batch: str, goal: Objective) -> None:
    """Refuse gradients in parts of a batch where the loss needs the whole batch.

    Args:
        local: The client half of its method.
        whole_batch: What in the model computes with all rows of a batch; empty: nothing does.

    Raises:
        ConfigError: Names the task, the client half or the part of the model.
    """
    size = design.train.micro_batch
    if size is not None and (why := why_whole_batches(design, local, whole_batch, goal)):
        raise ConfigError(
            f"train.micro_batch: {size} cannot be used with {why}; leave it out, or use a smaller "
            f"train.batch_size"
        )


def check_base(train: TrainConfig, model: Backbone) -> None:
    """Raise ConfigError if `train.base_bits` asks for what the tuned model or the installation cannot do."""
    if train.base_bits is None:
        return
    if model.tokenizer is None:
        reason = f"is for models of transformers, not for {model.label!r}; leave it out"
    elif train.compile or train.graphs is True:
        reason = "cannot be used with train.compile and train.graphs; leave one of the two out"
    elif find_spec("bitsandbytes") is None:
        reason = (
            'needs bitsandbytes, which computes on GPUs of NVIDIA: pip install "rayfed-sim[quantized]"; '
            "leave it out, or use train.precision=bf16"
        )
    else:
        return
    raise ConfigError(f"train.base_bits: {train.base_bits} {reason}")


def why_whole_batches(design: Design, local: Local, whole_batch: str, goal: Objective) -> str:
    """Why gradients cannot be computed in parts of a batch; empty: they can. Arguments as above."""
    if "loss" in goal.whole:
        return f"the loss of {goal.task!r}, which is not the mean of the losses of single examples"
    if not local.averages_rows:
        return (
            f"the client half of {design.names.local}, whose loss is not a mean over the examples of a batch"
        )
    return f"{whole_batch}, which depend on the whole batch" if whole_batch else ""


def _largest(design: Design) -> str:
    """Key and value, as `key: value`, of the largest whole number in the sections `tuning` and `model`."""
    sections = {"tuning": design.described["tuning"], "model.options": design.model.options}
    numbers = [pair for where, section in sections.items() for pair in _numbers(section, where)]
    if design.model.size:
        numbers.append((f"model.size: {design.model.size}", design.model.size))
    return max(numbers, key=lambda pair: pair[1], default=(f"model.name: {design.model.name!r}", 0))[0]


def _numbers(section: Mapping[str, Any], where: str) -> Iterator[tuple[str, int]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{where}.{key}")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{where}.{key}: {value}", value


def check_scored(design: Design, context: ClientContext) -> None:
    """Check, before anything runs, that a model trained on other classes can score those of this data set.

    Args:
        design: The experiment; without `evaluation.model_of` nothing is checked.
        context: What builds its model.

    Raises:
        ConfigError: Its rounds would train, its model has no text tower, or the values that it trains belong
            to the classes one by one.
    """
    if design.evaluation.model_of is None:
        if design.data.base_classes is not None:
            raise ConfigError(
                f"data.base_classes: {design.data.base_classes} has no effect without evaluation.model_of, "
                f"because its clients have no samples of these classes; set that, or leave it out"
            )
        return
    if design.rounds != 1:
        raise ConfigError(
            f"rounds: {design.rounds}, but with evaluation.model_of nothing is trained; set rounds=1"
        )
    model = context.skeleton()
    if model.text is None:
        raise ConfigError(
            f"model.name: the classifier of {model.label!r} has an output for each class that it was "
            f"trained on, and cannot score new ones; choose a model that makes it from the names of the "
            f"classes, such as model=clip_mini or clip_vit_b_16"
        )
    one_more = replace(context, num_classes=context.num_classes + 1, classes=()).skeleton()
    other = {name: entry.tensor.shape for name, entry in one_more.tensors().items() if entry.is_trained}
    for name, entry in model.tensors().items():
        if entry.is_trained and other[name] != entry.tensor.shape:
            raise ConfigError(
                f"tuning.name: {design.names.tuning!r} trains {name!r}, which has values for each class, "
                f"so that it cannot score new ones; set tuning.train_head=false where it has that option, or "
                f"choose text_prompt (without class_specific), residual_adapter or attention_adapter"
            )


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
