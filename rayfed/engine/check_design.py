"""Checks of an experiment before it runs: models that are too large, and settings that its method cannot use.

A model that is to be scored on other data (`evaluation.model_of`) must have been trained on classes that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import psutil
from torch import nn

from rayfed.columns import GLOBAL_VALIDATED, VALIDATED, better_values
from rayfed.config.design import Design
from rayfed.data.partition.partition import Partition
from rayfed.errors import ConfigError, ResourceError, one_line, unknown
from rayfed.evaluation.stopping import AUTO, StopConfig, is_of_validation, is_share
from rayfed.executors.worker import ClientContext
from rayfed.federation.local import Local
from rayfed.federation.noise_and_compression import ChannelStage
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.objective import LANGUAGE_MODELING, Objective
from rayfed.types import num_bytes

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


def check_stop(design: Design, goal: Objective, local: Local, has_clock: bool) -> None:
    """Check the rule that ends the run early (`stop`) and that of the model that is kept (`checkpoint.best`).

    Args:
        goal: The task, with the name of its metric.
        local: The client half of the method.
        has_clock: Whether the experiment has a virtual clock.

    Raises:
        ConfigError: A rule has not what it looks at, chooses by test examples, or would tell about examples
            that privacy protects.
    """
    stop, best = design.stop, design.checkpoint.best
    if stop.virtual_seconds is not None and not has_clock:
        raise ConfigError(
            f"stop.virtual_seconds: {stop.virtual_seconds:g} needs the virtual clock; set "
            f"faults.seconds_per_example, or leave it out"
        )
    whose = (VALIDATED, GLOBAL_VALIDATED) if local.deploys == "personal" else (VALIDATED,)
    known = [AUTO, *(of + name for of in whose for name in (goal.metric, "loss"))]
    if stop.watches:
        used = "patience" if stop.patience is not None else "target"
        _check_column("stop.metric", stop.metric, known, tests=stop.patience is None)
        if is_of_validation(stop.metric):
            _check_validated(design, f"stop.{used}: {getattr(stop, used):g}")
        _check_target(stop, goal)
    if best is not None:
        _check_column("checkpoint.best", best, known, tests=False)
        _check_validated(design, f"checkpoint.best: {best}")


def _check_column(key: str, column: str, known: Sequence[str], tests: bool) -> None:
    """Check that a rule may look at a column.

    Args:
        known: The columns of validation.
        tests: Whether it may be of test examples.
    """
    if column in known:
        return
    is_score = better_values(column) is not None and not is_of_validation(column)
    if not is_score:
        more = ", or a score of test examples" if tests else ""
        raise ConfigError(unknown(key, column, known) + more)
    if not tests:
        raise ConfigError(
            f"{key}: {column!r} is of test examples, which must not choose a round; choose {known[1]} or "
            f"{known[2]}"
        )


def _check_target(stop: StopConfig, goal: Objective) -> None:
    """Check that a share, such as an accuracy, has a target that it can reach."""
    if (
        stop.target is not None
        and stop.target > 1
        and is_share(goal.metric if stop.metric == AUTO else stop.metric)
    ):
        raise ConfigError(
            f"stop.target: {stop.target:g} is more than 1, and scores are fractions; write "
            f"{stop.target / 100:g} for {stop.target:g} %"
        )


def _check_validated(design: Design, key: str) -> None:
    """Check that a rule has validation examples, and may look at them. Args: key: its key and value."""
    if not design.evaluation.every:
        raise ConfigError(f"{key} needs scored rounds, and evaluation.every is 0; set it to 1")
    if not design.evaluation.validation:
        raise ConfigError(f"{key} needs validation examples; set evaluation.validation=true")
    if any(isinstance(stage, ChannelStage) and stage.noise for stage in design.channel):
        raise ConfigError(
            f"{key} looks at validation examples of clients without noise, so that the round it chooses "
            f"would tell about them, which epsilon does not count; leave it out, or channel"
        )


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
