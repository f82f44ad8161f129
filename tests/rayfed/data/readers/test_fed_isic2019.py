"""Fed-ISIC2019 and Office-Caltech10 from trees that the tests write in the published layouts."""

import pytest

from rayfed.config.compose import compose
from rayfed.config.schema import resolve
from rayfed.data.load_dataset import load
from rayfed.data.readers.fed_isic2019 import CENTERS, FedIsic2019
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.named.releases import picture

HEAD = "image,MEL,NV,target,center,fold,fold2\n"


def write(root, lines):
    (root / "train_test_split").write_text(HEAD + "".join(f"{line}\n" for line in lines))
    for line in lines:
        picture(root / "ISIC_2019_Training_Input_preprocessed" / f"{line.split(',')[0]}.jpg")


def lines_of(count=24):
    """Image i has class i % 8 and hospital i % 6; those from 18 on are for testing."""
    fold = ["train", "test"]
    return [f"ISIC_{i:07d},0,1,{i % 8},{i % 6},train,{fold[i >= 18]}_{i % 6}" for i in range(count)]


def test_hospitals_are_domains_and_their_folds_the_test_split(tmp_path):
    write(tmp_path, lines_of()[::-1])
    data = FedIsic2019(name="fed_isic2019", root=str(tmp_path))
    listing = data.scan()
    assert listing.domains == CENTERS
    assert listing.labels.tolist() == [i % 8 for i in range(24)]
    assert listing.domain.tolist() == [i % 6 for i in range(24)]
    assert listing.test.tolist() == [False] * 18 + [True] * 6
    assert listing.keys[9] == "HAM_rosendahl/NV/ISIC_0000009.jpg"
    assert abs(data.decode(listing, 3, 4).astype(int) - [10, 20, 30]).max() <= 3


def test_hospitals_need_not_have_every_class(tmp_path):
    write(tmp_path, lines_of())
    tree = compose(["data=fed_isic2019", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"])
    assert len(load(resolve(tree).data, 8)) == 24


def test_missing_and_malformed_lists(tmp_path):
    with pytest.raises(DataError, match="train_test_split does not exist; download ISIC_2019_Training_Input"):
        FedIsic2019(name="x", root=str(tmp_path)).fingerprint()
    with pytest.raises(ConfigError, match=r"data\.root: not set"):
        FedIsic2019(name="x", root=None).fingerprint()
    (tmp_path / "train_test_split").write_text("image,target,center,fold2\na,1,2,train_3\n")
    with pytest.raises(DataError, match="Training_Input_preprocessed does not exist"):
        FedIsic2019(name="x", root=str(tmp_path)).fingerprint()
    (tmp_path / "ISIC_2019_Training_Input").mkdir()
    for line in ("a,1,2,train_3", "a,8,2,train_2", "a,1,6,train_6", "a,1"):
        (tmp_path / "train_test_split").write_text(f"image,target,center,fold2\n{line}\n")
        with pytest.raises(DataError, match="line 2 of"):
            FedIsic2019(name="x", root=str(tmp_path)).scan()


def test_office_caltech10_accepts_the_spellings_of_its_copies(tmp_path):
    for domain in ("amazon", "Caltech10", "dslr", "webcam"):
        for name in ("bike", "mug"):
            picture(tmp_path / domain / name / "frame_0001.jpg")
    tree = compose(["data=office_caltech10", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"])
    data = load(resolve(tree).data, 8)
    assert data.domains == ("amazon", "caltech", "dslr", "webcam")
    assert data.classes == ("bike", "mug")
