"""The page of the API: every public name of `rayfed`, and the parts that extensions are made of."""

from __future__ import annotations

import rayfed

PAGE = "api.md"
INTRODUCTION = """# API

After this page you can look up every class and function that a program or a method of yours uses. The names
of the first section can be imported from `rayfed` itself: `from rayfed import Local, Method, Server`."""
MORE = {
    "Messages and types": ("rayfed.types",),
    "Tuning schemes": ("rayfed.tuning.base",),
    "Readers": ("rayfed.data.source",),
    "Tests of your own parts": (
        "rayfed.testing.check_method",
        "rayfed.testing.check_tuning",
        "rayfed.testing.check_reader",
    ),
    "Errors": ("rayfed.errors",),
}
"""Names that cannot be imported from `rayfed` itself, by the title of their section."""


def page() -> str:
    """The text of the page."""
    homes = [f"{rayfed._HOME[name]}.{name}" for name in rayfed.__all__ if name in rayfed._HOME]
    own = [home for home in homes if not home.startswith(MORE["Messages and types"])]
    sections = {"Public names": own, **MORE}
    parts = [INTRODUCTION]
    for title, names in sections.items():
        parts += [f"## {title}", *(f"::: {name}" for name in names)]
    return "\n\n".join([*parts, ""])
