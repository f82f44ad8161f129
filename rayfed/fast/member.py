"""The model as one client of a group sees it: its own trained values, and passes shared by the group."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from rayfed.data.examples import ClientData, Mapped, OnDevice
from rayfed.devices import HOST
from rayfed.errors import RayFedError
from rayfed.fast.loss_requests import Loss
from rayfed.fast.optimizers import joint_optimizer
from rayfed.fast.steps import ask_for_steps
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.passes import Passes
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor
from rayfed.objective import Objective
from rayfed.types import RESIDUAL, Batch, Params


class NotShareableError(RayFedError):
    """A client of a group used its model in a way that only works for a client that is played alone."""


TEXTS = 2
"""Dimensions of a batch of texts: rows and tokens."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass that a client asks for.

    Attributes:
        kind: Name of the method of `Backbone`.
        x: The client's rows.
        options: Keyword arguments of the method.
        values: Values by global name that replace the client's own in this pass.
        known: Frozen features of the rows, if they are known.
        state: What all clients of one pass have in common: train or evaluation mode, gradients or not,
            active blocks, which may differ (`unequal_blocks`), and whether the tuning is left out.
        targets: Targets of the rows, of which the loss is wanted in place of the output; None: the output.
    """

    kind: str
    x: Tensor
    options: Mapping[str, Any]
    values: Mapping[str, Tensor]
    known: Tensor | None
    state: tuple[Any, ...]
    targets: Tensor | None = None

    def key(self, may_differ: bool) -> tuple[Any, ...]:
        """Passes with the same key are computed together.

        Args:
            may_differ: Whether clients that hold different blocks can share a pass.
        """
        named = tuple(sorted(self.options.items()))
        texts = self.x.ndim == TEXTS and self.x.dtype == torch.long  # of any length
        shape = (() if texts else self.x.shape[1:], self.x.dtype, self.x.requires_grad)
        goal = () if self.targets is None else (self.targets.shape[1:], self.targets.dtype)
        state = _without_blocks(self.state) if may_differ else self.state
        return self.kind, named, frozenset(self.values), self.known is None, state, shape, goal


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches that a client asks for.

    Attributes:
        examples: The examples of all clients, on a device.
        normalize: As of `ClientData`.
        places: Places of the examples of each batch, as of `OnDevice.positions`.
        features: A table with a row for each example of the split, as of `ClientData.batches_with`.
        rows: Rows of this table of each batch, on the CPU.
    """

    examples: OnDevice
    normalize: Callable[[Tensor], Tensor]
    places: Sequence[Tensor]
    features: Tensor | None = None
    rows: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class AllSteps:
    """A whole training that a client asks for; the answer is whether it was done.

    Attributes:
        optimizer: Takes a step after each batch.
        examples: The examples of all clients.
        normalize: As of `ClientData`.
        batches: Places of the examples of each batch, as of `examples.positions`.
        objective: The objective of the task, which joins clients.
        rank: As of `Client`.
        keeps: Whether the state of the optimizer is read afterwards.
        state: As of `Pass`.
    """

    optimizer: torch.optim.Optimizer
    examples: OnDevice | Mapped
    normalize: Callable[[Tensor], Tensor]
    batches: Sequence[Tensor]
    objective: Objective
    rank: int | None
    keeps: bool
    state: tuple[Any, ...]

    def is_like(self, other: AllSteps) -> bool:
        """Whether two clients can train in one loop, if they hold the same blocks or may hold others."""
        is_same = _without_blocks(self.state) == _without_blocks(other.state)
        return self.examples is other.examples and self.objective == other.objective and is_same


