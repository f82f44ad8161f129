"""Runs the unfinished cells of a job side by side on one Ray, and writes and shows the table as it fills."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rayfed.doctor import diagnose, estimate
from rayfed.engine.measure_client import costs
from rayfed.engine.session import Session
from rayfed.errors import ClusterError, PartsFailedError, RayFedError, cause_of
from rayfed.experiment.plan import Plan
from rayfed.experiment.runner import Runner
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.cluster_share import ClusterShare, share
from rayfed.record import claim as folders
from rayfed.record.atomic_files import write_text
from rayfed.record.claim import mark_of
from rayfed.record.readers import read_json, rows_so_far
from rayfed.reproduce import results
from rayfed.reproduce.cell_scores import EXAMPLES, STEPS, read_half, read_scores, read_steps, read_without
from rayfed.reproduce.job import KIND, MANIFEST, JobCell, Plans, TableJob, check_same
from rayfed.reproduce.results import Reproduction, compare, measures_of
from rayfed.terminal.console import Screen, erase, size, stage, use_screen
from rayfed.terminal.exit_code import STOP
from rayfed.terminal.supervisor import note_advice
from rayfed.user_files import to_json

if TYPE_CHECKING:
    from rich.table import Table

    from rayfed.executors.connection import Connection


@dataclass
class JobProgress:
    """The state of a job while it runs.

    Attributes:
        job: The job.
        resume_command: The command that continues it.
        finished: Digest and scores of the finished cells, by name.
        running: Names of the cells that run now.
        failed: Reasons by name of the cell.
        stage: What the command does now, such as "starting Ray".
        on_change: Called after every change, and every second.
    """

    job: TableJob
    resume_command: str = ""
    finished: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    stage: str = ""
    on_change: Callable[[JobProgress], None] = lambda _: None

    @property
    def waiting(self) -> list[JobCell]:
        """Cells that are not finished."""
        return [cell for cell in self.job.cells if cell.name not in self.finished]

    @property
    def advice(self) -> str:
        """Advice if the job ends too early."""
        return f"what is finished is kept; continue with: {self.resume_command or 'the same command'}"


RESULT = "reproduction.json"
LOOK = 1.0  # seconds between two looks at the cells that run

Tell = Callable[[str], None]


def reproduce(
    job: TableJob, tell: Tell = lambda _: None, progress: JobProgress | None = None
) -> Reproduction:
    """Run every cell of a job that is not finished, and write its table.

    A cell that was interrupted continues after its last checkpoint.

    Args:
        job: The job.
        tell: Called with a line of text about each finished cell.
        progress: Receives the state of the job; None: it is not shown.

    Returns:
        The table.

    Raises:
        ConfigError: The folder holds something else, or a cell cannot be run; found before any actor starts.
        PartsFailedError: Some cells failed; the others are finished.
        ClusterError: Ray was lost.
    """
    progress = progress or JobProgress(job)
    mark = mark_of(job.path)
    continues = mark is not None and mark.kind == KIND
    if continues:
        check_same(job)
    owner = "" if continues else folders.look(job.path, kind=KIND)
    plans = Plans()
    progress.finished |= read_finished(job)
    _check(progress, plans)
    with _claim(job, continues, owner), closing(_finishing(progress, plans)) as finishing:
        write_text(job.path / MANIFEST, to_json(job.manifest, indent=1) + "\n")
        note_advice(progress.advice)
        for cell, digest, seconds in finishing:
            with plans.alone:
                write_text(cell.record, to_json({"sha256": digest, "seconds": seconds}) + "\n")
                progress.finished[cell.name] = digest, _scores(job, cell)
                write_tables(compare(job, progress.finished), job)
            tell(_line(progress, cell, seconds))
        found = compare(job, progress.finished)
        write_tables(found, job)
    if progress.failed:
        raise _failure(progress)
    return found


@contextmanager
def _claim(job: TableJob, continues: bool, owner: str) -> Iterator[None]:
    """Hold the folder of a job while the block runs; `owner` is the result of `look` for a new one."""
    if not continues:
        with folders.claim(job.path, owner, kind=KIND):
            yield
        return
    with folders.claim_again(job.path, KIND) as own:
        own.take_over()
        yield


def _failure(progress: JobProgress) -> PartsFailedError:
    """The error that names every cell that failed."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in progress.failed.items())
    count = len(progress.job.cells)
    error = PartsFailedError(f"{len(progress.failed)} of {count} cells failed: {reasons}")
    error.add_note(progress.advice)
    return error


