"""Learning tasks and their loss and metric: of images, masks, texts and language models.

Every data set is made for one task. Methods use the objective of the task as `client.objective` and therefore
work for all tasks. (`rayfed.federation.executor.Task` means something else: the work of a client in a call.)
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rayfed.errors import ConfigError, shown, unknown
from rayfed.user_objects import find, import_or_none, is_own

if TYPE_CHECKING:  # data and reports import this module without loading torch
    from torch import Tensor

IGNORED = -100
"""Target of a position that counts in no loss and no score, which torch's cross entropy leaves out."""

CLASSIFICATION = "classification"
SEGMENTATION = "segmentation"
NEXT_CHARACTER = "next_character"
REGRESSION = "regression"
MULTILABEL = "multilabel"
TEXT_CLASSIFICATION = "text_classification"
TEXT_REGRESSION = "text_regression"
LANGUAGE_MODELING = "language_modeling"
CLASSES = frozenset((CLASSIFICATION, TEXT_CLASSIFICATION))
"""Tasks whose labels are the classes that a new head tells apart."""

NUM = "num"
"""Name, among sums over a batch, of the number of units that loss and metrics are means over."""

EMPTY = 1e-5
"""Added to the denominator of Dice, which is 0 where both masks are empty; as in the released GRACE code."""