def _without_blocks(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state of a `Pass` but for its active blocks."""
    training, gradients, _, untuned = state
    return training, gradients, untuned


@dataclass(frozen=True)
class MemberData(ClientData):
    """The data of a client of a group on a device, whose batches are collected with those of the others.

    Attributes:
        ask: As of `MemberModel`.
    """

    ask: Callable[[Any], Any] = field(kw_only=True)

    def batches(self, split: str, order: Tensor | None, size: int) -> Iterator[Batch]:
        """As in `ClientData`; an order that is on the device is used for this client only."""
        if not self._joins(order):
            yield from super().batches(split, order, size)
            return
        for x, y, _ in self._joint(None, split, order, size):
            yield x, y

    def batches_with(
        self, features: Tensor, split: str, order: Tensor | None, size: int
    ) -> Iterator[tuple[Batch, Tensor]]:
        """As in `ClientData`."""
        if not self._joins(order):
            yield from super().batches_with(features, split, order, size)
            return
        for x, y, own in self._joint(features, split, order, size):
            yield (x, y), own

    def _joins(self, order: Tensor | None) -> TypeGuard[Tensor]:
        """Whether batches in this order are collected with those of the others."""
        return (
            isinstance(self.examples, OnDevice)
            and order is not None
            and order.device == HOST
            and len(order) > 0
        )

    def _joint(self, features: Tensor | None, split: str, order: Tensor, size: int) -> Iterator[Any]:
        """Inputs, targets and rows of the table of each batch."""
        examples: Any = self.examples
        places = examples.positions(self.client, split, order).split(size)
        rows = order.split(size)
        batch = self.ask(Batches(examples, self.normalize, places, features, rows))
        for number in range(len(places)):
            x, y, own = batch(number)
            yield x, y if self.relabel is None or split != "train" else self.relabel(y), own


PLAIN = frozenset(
    (
        *("label", "width", "num_classes", "task", "size", "mean", "std", "num_blocks", "predict"),
        *("net_is_frozen", "has_frozen_features", "text_is_live", "module_name"),
    )
)
"""Attributes of a Backbone that are the same for all clients."""

PARTS = frozenset(("net", "head", "text", "adapter", "exits", "gc_net", "stack"))
"""Modules of a Backbone; a client gets a copy that holds its own values, and computes with it alone."""


class MemberModel:
    """Stands for a `Backbone` in the code of one client of a group.

    Attributes:
        own: The client's trained tensors by global name: parameters, and buffers such as LoRA residuals.
        active: Blocks that the client holds.
        untuned: As of `Backbone`.
        training: Whether the client has put its model into train mode.
    """

    def __init__(
        self,
        model: Backbone,
        own: Params,
        active: tuple[int, ...],
        ask: Callable[[Any], Any],
    ) -> None:
        """Make the model of one client.

        Args:
            model: The model that all clients of the group share.
            own: The client's values of the trained tensors, by global name.
            active: Blocks that the client holds.
            ask: Waits for the answer to a request (`rayfed.fast.group`).
        """
        self.own = own
        self.active = active
        self.untuned = False
        self.training = True
        self._model = model
        self._ask = ask
        self._known: deque[tuple[Tensor, tuple[int, ...], Tensor]] = deque(maxlen=2)
        self._places: dict[str, NamedTensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("own", "active", "untuned", "training") and not name.startswith("_"):
            raise NotShareableError(f"the client sets the attribute {name!r} of its model")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in PLAIN:
            return getattr(self._model, name)
        if name in PARTS:
            part = getattr(self._model, name)
            return part if part is None else self._with_own_values(part)
        raise NotShareableError(f"the client reads the attribute {name!r} of its model")

    def __call__(self, x: Tensor, headless: bool = False) -> Any:
        return self.forward(x, headless)

    def forward(self, x: Tensor, headless: bool = False) -> Any:
        """As `Backbone.forward`."""
        if self.text_is_live and not headless:
            return self.classify(self.features(x))
        return self.ask_for("forward", x, headless=headless)

    def features(self, x: Tensor) -> Tensor:
        """As `Backbone.features`."""
        return self.encode(x)[0]

    def encode(self, x: Tensor, customize: bool = True) -> tuple[Tensor, Tensor]:
        """As `Backbone.encode`."""
        features, h = self.ask_for("encode", x, customize=customize)
        return features, h

    def classify(self, features: Tensor) -> Tensor:
        """As `Backbone.classify`; class features that train are computed for this client only."""
        if self.untuned or not self.text_is_live:
            logits: Tensor = self.ask_for("classify", features)
            return logits
        scores: Tensor = self.head(features, self.class_features(features))
        return scores

    def class_features(self, images: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """As `Backbone.class_features`."""
        if self.text_is_live:
            features: Tensor = self.text.features(self._model.head.weight, images, context)
            return features
        return self._model.class_features()

    def output_with(self, params: Mapping[str, Tensor], x: Tensor, headless: bool = False) -> Any:
        """As `Backbone.output_with`; without gradients of the given values."""
        unknown = sorted(params.keys() - self.own.keys())
        if unknown or self.text_is_live:
            raise NotShareableError(f"a pass with other values of {unknown or 'the text side'}")
        if torch.is_grad_enabled() and any(value.requires_grad for value in params.values()):
            raise NotShareableError("a pass with gradients of the values that are given for it")
        return self.ask_for("forward", x, dict(params), headless=headless)

    def frozen_features(self, x: Tensor) -> Tensor:
        """As `Backbone.frozen_features`; for this client alone, because a later group may use them too."""
        known = self.remembered_features(x)
        if known is None:
            known = self._ask(Pass("frozen_features", x, {}, {}, None, (False, False, self.active, False)))
            self.remember_frozen_features(x, known)
        return known

    def remember_frozen_features(self, x: Tensor, features: Tensor) -> None:
        """As `Backbone.remember_frozen_features`."""
        self._known.append((x, self.active, features.detach()))

    def tensors(self) -> Mapping[str, NamedTensor]:
        """As `Backbone.tensors`, with the client's own values."""
        entries = self._model.tensors()
        if not self._places:
            self._places = {name: _place(entries[name], value) for name, value in self.own.items()}
        return {**entries, **self._places}

    def trained(self, buffers: bool) -> dict[str, Tensor]:
        """Those of the client's own tensors that are trained, by global name; not copies.

        Args:
            buffers: Whether LoRA residuals are included.
        """
        return {
            name: value
            for name, value in self.own.items()
            if value.requires_grad or (buffers and name.endswith(RESIDUAL))
        }

    def train(self, mode: bool = True) -> MemberModel:
        """As `Backbone.train`, for this client only."""
        self.training = mode
        return self

    def eval(self) -> MemberModel:
        """Evaluation mode, for this client only."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for value in self.own.values():
            if value.grad is not None:
                value.grad = None if set_to_none else value.grad.zero_()

    def ask_for(
        self,
        kind: str,
        x: Tensor,
        values: Params | None = None,
        targets: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The answer to a request for a pass, whose parts are those of `Pass`."""
        known = self.remembered_features(x)
        return self._ask(Pass(kind, x, options, values or {}, known, self.state, targets))

    @property
    def state(self) -> tuple[Any, ...]:
        """As of `Pass`."""
        return (self.training, torch.is_grad_enabled(), self.active, self.untuned)

    def remembered_features(self, x: Tensor) -> Tensor | None:
        """As `Backbone.remembered_features`."""
        found = (kept for batch, blocks, kept in self._known if batch is x and blocks == self.active)
        return next(found, None)

    def _with_own_values(self, part: nn.Module) -> nn.Module:
        """A copy of a module that shares everything but the trained tensors, which are the client's own."""
        places = {
            (id(e.module), e.leaf): self.own[n] for n, e in self._model.tensors().items() if n in self.own
        }
        trained = {id(module) for module in self._model._modes()[1]} if self.training else set()
        return _copy_with(part, places, trained)


@dataclass(frozen=True, eq=False)
class MemberPasses(Passes):
    """Computes for a client of a group: on a device, together with the others.

    On the CPU, where starting an operation takes little time, every client computes its own losses and steps,
    unless it trains a whole network.

    Attributes:
        ask: Waits for the answer to a request (`rayfed.fast.group`).
        unit: A 1 on the device, with which backward passes begin; None: the model is on the CPU.
        is_whole: Everything of the network is trained, so that a loop on the CPU is for all clients, too.
    """

    ask: Callable[[Any], Any]
    unit: Tensor | None = None
    is_whole: bool = False

    def optimizer(
        self, config: TrainConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
    ) -> torch.optim.Optimizer:
        return joint_optimizer(config, parameters, lr)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of an optimizer be taken with those of the other clients."""
        if self.unit is not None:
            ask_for_steps(optimizer, self.ask)

    def join_batches(self, data: ClientData) -> ClientData:
        """The data of the client, whose batches are collected with those of the others."""
        if self.unit is None or not isinstance(data.examples, OnDevice):
            return data
        held = (data.client, data.examples, data.splits, data.normalize, data.relabel)
        return MemberData(*held, ask=self.ask)

    def loss(self, model: Any, objective: Objective, batch: Batch) -> Tensor:
        x, y = batch
        alone = self.unit is None or model.text_is_live or x.requires_grad or not objective.by_example
        if alone:
            return super().loss(model, objective, batch)
        found: Tensor = model.ask_for("forward", x, targets=y, objective=objective)
        return found.squeeze(0)

    def backward(self, loss: Tensor) -> None:
        """Add gradients, beginning with `unit` as the others do, where it is like the loss."""
        unit = self.unit
        is_like = unit is not None and (unit.dtype, unit.shape) == (loss.dtype, loss.shape)
        loss.backward(unit if is_like else None)

    def descend(self, loss: Callable[[Batch], Tensor], batch: Batch) -> None:
        """Add the gradients of a loss, with those of the other clients where its code can be theirs, too."""
        wanted = self._pure_loss(loss, batch)
        if wanted is None or not self.ask(wanted):
            super().descend(loss, batch)

    def _pure_loss(self, loss: Callable[[Batch], Tensor], batch: Batch) -> Loss | None:
        """The loss as a request; None: this client computes it."""
        method = getattr(loss, "func", None)
        function: Any = getattr(method, "__func__", None)
        local: Any = getattr(method, "__self__", None)
        x, y = batch
        fits = self.unit is not None and not self.is_whole and isinstance(y, Tensor) and not x.requires_grad
        if not (fits and isinstance(local, Local) and getattr(function, "is_pure", False)):
            return None
        client, sent = loss.args  # type: ignore[attr-defined]
        joins = client.objective.joins and not client.model.text_is_live
        return Loss(function, local, client, sent, batch) if joins else None

    def steps(
        self,
        batches: Iterable[Batch],
        step: Callable[[Batch, torch.optim.Optimizer], None],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Take the usual steps in one loop with the other clients where all can, else those of the client."""
        client = _usual_client(step)
        if client is None or not self._train_together(client, optimizer):
            super().steps(batches, step, optimizer)

    def _train_together(self, client: Client, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the training was done; otherwise nothing was changed, and this client has to do it."""
        config = client.config
        changed = client.augment is not None or client.transform is not None or client.keeps_features
        cut = config.micro_batch is not None or config.clip_norm is not None
        apart = self.unit is None and not self.is_whole
        if apart or changed or cut or not client.num_steps() or not client.data.size("train"):
            return False
        before = client.rng.get_state()
        orders = list(client.orders())
        batches = [batch for order in orders for batch in order.split(config.batch_size)]
        if not self._ask_for_all_steps(client, optimizer, batches):
            client.rng.set_state(before)
            return False
        if not client.trained:  # later steps are for the personal model that is scored
            client.steps += len(batches)
            client.rows += sum(map(len, orders))
            if client.objective.tokens:
                client.read += [torch.tensor(client.data.tokens("train", order)) for order in orders]
        return True

    def _ask_for_all_steps(
        self, client: Client, optimizer: torch.optim.Optimizer, orders: Sequence[Tensor]
    ) -> bool:
        """Take a step after each batch in one loop with the other clients; False: nothing was done.

        Args:
            optimizer: The optimizer, which has taken no step yet.
            orders: Positions in the training split of the examples of each batch, on the CPU.
        """
        model: Any = client.model
        data, objective = client.data, client.objective
        examples = data.examples
        if model.text_is_live or not objective.joins or data.relabel is not None:
            return False
        if not isinstance(examples, OnDevice | Mapped):
            return False
        whole = examples.positions(data.client, "train", torch.cat(list(orders)))
        batches = whole.split([len(order) for order in orders])
        keeps = client.config.keep_optimizer and not client.trained
        request = AllSteps(
            optimizer, examples, data.normalize, batches, objective, client.rank, keeps, model.state
        )
        done: bool = self.ask(request)
        return done


def _usual_client(step: Callable[..., None]) -> Client | None:
    """The client of a step that is the usual one, of `Local` and with its loss; None: it is another one."""
    method = getattr(step, "func", None)
    local: Any = getattr(method, "__self__", None)
    usual = getattr(method, "__func__", None) is Local.step
    if not (usual and type(local).loss is Local.loss):
        return None
    client: Client = step.args[0]  # type: ignore[attr-defined]
    return client


def _place(entry: NamedTensor, value: Tensor) -> NamedTensor:
    """A place whose tensor is the client's own; `dataclasses.replace` takes several times as long."""
    held: Any = SimpleNamespace(_parameters={entry.leaf: value}, _buffers={entry.leaf: value})
    return NamedTensor(held, entry.leaf, entry.block, entry.is_buffer, entry.path)


def _copy_with(
    module: nn.Module, places: Mapping[tuple[int, str], Tensor], trained: Collection[int]
) -> nn.Module:
    """A copy with the tensors of `places` (by id of the module); modules in `trained` are in train mode."""
    clone = copy.copy(module)
    state = vars(clone)
    state["training"] = id(module) in trained
    for kind in ("_parameters", "_buffers"):
        mine = {leaf: places.get((id(module), leaf), value) for leaf, value in state[kind].items()}
        state[kind] = mine
    state["_modules"] = {
        name: None if child is None else _copy_with(child, places, trained)
        for name, child in state["_modules"].items()
    }
    return clone
