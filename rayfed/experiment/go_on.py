"""Whether a run can go on with another rule for its end (`stop`)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.errors import ConfigError
from rayfed.evaluation.stopping import Stopping
from rayfed.record.readers import DamagedError
from rayfed.record.recorded_run import RecordedRun


def check_goes_on(config: Config, path: Path) -> None:
    """Check that a run would not have ended before the round that it has reached.

    Args:
        config: The config with which it is to be continued.
        path: Its folder.

    Raises:
        ConfigError: Its rule would have ended it earlier.
    """
    with suppress(DamagedError):  # the run itself mends a damaged file, or names it
        rows = RecordedRun(path).rounds
        ended = Stopping(config.stop, rows)
        if ended.reason and ended.round < len(rows):
            raise ConfigError(
                f"stop: {ended.reason}, after round {ended.round}, and {path} has {len(rows)} rounds; a run "
                f"ends with the rule it began with, or later: start a new run"
            )
