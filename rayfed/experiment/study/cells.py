"""A study: experiments by coordinates, which are run as one, go on as one, and are read as one table."""

from __future__ import annotations

import html
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rayfed.columns import ADAPTED, HELD_OUT, UNSEEN, Unit, is_result, share_of
from rayfed.config.schema import Config, Request
from rayfed.config.variants import PROTOCOLS
from rayfed.errors import ConfigError, PartsFailedError, adding, count_of, unknown
from rayfed.evaluation.family_tests import LEVEL, MARGIN, resolution_in_words
from rayfed.experiment.equal_work import checked_unit
from rayfed.experiment.finished_run import Run
from rayfed.experiment.kept_session import QUIETLY, Shown
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.coordinates import (
    PART,
    SEED,
    Key,
    Value,
    in_words,
    keys_of,
    labels_of,
    row_names,
    row_of,
)
from rayfed.experiment.study.described import Described, Fixed, RecordedExperiment, one_method
from rayfed.experiment.study.equal_cells import METHOD, with_equal_work
from rayfed.experiment.study.paired_tests import check_share, checked_margin, paired_tests
from rayfed.experiment.study.progress import Progress
from rayfed.experiment.study.protocol_cells import protocol_cells, protocol_of
from rayfed.experiment.study.run_cell import CommonParts, Stop
from rayfed.experiment.study.runs import Runs
from rayfed.experiment.study.schedule import Schedule, again, waits_of
from rayfed.experiment.study.scores import BY_PROTOCOL, VALIDATION, by_seed, check_column, larger_of
from rayfed.experiment.study.study_folder import Manifest, check_same, digest_of, held, is_finished
from rayfed.record.recorded_run import Rule
from rayfed.report.tuned_values import TunedValues
from rayfed.report.work_notes import COUNTED, Rounds, equal_notes, mean_work

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.experiment.study.frame import TableFrame

log = logging.getLogger(__name__)


GLOBAL_MODEL = "global"
"""The model that is scored on what no client has."""


