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
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING

from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, size, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import fit_width, terminal_width
from rayfed.user_files import to_json

if TYPE_CHECKING:
    from rayfed.executors.node_check import NodeFacts
    from rayfed.experiment.diagnosis import Diagnosis, ShapePlan

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


def shape_report(sentence: str, ways: Sequence[ShapePlan], width: int | None = None) -> str:
    """The plans as text: a line for each way, with the actors that common GPUs hold by their memory."""
    from rayfed.engine.client_places import actors_on
    from rayfed.experiment.diagnosis import COMMON_GPUS, GB

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
        *(("", _facts(node)) for node in diagnosis.checked),
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
    from rayfed.experiment.diagnosis import GB

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


def _facts(node: NodeFacts) -> str:
    """The facts of a node of a cluster that is joined, as a line."""
    if node.problem:
        return f"{node.name}: {node.problem}"
    kept = "the data is there" if node.data is not None else "a run will copy the data there"
    memory_disk = "" if node.memory_disk is None else f", {size(node.memory_disk)} in /dev/shm"
    speed = "" if node.bytes_per_second is None else f", sends {size(node.bytes_per_second)} a second"
    clock = "" if node.clock is None else f", clock {node.clock:+.1f} s"
    return (
        f"{node.name}: {node.processor}; Python {node.versions['python']}; {kept}, {size(node.disk)} free"
        f"{memory_disk}{speed}{clock}"
    )


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

    from rayfed.executors.node_check import processor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    built = re.findall(r"(?:oneAPI Math Kernel Library|MKL-DNN|oneDNN)[^\n(]*", torch.__config__.show())
    mkldnn = torch.backends.mkldnn.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.release()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "processor": f"{processor()}, {cores} of {os.cpu_count()} cores",
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
    from rayfed.experiment.diagnosis import diagnose, shape_plans
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
