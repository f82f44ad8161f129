"""Plays an experiment in this process, on any device of torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.schema import load_config
from rayfed.engine.recorded import Keeping, record_rounds
from rayfed.engine.setup import prepare
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.simulate import Result

if TYPE_CHECKING:
    import torch


def play(overrides: Sequence[str], device: str | torch.device = "cpu", resume: bool = False) -> Result:
    """Play one experiment in this process, with its clients on a device; nothing is shown.

    The device may be one of a test: any that torch knows by its name. The rounds are recorded as in any run,
    without figures and report. Not for `compare` and `protocol=leave_one_out`, which are several experiments.

    Args:
        overrides: Settings as on the command line. `output` names the folder; without it, the folder is a
            new one among the temporary files of the system.
        device: Device of the model and the batches.
        resume: Continue after the last checkpoint in `output`.

    Returns:
        The finished run.

    Raises:
        ConfigError: Something in the overrides is wrong.
        ClientError: A client failed.
    """
    config = load_config([*overrides, "cluster=inline"])
    setup = prepare(config)
    path = Path(config.output or tempfile.mkdtemp(prefix="rayfed-play-"))
    path.mkdir(parents=True, exist_ok=True)
    executor = InlineExecutor(setup.world, setup.weights, config.failures, device)
    keeping = Keeping.of(setup, config, path, resume)
    *_, last = record_rounds(setup.experiment, executor, setup.start, keeping)
    return Result(path, last["sha256"])
