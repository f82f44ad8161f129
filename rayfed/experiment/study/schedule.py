"""Runs the cells of a study that are not finished: in which order, what waits for what, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rayfed.errors import ConfigError, RayFedError
from rayfed.experiment.plan import make_plan
from rayfed.experiment.runner import check_cluster
from rayfed.experiment.single_run import Show, advice
from rayfed.experiment.study.coordinates import SEED, Key, find_key, in_words
from rayfed.experiment.study.progress import Progress
from rayfed.experiment.study.run_cell import CommonParts, Stop, StudyCell
from rayfed.experiment.study.side_by_side import side_by_side
from rayfed.experiment.study.study_folder import Manifest, is_finished
from rayfed.record.trackers.tracker import check_trackers
from rayfed.terminal.arguments import command_line
from rayfed.terminal.supervisor import note_advice

if TYPE_CHECKING:
    from rayfed.config.schema import Config


def again() -> str:
    """The command or the call that continues a study, for messages."""
    return command_line() or "the same study.run(FOLDER)"


More: TypeAlias = "Callable[[Mapping[Key, str], Mapping[Key, str]], Mapping[Key, Config]]"
"""Gets what became of all cells, and gives more of them."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order and the conditions in which the cells of a study are run.

    Attributes:
        manifest: The manifest, which holds all cells.
        configs: Their experiments, each with the folder of the cell as `output`.
        after: The cells that each cell waits for.
        at_once: Number of cells side by side, or `auto`.
        stop: The rule that may end a cell; None: there is none.
        show: What is shown; its `resume_command` continues the study.
        progress: Is told which cells begin and end.
        more: Called when all cells have ended, with the digests of the finished ones and why others failed;
            gives the experiments of more cells, which are in the manifest, or none at the end.
    """

    manifest: Manifest
    configs: Mapping[Key, Config]
    after: Mapping[Key, Sequence[Key]]
    at_once: int | Literal["auto"]
    stop: Stop | None
    show: Show
    progress: Progress
    more: More

    def run(self, common: CommonParts, finished: dict[Key, str]) -> dict[Key, str]:
        """Run what is not finished.

        Args:
            common: What was made for the cells already.
            finished: Gets the digest of each finished cell, and an empty one of each that `stop` ended.

        Returns:
            Why cells failed.

        Raises:
            ConfigError: A cell cannot be run; found before any of them begins.
        """
        failed: dict[Key, str] = {}
        waiting = self._open_cells(self.configs, finished) or self._grown(finished, failed)
        how = side_by_side(self.at_once, list(waiting.values()), self.stop)
        if how.why:
            self.progress.tell(how.why)
        self._check(waiting, common)  # before anything is started
        self.progress.start(self.configs, self.manifest.names, finished)
        show = replace(self.show, whole=self.manifest.path)
        with _advised(advice(self.manifest.path, show)), how.lanes(show, common) as side:
            running: dict[str, Key] = {}
            while waiting or running:
                for key in self._ready(waiting, finished, failed, side.size - len(running)):
                    config = waiting.pop(key)
                    running[str(config.output)] = key
                    self.progress.begin(key, side.size)
                    at = dict(zip(self.manifest.names, key, strict=True))
                    side.start(StudyCell(at=at, config=config, stop=self.stop))
                for cell, outcome in side.ended():
                    key = running.pop(str(cell.config.output))
                    if outcome.failed:
                        failed[key] = outcome.failed
                    else:
                        self.manifest.note(key, sha256=outcome.sha256, stopped=outcome.stopped)
                        finished[key] = outcome.sha256
                    self.progress.end(key, outcome)
                self.progress.look()
                if not waiting and not running:
                    waiting = self._grown(finished, failed)
        return failed

    def _grown(self, finished: dict[Key, str], failed: Mapping[Key, str]) -> dict[Key, Config]:
        """The cells that a study has grown by and that are not finished; empty: it does not grow any more."""
        waiting: dict[Key, Config] = {}
        while not waiting and (added := self.more(finished, failed)):
            waiting = self._open_cells(added, finished)
            self.progress.grow(added, finished)
        return waiting

    def _in_words(self, key: Key) -> str:
        return in_words(key, self.manifest.names)

    def _open_cells(self, configs: Mapping[Key, Config], finished: dict[Key, str]) -> dict[Key, Config]:
        """The cells that are not finished, in the order in which they begin; notes those that are."""
        waiting = {}
        for key in in_order(configs, self.manifest.names):
            entry, config = self.manifest.entries[key], configs[key]
            digest = is_finished(entry, config.rounds, self.manifest.place(key))
            if config.evaluation.model_of is not None:  # another model may be there to be scored
                waiting[key] = config
            elif digest or (entry.stopped and self.stop is not None):
                finished[key] = digest
            else:
                waiting[key] = config
        return waiting

    def _ready(
        self, waiting: dict[Key, Config], finished: Mapping[Key, str], failed: dict[Key, str], room: int
    ) -> list[Key]:
        """The next cells that can begin; those that wait for a failed one fail, too."""
        ready: list[Key] = []
        for key in list(waiting):
            needs = self.after.get(key, ())
            if broken := [each for each in needs if each in failed]:
                del waiting[key]
                failed[key] = f"it waits for {self._in_words(broken[0])}, which failed"
            elif len(ready) < room and all(each in finished for each in needs):
                ready.append(key)
        return ready

    def _check(self, waiting: Mapping[Key, Config], common: CommonParts) -> None:
        """Prepare one cell of each row and part, so that what cannot be run is found before any cell begins.

        A cell that waits for another one may need what that one writes, other than the model that it scores.
        """
        seen: set[Key] = set()
        for config in {config.cluster: config for config in waiting.values()}.values():
            check_cluster(config)
        for key, config in waiting.items():
            check_trackers(config.trackers)
            at = zip(self.manifest.names, key, strict=True)
            alike = tuple(value for name, value in at if name != SEED)
            if alike not in seen and (config.evaluation.model_of or not self.after.get(key)):
                seen.add(alike)
                make_plan(config, Path(str(config.output)), common.of(config))


@contextmanager
def _advised(words: str) -> Iterator[None]:
    """Add advice to what ends the block early, unless the run of a cell has added it."""
    note_advice(words)
    try:
        yield
    except (KeyboardInterrupt, RayFedError) as err:
        if not getattr(err, "__notes__", ()):
            err.add_note(words)
        raise


def in_order(keys: Iterable[Key], names: Sequence[str]) -> list[Key]:
    """The cells in the order in which they begin: those of a seed together, else as they were given."""
    every = list(keys)
    if SEED not in names:
        return every
    place = names.index(SEED)
    seeds = list(dict.fromkeys(key[place] for key in every))
    return sorted(every, key=lambda key: seeds.index(key[place]))


def waits_of(
    after: Mapping[Any, Any], names: Sequence[str], cells: Mapping[Key, Any]
) -> dict[Key, tuple[Key, ...]]:
    """The cells that each cell waits for.

    Raises:
        ConfigError: One of them is no cell, or cells wait for each other.
    """
    waits: dict[Key, tuple[Key, ...]] = {}
    for at, needed in after.items():
        several = needed if isinstance(needed, list | set) else [needed]
        waits[find_key(at, names)] = tuple(find_key(each, names) for each in several)
    for key in (*waits, *(each for needed in waits.values() for each in needed)):
        if key not in cells:
            raise ConfigError(f"after: {in_words(key, names)} is no cell of the study")
    open_cells = dict(waits)
    while open_cells:
        free = [key for key, needed in open_cells.items() if not any(each in open_cells for each in needed)]
        if not free:
            raise ConfigError(f"after: {in_words(next(iter(open_cells)), names)} waits for itself")
        for key in free:
            del open_cells[key]
    return waits
