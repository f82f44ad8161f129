"""Actors and tasks have names that can be read in Ray's dashboard, and never collide."""

import pytest

from rayfed.config import load_config
from rayfed.executors.exchange import task_title
from rayfed.executors.lane import Lane, Slot, WireCall
from rayfed.launch import launch
from rayfed.setup import prepare
from tests.conftest import SMALL


def wire(client, tag="fit", round=6):
    return WireCall(client, print, tag, round, None, Slot(0), {}, None)


def test_a_task_is_called_after_its_exchange_round_and_clients():
    assert task_title([wire("c3-plain"), wire("c4-plain"), wire("c0-street")]) == "fit:7:c3-plain+2"
    assert task_title([wire("c3-plain", "report", 0)]) == "report:1:c3-plain"


def test_the_actor_in_the_place_of_a_lost_one_says_so():
    lane = Lane("rayfed:clients:mine:00", {"num_cpus": 1})
    assert lane.ray_options["name"] == "rayfed:clients:mine:00"
    lane.started = 2
    assert lane.ray_options["name"] == "rayfed:clients:mine:00+2"
    assert lane.ray_options["num_cpus"] == 1
    assert lane.ray_options["namespace"] != Lane("rayfed:clients:mine:00", {}).ray_options["namespace"]


@pytest.mark.ray
def test_two_runs_of_one_name_share_a_cluster(tmp_path, cache, ray_cluster):
    import ray

    options = [*SMALL, f"data.cache={cache}", "data.domains=[plain,street]"]
    options += ["data.partition.clients_per_domain=1", "cluster.cpus_per_actor=0.5"]
    first = load_config([*options, "cluster.actors=1"])
    second = load_config([*options, "cluster.actors=per_client"])
    (tmp_path / "a" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "b" / "mine" / "model").mkdir(parents=True)
    setup = prepare(first)
    runs = [launch(setup, first, tmp_path / "a" / "mine"), launch(setup, second, tmp_path / "b" / "mine")]
    try:
        assert [next(run)["round"] for run in runs] == [1, 1]
        found = [entry for entry in ray.util.list_named_actors(True) if ":mine" in entry["name"]]
    finally:
        for run in runs:
            run.close()
    clients = [f"rayfed:clients:mine:{name}" for name in ("00", *setup.experiment.clients)]
    assert sorted(entry["name"] for entry in found) == sorted([*clients, *["rayfed:driver:mine"] * 2])
    assert len({entry["namespace"] for entry in found}) == 2
