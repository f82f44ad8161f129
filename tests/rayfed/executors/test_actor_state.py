"""Actors have names that can be read in Ray's dashboard, and never collide."""

import pytest

from rayfed.executors.actor_state import ActorHandle


def test_the_actor_in_the_place_of_a_lost_one_says_so():
    lane = ActorHandle("rayfed:clients:mine:00", {"num_cpus": 1})
    assert lane.ray_options["name"] == "rayfed:clients:mine:00"
    lane.started = 2
    assert lane.ray_options["name"] == "rayfed:clients:mine:00+2"
    assert lane.ray_options["num_cpus"] == 1
    assert lane.ray_options["namespace"] != ActorHandle("rayfed:clients:mine:00", {}).ray_options["namespace"]


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_runs_of_one_name_share_a_cluster_and_actors_can_be_replaced(ray_cluster):
    """Ray refuses an actor whose name another one has in the same namespace."""
    import ray

    lanes = [ActorHandle("rayfed:clients:mine:00", {"num_cpus": 0}) for _ in range(2)]
    actors = []
    for lane in (*lanes, lanes[0]):
        actors.append(ray.remote(Somebody).options(**lane.ray_options).remote())
        lane.begin(actors[-1])
    ray.get([actor.where.remote() for actor in actors])
    found = sorted(entry["name"] for entry in ray.util.list_named_actors(True) if ":mine:" in entry["name"])
    assert found == ["rayfed:clients:mine:00", "rayfed:clients:mine:00", "rayfed:clients:mine:00+1"]
    for actor in actors:
        ray.kill(actor)


class Somebody:
    def where(self):
        return {}
