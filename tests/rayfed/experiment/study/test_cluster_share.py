"""How a cluster is divided among the cells of a study."""

import pytest

from rayfed.errors import ResourceError
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.experiment.study.cluster_share import ClusterShare, share

TWO_CPUS = [{"CPU": 2.0, "memory": 16e9}]
FOUR_GPUS = [{"CPU": 16.0, "GPU": 4.0, "memory": 256e9}]


def divided(nodes, cells, at_once="auto", **wanted):
    return share(ClusterConfig(**wanted), cells, nodes, at_once)


def test_as_many_cells_as_there_is_room_for_with_few_actors_each():
    assert divided(TWO_CPUS, 12) == ClusterShare(lanes=2, actors=1, cpus=1.0, gpus=0.0)
    assert divided(TWO_CPUS, 1) == ClusterShare(lanes=1, actors=2, cpus=1.0, gpus=0.0)
    assert divided(TWO_CPUS, 12, actors=2).lanes == 1
    assert divided(TWO_CPUS * 3, 4) == ClusterShare(lanes=4, actors=1, cpus=1.0, gpus=0.0)
    whole = divided(FOUR_GPUS, 3, gpus_per_actor=0.5)
    assert (whole.lanes, whole.actors, whole.gpus) == (3, 2, 0.5)
    assert whole.lanes * whole.actors * whole.cpus <= 16
    assert divided(TWO_CPUS, 9, executor="inline").lanes == 1


def test_a_number_of_cells_that_is_asked_for_gets_smaller_shares_of_the_processors():
    assert divided(TWO_CPUS, 12, at_once=1) == ClusterShare(lanes=1, actors=2, cpus=1.0, gpus=0.0)
    assert divided(TWO_CPUS, 3, at_once=8) == ClusterShare(lanes=3, actors=1, cpus=0.5, gpus=0.0)
    assert divided(TWO_CPUS, 9, actors=3) == ClusterShare(lanes=1, actors=3, cpus=0.5, gpus=0.0)
    with pytest.raises(
        ResourceError, match=r"^at_once: 3 cells with 1 actor each do not fit; .*cluster\.actors=2"
    ):
        divided(TWO_CPUS, 3, at_once=3, cpus_per_actor=1.0)


def test_a_cell_has_no_more_actors_than_clients_in_a_round():
    whole = ClusterConfig(num_cpus=8)
    part = share(whole, 2, [{"CPU": 8.0, "memory": 64e9}])
    assert (part.of(whole, clients=3).actors, part.of(whole, clients=9).actors) == (3, 4)
    assert part.of(whole, clients=3).num_cpus == 8


def test_an_actor_that_fits_nowhere_is_refused():
    with pytest.raises(ResourceError, match="GPU"):
        divided(TWO_CPUS, 2, gpus_per_actor=1)
