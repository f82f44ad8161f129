"""Text output of rayfed.doctor: the resources of an experiment, and the report about a machine."""

from __future__ import annotations

import locale
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rayfed.doctor.diagnosis import Diagnosis
from rayfed.terminal.console import size
from rayfed.terminal.fitting import fitted

GB = 1e9


def report(found: Diagnosis, width: int | None = None) -> str:
    """A diagnosis as text, no line longer than `width`; None: no limit."""
    m = found.measured
    e = found.estimate
    d = found.disk
    share = f" and {found.gpus_per_actor:.3g} GPU" if found.gpus_per_actor else ""
    actors = f"{found.actors} client actors with {found.cpus_per_actor:.3g} CPU{share} each"
    if not found.cpus_per_actor:
        actors = "one process" if found.actors else "no plan of client actors fits"
    lines = [
        ("experiment", found.experiment),
        ("cluster", found.cluster),
        *(("", _node(node)) for node in found.nodes),
        ("needs", f"{actors}; {size(found.memory_per_actor)} reserved for each (cluster.memory_per_actor)"),
        ("measured", f"client {m.client} with {m.examples} training images, on {m.device}, on this machine"),
        ("", f"memory of one actor {size(m.memory_bytes)}; weights {size(m.weights_bytes)} a node"),
        ("", f"a visit {m.first_visit_s:.2f} s in the first round, {m.visit_s:.2f} s later"),
        ("", f"sent to it in a round {size(m.down_bytes)}, sent back {size(m.up_bytes)}"),
        ("", f"scoring {m.scored} images {m.scoring_s:.2f} s; the server {m.server_s:.2f} s"),
        ("GPU", _gpu_plan(found)),
        (
            "estimate",
            f"a round {_time(e.round_s)} (the first {_time(e.first_round_s)}), all {_time(e.total_s)}",
        ),
        ("", "from that one client, if actors are as fast and do not slow each other down"),
        ("disk", f"{d.output}: {size(d.checkpoint_bytes)} a checkpoint; {size(d.output_free_bytes)} free"),
        ("", f"prepared images: {size(d.shard_bytes)} in {d.shard}"),
        ("verdict", "does not fit" if found.problems else "fits"),
        *(("advice", text) for text in found.advice),
    ]
    return "\n".join(fitted(f"{title:<12}{text}", width, 0 if not title else 12) for title, text in lines)


def _gpu_plan(found: Diagnosis) -> str:
    """Memory that an actor takes of a GPU, measured or estimated, and how many of them GPUs hold."""
    m = found.measured
    took = size(m.device_bytes)
    if m.device_total:
        shared = "; they share it through MPS" if found.mps else ""
        held = found.gpu_actors[m.device_total]
        return f"an actor takes {took}; a GPU of {size(m.device_total)} holds {held} actors{shared}"
    would = [f"a GPU of {gpu / GB:.0f} GB would hold {held} actors" for gpu, held in found.gpu_actors.items()]
    return f"an actor would take about {took}, as estimated on the CPU; {', '.join(would)}"


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
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()
