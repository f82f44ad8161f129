"""Bundles of a trial, and how many trials a cluster holds."""

import pytest

from rayfed.engine import client_places
from rayfed.errors import ResourceError
from rayfed.executors.cluster import GB
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.testing import small_setup
from tune.engine import on_cpu
from tune.resources import Demand, at_once, bundles


def node(cpus, gpus=0):
    return {"CPU": cpus, "GPU": gpus, "memory": 64 * GB}


def demand(*nodes, together=1, clients=20, per_round=10, on_cpu=False):
    return Demand(clients=clients, per_round=per_round, together=together, nodes=nodes, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("cluster", "asked", "found", "count"),
    [
        ({"executor": "inline"}, demand(node(2), together=8), [{"CPU": 1.0}], 2),
        ({"executor": "inline", "threads": 2}, demand(node(4), node(3), together=8), [{"CPU": 2.0}], 3),
        ({"executor": "inline"}, demand(node(8, 2), together=8), [{"CPU": 1.0, "GPU": 1.0}], 2),
        ({"executor": "inline"}, demand(node(8, 2), together=8, on_cpu=True), [{"CPU": 1.0}], 8),
        ({"executor": "inline", "device": "cpu"}, demand(node(8, 2), together=8), [{"CPU": 1.0}], 8),
        (
            {"executor": "inline", "gpus_per_actor": 0.5},
            demand(node(8, 2), together=8),
            [{"CPU": 1.0, "GPU": 0.5}],
            4,
        ),
        ({}, demand(node(2), together=8), [{}, {"CPU": 1.0}], 2),  # auto: a CPU each
        ({}, demand(node(8), together=2), [{}, *[{"CPU": 1.0}] * 4], 2),  # auto: shared among the trials
        ({}, demand(node(64)), [{}, *[{"CPU": 1.0}] * 10], 6),  # never more than work at the same time
        ({}, demand(node(8, 2), together=4), [{}, {"CPU": 1.0, "GPU": 0.5}], 4),  # two actors share a GPU
        ({}, demand(node(8, 2), together=4, on_cpu=True), [{}, *[{"CPU": 1.0}] * 2], 4),
        (
            {"gpus_per_actor": 0.5},
            demand(node(8, 1), on_cpu=True),
            [{}, *[{"CPU": 1.0, "GPU": 0.5}] * 2],
            1,
        ),
        ({"actors": 2}, demand(node(4), together=8), [{}, *[{"CPU": 1.0}] * 2], 2),
        (
            {"actors": 2, "gpus_per_actor": 0.5},
            demand(node(8, 2), together=9),
            [{}, *[{"CPU": 1.0, "GPU": 0.5}] * 2],
            2,
        ),
        (
            {"actors": 2, "gpus_per_actor": 0.3},
            demand(node(8, 1), together=9),
            [{}, *[{"CPU": 1.0, "GPU": 0.3}] * 2],
            1,
        ),
        ({"actors": "per_client"}, demand(node(5), clients=3), [{}, *[{"CPU": 1.0}] * 3], 1),
    ],
)
def test_a_trial_takes_what_its_config_says(cluster, asked, found, count):
    wanted = bundles(ClusterConfig(**cluster), asked)
    assert wanted == found
    assert at_once(wanted, asked.nodes, 9) == count


@pytest.mark.parametrize(
    ("cluster", "nodes", "words"),
    [
        ({"executor": "inline", "threads": 8}, [node(4), node(2)], ["cluster.threads", "8", "4 CPU", "=4"]),
        ({"actors": 3, "gpus_per_actor": 1.0}, [node(8, 2)], ["3 actors", "2 GPU", "cluster.actors=2"]),
        ({"actors": 2, "cpus_per_actor": 3}, [node(4)], ["2 actors", "4 CPU", "cluster.actors=1"]),
    ],
)
def test_a_trial_that_never_fits_is_refused_with_what_would(cluster, nodes, words):
    with pytest.raises(ResourceError) as err:
        bundles(ClusterConfig(**cluster), demand(*nodes))
    assert all(word in str(err.value) for word in words), err.value
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("worth", [1e9, 0])
def test_trials_of_a_small_network_leave_gpus_that_the_config_does_not_ask_for(worth, monkeypatch):
    """By the rule of a single run, which says so in the same words."""
    monkeypatch.setattr(client_places, "WORTH", worth)
    setup, nodes = small_setup("algorithm=fedavg"), (node(8, 2),)
    assert bool(small := on_cpu(setup, ClusterConfig(), nodes)) == (worth > 0)
    assert small == client_places.too_small(setup, ClusterConfig())
    for asked in (ClusterConfig(gpus_per_actor=0.5), ClusterConfig(num_gpus=2)):
        assert on_cpu(setup, asked, nodes) == ""
    assert on_cpu(setup, ClusterConfig(), (node(8),)) == ""
