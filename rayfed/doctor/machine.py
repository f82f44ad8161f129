"""Describes this machine and its libraries, for a report of a failure."""

from __future__ import annotations

import locale
import os
import platform
import re
from importlib import metadata
from pathlib import Path

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
