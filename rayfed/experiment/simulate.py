"""Prepares, runs and reports one experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError, shown
from rayfed.experiment.single_run import Show

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.config.schema import Config
    from rayfed.engine.session import Session
    from rayfed.record.claim import Claim
    from rayfed.types import Params


@dataclass(frozen=True)
class Result:
    """A finished run, read from its folder.

    Attributes:
        path: Folder of the run.
        sha256: SHA-256 digest of the final tensors.
    """

    path: Path
    sha256: str

    @property
    def history(self) -> pd.DataFrame:
        """One row per round: the lines of rounds.jsonl."""
        import pandas as pd

        from rayfed.record.readers import read_rows

        return pd.DataFrame(read_rows(self.path))

    @property
    def metrics(self) -> dict[str, Any]:
        """The row of the last round in which models were scored."""
        from rayfed.record.readers import read_rows
        from rayfed.report.final_table import last_evaluated

        return last_evaluated(read_rows(self.path))

    @property
    def params(self) -> Params:
        """The final trainable tensors by global name."""
        from rayfed.record.readers import read_tensors

        return read_tensors(self.path / "model" / "params.safetensors")


def simulate(
    config: Iterable[str] | Config = (),
    quiet: bool = True,
    *,
    as_json: bool = False,
    claim: Claim | None = None,
    session: Session | None = None,
) -> Result:
    """Run one experiment, and write its tables, figures and report.

    Args:
        config: Overrides as on the command line, or a checked config. With `claim`, `output` is the folder of
            the run that is continued.
        quiet: Show nothing.
        as_json: Write one JSON object per round to standard output, and everything else to standard error.
        claim: The right to write into the folder of an earlier run, which is continued after its last
            checkpoint; for a finished one only tables and report are written again. None: start a new run.
        session: Ray and actors of earlier runs of this process, which stay afterwards; None: this run has its
            own, which end with it.

    Returns:
        The finished run.

    Raises:
        ConfigError: Something in the input is wrong, or the folder holds files of others; found before any
            actor starts.
        ClientError: A client failed.
        PartsFailedError: A method of `compare`, or a fold of leave_one_out, failed; the others are finished.
    """
    from rayfed.config.schema import Config, load_config
    from rayfed.engine.session import Session
    from rayfed.experiment.plan import make_plan, run
    from rayfed.record import claim as folders
    from rayfed.record.claim import check_own_folder
    from rayfed.record.trackers import check_trackers

    config = config if isinstance(config, Config) else load_config(_overrides(config))
    check_trackers(config.trackers)
    show = Show(quiet, as_json)
    if claim is not None:
        plan = make_plan(config, claim.path)
        with nullcontext(session) if session else Session() as used:
            return Result(claim.path, run(plan, claim, show, True, used))
    path = Path(config.output) if config.output else _new_folder(config)
    check_own_folder(path)
    seen = folders.look(path, config.overwrite)
    plan = make_plan(config, path)
    with nullcontext(session) if session else Session() as used:
        for setup in plan.setups if seen else ():
            used.check(config.cluster, setup)  # before `claim` moves the earlier run
        # Ray ends before the lock, if it ends with this run.
        with folders.claim(path, seen, config.overwrite) as own, nullcontext() if session else used:
            if own.earlier is not None:
                show.tell(f"the run that was in {path} is in {own.earlier} now")
            return Result(path, run(plan, own, show, False, used))


def _overrides(given: object) -> list[str]:
    """The overrides of a list, or of anything else that yields texts.

    Raises:
        ConfigError: It yields something else, or is one text or a dict.
    """
    listed = None if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)
    if listed is None:
        raise ConfigError(f"config: {shown(given)} is no list, such as ['algorithm=fedprox', 'rounds=5']")
    for each in listed:
        if not isinstance(each, str):
            raise ConfigError(f"config: {shown(each)} is no text, such as 'algorithm=fedprox'")
    return listed


def _new_folder(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algorithm.replace(':', '.')}-{config.data.name}-seed{config.seed}-{stamp}"
    return Path("runs") / f"{name}-{os.getpid()}"
