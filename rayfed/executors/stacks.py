"""Reports which clients have not answered, with the current stacks of their processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.executors.lane import Lane
from rayfed.federation.executor import Call, Event

MOST_STACKS = 4  # largest number of actors whose stack is shown
PATIENCE = 20.0  # seconds for one stack


def stack(place: Mapping[str, Any]) -> str:
    """The Python stacks of a process of this cluster, or a line that says why they cannot be read."""
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


def silence(
    seconds: float, call: Call | None, awaited: Mapping[Lane, Sequence[str]], starting: Sequence[Lane]
) -> Event:
    """The event for a long time without any answer.

    Args:
        seconds: Seconds since the last answer.
        call: A call of the exchange; None before the first round.
        awaited: Clients of the current chunk of each actor.
        starting: Actors that have not started yet.
    """
    asked = f"in round {call.sent.round + 1}, exchange {call.tag!r}" if call else "before the first round"
    lines = [f"no answer for {seconds:g} s {asked}"]
    for lane, clients in awaited.items():
        place = f"node {lane.place.get('node', '')[:12]}, pid {lane.place.get('pid')}"
        lines.append(f"waiting for {', '.join(clients)} on {lane.name} ({place})")
    lines += [f"waiting for {lane.name} to start" for lane in starting]
    return Event(
        kind="silence",
        action="",
        round=call.sent.round if call else 0,
        exchange=call.tag if call else "",
        message="; ".join(lines),
        trace="\n".join(f"{lane.name}\n{stack(lane.place)}" for lane in list(awaited)[:MOST_STACKS]),
    )
