"""The cases of the kill table, how each ended, and the table in benchmarks/results/kill_table.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = 30.0  # seconds from the kill to the end of all processes, unless the run goes on
TITLES = {
    "the command": "rayfed.run",
    "driver actor": "ray::DriverActor",
    "one client actor": "ray::ClientActor",
    "all client actors": "ray::ClientActor",
    "raylet": "raylet/raylet ",
    "gcs_server": "gcs/gcs_server ",
    "dashboard agent": "ray::DashboardAgent",
    "runtime-env agent": "ray::RuntimeEnvAgent",
}
"""Names of killed processes, and the text by which the command line of each is known."""

MOMENTS = ("at the start", "in a round", "while a checkpoint is written")
MACHINES = ("quiet", "loaded")
SURVIVED = ("one client actor", "all client actors")  # they are replaced, and the run goes on
ACTOR_LOST = "was lost; a new actor repeats its work"
"""The words of the driver about an actor that it replaces."""

PLACES = ("full disk", "read-only output", "no HOME", "no TMPDIR", "cache file of garbage")


@dataclass(frozen=True)
class Ending:
    """Ending of a case.

    Attributes:
        case: What was killed or wrong, when, on what machine.
        code: Exit code.
        seconds: From the kill to the end of all processes, or from the start where nothing was killed.
        lines: What was on standard error.
        left: Titles of processes that stayed.
        same: Whether tensors and tables are those of an undisturbed run; None: there was nothing to resume.
        average: Load average of the machine over the minute before the end.
    """

    case: str
    code: int | None
    seconds: float
    lines: list[str]
    left: list[str]
    same: bool | None
    average: float

    @property
    def good(self) -> bool:
        """One error line or none, every process gone, and the same bytes after `resume`.

        Before its own end the driver may see that of an actor, and say so: a raylet that ends kills both.
        """
        goes_on = self.case.startswith(SURVIVED)
        fast = self.seconds <= LIMIT or goes_on or self.code == 0
        told = self.code == 0 or len(self.errors) == (0 if self.case.startswith("the command") else 1)
        other = [line for line in self.lines if line not in self.errors and ACTOR_LOST not in line]
        quiet = self.code == 0 or not other  # a replaced file is said in a warning
        return told and quiet and fast and not self.left and self.same is not False

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if line.startswith("error: ")]


def cases() -> list[str]:
    """Names of all cases: what, when, on what machine."""
    killed = itertools.product(TITLES, MOMENTS, MACHINES)
    return [", ".join(case) for case in killed] + [f"{place}, quiet" for place in PLACES]


def markdown(endings: Sequence[Ending]) -> str:
    """The table of benchmarks/results/kill_table.md."""
    lines = [
        "| case | exit code | seconds to the end | said on standard error | processes left | after `resume` "
        "| load average |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    words = {None: "nothing to resume", True: "the same bytes", False: "**other bytes**"}
    for one in endings:
        said = one.errors[0] if one.errors else (one.lines[0] if one.lines else "")
        more = f" (and {len(one.lines) - 1} more)" if len(one.lines) > 1 else ""
        told = said.replace("|", "\\|") + more
        ending = (one.code, f"{one.seconds:.0f}", told, len(one.left), words[one.same])
        cells = (one.case, *ending, f"{one.average:.0f}")
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    good = sum(one.good for one in endings)
    left = len(cases()) - len(endings)
    verdict = (
        f"{good} of {len(endings)} endings are as promised; {left} of {len(cases())} cases were not run."
    )
    return "\n".join([*lines, "", verdict])