def read_finished(job: TableJob) -> dict[str, tuple[str, dict[str, float]]]:
    """Digest and scores of the cells that earlier commands finished, by name."""
    done = [cell for cell in job.cells if cell.record.exists() and (cell.path / "config.yaml").exists()]
    return {cell.name: (str(read_json(cell.record, dict)["sha256"]), _scores(job, cell)) for cell in done}


def _scores(job: TableJob, cell: JobCell) -> dict[str, float]:
    """Scores of a cell by measure, without adapters and head, and how often its clients trained."""
    names = {measure.name: measure.score for measure in measures_of(job) if measure.score}
    columns = job.table.columns.get(cell.setting, ())
    found = read_scores(cell.path, cell.config, names.values(), columns)
    scores = {name: found[score] for name, score in names.items() if score in found}
    for read in (read_half, read_without, read_steps):
        scores |= read(cell.path, cell.config)
    return scores


def write_tables(found: Reproduction, job: TableJob) -> None:
    """Write the table in all its forms."""
    write_text(job.path / RESULT, to_json(found.as_dict(), indent=1) + "\n")
    write_text(job.path / "table.md", results.markdown(found))
    write_text(job.path / "table.csv", results.csv_values(found))
    write_text(job.path / "claims.csv", results.csv_claims(found))
    write_text(job.path / "table.tex", results.latex(found))
    write_text(job.path / "table.html", results.page(found))


def _check(progress: JobProgress, plans: Plans) -> None:
    """Prepare one cell of every row and setting, so that what cannot be run is found first."""
    seen = set()
    for cell in progress.waiting:
        if (cell.row, cell.setting) not in seen:
            seen.add((cell.row, cell.setting))
            plans.of(cell)


def _finishing(progress: JobProgress, plans: Plans) -> Generator[tuple[JobCell, str, float], None, None]:
    """Run the cells that are not finished; yields each one that is, its digest and its seconds."""
    waiting = progress.waiting
    if not waiting:
        return
    cluster = waiting[0].config.cluster
    if cluster.executor == "inline":
        with Session() as session:
            for cell in waiting:
                work = partial(_run, progress, plans, cell, None, session)
                yield from _outcome(progress, cell, work)
        return
    from rayfed.engine.weight_store import WeightStore
    from rayfed.executors.cluster import node_resources
    from rayfed.executors.connection import connection

    numbers = (cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout)
    with connection(cluster.address, *numbers) as link:
        part = share(cluster, len(waiting), node_resources())
        stage(f"running {_cells(part.lanes)} side by side, with {_actors(part.actors)} each")
        store = WeightStore()
        sessions = [Session(link, store) for _ in range(part.lanes)]
        with use_screen(Screen()):  # what each of them starts is not said
            yield from _side_by_side(progress, plans, waiting, sessions, part, link)


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _actors(count: int) -> str:
    return "1 actor" if count == 1 else f"{count} actors"


def _side_by_side(
    progress: JobProgress,
    plans: Plans,
    waiting: Sequence[JobCell],
    sessions: Sequence[Session],
    part: ClusterShare,
    link: Connection,
) -> Iterator[tuple[JobCell, str, float]]:
    """Run cells in threads, one for each session."""
    free: SimpleQueue[Session] = SimpleQueue()
    for session in sessions:
        free.put(session)

    def work(cell: JobCell) -> tuple[str, float]:
        session = free.get()
        try:
            return _run(progress, plans, cell, part, session)
        finally:
            free.put(session)

    with ExitStack() as held:
        for session in sessions:
            held.enter_context(session)
        pool = held.enter_context(ThreadPoolExecutor(part.lanes))
        running = {pool.submit(work, cell): cell for cell in waiting}
        try:
            while running:
                done, _ = wait(running, LOOK, FIRST_COMPLETED)
                for future in done:
                    yield from _outcome(progress, running.pop(future), future.result)
                _raise_if_lost(link)
                progress.on_change(progress)
        except BaseException:
            _end(pool)
            raise


def _raise_if_lost(link: Connection) -> None:
    if link.health.lost:
        raise ClusterError(link.health.lost)


def _end(pool: ThreadPoolExecutor) -> None:
    """End the cells that run, after which no other one begins; their finished rounds are on disk."""
    asked = STOP.is_set()
    STOP.set()
    pool.shutdown(wait=True, cancel_futures=True)
    if not asked:
        STOP.clear()


