"""Tries, before a run, whether the loss and the metrics of a user look at one example at a time.

What does not is computed for all examples of a test set at once, and its gradient for all of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.client_facts import Indices, Splits
from rayfed.data.examples import ClientData, choose
from rayfed.data.partition.partition import Partition
from rayfed.data.shards import Dataset, open_dataset
from rayfed.devices import HOST
from rayfed.engine.built_once import ModelFacts
from rayfed.errors import ConfigError, one_line, place_of, shown
from rayfed.executors.worker import ClientContext, converter
from rayfed.models.backbone import Backbone
from rayfed.models.deep_copy import deep_copy
from rayfed.objective import Objective, OwnObjective, Task
from rayfed.seeds import derive, use_seed

TRIED = 16
"""Examples whose outputs show what a loss computes."""

MOST_NUMBERS = 20_000_000
"""Largest number of numbers in these outputs, such as of language models; there are two examples at least."""


def tried_outputs(context: ClientContext, partition: Partition, model: Backbone) -> tuple[Tensor, Tensor]:
    """Outputs of the network for some training examples of all clients, and their targets.

    Args:
        context: Has the examples.
        model: A copy of the network, which its passes may change.

    Returns:
        Outputs, shape (B, ...), and targets, shape (B, ...), of at most `TRIED` examples.
    """
    model.eval()
    with torch.no_grad(), use_seed(derive(context.seed, "tried")):
        x, y = some_batch(context, partition, model, 2)
        output = model.predict(model(x))
        more = min(TRIED, MOST_NUMBERS * len(output) // max(output.numel(), 1))
        if more > len(y):
            x, y = some_batch(context, partition, model, more)
            output = model.predict(model(x))
    return output.clone(), y


def some_batch(
    context: ClientContext, partition: Partition, model: Backbone, number: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this many training examples of all clients, as clients get them.

    Args:
        context: Has the examples.
        number: Number of examples; there may be fewer.
    """
    dataset = open_dataset(context.shard)
    rows = _training_rows(context.splits, partition)
    splits = {"": {"train": rows[:: max(1, len(rows) // number)][:number]}}
    convert = converter(dataset, context.objective.pixels, model, HOST)
    examples = choose(dataset.images, dataset.targets, splits, HOST, False, 0)
    data = ClientData("", examples, splits[""], convert)
    return next(data.batches("train", None, number))


MOST_LOOKED_AT = 100
"""Clients of a virtual population whose training examples are looked at before a run."""


def _training_rows(splits: Mapping[str, Splits], partition: Partition) -> Indices:
    """Rows of the training examples of all clients, ascending."""
    if partition.drawn is not None:
        names = islice(partition.drawn.names, MOST_LOOKED_AT)
        return np.unique(np.concatenate([splits[name]["train"] for name in names]))
    return np.unique(np.concatenate([part.train for part in partition.listed]))


def known_goal(
    context: ClientContext, model: ModelFacts, dataset: Dataset, partition: Partition
) -> Objective:
    """The task, with what was tried of the loss and the metrics of a user.

    Raises:
        ConfigError: A score needs more outputs at once than can be kept, or a function has a state.
    """
    goal = context.objective
    if model.tried is None or not isinstance(goal, OwnObjective):
        return goal
    targets = _some_targets(context, dataset, partition)
    writes = check_functions(goal.given, *model.tried, targets)
    goal = goal.with_known(kinds_of(goal, *model.tried, targets), writes)
    check_outputs(goal, model.tried[0], _scored_examples(partition))
    return goal


def _scored_examples(partition: Partition) -> int:
    """Largest number of test examples whose outputs are kept at once for a metric over all of them."""
    if partition.drawn is not None:
        return sum(map(len, partition.domain_tests().values()))
    return sum(len(part.test) for part in partition.clients)


MOST_TARGETS = 100_000
"""Training examples among which targets are looked for with which a loss is tried."""


def _some_targets(context: ClientContext, dataset: Dataset, partition: Partition) -> Tensor:
    """Targets of training examples, each different one first, as clients get them; shape (N, ...)."""
    rows = _training_rows(context.splits, partition)
    rows = rows[:: -(-len(rows) // MOST_TARGETS)]
    targets = np.asarray(dataset.targets)
    if targets.ndim != 1 or len(targets) <= rows.max():  # such as those of language models
        return torch.empty(0)
    own = targets[rows]
    _, first = np.unique(own, return_index=True)
    found = torch.from_numpy(np.concatenate([own[np.sort(first)], own]))
    return found if found.is_floating_point() else found.long()


MOST = 48
"""Rows of a batch that is tried."""

TOLERANCE = 1e-4
"""Largest difference of two values that count as equal, as a share of the larger one; rounding is 100 times
smaller."""

Function = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def kinds_of(goal: OwnObjective, output: Tensor, y: Tensor, targets: Tensor) -> dict[str, str]:
    """Kinds of the loss and the metrics of a user, by name (`OwnObjective.kinds`).

    Functions are tried with the outputs of the network for the first examples, and with outputs that differ
    from these: a head that is zero gives all examples the same loss, so that many functions look alike.

    Args:
        goal: The loss and the metrics. They are copied: those with a state keep theirs.
        output: Outputs of the network for some examples, shape (B, ...).
        y: Their targets, shape (B, ...).
        targets: Targets of other examples, shape (N, ...), which are tried too where each is one number;
            all classes should be there, as each may have another weight.
    """
    with use_seed(0):
        tried = list(_draws(output, y, targets))
        return {name: _kind(_copied(of), tried) for name, of in goal.functions.items()}


MOST_BYTES = 4e9
"""Largest size of outputs that are kept for scores of all examples of test sets together."""


def check_outputs(goal: Objective, output: Tensor, examples: int) -> None:
    """Check that outputs for all test examples can be kept, where a score needs them together.

    Args:
        output: Outputs for some examples.
        examples: Number of test examples.

    Raises:
        ConfigError: They are too large.
    """
    size = output[:1].numel() * 4 * examples
    if size > MOST_BYTES and (names := sorted({*goal.over_set, *goal.whole})):
        raise ConfigError(
            f"task: {', '.join(names)} needs the outputs for all {examples} test examples at once, "
            f"{size / 1e9:.1f} GB; return one number for each example, or set data.limit"
        )


def check_functions(task: Task, output: Tensor, y: Tensor, targets: Tensor) -> frozenset[str]:
    """Check that the functions of a user hold nothing that a call changes, or that should be trained.

    Each is called with some outputs, and then with the same ones again.

    Args:
        task: The loss and the metrics. They are copied: those with a state keep theirs.
        output: As of `kinds_of`.
        y: As of `kinds_of`.
        targets: As of `kinds_of`.

    Returns:
        Names of those that write into the outputs or the targets that they get; `loss` is that of the loss.

    Raises:
        ConfigError: One returns something else the second time, or has own parameters.
    """
    named: dict[str, Any] = {"loss": task.loss, **task.metrics, **task.over_set}
    with use_seed(0):
        tried = list(_draws(output, y, targets))
    writes = set()
    for name, of in named.items():
        own, found = _copied(of), []
        where = "task.loss" if name == "loss" else f"task: the metric {name!r}"
        for _ in range(2):
            with use_seed(0):
                for each in tried:
                    value, wrote, trains = _call(own, name == "loss", *each)
                    found.append(value)
                    writes |= {name} if wrote else set()
                    if trains:
                        raise ConfigError(
                            f"{where} has parameters of its own, which no optimizer of a client trains; make "
                            "them a part of the network, or freeze them with requires_grad_(False)"
                        )
        if name in task.over_set:
            _check_number(where, found)
        first, again = found[: len(tried)], found[len(tried) :]
        if not all(_same(one, other) for one, other in zip(first, again, strict=True)):
            raise ConfigError(
                f"{where} returns something else when it is called again with the same outputs, so that a "
                "score depends on who was scored before; let it depend on outputs and targets alone"
            )
    return frozenset(writes)


def _check_number(where: str, found: list[Any]) -> None:
    """Check that a metric over a set returns a number. Args: where: its name. found: what it returned.

    Raises:
        ConfigError: It returns something else, or fails for all outputs with which it was tried.
    """
    if all(isinstance(value, Exception) for value in found):
        what = f"{type(found[0]).__name__}: {one_line(found[0])}{place_of(found[0])}"
        raise ConfigError(f"{where} failed for {MOST} examples: {what}")
    for value in found:
        try:
            float("nan") if isinstance(value, Exception) else float(value)
        except (TypeError, ValueError, RuntimeError) as err:
            raise ConfigError(
                f"{where} returned {shown(value)}; return one number for all examples, or NaN where they "
                "define none"
            ) from err


def _call(of: Function, trains: bool, output: Tensor, y: Tensor) -> tuple[Any, bool, bool]:
    """The value of a function, whether it wrote into what it got, and whether other tensors would train.

    Where it fails, its exception takes the place of a value.

    Args:
        of: The function.
        trains: Its value is what training makes small.
        output: Outputs, shape (B, ...).
        y: Targets, shape (B, ...).
    """
    with torch.enable_grad():
        start = output.detach().clone().requires_grad_(trains)
        outputs, targets = start.clone(), y.clone()
        before = outputs._version, targets._version
        try:
            value = of(outputs, targets)
        except Exception as err:  # such as of outputs that are no shares; the first pass has shown others
            return err, False, False
        wrote = before != (outputs._version, targets._version)
        if not isinstance(value, Tensor):
            return value, wrote, False
        leaves = _leaves(value) if trains else []
        return value.detach().clone(), wrote, any(leaf is not start for leaf in leaves)


def _leaves(value: Tensor) -> list[Tensor]:
    """The tensors for which a backward pass from a value would compute gradients."""
    todo, seen, leaves = [value.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        todo += [other for other, _ in node.next_functions]
    return leaves


def _same(one: Any, other: Any) -> bool:
    """Whether two values that a function returned are equal but for rounding; NaN equals NaN."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other or (one != one and other != other))
    return one.shape == other.shape and bool(
        torch.isclose(one.float(), other.float(), rtol=TOLERANCE, equal_nan=True).all()
    )


def _copied(of: Any) -> Any:
    with suppress(Exception):  # some objects cannot be copied
        return deep_copy(of)
    return of


def _draws(output: Tensor, y: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and targets with which functions are tried."""
    output, y = output[:MOST].float(), y[:MOST]
    if y.ndim == 1 and len(targets):
        y = torch.cat([y, targets[: MOST - len(y)]])
    output = output[torch.arange(len(y)) % len(output)]
    yield output, y
    size = output.flatten(1).std(0).mean().nan_to_num() + 1
    for _ in range(2):
        yield output + size * torch.randn_like(output), y
        yield output * (0.5 + 0.5 * torch.rand_like(output)), y  # shares and positive numbers stay such


def _kind(of: Function, tried: list[tuple[Tensor, Tensor]]) -> str:
    """`row`, `mean` or `set`, by what is the same in all draws for which the function has a value."""
    found = {kind for output, y in tried if (kind := _kind_of_draw(of, output, y))}
    return found.pop() if len(found) == 1 else "set"


def _kind_of_draw(of: Function, output: Tensor, y: Tensor) -> str:
    """`row`, `mean` or `set`; empty: the function has no finite value here."""
    try:
        whole = of(output, y).float()  # a copy of what it gets, as `OwnObjective.functions` are
    except Exception:  # such as of outputs that are no shares; the first pass has shown the usual ones
        return ""
    if not bool(torch.isfinite(whole).all()):
        return ""
    kind = "mean" if whole.ndim == 0 else "row"
    for size in {1, 3, math.ceil(len(y) / 2)}:
        try:
            parts = [of(o, t).float() for o, t in zip(output.split(size), y.split(size), strict=True)]
        except Exception:  # it needs several rows
            return "set"
        if any(part.ndim != whole.ndim for part in parts):
            return "set"
        if kind == "row":
            again, same = torch.cat(parts), whole
        else:
            weights = torch.tensor([len(t) / len(y) for t in y.split(size)])
            again, same = (torch.stack(parts) * weights).sum(), whole
        if again.shape != same.shape or not _equal(again, same):
            return "set"
    return kind


def _equal(one: Tensor, other: Tensor) -> bool:
    scale = torch.maximum(one.abs(), other.abs()).max()
    return bool(((one - other).abs() <= TOLERANCE * scale + 1e-12).all())
