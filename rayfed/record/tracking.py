"""Settings of MLflow and Weights & Biases, and checks before a run starts that they can be used."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rayfed.errors import ConfigError, one_line

DATABASE = "mlflow.db"
PREFIXES = ("MLFLOW_", "WANDB_")
URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
PROJECT = "rayfed"

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # MLflow's own would block for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "30",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
}
"""Values of variables that the user has not set."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Settings of the trackers, sent to the process that writes the run, whose environment may differ.

    Attributes:
        names: Trackers: mlflow, wandb.
        config: The config, as in config.yaml.
        environment: Variables MLFLOW_* and WANDB_* of the process that started the run. They can hold keys,
            so they are neither shown nor written.
    """

    names: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, names: Sequence[str], config: Mapping[str, Any]) -> Tracking:
        """The settings in this process; if `names` is empty, the environment is not read."""
        if not names:
            return NO_TRACKING
        return cls(names=tuple(dict.fromkeys(names)), config=config, environment=variables())


NO_TRACKING = Tracking()


def variables() -> dict[str, str]:
    """MLFLOW_* and WANDB_* of this process; a local path in MLFLOW_TRACKING_URI becomes absolute."""
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    scheme, colon, file = found.get(URI, "").partition(":///")
    if scheme == "sqlite" and colon and file:
        found[URI] = f"sqlite:///{Path(file).absolute()}"
    return found


@contextmanager
def temporary_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, set these variables and DEFAULTS, and no other MLFLOW_* and WANDB_* variables."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    try:
        _replace({**DEFAULTS, **environment})
        yield
    finally:
        _replace(before)


def _replace(environment: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIXES) and name not in environment]:
        del os.environ[name]
    os.environ.update(environment)


def check_trackers(names: Sequence[str], key: str = "trackers") -> None:
    """Refuse trackers that cannot be used, before anything starts.

    Args:
        names: Trackers: mlflow, wandb.
        key: Config key that names them, for errors.

    Raises:
        ConfigError: A library is not installed, the server does not answer, or W&B has no key.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is not a package
            raise ConfigError(f"{key}: {name} is not installed; install rayfed-sim[{name}] or leave it out")
    environment = variables()
    if "wandb" in names and not _has_key(environment):
        raise ConfigError(
            f"{key}: wandb has no key; set WANDB_API_KEY or run wandb login, or set WANDB_MODE=offline"
        )
    if "mlflow" in names and environment.get(URI):
        _check_server(environment)


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


def _check_server(environment: Mapping[str, str]) -> None:
    name = environment.get(EXPERIMENT) or PROJECT
    place = without_secrets(environment[URI], environment)
    try:
        with temporary_environment(environment):
            from mlflow import MlflowClient

            found = MlflowClient(tracking_uri=environment[URI]).get_experiment_by_name(name)
    except Exception as err:
        raise ConfigError(
            f"{URI}: {place} cannot be used: {without_secrets(err, environment)}; correct it or start that "
            f"server, or unset it to use {DATABASE} beside the run"
        ) from None
    if found is not None and found.lifecycle_stage == "deleted":
        raise ConfigError(f"{EXPERIMENT}: {name!r} was deleted; restore it in MLflow or choose another name")


def without_secrets(what: object, environment: Mapping[str, str]) -> str:
    """An error or a text in one line, with keys and passwords replaced by ***."""
    text = one_line(what) if isinstance(what, Exception) else str(what)
    for name, value in environment.items():
        if value and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    text = re.sub(r"//[^/@\s]+@", "//***@", text)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"  # the cause is at the end
