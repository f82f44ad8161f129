"""Volumes of six sites: the public layout, written here, and the made-up one."""

import nibabel
import numpy as np
import pytest
import torch

from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.formats.slices import make_volume, standardise, usable_slices
from rayfed.data.load_dataset import load
from rayfed.data.partition.groups import groups_of, partition_of
from rayfed.data.readers.prostate import Prostate
from rayfed.data.readers.prostate_mini import SITES, make_case
from rayfed.errors import ConfigError, DataError
from tests.rounding import limit


def write(path, volume):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(volume.swapaxes(0, 1), np.eye(4)).to_filename(path)


def write_case(folder, site, number, mask_name="_segmentation"):
    image, mask = make_case(site, number)
    write(folder / f"Case{number:02d}.nii.gz", image)
    write(folder / f"Case{number:02d}{mask_name}.nii.gz", mask * 2)  # some sites label two zones


@pytest.fixture
def root(tmp_path):
    """Three sites under the names of their releases, two cases each."""
    for site, folder, mask in (
        ("RUNMC", "RUNMC", "_segmentation"),
        ("BMC", "ISBI_1.5", "_Segmentation"),
        ("HK", "HK", "_segmentation"),
    ):
        for number in range(2):
            write_case(tmp_path / "data" / folder, site, number, mask)
    return tmp_path / "data"


def config(root, **options):
    values = {"name": "p", "reader": "prostate", "root": str(root), "cache": str(root.parent / "cache")}
    return DataConfig(**values | options)


def mini(tmp_path, **options):
    return DataConfig(name="m", reader="prostate_mini", cache=str(tmp_path), **options)


def test_the_released_layout_holds_the_same_slices_as_the_volumes_it_was_written_from(root, tmp_path):
    released, made = load(config(root), 48), load(mini(tmp_path / "cache"), 48)
    assert released.domains == ("RUNMC", "BMC", "HK")
    assert (released.task, released.grouped, released.classes) == (
        "segmentation",
        True,
        ("background", "prostate"),
    )
    places = {key.replace("Case", "").replace("/00", "/"): i for i, key in enumerate(made.keys)}
    assert len(released) > 18
    for i, key in enumerate(released.keys):
        j = places[key.replace("Case", "").replace("/00", "/")]
        assert np.array_equal(released.images[i], made.images[j])
        assert np.array_equal(released.targets[i], made.targets[j])
    assert released.targets.max() == 1
    assert load(config(root), 48).digest == released.digest


def test_a_slice_has_its_neighbours_as_channels_and_is_never_at_an_end(tmp_path):
    image, mask = make_case("RUNMC", 0)
    volume, dataset = make_volume(image, mask), load(mini(tmp_path), 48)
    places = usable_slices(mask)
    assert 0 not in places
    assert 7 not in places
    assert all(mask[:, :, place].any() for place in places)
    for row, place in enumerate(places):
        assert dataset.keys[row] == f"RUNMC/Case00/{place}"
        for channel in range(3):
            assert np.array_equal(dataset.images[row][:, :, channel], volume.grey[:, :, place - 1 + channel])


def test_every_volume_is_standardised_whatever_its_scale():
    image, _ = make_case("BMC", 1)
    grey = standardise(image)
    assert np.array_equal(grey, standardise(7 * image + 100))
    z = (grey.astype(float) - 128) / 32
    assert abs(z.mean()) < 0.01
    assert z.std() == pytest.approx(1, abs=0.02)
    clipped = np.minimum(image, np.quantile(image, 0.99))
    exact = (clipped - clipped.mean()) / clipped.std()
    assert np.abs(z - exact).max() <= 1 / 64 + limit(exact.size, np.abs(exact).max(), torch.float64)
    assert (standardise(np.full((4, 4, 3), 5.0)) == 128).all()


def test_another_size_keeps_masks_whole(tmp_path):
    small, large = (load(mini(tmp_path), size) for size in (32, 48))
    assert small.images.shape[1:] == (32, 32, 3)
    assert set(np.unique(small.targets)) == {0, 1}
    shares = [dataset.targets.mean() for dataset in (small, large)]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)


def test_no_patient_is_in_two_splits(tmp_path):
    dataset = load(mini(tmp_path), 48)
    options = mini(tmp_path, val=0.2, test=0.2, held_out="HK")
    partition = partition_of(dataset, options, 0)
    cases = np.array([key.rpartition("/")[0] for key in dataset.keys])
    used = []
    for client in partition.clients:
        parts = [set(cases[getattr(client, split)]) for split in ("train", "val", "test")]
        assert [len(part) for part in parts[1:]] == [2, 2]
        assert sum(map(len, parts)) == len(set.union(*parts)) == SITES[client.domain].cases
        used += [client.train, client.val, client.test]
    used.append(partition.held_out["HK"])
    assert np.array_equal(np.sort(np.concatenate(used)), np.arange(len(dataset)))


def test_slices_are_split_only_when_asked_for(tmp_path):
    dataset = load(mini(tmp_path), 48)
    partition = partition_of(dataset, mini(tmp_path, partition=PartitionConfig(by_group=False)), 0)
    cases = np.array([key.rpartition("/")[0] for key in dataset.keys])
    client = partition.clients[0]
    assert set(cases[client.train]) & set(cases[client.test])


def test_limits_count_patients(tmp_path):
    dataset = load(mini(tmp_path), 48)
    partition = partition_of(dataset, mini(tmp_path, limit=3, val=1, test=1), 0)
    groups = groups_of(dataset.keys)
    sizes = {len(group) for group in groups}
    assert all(len(c.train) in sizes and len(c.test) in sizes for c in partition.clients)


def test_a_mask_that_is_missing_is_named(root):
    (root / "HK" / "Case01_segmentation.nii.gz").unlink()
    with pytest.raises(DataError, match=r"HK/Case01.nii.gz has no mask: Case01_segmentation.nii.gz"):
        load(config(root), 48)


def test_a_truncated_volume_stops_or_is_skipped(root):
    path = root / "RUNMC" / "Case00.nii.gz"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"RUNMC/Case00.nii.gz is not a NIfTI volume"):
        load(config(root), 48)
    dataset = load(config(root, on_bad_image="skip"), 48)
    assert dataset.skipped > 0
    assert not any(key.startswith("RUNMC/Case00/") for key in dataset.keys)


def test_a_mask_of_another_shape_is_named(root):
    mask = make_case("HK", 0)[1]
    write(root / "HK" / "Case00_segmentation.nii.gz", mask[:40])
    with pytest.raises(
        DataError, match=r"HK/Case00.nii.gz: image .* and mask .* not volumes of the same shape"
    ):
        load(config(root), 48)


def test_a_truncated_mask_a_missing_site_and_an_empty_folder(root, tmp_path):
    with pytest.raises(ConfigError, match=r"data.domains: 'UCL' does not exist"):
        load(config(root, domains=["RUNMC", "UCL"]), 48)
    path = root / "HK" / "Case00_segmentation.nii.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"HK/Case00_segmentation.nii.gz is not a NIfTI volume"):
        load(config(root), 48)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no cases in .*empty; expected <root>/<site>/<case>.nii.gz"):
        Prostate(name="p", root=str(tmp_path / "empty")).scan()
    with pytest.raises(ConfigError, match=r"data.root: not set"):
        Prostate(name="p", root=None).scan()
