"""Public layouts, each as a tiny tree, read with the config that ships for it."""

import json

import numpy as np
import pytest
from PIL import Image

from rayfed.data.data_config import DataConfig
from rayfed.data.load_dataset import load
from rayfed.data.source import make_source
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.test_load_dataset import from_yaml


def write(root, *paths):
    """Images whose red channel is their number."""
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 6), (8 * number, 0, 0)).save(root / path, quality=100)


def reader(name, root, **options):
    return make_source(from_yaml(name, root=str(root), **options))


def described(listing):
    """(domain, class, test) of every key."""
    names = zip(listing.domain, listing.labels, listing.test, strict=True)
    return {
        key: (listing.domains[d], listing.classes[c], bool(t))
        for key, (d, c, t) in zip(listing.keys, names, strict=True)
    }


def test_vlcs_as_in_domainbed(tmp_path):
    write(tmp_path, "VOC2007/car/a.jpg", "VOC2007/bird/b.jpg", "SUN09/car/c.jpg", "SUN09/bird/d.jpg")
    listing = reader("vlcs", tmp_path).scan()
    assert (listing.domains, listing.classes) == (("SUN09", "VOC2007"), ("bird", "car"))
    assert not listing.test.any()


@pytest.mark.parametrize("full", [False, True])
def test_vlcs_as_first_released(tmp_path, full):
    paths = [f"{d}/{half}/{c}/imgs_{i}.png" for d in ("PASCAL", "CALTECH") for c in range(5)
             for i, half in enumerate(("train", "crossval", "test"))]  # fmt: skip
    write(tmp_path, *paths)
    if full:  # the same images once more
        write(tmp_path, *(f"{p.split('/')[0]}/full/{p.split('/')[2]}/x_{i}.png" for i, p in enumerate(paths)))
    source = reader("vlcs", tmp_path)
    listing = source.scan()
    assert listing.domains == ("Caltech101", "VOC2007")
    assert listing.classes == ("bird", "car", "chair", "dog", "person")
    assert len(listing.keys) == 30
    assert described(listing)["VOC2007/car/test/imgs_2.png"] == ("VOC2007", "car", True)
    assert described(listing)["Caltech101/person/crossval/imgs_1.png"] == ("Caltech101", "person", False)
    for index, key in enumerate(listing.keys):
        domain, name, half, file = key.split("/")
        folder = {"VOC2007": "PASCAL", "Caltech101": "CALTECH"}[domain]
        number = listing.classes.index(name)
        expected = 8 * paths.index(f"{folder}/{half}/{number}/{file}")
        assert source.decode(listing, index, 6)[0, 0, 0] == expected


def test_vlcs_with_full_alone(tmp_path):
    write(tmp_path, *(f"SUN/full/{c}/train_imgs_{c}.png" for c in range(5)))
    source = reader("vlcs", tmp_path)
    listing = source.scan()
    assert described(listing)["SUN09/dog/full/train_imgs_3.png"] == ("SUN09", "dog", False)
    assert source.decode(listing, listing.keys.index("SUN09/dog/full/train_imgs_3.png"), 6)[0, 0, 0] == 24


def test_office_home_in_either_spelling(tmp_path):
    keys = []
    for folder in ("Real World", "Real_World"):
        root = tmp_path / folder.replace(" ", "-")
        write(root, f"{folder}/Alarm_Clock/00001.jpg", "Art/Alarm_Clock/00001.jpg", "Art/imagelist.txt.jpg")
        (root / "ImageInfo.csv").write_text("not an image")
        source = reader("office_home", root)
        listing = source.scan()
        keys.append(listing.keys)
        assert listing.domains == ("Art", "Real World")
        assert source.decode(listing, 1, 6).shape == (6, 6, 3)
    assert keys[0] == keys[1] == ["Art/Alarm_Clock/00001.jpg", "Real World/Alarm_Clock/00001.jpg"]


def test_two_spellings_of_one_folder(tmp_path):
    write(tmp_path, "Real World/Bed/1.jpg", "Real_World/Bed/1.jpg")
    with pytest.raises(DataError, match=r"'Real World/Bed/1\.jpg' and 'Real_World/Bed/1\.jpg' are the same"):
        reader("office_home", tmp_path).scan()


def test_terra_incognita_as_in_domainbed(tmp_path):
    write(tmp_path, "location_38/coyote/x.jpg", "location_100/empty/y.jpg", "annotations.jpg")
    listing = reader("terra_incognita", tmp_path).scan()
    assert (listing.domains, listing.classes) == (("location_100", "location_38"), ("coyote", "empty"))


