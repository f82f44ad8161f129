"""Short runs of any method and tuning."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rayfed
from rayfed.experiment.finished_run import Run
from rayfed.testing import play
from tests.gallery import Gallery
from tests.rounding import exact_play

SHORT = (
    *("data.partition.scheme=by_domain", "train.optimizer=sgd", "train.lr=0.02"),
    *("train.weight_decay=0", "train.batch_size=32"),
    "data.limit=40",
    "rounds=3",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "figures=false",
    "cluster=inline",
)


WATCHING = frozenset({"monkeypatch", "caplog", "capsys", "capfd"})
"""Fixtures of tests that look at a run while it runs, or change what it does: these run their own."""


@pytest.fixture
def short(
    tmp_path: Path, cache: Path, gallery: Gallery, request: pytest.FixtureRequest
) -> Callable[..., Run]:
    """Run a method by name for three rounds on a few images; later overrides win.

    Tests that ask for the same overrides read one run. Asked twice by one test, it runs again.
    """
    own = WATCHING & {*request.fixturenames}
    made = iter(range(1000))

    def run(algorithm: str, *overrides: str) -> Run:
        asked = [f"algorithm={algorithm}", *overrides]

        def make(output: Path) -> Run:
            places = (f"data.cache={cache}", f"output={output}")
            return rayfed.simulate([asked[0], *SHORT, *places, *overrides])

        if own:
            return make(tmp_path / f"short{next(made)}")
        return gallery.get(asked, make)

    return run


@pytest.fixture
def exact(cache: Path, gallery: Gallery) -> Callable[..., Run]:
    """Run as `short` does, but in float64: the judge of two ways of computing the same tensors and scores."""

    def run(algorithm: str, *overrides: str) -> Run:
        def make(output: Path) -> Run:
            places = (f"data.cache={cache}", f"output={output}")
            with exact_play():
                return play([f"algorithm={algorithm}", *SHORT, *places, *overrides])

        return gallery.get(["float64", f"algorithm={algorithm}", *overrides], make)

    return run
