"""Runs calls of clients in one process; all executors use it, so that placement changes no result."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfed.data.augment_config import AugmentConfig
from rayfed.data.augmentation import Augmentation
from rayfed.data.client_data import ClientData, Normalizer, Splits
from rayfed.data.shards import open_dataset
from rayfed.errors import ClientError, NonFiniteClientError, RayFedError
from rayfed.federation.client import Client
from rayfed.federation.executor import Call
from rayfed.federation.group import Group
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.config import ModelConfig
from rayfed.models.sharing import attach, checksum, dump, skeleton
from rayfed.models.trunk import use_checkpointing, use_compile
from rayfed.objective import Objective, symbols
from rayfed.seeds import derive, seeded
from rayfed.tuning.base import Tuning, apply_tuning, export, load, train_mode
from rayfed.types import RESIDUAL, Broadcast, Params, Update

log = logging.getLogger(__name__)

Weights = Mapping[str, npt.NDArray[Any]]
BUFFERS = "_buffers"  # reserved name in a client's store: its own BatchNorm statistics


@dataclass(frozen=True, kw_only=True)
class World:
    """Input of a process that runs clients: small, picklable, sent once to each process.

    Attributes:
        seed: Seed of the experiment.
        model: Config of the backbone.
        tuning: Tuning scheme: which of its tensors train.
        num_classes: Number of outputs of the head.
        classes: Names of the classes, for models that use them.
        train: Config of local optimisation.
        shard: The Arrow file of the examples.
        splits: Row numbers by client (or evaluation set) and split.
        objective: Loss and scores of the task.
        augment: Random changes of training images; None: no changes.
        personal_every: Score personal models in every n-th round and in the last one; 0: never.
        rounds: Number of planned rounds.
        threads: torch threads of a process; equal in all processes, because it affects float sums.
        deterministic: Refuse nondeterministic kernels.
    """

    seed: int
    model: ModelConfig
    tuning: Tuning
    num_classes: int
    train: TrainConfig
    shard: Path
    splits: Mapping[str, Splits]
    classes: tuple[str, ...] = ()
    objective: Objective = field(default_factory=Objective)
    augment: AugmentConfig | None = None
    personal_every: int = 0
    rounds: int = 1
    threads: int = 1
    deterministic: bool = False

    def build(self) -> Backbone:
        """The tuned model with its initial values."""
        model = build_backbone(self.model, self.classes or self.num_classes, self.seed)
        return apply_tuning(model, self.tuning, self.seed)

    def skeleton(self) -> Backbone:
        """The same model without values, for `attach`."""
        return skeleton(
            lambda: apply_tuning(
                build_backbone(self.model, self.num_classes, self.seed), self.tuning, self.seed
            )
        )

    def weights(self) -> Weights:
        """All tensors of the initial model, to be shared between processes."""
        return dump(self.build())

    def scores_personal(self, round: int) -> bool:
        """Whether clients score their personal models in this round."""
        every = self.personal_every
        return bool(every) and ((round + 1) % every == 0 or round + 1 == self.rounds)


class Worker:
    """Holds one model and runs any client with it.

    Before each call, the tensors that the call before may have changed are reset. A frozen backbone is built
    once and never copied.
    """

    def __init__(self, world: World, weights: Weights, device: str = "cpu") -> None:
        torch.set_num_threads(world.threads)
        if world.deterministic:
            torch.use_deterministic_algorithms(True)
        self._world = world
        self._device = device
        model = world.skeleton()
        attach(model, weights)
        self._model: Backbone = model.to(device)
        adjust_trunk(self._model, world.train, device)
        self._all_blocks = model.active
        self._start = export(self._model, buffers=True)
        statistics = self._start.keys() - export(self._model, buffers=False).keys()
        self._float_buffers = {name for name in statistics if not name.endswith(RESIDUAL)}
        dataset = open_dataset(world.shard)
        self._images = dataset.images
        self._targets = np.asarray(dataset.targets)
        self._normalize = Normalizer(self._model.mean, self._model.std) if world.objective.pixels else symbols
        form = self._model.size, self._model.mean, self._model.std
        self._augment = Augmentation.of(world.augment, *form) if world.augment else None
        self.cache: dict[Any, torch.Tensor] = {}

    def start_params(self) -> Params:
        """The tensors that are sent and trained, with their initial values."""
        buffers = self._world.train.batch_norm == "average"
        return {n: v for n, v in self._start.items() if buffers or n not in self._float_buffers}

    def checksum(self) -> str:
        """Digest of the frozen weights: they must never change."""
        return checksum(self._model)

    def call(self, call: Call, store: Mapping[str, Any]) -> tuple[Update, dict[str, Any]]:
        """Run one call of a client; changes nothing but the returned values.

        Args:
            call: The client, its task and the message to it.
            store: The private store of the client before the call.

        Returns:
            Its update, and its store after the call.

        Raises:
            ClientError: The task failed, or its update has a tensor of a wrong shape or that is not finite.
        """
        world = self._world
        sent = call.sent
        with seeded(derive(world.seed, call.tag, sent.round, call.client)) as rng:
            try:
                self._load(sent, store)
                client = self._client(call, self._model, dict(store), rng)
                update = self._answer(call, client)
            except RayFedError:
                raise
            except Exception as err:
                kind = NonFiniteClientError if isinstance(err, FloatingPointError) else ClientError
                cause = f"{type(err).__name__}: {err}"
                raise kind(call.client, sent.round, call.tag, cause, traceback.format_exc()) from err
            self._keep_buffers(client)
            return update, client.store

    def call_group(
        self, calls: Sequence[Call], stores: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Update, dict[str, Any]]] | None:
        """Run calls of several clients, which share their passes (`rayfed.federation.group`).

        Args:
            calls: The calls, all of one exchange.
            stores: The private store of each client before its call.

        Returns:
            As `call` for each of them; None if anything failed, because then each call has to be run alone,
            which tells whose fault it is.
        """
        seed = self._world.seed
        seeds = [derive(seed, call.tag, call.sent.round, call.client) for call in calls]
        try:
            values = [self._values(call.sent, store) for call, store in zip(calls, stores, strict=True)]
            active = [self._all_blocks if c.sent.blocks is None else c.sent.blocks for c in calls]
            group = Group(self._model, values, active, seeds)
            parts = zip(calls, group.models, stores, group.streams, strict=True)
            clients = [self._client(c, model, dict(store), own.own) for c, model, store, own in parts]
            pairs = zip(calls, clients, strict=True)
            updates = group.run([partial(self._answer, call, client) for call, client in pairs])
        except Exception as err:
            log.info(
                "%s clients from %s on are run one by one: %s",
                len(calls),
                calls[0].client,
                err.__cause__ or err,
            )
            return None
        return [(update, client.store) for update, client in zip(updates, clients, strict=True)]

    def _answer(self, call: Call, client: Client) -> Update:
        """Run the task of a call, and check its answer."""
        update = call.task(client, call.sent)
        update = replace(update, metrics={**update.metrics, **client.metrics()})
        self._check_shapes(update)
        check_finite(update)
        return update

    def _values(self, sent: Broadcast, store: Mapping[str, Any]) -> Params:
        """Values of all tensors that calls may change, at the start of a call."""
        values = {**store.get(BUFFERS, {}), **{n: v for n, v in sent.params.items() if sent.holds(n)}}
        return {n: v for n, v in self._start.items() if n not in values} | values

    def _load(self, sent: Broadcast, store: Mapping[str, Any]) -> None:
        """Reset the model to the values with which a call starts."""
        model = self._model
        model.active = self._all_blocks if sent.blocks is None else sent.blocks
        load(model, self._values(sent, store))
        model.untuned = False
        model.zero_grad(set_to_none=True)
        train_mode(model)

    def _client(self, call: Call, model: Any, store: dict[str, Any], rng: torch.Generator) -> Client:
        world = self._world
        data = ClientData(
            self._images, self._targets, world.splits[call.client], self._normalize, self._device
        )
        personal = "test" if world.scores_personal(call.sent.round) else ""
        rate = world.train.rate(call.sent.round, world.rounds)
        return Client(
            call.client,
            model,
            data,
            replace(world.train, lr=rate),
            rng,
            store,
            personal,
            self.cache,
            augment=self._augment,
            lr_factor=rate / world.train.lr,
            objective=world.objective,
        )

    def _check_shapes(self, update: Update) -> None:
        """Raise ValueError if an update has a tensor that the model does not have, or of another shape."""
        for name, value in update.params.items():
            wanted = self._start.get(name)
            if wanted is None:
                raise ValueError(f"it answered with {name!r}, which is not a trained tensor of this model")
            if value.shape != wanted.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}")

    def _keep_buffers(self, client: Client) -> None:
        if self._float_buffers and not client.buffers_travel:
            held = export(self._model, buffers=True)
            client.store[BUFFERS] = {n: held[n] for n in sorted(self._float_buffers & held.keys())}


def adjust_trunk(model: Backbone, train: TrainConfig, device: str = "cpu") -> None:
    """Switch on the checkpointing and the compilation of the network that the config asks for.

    Raises:
        ConfigError: The network or the machine does not support it.
    """
    if train.checkpointing:
        use_checkpointing(model)
    if train.compile:
        use_compile(model, device)


def check_finite(update: Update) -> None:
    """Raise FloatingPointError if an update holds NaN or infinity; names the first such tensor."""
    values = [v for v in update.params.values() if v.is_floating_point()]
    if values and not torch.isfinite(torch.nn.utils.get_total_norm(values, norm_type=float("inf"))):
        bad = next(n for n, v in update.params.items() if not torch.isfinite(v).all())
        raise FloatingPointError(f"{bad} is not finite after the call; a smaller train.lr may help")
