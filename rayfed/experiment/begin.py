"""Writes config, versions and partition into a run folder before the first round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rayfed.config.schema import Config, to_dict
from rayfed.data.partition.manifest import describe, with_digests
from rayfed.engine.recorded import basis_of
from rayfed.engine.setup import Setup
from rayfed.objective import objective
from rayfed.record.checkpoint import Checkpoints
from rayfed.record.claim import Claim
from rayfed.record.files import write_table
from rayfed.record.folder import check_same_inputs, describe_run, rounds_on_disk
from rayfed.record.layout import OWN_TENSORS
from rayfed.record.readers import DamagedError, read_json
from rayfed.terminal.arguments import command_line
from rayfed.terminal.fitting import fitted, terminal_width


def begin(config: Config, setup: Setup, claim: Claim, tell: Callable[[str], None], resume: bool) -> None:
    """Write config.yaml, environment.json and partition.parquet, and show the partition.

    Args:
        config: The config of the run.
        setup: The experiment, prepared from it.
        claim: The right to write into the folder.
        tell: Called with each text for the user.
        resume: The folder holds a run that is continued; check that its inputs are the same.

    Raises:
        ConfigError: The run that is continued had other data or another config, or its checkpoints are
            missing.
    """
    partition = setup.partition
    dataset = setup.dataset
    path = claim.path
    basis = basis_of(config, setup)
    facts = {
        **basis.data,
        "bad_images_skipped": dataset.skipped,
        "task": dataset.task,
        "examples": objective(dataset.task).examples,
        "tensors_trained": len(setup.start),
        "numbers_trained": sum(v.numel() for v in setup.start.values()),
        "threads": config.cluster.threads,
        "precision": config.train.precision,
        "group": setup.group.clients,
        **_own_tensors(setup),
    }
    commands: list[str] = []
    if resume:
        with suppress(DamagedError):
            commands = list(read_json(path / "environment.json", dict).get("commands") or [])
        check_continuable(config, setup, path)  # names the key of the config from which other data follow
        check_same_inputs(path, facts)
        claim.take_over()
    commands += [command_line()] if command_line() else []
    describe_run(path, to_dict(config), {**facts, "commands": commands})
    write_table(path / "partition.parquet", with_digests(partition, dataset))
    tell_clients(setup, tell)


def _own_tensors(setup: Setup) -> dict[str, dict[str, int]]:
    """How many of the scored clients have kept tensors in the run whose model is scored; empty: none has."""
    names = [name for unit in setup.experiment.sets for name in unit.clients]
    kept = sum(name in setup.stores for name in names)
    return {OWN_TENSORS: {"clients": len(names), "kept": kept}} if kept else {}


def tell_clients(setup: Setup, tell: Callable[[str], None]) -> None:
    """Show the table of the clients, what they hold if it differs, and how many images could not be read."""
    sizes = {"blocks": setup.experiment.capacity or {}, "rank": setup.experiment.ranks}
    tell(describe(setup.partition, setup.dataset, terminal_width(), sizes))
    if setup.group.sentence:
        tell(fitted(setup.group.sentence, terminal_width()))
    if skipped := setup.dataset.skipped:
        tell(f"{skipped} unreadable images were skipped (data.on_bad_image=skip)")


def check_continuable(config: Config, setup: Setup, path: Path) -> None:
    """Check that neither the config nor the data of a run changed since its last checkpoint.

    Args:
        config: The config with which the run is continued, or reported again.
        setup: The experiment, prepared from it.
        path: Folder of the run.

    Raises:
        ConfigError: Something changed that affects the result, or the checkpoints are missing.
    """
    Checkpoints(path, basis=basis_of(config, setup)).check_continuable(rounds_on_disk(path))
