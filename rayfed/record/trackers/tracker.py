"""Sends the rounds of a run to the trackers that the config names, each once, also after a resume.

A tracker that fails neither stops a run nor changes its results, which are on disk. Rounds that could not be
sent are kept and sent again every PAUSE seconds and at the end of the run; one warning is shown.

Before a run starts, it is checked that its trackers can be used.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal

from rayfed.errors import ConfigError, StorageError, one_line
from rayfed.federation.executor import Event
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import CELLS, STUDY, DamagedError, read_json, reading
from rayfed.registry import TRACKER_FILES, Registry

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

CALLS = ("open", "send", "end")
"""Methods of a tracker of a user."""

Entry = Mapping[str, Any]
"""A round in the history: its row, and the rows of its tables."""

Ending = Literal["finished", "failed", "killed"]
"""The ends of a run: normal, with an error, or stopped by a signal or Ctrl-C (killed)."""

log = logging.getLogger(__name__)

MEMORY = "trackers.json"
PAUSE = 120.0  # seconds after a failure until rounds are sent again
MARK = "seconds"
"""Column that is sent last of a round: a round that has it in the tracker is complete there."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Settings of the trackers, sent to the process that writes the run, whose environment may differ.

    Attributes:
        kinds: Class of each tracker, by its name in the config.
        config: The config, as in config.yaml.
        environment: The variables of these trackers in the process that started the run. They can hold keys,
            so they are neither shown nor written.
    """

    kinds: Mapping[str, type] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kinds: Mapping[str, type], config: Mapping[str, Any]) -> Tracking:
        """The settings in this process; if there is no tracker, the environment is not read."""
        if not kinds:
            return NO_TRACKING
        return cls(kinds=kinds, config=config, environment=variables(prefixes_of(kinds.values())))

    def make(self, run: Path, tell: Callable[[Event], None]) -> list[Tracker]:
        """The trackers of a run. Args: run: its folder. tell: called with each failure."""
        return [
            kind(name, run, self, tell) if issubclass(kind, Tracker) else OwnTracker(name, run, self, tell)
            for name, kind in self.kinds.items()
        ]


NO_TRACKING = Tracking()


def prefixes_of(kinds: Iterable[type]) -> tuple[str, ...]:
    """Beginnings of the names of the variables that these trackers read."""
    return tuple(dict.fromkeys(prefix for kind in kinds for prefix in getattr(kind, "variables", ())))


def variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables of this process whose names begin so; relative paths of databases become absolute."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    for name, value in environment.items():
        scheme, colon, file = value.partition(":///")
        if scheme == "sqlite" and colon and file:
            environment[name] = f"sqlite:///{Path(file).absolute()}"
    return environment


@contextmanager
def temporary_environment(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> Iterator[None]:
    """While the block runs, set these variables and DEFAULTS, and no other ones whose names begin so."""
    before = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    defaults = {name: value for name, value in DEFAULTS.items() if name.startswith(prefixes)}
    try:
        _replace({**defaults, **environment}, prefixes)
        yield
    finally:
        _replace(before, prefixes)


def _replace(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> None:
    for name in [name for name in os.environ if name.startswith(prefixes) and name not in environment]:
        del os.environ[name]
    os.environ.update(environment)


def without_secrets(what: object, environment: Mapping[str, str]) -> str:
    """An error or a text in one line, with keys and passwords replaced by ***."""
    text = one_line(what) if isinstance(what, Exception) else str(what)
    for name, value in environment.items():
        if value and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    text = re.sub(r"//[^/@\s]+@", "//***@", text)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"  # the cause is at the end


def scalars(entry: Entry) -> dict[str, float]:
    """Numbers of a round by tag: `accuracy`, ..., `domain/<name>/accuracy`, `held_out/<name>/loss`."""
    row = {k: float(v) for k, v in entry["row"].items() if isinstance(v, int | float) and k != "round"}
    for score in entry["tables"].get("clients", ()):
        kind = score["exchange"].removeprefix("report_").rstrip("s")
        if kind in ("domain", "held_out") and score["value"] is not None:  # None: the value was not finite
            model = "" if score["model"] == "global" else f"{score['model']}/"
            row[f"{kind}/{score['client']}/{model}{score['metric']}"] = score["value"]
    return row


class Tracker(ABC):
    """Sends rounds to a library; a file holds the number of the last one, so that none is sent twice."""

    library: ClassVar[str] = ""
    """Package that it needs."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of the variables that it reads."""

    def __init__(self, name: str, run: Path, tracking: Tracking, tell: Callable[[Event], None]) -> None:
        """Make a tracker, which connects to nothing yet.

        Args:
            name: Its name in the config.
            run: The run folder.
            tracking: Config and environment.
            tell: Called with each failure.
        """
        self.name = name
        self._kind = tracking.kinds[name]
        self._prefixes = prefixes_of(tracking.kinds.values())
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
                with temporary_environment(self.environment, self._prefixes):
                    self.end(ending)
            except Exception as err:
                self._lost(err)

    @classmethod  # noqa: B027 - most need no check
    def check(cls, environment: Mapping[str, str], key: str) -> None:
        """Refuse what cannot work, before anything starts.

        Args:
            environment: The variables that it reads.
            key: Config key that names it, for errors.

        Raises:
            ConfigError: It cannot be used.
        """

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
            with temporary_environment(self.environment, self._prefixes):
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


class OwnTracker(Tracker):
    """A tracker of a user: an object with `open(run, config)`, `send(round, values)` and `end(ending)`."""

    def open(self) -> None:
        self._own = self._kind()
        last = self._own.open(self.run, dict(self.config))
        if isinstance(last, int):
            self.step = last

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._own.send(step, dict(values))

    def end(self, ending: Ending) -> None:
        self._own.end(ending)


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


def home_of(run: Path) -> Path:
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


def is_tracker(value: Any) -> bool:
    """Whether a value is a class of trackers."""
    return isinstance(value, type) and all(callable(getattr(value, name, None)) for name in CALLS)


TRACKERS = Registry(
    files=TRACKER_FILES,
    attribute="TRACKER",
    key="trackers",
    accepts=is_tracker,
    expected="a tracker: a class with open(run, config), send(round, values) and end(ending)",
)

GROUP = "rayfed.trackers"
"""Group of entry points by which an installed package adds trackers."""


def load_trackers(names: Sequence[str], key: str = "trackers") -> dict[str, type]:
    """The classes of trackers, by the names in a config.

    Args:
        names: Names of trackers that are part of RayFed, `package.module:NAME`, or names of entry points.
        key: Config key that names them, for errors.

    Raises:
        ConfigError: There is no such tracker, or it is no class of trackers.
    """
    added = {point.name: point.value for point in entry_points(group=GROUP)}
    return {name: TRACKERS.load(added.get(name, name), key) for name in dict.fromkeys(names)}


def check_trackers(names: Sequence[str], key: str = "trackers") -> None:
    """Refuse trackers that cannot be used, before anything starts.

    Args:
        names: As of `load_trackers`.
        key: Config key that names them, for errors.

    Raises:
        ConfigError: A library is not installed, a server does not answer, or a key is missing.
    """
    for kind in load_trackers(names, key).values():
        if not issubclass(kind, Tracker):
            continue
        spec = importlib.util.find_spec(kind.library)
        if spec is None or spec.origin is None:  # a folder of that name is not a package
            name = kind.library
            raise ConfigError(f"{key}: {name} is not installed; install rayfed-sim[{name}] or leave it out")
        kind.check(variables(kind.variables), key)
