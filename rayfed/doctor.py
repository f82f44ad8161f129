"""The command python -m rayfed.doctor: checks whether an experiment fits on the available resources.

It measures one client, compares the resources that the experiment needs with those available, and estimates
how long the experiment takes.
"""

from __future__ import annotations

import argparse
import locale
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError, count_of
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, size, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import fit_width, terminal_width
from rayfed.user_files import to_json

if TYPE_CHECKING:
    from rayfed.client_facts import Splits
    from rayfed.config.schema import Config, Request
    from rayfed.engine.measure_client import Measurement
    from rayfed.engine.setup import Setup
    from rayfed.evaluation.test_sets import EvaluationSet
    from rayfed.executors.cluster import ActorPlan
    from rayfed.models.backbone import Backbone

USAGE = """\
python -m rayfed.doctor [overrides] [--config FILE] [--shapes] [--json]
    [--report] [--debug]

Takes the overrides of python -m rayfed.run. Prepares the data as a run would,
runs one client in a new process, and says what the cluster has, what the
config needs and how long a round may take, for example
  python -m rayfed.doctor algorithm=fedgcr data=pacs data.root=PACS

With --shapes it says instead how much memory an actor takes of a GPU, from the
shapes of the tensors alone: no data and no weights are read, so that a model of
7 B can be planned on a laptop; model=hf//FOLDER needs its config.json only.

With --report it says instead which versions, processor and libraries this
machine has, in a block to paste into a report of a failure.

Exit code: 0 it fits, 1 the client failed, 2 bad input, or it does not fit, 75
the cluster does not answer.
"""


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


def diagnose(config: Request) -> Diagnosis:
    """Prepare an experiment, run one of its clients, and compare needed with available resources.

    Of a protocol, the first run counts.

    Raises:
        ConfigError: The input is wrong, or no cluster answers at `cluster.address`.
        ClientError: The client failed.
    """
    from rayfed.engine.measure_client import (
        actors_on,
        is_measured,
        measure,
        plan_actors,
        too_small,
        work_of_largest,
    )
    from rayfed.executors.kinds.base import kind_of
    from rayfed.experiment.plan import first_run, prepared
    from rayfed.mps import mps_runs
    from rayfed.record.trackers import check_trackers

    check_trackers(config.trackers)
    setup = prepared(first_run(config))
    where, nodes = _nodes(config)
    problems: list[str] = []
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
    )


def _nodes(config: Config) -> tuple[str, list[dict[str, float]]]:
    """Description of the cluster and resources of its nodes; an existing cluster is joined only for this."""
    from rayfed.executors.cluster import node_resources, own_node
    from rayfed.executors.connection import connection, is_our_own
    from rayfed.executors.kinds.base import kind_of

    cluster = config.cluster
    kind = kind_of(cluster)
    where = kind.describe(cluster)
    if not kind.needs_cluster:
        return where, [own_node(None, None)]
    if is_our_own(cluster.address):
        return where, [own_node(cluster.num_cpus, cluster.num_gpus)]
    with connection(cluster.address, timeout=cluster.connect_timeout):
        return where, node_resources()


def _memory_problems(
    config: Config,
    setup: Setup,
    actors: ActorPlan,
    measured: Measurement,
    nodes: Sequence[Mapping[str, float]],
) -> list[str]:
    """Problems if every planned actor needs the measured memory instead of `memory_per_actor`."""
    from rayfed.engine.measure_client import actors_on, plan_actors

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
    from rayfed.config.schema import compatible_parts
    from rayfed.models.build import build_backbone
    from rayfed.models.lora_layer import frozen_linears
    from rayfed.models.shared_weights import half_names, skeleton
    from rayfed.objective import LANGUAGE_MODELING
    from rayfed.tuning.base import apply_tuning

    tuning = compatible_parts(config).tuning
    model = skeleton(lambda: apply_tuning(build_backbone(config.model, 2, 0), tuning, 0))
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