@dataclass(frozen=True)
class Objective(ABC):
    """A learning task: the layout of its examples, its loss and its metrics. By default inputs are images.

    Attributes:
        task: Name of the task in data sets, models and messages.
        metric: Name of the score shown in tables: a fraction, larger is better.
        examples: Word for the examples in tables.
        pixels: True: inputs are images, normalized with the statistics of the model. False: inputs are
            integer symbols.
        larger: Whether a larger score of the metric is better.
        percent: Whether the metric is a share, which is shown in percent.
        tokens: Whether inputs are texts of different lengths, made tokens by the tokenizer of the model.
        by_example: Whether the loss of a batch is the mean of `losses` over its examples.
        joins: Whether `losses_of_clients` is known.
    """

    task: ClassVar[str]
    metric: ClassVar[str]
    examples: ClassVar[str] = "images"
    pixels: ClassVar[bool] = True
    larger: ClassVar[bool] = True
    percent: ClassVar[bool] = True
    tokens: ClassVar[bool] = False
    by_example: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    @property
    def reads(self) -> str:
        """The task of the data, for which the model is built; a user's `Task` has a name besides."""
        return self.task

    @property
    def over_set(self) -> Mapping[str, Callable[[Tensor, Tensor], float]]:
        """Metrics that have no value for one example, by name: functions of all outputs and targets of a set.

        They may return NaN where a set does not define them. Those of a domain and of a run are over the
        examples of all its sets.
        """
        return {}

    @property
    def by_set(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """The loss and metrics of which `values` has none for each example, by name: functions of a set."""
        return {}

    @property
    def whole(self) -> frozenset[str]:
        """Names in `by_set` that are no means over examples: computed for a set at once, not in `sums`."""
        return frozenset()

    def layout(self, size: int) -> np.dtype[Any]:
        """Data type of a prepared example: `input`, and `target` where the target is more than one label.

        Args:
            size: Side of the model's input in pixels, or length of its window in symbols.
        """
        return np.dtype([("input", "u1", (size, size, 3))])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Training loss, mean over the units of the batch (`count`).

        Args:
            output: Output of the model, shape (B, ...).
            y: Targets, shape (B, ...).
        """
        return self.losses(output, y).mean()

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of each example, shape (B,), where `by_example` holds; arguments as of `loss`."""
        return self.values(output, y)["loss"]

    def losses_of_clients(self, output: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        """Loss of each of K clients whose B rows are parts of one batch, shape (K,): `loss` of its rows.

        Args:
            output: As of `loss`, for K B rows.
            y: As of `loss`.
            shares: Share of each row in a mean over the rows of its client, shape (K, B); 0: it has none.
        """
        return (self.losses(output, y).view_as(shares) * shares).sum(1)

    def count(self, y: Tensor) -> int | Tensor:
        """Number of units that the loss of a batch is a mean over: examples, or tokens of answers.

        Args:
            y: Targets, shape (B, ...).
        """
        return len(y)

    def scores(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """The `sums` of a batch as numbers, which waits for the device."""
        return {name: float(value) for name, value in self.sums(output, y).items()}

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums over the examples of a batch, by name: `loss`, the metric, and further scores to report.

        Where loss and metrics are means over something else than examples, `num` is the number of that.

        They are tensors without dimensions on the device of the output; `rayfed.devices.numbers` reads those
        of all batches at once. Arguments as of `loss`.
        """
        return {name: each.sum() for name, each in self.values(output, y).items()}

    def by_class(self, output: Tensor, y: Tensor) -> Tensor | None:
        """Numbers of right predictions, of predictions and of examples of each class, shape (3, C).

        None where only `sums` are reported.
        """
        return None

    @abstractmethod
    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The summands of `sums`, by name: one value for each example, shape (B,); arguments as of `loss`."""

    def check(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The loss and the metrics of each example, where there are such; raises where one is unusable."""
        return self.values(output, y)


@dataclass(frozen=True)
class Classification(Objective):
    """One class for each image. Loss: cross entropy; metric: accuracy."""

    task: ClassVar[str] = CLASSIFICATION
    metric: ClassVar[str] = "accuracy"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with logits of shape (B, C) and targets of shape (B,)."""
        return _cross_entropy(output, y)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output and targets as of `loss`."""
        return _cross_entropy(output, y, "none")

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output and targets as of `loss`; torch adds the losses up."""
        return {
            "loss": _cross_entropy(output, y, "sum"),
            self.metric: (output.argmax(-1) == y).sum().float(),
        }

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output and targets as of `loss`."""
        return {"loss": self.losses(output, y), self.metric: (output.argmax(-1) == y).float()}


@dataclass(frozen=True)
class Segmentation(Objective):
    """Segmentation: one class per pixel. Loss: mean of cross entropy and 1 - soft Dice; metric: Dice.

    As in the released code of GRACE (Zhang et al., MICCAI 2023), with two differences: both are means over
    examples, so that a score does not depend on the batches; and the metric leaves out the background, whose
    Dice is near 1. `dice_mean2` is the mean with the background.
    """

    task: ClassVar[str] = SEGMENTATION
    metric: ClassVar[str] = "dice"
    examples: ClassVar[str] = "slices"

    def layout(self, size: int) -> np.dtype[Any]:
        return np.dtype([("input", "u1", (size, size, 3)), ("target", "u1", (size, size))])

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output of shape (B, C, H, W) and targets (B, H, W), 0: background."""
        classes = output.shape[1]
        every = dice(_one_hot(output.argmax(1), classes), _one_hot(y, classes))
        return {
            "loss": self.losses(output, y),
            self.metric: every[:, 1:].mean(1),
            "dice_mean2": every.mean(1),
        }

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output and targets as of `values`."""
        by_pixel = _cross_entropy(output, y, "none").flatten(1).mean(1)
        overlap = dice(output.softmax(1), _one_hot(y, output.shape[1])).mean(1)
        return (by_pixel + 1 - overlap) / 2


@dataclass(frozen=True)
class NextCharacter(Classification):
    """Prediction of the character after a window of text; inputs and labels are positions in an alphabet."""

    task: ClassVar[str] = NEXT_CHARACTER
    examples: ClassVar[str] = "windows"
    pixels: ClassVar[bool] = False

    def layout(self, size: int) -> np.dtype[Any]:
        return np.dtype([("input", "u1", (size,))])


@dataclass(frozen=True)
class Regression(Objective):
    """Regression of numbers. Loss: mean squared error; metric: mean absolute error, as the targets."""

    task: ClassVar[str] = REGRESSION
    metric: ClassVar[str] = "mae"
    examples: ClassVar[str] = "examples"
    larger: ClassVar[bool] = False
    percent: ClassVar[bool] = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output and targets of shapes (B, ...) with as many numbers."""
        return self._difference(output, y).square().mean(1)

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output and targets as of `losses`; means over the numbers of an example."""
        difference = self._difference(output, y)
        return {"loss": difference.square().mean(1), self.metric: difference.abs().mean(1)}

    def _difference(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.reshape(y.shape) - y).reshape(len(y), -1)


@dataclass(frozen=True)
class Multilabel(Objective):
    """Several labels of each example, which are true or false.

    Loss: binary cross entropy, mean over the labels. Metric: area under the ROC curve (AUC), mean over the
    labels that are both true and false in a set; `label_accuracy` is the share of labels that are right.
    """

    task: ClassVar[str] = MULTILABEL
    metric: ClassVar[str] = "auc"
    examples: ClassVar[str] = "examples"

    @property
    def over_set(self) -> Mapping[str, Callable[[Tensor, Tensor], float]]:
        return {self.metric: auc}

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output and targets of shape (B, K)."""
        import torch.nn.functional as F

        return F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none").mean(1)

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output and targets as of `losses`."""
        accuracy = ((output > 0) == (y > 0)).float().mean(1)
        return {"loss": self.losses(output, y), "label_accuracy": accuracy}


def auc(output: Tensor, y: Tensor) -> float:
    """Area under the ROC curve, mean over the labels that are both true and false; NaN: there is none.

    Args:
        output: Scores, shape (N, K).
        y: Labels, 0 or 1, shape (N, K).
    """
    areas = []
    for score, label in zip(output.double().T, y.T > 0, strict=True):
        positive, negative = int(label.sum()), int((~label).sum())
        if positive and negative:
            areas.append(
                (float(_ranks(score)[label].sum()) - positive * (positive + 1) / 2) / (positive * negative)
            )
    return sum(areas) / len(areas) if areas else float("nan")


class MetricObject:
    """A metric of a set that is an object with `update(outputs, targets)`, `compute()` and `reset()`.

    It begins anew for each set, in a copy, so that nothing of one set counts for another.
    """

    def __init__(self, name: str, of: Any) -> None:
        """Args: name: its name, for messages. of: the object, which is never changed."""
        self.name, self.of = name, of

    @staticmethod
    def accepts(value: Any) -> bool:
        """Whether a value is such an object."""
        calls = ("update", "compute", "reset")
        return not isinstance(value, type) and all(callable(getattr(value, each, None)) for each in calls)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Its value for all examples of a set.

        Raises:
            ConfigError: It is no single number.
        """
        metric = copy.deepcopy(self.of)
        if hasattr(metric, "to"):
            metric = metric.to(outputs.device)
        metric.reset()
        metric.update(outputs, targets)
        value = metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"task.metrics[{self.name!r}]: compute() returned {shown(value)}, which is no single number; "
                f"average it, such as with average='macro'"
            ) from None

    def describe(self) -> str:
        """Its class and its settings, as text, which tell it from other metrics."""
        settings = {
            k: v for k, v in sorted(vars(self.of).items()) if isinstance(v, int | float | str | tuple)
        }
        return f"{type(self.of).__module__}.{type(self.of).__qualname__} {settings}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a user: a loss and metrics.

    Functions get the outputs of the network, shape (B, ...), and the targets, shape (B, ...), and return one
    number for each example, shape (B,). A loss may also return one for the batch. Where that is not the mean
    over its examples (`rayfed.engine.tried_loss`), the loss of a set is computed from all its examples.

    Attributes:
        loss: What training makes small.
        metrics: Metrics by name; the first is the one in tables and figures. A function has one number for
            each example. An object with `update`, `compute` and `reset`, such as a metric of torchmetrics, is
            one over all examples of a set, as of `over_set`; its `higher_is_better` counts.
        over_set: Metrics over all examples of a set, such as AUC, by name, which return one number; NaN: the
            set does not define it. Those of a domain and of a run are over the examples of all their clients.
            Without `metrics`, the first is the one in tables and figures.
        smaller: Names of metrics of which smaller scores are better.
        percent: Names of metrics that are shares, which are shown in percent.
        name: Name of the task in messages.
        first: Name of the metric in tables and figures.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    over_set: Mapping[str, Callable[[Tensor, Tensor], float]] = field(default_factory=dict)
    smaller: tuple[str, ...] = ()
    percent: tuple[str, ...] = ()
    name: str = "own_task"
    first: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        """Sort the metrics, and check the names.

        Raises:
            ConfigError: There is no metric, or a name in `smaller` or `percent` is that of none.
        """
        names = [*self.metrics, *self.over_set]
        objects = {name: each for name, each in self.metrics.items() if MetricObject.accepts(each)}
        falling = [name for name, each in objects.items() if getattr(each, "higher_is_better", None) is False]
        object.__setattr__(self, "first", names[0] if names else "")
        object.__setattr__(self, "metrics", {n: of for n, of in self.metrics.items() if n not in objects})
        wrapped = {name: MetricObject(name, each) for name, each in objects.items()}
        object.__setattr__(self, "over_set", {**wrapped, **self.over_set})
        object.__setattr__(self, "smaller", (*self.smaller, *(n for n in falling if n not in self.smaller)))
        if not names:
            raise ConfigError("task.metrics: a task needs a metric; give metrics={'mae': function}")
        for key in ("smaller", "percent"):
            for name in getattr(self, key):
                if name not in names:
                    raise ConfigError(unknown(f"task.{key}", name, names))


class OwnObjective(Objective):
    """The objective of a `Task`.

    Attributes:
        kinds: What is known of the loss and the metrics, by name, `loss` included: `row`: it has a number
            for each example, which does not depend on the others; `mean`: it is the mean of those of the
            examples; others are computed for all examples of a set at once.
        writes: Names of the functions that write into their arguments, and so get copies of these; None: it
            is not known yet, and each gets copies.
    """

    by_example: ClassVar[bool] = False  # the loss of a user may be a mean over the batch already
    joins: ClassVar[bool] = False
    _of: Task
    _texts: Objective | None
    kinds: Mapping[str, str]
    writes: frozenset[str] | None

    def __init__(
        self,
        task: Task,
        texts: Objective | None = None,
        kinds: Mapping[str, str] | None = None,
        writes: frozenset[str] | None = None,
    ) -> None:
        """Args: task: the loss and the metrics. texts: the task of texts without it. Others: see above."""
        metric = task.first
        of_texts = {"examples": texts.examples, "pixels": False, "tokens": True} if texts else {}
        own = {
            "_of": task,
            "_texts": texts,
            "kinds": dict(kinds or {}),
            "writes": writes,
            "task": task.name,
            "metric": metric,
            "examples": "examples",
            "larger": metric not in task.smaller,
            "percent": metric in task.percent,
        }
        vars(self).update(own | of_texts)
        register_metric(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnObjective, (self._of, self._texts, self.kinds, self.writes)

    @property
    def reads(self) -> str:
        return self._texts.task if self._texts else self.task

    def of_texts(self, texts: Objective) -> OwnObjective:
        """The same loss and metrics for texts. Args: texts: the task that the data have without them."""
        return OwnObjective(self._of, texts, self.kinds, self.writes)

    def with_known(self, kinds: Mapping[str, str], writes: frozenset[str]) -> OwnObjective:
        """The same, where this is known of the loss and the metrics."""
        return OwnObjective(self._of, self._texts, kinds, writes)

    @property
    def given(self) -> Task:
        """The loss and the metrics as the user gave them."""
        return self._of

    @cached_property
    def functions(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """The loss, as `loss`, and the metrics for each example; each leaves what it gets as it is."""
        named = {"loss": self._of.loss, **self._of.metrics}
        return {name: self._leaving(name, of) for name, of in named.items()}

    def _leaving(self, name: str, of: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
        """A function of the user that leaves outputs and targets as they are, for what is computed next."""
        if self.writes is not None and name not in self.writes:
            return of
        return lambda output, y: of(output.clone(), y.clone())

    @cached_property
    def by_set(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        return {name: of for name, of in self.functions.items() if self.kinds.get(name) != "row"}

    @property
    def whole(self) -> frozenset[str]:
        return frozenset(name for name in self.functions if self.kinds.get(name) not in ("row", "mean"))

    def __repr__(self) -> str:
        return f"OwnObjective({self._of!r})"

    @cached_property
    def over_set(self) -> Mapping[str, Callable[[Tensor, Tensor], float]]:
        return {name: self._leaving(name, of) for name, of in self._of.over_set.items()}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output and targets of the user's shapes."""
        return self.functions["loss"](output, y).mean()

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, without what is computed for a whole set; of the user's shapes."""
        sums = {name: each.sum() for name, each in self.values(output, y).items()}
        means = {name: of for name, of in self.by_set.items() if name not in self.whole}
        return sums | {name: of(output, y).float() * len(y) for name, of in means.items()}

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, of what has a number for each example.

        Raises:
            ConfigError: A function returned neither one number for each example nor one for each part of it.
        """
        known = {name: of for name, of in self.functions.items() if self.kinds.get(name) == "row"}
        return {name: _by_row(name, of(output, y), output, y) for name, of in known.items()}

    def check(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = {name: of(output, y) for name, of in self.functions.items()}
        whole = ("loss",) if found["loss"].ndim == 0 else ()
        return {name: _by_row(name, each, output, y) for name, each in found.items() if name not in whole}


def _by_row(name: str, found: Tensor, output: Tensor, y: Tensor) -> Tensor:
    """One number for each example, shape (B,), from what a function of a `Task` returned.

    Raises:
        ConfigError: It has another shape.
    """
    fits = found.ndim > 0 and len(found) == len(y)
    if not fits or (found.ndim > 1 and found.shape not in (output.shape, y.shape)):
        where = "task.loss" if name == "loss" else f"task.metrics[{name!r}]"
        raise ConfigError(
            f"{where} returned shape {tuple(found.shape)} for outputs of shape {tuple(output.shape)} "
            f"and targets of shape {tuple(y.shape)}; return one number for each example, shape ({len(y)},)"
        )
    return found.float().reshape(len(y), -1).mean(1)


@dataclass(frozen=True)
class TextClassification(Classification):
    """Classification of texts; inputs are tokens, shape (B, L), padded on the right (`rayfed.data.text`)."""

    task: ClassVar[str] = TEXT_CLASSIFICATION
    examples: ClassVar[str] = "texts"
    pixels: ClassVar[bool] = False
    tokens: ClassVar[bool] = True

    def layout(self, size: int) -> np.dtype[Any]:
        """Data type of the longest example. Args: size: its tokens."""
        return np.dtype([("input", "i4", (size,))])

    def by_class(self, output: Tensor, y: Tensor) -> Tensor | None:
        import torch
        import torch.nn.functional as F

        predicted = output.argmax(-1)
        masks, truth = (F.one_hot(labels, output.shape[-1]) for labels in (predicted, y))
        return torch.stack([(masks * truth).sum(0), masks.sum(0), truth.sum(0)]).double()


@dataclass(frozen=True)
class TextRegression(Regression):
    """Regression of a number that belongs to a text or to two, such as how near their meanings are.

    Loss: mean squared error. Metrics over all texts of a set: Pearson's and Spearman's correlation of outputs
    and targets, as those of STS-B in GLUE (Wang et al., 2019, section 3.2).
    """

    task: ClassVar[str] = TEXT_REGRESSION
    metric: ClassVar[str] = "pearson"
    examples: ClassVar[str] = "texts"
    pixels: ClassVar[bool] = False
    larger: ClassVar[bool] = True
    tokens: ClassVar[bool] = True

    @property
    def over_set(self) -> Mapping[str, Callable[[Tensor, Tensor], float]]:
        return {self.metric: pearson, "spearman": spearman}

    def layout(self, size: int) -> np.dtype[Any]:
        """Data type of the longest example. Args: size: its tokens."""
        return np.dtype([("input", "i4", (size,))])

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output of shape (B, 1) and targets of shape (B,)."""
        return {"loss": super().values(output, y)["loss"]}


def pearson(output: Tensor, y: Tensor) -> float:
    """Pearson's correlation of outputs and targets; NaN: one of them is constant, or there is one only.

    Args:
        output: Shape (N, 1) or (N,).
        y: Shape (N,).
    """
    a, b = (values.double().flatten() for values in (output, y))
    a, b = a - a.mean(), b - b.mean()
    below = float((a.square().sum() * b.square().sum()).sqrt())
    return float(a @ b) / below if below else float("nan")


def spearman(output: Tensor, y: Tensor) -> float:
    """Spearman's correlation: that of Pearson between the ranks; equal values have their mean rank.

    Args:
        output: Shape (N, 1) or (N,).
        y: Shape (N,).
    """
    return pearson(*(_ranks(values.flatten()) for values in (output, y)))


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value among all, from 1; of equal values the mean of theirs. Shape (N,), as `values`."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place]


@dataclass(frozen=True)
class LanguageModeling(TextClassification):
    """Prediction of the tokens of answers, each from those before it.

    Loss and metric are sums over the tokens of answers, divided by their number. They are the same for any
    division of a batch into parts, where a mean of means would not be. Targets have `IGNORED` elsewhere.
    """

    task: ClassVar[str] = LANGUAGE_MODELING
    metric: ClassVar[str] = "token_accuracy"
    by_example: ClassVar[bool] = False

    def by_class(self, output: Tensor, y: Tensor) -> Tensor | None:
        return None

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """As in `Objective`, with output (B, L, V) and targets (B, L); 0 without answers."""
        return _cross_entropy(output.flatten(0, 1), y.flatten(), "sum") / self.count(y).clamp(min=1)

    def losses_of_clients(self, output: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        """As in `Objective`, with output and targets as of `loss`; 0 for a client without answers."""
        by_token = _cross_entropy(output.flatten(0, 1), y.flatten(), "none").view(y.shape)
        counts = shares > 0
        sums = (by_token.sum(1).view_as(shares) * counts).sum(1)
        return sums / ((y != IGNORED).sum(1).view_as(shares) * counts).sum(1).clamp(min=1)

    def count(self, y: Tensor) -> Tensor:
        """Number of tokens of answers, a tensor without dimensions. Args: y: shape (B, L)."""
        return (y != IGNORED).sum()

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`, with output and targets as of `loss`; `num` is the number of tokens."""
        return {name: each.sum() for name, each in self.values(output, y).items()}

    def values(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """As in `Objective`: sums over the tokens of each example, with output and targets as of `loss`."""
        answers = y != IGNORED
        by_token = _cross_entropy(output.flatten(0, 1), y.flatten(), "none").view(y.shape)
        return {
            "loss": by_token.sum(1),
            self.metric: (output.argmax(-1) == y).sum(1).float(),
            NUM: answers.sum(1).float(),
        }


OBJECTIVES: Mapping[str, Objective] = {
    o.task: o
    for o in (
        *(Classification(), Segmentation(), NextCharacter(), Regression(), Multilabel()),
        *(TextClassification(), TextRegression(), LanguageModeling()),
    )
}


@dataclass(frozen=True)
class Metric:
    """A score of a task, and how it is shown.

    Attributes:
        larger: Whether a larger score is better.
        percent: Whether it is a share, which is shown in percent.
        pooled: Whether it is over all examples of a set (`Objective.over_set`): that of a run is no mean over
            its clients.
    """

    larger: bool = True
    percent: bool = True
    pooled: bool = False


BUILT_IN = frozenset(o.metric for o in OBJECTIVES.values())
"""Metrics of tasks that ship, whose direction is not a user's to say."""

METRICS = {o.metric: Metric(o.larger, o.percent, o.metric in o.over_set) for o in OBJECTIVES.values()}
"""The metrics of tables and figures by name; `register_metric` adds those of tasks of users."""


def register_metric(about: Objective | Mapping[str, Any]) -> None:
    """Let this process know the metric of a task of a user, or of one that a run folder describes.

    Args:
        about: The objective, or its attributes `metric`, `larger` and `percent`, and whether it is `pooled`.
    """
    own = score_facts(about) if isinstance(about, Objective) else about
    if (name := str(own["metric"])) not in BUILT_IN:
        METRICS[name] = Metric(bool(own["larger"]), bool(own["percent"]), bool(own.get("pooled")))


def score_facts(objective: Objective) -> dict[str, Any]:
    """Facts about the metric that a run writes, so that others can show it, for `register_metric`."""
    facts = {"metric": objective.metric, "larger": objective.larger, "percent": objective.percent}
    return {**facts, "pooled": objective.metric in objective.over_set}


def objective(task: str) -> Objective:
    """The objective of a task, by name, also as package.module:TASK.

    Raises:
        ConfigError: No task has this name, or what it names is no `Task`.
    """
    known = find(task)
    value = known.value if known is not None else import_or_none(task) if ":" in task else None
    if isinstance(value, Task):
        return OwnObjective(value)
    if value is not None or ":" in task:
        raise ConfigError(f"task: {task!r} is {shown(value)}, no rayfed.Task(loss=..., metrics={{...}})")
    if is_own(task):
        raise ConfigError(f"task: {task!r} was handed over in a notebook or a script; hand it over again")
    if task not in OBJECTIVES:
        raise ConfigError(unknown("task", task, OBJECTIVES))
    return OBJECTIVES[task]


def dice(a: Tensor, b: Tensor) -> Tensor:
    """Dice score 2 |A and B| / (|A| + |B|) of each example and class, shape (B, C).

    Args:
        a: Membership of each pixel in each class, 0 to 1, shape (B, C, ...).
        b: The other mask, of the same shape.
    """
    a = a.flatten(2)
    b = b.flatten(2)
    return 2 * (a * b).sum(2) / (a.sum(2) + b.sum(2) + EMPTY)


def _cross_entropy(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(output, y, reduction=reduction)


def _one_hot(y: Tensor, classes: int) -> Tensor:
    import torch.nn.functional as F

    return F.one_hot(y, classes).movedim(-1, 1).float()
