"""Measures the sentences of docstrings and pages, the first words of docstrings, and the length of pages.

    python -m docs.readability             the counts
    python -m docs.readability --long      also every sentence of more than 30 words, with its file

A sentence ends with a full stop, a question mark or an exclamation mark, or with its paragraph, its bullet,
its cell of a table or its entry of a docstring. Code counts as one word, and blocks of code count nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rayfed", "algorithms", "tune", "docs", "benchmarks")
BESIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages outside docs/. The change log is not one of them, because it only grows."""
LONG = 30  # words
RIDDLES = ("What", "Which", "How", "Whose")
"""Words with which no docstring begins."""
DIALECT = re.compile(
    r"\b(beside|of its own|of their own|somebody|nobody"
    r"|(normal|general|regular|minim|maxim|custom|initial|summar|recogn|optim|random|personal)is(e|ed|es|ing|ation)"
    r"|(behavi|fav)ors?)\b",
    re.IGNORECASE,
)
"""Words that pages and docstrings avoid, because readers stumble over them, and other spellings."""
WRITTEN_BY_PROGRAMS = ("figures.md", "results/")
"""Pages of docs/ that no person writes, by the beginning of their path."""
TABLES = "operations|modules|rings"
MADE = re.compile(rf"(<!-- (?:results [^>]+|(?:{TABLES}) )-->).*?<!-- /(?:results|{TABLES}) -->", re.DOTALL)
"""Tables that `docs.generate.results`, `benchmarks.step_operations` and `docs.layers` write into a page."""
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
INDENTED_BLOCK = re.compile(r"(?<=\n\n)(?:(?: {4,}|\t)\S.*\n)+")
"""A block of code by its indentation: a text that is indented after an empty line."""
CODE = re.compile(r"``[^`]+``|`[^`]+`")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
END = re.compile(
    r"(?<=[.!?])(?<!\bEq\.)(?<!\bEqs\.)(?<!\bal\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)[)\"']?\s+"
)
WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Sentence:
    """A sentence and the file in which it stands, relative to the repository."""

    file: str
    text: str

    @property
    def words(self) -> int:
        return words(self.text)


def words(text: str) -> int:
    """The number of words of a text: what stands between spaces and has a letter or a digit."""
    return sum(1 for word in text.split() if WORD.search(word))


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, with each piece of code as one word.

    >>> sentences("Run `make docs`. It writes (see Eq. 3) [a site](x.md)!")
    ['Run CODE.', 'It writes (see Eq. 3) a site!']
    """
    text = LINK.sub(r"\1", CODE.sub("CODE", " ".join(paragraph.split())))
    return [sentence for sentence in END.split(text) if words(sentence)]


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs, bullets, headings and cells of tables of a Markdown text, without blocks of code."""
    for block in re.split(r"\n\s*\n", INDENTED_BLOCK.sub("", COMMENT.sub("", FENCE.sub("\n", text)))):
        for item in re.split(r"^ *(?:[-*]|\d+\.|#+) ", block, flags=re.MULTILINE):
            rows = [line for line in item.splitlines() if line.startswith("|")]
            yield " ".join(line for line in item.splitlines() if not line.startswith("|"))
            for row in rows:
                yield from (cell for cell in re.split(r"(?<!\\)\|", row) if words(cell) > 3)


def pages() -> list[Path]:
    """The pages that people write."""
    inside = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / name for name in BESIDE] + [page for page in inside if _by_hand(page)]


def handwritten() -> list[Path]:
    """The pages of docs/ that people write."""
    return [page for page in pages() if page.is_relative_to(ROOT / "docs")]


def _by_hand(page: Path) -> bool:
    return not page.relative_to(ROOT / "docs").as_posix().startswith(WRITTEN_BY_PROGRAMS)


def length(page: Path) -> int:
    """The number of words of a page, with its code and with those tables that no program writes."""
    return words(COMMENT.sub("", MADE.sub("", page.read_text(encoding="utf-8"))))


def docstrings() -> Iterator[tuple[str, str]]:
    """File and text of every docstring, of attributes too."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            place = file.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield place, _even(text)


def _even(docstring: str) -> str:
    """The docstring without the indentation of its later lines."""
    first, _, rest = docstring.expandtabs().partition("\n")
    lines = rest.splitlines()
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join([first, *(line[depth:] for line in lines)])


def entries(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring, and each entry of its sections; examples and formulas are left out."""
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.splitlines()
        head = lines[0].strip() if lines else ""
        if head.startswith(">>>") or "::" in head:
            continue
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):", head):
            section = "\n".join(line[4:] if line.startswith("    ") else line for line in lines[1:])
            yield from re.split(r"\n(?=\S)", section)
        elif not all(line.startswith("    ") for line in lines if line.strip()):
            yield from re.split(r"^ *- ", block, flags=re.MULTILINE)


def all_sentences() -> Iterator[Sentence]:
    """Every sentence of all docstrings and pages."""
    for page in pages():
        for paragraph in paragraphs(page.read_text(encoding="utf-8")):
            for text in sentences(paragraph):
                yield Sentence(page.relative_to(ROOT).as_posix(), text)
    for file, docstring in docstrings():
        for entry in entries(docstring):
            for text in sentences(entry):
                yield Sentence(file, text)


def riddles() -> list[str]:
    """File and first line of every docstring that begins as a question does."""
    found = [(file, text.strip().partition("\n")[0]) for file, text in docstrings()]
    return [f"{file}: {line}" for file, line in found if line.partition(" ")[0].rstrip(",") in RIDDLES]


def dialect() -> list[str]:
    """File and word for every use of a word that pages and docstrings avoid."""
    texts = [
        (page.relative_to(ROOT).as_posix(), FENCE.sub("", page.read_text(encoding="utf-8")))
        for page in pages()
    ]
    return [
        f"{place}: ...{line[max(found.start() - 30, 0) : found.end() + 30]}..."
        for place, text in (*texts, *docstrings())
        for line in [" ".join(CODE.sub("CODE", text).split())]
        for found in DIALECT.finditer(line)
    ]


def counts() -> dict[str, float]:
    """All that is measured, by its name."""
    found = list(all_sentences())
    by_kind = {
        "docstrings": [each for each in found if each.file.endswith(".py")],
        "pages": [each for each in found if each.file.endswith(".md")],
        "both": found,
    }
    result: dict[str, float] = {}
    for kind, some in by_kind.items():
        result[f"sentences of {kind}"] = len(some)
        result[f"words in a sentence of {kind}"] = fmean(each.words for each in some)
        result[f"share of long sentences of {kind}"] = sum(each.words > LONG for each in some) / len(some)
    return {
        **result,
        "docstrings that begin as a question": len(riddles()),
        "words to avoid": len(dialect()),
        "words of README.md": length(ROOT / "README.md"),
        "handwritten pages": len(handwritten()),
        "words of handwritten pages": sum(length(page) for page in handwritten()),
    }


def main(args: Sequence[str]) -> None:
    for name, value in counts().items():
        sys.stdout.write(f"{name:44} {value:8.3f}\n" if value % 1 else f"{name:44} {value:8,.0f}\n")
    if "--long" in args:
        for each in sorted(all_sentences(), key=lambda each: -each.words):
            if each.words > LONG:
                sys.stdout.write(f"{each.file}: {each.words}: {each.text}\n")
        sys.stdout.write("\n".join([*riddles(), *dialect(), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
