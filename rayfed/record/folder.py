"""Writes the folder of a run: config, versions, rounds, result tables, events and final tensors."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError, StoppedError, StorageError
from rayfed.evaluation.metrics import Round
from rayfed.evaluation.stopping import StopConfig, Stopping, rule_of
from rayfed.federation.executor import Event
from rayfed.federation.params import digest
from rayfed.record.atomic_files import (
    GrowingFile,
    remove_file,
    write_bytes,
    write_parquet,
    write_text,
    write_whole,
)
from rayfed.record.checkpoint import DIGESTS, SOURCE
from rayfed.record.history import HISTORY, History
from rayfed.record.locks import WRITER, hold_lock, read_mark
from rayfed.record.readers import (
    ROWS,
    SENT,
    STUDY,
    SWEEP,
    WITHOUT,
    DamagedError,
    has_checkpoint,
    read_bytes,
    read_json,
    read_tensors,
    read_yaml,
    reading,
    rows_so_far,
)
from rayfed.record.tensorboard import Board
from rayfed.record.trackers.tracker import NO_TRACKING, Ending, Tracker, Tracking
from rayfed.types import Params
from rayfed.user_files import DocumentError, parse_json, without_nonfinite
from rayfed.user_objects import is_own


class RoundRows:
    """The rows of all rounds of a run, as JSON lines."""

    def __init__(self, run: Path, history: History) -> None:
        """Args: run: its folder. history: has the row of every round, the newest one included."""
        self._history = history
        self._lines = GrowingFile(run / ROWS)

    def begin(self) -> None:
        """Write the file from the history, if it has any rounds."""
        rows = [entry["row"] for entry in self._history.entries()]
        if rows:
            self._lines.write(map(_line, rows))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append the round that was written into the history last.

        Raises:
            StorageError: The file cannot be written.
        """
        if not self._lines.append(_line(row)):
            self.begin()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


log = logging.getLogger(__name__)

PACKAGES = ("rayfed-sim", "ray", "torch", "torchvision", "timm", "peft", "scikit-learn", "pyarrow", "numpy")
TENSORS = Path("model", "params.safetensors")
LABELS = "labels.json"
"""File next to the tensors of a classifier with the names of its outputs."""
EVENTS = "events.jsonl"


def digest_if_finished(path: Path, rounds: int, stop: StopConfig | None = None) -> str:
    """SHA-256 digest of the final tensors of a run that has all its rounds; empty for any other folder.

    Args:
        rounds: Number of planned rounds.
        stop: The rule that may end it before; None: that of the config in the folder.

    Raises:
        ConfigError: The run has its final tensors, but these, or rounds.jsonl without a checkpoint from which
            it could be written again, cannot be read.
    """
    try:
        rows = rows_so_far(path)
    except DamagedError:
        if (path / TENSORS).exists() and not has_checkpoint(path):
            raise
        return ""  # rounds.jsonl is written again from the history
    if not rows or not (path / TENSORS).exists():
        return ""
    rule = rule_of(_config_of(path)) if stop is None else stop
    if rows[-1]["round"] < rounds and not Stopping(rule, rows).reason:
        return ""
    return digest(read_tensors(path / TENSORS))


def _config_of(path: Path) -> dict[str, Any]:
    """The config in a folder as plain containers; empty where there is none."""
    return read_yaml(path / "config.yaml") if (path / "config.yaml").exists() else {}


def rounds_on_disk(path: Path) -> int:
    """Number of finished rounds, according to rounds.jsonl and the history."""
    try:
        rows = len(rows_so_far(path))
    except DamagedError:
        rows = 0
    return max(rows, sum(1 for _ in (path / HISTORY).glob("*.json.gz")))


def way_to_continue(path: Path) -> str:
    """The command that continues what is in a folder, or the call if no process can import its objects."""
    if (path / SWEEP).exists():
        return f"python -m tune.run resume={path}"
    if (path / STUDY).exists() and (not (path / "config.yaml").exists() or has_own_objects(path)):
        return "the program that began it"
    call = f"rayfed.Experiment(...).resume({str(path)!r})"
    return call if has_own_objects(path) else f"python -m rayfed.resume {path}"


