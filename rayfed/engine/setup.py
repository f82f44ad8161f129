"""Prepares an experiment: data, partition, model and channel; all input is checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayfed.client_facts import RowTable, Splits
from rayfed.columns import check_metrics
from rayfed.config.design import Design
from rayfed.data.augmentation import check_images
from rayfed.data.load_dataset import load
from rayfed.data.partition.groups import only_tests, partition_of, with_tests_of
from rayfed.data.partition.partition import Partition
from rayfed.data.shards import Dataset, open_dataset
from rayfed.data.source import make_source, task_of
from rayfed.data.user_data import OwnData
from rayfed.devices import HOST, settings_restored
from rayfed.engine.built_once import Memo, ModelFacts
from rayfed.engine.check_design import (
    GB,
    check_base,
    check_counts,
    check_memory,
    check_micro_batch,
    check_scored,
    check_stop,
    measurable,
    why_whole_batches,
)
from rayfed.engine.core_start import core_start
from rayfed.engine.count_cost import count_cost
from rayfed.engine.loop import RoundPlan, adaptation_of
from rayfed.engine.text_checks import check_logits, check_tokens
from rayfed.engine.tried_loss import known_goal, tried_outputs
from rayfed.errors import ConfigError, one_line
from rayfed.evaluation.stopping import without_effect
from rayfed.evaluation.test_sets import (
    DOMAIN_VALIDATION,
    Pack,
    all_splits,
    evaluation_sets,
    pack_splits,
    packs,
    personal_sets,
    validation_sets,
    validation_split,
    with_domain_validation,
)
from rayfed.executors.worker import ClientContext, Weights, adjust_trunk, converter
from rayfed.executors.worker_passes import GroupSize, check_group, quickest_passes
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Parts, check_task
from rayfed.federation.noise_and_compression import Channel
from rayfed.federation.privacy_accountant import Privacy, check_private, check_values, guarantee, with_epsilon
from rayfed.federation.tensors_that_stay import check_head, head_of, names_that_stay
from rayfed.federation.train_config import Smaller, TrainConfig
from rayfed.heterogeneity.capacity import assign, assign_ranks, sizes_of
from rayfed.heterogeneity.faults import check_attack, plan_faults
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.deep_copy import deep_copy
from rayfed.models.examine import examine
from rayfed.models.fit_network import first_pass, fit, loss_of
from rayfed.models.shared_weights import skeleton
from rayfed.models.trunk import check_compiler, has_trained_norms
from rayfed.objective import (
    CLASSES,
    CLASSIFICATION,
    LANGUAGE_MODELING,
    REGRESSION,
    SEGMENTATION,
    TEXT_REGRESSION,
    Objective,
    OwnObjective,
    objective,
)
from rayfed.sampling.base import usual_size
from rayfed.seeds import derive, use_seed
from rayfed.terminal.console import stage
from rayfed.types import Head, Params
from rayfed.user_objects import title


def without_values(design: Design) -> Backbone:
    """The model of an experiment without values: it has the input size and the way of resizing."""
    task = task_of(make_source(design.data, reader=design.reader))
    own = (design.seed, task, design.network)
    return measurable(design, lambda: skeleton(lambda: build_backbone(design.model, 1, *own)))


def shape_of(design: Design, shared: Memo) -> Backbone:
    """The model of an experiment without values. Args: shared: what was made before."""
    of_data = (design.data.reader, design.data.columns, design.data.root)
    return shared.get("shape", (design.model, design.seed, of_data), lambda: without_values(design))


def dataset_of(design: Design, shared: Memo) -> Dataset:
    """The data set of an experiment, prepared for its model. Args: shared: what was made before."""
    shape = shape_of(design, shared)
    where = (shape.size, shape.task or None, shape.resize, shape.tokenizer)
    goal = design.task
    return shared.get(
        "data", (design.data, *where, goal), lambda: load(design.data, *where, goal, design.reader)
    )


def clients_of(design: Design, shared: Memo) -> Partition:
    """The clients of an experiment and their samples.

    With `data.base_classes`, the clients are those of the experiment with these classes.

    Args:
        shared: What was made before.

    Raises:
        ConfigError: The samples cannot be distributed as the config asks.
    """
    data = design.data
    if data.base_classes is None:
        shape = shape_of(design, shared)
        key = (data, shape.size, shape.task, shape.resize, shape.tokenizer, design.seed, design.task)
        return shared.get(
            "partition", key, lambda: partition_of(dataset_of(design, shared), data, design.seed)
        )
    trained, tests = (
        clients_of(replace(design, data=replace(own, base_classes=None)), shared)
        for own in (replace(data, classes=data.base_classes), only_tests(data))
    )
    return with_tests_of(trained, tests)


def scores_alone(design: Design, local: Local) -> bool:
    """Whether every client is scored with its own tensors."""
    return design.train.batch_norm == "local" or bool(local.stays)


def packs_of(design: Design, experiment: RoundPlan, context: ClientContext) -> tuple[Pack, ...]:
    """Small sets that are scored in shared batches: where all of them are scored with the same model."""
    local = experiment.local
    looks = context.behaviour is not None and context.behaviour.scores_alone
    alone = scores_alone(design, local) or looks
    if alone or type(local).prepare is not Local.prepare:
        return ()
    rows = design.train.eval_batch_size
    test = packs([s.id for s in experiment.sets], context.splits, "test", rows)
    split = experiment.validation_split
    val = packs([s.id for s in experiment.validate], context.splits, split, rows)
    return (*test, *val)


def make_channel(design: Design, parts: Parts, clients: int, expected: int) -> tuple[Channel, Privacy | None]:
    """The channel, and what counts the privacy loss where it adds noise.

    Args:
        clients: Number of clients of the experiment.
        expected: Expected number of clients in a round.

    Raises:
        ConfigError: The stages do not fit together, change nothing, or the method breaks the guarantee of
            privacy.
    """
    if design.channel and parts.local.trained_in_extra:
        raise ConfigError(
            f"channel: it changes trained values, and the client half {type(parts.local).__name__} sends "
            f"them in another form; leave channel out, or use algorithm=fedavg"
        )
    at_client = design.privacy.noise_at == "client"
    seed = design.seed
    channel = Channel.of(design.channel, at_client=at_client, expected=float(expected), seed=seed)
    everyone = expected == clients
    channel = with_epsilon(design.privacy, channel, clients, expected / clients, design.rounds)
    check_private(parts.server, parts.local, channel, design.sampling, everyone, design.train)
    privacy = guarantee(design.privacy, channel, clients, expected / clients)
    if privacy is not None:
        privacy.check(design.rounds)
    return channel, privacy


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A checked experiment, ready to run anywhere.

    Attributes:
        design: The experiment as it was described.
        experiment: Input of the round loop.
        context: Input of a worker, without the initial tensors.
        weights: All initial tensors by module name, which processes share.
        start: Initial values of the tensors that are sent and trained, by global name.
        partition: Examples of each client.
        dataset: The prepared examples.
        group: Number of clients that share their passes, and the reason for it.
        head: What happens to the head of the model.
        notes: Sentences for the header about what a user may not expect of the network.
        stores: Files of the private stores with which clients begin, by id: those of the finished run whose
            model is scored.
    """

    design: Design
    experiment: RoundPlan
    context: ClientContext
    weights: Weights
    start: Params
    partition: Partition
    dataset: Dataset
    group: GroupSize
    head: Head
    notes: tuple[str, ...] = ()
    stores: Mapping[str, Path] = field(default_factory=dict)


