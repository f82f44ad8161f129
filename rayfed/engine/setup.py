"""Prepares an experiment from its config: data, partition, model and channel; all input is checked here."""

from __future__ import annotations

import copy
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
from rayfed.config.schema import ClusterConfig, Config, compatible_parts
from rayfed.data import load
from rayfed.data.augmentation import check_images
from rayfed.data.partition.groups import only_tests, partition_of, with_tests_of
from rayfed.data.partition.partition import Partition
from rayfed.data.shards import Dataset, open_dataset
from rayfed.data.source import make_source, task_of
from rayfed.data.user_data import OwnData
from rayfed.devices import HOST, chosen_device, settings_restored
from rayfed.engine.built_once import Built, Shared
from rayfed.engine.core_start import core_start
from rayfed.engine.loop import Training, adaptation_of
from rayfed.engine.memory import (
    GB,
    check_base,
    check_counts,
    check_memory,
    check_micro_batch,
    check_scored,
    count_cost,
    measurable,
    why_whole_batches,
)
from rayfed.engine.text_checks import check_logits, check_tokens
from rayfed.engine.tried_loss import known_goal, tried_outputs
from rayfed.errors import ConfigError, one_line
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
from rayfed.executors.worker import Weights, World, adjust_trunk, converter
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
from rayfed.models.examine import examine
from rayfed.models.fit_network import first_pass, fit, loss_of
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import skeleton
from rayfed.models.trunk import check_compiler, has_trained_norms
from rayfed.models.user_model import network_of
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
from rayfed.sampling.base import SAMPLERS, usual_size
from rayfed.seeds import derive, use_seed
from rayfed.terminal.console import stage
from rayfed.types import Head, Params
from rayfed.user_objects import title


def without_values(config: Config) -> Backbone:
    """The model of a config without values: it has the input size and the way of resizing."""
    task = task_of(make_source(config.data))
    return measurable(config, lambda: skeleton(lambda: build_backbone(config.model, 1, config.seed, task)))


def shape_of(config: Config, shared: Shared) -> Backbone:
    """The model of a config without values. Args: shared: what was made before."""
    of_data = (config.data.reader, config.data.columns, config.data.root)
    return shared.once("shape", (config.model, config.seed, of_data), lambda: without_values(config))


def dataset_of(config: Config, shared: Shared) -> Dataset:
    """The data set of a config, prepared for its model. Args: shared: what was made before."""
    shape = shape_of(config, shared)
    where = (shape.size, shape.task or None, shape.resize, shape.tokenizer)
    goal = config.task
    return shared.once("data", (config.data, *where, goal), lambda: load(config.data, *where, goal))


def clients_of(config: Config, shared: Shared) -> Partition:
    """The clients of a config and their samples. With `data.base_classes`, the clients are those of that run.

    Args:
        config: The experiment.
        shared: What was made before.

    Raises:
        ConfigError: The samples cannot be distributed as the config asks.
    """
    data = config.data
    if data.base_classes is None:
        shape = shape_of(config, shared)
        key = (data, shape.size, shape.task, shape.resize, shape.tokenizer, config.seed, config.task)
        return shared.once(
            "partition", key, lambda: partition_of(dataset_of(config, shared), data, config.seed)
        )
    trained, tests = (
        clients_of(replace(config, data=replace(own, base_classes=None)), shared)
        for own in (replace(data, classes=data.base_classes), only_tests(data))
    )
    return with_tests_of(trained, tests)


def scores_alone(config: Config, local: Local) -> bool:
    """Whether every client is scored with its own tensors."""
    return config.train.batch_norm == "local" or bool(local.stays)


def packs_of(config: Config, experiment: Training, world: World) -> tuple[Pack, ...]:
    """Small sets that are scored in shared batches: where all of them are scored with the same model."""
    local = experiment.local
    looks = world.behaviour is not None and world.behaviour.scores_alone
    alone = scores_alone(config, local) or looks
    if alone or type(local).prepare is not Local.prepare:
        return ()
    rows = config.train.eval_batch_size
    test = packs([s.id for s in experiment.sets], world.splits, "test", rows)
    split = experiment.validation_split
    val = packs([s.id for s in experiment.validate], world.splits, split, rows)
    return (*test, *val)


