"""The page about several runs: a sweep, a comparison, folds, a reproduced table, or any run folders."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rayfed.record.readers import reading
from rayfed.report.page import overview, overview_figures, settings
from rayfed.report.page.find import Found, Member, find, told_apart
from rayfed.report.page.paired import comparisons
from rayfed.report.page.parts import Chapter, Page, Part, Section, Text
from rayfed.report.page.protocol import over_seeds
from rayfed.report.page.single import sections, single_page

MOST_CHAPTERS = 12
"""Largest number of runs that are also shown in detail."""


def page_of(paths: Sequence[Path]) -> Page:
    """The page about everything in these folders.

    Raises:
        ConfigError: A folder holds no run.
        DamagedError: A file in a folder cannot be read.
    """
    found = [find(path) for path in dict.fromkeys(paths)]
    members = [member for one in found for member in one.members]
    if len(members) == 1 and not found[0].tables:
        return single_page(members[0].run)
    for member in members:
        with reading(member.run.path):
            member.run.read()
    with reading(paths[0]):
        return several_page(found, told_apart(members))


def several_page(found: Sequence[Found], members: Sequence[Member]) -> Page:
    """The page about several runs.

    Raises:
        DamagedError: A file of a run cannot be read.
    """
    shown: list[Section] = [
        overview.summary(members),
        *(Section(one.heading, one.tables) for one in found),
        Section("The protocol over seeds", over_seeds([table for one in found for table in one.tables])),
        overview.results(members),
        overview_figures.over_rounds(members),
        overview_figures.by_domain(members),
        Section("Paired comparisons", [grid] if (grid := comparisons(members)) else []),
        overview_figures.fairness(members),
        overview_figures.cost(members),
        settings.configs([m.run for m in members], [m.name for m in members]),
        _repeated(found, members),
        settings.glossary(),
    ]
    chapters = []
    if len(members) <= MOST_CHAPTERS:
        chapters = [Chapter(name=m.name, sections=sections(m.run)) for m in members]
    titles = dict.fromkeys(one.title for one in found)
    return Page(
        title=", ".join(titles) if len(titles) <= 3 else f"{len(members)} runs",
        subtitle=f"{len(members)} runs; {', '.join(_places(members))}",
        sections=[section for section in shown if section.parts],
        chapters=chapters,
        facts=[settings.facts(m.run, m.name) for m in members],
    )


def _places(members: Sequence[Member]) -> list[str]:
    """Data sets and models of the runs."""
    data = dict.fromkeys(m.run.data for m in members)
    models = dict.fromkeys(str(m.run.config.get("model", {}).get("name")) for m in members)
    return [*data, *models]


def _repeated(found: Sequence[Found], members: Sequence[Member]) -> Section:
    """Commands that repeat all runs, and the environment of each."""
    whole = [one.repeat for one in found if one.repeat]
    parts: list[Part] = []
    if whole:
        parts.append(Text(title="One command", code=whole))
    made = dict.fromkeys(command for m in members for command in m.run.commands)
    if made:
        parts.append(Text(title="Commands with which it was made", code=list(made)))
    if len(members) > MOST_CHAPTERS:
        sentence = "There are too many runs to show each in detail here; this shows one of them:"
        code = [f"python -m rayfed.report {shlex.quote(str(members[0].run.path))}"]
        parts.append(Text(title="A single run", sentences=[sentence], code=code))
    parts.append(settings.environment([m.run for m in members], [m.name for m in members]))
    return Section("Repeat it", parts)
