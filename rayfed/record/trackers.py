"""Sends the rounds of a run to MLflow, Weights & Biases and TensorBoard, if the config asks for it.

A tracker that fails neither stops a run nor changes its results, which are on disk. Rounds that could not be
sent are kept and sent again every PAUSE seconds and at the end of the run; one warning is shown.

Before a run starts, it is checked that they can be used.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import netrc
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rayfed.errors import ConfigError, StorageError, one_line
from rayfed.federation.executor import Event
from rayfed.record.atomic_files import remove_file, write_text
from rayfed.record.readers import CELLS, STUDY, DamagedError, read_json, reading

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
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    scheme, colon, file = environment.get(URI, "").partition(":///")
    if scheme == "sqlite" and colon and file:
        environment[URI] = f"sqlite:///{Path(file).absolute()}"
    return environment


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
            f"server, or unset it to use {DATABASE} next to the run"
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


TENSORBOARD = "tensorboard"
Entry = Mapping[str, Any]
"""A round in the history: its row, and the rows of its tables."""

Ending = Literal["finished", "failed", "killed"]
"""The ends of a run: normal, with an error, or stopped by a signal or Ctrl-C (killed)."""


class Board:
    """Writes one event file; a continued run writes it again from the start, so that each step is there once.

    Records are written directly, because tensorboardX's own writer uses a thread, in which the error of a
    full disk would be lost.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / TENSORBOARD
        self._writer: Any = None

    def begin(self, entries: Iterable[Entry]) -> None:
        """Begin a new file with the rounds that are kept.

        Raises:
            StorageError: It cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self.close()
        for file in self.path.glob("events.out.tfevents.*"):
            remove_file(file)
        # TensorBoard reads files in the order of their names, and drops the data of removed ones.
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(self.path / name))
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            for entry in entries:
                self.add(entry)
        except OSError as err:
            raise StorageError(f"cannot write {self.path}: {err.strerror}") from err

    def add(self, entry: Entry) -> None:
        """Write a round: all numbers of its row, and the scores of every domain."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(entry).items()]
        event = Event(wall_time=time.time(), step=entry["row"]["round"], summary=Summary(value=values))
        try:
            self._write(event)
        except OSError as err:
            raise StorageError(f"cannot write {self.path}: {err.strerror}") from err

    def close(self, ending: Ending = "killed") -> None:
        """Close the file; TensorBoard has no field for `ending`."""
        if self._writer is not None:
            with suppress(OSError):  # the last write has already raised the error of a full disk
                self._writer.close()
            self._writer = None

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def scalars(entry: Entry) -> dict[str, float]:
    """Numbers of a round by tag: `accuracy`, ..., `domain/<name>/accuracy`, `held_out/<name>/loss`."""
    row = {k: float(v) for k, v in entry["row"].items() if isinstance(v, int | float) and k != "round"}
    for score in entry["tables"].get("clients", ()):
        kind = score["exchange"].removeprefix("report_").rstrip("s")
        if kind in ("domain", "held_out") and score["value"] is not None:  # None: the value was not finite
            model = "" if score["model"] == "global" else f"{score['model']}/"
            row[f"{kind}/{score['client']}/{model}{score['metric']}"] = score["value"]
    return row


log = logging.getLogger(__name__)

MEMORY = "trackers.json"
PAUSE = 120.0  # seconds after a failure until rounds are sent again
MARK = "seconds"
"""Column that is sent last of a round: a round that has it in the tracker is complete there."""


