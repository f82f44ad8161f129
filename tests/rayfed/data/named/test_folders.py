"""Flowers-102, Food-101, DTD and EuroSAT from trees that the tests write in the published layouts."""

import pytest

from rayfed.config.compose import compose
from rayfed.data.source import READERS
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.named import releases

WRITERS = {
    "flowers102": (releases.write_flowers, 102, 7, 3),
    "food101": (releases.write_food, 2, 6, 2),
    "dtd": (releases.write_dtd, 2, 6, 2),
    "eurosat": (releases.write_eurosat, 2, 6, 0),
}


def reader(name, root):
    return READERS.load(compose([f"data={name}"])["data"]["reader"])(name=name, root=root)


@pytest.mark.parametrize("name", WRITERS)
def test_images_classes_and_official_test_split(tmp_path, name):
    write, classes, count, tests = WRITERS[name]
    write(tmp_path)
    data = reader(name, str(tmp_path))
    listing = data.scan()
    assert len(listing.classes) == classes
    assert (len(listing.labels), int(listing.test.sum())) == (count, tests)
    assert listing.fingerprint == data.fingerprint()
    for place in range(count):
        image = data.decode(listing, place, 8)
        assert abs(image.astype(int) - [10, 20, 30]).max() <= 3
    if name == "flowers102":
        assert listing.labels.tolist() == [0, 1, 2, 2, 3, 4, 5]
        assert listing.classes[0] == "pink primrose"
    else:
        first = listing.classes[0]
        assert all(
            (key.split("/")[1] == first) == (y == 0)
            for key, y in zip(listing.keys, listing.labels, strict=True)
        )


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_download_is_one_line_that_says_what_and_where(tmp_path, name):
    with pytest.raises(DataError, match=r"does not exist; download .* data\.root") as caught:
        reader(name, str(tmp_path)).fingerprint()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.root: not set; download"):
        reader(name, None).fingerprint()


def test_a_malformed_list_is_one_line(tmp_path):
    releases.write_food(tmp_path)
    (tmp_path / "food-101" / "meta" / "train.json").write_text("{")
    with pytest.raises(DataError, match=r"is not as released .*; download food-101"):
        reader("food101", str(tmp_path)).scan()
