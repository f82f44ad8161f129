"""Estimates what the cells of a paper's table cost that are not finished, from one client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.engine.measure_client import costs
from rayfed.experiment.diagnosis import diagnose, estimate
from rayfed.experiment.study.cluster_share import share
from rayfed.experiment.study.progress import duration
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.reproduce.table_study import TableCell, TableStudy, setups_of
from rayfed.terminal.console import size

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """Estimated cost of the cells of a table that are not finished.

    Attributes:
        cells: Number of these cells.
        runs: Number of runs; a cell has one for each domain where each of them is held out in turn.
        actor_hours: Hours of all client actors together.
        hours: Hours until the last cell is finished.
        cpus, gpus: CPUs and GPUs of each actor.
        lanes: Cells at the same time.
        actors: Client actors of each of them.
        traffic: Bytes that are sent to the clients and back.
        disk: Bytes of checkpoints and final tensors.
        measured: The cell whose client was measured.
        on: Device of that client.
        problems: Why the measured cell does not fit; empty: it does.
    """

    cells: int
    runs: int
    actor_hours: float
    hours: float
    cpus: float
    gpus: float
    lanes: int
    actors: int
    traffic: float
    disk: float
    measured: TableCell
    on: str
    problems: Sequence[str]


def cost_of(asked: TableStudy, waiting: Sequence[TableCell]) -> TableCost:
    """Measure one client of the first cell, and estimate all cells from it.

    A setting is prepared once; its other cells are taken to have as much work, with as many bytes.

    Args:
        waiting: Its cells that are not finished, at least one.

    Raises:
        ConfigError: A setting cannot be prepared.
        RayFedError: The measured client failed.
    """
    common = CommonParts()
    first = waiting[0]
    setups = {
        setting: setups_of(asked.configs[next(cell for cell in waiting if cell.setting == setting)], common)
        for setting in dict.fromkeys(cell.setting for cell in waiting)
    }
    config = asked.configs[first]
    found = diagnose(config)
    part = share(config.cluster, len(waiting), found.nodes, asked.at_once)
    measured = setups[first.setting][0]
    reference = costs(measured.experiment, measured.context.train)[found.measured.client]
    seconds = traffic = disk = 0.0
    runs = 0
    for cell in waiting:
        for setup in setups[cell.setting]:
            experiment = setup.experiment
            visits = experiment.rounds * experiment.clients_per_round
            seconds += estimate(setup, found.measured, 1.0, reference).total_s
            traffic += visits * (found.measured.down_bytes + found.measured.up_bytes)
            state = found.measured.state_bytes + found.measured.store_bytes * len(experiment.clients)
            disk += (asked.configs[cell].checkpoint.keep + 1) * state
            runs += 1
    return TableCost(
        cells=len(waiting),
        runs=runs,
        actor_hours=seconds / HOUR,
        hours=seconds / HOUR / (part.lanes * part.actors),
        cpus=part.cpus,
        gpus=part.gpus,
        lanes=part.lanes,
        actors=part.actors,
        traffic=traffic,
        disk=disk,
        measured=first,
        on=found.measured.device,
        problems=found.problems,
    )


def in_words(found: TableCost) -> str:
    """The estimate as text."""
    hours = f"{found.actor_hours * found.gpus:.2g} GPU-hours, " if found.gpus else "no GPU, "
    hours += f"{found.actor_hours * found.cpus:.2g} CPU-hours"
    cell = found.measured
    runs = f", {found.runs} runs" if found.runs != found.cells else ""
    lines = [
        f"to run: {found.cells} cells{runs}; {found.lanes} at a time, each with {found.actors} client actors "
        f"of {found.cpus:.3g} CPU and {found.gpus:.3g} GPU",
        f"estimate: {hours}; done after {duration(HOUR * found.hours)}",
        f"bytes: {size(found.traffic)} sent to clients and back, {size(found.disk)} on disk",
        f"from one visit of a client of {cell.row}, {cell.setting}, on {found.on}; other rows may cost more",
        *(f"problem: {problem}" for problem in found.problems),
    ]
    return "\n".join(lines)
