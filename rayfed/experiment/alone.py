"""Runs one prepared experiment in its folder."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.engine.scored import scored
from rayfed.errors import ConfigError, RayFedError
from rayfed.experiment.begin import begin, check_continuable
from rayfed.experiment.show import Show
from rayfed.record.files import write_bytes
from rayfed.record.folder import finished, how_to_go_on
from rayfed.record.layout import ROWS
from rayfed.record.readers import read_tensors
from rayfed.terminal.console import follow
from rayfed.terminal.guard import STOP
from rayfed.terminal.supervisor import note_advice

if TYPE_CHECKING:
    from rayfed.config.schema import Config
    from rayfed.engine.session import Session
    from rayfed.engine.setup import Setup
    from rayfed.record.claim import Claim


def run_alone(config: Config, setup: Setup, claim: Claim, show: Show, resume: bool, session: Session) -> str:
    """Run or continue one experiment; a finished one is not repeated.

    Args:
        config: The experiment.
        setup: The same, prepared.
        claim: The right to write into its folder.
        show: What is shown.
        resume: Continue the run in the folder.
        session: Ray and the actors of the command.

    Returns:
        The SHA-256 digest of the final tensors.

    Raises:
        RayFedError: The run failed; its finished rounds are on disk.
    """
    began = time.perf_counter()
    path = claim.path
    if (trained := config.evaluation.model_of) is not None:
        setup = scored(trained, setup)
    digest = finished(path, config.rounds) if resume else ""
    if digest:
        check_continuable(config, setup, path)
        claim.take_over()
    else:
        begin(config, setup, claim, show.about_clients(setup.partition.digest), resume)
        digest = _launch(config, setup, claim, show, resume, session)
    _save_adapters(config, setup, path)
    if show.whole is not None:
        show.tell(f"{path}: {time.perf_counter() - began:.0f} s, tensors sha256 {digest[:16]}")
    return digest


def _launch(config: Config, setup: Setup, claim: Claim, show: Show, resume: bool, session: Session) -> str:
    """Launch the experiment and show its rounds; returns the digest of the final tensors."""
    from rayfed.engine.launch import launch

    path = claim.path
    digest = ""
    shown = path if show.as_json else None
    note_advice(advice(path, show))
    try:
        with closing(launch(setup, config, path, show.tell, resume, claim.token, session)) as rounds:
            for row in follow(rounds, config.rounds, show.quiet, shown):
                digest = row.get("sha256", digest)
                note_advice(advice(path, show))
                _raise_if_asked_to_stop()
        _raise_if_asked_to_stop()
    except ConfigError:
        if not (path / ROWS).exists():  # nothing ran, so the same output can be used again
            claim.discard()
        raise
    except (RayFedError, KeyboardInterrupt) as err:
        err.add_note(advice(path, show))  # the end of the line that the user sees
        raise
    return digest


def advice(path: Path, show: Show) -> str:
    """What the user can do about a run that ended too early."""
    if show.whole is None:
        return how_to_go_on(path)
    again = show.again or f"python -m rayfed.resume {show.whole}"
    return f"what is finished is kept; continue with: {again}"


def _raise_if_asked_to_stop() -> None:
    if STOP.is_set():
        raise KeyboardInterrupt


def _save_adapters(config: Config, setup: Setup, path: Path) -> None:
    """Also write the adapters in the format of other libraries, if the tuning scheme has a method `save`."""
    save = getattr(setup.world.tuning, "save", None)
    if save is None:
        return
    params = read_tensors(path / "model" / "params.safetensors")
    with tempfile.TemporaryDirectory() as folder:  # the library does not list its files as those of the run
        save(params, config.model.name, Path(folder))
        for file in sorted(Path(folder).iterdir()):
            write_bytes(path / "model" / file.name, file.read_bytes())
