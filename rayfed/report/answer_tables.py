"""Shows answers that a language model wrote: tables for a report, and the texts.

A page reads them from a file, without what trains or writes them (`rayfed.report.answers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rayfed.record.readers import read_lines, reading
from rayfed.terminal.table_formats import Table

FILE = "answers.jsonl"
TITLE = "Answers of the final model"
BEGIN = f"\n## {TITLE}\n"
SHOWN = 2
"""Answers of a domain that report.md shows; report.html has all."""
MOST = 300
"""Letters of a prompt or an answer that reports show."""


@dataclass(frozen=True, kw_only=True)
class WrittenAnswer:
    """A prompt, the answer of the model, and its scores.

    Attributes:
        domain: Domain of the text.
        key: Its key in the data set.
        prompt: What the model was given.
        expected: The whole answer of the data set, whatever the length that the model learned.
        written: The answer of the model.
        exact_match: 1 where both are equal after `plain`, else 0.
        last_number: 1 where the last numbers in both are equal, 0 where not; None: the expected one has none.
        rouge_l: `rouge_l` of both.
        chosen: The candidate answer with the largest `likelihoods`; None: there are no candidates.
        choice: 1 where it is the expected one after `plain`, else 0; None: no candidate is the expected one.
        prompt_cut: Whether `prompt` is a part of the prompt of the data set, for which there was no room.
        expected_longer: Whether the expected answer has more tokens than the model could write.
    """

    domain: str
    key: str
    prompt: str
    expected: str
    written: str
    exact_match: int
    last_number: int | None
    rouge_l: float
    chosen: str | None = None
    choice: int | None = None
    prompt_cut: bool = False
    expected_longer: bool = False


def means(rows: Sequence[WrittenAnswer]) -> dict[str, float]:
    """Mean of each score over the answers that have one; scores that none has are left out."""
    found = {}
    for name in ("exact_match", "last_number", "rouge_l", "choice"):
        values = [value for row in rows if (value := asdict(row)[name]) is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found


def table_of(rows: Sequence[WrittenAnswer]) -> Table:
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
    return Table(TITLE, columns, tuple(body), tuple(_notes(rows)))


def _notes(rows: Sequence[WrittenAnswer]) -> Iterator[str]:
    """Notes on texts whose scores are low whatever the model learned."""
    counts = {
        "have no prompt: the model wrote from nothing": sum(not row.prompt.strip() for row in rows),
        "have a prompt that was cut, to leave room for the answer": sum(row.prompt_cut for row in rows),
        "have an expected answer of more than --tokens tokens": sum(row.expected_longer for row in rows),
    }
    yield from (f"{count} of {len(rows)} texts {words}" for words, count in counts.items() if count)


def section(rows: Sequence[WrittenAnswer]) -> str:
    """The part of report.md about answers."""
    parts = ["\n", table_of(rows).markdown("##")]
    for domain in dict.fromkeys(row.domain for row in rows):
        for row in [row for row in rows if row.domain == domain][:SHOWN]:
            told = {"prompt": row.prompt, "expected": row.expected, "written": row.written}
            told |= {} if row.chosen is None else {"chosen": row.chosen}
            parts.append(f"\n{domain}, `{row.key}`:\n\n")
            parts += [f"- {name}: {_short(text)}\n" for name, text in told.items()]
    return "".join(parts)


def _short(text: str) -> str:
    flat = _begin(text).replace("`", "'")
    return f"`{flat}`" if flat else "(nothing)"


def _begin(text: str) -> str:
    flat = " ".join(text.split())
    return f"{flat[:MOST]}{'...' if len(flat) > MOST else ''}"


def on_page(folder: Path) -> list[Table]:
    """The tables of a page about the answers in a folder: their scores, and the texts. Empty: there are none.

    Raises:
        DamagedError: answers.jsonl cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return []
    with reading(file):
        rows = [WrittenAnswer(**line) for line in read_lines(file)]
    chosen = any(row.chosen is not None for row in rows)
    columns = ("domain", "text", "prompt", "expected", "written", *(("chosen",) if chosen else ()))
    cells = [
        (row.domain, row.key, *map(_begin, (row.prompt, row.expected, row.written)))
        + ((row.chosen or "",) if chosen else ())
        for row in rows
    ]
    return (
        [table_of(rows), Table("Texts", columns, cells, filters={"domain": rows[0].domain})] if rows else []
    )
