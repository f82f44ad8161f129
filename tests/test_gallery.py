"""The gallery makes a run once for all tests, and notices a test that changes it."""

import pytest

from rayfed.experiment.finished_run import Run
from tests.gallery import Gallery


@pytest.fixture
def shown(tmp_path):
    """What one test and, in another process, another one see, and the folders that were made."""
    made = []

    def make(path):
        path.mkdir()
        (path / "rounds.jsonl").write_text("{}")
        made.append(path)
        return Run(path, "0" * 64)

    return Gallery(tmp_path), Gallery(tmp_path), make, made


def test_a_run_is_made_once_for_its_overrides(shown):
    one, other, make, made = shown
    first = one.get(["algorithm=fedavg"], make)
    one.check()
    assert (
        one.get(["algorithm=fedavg"], make).path == other.get(["algorithm=fedavg"], make).path == first.path
    )
    assert other.get(["algorithm=fedavg", "seed=1"], make).path != first.path
    assert len(made) == 2


def test_a_test_that_asks_twice_compares_two_runs(shown):
    one, _, make, made = shown
    assert one.get(["seed=1"], make).path != one.get(["seed=1"], make).path
    assert len(made) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda run: (run / "rounds.jsonl").write_text('{"round": 1}'),
        lambda run: (run / "rounds.jsonl").write_text("[]"),  # of the same length
        lambda run: (run / "rounds.jsonl").unlink(),
        lambda run: (run / "mine.txt").touch(),
    ],
)
def test_a_run_that_was_changed_is_noticed_and_made_anew(shown, change):
    one, other, make, made = shown
    change(one.get([], make).path)
    with pytest.raises(AssertionError, match="a run that other tests read was changed: "):
        one.check()
    other.get([], make)
    other.check()
    assert len(made) == 2