def make_channel(config: Config, parts: Parts, clients: int, expected: int) -> tuple[Channel, Privacy | None]:
    """The channel, and what counts the privacy loss where it adds noise.

    Args:
        config: The experiment.
        parts: Its method.
        clients: Number of clients of the experiment.
        expected: Expected number of clients in a round.

    Raises:
        ConfigError: The stages do not fit together, change nothing, or the method breaks the guarantee of
            privacy.
    """
    if config.channel and parts.local.trained_in_extra:
        raise ConfigError(
            f"channel: it changes trained values, and the client half {type(parts.local).__name__} sends "
            f"them in another form; leave channel out, or use algorithm=fedavg"
        )
    at_client = config.privacy.noise_at == "client"
    seed = config.seed
    channel = Channel.of(config.channel, at_client=at_client, expected=float(expected), seed=seed)
    everyone = expected == clients
    channel = with_epsilon(config.privacy, channel, clients, expected / clients, config.rounds)
    check_private(parts.server, parts.local, channel, config.sampling, everyone, config.train)
    privacy = guarantee(config.privacy, channel, clients, expected / clients)
    if privacy is not None:
        privacy.check(config.rounds)
    return channel, privacy


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A checked experiment, ready to run anywhere.

    Attributes:
        experiment: Input of the round loop.
        world: Input of a worker, without the initial tensors.
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

    experiment: Training
    world: World
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
def prepare(config: Config, shared: Shared | None = None) -> Setup:
    """Load the data, split it, build the model once, and check that everything fits together.

    Args:
        config: The experiment.
        shared: What was made for other experiments of the same command; then frozen features are kept on
            disk, where these find them. None: this experiment is alone.

    Raises:
        ConfigError: The config, the data on disk or the combination of parts is wrong; one line says how.
    """
    parts = compatible_parts(config)
    check_counts(config)
    _check_device(config.cluster)
    known = shared or Shared()
    shape_of(config, known)
    words = f"loading the data {config.data.name} and the model {config.model.name}"
    known.once("said", words, lambda: stage(words))
    dataset = dataset_of(config, known)
    goal = _goal(config, parts, dataset)
    partition = clients_of(config, known)
    world = _world(config, parts, dataset, partition, goal)
    check_scored(config, world)
    work = world.train.examples
    faults = plan_faults(config.faults, partition.training, work, dataset.domains, config.seed)
    pixels = shape_of(config, known).size if world.objective.pixels and not dataset.own else 0
    bare = check_tokens(measurable(config, world.skeleton), dataset)
    check_memory(config, bare, pixels, partition)
    with suppress(RuntimeError):  # a user's part may not run without values
        parts.local.check(bare)
    model = known.once("model", _model_key(world), lambda: _build(config, world, partition))
    world = replace(world, behaviour=model.behaviour)
    bare.note(model.behaviour)
    goal = known_goal(world, model, dataset, partition)
    _check_single_rows(config, world.train, partition, model.why_not_single)
    _check_train(config, parts, model, goal)
    check_base(world.train, bare)
    graphs = world.passes.graphs(world.train, parts, bare)
    packs, notes = world.passes.pack_texts(world.train, parts.local, goal, model.why_padded)
    train = replace(world.train, graphs=graphs, pack_texts=packs)
    world, head = replace(world, objective=goal, train=train), head_of(bare, world.stays)
    check_head(config.head, head, config.tuning["name"])
    model = model.without(names_that_stay(bare, world.stays)) if world.stays else model
    experiment = replace(_experiment(config, parts, partition, model), faults=faults, objective=goal)
    cost = count_cost(bare, world, experiment.capacity, experiment.depth)
    held = (experiment.capacity, experiment.depth, experiment.ranks, model.rank)
    check_values(experiment.channel, model.start, *held)
    check_group(config.train, config.failures.client_timeout)
    facts = (parts.local, model.why_alone, model.frozen, experiment.clients_per_round)
    wish = config.train if config.failures.client_timeout is None else replace(config.train, group=1)
    group = world.passes.group_size(wish, *facts, 0 if cost is None else cost.load(None).row)
    world, splits = _with_validation(config, world, experiment, partition)
    packed = packs_of(config, experiment, world)
    table = RowTable({**splits, **pack_splits(packed, world.splits)}, partition.drawn)
    in_parts = not why_whole_batches(config, parts.local, model.whole_batch, goal)
    smaller = Smaller(train=world.train, micro_batch=in_parts, checkpointing=model.can_checkpoint)
    weights, start = core_start(replace(world, splits=table), model.weights, model.start, experiment)
    return Setup(
        experiment=replace(
            experiment,
            group=group.clients,
            packs=packed,
            cost=cost,
            parts=parts_to_put_back(config, experiment, model.parts, start, table),
        ),
        world=replace(
            world, splits=table, features=model.features, shares_features=shared is not None, smaller=smaller
        ),
        weights=weights,
        start=start,
        partition=partition,
        dataset=dataset,
        group=group,
        head=head,
        notes=(*_notes(world), *notes),
    )


