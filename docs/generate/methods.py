"""The page of each method: its docstring, its hyperparameters with defaults, its papers, results and cost."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.generate import bibliography, measured
from rayfed.config.catalog import Choice, choices_of
from rayfed.config.compose import folder
from rayfed.config.papers import MINI, PaperTable, tables
from rayfed.config.schema import load_config
from rayfed.federation.method_registry import METHODS

ROOT = Path(__file__).resolve().parent.parent.parent
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def pages() -> dict[str, str]:
    """Text of the page of every method and of the list of them, by its path in the site."""
    choices = choices_of("algorithm")
    rows = [f"| [`{choice.name}`]({choice.name}.md) | {choice.description} |" for choice in choices]
    first = "# Methods\n\n`algorithm=NAME` chooses one; a page says what it needs and what can be set."
    index = "\n".join([first, "", "| name | what it is |", "|---|---|", *rows, ""])
    return {"methods/index.md": index} | {f"methods/{choice.name}.md": page(choice) for choice in choices}


def page(choice: Choice) -> str:
    """The page of one method."""
    config = load_config([f"algorithm={choice.name}"])
    title, _, purpose = choice.description.partition(": ")
    about = source(choice.name)
    groups = " and ".join(f"`{group}={name}`" for group, name in choice.brings.items())
    brings = f"It brings {groups}." if groups else ""
    half = {"server": config.server["name"], "local": config.local["name"]}
    settings = ROOT / "configs" / "algorithm" / f"{choice.name}.yaml"
    names = {choice.name, title.lower()}
    sections = {
        "": f"{purpose[:1].upper()}{purpose[1:]}." if purpose else "",
        "Source": about,
        "Command": f"```bash\npython -m rayfed.run algorithm={choice.name}\n```\n\n{brings}",
        "Settings that it brings": f"```yaml\n{settings.read_text()}```" if settings.is_file() else "",
        "Server": knobs("server", METHODS.load(half["server"]).server, config.server),
        "Clients": knobs("local", METHODS.load(half["local"]).local, config.local),
        "In the papers' tables": in_papers(choice.name),
        "What the papers leave open": fidelity(choice.name, about),
        "Results": measured.rows(names),
        "Cost": measured.cost(choice.name),
        "References": cited(about),
        "Code": code(choice.name, half["server"]),
    }
    written = [f"## {name}\n\n{text}\n" if name else f"{text}\n" for name, text in sections.items() if text]
    return "\n".join([f"# {title}\n", *written])


def source(name: str) -> str:
    """The docstring of a method below its first line: paper, equations, and differences from the paper."""
    file = ROOT / "algorithms" / f"{name}.py"
    if file.is_file():
        return (
            (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[2].strip()
        )
    lines = (folder() / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return " ".join(line for line in comments[2:] if not line.startswith("@package"))


def knobs(section: str, half: type, values: Mapping[str, Any]) -> str:
    """The purpose of a half, and its hyperparameters with the values of the method on the command line."""
    texts = attributes(half)
    rows = []
    for field in dataclasses.fields(half):
        text = texts.get(field.name, "").replace("|", "\\|")
        rows.append(f"| `{section}.{field.name}` | `{values[field.name]}` | {text} |")
    about = " ".join((half.__doc__ or "").partition("\n\n")[0].split())
    table = ["| key | default | what it is |", "|---|---|---|", *rows]
    return "\n".join([about, "", *(table if rows else ["Nothing can be set here."])])


def attributes(half: type) -> dict[str, str]:
    """Meaning of each field, from the docstrings of a class and of its bases; the class itself wins."""
    found: dict[str, str] = {}
    for cls in half.__mro__:
        listed_here = (cls.__doc__ or "").partition("Attributes:\n")[2]
        deeper = len(listed_here) - len(listed_here.lstrip(" ")) - 4
        aligned = re.sub(rf"^ {{{max(deeper, 0)}}}", "", listed_here, flags=re.MULTILINE)
        for name, text in ATTRIBUTE.findall(aligned):
            found.setdefault(name, " ".join(text.split()))
    return found


def in_papers(name: str) -> str:
    """The tables of the papers that have a row of this method, each with the command of its first cell."""
    lines = []
    for table in _own_tables():
        for row in [row for row, values in table.rows.items() if values["algorithm"] == name][:1]:
            words = ["python", "-m", "rayfed.run", f"experiment={table.name}/{MINI}", f"row={row}"]
            paper, _, key = table.name.partition("/")
            title = f"{paper}, {table.where}"
            lines.append(f"- [{title}](../papers/{paper}.md#{key}): `{shlex.join(words)}`")
    return "\n".join(lines)


def fidelity(name: str, about: str) -> str:
    """Choices for what the papers that a method's file cites leave open."""
    keys = set(bibliography.CITATION.findall(about))
    found: dict[str, None] = {}
    for table in _own_tables():
        if table.reference in keys and any(row["algorithm"] == name for row in table.rows.values()):
            found |= dict.fromkeys(table.choices)
    return "\n".join(f"- {text}" for text in found)


def cited(about: str) -> str:
    """The references that a method's file cites, written out."""
    keys = dict.fromkeys(bibliography.CITATION.findall(about))
    return "\n".join(
        f"- [{key}] {bibliography.citation(key)}" for key in keys if key in bibliography.references()
    )


def code(name: str, server: str) -> str:
    """The classes and functions of a method's file; for a preset without one, of its server half."""
    module = name if (ROOT / "algorithms" / f"{name}.py").is_file() else server
    return f"::: algorithms.{module}\n    options:\n      show_root_heading: false\n      heading_level: 3"


def _own_tables() -> list[PaperTable]:
    """The tables of the papers, without experiments that only repeat the rows of another one."""
    return [table for table in tables(folder()).values() if table.small]