class Tracker(ABC):
    """Sends rounds to a library; a file holds the number of the last one, so that none is sent twice."""

    name: str

    def __init__(self, run: Path, tracking: Tracking, tell: Callable[[Event], None]) -> None:
        """Args: run: the run folder. tracking: config and environment. tell: called with each failure."""
        self.run = run.absolute()
        self.config = tracking.config
        self.environment = tracking.environment
        self.id = ""
        self.step = 0
        self._tell = tell
        self._waiting: dict[int, dict[str, float]] = {}
        self._begun = self._opened = False
        self._again = 0.0  # time (monotonic) before which nothing is sent again

    def begin(self, entries: Iterable[Entry]) -> None:
        """Start or continue, and send the rounds of `entries` that the tracker does not have yet."""
        if not self._begun:
            self.id, self.step = _recall(self.run).get(self.name, ("", 0))
            self._begun = True
        self._waiting.clear()
        self._wait(entries)
        self._send()

    def add(self, entry: Entry) -> None:
        self._wait([entry])
        self._send()

    def close(self, ending: Ending = "killed") -> None:
        if self._begun and self._send(at_once=True):
            try:
                with temporary_environment(self.environment):
                    self.end(ending)
            except Exception as err:
                self._lost(err)

    @abstractmethod
    def open(self) -> None:
        """Find the run `id`, or create one and set `id`; set `step` to the last step that the tracker has."""

    @abstractmethod
    def send(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def end(self, ending: Ending) -> None: ...

    def _wait(self, entries: Iterable[Entry]) -> None:
        for entry in entries:  # a round repeated after a crash has identical values
            if (step := entry["row"]["round"]) > self.step:
                self._waiting[step] = scalars(entry)

    def _send(self, at_once: bool = False) -> bool:
        """Send all rounds that were not sent yet; returns whether that succeeded."""
        if time.monotonic() < self._again and not at_once:
            return False
        try:
            with temporary_environment(self.environment):
                if not self._opened:
                    self.open()
                    self._opened = True
                    _remember(self.run, self.name, self.id, self.step)
                for step in sorted(self._waiting):
                    if step > self.step:
                        self.send(step, self._waiting[step])
                        self.step = step
                        _remember(self.run, self.name, self.id, step)
                    del self._waiting[step]
        except Exception as err:
            self._lost(err)
            return False
        self._again = 0.0
        return True

    def _lost(self, err: Exception) -> None:
        """Warn at the first failure, and record every failure as an event."""
        message = f"{self.name}: {without_secrets(err, self.environment)}"
        if not self._again:
            log.warning(
                "%s; the run continues, and its rounds are sent when the tracker answers again", message
            )
        self._again = time.monotonic() + PAUSE
        lost = f"{message} (rounds not sent: {len(self._waiting)})"
        with suppress(StorageError):  # writing the results will raise the same error
            self._tell(Event(kind="tracker_lost", action="nothing", round=self.step, message=lost))


class MLflow(Tracker):
    """A run of MLflow: config as parameters, rounds as steps of metrics."""

    name = "mlflow"

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        home = _home(self.run)
        uri = self.environment.get(URI) or f"sqlite:///{home / DATABASE}"
        self._client = MlflowClient(uri)
        run = self._find_run()
        if run is None:
            name = self.run.relative_to(home).as_posix()
            run = self._client.create_run(self._experiment(uri), run_name=name)
            self.id = run.info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")
        self.step = max((m.step for m in self._client.get_metric_history(self.id, MARK)), default=0)
        if not run.data.params:
            params = [Param(_allowed_name(k), v[:6000]) for k, v in flat(self.config) if v]
            for i in range(0, len(params), 100):  # the most it takes at a time
                self._client.log_batch(self.id, params=params[i : i + 100])

    def _find_run(self) -> Any:
        """The MLflow run that is continued; None if there is none, or it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(self.id) if self.id else None
        except MlflowException as err:
            if err.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _experiment(self, uri: str) -> str:
        from mlflow.exceptions import MlflowException

        name = self.environment.get(EXPERIMENT) or PROJECT
        found = self._client.get_experiment_by_name(name)
        if found is None:
            file = uri.removeprefix("sqlite:///")
            # Without a server, MLflow's default is a folder in the current folder of the process.
            place = None if file == uri else Path(file).with_name("mlartifacts").as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:  # another run has created it meanwhile
                found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        keys = sorted(values, key=lambda key: key == MARK)
        metrics = [Metric(_allowed_name(key), values[key], now, step) for key in keys]
        for i in range(0, len(metrics), 1000):  # the most it takes at a time
            self._client.log_batch(self.id, metrics=metrics[i : i + 1000])

    def end(self, ending: Ending) -> None:
        self._client.set_terminated(self.id, ending.upper())


class WandB(Tracker):
    """A run of Weights & Biases, whose library sends in the background and keeps what it could not send."""

    name = "wandb"

    def open(self) -> None:
        import wandb

        id = (
            self.id or uuid.uuid4().hex[:8]
        )  # a new id after a failure, because W&B reports the old one as in use
        self._run = wandb.init(
            project=self.environment.get("WANDB_PROJECT") or PROJECT,
            name=self.run.relative_to(_home(self.run)).as_posix(),
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


KINDS: Mapping[str, type[Tracker]] = {"mlflow": MLflow, "wandb": WandB}


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Values of a config by dotted key, as text.

    >>> list(flat({"train": {"lr": 0.1, "betas": [1, 2]}, "output": None}))
    [('train.lr', '0.1'), ('train.betas', '[1, 2]'), ('output', 'None')]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


def _allowed_name(key: str) -> str:
    """A name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", lambda character: f"_{ord(character[0]):x}_", key)[:250]


def _home(run: Path) -> Path:
    """The folder that holds the run, or for a cell of a study the folder that holds the study."""
    whole = run.parent.parent
    if run.parent.name == CELLS and (whole / STUDY).is_file():
        return whole.parent
    return run.parent


def _recall(run: Path) -> dict[str, tuple[str, int]]:
    try:
        tree = read_json(run / MEMORY, dict)
        with reading(run / MEMORY):
            return {str(name): (str(own["run"]), int(own["step"])) for name, own in tree.items()}
    except DamagedError:
        return {}


def _remember(run: Path, name: str, id: str, step: int) -> None:
    known = {**_recall(run), name: (id, step)}
    tree = {name: {"run": id, "step": step} for name, (id, step) in known.items()}
    write_text(run / MEMORY, json.dumps(tree, indent=1) + "\n")
