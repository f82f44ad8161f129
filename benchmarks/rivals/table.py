"""The arithmetic of the table, its page and its figure."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.environments import SIDES, Side
from benchmarks.rivals.workloads import WORK

PROGRAMS = Path(__file__).parent / "programs"
MEASUREMENT = "# measurement"
"""End of the lines of a program that only the comparison needs."""
PLAIN, RAYFED = "plain", "rayfed"
FACTORS = {"seconds": "wall-clock", "processor": "processor"}
"""Quantities that are compared, and their names in the page."""
REASONS: dict[str, str] = {}
"""Why RayFed is not first in a row, by row."""


COLUMNS = (
    *("", "first round, s", "a round, s", "of plain", "processor, s", "of plain"),
    *("peak, MB", "lines", "twice the same?", "resumes?", "apart"),
)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(text: str) -> int:
    """Lines of code, without blank lines, comments, docstrings and what only the comparison needs."""
    left_out = {i for i, line in enumerate(text.splitlines(), 1) if line.rstrip().endswith(MEASUREMENT)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.string.strip():
            counted |= set(range(token.start[0], token.end[0] + 1))
    return len(counted - left_out)


def lines_of(side: Side) -> int:
    """Lines that a user writes for all rows, besides networks and data, which all sides share."""
    files = [f"{side.program}.py", *(["local_training.py"] if side.shares else [])]
    return sum(code_lines((PROGRAMS / name).read_text()) for name in files)


def steady(rounds: Sequence[Mapping[str, float]], what: str) -> float:
    """Median of the rounds after the first two: those begin, and fill caches."""
    return statistics.median(each[what] for each in rounds[2:])


def of_plain(row: Mapping[str, Any], side: str, what: str) -> float | None:
    """A side's `steady` value divided by that of plain PyTorch; None: one of them has no steady rounds.

    It is the median of the ratios of rounds that ran one after the other: the load of the machine alters it
    less than the ratio of the medians.
    """
    both = [row["sides"].get(name, {}).get("rounds", [])[2:] for name in (side, PLAIN)]
    ratios = [own[what] / other[what] for own, other in zip(*both, strict=False)]
    return statistics.median(ratios) if ratios else None


def standing(row: Mapping[str, Any], what: str) -> tuple[str, float] | None:
    """The fastest of the other sides, and RayFed's share of what it needs; None: there is none."""
    shares = {side: of_plain(row, side, what) for side in row["sides"]}
    own = shares.pop(RAYFED, None)
    others = {side: share for side, share in shares.items() if share is not None}
    if own is None or not others:
        return None
    best = min(others, key=lambda side: others[side])
    return best, own / others[best]


def sentence(name: str, row: Mapping[str, Any]) -> str:
    """Whether RayFed is first in a row, and by how much."""
    parts, first = [], True
    for what, words in FACTORS.items():
        if (found := standing(row, what)) is None:
            continue
        best, share = found
        first &= share < 1
        parts.append(f"{share:.2f} of the {words} seconds of {best}")
    if not parts:
        return "RayFed or all others are missing."
    text = f"RayFed takes {' and '.join(parts)}, the best of the others."
    return text if first else " ".join([text, REASONS.get(name, "Why it is not first is not known yet.")])


def cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def answer(value: bool | None) -> str:
    return {None: "not tried", True: "yes", False: "**no**"}[value]


