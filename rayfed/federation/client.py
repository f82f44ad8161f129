"""The client object that client-side code receives: model, data and private store during one call.

Its gradients are computed in one piece or added up over parts; the state of its optimizers is carried from
visit to visit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rayfed.data.examples import ClientData
from rayfed.data.text import PAD
from rayfed.devices import move, numbers, total
from rayfed.errors import ConfigError
from rayfed.federation.passes import PLAIN, Passes
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.objective import IGNORED, Classification, Objective
from rayfed.tuning.base import copies, load, trainable
from rayfed.types import RESIDUAL, Batch, Params, Update, beyond_rank


def backward(
    model: Backbone,
    loss: Callable[[Batch], Tensor],
    batch: Batch,
    micro_batch: int | None,
    count: Callable[[Tensor], int | Tensor] = len,
    passes: Passes = PLAIN,
) -> None:
    """Add the gradients of a loss to those of the parameters.

    Parts are weighted by their share of what the loss is a mean over, so that for a loss that is such a mean
    (plus terms that depend on the parameters only) the sum is the gradient of the whole batch, except for
    rounding.

    Args:
        model: The model, whose remembered frozen features are passed on to the parts.
        loss: Loss of a batch, a scalar with gradient.
        batch: Inputs, shape (B, ...), and targets.
        micro_batch: Largest number of rows of a part; None: the whole batch.
        count: Number of units of some targets that the loss is a mean over, such as rows or tokens.
        passes: Adds the gradients of a loss.
    """
    if micro_batch is None or len(batch[1]) <= micro_batch:
        passes.descend(loss, batch)
        return
    num = count(batch[1])
    for part in _parts(model, batch, micro_batch):
        own = count(part[1])
        share = own / num.clamp(min=1) if isinstance(num, Tensor) else own / num
        passes.backward(loss(part) * share)


def drop_beyond_rank(parameters: Mapping[str, nn.Parameter], rank: int) -> None:
    """Set gradients of what a client of this rank does not hold to zero.

    Args:
        parameters: Trained parameters, by global name.
        rank: Rank of the client's LoRA adapters.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            for part in beyond_rank(name, parameter.grad, rank):
                part.zero_()


def _parts(model: Backbone, batch: Batch, size: int) -> Iterator[Batch]:
    x, y = batch
    known = model.remembered_features(x)
    pieces = None if known is None else known.split(size)
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True)):
        if pieces is not None:
            model.remember_frozen_features(inputs, pieces[i])
        yield inputs, targets


States: TypeAlias = dict[str, dict[str, Tensor]]
"""State of an optimizer: by global name of a parameter, its tensors such as `momentum_buffer`, `exp_avg`."""


def states_of(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> States:
    """Copies of an optimizer's state, by global name; parameters without state are left out.

    Args:
        names: Its parameters by global name.
    """
    return {
        name: {key: value.detach().clone() for key, value in kept.items() if isinstance(value, Tensor)}
        for name, parameter in names.items()
        if (kept := optimizer.state.get(parameter))
    }


def resume(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], states: States) -> None:
    """Give a new optimizer the state of an earlier one; learning rates stay those of the new one.

    Args:
        optimizer: An optimizer without state.
        names: Its parameters by global name.
        states: What `states_of` returned; names that the optimizer does not have are ignored.
    """
    known = {id(parameter): states[name] for name, parameter in names.items() if name in states}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = optimizer.state_dict()
    whole["state"] = {
        position: {key: value.clone() for key, value in known[id(parameter)].items()}
        for position, parameter in enumerate(listed)
        if id(parameter) in known
    }
    optimizer.load_state_dict(whole)  # moves each tensor to the device of its parameter


OPTIMIZERS = "_optimizers"  # reserved name in a client's store: states by number of the optimizer