class Study:
    """Experiments by coordinates, such as method, setting, part of a protocol and seed.

    Attributes:
        names: Names of the coordinates.
        cells: The experiments by coordinates, in their order; a tuple of values each.
        finished: The runs of the finished cells; cells that a rule stopped are among them.
        path: Folder of the study; None: it was not run yet, or nothing was written where you look.
        tuned: What `rayfed.tuned` tried and chose for each method before; None: nothing was tuned.
    """

    def __init__(
        self,
        cells: Mapping[Any, Described] | Iterable[tuple[Any, Described]],
        after: Mapping[Any, Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        score: str | None = None,
        reported: Rule | None = None,
        equal: Unit | None = None,
        margin: float | None = None,
    ) -> None:
        """Describe a study; nothing is read, checked or started before `run`.

        Cells draw no figures and write nothing for TensorBoard, unless their experiments say so.

        Args:
            cells: The experiments by their coordinates, or pairs of both. Coordinates are a tuple, or a
                dict of names. `seed` is the unit of tests, and scores are means over `part`. A cell whose
                experiment has a protocol becomes one cell for each of its runs, with the coordinate `part`.
            after: By the coordinates of a cell those of the one, or a list of those, that it waits for.
            names: Names of the coordinates of tuples; None: (method, setting, part, seed), and without what
                shorter tuples lack: part, then setting, then seed.
            score: The column that is compared; None: the metric of the runs, and of a protocol the score on
                what no client has.
            reported: The round that is reported: that of the `final` model, the `last` evaluated one, or the
                one with the best `validation` score; None: as the protocol has it, else that of the model.
            equal: What all methods of a setting have as much of as the one that has most, to half a round:
                `steps`, `examples`, `flops` or `bytes`. The others get more rounds.
            margin: Largest difference between rows that count as equally good, in the unit of the score;
                None: 0.01 of a share such as an accuracy, and none of other scores. State it before the runs.

        Raises:
            ConfigError: Coordinates or the margin are wrong, a cell waits for one that is none, or for
                itself.
        """
        self.names, self.cells = keys_of(cells, names)
        self._after = waits_of(after or {}, self.names, self.cells)
        self._score = score
        self._reported: Rule | None = reported
        self._equal = checked_unit(equal)
        self._is_equal = False
        self._margin = checked_margin(margin)
        self._protocol = ""
        self._scored: dict[Key, Key] = {}
        self.finished: dict[Key, Run] = {}
        self.path: Path | None = None
        self.tuned: TunedValues | None = None
        self._folder: Path | None = None
        self._kept: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        folder: str | Path | None = None,
        at_once: int | Literal["auto"] = 1,
        stop: Stop | None = None,
        quiet: bool | None = None,
        *,
        progress: Progress | None = None,
    ) -> Study:
        """Run the cells that are not finished; those that were interrupted go on after their last checkpoint.

        Args:
            folder: Folder of the study; None: nothing is written where you look.
            at_once: Number of cells that run side by side: with `cluster="inline"` in as many processes,
                on Ray with a part of the cluster each; `auto`: as many as there are processors, or room on
                the cluster. The results are the same, to the bit.
            stop: Called after each round with the coordinates of the cell, by name, and the rows of its
                rounds so far; True ends the cell. It goes on in a call without `stop`.
            quiet: Show nothing; None: show what is done in a notebook and on a terminal.
            progress: Shows which cells begin and end in its own way; None: lines of text are shown.

        Returns:
            This study.

        Raises:
            ConfigError: Something in a cell is wrong, or the folder holds something else, or a cell with
                another description; found before any cell begins.
            PartsFailedError: Cells failed; the others are finished, and `finished` has them.
            ClusterError: Ray was lost, or could not be started.
        """
        self._begin(at_once)
        if self._kept is None and folder is None:
            self._kept = tempfile.TemporaryDirectory(prefix="rayfed-")
        if folder is not None:
            self._kept = None
        place = Path(self._kept.name) / "study" if self._kept is not None else Path(str(folder)).expanduser()
        self.__dict__.pop("results", None)
        self.finished = {}
        with Shown(quiet) if progress is None else nullcontext(True) as hidden:
            common = CommonParts()
            configs = self._configs(place.absolute(), common)
            with held(place.absolute(), self.names) as manifest:
                self.path = None if self._kept is not None else place
                show = Show(hidden, resume_command=again())
                failed = self._run_cells(
                    manifest, configs, common, show, at_once=at_once, stop=stop, progress=progress
                )
        if failed:
            reasons = "; ".join(f"{in_words(key, self.names)}: {why}" for key, why in failed.items())
            error = PartsFailedError(f"{len(failed)} of {len(self.cells)} cells failed: {reasons}")
            error.add_note(f"what is finished is kept; continue with: {again()}")
            raise error
        return self

    def _begin(self, at_once: int | Literal["auto"]) -> None:
        """A run begins; a study that grows forgets the cells of an earlier one. Args: as of `run`."""

    def _run_cells(
        self,
        manifest: Manifest,
        configs: Mapping[Key, Config],
        common: CommonParts,
        show: Show,
        *,
        at_once: int | Literal["auto"] = 1,
        stop: Stop | None = None,
        progress: Progress | None = None,
    ) -> dict[Key, str]:
        """Run the cells that are not finished in a folder that this process holds; returns why cells failed.

        Raises:
            ConfigError: A cell cannot be run, or its folder holds a run of another description.
        """
        configs = self._enter(manifest, configs)
        self._folder = manifest.path
        digests: dict[Key, str] = {}
        schedule = Schedule(
            manifest=manifest,
            configs=configs,
            after=self._after,
            at_once=at_once,
            stop=stop,
            show=show,
            progress=progress or Progress(show.tell),
            more=partial(self._more, manifest, configs, common),
        )
        try:
            return schedule.run(common, digests)
        finally:  # also after Ctrl-C
            for key in (key for key in self.cells if key in digests):
                self._finish(key, configs[key], digests[key])
            self.__dict__.pop("results", None)

    @classmethod
    def opened(cls, folder: Path) -> Study:
        """The study in a folder, with the cells that have begun.

        Raises:
            ConfigError: The folder holds no study, or none of its cells has begun.
            DamagedError: A file of it cannot be read.
        """
        manifest = Manifest.read(folder)
        begun = [key for key in manifest.entries if (manifest.place(key) / "config.yaml").exists()]
        if not begun:
            raise ConfigError(f"study: none of the cells in {folder} has begun")
        cells = [
            (dict(zip(manifest.names, key, strict=True)), RecordedExperiment(manifest.place(key)))
            for key in begun
        ]
        study = cls(cells, score=manifest.score)
        study._reported, study._protocol = manifest.reported, manifest.protocol
        study._margin, study._equal, study._is_equal = manifest.margin, manifest.equal, True
        study.tuned = None if manifest.tuned is None else TunedValues.read(manifest.tuned)
        study.path = study._folder = folder
        study._find_finished(manifest)
        return study

    def _find_finished(self, manifest: Manifest) -> None:
        """Fill `finished` with the cells that have ended."""
        for key in self.cells:
            entry = manifest.entries[key]
            digest = is_finished(entry, entry.rounds, manifest.place(key))
            if digest or entry.stopped:
                self.finished[key] = Run(manifest.place(key), digest)

    def _configs(self, place: Path, common: CommonParts) -> dict[Key, Config]:
        """The config of each cell; cells with a protocol become one for each of its runs.

        Raises:
            ConfigError: A config is wrong, compares methods, or its seed is not that of the coordinates.
            RayFedError: A client that was tried for `equal` failed.
        """
        asked: dict[Key, Request] = {}
        for key, cell in self.cells.items():
            own = {name: value for name, value in QUIETLY.items() if name not in cell.given}
            with adding(f" (the cell {in_words(key, self.names)})"):
                config = one_method(cell.config(output=str(place), overwrite=False, **own), cell.given)
            if SEED in self.names and key[self.names.index(SEED)] != config.seed:
                raise ConfigError(
                    f"seed: the experiment of the cell {in_words(key, self.names)} has seed={config.seed}; "
                    f"give it the seed of its coordinates"
                )
            asked[key] = config
        if (protocol := protocol_of(asked)) != "single":
            configs = self._expand(protocol, asked, common)
        else:
            configs = {key: config.alone() for key, config in asked.items()}
        self._equal = self._equal or next((each.equal for each in asked.values() if each.equal), None)
        if self._equal and not self._is_equal:
            return with_equal_work(configs, self.names, self._scored, self._equal, common)
        return configs

    def _expand(self, protocol: str, asked: Mapping[Key, Request], common: CommonParts) -> dict[Key, Config]:
        """Replace each cell by the runs of its protocol.

        Raises:
            ConfigError: Cells wait for others, or there is a coordinate `part`.
        """
        if self._after or PART in self.names:
            raise ConfigError(
                f"protocol: cells with protocol={protocol} have no after, and no part of their own"
            )
        parts = protocol_cells(asked, self.names, common.shared)
        self.cells = {
            key: Fixed.of(config, self.cells[parts.cell_of[key]].given)
            for key, config in parts.configs.items()
        }
        self.names, self._scored, self._protocol = parts.names, dict(parts.scores), protocol
        self._after = {key: (trained,) for key, trained in parts.scores.items()}
        if self._reported is None and PROTOCOLS[protocol].by_validation:
            self._reported = VALIDATION
        return dict(parts.configs)

    def _enter(self, manifest: Manifest, configs: Mapping[Key, Config]) -> dict[Key, Config]:
        """Write the cells into the manifest, and give each config its folder.

        Raises:
            ConfigError: A folder holds a run of another description.
        """
        manifest.add(list(self.cells))
        self._note(manifest)
        placed = {key: self._placed(manifest, key, config) for key, config in configs.items()}
        for key, config in placed.items():
            check_same(key, self.names, config, manifest.entries[key], manifest.place(key))
        for key, config in placed.items():
            entry, digest = manifest.entries[key], digest_of(config)
            if entry.description != digest:  # not begun, or with more rounds than before
                entry = replace(entry, description=digest, rounds=config.rounds, sha256="", stopped=0)
            # A call that was killed may have left a finished cell that it had no time to note.
            entry = replace(entry, sha256=is_finished(entry, config.rounds, manifest.place(key)))
            manifest.entries[key] = entry
        manifest.write()
        return placed

    def _note(self, manifest: Manifest) -> None:
        """Put into the manifest what it has besides cells."""
        manifest.score, manifest.reported = self._score, self._reported or "final"
        if manifest.margin != self._margin and any(entry.sha256 for entry in manifest.entries.values()):
            changed = f"{self._margin} instead of {manifest.margin}"
            log.warning("margin: %s, with which cells were finished; verdicts follow the new one", changed)
        manifest.protocol, manifest.margin = self._protocol, self._margin
        manifest.equal = self._equal
        manifest.tuned = manifest.tuned if self.tuned is None else self.tuned.plain()
        manifest.search = self._record() or manifest.search

    def _record(self) -> dict[str, Any] | None:
        """The trials of a search, as plain containers; None: this is none."""
        return None

    def _placed(self, manifest: Manifest, key: Key, config: Config) -> Config:
        """The config of a cell with its folder, and with that of the cell whose model it scores."""
        if key in self._scored:
            trained = str(manifest.place(self._scored[key]).absolute())
            config = replace(config, evaluation=replace(config.evaluation, model_of=trained))
        return replace(config, output=str(manifest.place(key)), overwrite=False)

    def _more(
        self,
        manifest: Manifest,
        configs: dict[Key, Config],
        common: CommonParts,
        digests: Mapping[Key, str],
        failed: Mapping[Key, str],
    ) -> dict[Key, Config]:
        """The configs of more cells of a study that grows, which are added to `configs` and the manifest."""
        for key in (key for key in self.cells if key in digests and key not in self.finished):
            self._finish(key, configs[key], digests[key])
        self.__dict__.pop("results", None)
        added = self._grow(failed)
        if added is None:
            before = manifest.score, manifest.search
            self._note(manifest)
            if (manifest.score, manifest.search) != before:
                manifest.write()
            return {}
        more = added._configs(manifest.path, common)
        self.cells |= added.cells
        self._after |= added._after
        self._scored |= added._scored
        more = self._enter(manifest, more)
        configs |= more
        return more

    def _grow(self, failed: Mapping[Key, str]) -> Study | None:
        """More cells, now that all others have ended; None: the study ends. A search has some.

        Args:
            failed: Why cells failed.
        """
        return None

    def _finish(self, key: Key, config: Config, digest: str) -> None:
        self.finished[key] = Run(Path(str(config.output)), digest, config, self._kept)

    @cached_property
    def results(self) -> pd.DataFrame:
        """A row for each finished cell: its coordinates, and the columns of the round that is reported.

        Columns of durations are left out, so that the frame is the same whenever the study is repeated.
        """
        import pandas as pd

        rows = []
        for key, run in self.finished.items():
            at = dict(zip(self.names, key, strict=True))
            row = run.recorded.reported_by(self._reported or "final")
            results = {name: value for name, value in row.items() if is_result(name)}
            rows.append(at | {f"{n}_reported" if n in at else n: value for n, value in results.items()})
        return pd.DataFrame(rows, columns=None if rows else list(self.names))

    @property
    def labels(self) -> dict[Key, str]:
        """The label of each row of the tables, by its coordinates without seed and part."""
        return labels_of(self.cells, self.names)

    @property
    def rows(self) -> dict[str, list[Run]]:
        """The finished runs of each row of the tables, by its label."""
        labels = self.labels
        rows: dict[str, list[Run]] = {label: [] for label in labels.values()}
        for key, run in self.finished.items():
            rows[labels[row_of(key, self.names)]].append(run)
        return rows

    @property
    def runs(self) -> Runs:
        """The finished runs by coordinates, and by row."""
        return Runs(self.names, self.cells, self.finished, self.rows)

    @property
    def seeds(self) -> list[Value]:
        """The seeds, in their order."""
        if SEED not in self.names:
            return []
        return list(dict.fromkeys(key[self.names.index(SEED)] for key in self.cells))

    @property
    def metric(self) -> str:
        """The metric of the runs, such as `accuracy`."""
        self._check_begun()
        return next(iter(self.finished.values())).metric

    @property
    def score(self) -> str:
        """The column that is compared."""
        if self._score is not None:
            return self._score
        wanted = BY_PROTOCOL.get(self._protocol, "{}").format(self.metric)
        return wanted if wanted in self.results else self.metric

    @property
    def scores(self) -> pd.DataFrame:
        """The compared score: a row for each seed, a column for each row of the tables.

        Of several parts it is their mean; of base_to_new the harmonic mean, and of cross_dataset the mean of
        the data sets without clients.
        """
        return self._scores(None)

    def _scores(self, score: str | None, labels: Mapping[Key, str] | None = None) -> pd.DataFrame:
        """The scores of a column, as of `scores`. Args: labels: those of some rows; None: of all."""
        self._check_begun()
        column = score or self.score
        check_column(self.results, column, self.names)
        place = self.names.index(PART) if PART in self.names else None
        parts = [] if place is None else [key[place] for key in self.cells]
        return by_seed(self.results, column, self.names, labels or self.labels, parts, self._protocol)

    def _check_begun(self) -> None:
        if not self.finished:
            raise ConfigError("study: no cell is finished; call study.run(FOLDER) first")

    def margin_of(self, score: str | None = None) -> float | None:
        """Largest difference between rows that count as equally good; None: none do.

        Args:
            score: The column; None: `Study.score`. The margin of the study is for all columns of its metric.

        Raises:
            ConfigError: The margin of the study is 1 or more, and its metric a share.
        """
        column = score or self.score
        if self._margin is not None and (column == self.score or self.metric in column):
            return check_share(self._margin, self.metric if self.metric in column else "")
        return MARGIN if self.metric in column and share_of(self.metric) != 1 else None

    def tests(
        self,
        against: Any = None,
        score: str | None = None,
        level: float = LEVEL,
        margin: float | None = None,
    ) -> TableFrame:
        """Paired tests of rows of the table against others: simultaneous intervals, and verdicts.

        The unit is a seed: the scores of its parts, such as held-out domains, are averaged first. Rows whose
        runs have the same bytes as those that they are compared with are not tested; their verdict is `same`,
        as that of rows whose difference is 0 in every seed.

        Args:
            against: The label of the row that others are compared with; None: the first row. With a value of
                the first coordinate, or a dict of some, rows are compared with the one that has these, and
                is otherwise like them.
            score: The column; None: `Study.score`.
            level: Probability that all intervals contain their true differences.
            margin: Largest difference between rows that count as equally good, in the unit of the column;
                None: as of `Study`.

        Returns:
            A row for each test, with `against`, `difference`, `low`, `high`, `p`, `p_corrected` (for all of
            them), `seeds`, `verdict` and `seeds_needed`: see `rayfed.evaluation.family_tests`. The verdict is
            `better` or `worse` where the interval is on one side of 0, `as good` where it is within the
            margin, else `open`. `attrs["resolution"]` has the median and the largest half of an interval, and
            `attrs["intervals"]` how their common critical value was found.

        Raises:
            ConfigError: There is no such row or column, nothing to compare, or a number is not allowed.
        """
        from rayfed.experiment.study.frame import TableFrame

        if not 0 < level < 1:
            raise ConfigError(f"level: {level!r} is no probability between 0 and 1")
        scores = self._scores(score)
        column = score or self.score
        metric = self.metric if self.metric in column else ""
        width = self.margin_of(column) if margin is None else check_share(checked_margin(margin), metric)
        pairs = self._pairs(against)
        same = self._same_bytes(pairs, scores)
        table = paired_tests(scores, pairs, larger_of(column, self.metric), level, width, same)
        family = table.attrs["family"]
        share = share_of(self.metric) if self.metric in column else 1.0
        unit = " points" if share != 1 else ""
        one_point = " point" if width is not None and share * width == 1 else unit
        frame = TableFrame(table)
        count = count_of(len(table) - len(same), "test")
        notes = [
            f"mean over seeds of the paired differences; low, high: simultaneous {100 * level:g} % intervals "
            f"of {count} with moderated variances ({family.how}); p_corrected: for all of them",
            "as good: within "
            + (f"{share * width:g}{one_point} of 0" if width is not None else "no margin (margin=...)")
            + "; seeds_needed: would decide an open test four times of five, if its difference is that found",
            resolution_in_words(family, unit, share),
            *(f"{one}: the same bytes as {other} in every run, not tested" for one, other in same),
        ]
        frame.attrs = {
            "title": f"{column}: differences",
            "metric": self.metric if self.metric in column else "",
            "intervals": family.how,
            "resolution": family.resolution,
            "notes": tuple(filter(None, notes)),
        }
        return frame

    def _same_bytes(self, pairs: Sequence[tuple[str, str]], scores: pd.DataFrame) -> list[tuple[str, str]]:
        """The pairs whose runs have the same final tensors and the same scores, in all parts and seeds."""
        own = row_names(self.names)
        digests: dict[str, dict[Key, str]] = {}
        for key, run in self.finished.items():
            rest = tuple(value for name, value in zip(self.names, key, strict=True) if name not in own)
            digests.setdefault(self.labels[row_of(key, self.names)], {})[rest] = run.sha256
        return [
            (one, other)
            for one, other in pairs
            if digests.get(one)
            and digests[one] == digests.get(other)
            and all(digests[one].values())
            and scores[one].equals(scores[other])
        ]

    def _pairs(self, against: Any) -> list[tuple[str, str]]:
        """Labels of the tested rows, and of those that they are compared with."""
        labels = self.labels
        names = row_names(self.names)
        if against is None or (isinstance(against, str) and against in labels.values()):
            base = next(iter(labels.values())) if against is None else against
            pairs = [(label, base) for label in labels.values() if label != base]
        else:
            wanted = self._wanted(against)
            by_row = {row: dict(zip(names, row, strict=True)) for row in labels}
            pairs = []
            for row, at in by_row.items():
                other = tuple((at | wanted)[name] for name in names)
                if other in labels and other != row:
                    pairs.append((labels[row], labels[other]))
        if not pairs:
            raise ConfigError(
                f"study: no row can be compared with {against!r}; the rows are: {', '.join(labels.values())}"
            )
        return pairs

    def _wanted(self, against: Any) -> dict[str, Any]:
        """The coordinates of the rows that others are compared with."""
        names = row_names(self.names)
        if isinstance(against, Mapping):
            wanted = dict(against)
        else:
            values = against if isinstance(against, tuple) else (against,)
            wanted = dict(zip(names, values, strict=False))
        for name, value in wanted.items():
            known = [] if name not in names else [row[names.index(name)] for row in self.labels]
            if value not in known:
                every = [*self.labels.values(), *map(str, dict.fromkeys(known))]
                raise ConfigError(unknown("study: against", str(value), list(dict.fromkeys(every))))
        return wanted

    @property
    def table(self) -> TableFrame:
        """Mean, standard deviation over the seeds, mean over domains, worst client and work of each row.

        The work is the mean over the row's runs: training batches of all clients (`local_steps`), examples
        and tokens in them, operations of training, and bytes sent and received.
        `verdict` is that of `tests` against the first row, and `p_corrected` its p for all rows, where there
        are two seeds or more. `model` says whose scores these
        are (`Run.deployed`), where methods that deploy the clients' personal models are compared with
        methods that deploy the global one. `study.table(format)` is the table as a text.
        """
        import pandas as pd

        from rayfed.experiment.study.frame import TableFrame

        scores, metric, column = self.scores, self.metric, self.score
        pairs = self._pairs(None) if len(self.labels) > 1 else []
        same = self._same_bytes(pairs, scores)
        larger, margin = larger_of(column, metric), self.margin_of()
        tests = paired_tests(scores, pairs, larger, LEVEL, margin, same)
        of_nobody = column.startswith((HELD_OUT, UNSEEN, ADAPTED))  # no client has what is scored
        rows: dict[str, dict[str, Any]] = {}
        for label, runs in self.rows.items():
            known = scores[label].dropna()
            row: dict[str, Any] = {
                "model": (GLOBAL_MODEL if of_nobody else runs[0].deployed) if runs else None,
                column: known.mean() if len(known) else None,
                "deviation": known.std(ddof=1) if len(known) > 1 else None,
            }
            own = self._of_row(label)
            for name in (f"{metric}_domain", f"worst_client_{metric}"):
                row[name] = own[name].mean() if name in own and own[name].notna().any() else None
            tested = label in tests.index
            row |= mean_work([run.recorded.rounds for run in runs])
            row["p_corrected"] = tests.loc[label, "p_corrected"] if tested else None
            row["verdict"] = tests.loc[label, "verdict"] if tested else ""
            rows[label] = row
        if len({row["model"] for row in rows.values()}) == 1:
            for row in rows.values():
                del row["model"]
        plain = pd.DataFrame.from_dict(rows, orient="index")
        if not pairs:
            plain = plain.drop(columns=["p_corrected", "verdict"])
        plain = plain.drop(columns=[name for name in COUNTED if name in plain and plain[name].isna().all()])
        frame = TableFrame(plain.astype({name: float for name in plain if name not in ("model", "verdict")}))
        frame.attrs = {"title": self._title, "metric": metric, "notes": tuple(self.notes)}
        return frame

    def _of_row(self, label: str) -> pd.DataFrame:
        labels = [self.labels[row_of(key, self.names)] for key in self.finished]
        return self.results[[each == label for each in labels]]

    @property
    def _title(self) -> str:
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        return f"{self.score}, mean over {seeds}" if self.seeds else self.score

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the table, such as on settings in which the rows differ."""
        from rayfed.config.variants import differing_values
        from rayfed.report.final_table import some_clients

        first = {label: runs[0] for label, runs in self.rows.items() if runs}
        values = differing_values({label: run.recorded.config for label, run in first.items()})
        some = {label: some_clients(run.metrics) for label, run in first.items()}
        whose = [f"{label}: scored are {words}" for label, words in some.items() if words]
        missing = len(self.cells) - len(self.finished)
        left = [f"{missing} of {len(self.cells)} cells are not finished"] if missing else []
        stopped = sum(not run.sha256 for run in self.finished.values())
        ended = [f"a rule stopped {stopped} of {len(self.cells)} cells early"] if stopped else []
        work = equal_notes(self._by_setting(), self._equal) if self._equal else []
        tuned = [] if self.tuned is None else self.tuned.notes
        return [*tuned, *([values] if values else []), *whose, *work, *left, *ended]

    def _by_setting(self) -> list[dict[str, list[Rounds]]]:
        """The rounds of the finished runs of each row, for each setting; of the first seed."""
        settings: dict[Key, dict[str, list[Rounds]]] = {}
        first = self.seeds[0] if self.seeds else None
        for key, run in self.finished.items():
            at = dict(zip(self.names, key, strict=True))
            if at.get(SEED) == first and key not in self._scored and run.sha256:
                setting = tuple(value for name, value in at.items() if name not in (METHOD, PART, SEED))
                label = self.labels[row_of(key, self.names)]
                settings.setdefault(setting, {}).setdefault(label, []).append(run.recorded.rounds)
        return list(settings.values())

    @property
    def best(self) -> str:
        """The label of the row with the best mean."""
        means = self.scores.mean()
        return str(means.idxmax() if larger_of(self.score, self.metric) else means.idxmin())

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page about all runs, under the names of the rows, with their paired differences.

        Args:
            path: The file; None: report.html in the folder.

        Raises:
            ConfigError: There is no folder and no file is given, or the file belongs to something else.
        """
        from rayfed.report.page.render import NAME, write_report

        self._check_begun()
        if path is None and self.path is None:
            raise ConfigError(
                "report: the runs were not written; give a file, such as .report('report.html')"
            )
        file = Path(path).expanduser() if path is not None else Path(str(self.path)) / NAME
        write_report([Path(str(self._folder))], file)
        return file

    def plot(self) -> Any:
        """Draw the compared score of each row over the rounds, the mean over the seeds and their range.

        Returns:
            A figure of matplotlib.
        """
        import pandas as pd

        from rayfed.report.style import ENTRY_HEIGHT, MOST_ENTRIES, legend, looks, shown_figure

        look = looks(self.rows)
        figure = shown_figure(6, max(3.5, 1.2 + ENTRY_HEIGHT * min(len(look), MOST_ENTRIES)))
        axes = figure.subplots()
        column, metric = self.score, self.metric
        share = share_of(metric)
        for label in self.rows:
            by_cell: dict[Value, list[pd.Series[float]]] = {}
            for key, run in self.finished.items():
                if self.labels[row_of(key, self.names)] == label and column in run.history:
                    seed = key[self.names.index(SEED)] if SEED in self.names else None
                    by_cell.setdefault(seed, []).append(
                        run.history.set_index("round")[column].dropna() * share
                    )
            if not by_cell:
                continue
            seeds = pd.concat([pd.concat(cells, axis=1).mean(axis=1) for cells in by_cell.values()], axis=1)
            own: dict[str, Any] = {
                "color": look[label].colour,
                "marker": look[label].marker,
                "linestyle": look[label].line,
            }
            [line] = axes.plot(seeds.index, seeds.mean(axis=1), markersize=4, label=label, **own)
            if len(by_cell) > 1:
                ends = (seeds.min(axis=1), seeds.max(axis=1))
                axes.fill_between(seeds.index, *ends, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{column} %" if share != 1 else column)
        legend(figure, [*axes.lines])
        return figure

    def latex(self) -> str:
        """The table for LaTeX (`booktabs`): shares in percent, three digits, names escaped."""
        from rayfed.terminal.table_formats import latex_text

        table, metric = self.table, self.metric
        shares = [
            name
            for name in (self.score, "deviation", f"{metric}_domain", f"worst_client_{metric}")
            if name in table
        ]
        written = table.assign(**{name: table[name] * share_of(metric) for name in shares})
        written.index = [latex_text(str(name)) for name in written.index]
        unit = r" (\%)" if share_of(metric) != 1 else ""
        written.columns = [
            latex_text(str(name)) + (unit if name in shares else "") for name in written.columns
        ]
        return str(written.to_latex(float_format="%.3g", na_rep=""))

    def __len__(self) -> int:
        return len(self.cells)

    def _repr_html_(self) -> str:
        """HTML of the table and its notes, for a notebook."""
        if not self.finished:
            return f"<p>{html.escape(repr(self))}</p>"
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return str(self.table.to_html(border=0)) + notes

    def __repr__(self) -> str:
        where = f", {self.path}" if self.path else ""
        over = f" over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        done = f", {len(self.finished)} finished" if self.finished else ", not run"
        head = f"<Study of {len(self.cells)} cells{over}{done}{where}>"
        return "\n".join([head, str(self.table), *self.notes]) if self.finished else head
