"""Runs one prepared experiment in its folder, and writes its tables, figures and report.

Config, versions and partition are written before the first round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayfed.config.schema import Config, to_dict
from rayfed.data.partition.manifest import describe, texts_cut, with_digests
from rayfed.engine.record_rounds import basis_of
from rayfed.engine.score_finished_run import score_model_of
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, RayFedError, StoppedEarlyError, count_of
from rayfed.evaluation.test_sets import DOMAIN_VALIDATION
from rayfed.federation.privacy_accountant import AUTO_DELTA
from rayfed.objective import CLASSES, score_facts
from rayfed.record.atomic_files import write_table, write_text
from rayfed.record.checkpoint import Checkpoints
from rayfed.record.claim import Claim
from rayfed.record.folder import (
    check_same_inputs,
    describe_run,
    digest_if_finished,
    how_to_go_on,
    rounds_on_disk,
    way_to_continue,
)
from rayfed.record.readers import OWN_TENSORS, ROWS, SCORE, DamagedError, reading
from rayfed.record.recorded_run import RecordedRun
from rayfed.terminal.arguments import command_line
from rayfed.terminal.console import showing, teller
from rayfed.terminal.exit_code import STOP
from rayfed.terminal.supervisor import note_advice
from rayfed.terminal.table_formats import fit_width, terminal_width

if TYPE_CHECKING:
    from rayfed.engine.session import Session
    from rayfed.types import Row


def begin(config: Config, setup: Setup, claim: Claim, tell: Callable[[str], None], resume: bool) -> None:
    """Write config.yaml, environment.json and partition.parquet, and show the partition.

    Args:
        config: The config of the run.
        setup: The experiment, prepared from it.
        claim: The right to write into the folder.
        tell: Called with each text for the user.
        resume: The folder holds a run that is continued; check that its inputs are the same.

    Raises:
        ConfigError: The run that is continued had other data or another config, or its checkpoints are
            missing.
    """
    partition = setup.partition
    dataset = setup.dataset
    path = claim.path
    basis = basis_of(setup)
    facts = {
        **basis.data,
        "bad_images_skipped": dataset.skipped,
        "task": setup.context.objective.task,
        SCORE: score_facts(setup.context.objective),
        "examples": setup.context.objective.examples,
        "head": setup.head,
        **_test_split(config, setup),
        **({"texts_cut": cut} if (cut := texts_cut(partition, dataset)) else {}),
        "tensors_trained": len(setup.start),
        "numbers_trained": sum(v.numel() for v in setup.start.values()),
        "threads": config.cluster.threads,
        "precision": config.train.precision,
        "group": setup.group.clients,
        **_own_tensors(setup),
        **({} if config.privacy.epsilon is None else {"noise": setup.experiment.channel.noise}),
        **({"objects": own} if (own := setup.design.objects) else {}),
    }
    commands: list[str] = []
    if resume:
        with suppress(DamagedError):
            commands = RecordedRun(path).commands
        check_continuable(config, setup, path)  # names the key of the config from which other data follow
        check_same_inputs(path, facts)
        claim.take_over()
    commands += [command_line()] if command_line() else []
    describe_run(path, to_dict(config), {**facts, "commands": commands})
    write_table(path / "partition.parquet", with_digests(partition, dataset))
    tell_clients(setup, tell)
    if (epsilon := config.privacy.epsilon) is not None:
        noise = setup.experiment.channel.noise
        rounds = count_of(config.rounds, "round")
        delta = config.privacy.delta
        at = AUTO_DELTA[config.privacy.noise_at] if delta == "auto" else f"{delta:g}"
        tell(f"noise {noise:.4g} times clip, for an epsilon of {epsilon:g} at delta {at} after {rounds}")


def _test_split(config: Config, setup: Setup) -> dict[str, str]:
    """The split of the source that is scored, where it is not called test, such as validation of GLUE."""
    dataset = setup.dataset
    scored = config.data.test == "official" and dataset.test.any()
    return {"test_split": dataset.test_name} if scored and dataset.test_name not in ("", "test") else {}


def _own_tensors(setup: Setup) -> dict[str, dict[str, int]]:
    """Number of scored clients with kept tensors in the run whose model is scored; empty: none has."""
    names = [name for unit in setup.experiment.sets for name in unit.clients]
    kept = sum(name in setup.stores for name in names)
    return {OWN_TENSORS: {"clients": len(names), "kept": kept}} if kept else {}


def tell_clients(setup: Setup, tell: Callable[[str], None]) -> None:
    """Show the table of the clients, what they hold if it differs, and how many images could not be read."""
    sizes = {"blocks": setup.experiment.capacity or {}, "rank": setup.experiment.ranks}
    tell(describe(setup.partition, setup.dataset, terminal_width(), sizes))
    if setup.dataset.own:
        goal = setup.context.objective
        tell(f"task: {goal.task}, scored by {goal.metric}")
    if setup.context.network is not None:
        tell(fit_width(trained_in_words(setup), terminal_width()))
    for note in setup.notes:
        tell(fit_width(note, terminal_width()))
    if setup.group.sentence:
        tell(fit_width(setup.group.sentence, terminal_width()))
    if tested := classes_in_words(setup):
        tell(fit_width(tested, terminal_width()))
    if skipped := setup.dataset.skipped:
        tell(f"{skipped} unreadable images were skipped (data.on_bad_image=skip)")


LOOKED_AT = 1000
"""Clients whose classes are looked at before a run."""


def classes_in_words(setup: Setup) -> str:
    """Where clients are tested on classes that they do not have: how many, and what validation follows.

    Empty where each client has all classes of its test set, or has its own test set.
    """
    partition, targets = setup.partition, np.asarray(setup.dataset.targets)
    if not partition.official_test or setup.context.objective.reads not in CLASSES or targets.ndim != 1:
        return ""
    tested = {name: np.unique(targets[rows]) for name, rows in partition.domain_tests().items()}
    every = [name for name in partition.table if name not in partition.unseen]
    looked = every[:: -(-len(every) // LOOKED_AT)]
    have, wanted = [], []
    for name in looked:
        own = setup.context.splits[name]
        classes = tested[partition.table[name].domain]
        rows = np.concatenate([own["train"], own["val"]]) if "val" in own else own["train"]
        have.append(int(np.isin(classes, targets[rows]).sum()))
        wanted.append(len(classes))
    if have == wanted:
        return ""
    number = range_in_words(wanted)
    some = "" if len(looked) == len(every) else f" ({len(looked)} of {len(every)} were looked at)"
    text = f"clients have {range_in_words(have)} of {number} classes{some} and are tested on all {number}"
    if not setup.experiment.validate:
        return text
    if setup.experiment.validation_split == DOMAIN_VALIDATION:
        return (
            f"{text}; validation has the classes of all clients of a domain (evaluation.validation=domains)"
        )
    return (
        f"{text}; validation follows the clients' classes (evaluation.validation=domains: those of all "
        f"clients of a domain)"
    )


def range_in_words(values: Sequence[int]) -> str:
    """The smallest and the largest of some numbers, such as `2 to 6`."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