@dataclass
class Client:
    """One client during one call. Only `store` is kept after the call.

    Attributes:
        id: Id of the client.
        model: The backbone of this process, loaded with the values the server sent and cut to the blocks
            that the client may hold.
        data: The client's examples, by split: train, val, test.
        config: Settings of local optimization.
        rng: CPU generator seeded by (seed, tag, round, client), so that results do not depend on where or
            when the client runs.
        store: Private state of the client, kept from round to round: tensors, numbers, strings, and
            containers of them. During a call its tensors are on the client's device, as are those of the
            message; only tensors without dimensions come on the CPU, which operations accept.
        cache: Tensors kept by the process on its device, which depend on data and frozen weights only; it may
            be empty at the beginning of any call.
        transform: Function applied to the inputs of every batch; set in `Local.prepare`.
        augment: Changes the inputs of a training batch at random, given a seed; None: they stay as they are.
        objective: Loss and scores of the task.
        deployed_on: Splits on which the model that the client would deploy is scored in this call, by the
            beginning of the names of the scores; empty: it is not scored.
        measured: What `measure` was told in this call, by name, in the order of the calls.
        lr_factor: Factor of `train.schedule` in this round, which `config.lr` contains already; for learning
            rates that a method chooses itself.
        rank: Rank of the client's LoRA adapters, of which it holds the first rows of A and columns of B;
            None: that of the tuning. What lies beyond it is zero and has no gradient.
        stays: Global names of the tensors that stay at this client (`Local.stays`).
        trained: Whether the training of this call has ended (`end_training`).
        steps, rows: Training batches that were drawn, and examples in them.
        read: For texts, the numbers of tokens and of learned tokens of each of these batches.
        passes: How the client computes losses, gradients and steps.
    """

    id: str
    model: Backbone
    data: ClientData
    config: TrainConfig
    rng: torch.Generator
    store: dict[str, Any] = field(default_factory=dict)
    deployed_on: Mapping[str, str] = field(default_factory=dict)
    cache: MutableMapping[Any, Tensor] = field(default_factory=dict, repr=False)
    transform: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, int], Tensor] | None = None
    objective: Objective = field(default_factory=Classification)
    measured: dict[str, list[float | Tensor]] = field(default_factory=dict, repr=False)
    lr_factor: float = 1.0
    rank: int | None = None
    stays: frozenset[str] = frozenset()
    trained: bool = False
    steps: int = 0
    rows: int = 0
    read: list[Tensor] = field(default_factory=list, repr=False)
    passes: Passes = PLAIN
    _drew: bool = False
    _derived: bool = False
    _optimizers: list[torch.optim.Optimizer] = field(default_factory=list, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the model, of the batches, and of the tensors that are received."""
        return self.data.device

    def to_device(self, value: Tensor) -> Tensor:
        """A tensor made on the CPU, such as random numbers of `rng`, on the device of the client."""
        return move(value, self.device)

    def batches(self, split: str = "train", shuffle: bool = True) -> Iterator[Batch]:
        """Batches of a split.

        Args:
            shuffle: True: `num_steps(split)` random training batches. False: one pass in order, in batches of
                `eval_batch_size`.
        """
        n = self.data.size(split)
        if not shuffle:
            if n:
                yield from self._pass(split, None, self.config.eval_batch_size)
            return
        size = self.config.batch_size
        for order in self.orders(split):
            self._drew = True
            for x, y in self._pass(split, order, size, augmented=self.augment is not None):
                if not self.trained:  # later batches are for the personal model that is scored
                    self.steps += 1
                    self.rows += len(y)
                    if self.objective.tokens:
                        learned = (y != IGNORED).sum() if y.ndim > 1 else y.new_zeros((), dtype=torch.int64)
                        self.read.append(torch.stack([(x != PAD).sum(), learned]))
                yield x, y

    def orders(self, split: str = "train") -> Iterator[Tensor]:
        """Positions of the examples of each pass over a split, in the order of random training batches."""
        n = self.data.size(split)
        step = 0
        total = self.num_steps(split) if n else 0
        whole_pass = self.config.batches(n)
        while step < total:
            most = min(whole_pass, total - step)
            step += most
            yield torch.randperm(n, generator=self.rng)[: most * self.config.batch_size]

    def batch(self, split: str, positions: Tensor) -> Batch:
        """Inputs and targets at these positions of a split, with `transform` applied to the inputs.

        Args:
            positions: int64, shape (B,), on the CPU.
        """
        return next(self._pass(split, positions, len(positions)))

    def _pass(self, split: str, order: Tensor | None, size: int, augmented: bool = False) -> Iterator[Batch]:
        """Batches of a split.

        Args:
            order: Positions of the examples; None: all, in order.
            size: Examples in a batch.
            augmented: Whether `augment` changes the inputs first, with a seed drawn from `rng`. The features
                of such batches are never those of the cache.
        """
        if augmented or self.transform is not None or not self.keeps_features:
            for x, y in self.data.batches(split, order, size):
                if augmented and self.augment is not None:
                    x = self.augment(x, int(torch.randint(2**62, (), generator=self.rng)))
                yield (x if self.transform is None else self.transform(x)), y
            return
        features = self._frozen_features(split)
        for (x, y), own in self.data.batches_with(features, split, order, size):
            self.model.remember_frozen_features(x, own)
            yield x, y

    @property
    def keeps_features(self) -> bool:
        """Whether the frozen features of whole splits are computed once, and kept."""
        model = self.model
        return model.gc_net is not None or (
            self.config.cache_features is not False and model.has_frozen_features
        )

    @torch.no_grad()
    def _frozen_features(self, split: str) -> Tensor:
        """Frozen features of a whole split, shape (n, width), computed once per process.

        They are computed in the fixed batches of one ordered pass. Floating-point rounding depends on the
        batch, so features computed in arbitrary batches would make results depend on where a client ran.
        """
        key = (self.id, split, self.model.active)
        found = self.cache.get(key)
        if found is None:
            parts = self.data.batches(split, None, self.config.eval_batch_size)
            found = torch.cat([self.model.frozen_features(x) for x, _ in parts])
            self.cache[key] = found  # which may keep it or not
        return found

    def num_steps(self, split: str = "train") -> int:
        """Number of optimization steps of one call on a split."""
        return self.config.steps(self.data.size(split))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the blocks this client holds, by global name."""
        return trainable(self.model)

    def optimizer(self, lr: float | None = None) -> torch.optim.Optimizer:
        """An optimizer over `trainable()`, with learning rate `lr` (None: `config.lr`), after `keep`."""
        return self.keep(self.passes.optimizer(self.config, self.trainable().values(), lr))

    def keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Prepare an optimizer for this client.

        With `train.keep_optimizer` it continues with its state at the end of the last visit. Where the client
        has its own rank, its steps change nothing beyond that rank.

        Methods that make their own optimizers call this for each of them, always in the same order: states
        are kept by the number of the optimizer in a visit, and by tensor.

        Args:
            optimizer: An optimizer over parameters of `trainable()`, without state.
        """
        if self.rank is not None:
            optimizer.register_step_pre_hook(lambda *_: self._drop_beyond_rank())
        self.passes.use(optimizer)
        if self.config.keep_optimizer and not self.trained:
            states = self.store.get(OPTIMIZERS, {}).get(str(len(self._optimizers)), {})
            resume(optimizer, self.trainable(), states)
            self._optimizers.append(optimizer)
        return optimizer

    def end_training(self) -> None:
        """Keep the state of the optimizers in the store, if the config says so.

        Optimizers made after this, such as for the personal model that is scored, begin without state.

        Raises:
            ConfigError: `train.micro_batch` is set, and the training did not use `backward`.
        """
        if self.config.micro_batch is not None and self._drew and not self._derived:
            raise ConfigError(
                f"train.micro_batch: {self.config.micro_batch} has no effect: the client half of this "
                f"method does not call client.backward; leave it out"
            )
        self.trained = True
        live = self.trainable() if self._optimizers else {}
        kept: dict[str, States] = self.store.setdefault(OPTIMIZERS, {}) if live else {}
        for number, optimizer in enumerate(self._optimizers):
            kept[str(number)] = {**kept.get(str(number), {}), **states_of(optimizer, live)}

    def backward(self, loss: Callable[[Batch], Tensor], batch: Batch) -> None:
        """Add the gradients of the loss of a batch, in parts of `train.micro_batch` rows where that is set.

        Args:
            loss: Loss of a batch, a scalar with gradient.
            batch: Inputs and targets.
        """
        self._derived = True
        parts = self.config.micro_batch
        backward(self.model, loss, batch, parts, self.objective.count, self.passes)

    def clip_gradients(self) -> None:
        """Scale all gradients so that their global L2 norm is at most `train.clip_norm`."""
        self._drop_beyond_rank()
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trainable().values(), self.config.clip_norm)

    def _drop_beyond_rank(self) -> None:
        if self.rank is not None:
            drop_beyond_rank(self.trainable(), self.rank)

    @property
    def buffers_travel(self) -> bool:
        """Whether BatchNorm statistics are sent to the server and averaged."""
        return self.config.batch_norm == "average"

    def params(self) -> Params:
        """Detached copies of the values this client sends, on its device.

        These are the trained tensors of its blocks, and BatchNorm statistics where `batch_norm` is `average`.
        LoRA residuals (`rayfed.federation.aggregation`) are received, but never sent.
        """
        held = copies(self.model, buffers=self.buffers_travel)
        return {name: value for name, value in held.items() if not name.endswith(RESIDUAL)}

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy values into the model.

        Raises:
            KeyError: The model has no tensor of that name.
            ValueError: A value has another shape than the model's tensor.
        """
        load(self.model, params)

    @torch.no_grad()
    def reference(self, params: Mapping[str, Tensor], x: Tensor, headless: bool = False) -> Any:
        """Output of the model with other parameter values, which does not change the model.

        Args:
            params: Values by global name; a name that is absent keeps the model's present value.
            x: Inputs, shape (B, ...).
            headless: Return the features before the head, shape (B, width), instead of the output.
        """
        return self.model.output_with(params, x, headless)

    def update(self, **parts: Any) -> Update:
        """The answer to the server, with the trained values of this client.

        Args:
            parts: Fields of `Update` except client and num_examples; `params` replaces the trained values.
        """
        params = parts.pop("params", None)
        params = self.params() if params is None else params
        return Update(client=self.id, params=params, num_examples=self.data.size("train"), **parts)

    def counted(self) -> dict[str, Any]:
        """Counts of the training batches so far, as fields of `Update`; reads tensors, all at once."""
        counts: dict[str, Any] = {"steps": self.steps, "rows": self.rows}
        if self.read:
            tokens, learned = torch.stack(self.read).sum(0).tolist()
            counts |= {"tokens": tokens, "learned": learned}
        return counts

    def measure(self, **scalars: float | Tensor) -> None:
        """Add scalars to the metrics of this client's answer; what `Cohort.measure` is for a round.

        A name that is measured several times, such as once per batch, is reported as the mean of its values.
        The server finds it in `Update.metrics`, and it is written to the run's table of clients.

        Args:
            scalars: Numbers, or tensors of one element; a tensor is read only when the call ends.
        """
        for name, value in scalars.items():
            kept = value.detach() if isinstance(value, Tensor) else value
            self.measured.setdefault(name, []).append(kept)

    def metrics(self) -> dict[str, float]:
        """The mean of everything `measure` was told, by name; tensors are read here, all at once."""
        read = iter(numbers([value for values in self.measured.values() for value in values]))
        return {
            name: total(next(read) for _ in values) / len(values) for name, values in self.measured.items()
        }
