"""What client-side code sees: one client, for the length of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rayfed.data.client_data import ClientData
from rayfed.models.backbone import Backbone
from rayfed.objective import Objective
from rayfed.tuning.base import export, held, load, trainable
from rayfed.types import RESIDUAL, Batch, Count, Decay, NonNegative, Params, Positive, Update


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Local optimisation, the same for every method.

    Attributes:
        optimizer: A new optimizer is made for every call: no moments survive a round.
        lr: Learning rate.
        momentum: For sgd.
        weight_decay: Coupled L2 for sgd and adam, decoupled for adamw.
        betas: For adam and adamw.
        eps: For adam and adamw.
        clip_norm: Largest global L2 norm of the gradients; none: no clipping.
        epochs: Passes over the training split in one call.
        batch_size: Training batch; the last partial batch is kept.
        eval_batch_size: Batch for scoring.
        local_steps: `full_epoch`, a number of steps, or `min_over_clients_plus_one`: full epochs, but
            everybody stops one step after the client with the fewest batches (FedRA's code).
        max_steps: No call takes more steps than this; none: no limit.
        batch_norm: Running statistics of trained BatchNorm layers: `average` sends and averages them like
            parameters, `local` keeps them with the client.
        cache_features: Features of a frozen network are computed once per process and image, not in every
            round: `auto`: wherever that is exact; on: refuse to run where it is not; off: never.
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

    def steps(self, num_examples: int) -> int:
        """Optimisation steps of one call on so many examples."""
        full = self.epochs * -(-num_examples // self.batch_size)
        steps = self.local_steps if isinstance(self.local_steps, int) else full
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def examples(self, num_examples: int) -> int:
        """Examples of all batches of these steps; the last batch of every pass may be smaller."""
        if not num_examples:
            return 0
        passes, rest = divmod(self.steps(num_examples), -(-num_examples // self.batch_size))
        return passes * num_examples + rest * self.batch_size


@dataclass
class Client:
    """One client during one call. Only `store` outlives the call.

    Attributes:
        id: Name of the client.
        model: The resident backbone; it holds what the server sent, cut to the blocks the client may hold.
        data: Splits by name: train, val, test.
        config: Local optimisation.
        rng: The stream of this (seed, tag, round, client); lives on the CPU.
        store: Private, survives rounds, travels with the client: tensors, numbers, strings and containers of
            them.
        cache: Of the process, for what depends on data and frozen weights only; may be empty at any time.
        transform: Changes the inputs of every batch; set by `Local.prepare`.
        objective: Loss and scores of the task.
        personal_split: Split on which `fit` scores the model this client would deploy; empty: not this time.
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
        """Shuffled: the training batches of one call, `num_steps` of them. Else: one pass in order."""
        n = self.data.size(split)
        if not shuffle:
            for rows in torch.arange(n).split(self.config.eval_batch_size) if n else ():
                yield self.batch(split, rows)
            return
        step, total = 0, self.num_steps(split) if n else 0
        while step < total:
            for rows in torch.randperm(n, generator=self.rng).split(self.config.batch_size)[: total - step]:
                step += 1
                yield self.batch(split, rows)

    def batch(self, split: str, positions: Tensor) -> Batch:
        """The examples at these positions of a split, transformed."""
        x, y = self.data.batch(split, positions)
        if self.transform is not None:
            return self.transform(x), y
        if self._keeps_features:
            self.model.note_frozen(x, self._frozen_features(split)[positions].to(x.device))
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

        Always in the batches of one pass in order: the last bits depend on the batch, so features computed in
        whatever batch came first would make results depend on where a client ran.
        """
        key = (self.id, split, self.model.active)
        if key not in self.cache:
            parts = torch.arange(self.data.size(split)).split(self.config.eval_batch_size)
            found = [self.model.frozen_features(self.data.batch(split, rows)[0]).cpu() for rows in parts]
            self.cache[key] = torch.cat(found)
        return self.cache[key]

    def num_steps(self, split: str = "train") -> int:
        """Optimisation steps of one call."""
        return self.config.steps(self.data.size(split))

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer may change: trainable parameters of the held blocks, by global name."""
        return trainable(self.model)

    def optimizer(self, lr: float | None = None) -> torch.optim.Optimizer:
        """A fresh optimizer over `trainable()`."""
        c, params = self.config, list(self.trainable().values())
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
        return self.config.batch_norm == "average"

    def params(self) -> Params:
        """Detached CPU copies of what this client holds and sends; residuals only come down."""
        held = export(self.model, buffers=self.buffers_travel)
        return {name: value for name, value in held.items() if not name.endswith(RESIDUAL)}

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Put values into the model.

        Raises:
            KeyError: A name the model does not have.
            ValueError: A wrong shape.
        """
        load(self.model, params)

    @torch.no_grad()
    def reference(self, params: Mapping[str, Tensor], x: Tensor, headless: bool = False) -> Any:
        """Output (headless: features) of the same model under other parameters, without changing it."""
        values = {self.model.module_name(name): value.to(x.device) for name, value in params.items()}
        # Not with tie_weights: it takes a module with two names (a block of a CLIP model) for two modules,
        # and leaves the other parameters in the second.
        return torch.func.functional_call(self.model, values, (x,), {"headless": headless}, tie_weights=False)

    def update(self, **parts: Any) -> Update:
        """Answer with the trained values of this client."""
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

    def held(self) -> dict[str, Tensor]:
        """The live tensors behind `params()`."""
        return held(self.model, buffers=self.buffers_travel)
