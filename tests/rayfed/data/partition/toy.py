"""A toy data set of four domains, and its partitions, for the tests of this folder."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.partition.make import Partition, make_partition
from rayfed.data.partition.manifest import with_digests
from rayfed.data.shards import Dataset

DOMAINS = ("art", "cartoon", "photo", "sketch")
CLASSES = tuple("abcdefg")


def make_data(sizes=(200, 150, 120, 300), num_classes=7, num_test=20):
    """Labels cycle within a domain; the last samples of each domain are its own test split."""
    labels = np.concatenate([np.arange(size) % num_classes for size in sizes]).astype(np.int64)
    domain = np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)
    test = np.concatenate([np.arange(size) >= size - num_test for size in sizes])
    return labels, domain, test


def config(scheme="by_domain", clients=1, **options) -> DataConfig:
    names = ("alpha", "min_samples", "pooled", "share_of_smallest")
    own = {key: options.pop(key) for key in names if key in options}
    partition = PartitionConfig(scheme=scheme, clients_per_domain=clients, **own)
    return DataConfig(name="toy", reader="image_folder", partition=partition, **options)


def part(cfg, data=None, domains=DOMAINS, seed=0) -> Partition:
    return make_partition(*(data or make_data()), domains, cfg, seed)


def as_dataset(data) -> Dataset:
    labels, domain, test = data
    keys = [f"{DOMAINS[d]}/{c}/{i}.png" for i, (c, d) in enumerate(zip(labels, domain, strict=True))]
    return Dataset(
        name="toy",
        classes=CLASSES,
        domains=DOMAINS,
        images=np.zeros((len(labels), 1, 1, 3), dtype=np.uint8),
        labels=labels,
        domain=domain,
        test=test,
        digest="0" * 64,
        skipped=0,
        size=1,
        path=Path("toy.arrow"),
        key_column=pa.array(keys),
    )


def digests_of(path) -> dict:
    """The digests and class names that a manifest stores in its metadata."""
    return json.loads(pq.read_schema(path).metadata[b"rayfed"])


def save_manifest(partition, path, dataset):
    """Write `partition.parquet` as a run does."""
    pq.write_table(with_digests(partition, dataset), path)
