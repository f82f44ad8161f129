"""Finished runs that all tests of a session may read and none may change."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

import rayfed
from rayfed.experiment.finished_run import Run


class Gallery:
    """Makes a run when a test first asks for it; later tests, also of other processes of xdist, read it.

    Attributes:
        folder: Place of the runs, the same for all processes of the session.
        lent: The runs that the current test has, with their files when they were made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lent: dict[Path, list[list[object]]] = {}

    def get(self, overrides: Sequence[str], make: Callable[[Path], Run]) -> Run:
        """The run with these overrides; `make` runs it in the folder that it is given.

        A test that asks for the same run twice wants to compare two runs, and the second one is made anew.
        """
        place = self.folder / hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:20]
        place.mkdir(exist_ok=True)
        if place in self.lent:
            return make(Path(mkdtemp(dir=place)) / "run")
        known = place / "known.json"
        with _locked(place / "lock"):
            if not known.exists():
                result = make(Path(mkdtemp(dir=place)) / "run")
                digest = getattr(result, "sha256", "")  # a study has none
                found = {"path": str(result.path), "sha256": digest, "files": _files(result.path)}
                known.write_text(json.dumps(found))
        found = json.loads(known.read_text())
        self.lent[place] = found["files"]
        path = Path(found["path"])
        return Run(path, found["sha256"]) if found["sha256"] else rayfed.load(path)

    def check(self) -> None:
        """Raise AssertionError if the test changed a run that it was lent."""
        lent, self.lent = self.lent, {}
        for place, files in lent.items():
            path = Path(json.loads((place / "known.json").read_text())["path"])
            now = _files(path)
            same = {tuple(file) for file in now} & {tuple(file) for file in files}
            changed = sorted({str(name) for name, *state in [*now, *files] if (name, *state) not in same})
            if changed:
                (place / "known.json").unlink()  # the next test gets a new one
            assert not changed, (
                f"a run that other tests read was changed: {', '.join(changed)}; copy it first"
            )


def session_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of the session, the same for all processes of xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def _files(path: Path) -> list[list[object]]:
    """Name, size and time of the last change of every file."""
    found = []
    for file in sorted(path.rglob("*")):
        state = file.lstat()
        found.append([str(file.relative_to(path)), state.st_size, state.st_mtime_ns])
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
