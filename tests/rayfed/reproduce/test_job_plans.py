"""How a cluster is divided among the cells of a job."""

import pytest

from rayfed.config.schema import ClusterConfig
from rayfed.errors import ResourceError
from rayfed.reproduce.job import ClusterShare, share

TWO_CPUS = [{"CPU": 2.0, "memory": 16e9}]
FOUR_GPUS = [{"CPU": 16.0, "GPU": 4.0, "memory": 256e9}]


def divided(nodes, cells, **wanted):
    return share(ClusterConfig(**wanted), cells, nodes)


def test_as_many_cells_as_there_is_room_for_with_few_actors_each():
    assert divided(TWO_CPUS, 12) == ClusterShare(lanes=2, actors=1, cpus=1.0, gpus=0.0)
    assert divided(TWO_CPUS, 1) == ClusterShare(lanes=1, actors=2, cpus=1.0, gpus=0.0)
    assert divided(TWO_CPUS, 12, actors=2).lanes == 1
    assert divided(TWO_CPUS * 3, 4) == ClusterShare(lanes=4, actors=1, cpus=1.0, gpus=0.0)
    whole = divided(FOUR_GPUS, 3, gpus_per_actor=0.5)
    assert (whole.lanes, whole.actors, whole.gpus) == (3, 2, 0.5)
    assert whole.lanes * whole.actors * whole.cpus <= 16
    assert divided(TWO_CPUS, 9, executor="inline").lanes == 1


def test_an_actor_that_fits_nowhere_is_refused():
    with pytest.raises(ResourceError, match="GPU"):
        divided(TWO_CPUS, 2, gpus_per_actor=1)
