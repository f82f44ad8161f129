"""Runs a command in this process and judges how it ended: the one rule that every fuzz case must keep."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS = 10.0
COMPILING = 60.0
"""Seconds of a command that compiles its network, unless torch still has the result of an earlier time."""
PATIENCE = 20.0
"""Seconds on the clock that count as one second of work."""
OUTCOMES = ("success", "would start", "refused (exit 2)", "failed (exit 1)")
BESIDE = ("continue with: ",)
"""Beginnings of lines that may stand beside the error line on standard error."""

COUNTS: Counter[tuple[str, str]] = Counter()
"""Cases of this process by kind and outcome; the examples that hypothesis tries while it shrinks too."""


class StartedError(Exception):
    """Raised in the place of everything that would start: the input was accepted."""


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def attempt(
    kind: str, main: Callable[[Sequence[str]], int], arguments: Sequence[str], report: bool = False
) -> str:
    """Run a command and count how it ended.

    Args:
        kind: What the case is about.
        main: Entry point of the command.
        arguments: Its command line.
        report: Whether the command may describe what is wrong in lines of its own instead of an error line.

    Returns:
        One of OUTCOMES.

    Raises:
        AssertionError: It ended with a traceback, another exit code, not exactly one error line, or too late.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    records = Records()
    began = time.process_time()
    began_waiting = time.monotonic()
    logging.getLogger().addHandler(records)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code: object = main(arguments)
    except StartedError:
        code = None
    except SystemExit as ended:
        code = ended.code
    except Exception:
        raise AssertionError(f"{kind}: traceback for {arguments}\n{traceback.format_exc()}") from None
    finally:
        logging.getLogger().removeHandler(records)
    # Processor time, because tests run beside each other; a command that waits for ever uses none.
    seconds = max(time.process_time() - began, (time.monotonic() - began_waiting) / PATIENCE)
    said = [wrapper.buffer.getvalue().decode() for wrapper in (out, err)]  # type: ignore[attr-defined]
    limit = COMPILING if "train.compile=true" in arguments else SECONDS
    outcome = judge(code, *said, seconds, records.records, report, limit)
    assert outcome in OUTCOMES, f"{kind}: {outcome} for {arguments}\n{said[1]}"
    COUNTS[kind, outcome] += 1
    return outcome


def judge(
    code: object,
    out: str,
    err: str,
    seconds: float,
    records: Sequence[logging.LogRecord],
    report: bool = False,
    limit: float = SECONDS,
) -> str:
    """One of OUTCOMES, or what rule was broken."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    others = [line for line in err.splitlines() if line not in errors and not line.startswith(BESIDE)]
    if seconds > limit:
        return f"{seconds:.0f} s"
    if "Traceback (most recent call last)" in out + err or any(record.exc_info for record in records):
        return "a traceback was shown"
    if code is None:
        return OUTCOMES[1]
    if code == 0:
        return OUTCOMES[0] if not errors else "an error line with exit code 0"
    if code not in (1, 2):
        return f"exit code {code}"
    if report and not errors and (others or '"ok": false' in out):
        return OUTCOMES[2]
    if len(errors) != 1 or others:
        return f"{len(errors)} error lines and {len(others)} other lines with exit code {code}"
    return OUTCOMES[2] if code == 2 else OUTCOMES[3]


def table(counts: Counter[tuple[str, str]]) -> str:
    """Cases by kind and outcome, as Markdown."""
    lines = ["| " + " | ".join(("cases of", *OUTCOMES, "all")) + " |", "|---" + "|---:" * 5 + "|"]
    for kind in sorted({kind for kind, _ in counts}):
        numbers = [counts[kind, outcome] for outcome in OUTCOMES]
        lines.append("| " + " | ".join((kind, *map(str, numbers), str(sum(numbers)))) + " |")
    return "\n".join(lines)


def pytest_terminal_summary(terminalreporter):
    """Show the counts of every process that ran cases; reports bring them from workers."""
    total: Counter[tuple[str, str]] = Counter()
    for reports in terminalreporter.stats.values():
        for one in reports:
            for name, value in getattr(one, "user_properties", ()):
                if name == "fuzz" and getattr(one, "when", "") == "call":
                    total.update({(kind, outcome): number for kind, outcome, number in value})
    if total:
        terminalreporter.write_line(f"fuzz cases by kind and outcome:\n{table(total)}")


def tree_of(folder: Path) -> dict[str, bytes]:
    """Content of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
