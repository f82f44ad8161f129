"""CIFAR, Fashion-MNIST and SVHN from files that the tests write in the published formats."""

import pickle
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfed.config.compose import compose
from rayfed.data.named.arrays import Cifar10, Cifar100, FashionMnist, Svhn
from rayfed.errors import ConfigError, DataError
from rayfed.experiment.experiment import simulate
from tests.rayfed.data.named.releases import write_cifar, write_fashion_mnist, write_svhn


@pytest.mark.parametrize(("reader", "classes"), [(Cifar10, 10), (Cifar100, 100)])
def test_cifar_has_the_pixels_labels_and_halves_of_its_files(tmp_path, reader, classes):
    train, test = write_cifar(tmp_path, classes, train=200, test=100)
    data = reader(name="cifar", root=str(tmp_path))
    listing = data.scan()
    assert listing.classes == tuple(f"class{i:02d}" for i in range(classes))
    assert listing.domains == ("all",)
    assert listing.test.tolist() == [False] * 200 + [True] * 100
    order = [i for part in range(5) for i in range(200)[part::5]] if classes == 10 else range(200)
    assert listing.labels[:200].tolist() == [i % classes for i in order]
    assert len(set(listing.keys)) == 300
    for place in (0, 57, 199):
        assert np.array_equal(data.decode(listing, place, 32), train[order[place]])
    assert np.array_equal(data.decode(listing, 207, 32), test[7])
    assert data.decode(listing, 0, 16).shape == (16, 16, 3)


def test_chosen_classes_keep_their_images(tmp_path):
    _, test = write_cifar(tmp_path)
    data = Cifar10(name="cifar10", root=str(tmp_path), classes=["class03", "class01"])
    listing = data.scan()
    assert listing.classes == ("class03", "class01")
    assert sorted(listing.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    last = [place for place, key in enumerate(listing.keys) if key == "all/class03/test-000003"]
    assert np.array_equal(data.decode(listing, last[0], 32), test[3])
    assert data.fingerprint() == listing.fingerprint != replace(data, classes=None).fingerprint()


def test_fashion_mnist_and_svhn(tmp_path):
    for packed in (True, False):
        root = tmp_path / str(packed)
        grey = write_fashion_mnist(root, packed=packed)
        data = FashionMnist(name="fashion_mnist", root=str(root))
        listing = data.scan()
        assert listing.classes[0] == "T-shirt/top"
        assert listing.keys[0] == "all/T-shirt-top/train-000000"
        assert np.array_equal(data.decode(listing, 23, 28), np.repeat(grey[3][..., None], 3, axis=2))
    images = write_svhn(tmp_path)
    data = Svhn(name="svhn", root=str(tmp_path))
    listing = data.scan()
    assert listing.labels[:11].tolist() == [*range(10), 0]
    assert np.array_equal(data.decode(listing, 13, 32), images[13])


def test_a_hundred_clients_of_cifar100_run_ten_a_round(tmp_path):
    write_cifar(tmp_path, 100, train=2000, test=100)
    options = (
        "model=vit_mini tuning=head rounds=1 clients_per_round=10 cluster=inline figures=false data.val=0"
    )
    skew = [f"data.partition.{key}" for key in ("scheme=dirichlet", "alpha=0.3", "clients_per_domain=100")]
    place = [f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}", f"output={tmp_path / 'run'}"]
    result = simulate(["data=cifar100", *options.split(), *skew, "train.max_steps=1", *place])
    rows = pq.read_table(result.path / "partition.parquet", columns=["client", "split"]).to_pydict()
    assert len(set(rows["client"]) - {""}) == 100
    assert rows["split"].count("train") == 2000
    assert result.history["clients"].tolist() == [10]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist", "svhn"])
def test_a_missing_download_is_one_line_that_says_what_and_where(tmp_path, name):
    from rayfed.data.source import READERS

    reader = READERS.load(compose([f"data={name}"])["data"]["reader"])
    with pytest.raises(DataError, match=r"does not exist; download .* data\.root") as caught:
        reader(name=name, root=str(tmp_path)).fingerprint()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.root: not set; download"):
        reader(name=name, root=None).fingerprint()


def test_other_objects_and_labels_than_the_release_has_are_refused(tmp_path):
    write_cifar(tmp_path)
    data = Cifar10(name="cifar10", root=str(tmp_path))
    batch = tmp_path / "cifar-10-batches-py" / "test_batch"
    good = pickle.loads(batch.read_bytes())
    bad = {
        "holds .*Path, which is not an array": good | {"data": tmp_path},
        r"with 3 labels": good | {"labels": [1, 2, 3]},
        "labels from 0 to 77, but 10 classes": good | {"labels": [77] * 10},
        "'data'": {"labels": [1]},
    }
    for message, content in bad.items():
        batch.write_bytes(pickle.dumps(content))
        with pytest.raises(DataError, match=message):
            replace(data).scan()
    batch.write_bytes(b"not a pickle")
    with pytest.raises(DataError, match="not in the format of its release"):
        replace(data).scan()
