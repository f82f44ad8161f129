"""Kills every process of a run at every moment: how the run ends, how fast, and whether it can go on.

python -m benchmarks.kill_table [--only TEXT] [--file DONE.jsonl] [--write benchmarks/results/kill_table.md]

Each case starts the command line on its own Ray, kills with -9, waits for the end of every process,
continues the run in one process, and compares tensors and tables with those of an undisturbed run. Finished
cases are kept in the file, so that a table that was interrupted goes on. All cases take at least 15
minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pyarrow.parquet as pq

import rayfed.resume
import rayfed.run
from benchmarks.kill_cases import LIMIT, TITLES, Ending, cases, markdown

ROOT = Path(__file__).parent.parent
PATIENCE = 300.0  # seconds after which a case is given up
MARKS = ("<!-- kill table -->", "<!-- end of kill table -->")
RUN = (
    "algorithm=ditto",
    "data.limit=24",
    "rounds=6",
    "model.options={depth: 4}",
    "model.pretrained=false",
    "tuning.rank=2",
    "figures=false",
)
ON_RAY = ("cluster.actors=2", "cluster.num_cpus=2", "cluster.dashboard=false")
LOADED = {"RAY_worker_niceness": "0"}
"""On a loaded machine Ray's workers get the priority of the busy loops. With Ray's own nice 15 they get a
thirtieth of it, and a case takes minutes."""
SIGN = "RAYFED_KILL_TABLE"  # variable in the environment of all processes of a bench
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STDERR_COPY = re.compile(r"[^\s(]*/(rayfed-stderr-)\w+(\.log)")
TRIES = 3  # attempts to find the moment of a case


class Bench:
    """A folder for runs, with the undisturbed one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sign = str(folder)
        self.cache = folder / "cache"
        self.whole = folder / "whole"
        done = self.command([*RUN, "cluster=inline", f"output={self.whole}"]).wait(PATIENCE)
        assert done == 0

    def command(
        self, overrides: Sequence[str], module: str = "rayfed.run", env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        keys = [f"data.cache={self.cache}"] if module == "rayfed.run" else []
        with (self.folder / "stderr").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", module, *keys, *overrides],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", SIGN: self.sign, **(env or {})},
            )

    def kill(self, what: str, when: str, machine: str) -> Ending:
        """Run, kill, wait for the end, resume and compare.

        Raises:
            TimeoutError: The moment to kill did not come, in several runs.
        """
        for _ in range(TRIES - 1):
            with contextlib.suppress(TimeoutError):
                return self._kill(what, when, machine)
        return self._kill(what, when, machine)

    def _kill(self, what: str, when: str, machine: str) -> Ending:
        run = self.folder / "killed"
        shutil.rmtree(run, ignore_errors=True)
        with load() if machine == "loaded" else contextlib.nullcontext():
            command = self.command(
                [*RUN, *ON_RAY, f"output={run}"], env=LOADED if machine == "loaded" else None
            )
            try:
                await_moment(when, what, command, run)
                for process in victims(what, command.pid):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                began = time.monotonic()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    command.wait(PATIENCE)
                code = command.poll()
                ended = time.monotonic()
                while self.alive() and time.monotonic() < ended + LIMIT:
                    time.sleep(0.1)
                seconds = time.monotonic() - began
            finally:
                left = [title(process) for process in self.alive()]
                for process in self.alive():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        case = f"{what}, {when}, {machine}"
        command.wait(PATIENCE)
        average = os.getloadavg()[0]
        return Ending(case, code, seconds, self.errors(), left, self.resumed(run), average)

    def alive(self) -> list[psutil.Process]:
        """Processes of this bench's commands, found by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(SIGN) == self.sign and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def errors(self) -> list[str]:
        """Lines on standard error, with FOLDER for the bench's temporary folder."""
        text = COLOURS.sub("", (self.folder / "stderr").read_text(errors="replace"))
        text = STDERR_COPY.sub(r"TMPDIR/\1NAME\2", text.replace(str(self.folder), "FOLDER"))
        return [line for line in text.splitlines() if line.strip()]

    def resumed(self, run: Path) -> bool | None:
        """Whether what `resume` leaves is what the undisturbed run left; None: the run had not begun."""
        if not (run / "config.yaml").exists():
            return None
        with contextlib.redirect_stdout(io.StringIO()):
            if not (run / "checkpoints").exists():  # before its first round: there is nothing to go on from
                shutil.rmtree(run)
                code = rayfed.run.main([*RUN, "cluster=inline", f"output={run}", f"data.cache={self.cache}"])
            else:
                code = rayfed.resume.main([str(run), "cluster=inline", "--quiet"])
        return code == 0 and contents(run) == contents(self.whole)

    def place(self, what: str) -> Ending:
        """Run where something of the machine is not as it should be."""
        run, env = self.folder / "odd" / "run", {}
        shutil.rmtree(run.parent, ignore_errors=True)
        run.parent.mkdir()
        overrides = [*RUN, *ON_RAY, f"output={run}"]
        if what == "full disk":
            overrides = [*RUN, "cluster=inline", f"output={run}"]
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", run.parent], check=True)
        elif what == "read-only output":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", run.parent], check=True)
        elif what == "cache file of garbage":
            for file in self.cache.rglob("*.arrow"):
                file.write_bytes(os.urandom(5000))
        else:
            env = {what.removeprefix("no "): str(self.folder / "missing")}
        began = time.monotonic()
        command = self.command(overrides, env=env)
        if what == "full disk":
            await_moment("in a round", what, command, run)
            began = time.monotonic()
            fill(run.parent / "filler", command)
        code = command.wait(PATIENCE)
        seconds = time.monotonic() - began
        same = contents(run) == contents(self.whole) if code == 0 else self.resumed(run)
        if what in ("full disk", "read-only output"):
            subprocess.run(["umount", run.parent], check=True)
        return Ending(f"{what}, quiet", code, seconds, self.errors(), [], same, os.getloadavg()[0])


