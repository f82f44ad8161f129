"""Data sets of the library `datasets`, from folders and Parquet files that the tests write."""

import io
import logging

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from rayfed.config.compose import compose
from rayfed.data.data_config import DataConfig, PartitionConfig
from rayfed.data.load_dataset import load
from rayfed.data.partition.groups import partition_of
from rayfed.data.readers.hf import HuggingFace
from rayfed.data.text import Text
from rayfed.errors import ConfigError, DataError
from rayfed.objective import CLASSIFICATION, LANGUAGE_MODELING, TEXT_CLASSIFICATION

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub").constants


def png(value):
    out = io.BytesIO()
    Image.new("RGB", (6, 6), (value, 0, 0)).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def rows(count, start=0, typed=True):
    columns = {
        "img": [png(start + place) for place in range(count)],
        "y": [place % 2 for place in range(count)],
        "writer": [f"w{place % 3}" for place in range(count)],
        "site": [["north", "south"][place % 2] for place in range(count)],
    }
    found = datasets.Dataset.from_dict(columns)
    if typed:
        found = found.cast_column("img", datasets.Image())
        found = found.cast_column("y", datasets.ClassLabel(names=["cat", "dog"]))
    return found


def reader(root, tmp_path, **options):
    return HuggingFace(name="toy", root=root and str(root), cache=str(tmp_path / "cache"), **options)


def test_a_folder_of_parquet_files_has_classes_images_and_a_test_split(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows(8).to_parquet(folder / "train-00000.parquet")
    rows(4, 100).to_parquet(folder / "test-00000.parquet")
    data = reader(folder, tmp_path)
    listing = data.scan()
    assert listing.classes == ("cat", "dog")
    assert listing.domains == ("all",)
    assert listing.owners is None
    assert listing.labels.tolist() == [0, 1] * 6
    assert listing.test.tolist() == [False] * 8 + [True] * 4
    red = [int(data.decode(listing, place, 6)[0, 0, 0]) for place in range(12)]
    assert red == [*range(8), *range(100, 104)]
    assert reader(folder, tmp_path).fingerprint() == listing.fingerprint
    rows(4, 50).to_parquet(folder / "test-00000.parquet")
    assert reader(folder, tmp_path).fingerprint() != listing.fingerprint


def test_columns_name_image_label_client_and_domain(tmp_path):
    rows(12, typed=False).to_parquet(tmp_path / "all.parquet")
    columns = {"image": "img", "label": "y", "client": "writer", "domain": "site"}
    data = reader(tmp_path / "all.parquet", tmp_path, columns=columns)
    listing = data.scan()
    assert listing.classes == ("0", "1")
    assert listing.domains == ("north", "south")
    assert listing.domain.tolist() == [0, 1] * 6
    assert listing.owners == [f"w{place % 3}" for place in range(12)]
    assert int(data.decode(listing, 7, 6)[0, 0, 0]) == 7
    config = DataConfig(
        name="toy",
        reader="hf",
        root=str(tmp_path / "all.parquet"),
        cache=str(tmp_path / "cache"),
        columns=columns,
        val=0,
        test=0,
        partition=PartitionConfig(scheme="natural", min_samples=1),
    )
    dataset = load(config, 6)
    clients = partition_of(dataset, config, 0).clients
    assert [(client.id, client.domain, len(client.train)) for client in clients] == [
        (f"c{place}-w{place}", "mixed", 4) for place in range(3)
    ]
    assert np.array_equal(dataset.images[clients[1].train][:, 0, 0, 0], [1, 4, 7, 10])


def test_a_saved_data_set_is_read_and_validation_takes_the_place_of_test(tmp_path):
    splits = datasets.DatasetDict({"train": rows(4), "validation": rows(2, 9)})
    splits.save_to_disk(tmp_path / "saved")
    listing = reader(tmp_path / "saved", tmp_path, classes=["dog", "cat"]).scan()
    assert listing.classes == ("dog", "cat")
    assert listing.labels.tolist() == [1, 0] * 3
    assert listing.test.tolist() == [False] * 4 + [True] * 2
    assert listing.test_name == "validation"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "data.columns.image: not set, and no column of hf/toy has the type Image; name one of img, y"),
        ({"image": "img"}, "data.columns.label: not set"),
        ({"image": "imge", "label": "y"}, "data.columns.image: .*'imge'.*img"),
        ({"image": "img", "label": "y", "user": "writer"}, "data.columns.*'user'"),
    ],
)
def test_a_column_that_is_not_known_is_named(tmp_path, columns, message):
    rows(2, typed=False).to_parquet(tmp_path / "all.parquet")
    with pytest.raises(ConfigError, match=message):
        reader(tmp_path / "all.parquet", tmp_path, columns=columns).scan()