@settings_restored()
@use_seed(0)  # so that passes with dropout, which only check something, draw nothing from the user's streams
def prepare(design: Design, shared: Memo | None = None) -> Setup:
    """Load the data, split it, build the model once, and check that everything fits together.

    Args:
        shared: What was made for other experiments of the same command; then frozen features are kept on
            disk, where these find them. None: this experiment is alone.

    Raises:
        ConfigError: A setting, the data on disk or the combination of parts is wrong; one line says how.
    """
    parts = design.parts
    check_counts(design)
    design.executor.fits(design.cluster)
    known = shared or Memo()
    shape_of(design, known)
    words = f"loading the data {design.data.name} and the model {design.model.name}"
    known.get("said", words, lambda: stage(words))
    dataset = dataset_of(design, known)
    goal = _goal(design, parts, dataset)
    partition = clients_of(design, known)
    context = _context_of(design, parts, dataset, partition, goal)
    check_scored(design, context)
    work = context.train.examples
    faults = plan_faults(design.faults, partition.training, work, dataset.domains, design.seed)
    pixels = shape_of(design, known).size if context.objective.pixels and not dataset.own else 0
    bare = check_tokens(measurable(design, context.skeleton), dataset)
    check_memory(design, bare, pixels, partition)
    with suppress(RuntimeError):  # a user's part may not run without values
        parts.local.check(bare)
    model = known.get("model", _model_key(context), lambda: _build(design, context, partition))
    context = replace(context, behaviour=model.behaviour)
    bare.note(model.behaviour)
    goal = known_goal(context, model, dataset, partition)
    _check_single_rows(design, context.train, partition, model.why_not_single)
    _check_train(design, parts, model, goal)
    check_base(context.train, bare)
    graphs = context.passes.graphs(context.train, parts, bare)
    packs, notes = context.passes.pack_texts(context.train, parts.local, goal, model.why_padded)
    train = replace(context.train, graphs=graphs, pack_texts=packs)
    context, head = replace(context, objective=goal, train=train), head_of(bare, context.stays)
    check_head(design.head, head, design.names.tuning)
    model = model.without(names_that_stay(bare, context.stays)) if context.stays else model
    check_stop(design, goal, parts.local, faults is not None and faults.has_clock)
    experiment = replace(_experiment(design, parts, partition, model), faults=faults, objective=goal)
    cost = count_cost(bare, context, experiment.capacity, experiment.depth)
    held = (experiment.capacity, experiment.depth, experiment.ranks, model.rank)
    check_values(experiment.channel, model.start, *held)
    check_group(design.train, design.failures.client_timeout)
    facts = (parts.local, model.why_alone, model.frozen, experiment.clients_per_round)
    wish = design.train if design.failures.client_timeout is None else replace(design.train, group=1)
    row = 0 if cost is None else cost.load(None).row
    group = context.passes.group_size(wish, *facts, row)
    context, splits = _with_validation(design, context, experiment, partition)
    packed = packs_of(design, experiment, context)
    table = RowTable({**splits, **pack_splits(packed, context.splits)}, partition.drawn)
    in_parts = not why_whole_batches(design, parts.local, model.whole_batch, goal)
    smaller = Smaller(train=context.train, micro_batch=in_parts, checkpointing=model.can_checkpoint)
    weights, start, before = core_start(
        replace(context, splits=table), model.weights, model.start, experiment
    )
    return Setup(
        design=design,
        experiment=replace(
            experiment,
            group=group.clients,
            packs=packed,
            cost=cost,
            before=before,
            parts=parts_to_put_back(design, experiment, model.parts, start, table),
        ),
        context=replace(
            context,
            splits=table,
            features=model.features,
            shares_features=shared is not None,
            smaller=smaller,
        ),
        weights=weights,
        start=start,
        partition=partition,
        dataset=dataset,
        group=group,
        head=head,
        notes=(*_notes(context), *notes, *without_effect(design.stop)),
    )