def _outcome(
    progress: JobProgress, cell: JobCell, result: Callable[[], tuple[str, float]]
) -> Iterator[tuple[JobCell, str, float]]:
    """The digest and the seconds of a cell; one that failed is noted, and the others go on."""
    try:
        digest, seconds = result()
    except Exception as err:  # a method may raise anything
        progress.failed[cell.name] = cause_of(err)
    else:
        yield cell, digest, seconds
    progress.on_change(progress)


def _run(
    progress: JobProgress, plans: Plans, cell: JobCell, part: ClusterShare | None, session: Session
) -> tuple[str, float]:
    """Run or continue a cell; returns the digest of its tensors and its seconds."""
    began = time.perf_counter()
    progress.running.add(cell.name)
    try:
        plan = plans.of(cell)
        if part is not None:
            plan = _place(plan, part)
        show = Show(whole=progress.job.path, resume_command=progress.resume_command)
        runner = Runner(show=show, session=session, stays=True, resume=True)
        digest = runner.part(plan, progress.job.path, plans.alone)
    finally:
        progress.running.discard(cell.name)
    return digest, round(time.perf_counter() - began, 1)


def _place(plan: Plan, part: ClusterShare) -> Plan:
    """The plan of a cell, and of its folds, with its part of the cluster."""
    clients = min(setup.experiment.clients_per_round for setup in plan.setups)
    config = replace(plan.config, cluster=part.of(plan.config.cluster, clients))
    return replace(plan, config=config, parts={name: _place(fold, part) for name, fold in plan.parts.items()})


def _line(progress: JobProgress, cell: JobCell, seconds: float) -> str:
    """A line about a finished cell."""
    scores = progress.finished[cell.name][1]
    shown = {name: f"{value:,.0f}" for name, value in scores.items() if name in (STEPS, EXAMPLES)}
    numbers = "  ".join(
        f"{name} {shown.get(name) or results.number(value)}" for name, value in scores.items()
    )
    done = f"{len(progress.finished)}/{len(progress.job.cells)}"
    return f"{done}  {cell.row}, {cell.setting}, seed {cell.seed}  {numbers}  {seconds:.0f} s"


def table_of(progress: JobProgress) -> Table:
    """The table as it is now: our means, the paper's numbers, and how far each row is."""
    from rich.table import Table

    job = progress.job
    found = compare(job, progress.finished)
    parts = (f"{len(progress.finished)} of {len(job.cells)} cells", results.verdicts(found), progress.stage)
    table = Table(title=results.title_of(found), caption="; ".join(filter(None, parts)))
    table.add_column("setting")
    table.add_column("row")
    for measure in found.measures:
        table.add_column(measure.name, justify="right")
        table.add_column("paper", justify="right", style="dim")
    table.add_column("cells")
    for setting in job.settings:
        for row, values in results.ranked_rows(found, setting):
            cells = [text for value, _ in values for text in (results.ours(value), results.paper(value))]
            table.add_row(setting, row, *cells, _state(progress, setting, row))
    return table


def _state(progress: JobProgress, setting: str, row: str) -> str:
    """Number of finished cells of a row, and the progress of those that run."""
    mine = [cell for cell in progress.job.cells if (cell.setting, cell.row) == (setting, row)]
    words = [f"{sum(cell.name in progress.finished for cell in mine)}/{len(mine)}"]
    for cell in mine:
        if cell.name in progress.failed:
            words.append(f"seed {cell.seed} failed")
        elif cell.name in progress.running:
            words.append(f"seed {cell.seed}{_round_of(cell.path, cell.config.rounds)}")
    return ", ".join(words)


def _round_of(path: Path, rounds: int) -> str:
    try:
        return f": round {len(rows_so_far(path))}/{rounds}"
    except RayFedError:
        return ""


@contextmanager
def live_table(progress: JobProgress) -> Iterator[Callable[[str], None]]:
    """Show the table on the terminal while the block runs; yields what writes a line above it."""
    from rich.console import Console
    from rich.live import Live

    erase()
    console = Console()
    shown = 0.0
    with Live(table_of(progress), console=console, transient=True, auto_refresh=False) as live:

        def change(now: JobProgress) -> None:
            nonlocal shown
            if time.monotonic() - shown > 1.0:
                shown = time.monotonic()
                live.update(table_of(now), refresh=True)

        def say_stage(text: str) -> None:
            progress.stage = text
            change(progress)

        progress.on_change = change
        with use_screen(Screen(say_stage, live=True)):
            yield lambda text: console.print(text, highlight=False)


HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """Estimated cost of the cells of a job that are not finished.

    Attributes:
        cells: Number of these cells.
        runs: Number of runs; a cell has one for each domain where each of them is held out in turn.
        actor_hours: Hours of all client actors together.
        hours: Hours until the last cell is finished.
        cpus, gpus: CPUs and GPUs of each actor.
        lanes: Cells at the same time.
        actors: Client actors of each of them.
        traffic: Bytes that are sent to the clients and back.
        disk: Bytes of checkpoints and final tensors.
        measured: The cell whose client was measured.
        on: Device of that client.
        problems: Why the measured cell does not fit; empty: it does.
    """

    cells: int
    runs: int
    actor_hours: float
    hours: float
    cpus: float
    gpus: float
    lanes: int
    actors: int
    traffic: float
    disk: float
    measured: JobCell
    on: str
    problems: Sequence[str]


def cost_of(job: TableJob, waiting: Sequence[JobCell]) -> JobCost:
    """Measure one client of the first cell, and estimate all cells from it.

    A setting is prepared once; its other cells are taken to have as much work, with as many bytes.

    Args:
        job: The job.
        waiting: Its cells that are not finished, at least one.

    Raises:
        ConfigError: A setting cannot be prepared.
        RayFedError: The measured client failed.
    """
    plans = Plans()
    first = waiting[0]
    prepared = {
        setting: _prepare_first(plans, setting, waiting) for setting in {cell.setting for cell in waiting}
    }
    setups = {setting: plan.setups for setting, plan in prepared.items()}
    plan = prepared[first.setting]
    found = diagnose((next(iter(plan.parts.values())) if plan.setup is None else plan).config)
    part = share(first.config.cluster, len(waiting), found.nodes)
    measured = setups[first.setting][0]
    reference = costs(measured.experiment, measured.world.train)[found.measured.client]
    seconds = traffic = disk = 0.0
    runs = 0
    for cell in waiting:
        for setup in setups[cell.setting]:
            experiment = setup.experiment
            visits = experiment.rounds * experiment.clients_per_round
            seconds += estimate(setup, found.measured, 1.0, reference).total_s
            traffic += visits * (found.measured.down_bytes + found.measured.up_bytes)
            state = found.measured.state_bytes + found.measured.store_bytes * len(experiment.clients)
            disk += (cell.config.checkpoint.keep + 1) * state
            runs += 1
    return JobCost(
        cells=len(waiting),
        runs=runs,
        actor_hours=seconds / HOUR,
        hours=seconds / HOUR / (part.lanes * part.actors),
        cpus=part.cpus,
        gpus=part.gpus,
        lanes=part.lanes,
        actors=part.actors,
        traffic=traffic,
        disk=disk,
        measured=first,
        on=found.measured.device,
        problems=found.problems,
    )


def _prepare_first(plans: Plans, setting: str, waiting: Sequence[JobCell]) -> Plan:
    """The prepared first cell of a setting."""
    return plans.of(next(cell for cell in waiting if cell.setting == setting))


def in_words(found: JobCost) -> str:
    """The estimate as text."""
    hours = f"{found.actor_hours * found.gpus:.2g} GPU-hours, " if found.gpus else "no GPU, "
    hours += f"{found.actor_hours * found.cpus:.2g} CPU-hours"
    cell = found.measured
    runs = f", {found.runs} runs" if found.runs != found.cells else ""
    lines = [
        f"to run: {found.cells} cells{runs}; {found.lanes} at a time, each with {found.actors} client actors "
        f"of {found.cpus:.3g} CPU and {found.gpus:.3g} GPU",
        f"estimate: {hours}; done after {_duration(found.hours)}",
        f"bytes: {size(found.traffic)} sent to clients and back, {size(found.disk)} on disk",
        f"from one visit of a client of {cell.row}, {cell.setting}, on {found.on}; other rows may cost more",
        *(f"problem: {problem}" for problem in found.problems),
    ]
    return "\n".join(lines)


def _duration(hours: float) -> str:
    """Hours with a suitable unit.

    >>> _duration(0.01), _duration(0.5), _duration(30.0)
    ('36 s', '30 min', '30.0 h')
    """
    if hours < 1 / 30:
        return f"{hours * HOUR:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
