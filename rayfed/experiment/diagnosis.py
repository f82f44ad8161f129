"""Says what an experiment needs and how long it may take, by running one client or from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError, count_of
from rayfed.terminal.console import size, stage

if TYPE_CHECKING:
    from rayfed.client_facts import Splits
    from rayfed.config.schema import Config, Request
    from rayfed.engine.measure_client import Measurement
    from rayfed.engine.setup import Setup
    from rayfed.evaluation.test_sets import EvaluationSet
    from rayfed.executors.cluster import ActorPlan
    from rayfed.executors.node_check import NodeFacts
    from rayfed.models.backbone import Backbone

SPARE = 1.2
"""Factor between the memory recommended for an actor and the measured one, because clients differ."""

GB = 1e9
COMMON_GPUS = (24_000_000_000, 80_000_000_000)
"""Memory in bytes of common GPUs, for which a machine without one tells the plan."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated seconds if actors are as fast as the measured process and do not slow each other down.

    Attributes:
        round_s: Seconds of a round after the first, with scoring.
        first_round_s: Seconds of the first round, in which caches are filled.
        total_s: Seconds of all rounds.
    """

    round_s: float
    first_round_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes on disk.

    Attributes:
        output: Folder of the run.
        checkpoint_bytes: Size of one checkpoint: the state of the server and the stores of all clients.
        checkpoints: Largest number of checkpoints at the same time.
        output_free_bytes: Free space on the disk of the folder.
        shard: File of the prepared examples, which exists already.
        shard_bytes: Its size.
    """

    output: str
    checkpoint_bytes: int
    checkpoints: int
    output_free_bytes: int
    shard: str
    shard_bytes: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of the doctor.

    Attributes:
        experiment: Summary of the config in one line.
        cluster: The cluster on which clients would run.
        nodes: Resources of each node: CPU, GPU, memory and object_store_memory (bytes).
        actors: Client actors; 0 where they do not fit, 1 for the process of `cluster=inline`.
        cpus_per_actor: CPUs of each actor.
        gpus_per_actor: Share of a GPU of each actor.
        memory_per_actor: Bytes that the config counts for each actor; Ray does not reserve them.
        gpu_actors: Number of client actors that GPUs hold, by the bytes of their memory: of the GPU on which
            the client was measured, or else of common sizes.
        mps: NVIDIA's multi-process service runs on this machine, so that actors share GPUs through it.
        measured: Measured time and memory of one client.
        estimate: Estimated duration of rounds.
        disk: Space on disk.
        problems: Reasons why the experiment does not fit, one line each; empty: it fits.
        advice: Recommended changes of the config.
        examples: What the examples are called, such as images.
        checked: What was found on each node of a cluster that is joined.
    """

    experiment: str
    cluster: str
    nodes: list[dict[str, float]]
    actors: int
    cpus_per_actor: float
    gpus_per_actor: float
    memory_per_actor: float
    gpu_actors: dict[int, int]
    mps: bool
    measured: Measurement
    estimate: Estimate
    disk: Disk
    problems: list[str]
    advice: list[str]
    examples: str = "images"
    checked: Sequence[NodeFacts] = ()


def diagnose(config: Request) -> Diagnosis:
    """Prepare an experiment, run one of its clients, and compare needed with available resources.

    Of a protocol, the first run counts.

    Raises:
        ConfigError: The input is wrong, or no cluster answers at `cluster.address`.
        ClientError: The client failed.
    """
    from rayfed.engine.client_places import actors_on, is_measured, plan_actors, too_small
    from rayfed.engine.measure_client import measure
    from rayfed.executors.kinds.base import kind_of
    from rayfed.experiment.plan import first_run, prepared
    from rayfed.mps import mps_runs
    from rayfed.record.trackers.tracker import check_trackers

    check_trackers(config.trackers)
    setup = prepared(first_run(config))
    where, nodes, checked, problems = _nodes(config, setup)
    actors: ActorPlan | None = None
    kind = kind_of(config.cluster)
    shares_gpus = kind.needs_cluster and is_measured(config.cluster, nodes)
    small = too_small(setup, config.cluster) if shares_gpus else ""
    if small:
        config = replace(config, cluster=replace(config.cluster, gpus_per_actor=0))
    stage(f"running the largest client twice in a new process: {work_of_largest(setup)}")
    has_gpu = any(node.get("GPU", 0) for node in nodes) and config.cluster.gpus_per_actor != 0
    measured = measure(setup.experiment, setup.context, on_gpu=kind.needs_cluster and has_gpu)
    mps = mps_runs()
    sizes = (measured.device_total,) if measured.device_total else COMMON_GPUS
    gpu_actors = {gpu: actors_on(measured.device_free or gpu, measured.device_bytes, mps) for gpu in sizes}
    if kind.needs_cluster:
        known = bool(measured.device_total) and is_measured(config.cluster, nodes)
        per_gpu = max(1, gpu_actors[measured.device_total]) if known else None
        try:
            actors = plan_actors(config.cluster, setup.experiment, nodes, per_gpu, mps)
        except ConfigError as err:
            problems.append(str(err))
    if actors:
        problems += _memory_problems(config, setup, actors, measured, nodes)
    disk = _disk(config, setup, measured)
    if (need := disk.checkpoints * disk.checkpoint_bytes) > disk.output_free_bytes:
        problems.append(
            f"output: {disk.checkpoints} checkpoints need {size(need)}, {size(disk.output_free_bytes)} free"
        )
    return Diagnosis(
        experiment=_describe(config, setup),
        cluster=where,
        nodes=nodes,
        actors=actors.actors if actors else int(not kind.needs_cluster),
        cpus_per_actor=actors.cpus if actors else 0.0,
        gpus_per_actor=actors.gpus if actors else 0.0,
        memory_per_actor=config.cluster.memory_per_actor * GB,
        gpu_actors=gpu_actors,
        mps=mps,
        measured=measured,
        estimate=estimate(setup, measured, _lanes(actors, nodes, mps, kind.clients_at_once)),
        disk=disk,
        problems=problems,
        advice=[*([small] if small else []), *_advice(config, measured)],
        examples=setup.context.objective.examples,
        checked=checked,
    )


def _nodes(
    config: Config, setup: Setup
) -> tuple[str, list[dict[str, float]], Sequence[NodeFacts], list[str]]:
    """Description of the cluster, and the resources, facts and problems of its nodes.

    An existing cluster is joined only for this; of others there are no facts.
    """
    import ray

    from rayfed.executors.cluster import node_resources, own_node
    from rayfed.executors.connection import connection, is_our_own
    from rayfed.executors.copy_to_nodes import without_room
    from rayfed.executors.kinds.base import kind_of
    from rayfed.executors.node_check import facts_here, look_at_nodes, problems_of, user_modules

    cluster = config.cluster
    kind = kind_of(cluster)
    where = kind.describe(cluster)
    if not kind.needs_cluster:
        return where, [own_node(None, None)], (), []
    if is_our_own(cluster.address):
        return where, [own_node(cluster.num_cpus, cluster.num_gpus)], (), []
    with connection(cluster.address, timeout=cluster.connect_timeout):
        data, modules = setup.context.shard, user_modules(setup.context, setup.experiment)
        own = facts_here(ray.get_runtime_context().get_node_id(), data, modules)
        checked = look_at_nodes(data, modules, cluster.connect_timeout, measure=True)
        problems = [*problems_of(checked, own), *without_room(data, checked)]
        return where, node_resources(), checked, problems


def _memory_problems(
    config: Config,
    setup: Setup,
    actors: ActorPlan,
    measured: Measurement,
    nodes: Sequence[Mapping[str, float]],
) -> list[str]:
    """Problems if every planned actor needs the measured memory instead of `memory_per_actor`."""
    from rayfed.engine.client_places import actors_on, plan_actors

    asked = replace(
        config.cluster,
        actors=actors.actors,
        cpus_per_actor=actors.cpus,
        gpus_per_actor=actors.gpus,
        memory_per_actor=max(measured.memory_bytes / GB, 1e-3),
    )
    problems = []
    try:
        plan_actors(asked, setup.experiment, nodes)
    except ConfigError as err:
        problems.append(f"memory, as measured: {err}")
    store = min(
        (node["object_store_memory"] for node in nodes if "object_store_memory" in node), default=None
    )
    if store is not None and measured.weights_bytes > store:
        problems.append(
            f"model.name: the weights of {config.model.name!r} take {size(measured.weights_bytes)} of the "
            f"object store, which has {size(store)} on a node; choose a smaller model or a larger node"
        )
    if actors.gpus and measured.device_total:
        held = actors_on(measured.device_free, measured.device_bytes)
        if (planned := int(1 / actors.gpus + 1e-9)) > max(1, held):
            problems.append(
                f"cluster.gpus_per_actor: {actors.gpus:g} puts {planned} actors of "
                f"{size(measured.device_bytes)} on a GPU of {size(measured.device_total)}; raise it to "
                f"{1 / max(held, 1):.3g}, or leave it out"
            )
    return problems


def _lanes(
    actors: ActorPlan | None, nodes: Sequence[Mapping[str, float]], mps: bool, at_once: int = 1
) -> float:
    """Number of clients that really run at the same time: one on a CPU, and on a GPU without MPS.

    Args:
        actors: The planned client actors; None: there are none.
        nodes: Resources of every node.
        mps: NVIDIA's multi-process service serves the GPUs.
        at_once: Clients that an executor without actors computes at the same time.
    """
    cores = sum(node.get("CPU", 0) for node in nodes)
    if actors is None:
        return max(1.0, min(float(at_once), cores))
    if actors.gpus:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        return float(actors.actors) if mps else min(float(actors.actors), gpus)
    return max(1.0, min(float(actors.actors), cores))


def estimate(setup: Setup, measured: Measurement, lanes: float, reference: float | None = None) -> Estimate:
    """Estimated seconds of a run.

    Args:
        measured: Time of one client.
        lanes: Number of clients that run at the same time.
        reference: Cost of the measured client (`costs` of `rayfed.engine.measure_client`); None: it is one of
            these.
    """
    from rayfed.engine.measure_client import costs
    from rayfed.sampling.base import usual_size

    experiment = setup.experiment
    work = costs(experiment, setup.context.train)
    reference = reference or work[measured.client] or 1.0
    cohort = usual_size(experiment.clients, experiment.clients_per_round, experiment.sampling)
    drawn = min(1.0, cohort / len(work))
    # In units of the measured call; a round takes at least as long as its slowest client.
    units = max(drawn * sum(work.values()) / lanes, max(work.values())) / reference
    splits = setup.context.splits
    images = sum(len(splits[s.id]["test"]) for s in experiment.sets)
    val = experiment.validation_split
    images += _number_of_examples(experiment.validate, splits, val)
    images += _number_of_examples(experiment.personal, splits, setup.context.personal_split)
    images += _number_of_examples(experiment.validate_personal, splits, val)
    scoring = measured.scoring_s * images / (measured.scored or 1) / lanes
    every = experiment.evaluate_every
    scored = -(-experiment.rounds // every) if every else 0
    later = measured.visit_s * units + measured.server_s
    first = measured.first_visit_s * units + measured.server_s
    return Estimate(
        round_s=later + scoring,
        first_round_s=first + scoring,
        total_s=first + later * (experiment.rounds - 1) + scoring * scored,
    )


LOOKED_AT = 1000
"""Sets whose examples are counted; of more, as many are."""


def _number_of_examples(sets: Sequence[EvaluationSet], splits: Mapping[str, Splits], split: str) -> int:
    """About how many examples a split of these sets has."""
    looked = sets[:: max(1, -(-len(sets) // LOOKED_AT))]
    found = sum(len(splits[one.id].get(split, ())) for one in looked)
    return round(found * len(sets) / max(len(looked), 1))


@dataclass(frozen=True, kw_only=True)
class ShapePlan:
    """Memory in bytes that an actor takes of a GPU in one way of training, from the shapes of its tensors.

    Attributes:
        way: Overrides of the way.
        frozen: Frozen weights.
        trained: Trained tensors with their gradients and the optimizer's state.
        activations: What a step keeps for its backward pass, at most, with logits and their logarithms.
        scoring: Logits of a batch that is scored, with their logarithms, in place of activations.
    """

    way: str
    frozen: int
    trained: int
    activations: int
    scoring: int

    @property
    def actor(self) -> int:
        """Bytes of an actor with what CUDA takes itself."""
        from rayfed.engine.measure_client import CONTEXT

        return self.frozen + self.trained + max(self.activations, self.scoring) + int(CONTEXT)


NF4 = 0.5 + 4 / 64
"""Bytes of a number in NF4: four bits, and a float32 for each 64 of them."""

STATES = {"adam": 2, "adamw": 2}
"""Tensors that an optimizer keeps for each trained one; SGD keeps one with momentum."""


def shape_plans(config: Config) -> tuple[str, list[ShapePlan]]:
    """A sentence about a model and its batches, and the memory of each way to train it.

    Args:
        config: The experiment. Its data are not read: decoders write texts, other models tell two classes.

    Raises:
        ConfigError: The model or the tuning scheme does not exist, or they do not fit.
    """
    from rayfed.config.own_network import network_of
    from rayfed.config.schema import compatible_parts
    from rayfed.models.build import build_backbone
    from rayfed.models.lora_layer import frozen_linears
    from rayfed.models.shared_weights import half_names, skeleton
    from rayfed.objective import LANGUAGE_MODELING
    from rayfed.tuning.base import apply_tuning

    tuning = compatible_parts(config).tuning
    model = skeleton(
        lambda: apply_tuning(
            build_backbone(config.model, 2, 0, network=network_of(config.model.name)), tuning, 0
        )
    )
    train = config.train
    rows = min(train.micro_batch or train.batch_size, train.batch_size)
    numbers = {n: p.numel() for n, p in model.named_parameters()}
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    trained = sum(numbers[name] for name in trains)
    frozen = sum(numbers.values()) - trained
    half = sum(numbers[name] for name in numbers.keys() & half_names(model))
    states = STATES.get(train.optimizer, int(train.momentum > 0))
    small = sum(layer.weight.numel() for layer in frozen_linears(model).values())
    whole, cut = saved_bytes(model, rows)
    logits = 2 * 4 * model.size * model.num_classes if model.task == LANGUAGE_MODELING else 0
    weights = {"train.precision=fp32": 4 * frozen, "train.precision=bf16": 4 * frozen - 2 * half}
    if model.tokenizer is not None:
        bits = weights["train.precision=bf16"] - 2 * small + int(NF4 * small)
        weights["train.precision=bf16 train.base_bits=4"] = bits
    ways = [
        ShapePlan(
            way=way + (" train.checkpointing=true" if kept is cut else ""),
            frozen=own,
            trained=4 * (2 + states) * trained,
            activations=kept + rows * logits,
            scoring=train.eval_batch_size * logits,
        )
        for way, own in weights.items()
        for kept in (whole, cut)
        if kept is not None
    ]
    what = f"{rows} texts of {model.size} tokens" if model.tokenizer is not None else f"{rows} images"
    return (
        f"{config.model.name}, {config.tuning['name']}: {sum(numbers.values()):,} numbers, {trained:,} of "
        f"them trained; a step has {what}, {train.eval_batch_size} are scored at once",
        ways,
    )


def saved_bytes(model: Backbone, rows: int) -> tuple[int, int | None]:
    """Bytes that the network keeps for a backward pass, in float32, and the same with checkpointed blocks.

    Products of tokens with tokens are left out, which the attention of a GPU computes anew.

    Args:
        model: The tuned model; best on the meta device, where nothing is computed.
        rows: Rows of the batch.

    Returns:
        Bytes, and None in place of the second number where there are no blocks to checkpoint.
    """
    blocks = model.num_blocks
    if blocks < 2:
        return _saved(model, rows), None
    everything = model.active
    model.active = everything[:1]
    one = _saved(model, rows)
    model.active = everything[:2]
    each = _saved(model, rows) - one
    model.active = everything
    tokens = model.size if model.tokenizer is not None else 1 + (model.size // PATCH) ** 2
    return one + (blocks - 1) * each, one + blocks * rows * tokens * model.width * 4


PATCH = 16
"""Side of the patches that images are cut into, for the size of what a checkpointed block keeps."""


def _saved(model: Backbone, rows: int) -> int:
    import torch

    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        pairs = value.ndim > 2 and value.shape[-1] == value.shape[-2] == model.size
        if storage._cdata not in known and not (pairs and model.tokenizer is not None):
            kept[storage._cdata] = storage  # which is kept, because its number would be given again
        return value

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        output = model(model.sample(rows))
        del output
    return sum(storage.nbytes() for storage in kept.values())


def _disk(config: Config, setup: Setup, measured: Measurement) -> Disk:
    from rayfed.engine.client_places import free_disk

    shard = setup.dataset.path
    experiment = setup.experiment
    visited = min(len(experiment.clients), experiment.clients_per_round * experiment.rounds)
    output = Path(config.output or "runs")
    return Disk(
        output=str(output),
        checkpoint_bytes=measured.state_bytes + measured.store_bytes * visited,
        checkpoints=config.checkpoint.keep + 2,  # one being written, and the final tensors
        output_free_bytes=free_disk(output),
        shard=str(shard),
        shard_bytes=shard.stat().st_size,
    )


def _advice(config: Config, measured: Measurement) -> list[str]:
    from rayfed.executors.kinds.base import kind_of

    counted = config.cluster.memory_per_actor * GB
    if not kind_of(config.cluster).needs_cluster or measured.memory_bytes <= counted:
        return []
    wanted = SPARE * measured.memory_bytes / GB
    return [
        f"set cluster.memory_per_actor={wanted:.2g}, so that actors=auto never starts more than there is "
        "memory for"
    ]


def _describe(config: Request, setup: Setup) -> str:
    from rayfed.config.variants import PROTOCOLS

    experiment = setup.experiment
    runs = (
        f"; protocol={config.protocol}: several such runs ({PROTOCOLS[config.protocol].data})"
        if config.protocol in PROTOCOLS
        else ""
    )
    return (
        f"{config.algorithm} on {config.data.name}, {config.model.name}, {config.tuning['name']}: "
        f"{count_of(len(experiment.clients), 'client')}, {experiment.clients_per_round} in a round, "
        f"{count_of(experiment.rounds, 'round')}{runs}"
    )


def work_of_largest(setup: Setup) -> str:
    """The largest client, its examples, and the operations of one of its visits, for the user."""
    from rayfed.engine.client_places import work_of_example
    from rayfed.engine.measure_client import costs, largest

    sizes = costs(setup.experiment, setup.context.train)
    client = largest(sizes)
    examples = setup.context.train.examples(setup.experiment.clients[client].num_examples)
    work = (work_of_example(setup) or 0.0) * examples / 1e9
    operations = f", up to {work:,.0f} GFLOP" if work >= 1 else ""
    return f"{client} with {examples:,} examples{operations} each time"
