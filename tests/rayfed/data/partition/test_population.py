"""A virtual population: who draws what, worked out from the pools, and what is never drawn."""

import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rayfed.config.schema import load_config
from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition.manifest import describe, with_digests
from rayfed.data.partition.population import Population
from rayfed.data.partition_config import PopulationConfig
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from tests.rayfed.data.partition.toy import DOMAINS, as_dataset, make_data, part


def config(clients=400, val=0.2, test=0.25, partition=None, **options):
    drawn = PopulationConfig(clients=clients, **options)
    own = partition or PartitionConfig()
    return DataConfig(name="toy", reader="r", val=val, test=test, population=drawn, partition=own)


def test_pools_of_training_validation_and_test_are_apart_and_complete():
    result = part(config())
    domain = make_data()[1]
    for pools in result.clients.domains:
        parts = [pools.train.rows, pools.val.rows, pools.test]
        together = np.sort(np.concatenate(parts))
        assert together.tolist() == np.flatnonzero(domain == DOMAINS.index(pools.name)).tolist()
        quarter = int(len(together) / 4 + 0.5)
        fifth = int(0.2 * (len(together) - quarter) + 0.5)
        assert [len(p) for p in parts[1:]] == [fifth, quarter]
    for client in result.clients[::37]:
        pools = result.clients.domains[DOMAINS.index(client.domain)]
        assert set(client.train) <= set(pools.train.rows)
        assert set(client.val) <= set(pools.val.rows)
        assert client.test.tolist() == pools.test.tolist()
        assert (np.diff(client.train) >= 0).all()


def test_a_client_has_what_the_table_says_and_draws_the_same_again():
    result, again = part(config()), pickle.loads(pickle.dumps(part(config()).clients))
    other = part(config(), seed=1).clients
    for place in (0, 7, 399):
        client = result.clients[place]
        assert client.id == list(result.table)[place]
        assert result.table[client.id].num_examples == len(client.train)
        assert again[place].train.tolist() == client.train.tolist() != other[place].train.tolist()
        rows = result.clients.rows_of(client.id)
        assert {split: rows[split].tolist() for split in rows} == {
            split: getattr(client, split).tolist() for split in ("train", "val", "test")
        }
    assert result.digest == part(config()).digest
    assert (
        len({result.digest, *(part(c).digest for c in (config(alpha=1.0), config(401), config(size=9)))}) == 4
    )


def test_the_clients_of_a_domain_do_not_depend_on_the_size_of_the_population():
    few, many = part(config(40)).clients, part(config(4000)).clients
    for number, domain in enumerate(DOMAINS):
        for k in (0, 9):
            small, large = few[10 * number + k], many[1000 * number + k]
            assert small.domain == large.domain == domain
            assert small.train.tolist() == large.train.tolist()


def test_numbers_of_samples_are_log_normal_and_classes_follow_the_domain():
    clients = part(config(20_000, size=30.0, sigma=0.8, val=0)).clients
    sizes = clients.table.sizes
    assert sizes.mean() == pytest.approx(30, rel=0.03)
    assert np.log(sizes[sizes > 5]).std() == pytest.approx(0.8, rel=0.1)
    assert set(part(config(100, size=30.0, sigma=0, val=0)).clients.table.sizes.tolist()) == {30}
    labels = make_data()[0]

    def entropy(alpha):
        drawn = part(config(40, size=200.0, sigma=0, alpha=alpha)).clients
        shares = [np.bincount(labels[c.train], minlength=7) / len(c.train) for c in drawn]
        assert np.mean(shares, axis=0) == pytest.approx(np.full(7, 1 / 7), abs=0.12)
        return np.mean([-(s[s > 0] * np.log(s[s > 0])).sum() for s in shares])

    assert entropy(0.05) < 0.6 < entropy(0.5) < entropy(1000.0)
    assert entropy(1000.0) > 0.98 * np.log(7)


def test_domains_are_even_or_imbalanced_as_the_partition_says():
    assert part(config(10)).table.clients_by_domain() == dict(zip(DOMAINS, (3, 3, 2, 2), strict=True))
    skewed = part(config(1000, partition=PartitionConfig(scheme="imbalanced", factor=8.0)))
    counts = list(skewed.table.clients_by_domain().values())
    assert (sum(counts), counts[0] / counts[-1]) == (1000, pytest.approx(8, rel=0.05))


def test_nothing_is_drawn_for_tables_digests_and_the_manifest(monkeypatch):
    monkeypatch.setattr(Population, "_draw", None)  # whoever draws fails
    data = make_data()
    result = part(config(50_000), data)
    table = with_digests(result, as_dataset(data))
    assert len(table) == len(data[0])  # a row for each sample, not for each client
    assert set(table["client"].to_pylist()) == {""}
    assert result.count("train") == result.table.sizes.sum()
    assert result.longest >= result.table.sizes.max()
    assert pickle.loads(pickle.dumps(result.clients)).table.clients_by_domain()["art"] == 12_500


def test_the_table_on_the_screen_draws_the_clients_it_shows():
    data = make_data()
    text = describe(part(config(50_000), data), as_dataset(data))
    assert "... and 49980 more clients" in text
    assert "50000 clients in 4 domains" in text


def test_one_pooled_client_has_every_sample_once():
    pooled = part(config(partition=PartitionConfig(pooled=True)))
    (only,) = pooled.trainers
    pools = pooled.clients.domains
    assert len(only.train) == sum(len(d.train.rows) for d in pools) == pooled.training["pooled"].num_examples
    assert len(np.unique(only.train)) == len(only.train)


def test_no_group_is_in_two_pools():
    """Groups of three samples, whose keys differ in the last part."""
    data = make_data()
    dataset = as_dataset(data)
    keys = [f"{DOMAINS[d]}/{i // 3}/{i}" for i, d in enumerate(data[1].tolist())]
    result = partition_of(replace(dataset, grouped=True, key_column=pa.array(keys)), config(), 0)
    group = {i: key.rpartition("/")[0] for i, key in enumerate(keys)}
    for pools in result.clients.domains:
        kinds = [{group[i] for i in rows.tolist()} for rows in (pools.train.rows, pools.val.rows, pools.test)]
        assert len(set.union(*kinds)) == sum(map(len, kinds))
    client = result.clients[5]
    assert len(client.train) == result.table[client.id].num_examples


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.population=3"], "3 clients cannot cover 5 domains"),
        (["data.population=0"], "data.population.clients"),
        (
            ["data.population=9", "data.partition.clients_per_domain=2"],
            "clients_per_domain: 2 cannot be used",
        ),
        (["data.population=9", "data.partition.scheme=dirichlet"], "set data.population.alpha"),
        (["data.population=9", "data.val=0.99", "data.limit=10"], "samples to draw from"),
    ],
)
def test_what_cannot_be_drawn_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        prepared(load_config(["algorithm=fedavg", *overrides]))