def contents(run: Path) -> dict[str, object]:
    """Tensors and tables of a run, without what a clock says and what failures leave."""
    found: dict[str, object] = {}
    for file in sorted(run.glob("*.parquet")):
        if file.name != "events.parquet":
            table = pq.read_table(file)
            found[file.name] = table.select([n for n in table.column_names if "seconds" not in n]).to_pylist()
    tensors = run / "model" / "params.safetensors"
    found["tensors"] = tensors.read_bytes() if tensors.exists() else b""
    return found


def fill(file: Path, command: subprocess.Popen[bytes]) -> None:
    """Keep a disk full until the command ends, then free it."""
    with file.open("wb", buffering=0) as stream:
        while command.poll() is None:
            try:
                stream.write(bytes(4096))
            except OSError:
                time.sleep(0.001)
    file.unlink()


def descendants(pid: int) -> list[psutil.Process]:
    """Living processes below one."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def victims(what: str, pid: int) -> list[psutil.Process]:
    """Processes of a run that are such a thing."""
    if what == "the command":
        return [psutil.Process(pid)]
    found = [process for process in descendants(pid) if TITLES[what] in title(process)]
    return found[:1] if what == "one client actor" else found


def await_moment(when: str, what: str, command: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for the moment to kill.

    Raises:
        TimeoutError: It did not come.
    """
    deadline = time.monotonic() + PATIENCE
    wanted = 2 if what == "all client actors" else 1
    while not _has_come(when, what, command.pid, run, wanted):
        if time.monotonic() > deadline or command.poll() is not None:
            raise TimeoutError(f"{what}, {when}: the moment did not come")
        time.sleep(0.05 if when == "at the start" else 0.001)


def _has_come(when: str, what: str, pid: int, run: Path, wanted: int) -> bool:
    if when == "at the start":
        return len(victims("gcs_server" if what == "the command" else what, pid)) >= wanted
    result = run / "rounds.jsonl"
    if not result.exists() or len(result.read_text().splitlines()) < 2:
        return False
    if when == "in a round":
        return True
    # checkpoint.json is the last file of a checkpoint to be written
    folders = (path for path in (run / "checkpoints").iterdir() if path.name.startswith("round-"))
    return any(not (path / "checkpoint.json").exists() for path in folders)


@contextlib.contextmanager
def load() -> Iterator[None]:
    """A busy loop on each core."""
    busy = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # it ends with the bench
    loops = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the table. Exit code 0: all ended as promised."""
    parser = argparse.ArgumentParser("benchmarks.kill_table", usage=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--file", type=Path, default=Path("kill_table.jsonl"))
    parser.add_argument("--write", type=Path, help="put the table into this document")
    args = parser.parse_args(argv)
    done = (
        [Ending(**json.loads(line)) for line in args.file.read_text().splitlines()]
        if args.file.exists()
        else []
    )
    left = [case for case in cases() if args.only in case and case not in {one.case for one in done}]
    with tempfile.TemporaryDirectory(prefix="kill-table-") as folder:
        bench = Bench(Path(folder)) if left else None
        for case in left:
            assert bench is not None
            what, *rest = case.split(", ")
            ending = bench.kill(what, *rest) if len(rest) == 2 else bench.place(what)
            done.append(ending)
            with args.file.open("a") as stream:
                stream.write(json.dumps(asdict(ending)) + "\n")
            print(
                f"{'ok ' if ending.good else 'BAD'} {case}: exit {ending.code}, {ending.seconds:.1f} s",
                flush=True,
            )
    order = {case: i for i, case in enumerate(cases())}
    table = markdown(sorted(done, key=lambda one: order[one.case]))
    print(table)
    if args.write:
        before, _, rest = args.write.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        args.write.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")
    return 0 if all(one.good for one in done) else 1


if __name__ == "__main__":
    sys.exit(main())
