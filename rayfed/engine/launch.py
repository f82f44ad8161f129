"""Starts a prepared experiment in this process, or on the driver and client actors of a session."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.engine.gpu_plan import inline_device
from rayfed.engine.recorded import Keeping, record_rounds
from rayfed.engine.session import Session
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.types import Row


def launch(
    setup: Setup,
    config: Config,
    path: Path,
    notify: Callable[[str], None] = lambda _: None,
    resume: bool = False,
    claim: str = "",
    session: Session | None = None,
) -> Generator[Row, None, None]:
    """Run and record an experiment in this process or on Ray, as the config says.

    Args:
        setup: The experiment, prepared from `config`.
        config: The config of the run.
        path: Folder of the run.
        notify: Called with a sentence about each thing that is started.
        resume: Continue after the last checkpoint in the folder, if there is one.
        claim: Token of the command that owns the folder, as it is in the folder's marker.
        session: Ray and client actors of earlier runs of the same command, which are used again; None: this
            run has its own.

    Yields:
        One row per round, then a row with the digest of the final tensors.

    Raises:
        ConfigError: The cluster does not answer or cannot hold the actors.
        ClientError: A client failed.
        ClusterError: The driver or all client actors were lost.
    """
    keeping = Keeping.of(setup, config, path, resume, claim)
    if config.cluster.executor == "inline":
        device, small = inline_device(setup, config.cluster)
        if small:
            notify(small)
        executor = InlineExecutor(setup.world, setup.weights, config.failures, device)
        yield from record_rounds(setup.experiment, executor, setup.start, keeping)
    else:
        with nullcontext(session) if session else Session() as own:
            yield from own.rows(setup, config, keeping, notify)