def shape_report(sentence: str, ways: Sequence[ShapePlan], width: int | None = None) -> str:
    """The plans as text: a line for each way, with the actors that common GPUs hold by their memory."""
    from rayfed.engine.measure_client import actors_on

    lines = [("shapes", sentence)]
    for plan in ways:
        held = ", ".join(f"{actors_on(gpu, plan.actor)} on {gpu / GB:.0f} GB" for gpu in COMMON_GPUS)
        parts = f"weights {size(plan.frozen)}, trained {size(plan.trained)}, step {size(plan.activations)}"
        parts += f", scoring {size(plan.scoring)}" if plan.scoring else ""
        lines.append(("", f"{plan.way}: an actor {size(plan.actor)} ({parts}); actors: {held}"))
    if any(plan.scoring > plan.activations for plan in ways):
        lines.append(
            ("advice", "scoring takes more than training; a smaller train.eval_batch_size needs less")
        )
    lines.append(("", "activations as float32, so that bf16 may need less; nothing was computed"))
    return "\n".join(fit_width(f"{title:<12}{text}", width, 0 if not title else 12) for title, text in lines)


def _disk(config: Config, setup: Setup, measured: Measurement) -> Disk:
    from rayfed.engine.measure_client import free_disk

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


def report(diagnosis: Diagnosis, width: int | None = None) -> str:
    """A diagnosis as text, no line longer than `width`; None: no limit."""
    m = diagnosis.measured
    e = diagnosis.estimate
    d = diagnosis.disk
    share = f" and {diagnosis.gpus_per_actor:.3g} GPU" if diagnosis.gpus_per_actor else ""
    actors = f"{diagnosis.actors} client actors with {diagnosis.cpus_per_actor:.3g} CPU{share} each"
    if not diagnosis.cpus_per_actor:
        actors = "one process" if diagnosis.actors else "no plan of client actors fits"
    lines = [
        ("experiment", diagnosis.experiment),
        ("cluster", diagnosis.cluster),
        *(("", _node(node)) for node in diagnosis.nodes),
        (
            "needs",
            f"{actors}; {size(diagnosis.memory_per_actor)} counted for each (cluster.memory_per_actor), "
            "neither reserved nor enforced",
        ),
        (
            "measured",
            f"client {m.client} with {m.examples} training {diagnosis.examples}, on {m.device}, "
            "on this machine",
        ),
        ("", f"memory of one actor {size(m.memory_bytes)}; weights {size(m.weights_bytes)} a node"),
        ("", f"a visit {m.first_visit_s:.2f} s in the first round, {m.visit_s:.2f} s later"),
        ("", f"sent to it in a round {size(m.down_bytes)}, sent back {size(m.up_bytes)}"),
        ("", f"scoring {m.scored} {diagnosis.examples} {m.scoring_s:.2f} s; the server {m.server_s:.2f} s"),
        ("GPU", _gpu_plan(diagnosis)),
        (
            "estimate",
            f"a round {_time(e.round_s)} (the first {_time(e.first_round_s)}), all {_time(e.total_s)}",
        ),
        ("", "from that one client, if actors are as fast and do not slow each other down"),
        ("disk", f"{d.output}: {size(d.checkpoint_bytes)} a checkpoint; {size(d.output_free_bytes)} free"),
        ("", f"prepared {diagnosis.examples}: {size(d.shard_bytes)} in {d.shard}"),
        ("verdict", "does not fit" if diagnosis.problems else "fits"),
        *(("advice", text) for text in diagnosis.advice),
    ]
    return "\n".join(fit_width(f"{title:<12}{text}", width, 0 if not title else 12) for title, text in lines)


