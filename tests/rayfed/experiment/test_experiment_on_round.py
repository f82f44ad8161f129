"""A function of the user that is called after each round, in this process, with the state of the server."""

import numpy as np
import pytest
import torch

import rayfed
from rayfed.errors import ConfigError
from rayfed.experiment.experiment import end_session
from tests.rayfed.experiment.test_experiment_stop_and_best import clients, own, same


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


def seen_by(**changes):
    """The run, and what the function saw of each round."""
    seen = []
    inputs = torch.from_numpy(clients()["c 0"][0])

    def on_round(row, state):
        assert same(row.params, state.params)
        seen.append((row.round, row.loss, state, row.model()(inputs)))

    return own(rounds=3, **changes).run(on_round=on_round), seen


def check(run, seen):
    assert [(number, loss) for number, loss, _, _ in seen] == [
        (row["round"], row["loss"]) for row in run.history.to_dict("records")
    ]
    assert same(seen[-1][2].params, run.params)
    assert not same(seen[0][2].params, seen[1][2].params)
    assert torch.equal(seen[-1][3], run.model()(torch.from_numpy(clients()["c 0"][0])))
    assert [state.round for _, _, state, _ in seen] == [0, 1, 2]


def test_it_gets_each_row_and_the_state_of_the_server():
    run, seen = seen_by()
    check(run, seen)
    assert run.sha256 == own(rounds=3).run().sha256


def test_what_a_server_remembers_is_in_the_state():
    _, seen = seen_by(method="fedadam")
    memory = [state.memory for _, _, state, _ in seen]
    assert all(memory)
    assert all(np.isfinite(float(v.sum())) for v in next(iter(memory[-1]["step"].values())).values())


def test_an_error_in_it_ends_the_run_which_can_be_continued_with_the_rest(tmp_path):
    whole = own(rounds=3).run()

    def fails(row, state):
        if row.round == 2:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        own(rounds=3).run(tmp_path / "run", on_round=fails)
    seen = []
    done = own(rounds=3).resume(tmp_path / "run", on_round=lambda row, _: seen.append(row.round))
    assert seen == [3]
    assert done.sha256 == whole.sha256


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint.every: 2 leaves out rounds whose state on_round gets"):
        own(checkpoint={"every": 2}).run(on_round=print)
    with pytest.raises(ConfigError, match="on_round: is for a single run"):
        rayfed.Experiment(data=clients(), model=torch.nn.Linear(6, 3), protocol="leave_one_out").run(
            on_round=print
        )


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_it_is_called_in_this_process(request):
    request.addfinalizer(end_session)
    run, seen = seen_by(cluster={"actors": 2})
    check(run, seen)
