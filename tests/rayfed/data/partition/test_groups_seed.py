"""`data.seed`: what distributes the samples is drawn apart from all else."""

from dataclasses import replace

import pytest

import rayfed
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition_config import PartitionConfig, PopulationConfig
from tests.rayfed.data.partition.test_groups_unseen import CONFIG
from tests.rayfed.data.partition.toy import as_dataset, make_data


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit": 0.5},
        {"shots": 1},
        {"unseen_clients": 2},
        {"population": PopulationConfig(clients=9), "partition": PartitionConfig()},
    ],
)
def test_the_seed_of_the_data_distributes_the_samples(options):
    def of(seed, data_seed=None):
        config = replace(CONFIG, seed=data_seed, **options)
        made = partition_of(as_dataset(make_data()), config, seed)
        return made.digest, made.unseen

    assert of(3) == of(4, 3) == of(3, 3)
    assert of(3) != of(4)
    assert of(4) == of(3, 4)


def test_start_and_order_follow_from_the_other_seed(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))

    def run(seed, data_seed=None):
        data = {"name": "digits_five_mini", "limit": 24, "domains": ["plain"], "seed": data_seed}
        data["partition"] = {"clients_per_domain": 2}
        model = {"name": "vit_mini", "options": {"depth": 1}, "pretrained": False}
        made = rayfed.Experiment(data=data, model=model, rounds=1, seed=seed, cluster="inline")
        return made.run(quiet=True)

    plain, fixed, other = run(3), run(4, 3), run(4)
    columns = ("client", "split", "index")
    one, two, three = (each.recorded.partition_rows(*columns) for each in (plain, fixed, other))
    assert one == two != three
    assert len({each.sha256 for each in (plain, fixed, other)}) == 3