def _gpu_plan(diagnosis: Diagnosis) -> str:
    """Memory that an actor takes of a GPU, measured or estimated, and how many of them GPUs hold."""
    from rayfed.executors.cluster import TOGETHER, TOGETHER_WITH_MPS

    m = diagnosis.measured
    took = size(m.device_bytes)
    if m.device_total:
        held = diagnosis.gpu_actors[m.device_total]
        turns = f"; actors=auto starts {TOGETHER} on it, as they take turns" if held > TOGETHER else ""
        shared = "; they share it through MPS" if diagnosis.mps else turns
        return f"an actor takes {took}; the memory of a GPU of {size(m.device_total)} holds {held}{shared}"
    would = [
        f"a GPU of {gpu / GB:.0f} GB would hold {held} actors" for gpu, held in diagnosis.gpu_actors.items()
    ]
    return (
        f"an actor would take about {took}, as estimated on the CPU; by its memory {', '.join(would)}; "
        f"actors=auto starts at most {TOGETHER} on it, or {TOGETHER_WITH_MPS} with MPS"
    )


def _node(node: Mapping[str, float]) -> str:
    memory = f"{size(node.get('memory', 0))} memory, {size(node.get('object_store_memory', 0))} object store"
    return f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU, {memory}"


def _time(seconds: float) -> str:
    """Seconds with a suitable unit.

    >>> _time(0.123), _time(61), _time(7200)
    ('0.12 s', '61 s', '2.0 h')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


PACKAGES = (
    "rayfed-sim",
    "ray",
    "torch",
    "torchvision",
    "timm",
    "open_clip_torch",
    "peft",
    "numpy",
    "pyarrow",
)
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "OMP_NUM_THREADS",
)
"""Variables that choose how a processor computes."""


def machine() -> str:
    """Versions, processor, kernels and Ray of this machine, as a block of Markdown to paste.

    It holds no name of a user, a host or a folder.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    built = re.findall(r"(?:oneAPI Math Kernel Library|MKL-DNN|oneDNN)[^\n(]*", torch.__config__.show())
    mkldnn = torch.backends.mkldnn.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.release()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "processor": f"{_processor()}, {cores} of {os.cpu_count()} cores",
        "kernels": f"ATen {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "libraries": f"{', '.join(text.strip() for text in built)}; MKL {torch.backends.mkl.is_available()}, "
        f"oneDNN {mkldnn}",
        "chosen": ", ".join(chosen) or "nothing",
        "GPU": ", ".join(devices) or "none",
        "Ray": "RAY_ADDRESS is set" if os.environ.get("RAY_ADDRESS") else "RAY_ADDRESS is not set",
        "text": f"{locale.getpreferredencoding(False)}",
    }
    return "\n".join(["```text", *(f"{name:<10}{text}" for name, text in lines.items()), "```"])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    """Name of the processor as the system has it, or its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 fits, 1 a client failed, 2 bad input or does not fit."""
    parser = parser_of("rayfed.doctor", USAGE)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--report", action="store_true", help="only describe this machine, to report a failure"
    )
    parser.add_argument("--shapes", action="store_true", help="only plan memory, from shapes alone")
    args = parser.parse_args(argv)
    return run_guarded(lambda: work(args), args.debug)


def work(args: argparse.Namespace) -> int:
    """Diagnose the experiment and show the result; returns the exit code.

    Raises:
        ConfigError: The input is wrong.
        RayFedError: The client failed.
    """
    if args.report:
        say(machine())
        return 0
    from rayfed.experiment.experiment import Experiment

    if args.shapes:
        plans = shape_plans(Experiment.from_overrides(args.overrides, args.config).config())
        told = {"model": plans[0], "ways": [asdict(plan) | {"actor": plan.actor} for plan in plans[1]]}
        say(to_json(told, indent=1) if args.json else shape_report(*plans, terminal_width()))
        return 0
    with use_screen(screen_of(as_json=True)):  # standard output has the report alone
        diagnosis = diagnose(Experiment.from_overrides(args.overrides, args.config).config())
    say(to_json(asdict(diagnosis), indent=1) if args.json else report(diagnosis, terminal_width()))
    for problem in diagnosis.problems:
        say(f"error: {problem}", sys.stderr)
    return 2 if diagnosis.problems else 0


if __name__ == "__main__":
    sys.exit(main())
