"""The form of `WorkerPasses` with few operations: joint layers, dropout by number, graphs, groups."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from rayfed.data.shards import Dataset
from rayfed.data.text import Inputs
from rayfed.devices import CountedDraws, counting
from rayfed.errors import DeviceMemoryError, RayFedError, ResourceError
from rayfed.executors.worker import (
    Worker,
    check_finite,
    drop_frames,
    failed_call,
    is_fault,
    is_out_of_memory,
    out_of_memory,
    receive,
    send_back,
)
from rayfed.executors.worker_passes import GroupSize, WorkerPasses
from rayfed.fast.graphs import allowed_graphs, drop_graphs, use_graphs
from rayfed.fast.group import Group, MemberError, log_failure
from rayfed.fast.optimizers import joint_optimizer
from rayfed.fast.shareable import why_not_joint
from rayfed.fast.size import group_size
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Parts
from rayfed.federation.tensors_that_stay import add_own
from rayfed.federation.train_config import TrainConfig, override
from rayfed.models.backbone import Backbone
from rayfed.objective import Objective
from rayfed.seeds import derive, use_seed
from rayfed.types import Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FastPasses(WorkerPasses):
    """Computes for several clients at once, and with few operations for each."""

    def optimizer(
        self, config: TrainConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
    ) -> torch.optim.Optimizer:
        return joint_optimizer(config, parameters, lr)

    def why_alone(self, model: Backbone, asked: bool) -> str:
        return why_not_joint(model, asked)

    def group_size(
        self,
        train: TrainConfig,
        local: Local,
        reason: str,
        frozen: bool,
        cohort: int,
        row: int,
    ) -> GroupSize:
        return group_size(train, local, reason, frozen, cohort, row)

    def graphs(self, train: TrainConfig, parts: Parts, model: Backbone) -> Literal["auto"] | bool:
        return allowed_graphs(train, parts, model)

    def why_padded(self, model: Backbone, dataset: Dataset, train: TrainConfig) -> str:
        from rayfed.fast.packed_texts import why_padded

        texts = dataset.images
        return why_padded(model, texts, train) if train.pack_texts and isinstance(texts, Inputs) else ""

    def why_method_padded(self, local: Local, objective: Objective) -> str:
        from rayfed.fast.packed_texts import why_method_padded

        return why_method_padded(local, objective)

    def prepare(self, model: Backbone, train: TrainConfig, device: str) -> None:
        """Give the network layers with few operations; on a device also dropout by number, and graphs."""
        if train.pack_texts is True and device == "cpu":
            from rayfed.fast.packed_texts import use_packed_texts

            use_packed_texts(model)
        if "rayfed.models.lora_layer" in sys.modules:  # otherwise no layer is adapted
            from rayfed.fast.joint_lora import use_joint_adapters

            use_joint_adapters(model)
        if device != "cpu" and not train.compile:
            use_fewer_launches(model, train.checkpointing)
        if train.graphs:
            use_graphs(model)

    def save_memory(self, model: Backbone, train: TrainConfig) -> None:
        """Go on without the graphs that `auto` made."""
        if train.graphs == "auto":
            drop_graphs(model)

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        return counting([CountedDraws(seed)])

    def call_group(
        self, worker: Worker, calls: Sequence[Call], stores: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[tuple[Update, dict[str, Any]]] | None:
        """Run calls of several clients, which share their passes (`rayfed.fast.group`).

        If a device is short of memory, they are run once more, as `Worker.call_anew` does. Clients that are
        run alone instead would round differently, so that a second time is an error.

        Args:
            worker: Runs them.
            calls: As of `Worker.call_group`.
            stores: As of `Worker.call_group`.
        """
        for is_second in (False, True):
            try:
                return _together(worker, calls, stores())
            except Exception as err:
                cause = err.__cause__ or err if isinstance(err, MemberError) else err
                failed = _group_failure(worker, calls, cause, is_second, not isinstance(err, MemberError))
                drop_frames(err)
            worker.model.forget()
            worker.give_back_after(failed, calls[0])
            if failed is None:
                return None
            if not isinstance(failed, DeviceMemoryError):
                raise failed
            log.warning("%s; running the clients of this group once more", failed)
        raise AssertionError


def use_fewer_launches(model: Backbone, checkpointing: bool) -> None:
    """Let a device compute in one operation what it would compute in several, with dropout by number."""
    from rayfed.fast.dropout import use_counted_dropout

    use_counted_dropout(model, checkpointing)
    if "timm" in sys.modules:
        from rayfed.fast.joint_norms import use_joint_norms

        use_joint_norms(model)
    if "rayfed.models.lora_layer" in sys.modules:
        from rayfed.fast.joint_lora import use_joint_casts

        use_joint_casts(model)


def _together(
    worker: Worker, calls: Sequence[Call], stores: Sequence[Mapping[str, Any]]
) -> list[tuple[Update, dict[str, Any]]]:
    """Run calls in one group."""
    seeds = [derive(worker.context.seed, call.tag, call.sent.round, call.client) for call in calls]
    messages = [(call.sent, store) for call, store in zip(calls, stores, strict=True)]
    worker.put_back()
    there = receive(messages, worker.device)
    values = [worker.values(sent, own) for sent, own in there]
    active = [worker.all_blocks if sent.blocks is None else sent.blocks for sent, _ in there]
    group = Group(worker.model, values, active, seeds)
    clients, sents = [], []
    for k, (call, (sent, own)) in enumerate(zip(calls, there, strict=True)):
        passes = group.passes[k]
        client = worker.client(call, group.models[k], own, group.streams[k].own, passes)
        client.data = passes.join_batches(client.data)
        clients.append(client)
        sents.append(add_own(sent, worker.stays, values[k]))
    players = zip(calls, clients, sents, strict=True)
    tasks = [partial(worker.answer, *player) for player in players]
    with use_seed(seeds[0]):  # so that the global streams are put back afterwards
        answers = group.run(tasks)
    worker.put_back.check()
    done = send_back(clients, answers, worker.device)
    check_finite([update for update, _ in done])
    return done


def _group_failure(
    worker: Worker, calls: Sequence[Call], err: BaseException, is_second: bool, together: bool
) -> RayFedError | None:
    """The error of a group; DeviceMemoryError: it is run again, None: its clients are run one by one.

    Args:
        worker: Ran them.
        err: What was raised.
        is_second: The group was run for the second time.
        together: As of `log_failure`.
    """
    context = worker.context
    if is_fault(err):
        return failed_call(calls[0], err, context.smaller, context.splits, worker.share)
    if is_out_of_memory(err):
        cause = out_of_memory(err, worker.share, _less(worker, calls))
        text = f"{len(calls)} clients at once: {cause}"
        if is_second:
            return ResourceError(f"train.group: {text}")
        return DeviceMemoryError(calls[0].client, calls[0].sent.round, calls[0].tag, text)
    log_failure([call.client for call in calls], err, together)
    return None


def _less(worker: Worker, calls: Sequence[Call]) -> list[str]:
    """Overrides with which a group of these clients would need less memory."""
    examples = max(len(worker.context.splits[call.client].get("train", ())) for call in calls)
    fewer = [f"train.group={len(calls) // 2}"] if len(calls) > 1 else []
    changes = worker.context.smaller.changes(examples)
    own = [override(found[0], key) for key in ("graphs", "batch_size") if (found := changes.get(key))]
    return fewer + own