def has_own_objects(path: Path) -> bool:
    """Whether the config in a folder names an object of a user that cannot be imported."""

    def names(tree: Any) -> Iterator[Any]:
        for key, value in tree.items() if isinstance(tree, dict) else ():
            if key in NAMING:
                yield value
            yield from names(value)

    with suppress(DamagedError):
        return any(map(is_own, names(read_yaml(path / "config.yaml"))))
    return False


NAMING = ("algorithm", "task", "name", "reader")
"""Keys of a config, in any section, whose values may name objects."""


def how_to_go_on(path: Path) -> str:
    """Advice about a run that ended too early, as far as its files say, or about a study in its place."""
    if (path / STUDY).exists():
        cells = sorted(file.parent.name for file in path.glob("cells/*/config.yaml"))
        return (
            f"it is a study of several runs; give the folder of one, such as {path / 'cells' / cells[0]}"
            if cells
            else "it is a study of which no run has begun"
        )
    if has_checkpoint(path):
        return f"finished rounds are kept; continue with: {way_to_continue(path)}"
    if rounds_on_disk(path):
        return (
            "finished rounds are kept, but no checkpoint (checkpoint.every), so that it cannot be continued"
        )
    return "no round was finished; run the same command again"


def describe_run(path: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write config.yaml, from which the run can be repeated, and environment.json: versions and digests."""
    import yaml

    versions = {name: version for name in PACKAGES if (version := _version(name))}
    machine = {"python": platform.python_version(), "platform": platform.platform(), "packages": versions}
    write_text(path / "environment.json", json.dumps({**machine, **facts}, indent=1, allow_nan=False) + "\n")
    write_text(path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))


def add_nodes(path: Path, nodes: Sequence[Mapping[str, str]]) -> None:
    """Write the nodes of the cluster into environment.json: which they are, and what each computes with."""
    file = path / "environment.json"
    facts = {**read_json(file, dict), "nodes": [dict(node) for node in nodes]}
    write_text(file, json.dumps(facts, indent=1, allow_nan=False) + "\n")


def check_same_inputs(path: Path, facts: Mapping[str, Any]) -> None:
    """Check that a run is continued with the data it began with; warn about other package versions.

    Args:
        facts: The digests of images, partition and trace now.

    Raises:
        ConfigError: The images, their partition or the trace changed.
    """
    file = path / "environment.json"
    before = read_json(file, dict)
    for key, name in DIGESTS.items():
        if key.endswith(SOURCE) and key not in before:  # a run of a version that did not write it
            continue
        if before.get(key) != facts.get(key):
            raise ConfigError(
                f"{name} changed since the run in {path} began, or its config.yaml did; put back what it "
                f"began with"
            )
    with reading(file):
        changed = [name for name, was in before.get("packages", {}).items() if was != _version(name)]
    if changed:
        log.warning(
            "%s began with other versions of %s, so the last bits may differ; %s lists those to install for "
            "the same bits",
            *(path, ", ".join(changed), file.name),
        )


class RunFolder:
    """Writes rounds into the folder of a run as they finish."""

    def __init__(
        self,
        path: Path,
        domains: Mapping[str, str],
        tensorboard: bool = True,
        tracking: Tracking = NO_TRACKING,
        claim: str = "",
    ) -> None:
        """Prepare the writers of a run folder.

        Args:
            path: An existing folder.
            domains: Domain of every client, by id.
            tensorboard: Also write the rounds for TensorBoard.
            tracking: Trackers to which the rounds are also sent.
            claim: Token in the marker of the folder, from the command that started this process; empty: the
                marker is not compared.
        """
        self.path = path
        self._claim = claim
        self.history = History(path)
        self._domains = domains
        self._rows = RoundRows(path, self.history)
        trackers = tracking.make(path, self.event)
        self._writers: tuple[Board | Tracker, ...] = (*([Board(path)] if tensorboard else []), *trackers)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for writing rounds in this folder while the block runs.

        Raises:
            ConfigError: Another process holds the lock and does not end soon, or another command has begun a
                run in the folder since.
        """
        with hold_lock(self.path, WRITER):
            mark = read_mark(self.path)
            if self._claim and (mark is None or mark.claim != self._claim):
                raise ConfigError(
                    f"output: another command has begun in {str(self.path)!r} since; wait or stop it"
                )
            ending: Ending = "failed"
            try:
                yield
                ending = "finished"
            except (KeyboardInterrupt, GeneratorExit, StoppedError):
                ending = "killed"
                raise
            finally:
                for writer in self._writers:
                    writer.close(ending)

    def begin(self, rounds: int = 0) -> None:
        """Keep the first `rounds` rounds that are on disk and remove the later ones."""
        remove_file(self.path / TENSORS)  # a run with this file counts as finished
        self.history.cut(rounds)
        self._rows.begin()
        for writer in self._writers:
            writer.begin(self.history.entries())

    def add(self, done: Round) -> None:
        """Append a round to rounds.jsonl, and write its tables into the history."""
        number = done.row["round"]
        tables = {
            "rounds": [done.row],
            "clients": self._client_rows(done),
            "transfers": [{"round": number, **row} for row in done.ledger.transfers],
        }
        for name, rows in done.ledger.tables.items():
            tables[name] = [{"round": number, **row} for row in rows]
        tables = without_nonfinite(tables)
        self.history.write(number, done.row, tables)
        self._rows.add(done.row)
        for writer in self._writers:
            writer.add({"row": done.row, "tables": tables})

    def event(self, event: Event) -> None:
        """Append a failure to events.jsonl at once, because the process may end right after it."""
        row = {**asdict(event), "round": event.round + 1, "time": time.time()}
        try:
            with (self.path / EVENTS).open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as err:
            raise StorageError(f"cannot write {self.path / EVENTS}: {err.strerror}") from err

    def write_tables(self) -> None:
        """Write every table of the run, and the table of events, as Parquet files."""
        self.history.write_tables(self.path)
        if (self.path / EVENTS).exists():
            write_parquet(self.path / "events.parquet", _events(self.path / EVENTS))

    def write_without(self, scores: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Write without.json: scores of the final model with tensors at their start values; None: no file."""
        path = self.path / WITHOUT
        if scores is None:
            remove_file(path)
        else:
            finite = without_nonfinite(dict(scores))
            write_text(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")

    def finish(self, params: Params, files: Mapping[str, bytes] | None = None) -> str:
        """Write all tables and the final tensors, last of all; returns the sha256 of the tensors.

        Args:
            params: Final tensors by global name.
            files: Contents of other files with these tensors, by name; they are written next to them.
        """
        from safetensors.torch import save_file

        self.write_tables()
        for name, data in (files or {}).items():
            write_bytes((self.path / TENSORS).with_name(name), data)
        tensors = {name: value.contiguous() for name, value in params.items()}
        write_whole(self.path / TENSORS, lambda p: save_file(tensors, p))
        return digest(params)

    def _client_rows(self, done: Round) -> list[dict[str, Any]]:
        number = done.row["round"]
        rows = []
        for answer in done.ledger.scores:
            for name, value in answer.metrics.items():
                model, _, metric = name.rpartition("/")
                rows.append(self._row(number, answer.exchange, answer.client, model or SENT, metric, value))
        for model, scores in done.scores.items():
            for kind in ("clients", "domains", "held_out", "unseen"):
                for name, score in getattr(scores, kind).items():
                    own = {score.metric: score.value, "loss": score.loss, **score.more}
                    for metric, value in own.items():
                        if value is not None:  # its examples define it
                            rows.append(self._row(number, f"report_{kind}", name, model, metric, value))
        return rows

    def _row(
        self, round: int, exchange: str, client: str, model: str, metric: str, value: float
    ) -> dict[str, Any]:
        return {
            "round": round,
            "exchange": exchange,
            "client": client,
            "domain": self._domains.get(client, client),
            "model": model,
            "metric": metric,
            "value": float(value),
        }


def _events(path: Path) -> list[dict[str, Any]]:
    """The complete lines of events.jsonl; a crash may have cut the last line short."""
    events = []
    for line in read_bytes(path).splitlines():
        with suppress(DocumentError):
            event = parse_json(line)
            events += [event] if isinstance(event, dict) else []
    return events


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
