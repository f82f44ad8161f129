"""Clients that never train."""

from dataclasses import replace

import pytest

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition.manifest import describe
from rayfed.data.partition_config import PopulationConfig
from rayfed.errors import ConfigError
from tests.rayfed.data.partition.toy import as_dataset, make_data

CONFIG = DataConfig(
    name="toy", reader="image_folder", partition=PartitionConfig(clients_per_domain=4), val=0.1, test=0.2
)


def part(seed=0, **options):
    return partition_of(as_dataset(make_data()), replace(CONFIG, **options), seed)


def test_the_seed_draws_them_from_all_clients_and_nothing_else_changes():
    whole = part()
    total = len(whole.clients)
    before = frozenset()
    for wanted, count in ((0, 0), (0.01, 1), (0.3, int(0.3 * total + 0.5)), (total - 1, total - 1)):
        some = part(unseen_clients=wanted)
        assert len(some.unseen) == count
        assert before <= some.unseen
        assert [c.id for c in some.clients] == [c.id for c in whole.clients]
        assert set(some.training) == {c.id for c in whole.clients} - some.unseen
        assert set(some.table) == {c.id for c in whole.clients}
        assert (some.digest == whole.digest) == (count == 0)
        before = some.unseen
    assert part(unseen_clients=2).unseen == part(unseen_clients=2).unseen
    assert len({part(seed, unseen_clients=2).unseen for seed in range(5)}) > 1
    text = describe(some, as_dataset(make_data()))
    assert f"never train (data.unseen_clients): {', '.join(sorted(some.unseen)[:20])}" in text
    marked = [line.split()[0] for line in text.splitlines() if "(unseen)" in line]
    assert marked == [c.id for c in some.clients if c.id in some.unseen][:20]


def test_nobody_trains_on_their_samples_where_those_of_all_are_pooled():
    pooled = replace(CONFIG, partition=replace(CONFIG.partition, pooled=True), unseen_clients=0.5)
    made = partition_of(as_dataset(make_data()), pooled, 0)
    (one,) = made.trainers
    unseen = {row for client in made.clients if client.id in made.unseen for row in client.train.tolist()}
    assert unseen
    assert not unseen & set(one.train.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unseen_clients": 1000}, r"data.unseen_clients: 1000 of \d+ clients leaves none to train"),
        ({"unseen_clients": 0.999}, "leaves none to train"),
        ({"unseen_clients": 1.5}, "data.unseen_clients: 1.5 is neither a fraction in \\[0, 1\\) nor a whole"),
        ({"unseen_clients": -1}, "data.unseen_clients: -1 is neither"),
        ({"unseen_clients": [0.1]}, r"\[0.1\] is a list, for which protocol=unseen_clients"),
        (
            {"unseen_clients": 1, "population": PopulationConfig(clients=9), "partition": PartitionConfig()},
            "data.unseen_clients: 1 cannot be used with data.population",
        ),
    ],
)
def test_numbers_that_cannot_be_held_back_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        part(**options)
