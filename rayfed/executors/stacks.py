"""What an actor is doing right now, seen from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PATIENCE = 20.0  # seconds for one stack


def stack(place: Mapping[str, Any]) -> str:
    """The Python stacks of a process of this cluster, or why they cannot be had."""
    try:
        if place["node"] == ray.get_runtime_context().get_node_id():
            return _dump(place["pid"])
        there = NodeAffinitySchedulingStrategy(place["node"], soft=False)
        task = ray.remote(_dump).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        return str(ray.get(task.remote(place["pid"]), timeout=PATIENCE))
    except Exception as err:
        return f"its stack cannot be read: {type(err).__name__}: {err}".splitlines()[0]


def _dump(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "its stack cannot be read: py-spy is not installed there"
    done = subprocess.run(
        [program, "dump", "--pid", str(pid)],
        capture_output=True,
        text=True,
        timeout=PATIENCE / 2,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()
