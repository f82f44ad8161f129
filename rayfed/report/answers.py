"""Lets the language model of a finished run answer prompts of its test texts, and adds them to its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rayfed.analysis.answers import Answer, answers, means
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.record.files import write_text
from rayfed.record.readers import read_bytes, reading
from rayfed.terminal.console import say
from rayfed.terminal.fitting import terminal_width
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.stages import screen_of, shown_on
from rayfed.terminal.table import Table

USAGE = """\
python -m rayfed.report.answers RUN [--texts 8] [--tokens 64] [--debug]

Lets the final model of a finished run write answers to test texts of every
domain, scores them, and adds scores and some answers to report.md, for example
  python -m rayfed.report.answers runs/mine --texts 20 --tokens 128
"""

FILE = "answers.jsonl"
BEGIN = "\n## Answers of the final model\n"
SHOWN = 2
"""Answers of a domain that report.md shows."""
MOST = 300
"""Letters of a prompt or an answer that report.md shows."""


def table_of(rows: Sequence[Answer]) -> Table:
    """Mean scores of the answers by domain, and of all of them."""
    groups = {
        domain: [row for row in rows if row.domain == domain]
        for domain in dict.fromkeys(r.domain for r in rows)
    }
    names = list(means(rows))
    lines = [*groups.items(), *([("all", list(rows))] if len(groups) > 1 else [])]
    body = []
    for domain, own in lines:
        found = means(own)
        cells = (f"{100 * found[name]:.1f}" if name in found else "" for name in names)
        body.append((domain, str(len(own)), *cells))
    columns = ("domain", "answers", *(f"{name} %" for name in names))
    return Table("answers of the final model, written greedily", columns, tuple(body))


def section(rows: Sequence[Answer]) -> str:
    """The part of report.md about answers."""
    parts = [BEGIN, "\n", table_of(rows).markdown("###")]
    for domain in dict.fromkeys(row.domain for row in rows):
        for row in [row for row in rows if row.domain == domain][:SHOWN]:
            told = {"prompt": row.prompt, "expected": row.expected, "written": row.written}
            parts.append(f"\n{domain}, `{row.key}`:\n\n")
            parts += [f"- {name}: {_short(text)}\n" for name, text in told.items()]
    return "".join(parts)


def _short(text: str) -> str:
    flat = " ".join(text.split()).replace("`", "'")
    return f"`{flat[:MOST]}{'...' if len(flat) > MOST else ''}`" if flat else "(nothing)"


def add(folder: Path, rows: Sequence[Answer]) -> None:
    """Write answers.jsonl, and put the section into report.md in place of an earlier one."""
    write_text(folder / FILE, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    report = folder / "report.md"
    with reading(report):
        text = read_bytes(report).decode() if report.exists() else ""
    write_text(report, text.partition(BEGIN)[0] + section(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Answer from the command line. Exit code: 0 answered, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.answers", USAGE)
    parser.add_argument("run", type=user_folder, help="a finished run of a language model")
    parser.add_argument("--texts", type=int, default=8, help="most test texts of a domain")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.texts < 1 or args.tokens < 1:
            raise ConfigError(f"--texts, --tokens: {args.texts} and {args.tokens} must be at least 1")
        with shown_on(screen_of()):
            rows = answers(args.run, args.texts, args.tokens)
        add(args.run, rows)
        say(table_of(rows).text(terminal_width()))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
