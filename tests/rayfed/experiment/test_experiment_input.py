"""What a user hands over arrives as it is: order of classes, names of clients, values of images, paths."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import rayfed
from rayfed.config.config_changes import config_changes
from rayfed.config.schema import load_config, to_dict
from rayfed.errors import ConfigError
from rayfed.resume import config_to_continue

NAMES = ["World", "Sports", "Business", "Sci/Tech"]
CODES = np.random.default_rng(0).integers(0, 4, 60)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


class Perfect(nn.Module):
    """Says the place of the largest of four numbers."""

    def __init__(self):
        super().__init__()
        self.o = nn.Linear(4, 4, bias=False)
        self.o.weight = nn.Parameter(10 * torch.eye(4))

    def forward(self, x):
        return self.o(x.float())


def table(labels):
    rows = pd.DataFrame(np.eye(4, dtype=np.float32)[CODES], columns=list("abcd"))
    return rows.assign(label=labels, client=[f"c{i % 3}" for i in range(60)])


def run(**changes):
    values = {"tuning": "full", "rounds": 1, "cluster": "inline", "model": Perfect()}
    return rayfed.Experiment(**{**values, **changes}).run(quiet=True)


def of_datasets(labels):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_pandas(table(labels), preserve_index=False)
    return found.cast_column("label", datasets.ClassLabel(names=NAMES))


FORMS = {
    "ordered": lambda: table(pd.Categorical.from_codes(CODES, NAMES, ordered=True)),
    "categories": lambda: table(pd.Categorical.from_codes(CODES, NAMES)),
    "arrow": lambda: pa.Table.from_pandas(table(pd.Categorical.from_codes(CODES, NAMES))),
    "class_label": lambda: of_datasets(CODES),
    "pairs": lambda: {
        name: (own[list("abcd")].to_numpy(), own["label"])
        for name, own in FORMS["ordered"]().groupby("client", observed=True)
    },
    "integers": lambda: table(CODES),
    "nullable": lambda: table(pd.array(CODES, dtype="Int64")),
}


@pytest.mark.parametrize("form", FORMS)
def test_class_i_of_the_source_is_output_i(form):
    found = run(method="zero_shot", data=FORMS[form]())
    assert found.accuracy == 1.0
    assert found.classes == (("0", "1", "2", "3") if form in ("integers", "nullable") else tuple(NAMES))


def test_texts_without_an_order_are_in_that_of_the_alphabet_which_the_header_says(capsys):
    experiment = rayfed.Experiment(
        tuning="full", rounds=1, cluster="inline", model=Perfect(), data=table(np.array(NAMES)[CODES])
    )
    found = experiment.run(quiet=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert found.classes == tuple(sorted(NAMES))
    assert "outputs 0 to 3 are the classes Business, Sci/Tech, Sports, World" in shown
    assert "columns of the table: inputs a, b, c, d; target label" in shown


def test_numbers_have_no_classes():
    found = run(model=nn.Linear(4, 1), data=table(CODES / 7))
    assert found.classes == ()


def test_whole_floats_are_classes_where_the_task_says_so():
    found = run(method="zero_shot", data=table(CODES.astype(float)), task="classification")
    assert (found.accuracy, found.classes) == (1.0, ("0", "1", "2", "3"))
    ages = run(model=nn.Linear(4, 1), data=table(CODES - 2), task="regression")
    assert ages.metric == "mae"


def test_a_client_is_found_by_the_name_under_which_it_was_handed_over():
    names = ["ann@x.org", "ann#x.org", 3, "bob"]
    data = {name: (np.eye(4, dtype=np.float32)[CODES[i::4]], CODES[i::4]) for i, name in enumerate(names)}
    found = run(data=data, method="local")
    kept = {name: found.personal(name).o.weight for name in names}
    assert len({tuple(weight.flatten().tolist()) for weight in kept.values()}) == 4
    assert torch.equal(found.personal("3").o.weight, kept[3])
    for client in found.clients.index:
        assert any(torch.equal(found.personal(client).o.weight, weight) for weight in kept.values())
    with pytest.raises(ConfigError, match=r"client: 'ann@y\.org' does not exist; did you mean 'ann@x\.org'"):
        found.personal("ann@y.org")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": (np.eye(4)[CODES], CODES * 0)}, "all 60 examples have the class '0'"),
        ({"a": (np.eye(4, dtype=np.int64)[CODES], CODES)}, "whole numbers stay so, for embeddings"),
    ],
)
def test_data_that_do_not_fit_are_explained(data, words):
    with pytest.raises(ConfigError, match=words):
        run(data=data, model=nn.Linear(4, 4))


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.o = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(4))
        return self.o(x) + self.late


class LateBuffer(Late):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        return self.o(x)


@pytest.mark.parametrize(
    ("model", "tuning", "words"),
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            "full",
            "0.weight of Sequential has no size .*LazyLinear is lazy",
        ),
        (
            nn.Sequential(nn.LazyLinear(4)),
            "full",
            "0.weight of Sequential has no size before the first batch",
        ),
        (nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 4)), "full", "LazyBatchNorm1d is lazy"),
        (Late(), "full", "makes 'late' in its first forward"),
        (Late, "full", "makes 'late' in its first forward"),
        (LateBuffer(), "full", "makes 'seen' in its first forward"),
        (
            nn.Sequential(
                nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 8, 3, 1, 1, groups=4), nn.Flatten(), nn.Linear(8, 4)
            ),
            rayfed.LoRA(rank=2, targets=["1"]),
            "tuning.rank: 2 is no multiple of the 4 groups of the convolution '1'",
        ),
    ],
)
def test_a_network_that_cannot_be_tuned_is_one_line(model, tuning, words):
    with pytest.raises(ConfigError, match=words) as caught:
        run(data=FORMS["integers"](), model=model, tuning=tuning)
    assert "\n" not in str(caught.value)


class Means(nn.Module):
    def __init__(self, channels=3):
        super().__init__()
        self.o = nn.Linear(channels, 2)

    def forward(self, x):
        return self.o(x.mean((2, 3)))


UNIT = np.random.default_rng(1).random((20, 3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("augment", ["jitter", "randaugment", "grayscale", "flip", "crop", "rotate"])
@pytest.mark.parametrize(
    ("images", "limits"),
    [
        (UNIT * 255, "from 0.* to 25"),
        (UNIT * 2 - 1, "from -0.9"),
        (UNIT, ""),
        ((UNIT * 255).astype(np.uint8), ""),
    ],
)
def test_changes_that_would_cut_values_off_are_refused_before_the_start(augment, images, limits):
    def go():
        data = {name: (images, np.arange(20) % 2) for name in "ab"}
        return run(model=Means(), data=data, **{"data.augment": [augment]})

    if limits and augment in ("jitter", "randaugment"):
        with pytest.raises(ConfigError, match=f"data.augment: {augment} is for values from 0 to 1.*{limits}"):
            go()
    else:
        assert go().accuracy >= 0


@pytest.mark.parametrize("augment", ["jitter", "grayscale"])
def test_changes_of_colours_need_colours(augment):
    data = {"a": (np.random.default_rng(0).random((20, 4, 8, 8)).astype(np.float32), np.arange(20) % 2)}
    with pytest.raises(
        ConfigError, match=rf"data.augment: {augment} cannot change images of shape \(4, 8, 8\)"
    ):
        run(
            model=Means(4),
            data=data,
            **{"data.augment": {augment: {"p": 1.0} if augment == "grayscale" else {}}},
        )


@pytest.mark.parametrize("augment", ["flip", "crop", "rotate"])
def test_changes_of_images_need_channels_first(augment):
    data = {"a": (UNIT.transpose(0, 2, 3, 1), np.arange(20) % 2)}
    with pytest.raises(
        ConfigError, match=r"the inputs have shape \(8, 8, 3\); give floats with channels first"
    ):
        run(model=nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), data=data, **{"data.augment": [augment]})


def test_a_run_with_relative_paths_is_continued_from_any_folder(tmp_path, monkeypatch):
    for name, blue in (("a", 200), ("b", 0)):
        (tmp_path / "im" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (32, 32), (i * 10, 0, blue)).save(tmp_path / "im" / name / f"{i}.png")
    rows = "".join(f"c{i % 2},all/{'ab'[i // 12]}/{i % 12}.png\n" for i in range(24))
    (tmp_path / "who.csv").write_text("client,sample\n" + rows)
    monkeypatch.chdir(tmp_path)
    overrides = ["algorithm=fedavg", "tuning=head", "model=vit_mini", "rounds=1", "cluster=inline"]
    overrides += [
        "data=image_folder",
        "data.root=im",
        "data.partition=who.csv",
        "data.cache=cache",
        "figures=false",
    ]
    rayfed.simulate([*overrides, "output=r"])
    saved = yaml.safe_load(Path("r/config.yaml").read_text())
    assert saved["data"]["root"] == str(tmp_path / "im")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert config_to_continue(Path("../r"), ["rounds=+1"]).data.root == str(tmp_path / "im")
    again = rayfed.Experiment.from_overrides(["rounds=2"], "../r/config.yaml").resume("../r")
    monkeypatch.chdir(tmp_path)
    assert again.sha256 == rayfed.simulate([*overrides, "rounds=2", "output=whole"]).sha256
    with pytest.raises(ConfigError, match="rounds: 1 is fewer than the 2 of the run in r"):
        rayfed.Experiment.from_overrides(["rounds=1"], "r/config.yaml").resume("r")


def test_the_folder_of_a_model_is_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("models/tiny", "./models/tiny", f"{tmp_path}/models/tiny"):
        new = load_config([f"model=hf/{name}", "data=jsonl"])
        assert new.model.name == f"hf/{tmp_path}/models/tiny"
    assert load_config(["model=hf/models/other", "data=jsonl"]).model.name == "hf/models/other"  # on the hub
    old = to_dict(new)
    old["model"]["name"] = "hf/models/tiny"  # as earlier versions wrote it
    assert [*config_changes(old, to_dict(new))] == []
    old["model"]["name"] = "hf/models/other"
    assert [key for key, *_ in config_changes(old, to_dict(new))] == ["model.name"]


@pytest.mark.parametrize("key", ["data.partition.file", "faults.trace", "model.weights"])
def test_a_config_of_an_earlier_version_with_a_relative_path_is_the_same(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = to_dict(load_config([f"{key}=some/file.csv"]))
    old = to_dict(load_config([]))
    section, *names = key.split(".")
    place = old[section]
    for name in names[:-1]:
        place = place[name]
    place[names[-1]] = "some/file.csv"
    assert [each for each in config_changes(old, new) if each[0] == key] == []
    place[names[-1]] = "other.csv"
    assert [each[0] for each in config_changes(old, new) if each[0] == key] == [key]
