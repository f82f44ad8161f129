"""The client object that client-side code receives: model, data and private store during one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rayfed.data.client_data import ClientData
from rayfed.models.backbone import Backbone
from rayfed.objective import Objective
from rayfed.tuning.base import export, load, trainable
from rayfed.types import RESIDUAL, Batch, Count, Decay, NonNegative, Params, Positive, Update


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of local optimisation, shared by all methods.

    Attributes:
        optimizer: Kind of optimizer. A new one is made for every call, so momentum and Adam moments start at
            zero in every round.
        lr: Learning rate.
        momentum: Momentum of sgd; adam and adamw ignore it.
        weight_decay: L2 penalty added to the gradient for sgd and adam; decoupled weight decay for adamw.
        betas: Decay rates of the two moments of adam and adamw.
        eps: Term added to the denominator of adam and adamw.
        clip_norm: Gradients are scaled so that their global L2 norm is at most this; none: no clipping.
        epochs: Passes over the training split in one call.
        batch_size: Examples in a training batch; a smaller last batch of a pass is used too.
        eval_batch_size: Examples in a batch when a model is evaluated.
        local_steps: Optimisation steps of one call: `full_epoch` (`epochs` passes), a number, or
            `min_over_clients_plus_one`, as in the released code of FedRA: full epochs, but every client stops
            one step after the client with the fewest batches.
        max_steps: Upper limit on the steps of one call; none: no limit.
        batch_norm: What happens to the running statistics of trained BatchNorm layers: `average` sends and
            averages them like parameters, `local` keeps them at the client.
        cache_features: Whether the features of a frozen network are computed once per process and image
            instead of in every round. `auto`: wherever the result is exactly the same; on: the run is refused
            where it is not; off: never.
        group: Number of clients whose rows share each forward and backward pass of their training
            (`rayfed.federation.group`). `auto`: up to 16 where batches are so small that this pays, else 1.
            Rounding depends on it, and on nothing else about how clients are placed.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.02
    momentum: NonNegative = 0.9
    weight_decay: NonNegative = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    clip_norm: Positive | None = None
    epochs: Count = 1
    batch_size: Count = 32
    eval_batch_size: Count = 256
    local_steps: Literal["full_epoch", "min_over_clients_plus_one"] | Count = "full_epoch"
    max_steps: Count | None = None
    batch_norm: Literal["average", "local"] = "average"
    cache_features: Literal["auto"] | bool = "auto"
    group: Literal["auto"] | Count = "auto"

    def steps(self, num_examples: int) -> int:
        """Number of optimisation steps of one call on a split of `num_examples` examples."""
        full = self.epochs * -(-num_examples // self.batch_size)
        steps = self.local_steps if isinstance(self.local_steps, int) else full
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def examples(self, num_examples: int) -> int:
        """Number of examples, with repetition, in all batches of `steps(num_examples)` steps.

        The last batch of a pass may be smaller than `batch_size`.
        """
        if not num_examples:
            return 0
        passes, rest = divmod(self.steps(num_examples), -(-num_examples // self.batch_size))
        return passes * num_examples + rest * self.batch_size


@dataclass
class Client:
    """One client during one call. Only `store` is kept after the call.

    Attributes:
        id: Id of the client.
        model: The backbone of this process, loaded with the values the server sent and cut to the blocks
            that the client may hold.
        data: The client's examples, by split: train, val, test.
        config: Settings of local optimisation.
        rng: CPU generator seeded by (seed, tag, round, client), so that results do not depend on where or
            when the client runs.
        store: Private state of the client, kept from round to round: tensors, numbers, strings, and
            containers of them.
        cache: Tensors kept by the process, which depend on data and frozen weights only; it may be empty at
            the beginning of any call.
        transform: Function applied to the inputs of every batch; set in `Local.prepare`.
        objective: Loss and scores of the task.
        personal_split: Split on which `fit` scores the model that the client would deploy; empty: that model
            is not scored in this call.
        measured: What `measure` was told in this call, by name, in the order of the calls.
    """

    id: str
    model: Backbone
    data: ClientData
    config: TrainConfig
    rng: torch.Generator
    store: dict[str, Any] = field(default_factory=dict)
    personal_split: str = ""
    cache: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    transform: Callable[[Tensor], Tensor] | None = None
    objective: Objective = field(default_factory=Objective)
    measured: dict[str, list[float | Tensor]] = field(default_factory=dict, repr=False)

    def batches(self, split: str = "train", shuffle: bool = True) -> Iterator[Batch]:
        """Batches of a split.

        Args:
            split: Name of the split.
            shuffle: True: `num_steps(split)` random training batches. False: one pass in order, in batches of
                `eval_batch_size`.
        """
        n = self.data.size(split)
        if not shuffle:
            for rows in torch.arange(n).split(self.config.eval_batch_size) if n else ():
                yield self.batch(split, rows)
            return
        step = 0
        total = self.num_steps(split) if n else 0
        while step < total:
            for rows in torch.randperm(n, generator=self.rng).split(self.config.batch_size)[: total - step]:
                step += 1
                yield self.batch(split, rows)

    def batch(self, split: str, positions: Tensor) -> Batch:
        """Inputs and targets at these positions of a split, with `transform` applied to the inputs."""
        x, y = self.data.batch(split, positions)
        if self.transform is not None:
            return self.transform(x), y
        if self._keeps_features:
            self.model.remember_frozen_features(x, self._frozen_features(split)[positions].to(x.device))
        return x, y

    @property
    def _keeps_features(self) -> bool:
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
        if key not in self.cache:
            parts = torch.arange(self.data.size(split)).split(self.config.eval_batch_size)
            features = [self.model.frozen_features(self.data.batch(split, rows)[0]).cpu() for rows in parts]
            self.cache[key] = torch.cat(features)
        return self.cache[key]

    def num_steps(self, split: str = "train") -> int:
        """Number of optimisation steps of one call on a split."""
        return self.config.steps(self.data.size(split))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the blocks this client holds, by global name."""
        return trainable(self.model)

    def optimizer(self, lr: float | None = None) -> torch.optim.Optimizer:
        """A new optimizer over `trainable()`, with learning rate `lr` (None: `config.lr`)."""
        c = self.config
        params = list(self.trainable().values())
        lr = c.lr if lr is None else lr
        if c.optimizer == "sgd":
            return torch.optim.SGD(params, lr=lr, momentum=c.momentum, weight_decay=c.weight_decay)
        kind = torch.optim.Adam if c.optimizer == "adam" else torch.optim.AdamW
        return kind(params, lr=lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay)

    def clip_gradients(self) -> None:
        """Scale all gradients so that their global L2 norm is at most `train.clip_norm`."""
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trainable().values(), self.config.clip_norm)

    @property
    def buffers_travel(self) -> bool:
        """Whether BatchNorm statistics are sent to the server and averaged."""
        return self.config.batch_norm == "average"

    def params(self) -> Params:
        """Detached CPU copies of the values this client sends.

        These are the trained tensors of its blocks, and BatchNorm statistics where `batch_norm` is `average`.
        LoRA residuals (`rayfed.federation.lora_mean`) are received, but never sent.
        """
        held = export(self.model, buffers=self.buffers_travel)
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
        """The mean of everything `measure` was told, by name."""
        return {name: sum(map(float, values)) / len(values) for name, values in self.measured.items()}
