"""The rings of the code, the imports that cross a ring, and how much must be read to understand one thing.

    python -m tests.rings     the counts, as `make lint` prints them

The core holds what an experiment is; every other ring stands around it and can be left out of a reading.
`RINGS` says what each is for and which files belong to it, `BELOW` what it may import. Imports in blocks for
type checkers do not count, those inside functions do. `make lint` checks the rings as a contract of
import-linter (`RingsContract`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from importlinter import Contract, ContractCheck, output

ROOT = Path(__file__).parents[1]
PACKAGES = ("rayfed", "algorithms", "tune")

CORE = "core"
RINGS: Mapping[str, tuple[str, str]] = {
    "door": (
        "is the commands, and what checks and prepares for them",
        """
        rayfed/__main__.py rayfed/*/__main__.py rayfed/run.py rayfed/resume.py rayfed/study.py rayfed/view.py
        rayfed/replay.py rayfed/ps.py rayfed/doctor.py rayfed/testing.py rayfed/prepare/*
        rayfed/report/matrix.py
        """,
    ),
    "study": (
        "runs an experiment, or many as one table: grids, protocols, tables of papers, searches",
        "rayfed/experiment/* rayfed/reproduce/* tune/*",
    ),
    "views": ("draws tables, figures and pages of a run or a study from its folder", "rayfed/report/*"),
    "names": (
        "turns names, YAML and objects of a user into a design, and a design into names",
        """
        rayfed/config/schema.py rayfed/config/compose.py rayfed/config/check_keys.py
        rayfed/config/short_forms.py rayfed/config/catalog.py rayfed/config/look_up.py
        rayfed/config/variants.py rayfed/config/papers.py rayfed/config/own_network.py
        """,
    ),
    "datasets": (
        "reads data sets and file formats by name",
        """
        rayfed/data/readers/* rayfed/data/named/* rayfed/data/formats/* rayfed/data/published.py
        rayfed/data/glyphs.py
        """,
    ),
    "fast": (
        "does the same in fewer operations: groups, graphs, kernels",
        "rayfed/fast/*",
    ),
    "methods": ("are the methods, one in each file", "algorithms/*"),
    CORE: ("is an experiment: clients, rounds, models, executors, records", ""),
}
"""The purpose of each ring, and its files, from the outermost ring to the core, which has all others."""

BELOW: Mapping[str, tuple[str, ...]] = {
    "door": ("study", "views", "names", "datasets", "fast", "methods", CORE),
    "study": ("views", "names", CORE),
    "views": ("names", CORE),
    "names": (CORE,),
    "datasets": (CORE,),
    "fast": (CORE,),
    "methods": (CORE,),
    CORE: (),
}
"""The rings that each ring may import."""

EXPERIMENT = "rayfed.experiment.experiment"

STARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one round in this process": (("rayfed.engine.loop", "rayfed.executors.inline"), ()),
    "an experiment of objects": (("rayfed.engine.setup", "rayfed.engine.session"), ()),
    "Experiment(...).run()": ((EXPERIMENT,), ()),
    "Experiment(...).run(), no report": ((EXPERIMENT,), ("views",)),
    "a study": (("rayfed.experiment.study.cells",), ()),
    "the half of a client": (("rayfed.federation.local",), ()),
    "FedProx": (("algorithms.fedprox",), ()),
    "the page of a run": (("rayfed.report.page.render",), ()),
    "a table of a paper": (("rayfed.reproduce.run_table",), ()),
}
"""Modules with which a reading of one thing begins, and the rings that it leaves out."""


class Tree:
    """The imports of a checkout.

    Args:
        root: Its folder.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
        }
        """The file of each module."""

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of the checkout that each module imports."""
        return {
            name: {each for each in imported_by(ast.parse(path.read_text())) if each in self.files}
            for name, path in self.files.items()
        }

    def lines(self, names: Iterable[str]) -> int:
        """Number of lines of modules."""
        return sum(len(self.files[name].read_text().splitlines()) for name in names)

    @cached_property
    def full(self) -> set[str]:
        """The modules with more than a docstring; a package may have no more."""
        return {name for name, file in self.files.items() if file.stem != "__init__" or self.imports[name]}

    def reached(self, starts: Iterable[str], without: Collection[str] = ()) -> set[str]:
        """The modules that are imported, directly or not, by some, and these themselves.

        Args:
            without: Rings that are not entered.
        """
        seen: set[str] = set()
        waiting = list(starts)
        while waiting:
            name = waiting.pop()
            if name in self.full - seen and self.ring(name) not in without:
                seen.add(name)
                waiting += self.imports[name]
        return seen

    def ring(self, name: str) -> str:
        """The ring of a module."""
        file = self.files[name].relative_to(self._root).as_posix()
        matches = (
            ring
            for ring, (_, patterns) in RINGS.items()
            if any(fnmatch(file, each) for each in patterns.split())
        )
        return next(matches, CORE)

    def crossings(self) -> list[str]:
        """The imports of a ring that the importer's ring may not import, as `importer -> imported`.

        A package whose `__init__.py` has no more than a docstring is no import.
        """
        return [
            f"{name} -> {other}"
            for name in sorted(self.files)
            for other in sorted(self.imports[name] & self.full)
            if self.ring(other) not in (self.ring(name), *BELOW[self.ring(name)])
        ]


def imported_by(tree: ast.AST, typing: bool = False) -> set[str]:
    """Names that a syntax tree imports, but for type checkers; of `from a import b` both a and a.b."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(tree):
        own = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        if isinstance(child, ast.Import) and not own:
            found.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not own:
            found.add(child.module)
            found.update(f"{child.module}.{alias.name}" for alias in child.names)
        found |= imported_by(child, own)
    return found


class RingsContract(Contract):
    """No module imports a ring that its own ring may not import."""

    type_name = "rings"

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        found = Tree().crossings()
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for crossing in check.metadata["found"]:
            output.print_error(f"{crossing}: crosses a ring (tests/rings.py)")


def counts(tree: Tree) -> str:
    """The files and lines that each thing reaches, the size of each ring, and the number of crossings."""
    rows = []
    for what, (starts, without) in STARTS.items():
        reached = tree.reached(starts, without)
        rows.append(f"{what:36}{len(reached):5} files {tree.lines(reached):7,} lines")
    rings = Counter(tree.ring(name) for name in tree.files)
    sizes = {ring: tree.lines(n for n in tree.files if tree.ring(n) == ring) for ring in rings}
    rows += [f"{ring:9}{sizes[ring]:7,} lines" for ring in RINGS if ring in rings]
    return "\n".join(rows)


def table() -> str:
    """The table of docs/architecture.md: a row for each ring, from the outermost one."""
    rows = [
        f"| {ring} | {what} | {', '.join(BELOW[ring]) or 'nothing'} |" for ring, (what, _) in RINGS.items()
    ]
    return "\n".join(["| ring | it | may import |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(counts(Tree()))
