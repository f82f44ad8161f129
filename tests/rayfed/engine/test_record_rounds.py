"""Private state of clients that is lost with a node, also while it is being saved."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from rayfed.config.schema import load_config
from rayfed.engine.record_rounds import RecordSettings, busy, record_rounds
from rayfed.errors import ClusterError, LostStoreError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.executor import CallTiming
from tests.conftest import SMALL

FEW = ("data.domains=[plain,fonts]", "model.options={depth: 2}")


class Losing(InlineExecutor):
    """Loses every store when round 4 begins, as often as it is told to."""

    times = 1
    lost = False

    def map(self, calls):
        if calls and calls[0].sent.round == 3 and self.times:
            self.times, self.lost = self.times - 1, True
            raise LostStoreError(calls[0].client)
        return super().map(calls)

    def fetch(self, client, kept):
        if self.lost:
            raise LostStoreError(client)
        return super().fetch(client, kept)

    def forget(self):
        self.lost = False
        super().forget()


@pytest.fixture(scope="module")
def setup(cache):
    bare = [option for option in SMALL if not option.startswith("tuning.")]
    return prepared(load_config([*bare, f"data.cache={cache}", "algorithm=ditto", "rounds=5", *FEW]))


def run(setup, executor, path):
    """The rows without what a clock says, and the digest."""
    path.mkdir()
    (path / "model").mkdir()
    rows = record_rounds(
        setup.experiment, executor, setup.start, RecordSettings(path=path, domains={}, every=2)
    )
    return [
        {k: v for k, v in row.items() if not k.startswith(("seconds", "slowest"))}
        for row in rows  # round 3 is reported twice: it was not saved
    ]


def test_the_run_goes_back_to_its_last_checkpoint(setup, tmp_path):
    whole = run(setup, InlineExecutor(setup.context, setup.weights), tmp_path / "whole")
    rows = run(setup, Losing(setup.context, setup.weights), tmp_path / "lost")
    assert [row.get("round") for row in rows] == [1, 2, 3, 3, 4, 5, None]
    assert [*rows[:2], *rows[3:]] == whole
    assert rows[2] == rows[3]
    events = pq.read_table(tmp_path / "lost" / "events.parquet").to_pylist()
    assert [(e["kind"], e["action"]) for e in events] == [("store_lost", "restart")]
    assert events[0]["client"] in setup.experiment.clients


@pytest.mark.slow
@pytest.mark.steady
def test_it_gives_up_when_that_happens_again_and_again(setup, tmp_path):
    executor = Losing(setup.context, setup.weights)
    executor.times = 100
    with pytest.raises(ClusterError, match="lost 4 times"):
        run(setup, executor, tmp_path / "run")
    again = InlineExecutor(setup.context, setup.weights)
    keeping = RecordSettings(path=tmp_path / "run", domains={}, every=2)
    *_, last = record_rounds(setup.experiment, again, setup.start, replace(keeping, resume=True))
    whole = run(setup, InlineExecutor(setup.context, setup.weights), tmp_path / "whole")
    assert last == whole[-1]


def test_times_of_a_round_are_summed_over_the_actors():
    visits = [CallTiming("a", "fit", 2.0), CallTiming("b", "fit", 1.0), CallTiming("a", "evaluate", 0.5)]
    assert busy(visits, 2, 4.0) == {"seconds_clients": 3.5, "seconds_idle": 4.5}
    assert busy(visits, 0, 4.0) == {"seconds_clients": 3.5, "seconds_idle": 0.5}  # in one process
    assert busy(visits, 1, 3.0)["seconds_idle"] == 0.0