def _notes(context: ClientContext) -> tuple[str, ...]:
    """Sentences for the header about what a user may not expect of the network."""
    found = () if context.network is None else context.network.notes
    average = context.train.batch_norm == "average"
    return (*found, *(() if context.behaviour is None else context.behaviour.sentences(average)))


def _with_validation(
    design: Design, context: ClientContext, experiment: RoundPlan, partition: Partition
) -> tuple[ClientContext, Mapping[str, Splits]]:
    """The context with the split for validation, and row numbers of what can be called, by id and split."""
    splits: Mapping[str, Splits] = all_splits(partition)
    if experiment.validation_split == DOMAIN_VALIDATION:
        per_client = scores_alone(design, experiment.local) or bool(experiment.validate_personal)
        splits = with_domain_validation(splits, partition, per_client)
        context = replace(context, splits=RowTable(splits, partition.drawn))
    split = experiment.validation_split if experiment.validate_personal else ""
    return replace(context, validation_split=split), splits


BACKWARD = 2
"""Cost of the backward pass of an example, in forward passes of it."""

MOST_AGAIN = 0.1
"""Largest cost of scoring the final model again, as a share of what the rounds cost."""


def parts_to_put_back(
    design: Design,
    experiment: RoundPlan,
    parts: Mapping[str, Params],
    start: Params,
    splits: Mapping[str, Splits],
) -> Mapping[str, Params] | None:
    """Start values of each kind of tensors with which the final model is scored again; None: it is not.

    Args:
        design: The experiment; `evaluation.without_parts` says whether.
        parts: Start values of the model by kind, those of tensors that stay at the clients included.
        start: Start values of the tensors that are sent, which count.
        splits: Row numbers by client or test set, and split.
    """
    wanted, every = design.evaluation.without_parts, experiment.evaluate_every
    if not (wanted and every and experiment.server.trains):
        return None
    scored = sum(len(splits[one.id].get("test", ())) for one in experiment.sets)
    clients = experiment.clients
    visits = experiment.rounds * usual_size(clients, experiment.clients_per_round, experiment.sampling)
    mean = sum(design.train.examples(n) for n in clients.sizes.tolist()) / len(clients)
    rounds = visits * mean * (1 + BACKWARD) + scored * -(-experiment.rounds // every)
    if wanted == "auto" and scored * len(parts) > MOST_AGAIN * rounds:
        return None
    return {kind: {name: start.get(name, own[name]) for name in own} for kind, own in parts.items()}


def _model_key(context: ClientContext) -> tuple[object, ...]:
    """Everything that the initial tensors of a model depend on, and what is checked when it is built."""
    own: tuple[object, ...] = (
        context.model,
        context.tuning,
        context.seed,
        context.classes,
        context.num_classes,
    )
    train = context.train
    tried = context.shard if isinstance(context.objective, OwnObjective) else None
    rows = None if context.network is None else min(train.batch_size, MOST_EXAMINED)
    own += (train.batch_norm, train.cache_features, train.checkpointing, train.precision, tried, rows)
    own += (_asks_for_groups(train),)
    return *own, *((train.pack_texts, train.compile, context.shard) if context.objective.tokens else ())


def _asks_for_groups(train: TrainConfig) -> bool:
    return train.group not in ("auto", 1)


def _goal(design: Design, parts: Parts, dataset: Dataset) -> Objective:
    """The task, after a check that method, tuning, changes of images and attacks are for it."""
    of_data = objective(dataset.task)
    goal = design.goal or of_data
    if isinstance(goal, OwnObjective):
        check_metrics(goal.given)
    if isinstance(goal, OwnObjective) and of_data.tokens:
        goal = goal.of_texts(of_data)
    if isinstance(source := make_source(design.data, reader=design.reader), OwnData):
        source.check_task(design.task)
    for task in {goal.task: None, goal.reads: None}:
        check_task(task, parts.server, parts.local)
    if not dataset.own:
        _check_tuning(goal.reads, design)
    _check_augment(goal.task, design)
    check_attack(design.faults, goal.task == CLASSIFICATION, parts.local.trained_in_extra)
    return goal


def _build(design: Design, context: ClientContext, partition: Partition) -> ModelFacts:
    dataset = open_dataset(context.shard)
    model = context.build()
    fresh = partial(_another, model, context.build)
    why_not_single = why_padded = ""
    if dataset.own or context.network is not None:
        batches = first_batches(context, partition, model)
        _check_pass(design, context, fresh(), batches)
        if model.is_own:
            whole = whole_batch(context, partition, model)
            model.note(examine(fresh, partial(loss_of, context.objective), batches, context.seed, whole))
        why_not_single = _why_not_single(fresh(), batches[0][0][:1])
    elif objective(dataset.task).tokens:
        check_logits(model, dataset, first_rows(partition))
        why_padded = context.passes.why_padded(model, dataset, design.train)
    elif context.objective.reads in CLASSES:
        _check_input(design.model.name, model)
        if has_trained_norms(model):
            why_not_single = _why_not_single(fresh(), model.sample(1))
    _check_cache(design.train, model)
    adjust_trunk(model, replace(design.train, compile=False))
    keeps = design.train.cache_features is not False
    half = design.train.precision == "bf16"
    own_task = isinstance(context.objective, OwnObjective)
    tried = tried_outputs(context, partition, fresh()) if own_task else None
    average = design.train.batch_norm == "average"
    built = ModelFacts.of(model, buffers=average, keeps_features=keeps, half=half)
    why_alone = context.passes.why_alone(model, asked=_asks_for_groups(design.train))
    built = replace(built, why_alone=why_alone, why_padded=why_padded)
    return replace(built, why_not_single=why_not_single, tried=tried)


def _why_not_single(model: Backbone, x: Tensor) -> str:
    """Why a network cannot train with one row, of which BatchNorm may have no statistics; empty: it can.

    Args:
        model: A copy of the tuned model, which is changed.
        x: One row of inputs.
    """
    model.train()
    try:
        with torch.no_grad():
            model(x)
    except ValueError as err:
        return one_line(err)
    return ""


def _check_single_rows(design: Design, train: TrainConfig, partition: Partition, why: str) -> None:
    """Check that no client has a batch of one example where the network cannot train with it.

    Raises:
        ConfigError: One has; the message names it.
    """
    if not why:
        return
    clients = partition.training
    for size in np.unique(clients.sizes).tolist():
        if train.smallest_batch(size) == 1:
            name = next(n for n, own in zip(clients, clients.sizes.tolist(), strict=True) if own == size)
            more = ", or train.drop_last=true" if size > train.batch_size > 1 else ""
            instead = f"set another train.batch_size{more}" if size > 1 else "leave such clients out"
            raise ConfigError(
                f"train.batch_size: {train.batch_size} leaves a batch of one example to client {name!r}, "
                f"which has {size}, and {design.model.name!r} cannot train with it ({why}); {instead}"
            )


def first_rows(partition: Partition) -> NDArray[np.int64]:
    """Numbers of the first examples of a client, shape (2,), or (1,) where it has one."""
    listed = next(iter(partition.listed), None)
    return np.sort(listed.train)[:FIRST_ROWS] if listed is not None else np.arange(FIRST_ROWS)


FIRST_ROWS = 2
"""Examples of a client with which a network is tried before the run."""

FEW = 8
"""The other client is one of so many."""

MOST_EXAMINED = 64
"""Examples of the largest batch with which a small network is tried."""


def first_batches(
    context: ClientContext, partition: Partition, model: Backbone | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a few examples of two clients, as the clients get them; of one, if there is one.

    Args:
        context: Has the examples and the network.
        model: The model, if it was built already; None: the network is not fitted to the inputs yet.
    """
    dataset = open_dataset(context.shard)
    others = [part.train for part in islice(partition.listed, 1, FEW) if len(part.train) > 1]
    chosen = [first_rows(partition), *(np.sort(rows)[:FIRST_ROWS] for rows in others[-1:])]
    model = model or skeleton(lambda: build_backbone(context.model, 1, context.seed, network=context.network))
    convert = converter(dataset, context.objective.pixels, model, HOST)
    return [_batch_of(dataset, rows, convert) for rows in chosen]


def whole_batch(context: ClientContext, partition: Partition, model: Backbone) -> tuple[Tensor, Tensor]:
    """A batch of the training of a client, with as many examples as its batches have, if not too many.

    Args:
        context: Has the examples and the network.
    """
    dataset = open_dataset(context.shard)
    parts = [part.train for part in islice(partition.listed, FEW)] or [np.arange(2)]
    rows = np.sort(max(parts, key=len))[: min(context.train.batch_size, MOST_EXAMINED)]
    return _batch_of(dataset, rows, converter(dataset, context.objective.pixels, model, HOST))


def _batch_of(
    dataset: Dataset, rows: NDArray[np.int64], convert: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of examples. Args: rows: their numbers. convert: as of `converter`."""
    targets = torch.from_numpy(np.asarray(dataset.targets)[rows])
    y = targets if targets.is_floating_point() else targets.long()
    return convert(torch.from_numpy(dataset.images[rows])), y


def _another(model: Backbone, build: Callable[[], Backbone]) -> Backbone:
    """A copy of a model; built anew where a part of it cannot be copied."""
    try:
        copied: Backbone = deep_copy(model)
    except Exception:
        return build()
    return copied


def _check_pass(
    design: Design, context: ClientContext, model: Backbone, batches: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Check with one forward and backward pass that network, data, task and tuning fit together.

    Args:
        context: Has the task.
        model: A copy of the tuned model, which is changed.
        batches: As of `first_batches`.
    """
    classes = (
        len(context.classes) if open_dataset(context.shard).task in (CLASSIFICATION, SEGMENTATION) else 0
    )
    batch = batches[0]
    if context.augment is not None:
        dataset = open_dataset(context.shard)
        check_images(
            batch[0], context.augment, dataset.images if dataset.own else None, model.mean, model.std
        )
    where = repr(design.model.name)
    counted = classes if context.objective.task in (CLASSIFICATION, SEGMENTATION) else 0
    assumed = design.task is None and context.objective.task == REGRESSION
    hint = f"; targets are floats, so {REGRESSION!r} was assumed; for classes use y.astype(int)" * assumed
    # Also where the user switched gradients off around the whole call.
    with torch.enable_grad(), use_seed(derive(context.seed, "first pass")):
        first_pass(model, context.objective, batch, counted, where, hint)


def _context_of(
    design: Design, parts: Parts, dataset: Dataset, partition: Partition, goal: Objective
) -> ClientContext:
    network = design.network
    personal = design.evaluation.personal or parts.local.deploys == "personal"
    classes = (goal.metric,) if goal.reads == TEXT_REGRESSION else tuple(dataset.classes)  # one output
    context = ClientContext(
        seed=design.seed,
        model=design.model,
        construct=build_backbone,
        tuning=parts.tuning,
        num_classes=len(classes),
        classes=classes,
        objective=goal,
        network=network,
        augment=design.data.augment,
        train=_train(design.train, partition),
        shard=Path(dataset.path),
        splits=RowTable(all_splits(partition), partition.drawn),
        personal_every=design.evaluation.every if personal else 0,
        personal_split=design.evaluation.personal_split,
        rounds=design.rounds,
        stays=parts.local.stays,
        resident=design.data.resident,
        resident_bytes=design.data.resident_memory * GB,
        threads=design.cluster.threads,
        deterministic=design.deterministic,
        passes=quickest_passes(),
    )
    if network is None:
        return context
    return replace(context, network=fit(network, first_batches(context, partition)[0][0], design.seed))


def _check_input(name: str, model: Backbone) -> None:
    """Check that the model accepts images of its size, which its constructor may not have checked."""
    model.eval()
    try:
        with torch.no_grad():
            model(model.sample(1))
    except (RuntimeError, IndexError) as err:
        reason = " ".join(str(err).split())
        what = f"images of {model.size} pixels" if model.tokenizer is None else f"{model.size} tokens"
        raise ConfigError(f"model.size: {name!r} does not take {what}: {reason}") from err


PRETRAINED = CLASSES | {TEXT_REGRESSION, LANGUAGE_MODELING}
"""Tasks whose models are pre-trained, so that tuning schemes adapt them."""


def _check_tuning(task: str, design: Design) -> None:
    scheme = design.names.tuning
    if task in PRETRAINED:
        return
    if scheme != "full":
        raise ConfigError(
            f"tuning.name: {scheme!r} adapts a pretrained image classifier, and the data set is for {task}; "
            f"set tuning=full"
        )


def _check_augment(task: str, design: Design) -> None:
    if design.data.augment is None:
        return
    if task != CLASSIFICATION:
        raise ConfigError(
            f"data.augment: {', '.join(design.data.augment.names)} would change the inputs, not the targets; "
            f"it is for classification, and the data set is for {task}: leave it out"
        )
    if design.train.cache_features is True:
        raise ConfigError(
            "data.augment: cannot be used with train.cache_features=true, because features of images that "
            "change in every batch cannot be cached; set train.cache_features=auto, or leave data.augment out"
        )


def _check_cache(train: TrainConfig, model: Backbone) -> None:
    if train.cache_features is True and not model.has_frozen_features:
        why = "parts of the network train" if not model.net_is_frozen else "exits or prompts read its tokens"
        raise ConfigError(
            f"train.cache_features: on is not exact with this tuning: {why}; set auto, or tune only the head "
            f"or an adapter"
        )


def _check_train(design: Design, parts: Parts, model: ModelFacts, goal: Objective) -> None:
    check_micro_batch(design, parts.local, model.whole_batch, goal)
    if not design.train.compile:
        return
    check_compiler("cpu")
    name = design.names.local
    if parts.local.changes_passes:
        raise ConfigError(
            f"train.compile: true cannot be used with the client half of {name}, which changes what the "
            f"network computes between passes; leave it out"
        )
    if parts.local.needs_curvature:
        raise ConfigError(
            f"train.compile: true cannot be used with the client half of {name}, whose steps need second "
            f"derivatives, which torch.compile does not have; leave it out"
        )
    if not isinstance(sizes_of(design.capacity, "blocks"), int | None):
        raise ConfigError(
            "train.compile: true cannot be used with capacity, because each choice of blocks would be "
            "compiled, and after eight of them no more; leave out one of the two"
        )


def _train(train: TrainConfig, partition: Partition) -> TrainConfig:
    if train.local_steps != "min_over_clients_plus_one":
        return train
    fewest = min(map(train.batches, np.unique(partition.training.sizes).tolist()))
    limit = fewest + 1 if train.max_steps is None else min(fewest + 1, train.max_steps)
    return replace(train, local_steps="full_epoch", max_steps=limit)


def _experiment(design: Design, parts: Parts, partition: Partition, model: ModelFacts) -> RoundPlan:
    trainers = partition.training
    own = scores_alone(design, parts.local)
    deploys = parts.local.deploys == "personal"
    personal = design.evaluation.personal or deploys
    validated, scored = design.evaluation.validation, design.evaluation.clients
    steps = design.evaluation.local_steps
    optional = parts.server.blocks_optional and design.capacity is None
    depth = model.depth(parts.server.by_block, optional)
    wanted = len(trainers) if design.clients_per_round == "all" else design.clients_per_round
    if wanted > (there := len(trainers)):
        raise ConfigError(f"clients_per_round: {wanted} is more than {there} clients; write {there}, or all")
    rule = design.rule
    parts.server.check(usual_size(trainers, wanted, rule))
    channel, privacy = make_channel(design, parts, len(trainers), wanted)
    return RoundPlan(
        server=parts.server,
        local=parts.local,
        clients=trainers,
        sets=evaluation_sets(partition, own, design.evaluation.clients, design.seed),
        seed=design.seed,
        rounds=design.rounds,
        clients_per_round=wanted,
        sampling=rule,
        sampling_name=title(design.sampling),
        rates=tuple(design.train.rate(r, design.rounds) for r in range(design.rounds) if design.train.varies),
        evaluate_every=design.evaluation.every,
        stop=design.stop,
        population=len(partition.table) - len(partition.unseen),
        personal=personal_sets(partition, scored, design.seed) if personal else (),
        validate=validation_sets(partition, validated, own, scored, design.seed),
        validate_personal=validation_sets(partition, validated, True, scored, design.seed) if deploys else (),
        validation_split=validation_split(partition, validated),
        depth=depth,
        capacity=assign(design.capacity, trainers, depth, design.seed),
        ranks=assign_ranks(design.capacity, trainers, model.rank, design.seed),
        block_bytes=model.block_bytes,
        channel=channel,
        privacy=privacy,
        adapting=adaptation_of(steps, scored, design.seed, parts.server, partition),
    )
