"""The schemes of a partition on the toy data: 200, 150, 120 and 300 samples of 7 classes in four domains."""

from dataclasses import replace

import numpy as np
import pytest

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.manifest import describe, label_counts, label_skew, to_table
from rayfed.errors import ConfigError
from rayfed.report.method_figures import draw_partition
from tests.rayfed.data.partition.toy import CLASSES, as_dataset, make_data, part


def config(scheme, clients=4, splits=None, **options):
    splits = splits or {}
    own = PartitionConfig(scheme=scheme, clients_per_domain=clients, **options)
    return DataConfig(name="toy", reader="image_folder", partition=own, **{"val": 0.1, "test": 0.2, **splits})


EVERY = [
    config("pathological", 7, classes_per_client=2),
    config("shards", 4, shards_per_client=2),
    config("quantity", 4, alpha=0.3, min_samples=5),
    config("inner_dirichlet", 4, alpha=0.3),
    config("linear", 4, min_samples=5),
    config("square", 4, min_samples=5),
    config("exponential", 4, min_samples=5),
]


@pytest.mark.parametrize("cfg", EVERY, ids=lambda cfg: cfg.partition.scheme)
def test_all_samples_are_distributed_described_and_drawn(cfg):
    data = make_data()
    result = part(cfg, data)
    everything = np.concatenate([s for c in result.clients for s in (c.train, c.val, c.test)])
    assert np.array_equal(np.sort(everything), np.arange(770))
    assert result.digest == part(cfg, data).digest != part(cfg, data, seed=1).digest
    dataset = as_dataset(data)
    assert "label skew" in describe(result, dataset)
    drawn = draw_partition(to_table(result, dataset), CLASSES, "toy")
    assert len(drawn.figure.axes[1].patches) == len(result.clients)
    counts = label_counts(result.clients, data[0], 7)
    most = {"pathological": 2, "shards": 4}.get(cfg.partition.scheme, 7)
    assert (counts > 0).sum(axis=1).max() <= most
    if cfg.partition.scheme in ("quantity", "square", "exponential"):
        assert counts.sum(axis=1).min() >= 5
        assert counts.sum(axis=1).max() > 4 * counts.sum(axis=1).min()


def test_label_skew_is_the_mean_distance_from_the_shares_of_all():
    # Of all: 3/4 and 1/4. Client 0 has 1 and 0: distance 1/4; client 1 has 1/2 and 1/2: distance 1/4.
    assert label_skew(np.array([[2, 0], [1, 1]])) == 0.25
    assert label_skew(np.array([[5, 0], [0, 5]])) == 0.5
    assert label_skew(np.array([[3, 6], [1, 2]])) == 0


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            config("pathological", 4, classes_per_client=8),
            "7 classes, fewer than 8; lower data.partition.classes_per_client or data.partition.clients",
        ),
        (config("pathological", 40, classes_per_client=7), "a class has 29 samples for 40 clients"),
        (config("shards", 30, shards_per_client=5), "120 samples do not fill 150 shards"),
        (
            config("shards", 31, {"val": 1, "test": 2}, shards_per_client=3),
            "a client would have 3 samples and needs 4",
        ),
        (config("quantity", 20), "data.partition.clients_per_domain: 20 clients do not fit in domain 'art'"),
        (config("shards", 4, alpha=0.1), "data.partition.alpha: 0.1 has no effect under scheme=shards"),
        (
            config("quantity", 4, shards_per_client=3),
            "shards_per_client: 3 has no effect under scheme=quantity",
        ),
        (config("pathological", 4, classes_per_client=0), "classes_per_client: 0 must be at least 1"),
        (config("natural", 1), "natural needs a data set that names the client of each sample"),
    ],
)
def test_what_does_not_fit_is_named(cfg, message):
    with pytest.raises(ConfigError, match=message) as caught:
        part(cfg)
    assert "\n" not in str(caught.value)


def test_schemes_that_distribute_samples_have_no_place_in_a_population():
    from rayfed.data.partition_config import PopulationConfig

    with pytest.raises(ConfigError, match="shards distributes samples"):
        part(replace(config("shards", 1), population=PopulationConfig(clients=9)))
