"""Adds to the site what is generated, and completes its menu.

MkDocs calls the functions whose names begin with on_. A menu entry that ends in /* stands for all generated
pages of a folder, and the entry * for every page of docs/ that the menu does not name: a new page is never
missing.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from docs.generate import api, bibliography, commands, keys, methods, papers, tunings
from rayfed.config.catalog import SECTIONS, choices_of

ROOT = Path(__file__).resolve().parent.parent.parent
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extending.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/ that are pages of the site, and their paths in it."""
SOURCES = {
    "rayfed/config/schema.py": "config.md",
    "rayfed/tuning": "tunings.md",
    "rayfed/__main__.py": "commands.md",
    "algorithms": "methods/index.md",
    "configs/papers": "papers/index.md",
}
"""Sources to which pages link, so that links work in a clone, and generated pages that tell more of them."""
EVIDENCE = "benchmarks/results"
"""Folder with the measurements that the pages cite; in the site they are pages of the folder results."""


@cache
def generated() -> dict[str, str]:
    """Text of every page that no file of docs/ holds, by its path in the site."""
    moved = {page: inside((ROOT / name).read_text(encoding="utf-8")) for name, page in MOVED.items()}
    return {
        **moved,
        **measurements(),
        **methods.pages(),
        **papers.pages(),
        "catalog.md": catalog(),
        api.PAGE: api.page(),
        keys.PAGE: keys.page(),
        tunings.PAGE: tunings.page(),
        commands.PAGE: commands.page(),
        bibliography.PAGE: bibliography.page(),
    }


def inside(text: str) -> str:
    """The text of a file outside docs/, with its links as they are in the site."""
    for name, page in MOVED.items():
        text = text.replace(f"]({name}", f"]({page}")
        text = re.sub(r"\[([^]]*)\]\(((?:tests|notebooks)/[^)]*|LICENSE)\)", r"\1 (`\2`)", text)
    return text.replace("](docs/", "](").replace(f"]({EVIDENCE}/", "](results/")


def measurements() -> dict[str, str]:
    """Text of the page of every measurement, by its path in the site."""
    found = {}
    for file in sorted((ROOT / EVIDENCE).rglob("*.md")):
        path = file.relative_to(ROOT / EVIDENCE)
        up = "../" * (len(path.parts) - 1)
        text = file.read_text(encoding="utf-8").replace(f"](../../{up}docs/", f"](../{up}")
        found[f"results/{path.as_posix()}"] = text
    return found


def catalog() -> str:
    """The page of everything that can be chosen by name."""
    parts = ["# Everything that has a name\n", "`rayfed list` prints the same list.\n"]
    for title, group in SECTIONS.items():
        rows = [
            f"| `{choice.name}` | {choice.text.replace('|', chr(92) + '|')} |" for choice in choices_of(group)
        ]
        parts += [
            f"## {title.capitalize()}\n",
            f"`{group}=NAME`\n",
            "| name | what it is |",
            "|---|---|",
            *rows,
            "",
        ]
    return "\n".join(parts)


def menu(entries: list[Any], pages: list[str]) -> list[Any]:
    """The menu with its patterns replaced by pages; a pattern without any page disappears.

    Args:
        entries: The menu of mkdocs.yml: paths, and objects with one title and a path or a list of entries.
        pages: Paths of all pages of the site.
    """
    named = set(re.findall(r"[\w/]+\.md", repr(entries)))
    rest = [page for page in pages if "/" not in page and page not in named]
    return _expanded(entries, pages, rest)


def _expanded(entries: list[Any], pages: list[str], rest: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            (title, content), *_ = entry.items()
            inner = _expanded(content, pages, rest) if isinstance(content, list) else content
            found += [{title: inner}] if inner else []
        elif entry == "*":
            found += rest
        elif entry.endswith("/*"):
            found += sorted(page for page in pages if page.startswith(entry[:-1]))
        else:
            found.append(entry)
    return found


def on_config(config: Any) -> Any:
    """Complete the menu before MkDocs reads it."""
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    config.nav = menu(config.nav, sorted({*written, *generated()}))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link citations, and links to files outside docs/, to pages of the site."""
    for name, target in MOVED.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    for name, target in SOURCES.items():
        markdown = re.sub(rf"\]\(\.\./{re.escape(name)}(#[^)]*)?\)", rf"]({target}\1)", markdown)
    markdown = markdown.replace(f"](../{EVIDENCE}/", "](results/")
    return bibliography.linked(markdown, page.file.src_uri.count("/"))