def with_paths(path, *, typed, file):
    value = {"bytes": None, "path": str(path)} if typed else str(path)
    parquet.write_table(pyarrow.table({"image": [value] * 2, "label": [0, 1]}), file)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("outside", ["../secret.png", "{absolute}"])
def test_an_image_that_has_only_a_path_is_read_from_the_folder_of_the_data_only(tmp_path, typed, outside):
    """Otherwise a data set of strangers could read any image of the machine."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in (tmp_path / "secret.png", folder / "own.png"):
        file.write_bytes(png(90)["bytes"])
    columns = {"image": "image", "label": "label"}
    with_paths(folder / "own.png" if typed else "own.png", typed=typed, file=folder / "rows.parquet")
    data = reader(folder / "rows.parquet", tmp_path, columns=columns)
    assert data.decode(data.scan(), 0, 6).shape == (6, 6, 3)
    path = outside.format(absolute=tmp_path / "secret.png")
    with_paths(path, typed=typed, file=folder / "rows.parquet")
    data = reader(folder / "rows.parquet", tmp_path / "again", columns=columns)
    with pytest.raises(DataError, match=r"outside of .*data; put the images into"):
        data.decode(data.scan(), 0, 6)


@pytest.mark.parametrize("labels", [[0, -1], [0.0, float("nan")], [0.0, 0.5], [[0], [1]]])
def test_labels_that_are_no_classes_are_refused(tmp_path, labels):
    datasets.Dataset.from_dict({"image": [png(1)["bytes"]] * 2, "label": labels}).to_parquet(
        tmp_path / "a.parquet"
    )
    data = reader(tmp_path / "a.parquet", tmp_path, columns={"image": "image", "label": "label"})
    with pytest.raises(DataError, match="labels are whole numbers from 0, or text"):
        data.scan()


def test_one_column_is_not_both_image_and_label(tmp_path):
    rows(2).to_parquet(tmp_path / "a.parquet")
    data = reader(tmp_path / "a.parquet", tmp_path, columns={"image": "img", "label": "img"})
    with pytest.raises(ConfigError, match=r"data\.columns\.label: 'img' is the column of the images, too"):
        data.scan()


def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"cannot be loaded by the library datasets") as caught:
        reader(tmp_path / "bad.parquet", tmp_path).scan()
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "bad.parquet") in str(caught.value)
    assert not [record for record in caplog.records if record.name.startswith("datasets")]
    with pytest.raises(DataError, match="does not exist; give the folder or Parquet file"):
        reader(tmp_path / "none", tmp_path).scan()
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"install rayfed-sim\[hf\]"):
        reader(tmp_path / "bad.parquet", tmp_path).scan()


def test_an_image_in_a_damaged_file_is_named_with_the_file_and_without_addresses(tmp_path):
    damaged = {"img": [{"bytes": b"no image", "path": None}], "label": ["cat"]}
    found = datasets.Dataset.from_dict(damaged).cast_column("img", datasets.Image())
    found.to_parquet(tmp_path / "a.parquet")
    data = reader(tmp_path / "a.parquet", tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet is corrupt \(no image format that is known\)"):
        data.decode(data.scan(), 0, 6)


@pytest.mark.parametrize("part", ["y", "site", "writer"])
def test_names_with_control_or_direction_characters_are_refused(tmp_path, part):
    bad = rows(4, typed=False).cast_column("img", datasets.Image())
    bad = bad.remove_columns(part).add_column(part, ["cat", "dog", "\x1b[31mred", "\u202egod"])
    bad.to_parquet(tmp_path / "a.parquet")
    columns = {"image": "img", "label": "y", "domain": "site", "client": "writer"}
    with pytest.raises(DataError, match=r"characters that cannot be printed; rename it") as caught:
        reader(tmp_path / "a.parquet", tmp_path, columns=columns).scan()
    assert str(caught.value).isprintable()


class Hub:
    """Stands for the hub: `head` answers, or raises as without a network; `load` finds nothing."""

    def __init__(self, monkeypatch, reachable):
        self.reachable, self.offline = reachable, []
        monkeypatch.setattr("huggingface_hub.get_session", lambda: self)
        monkeypatch.setattr("datasets.load_dataset", self.load)

    def head(self, url, timeout):
        assert timeout < 10
        if not self.reachable:
            raise OSError("Name or service not known")

    def load(self, *_, **__):
        self.offline.append(constants.HF_HUB_OFFLINE)
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 8s")
        raise ConnectionError("busy")


@pytest.mark.parametrize(("reachable", "reason"), [(True, "busy"), (False, "the hub does not answer")])
def test_only_a_hub_that_answers_is_tried_again_and_no_try_is_logged(
    tmp_path, monkeypatch, caplog, reachable, reason
):
    hub, before = Hub(monkeypatch, reachable), constants.HF_HUB_OFFLINE
    with pytest.raises(DataError, match=rf"{reason}.*; download the data set, and set data.root"):
        reader(None, tmp_path).scan()
    assert hub.offline == [not reachable]
    assert before == constants.HF_HUB_OFFLINE
    assert not caplog.messages
    logging.getLogger("huggingface_hub.utils").warning("later")
    assert caplog.messages == ["later"]


def test_names_of_the_command_line_reach_the_reader():
    data = compose(["data=hf/some-owner/da_ta.2", "data.columns.client=writer"])["data"]
    assert data["name"] == "some-owner/da_ta.2"
    assert data["reader"] == "hf"
    assert data["columns"] == {"client": "writer"}
    with pytest.raises(ConfigError, match="is not hf/NAME"):
        compose(["data=hf/a/b/c"])


PAIR = {"text": "text", "text_pair": "other", "label": "label"}
TOLD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("columns", "task", "first"),
    [
        (None, TEXT_CLASSIFICATION, Text(text="one")),
        (
            {"text": "text", "text_pair": "other", "label": "label"},
            TEXT_CLASSIFICATION,
            Text(text="one", pair="1"),
        ),
        ({"prompt": "text", "completion": "other"}, LANGUAGE_MODELING, Text(text="one", answer="1")),
        (
            {"messages": "chat"},
            LANGUAGE_MODELING,
            Text(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})),
        ),
    ],
)
def test_columns_of_texts_are_read_as_in_a_table(tmp_path, columns, task, first):
    def part(texts, labels):
        own = {"text": texts, "other": [str(place + 1) for place in range(len(texts))], "label": labels}
        found = datasets.Dataset.from_dict({**own, "chat": [TOLD] * len(texts), "who": ["w"] * len(texts)})
        return found.cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))

    splits = {
        "train": part(["one", "two"], [0, 1]),
        "validation": part(["three"], [1]),
        "test": part(["x"], [-1]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
    columns = columns and {**columns, "client": "who"}
    data = reader(tmp_path / "data", tmp_path, columns=columns)
    listing = data.scan()
    assert data.task == task
    assert data.decode(listing, 0, 0) == first
    assert listing.fingerprint == data.fingerprint()
    assert listing.owners == (columns and ["w"] * len(listing.keys))
    labelled = task == TEXT_CLASSIFICATION
    assert listing.classes == (("cat", "dog") if labelled else ("text",))
    assert listing.test.tolist() == [False, False, *([True] if labelled else [False, True])]


def test_images_with_a_column_of_texts_are_images_unless_texts_are_named(tmp_path):
    found = rows(4).rename_columns({"site": "text"})
    found.save_to_disk(tmp_path / "data")
    assert reader(tmp_path / "data", tmp_path).task == CLASSIFICATION
    assert (
        reader(tmp_path / "data", tmp_path, columns={"text": "text", "label": "y"}).task
        == TEXT_CLASSIFICATION
    )
    with pytest.raises(ConfigError, match=r"data\.columns"):
        reader(tmp_path / "data", tmp_path, columns={"image": "img", "text": "text"}).scan()


NEWS = ["World", "Sports", "Business", "Sci/Tech"]


def test_the_classes_of_texts_are_in_the_order_of_their_class_label(tmp_path):
    found = datasets.Dataset.from_dict({"text": [f"t {i}" for i in range(8)], "label": [3, 0, 1, 2] * 2})
    found.cast_column("label", datasets.ClassLabel(names=NEWS)).to_parquet(tmp_path / "a.parquet")
    listing = reader(tmp_path / "a.parquet", tmp_path).scan()
    assert listing.classes == tuple(NEWS)
    assert listing.labels.tolist() == [3, 0, 1, 2] * 2


@pytest.mark.parametrize("bad", [-1, None])
def test_a_text_without_a_class_label_is_named(tmp_path, bad):
    found = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, bad]})
    found.cast_column("label", datasets.ClassLabel(names=["n", "p"])).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 3 of train of toy has (the label -1|no value in 'label')"):
        reader(tmp_path / "a.parquet", tmp_path).scan()


@pytest.mark.parametrize("missing", [None, "", float("nan")])
def test_an_image_without_a_client_is_named(tmp_path, missing):
    clients = ["p", "q", missing] if isinstance(missing, str | None) else [1.0, 2.0, missing]
    found = datasets.Dataset.from_dict({"img": [png(1)["bytes"]] * 3, "y": [0, 1, 0], "who": clients})
    found.to_parquet(tmp_path / "a.parquet")
    data = reader(tmp_path / "a.parquet", tmp_path, columns={"image": "img", "label": "y", "client": "who"})
    with pytest.raises(
        DataError, match=r"data\.columns\.client: .* no value in 1 rows, the first of which is row 3"
    ):
        data.scan()


def of_splits(folder, names, labels, text):
    """A saved data set whose splits have a ClassLabel each; None: numbers without names."""
    splits = {}
    for split, own in names.items():
        kind = datasets.Value("int64") if own is None else datasets.ClassLabel(names=own)
        values = labels[split]
        columns = {"text": [f"t{i}" for i in values]} if text else {"image": [png(i) for i in values]}
        content = datasets.Value("string") if text else datasets.Image()
        features = datasets.Features({next(iter(columns)): content, "label": kind})
        splits[split] = datasets.Dataset.from_dict({**columns, "label": values}, features=features)
    datasets.DatasetDict(splits).save_to_disk(folder)
    return HuggingFace(name="toy", root=str(folder))


@pytest.mark.parametrize("text", [True, False])
def test_classes_of_each_split_are_those_that_it_names(tmp_path, text):
    other = {"train": ["a", "b"], "test": ["b", "a"]}
    listing = of_splits(tmp_path / "1", other, {"train": [0, 1], "test": [0, 1]}, text).scan()
    assert (listing.classes, listing.labels.tolist()) == (("a", "b"), [0, 1, 1, 0])
    more = {"train": ["a", "b"], "test": ["a", "b", "c"]}
    listing = of_splits(tmp_path / "2", more, {"train": [0, 1], "test": [0, 2]}, text).scan()
    assert (listing.classes, listing.labels.tolist()) == (("a", "b", "c"), [0, 1, 0, 2])
    some = {"train": ["a", "b"], "test": None}
    with pytest.raises(DataError, match="is a ClassLabel in the split train and none in test"):
        of_splits(tmp_path / "3", some, {"train": [0, 1], "test": [0, 1]}, text).scan()