def table(row: Mapping[str, Any]) -> str:
    """The table of one row, as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * 7 + "---|---|---:|"]
    for side, found in row["sides"].items():
        lines.append(f"| {' | '.join([side, *cells(row, side, found)])} |")
    return "\n".join(lines)


def cells(row: Mapping[str, Any], side: str, found: Mapping[str, Any]) -> list[str]:
    """The cells of a side, after its name."""
    if "failed" in found:
        return [f"failed: {found['failed']}", *["-"] * (len(COLUMNS) - 2)]
    rounds = found["rounds"]
    texts = [cell(rounds[0]["seconds"], 1)]
    for what in FACTORS:
        seconds = steady(rounds, what) if len(rounds) > 2 else None
        texts += [cell(seconds), cell(of_plain(row, side, what))]
    texts += [f"{found['peak'] / 2**20:,.0f}", str(found["lines"])]
    return [*texts, answer(found.get("twice")), answer(found.get("resumes")), f"{found['apart']:.0e}"]


def page(results: Mapping[str, Any]) -> str:
    """The whole page, as Markdown."""
    facts, commands = results["facts"], {row["command"] for row in results["rows"].values()}
    facts = {**facts, "command": commands.pop() if len(commands) == 1 else "in each part"}
    parts = [
        "# Rivals, side by side\n",
        *(f"- {key}: {facts[key.lower()]}" for key in ("Command", "Commit", "Processor", "Date")),
        f"- Speed: How fast is a round, compared with other simulators? | {summary(results)}",
        "",
        ABOUT,
        f"Versions: {facts['versions']}.\n",
        "![seconds of a round, as shares of plain PyTorch](../../docs/images/rivals.svg)\n",
    ]
    for name, row in results["rows"].items():
        work = WORK[name]
        parts += [f"## {work.title}\n"]
        parts += [
            f"{row['steps']:,} steps with {row['examples']:,} examples a round. {sentence(name, row)}\n"
        ]
        parts += [
            table(row),
            "",
            f"{row['command']}, commit {row['commit']}; load of the machine: {row['load']}.\n",
        ]
        for side, found in row["sides"].items():
            if found.get("problems"):
                parts += [f"**The work of {side} differs**: {'; '.join(found['problems'])}.\n"]
    return "\n".join(parts).rstrip() + "\n"


def summary(results: Mapping[str, Any]) -> str:
    """RayFed's share of the processor seconds of each other side, over the rows."""
    texts = []
    for side in SIDES:
        rows = results["rows"].values()
        pairs = [(of_plain(row, RAYFED, "processor"), of_plain(row, side, "processor")) for row in rows]
        shares = [own / other for own, other in pairs if own is not None and other is not None]
        if side != RAYFED and shares:
            low, high = f"{min(shares):.2f}", f"{max(shares):.2f}"
            name = "plain PyTorch" if side == PLAIN else side
            texts.append(f"{low if low == high else f'{low} to {high}'} of {name}")
    return "processor seconds of RayFed: " + (", ".join(texts) or "not measured")


def draw(results: Mapping[str, Any], target: Path) -> None:
    """One bar for each side and row, for processor and wall-clock seconds, as shares of plain PyTorch."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "rivals"
    rows = results["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, (what, words) in zip(axes, reversed(FACTORS.items()), strict=True):
        for k, side in enumerate(SIDES):
            shares = [of_plain(row, side, what) or 0.0 for row in rows.values()]
            axis.bar([i + 0.16 * (k - 2) for i in range(len(rows))], shares, 0.15, label=side)
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set_xticks(range(len(rows)), list(rows))
        axis.set_title(f"{words} seconds of a round, of plain PyTorch", fontsize=10)
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


ABOUT = """\
The same work by five programs (`benchmarks/rivals/programs`): the same network, first values, clients of
a round and batches, which RayFed draws and the others get as files; SGD; two processes or actors with one
thread each; no scores. The rounds of all programs alternate, and each waits for its next one. Images are
noise on a picture of each class; texts are the real ones. RayFed and plain PyTorch run in the environment
of the command. pip installs each other library into an environment that also sees the installed torch.
BlazeFL asks for Python 3.12; the code of 2.0.3 runs on 3.11, so that it is installed with
`--ignore-requires-python`.

Each program is written as its documentation advises, and keeps network and data where it can: RayFed with
`train.group=16` for ViT and 4 for texts, Flower with a network in each actor, pfl under `torchrun`,
BlazeFL with shared memory. LoRA's frozen network is sent by none. Texts are padded to the longest of a
batch, but by RayFed, which computes no pads. CIFAR-10's network and MiniLM have no dropout, because no
two programs share its masks. pfl scores the clients of its first round, which it cannot leave out.
BlazeFL makes its pool anew in each round; it imports in its parent what each process would import again
(1.5 processor seconds).

- **First round**: since the start of the command, with imports, Ray and data. **A round**: the median of
  those after the second one. Shares of plain PyTorch are medians over rounds that follow each other.
- **Processor**: of all processes, also those that ended. **Peak**: of all processes in the first two
  rounds, pages that several share counted once.
- **Lines**: code of the program for all rows, besides networks and data, which are shared.
- **Twice the same, resumes**: with few clients, three rounds again, and three with a kill after the
  first. RayFed and pfl have what resumes. The others save their values by hand here, and get their
  batches as files; in other programs the state of their shuffles would have to be saved, too.
- **Apart**: distance of the final values from those of plain PyTorch, as a share of the way of training.
  A program whose steps, examples, final values or loss differ is named.
"""
