"""The page about one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayfed.record.readers import reading
from rayfed.report.page import cost, fairness, holdings, method, scores, settings, summary
from rayfed.report.page.parts import Page, Section
from rayfed.report.page.run import PageRun

SECTIONS: Sequence[Callable[[PageRun], Section]] = (
    summary.summary,
    scores.over_rounds,
    scores.domains_and_clients,
    fairness.fairness,
    holdings.holdings,
    method.method,
    cost.transfers,
    cost.times,
    cost.failures,
    settings.config,
    settings.repeated,
)
"""The sections about a run, in their order; one without parts is left out."""


def sections(run: PageRun) -> list[Section]:
    """All sections about a run.

    Raises:
        DamagedError: A file of the run cannot be read; the message names the folder or the file.
    """
    with reading(run.path):
        found = [section(run) for section in SECTIONS]
    return [section for section in found if section.parts]


def single_page(run: PageRun) -> Page:
    """The page about one run.

    Raises:
        DamagedError: A file of the run cannot be read.
    """
    model, tuning = run.config.get("model", {}), run.config.get("tuning", {})
    subtitle = (
        f"{model.get('name')}, {tuning.get('name')}, {len(run.rounds)} of {run.planned} rounds; {run.path}"
    )
    return Page(
        title=run.tables.name,
        subtitle=subtitle,
        sections=[*sections(run), settings.glossary()],
        facts=[settings.facts(run, run.tables.name)],
    )
