"""Reads docs/references.bib, and links the citations of a page to the page of references."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "references.md"
ENTRY = re.compile(r"^@\w+\{(\w+),\n(.*?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"(\w+) = \{((?:[^{}]|\{[^{}]*\})*)\}")
CITATION = re.compile(r"\[([a-z]+(?:19|20)\d\d\w+)\](?!\()")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
ACCENTS = {
    '"': "\u0308",
    "'": "\u0301",
    "`": "\u0300",
    "~": "\u0303",
    "^": "\u0302",
    "c": "\u0327",
    "v": "\u030c",
}


@cache
def references() -> dict[str, dict[str, str]]:
    """The fields of every reference as plain text, by key."""
    text = (ROOT / "docs" / "references.bib").read_text(encoding="utf-8")
    return {
        key: {name: _plain(value) for name, value in FIELD.findall(body)} for key, body in ENTRY.findall(text)
    }


def citation(key: str) -> str:
    """Authors, title, place and year of a reference in one sentence."""
    fields = references()[key]
    authors = [" ".join(reversed(name.split(", "))) for name in fields["author"].split(" and ")]
    authors = ["et al." if name == "others" else name for name in authors]
    place = fields.get("booktitle") or fields.get("journal") or fields.get("howpublished") or ""
    parts = [
        ", ".join(authors).rstrip("."),
        f"*{fields['title']}*",
        f"{place} {fields.get('year', '')}".strip(),
    ]
    return ". ".join(part for part in parts if part) + "."


def page() -> str:
    """The page of references, with an anchor for each key."""
    entries = [f"## {key} {{#{key}}}\n\n{citation(key)}\n" for key in sorted(references())]
    return "\n".join(["# References\n", *entries])


def linked(text: str, folders: int) -> str:
    """The text of a page with every citation outside of code linked to the page of references.

    Args:
        text: Markdown.
        folders: Number of folders between the page and the start of the site.

    >>> linked("as in [su2024fedra], Eq. 3", 1).replace(chr(92), "")
    'as in [[su2024fedra]](../references.md#su2024fedra), Eq. 3'
    """

    def link(match: re.Match[str]) -> str:
        key = match[1]
        return f"[\\[{key}\\]]({'../' * folders}{PAGE}#{key})" if key in references() else match[0]

    pieces = CODE.split(text)
    return "".join(piece if CODE.match(piece) else CITATION.sub(link, piece) for piece in pieces)


def _plain(text: str) -> str:
    r"""LaTeX without its commands: `\"{u}` and `{\"u}` are ü."""

    def accented(match: re.Match[str]) -> str:
        return unicodedata.normalize("NFC", match[2] + ACCENTS[match[1]])

    text = re.sub(r"\\([\"'`~^cv])\{?(\w)\}?", accented, " ".join(text.split()))
    return re.sub(r"\\([&%$#_])", r"\1", text).translate({ord(brace): None for brace in "{}"})
