"""The page of every tuning scheme: its keys with their defaults, and its source."""

from __future__ import annotations

import dataclasses
import inspect

from docs.generate.keys import default
from docs.generate.methods import attributes
from rayfed.config.catalog import choices_of
from rayfed.config.compose import folder
from rayfed.tuning.base import TUNINGS
from rayfed.user_files import read_file

PAGE = "tunings.md"
INTRODUCTION = """# Tuning schemes

After this page you can choose the tensors that clients train and send. `tuning=NAME` selects a scheme, and
`tuning.KEY=VALUE` sets one of its options. Any method takes any scheme in which it finds what it needs; other
combinations are refused before anything starts.
[Your model](models.md) says which networks each scheme fits."""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION, "", "| name | description |", "|---|---|"]
    parts += [
        f"| [`{choice.name}`](#{choice.name}) | {choice.description} |" for choice in choices_of("tuning")
    ]
    for choice in choices_of("tuning"):
        scheme = TUNINGS.load(choice.name)
        about = (inspect.getdoc(inspect.getmodule(scheme)) or "").partition("\n")[2].strip()
        texts = attributes(scheme)
        rows = [
            f"| `tuning.{field.name}` | {default(field)} | {texts.get(field.name, '')} |".replace(
                "\\", "\\\\"
            )
            for field in dataclasses.fields(scheme)
        ]
        parts += [
            "",
            f"## {choice.name}",
            "",
            f"{choice.description}.",
            "",
            about,
            "",
            _training(choice.name),
            "",
        ]
        parts += ["| key | default | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([*parts, ""])


def _training(name: str) -> str:
    """A sentence on the optimizer and the rate that a scheme brings, and their source."""
    file = folder() / "tuning" / f"{name}.yaml"
    if not file.is_file():
        return "It trains with the default, SGD with 0.02."
    lines = file.read_text().splitlines()
    source = " ".join(line[2:] for line in lines if line.startswith("# ") and "@package" not in line)
    keys = ", ".join(f"`train.{key}={value}`" for key, value in read_file(file, name)["train"].items())
    return f"It trains with {keys}. {source}"