def annotations(path, images, pairs, names=("coyote", "dog", "skunk")):
    categories = [{"id": 30 + i, "name": name} for i, name in enumerate(names)]
    content = {
        "images": [{"id": file[:-4], "file_name": file, "location": place} for file, place in images],
        "annotations": [
            {"image_id": file[:-4], "category_id": 30 + names.index(name)} for file, name in pairs
        ],
        "categories": categories,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_terra_incognita_as_released(tmp_path):
    write(tmp_path / "eccv_18_all_images_sm", "a.png", "b.png", "c.png", "d.png")
    lists = tmp_path / "eccv_18_annotation_files"
    images = [("a.png", 38), ("b.png", 46), ("c.png", 7), ("d.png", 38)]
    annotations(lists / "cis_val.json", images, [("a.png", "dog"), ("b.png", "coyote"), ("c.png", "dog")])
    annotations(lists / "train.json", images, [("a.png", "dog"), ("a.png", "coyote"), ("d.png", "skunk")])
    source = reader("terra_incognita", tmp_path)
    listing = source.scan()
    assert listing.keys == ["location_38/coyote/a.png", "location_38/dog/a.png", "location_46/coyote/b.png"]
    assert listing.classes == ("coyote", "dog")
    assert [int(source.decode(listing, i, 6)[0, 0, 0]) for i in range(3)] == [0, 0, 8]
    before = source.fingerprint()
    annotations(lists / "train.json", images, [("a.png", "dog")])
    assert reader("terra_incognita", tmp_path).fingerprint() != before


def test_terra_incognita_stays_in_its_folder(tmp_path):
    file = tmp_path / "eccv_18_annotation_files" / "train.json"
    annotations(file, [("../../x.png", 38)], [("../../x.png", "dog")])
    with pytest.raises(DataError, match="outside"):
        reader("terra_incognita", tmp_path).scan()
    file.write_text('{"images": []}')
    with pytest.raises(DataError, match=r"train\.json is not a COCO camera traps file"):
        reader("terra_incognita", tmp_path).scan()


def test_nico_as_released(tmp_path):
    for domain in ("autumn", "dim", "grass", "outdoor", "rock", "water"):
        names = [
            f"NICO_DG/{domain}/{name}/{domain} {i}.jpg"
            for i in range(2)
            for name in ("bear", "hot air balloon")
        ]
        write(tmp_path, *names)
        for half, own in (("train", names[:2]), ("test", names[2:])):
            lines = "".join(f"{name} {0 if 'balloon' in name else 1}\n" for name in own)
            (tmp_path / "NICO_DG_official").mkdir(exist_ok=True)
            (tmp_path / "NICO_DG_official" / f"{domain}_{half}.txt").write_text(lines)
    config = from_yaml("nico", root=str(tmp_path), cache=str(tmp_path / "cache"))
    data = load(config, 6)
    assert data.domains == ("autumn", "dim", "grass", "outdoor", "rock", "water")
    assert data.classes == ("hot air balloon", "bear")  # by label, not by name
    assert data.test.sum() == 12
    assert data.images[data.keys.index("NICO_DG/dim/hot air balloon/dim 1.jpg")][0, 0, 0] in range(22, 27)


@pytest.mark.parametrize("lists", [".", "Train val splits and h5py files pre-read"])
def test_pacs_with_its_official_lists(tmp_path, lists):
    (tmp_path / lists).mkdir(exist_ok=True)
    for domain in ("photo", "sketch"):
        names = [f"{domain}/{name}/{i}.jpg" for i in range(3) for name in ("dog", "elephant")]
        write(tmp_path, *names)
        for half, own in (("train", names[:4]), ("crossval", names[4:]), ("test", names)):
            lines = "".join(f"{name} {2 if 'elephant' in name else 1}\n" for name in own)
            (tmp_path / lists / f"{domain}_{half}_kfold.txt").write_text(lines)
    listing = reader("pacs_official", tmp_path).scan()
    assert (listing.domains, listing.classes) == (("photo", "sketch"), ("dog", "elephant"))
    assert len(listing.keys) == 12  # the third list is not read
    assert [key for key, test in zip(listing.keys, listing.test, strict=True) if test] == [
        f"{domain}/{name}/2.jpg" for domain in ("photo", "sketch") for name in ("dog", "elephant")
    ]


def test_domainnet_takes_the_first_labels_not_the_first_names(tmp_path):
    # As in the release: labels do not mind capitals, so "The_Eiffel_Tower" is not the first class.
    names = ["axe", "bear", "The_Eiffel_Tower", "zebra"]
    write(tmp_path, *(f"real/{name}/{name}.jpg" for name in names))
    (tmp_path / "real_train.txt").write_text("".join(f"real/{n}/{n}.jpg {i}\n" for i, n in enumerate(names)))
    (tmp_path / "real_test.txt").write_text("")
    listing = reader("domainnet345", tmp_path).scan()
    assert listing.classes == tuple(names)
    listing = reader("domainnet100", tmp_path, classes=3).scan()
    assert listing.classes == tuple(names[:3])
    assert len(listing.keys) == 3
    with pytest.raises(ConfigError, match=r"data\.classes: 100 of 4 classes"):
        reader("domainnet100", tmp_path).scan()
    with pytest.raises(ConfigError, match=r"data\.classes: 'bird' does not exist"):
        reader("domainnet", tmp_path).scan()


@pytest.mark.parametrize("name", ["image_folder", "pacs", "domainnet"])
def test_domainbed_folders_in_general(tmp_path, name):
    write(
        tmp_path, *(f"{d}/{c}/{i}.jpg" for d in ("env0", "env1") for c in ("bear", "axe") for i in range(2))
    )
    listing = reader(name, tmp_path, reader="image_folder", classes=["bear"]).scan()
    assert (listing.domains, listing.classes, len(listing.keys)) == (("env0", "env1"), ("bear",), 4)
    assert np.array_equal(listing.labels, np.zeros(4))


def test_options_a_reader_does_not_have(tmp_path):
    config = DataConfig(name="d", reader="digits_five_mini", aliases={"a": "b"})
    with pytest.raises(ConfigError, match=r"data\.aliases: the reader 'digits_five_mini' cannot"):
        make_source(config)
