"""Runs client calls in one process. Both executors use it, so placement cannot change what a call does."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfed.data.client_data import ClientData, Normalizer, Splits
from rayfed.data.shards import open_dataset
from rayfed.errors import ClientError, NonFiniteClientError, RayFedError
from rayfed.federation.client import Client, TrainConfig
from rayfed.federation.executor import Call
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.config import ModelConfig
from rayfed.models.sharing import attach, checksum, dump, skeleton
from rayfed.objective import Objective, symbols
from rayfed.seeds import derive, seeded
from rayfed.tuning.base import Tuning, apply_tuning, export, load, train_mode
from rayfed.types import RESIDUAL, Params, Update

Weights = Mapping[str, npt.NDArray[Any]]
BUFFERS = "_buffers"  # reserved name in a client's store: its own BatchNorm statistics


@dataclass(frozen=True, kw_only=True)
class World:
    """All a process needs to play any client: small, picklable, sent once per process.

    Attributes:
        seed: Seed of the experiment.
        model: Which backbone.
        tuning: Which of its tensors train.
        num_classes: Width of the head.
        classes: Names of the classes, where the model may want to read them.
        train: Local optimisation.
        shard: The Arrow file of the examples.
        splits: Row numbers by client (or evaluation set) and split.
        objective: Loss and scores of the task.
        personal_every: Score personal models in every such round; 0: never.
        rounds: Planned rounds; personal models are scored in the last one too.
        threads: torch threads of a process; the same everywhere, because it changes float sums.
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
    personal_every: int = 0
    rounds: int = 1
    threads: int = 1
    deterministic: bool = False

    def build(self) -> Backbone:
        """The tuned model with its start values."""
        model = build_backbone(self.model, self.classes or self.num_classes, self.seed)
        return apply_tuning(model, self.tuning, self.seed)

    def skeleton(self) -> Backbone:
        """The same model without values, for `attach`."""
        bare = ModelConfig(**{**vars(self.model), "pretrained": False})
        return skeleton(
            lambda: apply_tuning(build_backbone(bare, self.num_classes, self.seed), self.tuning, self.seed)
        )

    def weights(self) -> Weights:
        """All tensors of the start model, to be shared between processes."""
        return dump(self.build())

    def scores_personal(self, round: int) -> bool:
        """Whether clients score the model they would deploy in this round."""
        every = self.personal_every
        return bool(every) and ((round + 1) % every == 0 or round + 1 == self.rounds)


class Worker:
    """Holds one resident model per process and plays any client with it.

    Only what a call may change is put back before the next one, so a frozen backbone of any size is built
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
        self._all_blocks = model.active
        self._start = export(self._model, buffers=True)
        statistics = self._start.keys() - export(self._model, buffers=False).keys()
        self._float_buffers = {name for name in statistics if not name.endswith(RESIDUAL)}
        dataset = open_dataset(world.shard)
        self._images, self._targets = dataset.images, np.asarray(dataset.targets)
        self._normalize = Normalizer(self._model.mean, self._model.std) if world.objective.pixels else symbols
        self.cache: dict[Any, torch.Tensor] = {}

    def start_params(self) -> Params:
        """What travels, at its start values."""
        buffers = self._world.train.batch_norm == "average"
        return {n: v for n, v in self._start.items() if buffers or n not in self._float_buffers}

    def checksum(self) -> str:
        """Digest of the frozen weights: they must never change."""
        return checksum(self._model)

    def call(self, call: Call, store: Mapping[str, Any]) -> tuple[Update, dict[str, Any]]:
        """Play one client: (call, store) in, (update, store) out, nothing else changes.

        Raises:
            ClientError: The task failed, or answered with a tensor of a wrong shape or that is not finite.
        """
        world, sent = self._world, call.sent
        with seeded(derive(world.seed, call.tag, sent.round, call.client)) as rng:
            try:
                client = self._client(call, dict(store), rng)
                update = call.task(client, sent)
                update = replace(update, metrics={**update.metrics, **client.metrics()})
                self._check_shapes(update)
                check_finite(update)
            except RayFedError:
                raise
            except Exception as err:
                kind = NonFiniteClientError if isinstance(err, FloatingPointError) else ClientError
                cause = f"{type(err).__name__}: {err}"
                raise kind(call.client, sent.round, call.tag, cause, traceback.format_exc()) from err
            self._keep_buffers(client)
            return update, client.store

    def _client(self, call: Call, store: dict[str, Any], rng: torch.Generator) -> Client:
        model, world, sent = self._model, self._world, call.sent
        model.active = self._all_blocks if sent.blocks is None else sent.blocks
        values = {**store.get(BUFFERS, {}), **{n: v for n, v in sent.params.items() if sent.holds(n)}}
        load(model, {n: v for n, v in self._start.items() if n not in values} | values)
        model.untuned = False
        model.zero_grad(set_to_none=True)
        train_mode(model)
        splits = world.splits[call.client]
        data = ClientData(self._images, self._targets, splits, self._normalize, self._device)
        personal = "test" if world.scores_personal(sent.round) else ""
        cache, task = self.cache, world.objective
        return Client(call.client, model, data, world.train, rng, store, personal, cache, objective=task)

    def _check_shapes(self, update: Update) -> None:
        """Raise ValueError, naming the tensor, when an answer holds what the model does not."""
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


def check_finite(update: Update) -> None:
    """Raise FloatingPointError, naming the first tensor, when an answer holds NaN or infinity."""
    values = [v for v in update.params.values() if v.is_floating_point()]
    if values and not torch.isfinite(torch.nn.utils.get_total_norm(values, norm_type=float("inf"))):
        bad = next(n for n, v in update.params.items() if not torch.isfinite(v).all())
        raise FloatingPointError(f"{bad} is not finite after the call; a smaller train.lr may help")