MOST_NAMED = 100
"""Modules of a user's network that are listed before a run."""


def trained_in_words(setup: Setup) -> str:
    """The modules of a user's network that are trained; adapters have the names of their layers."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in setup.start))
    few = ", ".join(modules[:MOST_NAMED])
    more = f" and {len(modules) - MOST_NAMED} more" if len(modules) > MOST_NAMED else ""
    return f"trained in {count_of(len(modules), 'module')}: {few}{more}"


def check_continuable(config: Config, setup: Setup, path: Path) -> None:
    """Check that neither the config nor the data of a run changed since its last checkpoint.

    Args:
        config: The config with which the run is continued, or reported again.
        setup: The experiment, prepared from it.

    Raises:
        ConfigError: Something changed that affects the result, or the checkpoints are missing.
    """
    Checkpoints(path, basis=basis_of(setup)).check_continuable(rounds_on_disk(path))


@dataclass(frozen=True)
class Show:
    """Output of a command: nothing (`quiet`), text, or JSON objects.

    Attributes:
        quiet: Show nothing.
        as_json: Write JSON objects to standard output, and text to standard error.
        whole: Folder of the run that the shown one is a part of; None: it is the whole.
        described: Digests of the partitions whose table of clients was shown.
        resume_command: The command that continues the whole; empty: `rayfed.resume` does.
    """

    quiet: bool = True
    as_json: bool = False
    whole: Path | None = None
    described: set[str] = field(default_factory=set)
    resume_command: str = ""

    @property
    def tell(self) -> Callable[[str], None]:
        return teller(self.quiet, self.as_json)

    def tell_whole(self, text: str) -> None:
        """Show a text, unless the run is a part of another one, which shows this for all its parts."""
        if self.whole is None:
            self.tell(text)

    def tell_part(self, text: str) -> None:
        """Show a text, if the run is a part of another one."""
        if self.whole is not None:
            self.tell(text)

    def part_of(self, whole: Path) -> Show:
        """The same for a part of the run in the folder `whole`."""
        return replace(self, whole=self.whole or whole)

    def about_clients(self, partition: str) -> Callable[[str], None]:
        """Shows the table of clients of a partition with this digest, the first time."""
        if partition in self.described:
            return lambda _: None
        self.described.add(partition)
        return self.tell


def run_alone(
    config: Config,
    setup: Setup,
    claim: Claim,
    show: Show,
    resume: bool,
    session: Session,
    *,
    stop: Callable[[Path], bool] | None = None,
    on_round: Callable[[Row], None] | None = None,
) -> str:
    """Run or continue one experiment; a finished one is not repeated.

    Args:
        setup: The same, prepared.
        claim: The right to write into its folder.
        show: What is shown.
        resume: Continue the run in the folder.
        session: Ray and the actors of the command.
        stop: Called after each round but the last with the folder; True ends the run.
        on_round: Called after each round with its row, before the next one begins.

    Returns:
        The SHA-256 digest of the final tensors.

    Raises:
        StoppedEarlyError: `stop` ended it.
        RayFedError: The run failed; its finished rounds are on disk.
    """
    from rayfed.engine.session import launch

    began = time.perf_counter()
    path = claim.path
    if (trained := config.evaluation.model_of) is not None:
        setup = score_model_of(trained, setup)
    digest = digest_if_finished(path, config.rounds, config.stop) if resume else ""
    if digest:
        check_continuable(config, setup, path)
        claim.take_over()
    else:
        begin(config, setup, claim, show.about_clients(setup.partition.digest), resume)
        if resume:
            show.tell(f"{path}: {continues_after(path, config.rounds)}")
        note_advice(advice(path, show))
        rows_of = path if show.as_json else None
        session.waits = stop is not None or on_round is not None
        try:
            with (
                showing(config.rounds, show.quiet, rows_of) as show_row,
                launch(setup, path, show.tell, resume, claim.token, session) as rows,
            ):
                for row in rows:
                    show_row(row)
                    digest = str(row.get("sha256", digest))
                    note_advice(advice(path, show))
                    _raise_if_asked_to_stop()
                    if on_round is not None and "round" in row:
                        on_round(row)
                    if stop is not None and row.get("round", config.rounds) < config.rounds and stop(path):
                        raise StoppedEarlyError(f"stop ended the run after round {row['round']}")
            _raise_if_asked_to_stop()
        except ConfigError:
            if not (path / ROWS).exists():  # nothing ran, so the same output can be used again
                claim.discard()
            raise
        except (RayFedError, KeyboardInterrupt) as err:
            err.add_note(advice(path, show))  # the end of the line that the user sees
            raise
    show.tell_part(f"{path}: {time.perf_counter() - began:.0f} s, tensors sha256 {digest[:16]}")
    return digest


def continues_after(path: Path, rounds: int) -> str:
    """From which round a run is continued; where the newest checkpoint is damaged, it is an earlier one."""
    newest = Checkpoints(path).newest()
    return f"continues after round {newest} of {rounds}" if newest else "begins with the first round"


def advice(path: Path, show: Show) -> str:
    """Advice about a run that ended too early."""
    if show.whole is None:
        return how_to_go_on(path)
    command = show.resume_command or way_to_continue(show.whole)
    return f"what is finished is kept; continue with: {command}"


def _raise_if_asked_to_stop() -> None:
    if STOP.is_set():
        raise KeyboardInterrupt


Tell = Callable[[str], None]


def report(path: Path, tell: Tell, figures: bool) -> None:
    """Write report.md with tables and figures, and show the table.

    Args:
        tell: Called with the table as text.
        figures: Draw the figures.
    """
    from rayfed.report.final_table import final_table
    from rayfed.report.report_md import document

    with reading(path):
        run = RecordedRun(path)
        table = final_table(run)
        text = document(run, [table], _draw_figures(run, figures))
    write_text(path / "report.md", text)
    tell("\n" + table.text(terminal_width()))


def last_words(path: Path, tell: Tell, write: bool) -> None:
    """Say which commands score a language model elsewhere and show everything on one page.

    With `write` (report=true) the page is written.

    Args:
        tell: Called with a sentence.
        write: Write the page.

    Raises:
        ConfigError: There is another file with the name of the page.
    """
    from rayfed.report.page.render import NAME, command, write_report
    from rayfed.report.report_md import harness_command, why_no_adapter

    run = RecordedRun(path)
    if other := harness_command(run):
        tell(f"score it with lm-evaluation-harness: {other}")
    if reason := why_no_adapter(run):
        tell(f"no adapter for PEFT was written: {reason}")
    if write:
        write_report([path], path / NAME)
        tell(f"everything on one page: {path / NAME}")
    else:
        tell(f"everything on one page: {command(path)}")


def _draw_figures(run: RecordedRun, figures: bool) -> Mapping[str, Path]:
    """Draw the figures of a run if they are wanted; returns their files by title."""
    from rayfed.report.figures import draw_figures

    return draw_figures(run) if figures else {}