def _notes(world: World) -> tuple[str, ...]:
    """Sentences for the header about what a user may not expect of the network."""
    found = () if world.network is None else world.network.notes
    average = world.train.batch_norm == "average"
    return (*found, *(() if world.behaviour is None else world.behaviour.sentences(average)))


def _with_validation(
    config: Config, world: World, experiment: Training, partition: Partition
) -> tuple[World, Mapping[str, Splits]]:
    """The world with what models are validated on, and row numbers of what can be called, by id and split."""
    splits: Mapping[str, Splits] = all_splits(partition)
    if experiment.validation_split == DOMAIN_VALIDATION:
        per_client = scores_alone(config, experiment.local) or bool(experiment.validate_personal)
        splits = with_domain_validation(splits, partition, per_client)
        world = replace(world, splits=RowTable(splits, partition.drawn))
    split = experiment.validation_split if experiment.validate_personal else ""
    return replace(world, validation_split=split), splits


BACKWARD = 2
"""Cost of the backward pass of an example, in forward passes of it."""

MOST_AGAIN = 0.1
"""Largest cost of scoring the final model again, as a share of what the rounds cost."""


def parts_to_put_back(
    config: Config,
    experiment: Training,
    parts: Mapping[str, Params],
    start: Params,
    splits: Mapping[str, Splits],
) -> Mapping[str, Params] | None:
    """Start values of each kind of tensors with which the final model is scored again; None: it is not.

    Args:
        config: The config; `evaluation.without_parts` says whether.
        experiment: The experiment.
        parts: Start values of the model by kind, those of tensors that stay at the clients included.
        start: Start values of the tensors that are sent, which count.
        splits: Row numbers by client or test set, and split.
    """
    wanted, every = config.evaluation.without_parts, experiment.evaluate_every
    if not (wanted and every and experiment.server.trains):
        return None
    scored = sum(len(splits[one.id].get("test", ())) for one in experiment.sets)
    clients = experiment.clients
    visits = experiment.rounds * usual_size(clients, experiment.clients_per_round, experiment.sampling)
    mean = sum(config.train.examples(n) for n in clients.sizes.tolist()) / len(clients)
    rounds = visits * mean * (1 + BACKWARD) + scored * -(-experiment.rounds // every)
    if wanted == "auto" and scored * len(parts) > MOST_AGAIN * rounds:
        return None
    return {kind: {name: start.get(name, own[name]) for name in own} for kind, own in parts.items()}


def _model_key(world: World) -> tuple[object, ...]:
    """Everything that the initial tensors of a model depend on, and what is checked when it is built."""
    own: tuple[object, ...] = (world.model, world.tuning, world.seed, world.classes, world.num_classes)
    train = world.train
    tried = world.shard if isinstance(world.objective, OwnObjective) else None
    rows = None if world.network is None else min(train.batch_size, MOST_EXAMINED)
    own += (train.batch_norm, train.cache_features, train.checkpointing, train.precision, tried, rows)
    return *own, *((train.pack_texts, train.compile, world.shard) if world.objective.tokens else ())


def _goal(config: Config, parts: Parts, dataset: Dataset) -> Objective:
    """The task, after a check that method, tuning, changes of images and attacks are for it."""
    goal, of_data = objective(config.task or dataset.task), objective(dataset.task)
    if isinstance(goal, OwnObjective) and of_data.tokens:
        goal = goal.of_texts(of_data)
    if isinstance(source := make_source(config.data), OwnData):
        source.check_task(config.task)
    for task in {goal.task: None, goal.reads: None}:
        check_task(task, parts.server, parts.local)
    if not dataset.own:
        _check_tuning(goal.reads, config)
    _check_augment(goal.task, config)
    check_attack(config.faults, goal.task == CLASSIFICATION, parts.local.trained_in_extra)
    return goal


def _build(config: Config, world: World, partition: Partition) -> Built:
    dataset = open_dataset(world.shard)
    model = world.build()
    fresh = partial(_another, model, world.build)
    why_not_single = why_padded = ""
    if dataset.own or world.network is not None:
        batches = first_batches(world, partition, model)
        _check_pass(config, world, fresh(), batches)
        if model.is_own:
            whole = whole_batch(world, partition, model)
            model.note(examine(fresh, partial(loss_of, world.objective), batches, world.seed, whole))
        why_not_single = _why_not_single(fresh(), batches[0][0][:1])
    elif objective(dataset.task).tokens:
        check_logits(model, dataset, first_rows(partition))
        why_padded = world.passes.why_padded(model, dataset, config.train)
    elif world.objective.reads in CLASSES:
        _check_input(config.model, model)
        if has_trained_norms(model):
            why_not_single = _why_not_single(fresh(), model.sample(1))
    _check_cache(config.train, model)
    adjust_trunk(model, replace(config.train, compile=False))
    keeps = config.train.cache_features is not False
    half = config.train.precision == "bf16"
    own_task = isinstance(world.objective, OwnObjective)
    tried = tried_outputs(world, partition, fresh()) if own_task else None
    average = config.train.batch_norm == "average"
    built = Built.of(model, buffers=average, keeps_features=keeps, half=half)
    why_alone = world.passes.why_alone(model)
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


def _check_single_rows(config: Config, train: TrainConfig, partition: Partition, why: str) -> None:
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
                f"which has {size}, and {config.model.name!r} cannot train with it ({why}); {instead}"
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
    world: World, partition: Partition, model: Backbone | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a few examples of two clients, as the clients get them; of one, if there is one.

    Args:
        world: Has the examples and the network.
        partition: The clients.
        model: The model, if it was built already; None: the network is not fitted to the inputs yet.
    """
    dataset = open_dataset(world.shard)
    others = [part.train for part in islice(partition.listed, 1, FEW) if len(part.train) > 1]
    chosen = [first_rows(partition), *(np.sort(rows)[:FIRST_ROWS] for rows in others[-1:])]
    model = model or skeleton(lambda: build_backbone(world.model, 1, world.seed, network=world.network))
    convert = converter(dataset, world.objective.pixels, model, HOST)
    return [_batch_of(dataset, rows, convert) for rows in chosen]


def whole_batch(world: World, partition: Partition, model: Backbone) -> tuple[Tensor, Tensor]:
    """A batch of the training of a client, with as many examples as its batches have, if not too many.

    Args:
        world: Has the examples and the network.
        partition: The clients.
        model: The model.
    """
    dataset = open_dataset(world.shard)
    parts = [part.train for part in islice(partition.listed, FEW)] or [np.arange(2)]
    rows = np.sort(max(parts, key=len))[: min(world.train.batch_size, MOST_EXAMINED)]
    return _batch_of(dataset, rows, converter(dataset, world.objective.pixels, model, HOST))


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
        return copy.deepcopy(model)
    except Exception:
        return build()


def _check_pass(
    config: Config, world: World, model: Backbone, batches: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Check with one forward and backward pass that network, data, task and tuning fit together.

    Args:
        config: The experiment.
        world: Has the task.
        model: A copy of the tuned model, which is changed.
        batches: As of `first_batches`.
    """
    classes = len(world.classes) if open_dataset(world.shard).task in (CLASSIFICATION, SEGMENTATION) else 0
    batch = batches[0]
    if world.augment is not None:
        dataset = open_dataset(world.shard)
        check_images(batch[0], world.augment, dataset.images if dataset.own else None, model.mean, model.std)
    where = repr(config.model.name)
    counted = classes if world.objective.task in (CLASSIFICATION, SEGMENTATION) else 0
    assumed = config.task is None and world.objective.task == REGRESSION
    hint = f"; targets are floats, so {REGRESSION!r} was assumed; for classes use y.astype(int)" * assumed
    # Also where the user switched gradients off around the whole call.
    with torch.enable_grad(), use_seed(derive(world.seed, "first pass")):
        first_pass(model, world.objective, batch, counted, where, hint)


def _world(config: Config, parts: Parts, dataset: Dataset, partition: Partition, goal: Objective) -> World:
    network = network_of(config.model.name)
    personal = config.evaluation.personal or parts.local.deploys == "personal"
    classes = (goal.metric,) if goal.reads == TEXT_REGRESSION else tuple(dataset.classes)  # one output
    world = World(
        seed=config.seed,
        model=config.model,
        tuning=parts.tuning,
        num_classes=len(classes),
        classes=classes,
        objective=goal,
        network=network,
        augment=config.data.augment,
        train=_train(config.train, partition),
        shard=Path(dataset.path),
        splits=RowTable(all_splits(partition), partition.drawn),
        personal_every=config.evaluation.every if personal else 0,
        personal_split=config.evaluation.personal_split,
        rounds=config.rounds,
        stays=parts.local.stays,
        resident=config.data.resident,
        resident_bytes=config.data.resident_memory * GB,
        threads=config.cluster.threads,
        deterministic=config.deterministic,
        passes=quickest_passes(),
    )
    if network is None:
        return world
    return replace(world, network=fit(network, first_batches(world, partition)[0][0], config.seed))


def _check_device(cluster: ClusterConfig) -> None:
    if cluster.executor == "inline":
        chosen_device(cluster.device)
    elif cluster.device != "auto":
        raise ConfigError(
            f"cluster.device: {cluster.device!r} is for cluster=inline; actors get the GPUs of "
            f"cluster.num_gpus, and with cluster.num_gpus=0 they run on the CPU"
        )


def _check_input(config: ModelConfig, model: Backbone) -> None:
    """Check that the model accepts images of its size, which its constructor may not have checked."""
    model.eval()
    try:
        with torch.no_grad():
            model(model.sample(1))
    except (RuntimeError, IndexError) as err:
        reason = " ".join(str(err).split())
        what = f"images of {model.size} pixels" if model.tokenizer is None else f"{model.size} tokens"
        raise ConfigError(f"model.size: {config.name!r} does not take {what}: {reason}") from err


PRETRAINED = CLASSES | {TEXT_REGRESSION, LANGUAGE_MODELING}
"""Tasks whose models are pre-trained, so that tuning schemes adapt them."""


def _check_tuning(task: str, config: Config) -> None:
    scheme = config.tuning["name"]
    if task in PRETRAINED:
        return
    if scheme != "full":
        raise ConfigError(
            f"tuning.name: {scheme!r} adapts a pretrained image classifier, and the data set is for {task}; "
            f"set tuning=full"
        )


def _check_augment(task: str, config: Config) -> None:
    if config.data.augment is None:
        return
    if task != CLASSIFICATION:
        raise ConfigError(
            f"data.augment: {', '.join(config.data.augment.names)} would change the inputs, not the targets; "
            f"it is for classification, and the data set is for {task}: leave it out"
        )
    if config.train.cache_features is True:
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


def _check_train(config: Config, parts: Parts, model: Built, goal: Objective) -> None:
    check_micro_batch(config, parts.local, model.whole_batch, goal)
    if not config.train.compile:
        return
    check_compiler("cpu")
    name = config.local.get("name", config.algorithm)
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
    if not isinstance(sizes_of(config.capacity, "blocks"), int | None):
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


def _experiment(config: Config, parts: Parts, partition: Partition, model: Built) -> Training:
    trainers = partition.training
    own = scores_alone(config, parts.local)
    deploys = parts.local.deploys == "personal"
    personal = config.evaluation.personal or deploys
    validated, scored = config.evaluation.validation, config.evaluation.clients
    depth = model.depth(parts.server.by_block)
    wanted = len(trainers) if config.clients_per_round == "all" else config.clients_per_round
    if wanted > (there := len(trainers)):
        raise ConfigError(f"clients_per_round: {wanted} is more than {there} clients; write {there}, or all")
    rule = SAMPLERS.load(config.sampling)
    parts.server.check(usual_size(trainers, wanted, rule))
    channel, privacy = make_channel(config, parts, len(trainers), wanted)
    return Training(
        server=parts.server,
        local=parts.local,
        clients=trainers,
        sets=evaluation_sets(partition, own, config.evaluation.clients, config.seed),
        seed=config.seed,
        rounds=config.rounds,
        clients_per_round=wanted,
        sampling=rule,
        sampling_name=title(config.sampling),
        rates=tuple(config.train.rate(r, config.rounds) for r in range(config.rounds) if config.train.varies),
        evaluate_every=config.evaluation.every,
        population=len(partition.table) - len(partition.unseen),
        personal=personal_sets(partition, scored, config.seed) if personal else (),
        validate=validation_sets(partition, validated, own, scored, config.seed),
        validate_personal=validation_sets(partition, validated, True, scored, config.seed) if deploys else (),
        validation_split=validation_split(partition, validated),
        depth=depth,
        capacity=assign(config.capacity, trainers, depth, config.seed),
        ranks=assign_ranks(config.capacity, trainers, model.rank, config.seed),
        block_bytes=model.block_bytes,
        channel=channel,
        privacy=privacy,
        adapting=adaptation_of(config, parts.server, partition),
    )
