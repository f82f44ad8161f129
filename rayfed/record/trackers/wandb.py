"""Weights & Biases, whose library sends in the background and keeps what it could not send."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from rayfed.errors import ConfigError
from rayfed.record.trackers.tracker import PROJECT, Ending, Tracker, home_of


class WandB(Tracker):
    """A run of Weights & Biases."""

    library: ClassVar[str] = "wandb"
    variables: ClassVar[tuple[str, ...]] = ("WANDB_",)

    @classmethod
    def check(cls, environment: Mapping[str, str], key: str) -> None:
        if not _has_key(environment):
            raise ConfigError(
                f"{key}: wandb has no key; set WANDB_API_KEY or run wandb login, or set WANDB_MODE=offline"
            )

    def open(self) -> None:
        import wandb

        id = (
            self.id or uuid.uuid4().hex[:8]
        )  # a new id after a failure, because W&B reports the old one as in use
        self._run = wandb.init(
            project=self.environment.get("WANDB_PROJECT") or PROJECT,
            name=self.run.relative_to(home_of(self.run)).as_posix(),
            id=id,
            resume="allow",
            config=dict(self.config),
            allow_val_change=True,  # a resumed run may have more rounds
            dir=str(self.run),
        )
        self.id, self.step = id, max(self.step, self._run.starting_step - 1)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def end(self, ending: Ending) -> None:
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[ending])


def _has_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(file).authenticators(host) is not None
    return False


TRACKER = WandB
