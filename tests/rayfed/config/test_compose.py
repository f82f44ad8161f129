"""Names without YAML files, and data sets that bring their model."""

import pytest
import yaml

import rayfed
from rayfed.config.compose import choices, compose, folder
from rayfed.config.schema import build_parts, load_config, to_dict
from rayfed.data.readers.hf import HuggingFace
from rayfed.data.source import READERS, task_of
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS, check_compatible, check_task
from rayfed.models.build import build_backbone
from rayfed.models.shared_weights import skeleton
from rayfed.objective import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    NEXT_CHARACTER,
    SEGMENTATION,
    TEXT_CLASSIFICATION,
)
from rayfed.tuning.base import TUNINGS
from tests.conftest import SMALL, quickly

READER = """
from dataclasses import dataclass

import numpy as np

from rayfed.data.source import Listing


@dataclass(frozen=True, kw_only=True)
class Stripes:
    name: str

    def fingerprint(self):
        return "1"

    def scan(self):
        keys = [f"{d}/{c}/{i}" for d in ("thin", "thick") for c in ("across", "down") for i in range(12)]
        index = np.arange(len(keys))
        return Listing(
            name=self.name,
            classes=("across", "down"),
            domains=("thin", "thick"),
            keys=keys,
            labels=index // 12 % 2,
            domain=index // 24,
            test=np.zeros(len(keys), bool),
            fingerprint="1",
        )

    def decode(self, listing, index, size):
        image = np.zeros((size, size, 3), np.uint8)
        image[:: 2 + 2 * int(listing.domain[index])] = 255
        return image if listing.labels[index] else image.transpose(1, 0, 2)


READER = Stripes
"""

TUNING = """
from dataclasses import dataclass
from typing import ClassVar

from rayfed.tuning.base import freeze


@dataclass(frozen=True, kw_only=True)
class Norms:
    offers: ClassVar = frozenset()
    train_head: bool = True

    def apply(self, model):
        freeze(model, self.train_head)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
        return model
"""


@pytest.mark.parametrize("name", METHODS.names())
def test_a_method_is_found_by_its_file(name):
    assert load_config([f"algorithm={name}"]).algorithm == name


@pytest.mark.parametrize("name", TUNINGS.names())
def test_a_tuning_is_found_by_its_file(name):
    assert load_config(["algorithm=fedavg", f"tuning={name}"]).tuning["name"] == name


@pytest.mark.parametrize("name", READERS.names())
def test_a_reader_is_found_by_its_file(name):
    data = load_config([f"data={name}", "data.root=x"]).data
    assert data.reader == name


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Write modules that can be imported."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    return write


@pytest.mark.parametrize(
    ("group", "package", "text"),
    [
        ("tuning", "rayfed.tuning", TUNING + "\nTUNING = Norms\n"),
        ("data", "rayfed.data.readers", READER),
        ("algorithm", "algorithms", "from rayfed import Method\n\nMETHOD = Method()\n"),
    ],
)
def test_a_new_file_of_a_package_needs_no_yaml(group, package, text, tmp_path, monkeypatch):
    import importlib

    found = importlib.import_module(package)
    monkeypatch.setattr(found, "__path__", [*found.__path__, str(tmp_path)])
    (tmp_path / "quite_new.py").write_text(text)
    config = to_dict(load_config(["algorithm=fedavg", f"{group}=quite_new"]))
    named = {"tuning": config["tuning"]["name"], "data": config["data"]["reader"]}
    assert named.get(group, config["algorithm"]) == "quite_new"
    assert "quite_new" in choices(group)


def test_a_tuning_and_a_reader_of_ones_own_run_together(beside, tmp_path, cache):
    beside("own_norms", TUNING)
    beside("own_stripes", READER)
    chosen = [
        "tuning=own_norms:Norms",
        "data=own_stripes:READER",
        "data.test=0.25",
        "output=" + str(tmp_path / "r"),
    ]
    result = rayfed.simulate(
        [*(o for o in SMALL if not o.startswith("tuning.")), *chosen, f"data.cache={cache}", "cluster=inline"]
    )
    assert any("norm" in name for name in result.params)
    saved = yaml.safe_load((result.path / "config.yaml").read_text())
    assert (saved["tuning"], saved["data"]["name"]) == (
        {"name": "own_norms:Norms", "train_head": True},
        "own_stripes.READER",
    )


@pytest.mark.parametrize("override", ["tuning=:x", "data=no such:X", "tuning=a.b:", "data=1x:READER"])
def test_a_name_that_is_none_is_refused(override):
    with pytest.raises(ConfigError, match=r"neither a name nor package\.module:NAME"):
        load_config([override])


@pytest.mark.parametrize(
    ("more", "scheme"),
    [
        ([], "natural"),
        (["data.partition.min_samples=1"], "natural"),
        (["data.partition.scheme=by_domain"], "by_domain"),
        (["data.partition.clients_per_domain=3"], "by_domain"),
        (["data.partition.file=mine.csv"], "by_domain"),
        (["data.population=9"], "by_domain"),
    ],
)
def test_a_column_of_clients_makes_clients_unless_a_key_divides_the_samples(more, scheme):
    own = ["data=csv", "data.root=x", "data.columns={text: a, label: b, client: c}", *more]
    assert load_config(own).data.partition.scheme == scheme
    assert load_config([text.replace(", client: c", "") for text in own]).data.partition.scheme == "by_domain"


@pytest.mark.parametrize("name", quickly(choices("data"), [*{*choices("data")} - {"prostate"}]))
def test_every_data_set_alone_is_a_valid_experiment(name):
    config = load_config([f"data={name}", "data.root=x"])
    parts = build_parts(config)
    check_compatible(parts.server, parts.local, parts.tuning)
    reader = READERS.load(config.data.reader)
    bare = load_config([f"data={name}", "data.root=x", "model.pretrained=false"]).model
    model = skeleton(lambda: build_backbone(bare, 1, 0))
    if reader is HuggingFace:  # images, unless columns of texts are named or found
        assert model.task == CLASSIFICATION
    elif isinstance(getattr(reader, "task", None), property):  # of tables, whose columns decide
        answers = {"completion", "messages"} & {*(config.data.columns or ())}
        assert model.task == (LANGUAGE_MODELING if answers else TEXT_CLASSIFICATION)
    else:
        assert model.task == task_of(reader)
    check_task(model.task, parts.server, parts.local)
    assert (config.tuning["name"] == "full") is (model.task in (SEGMENTATION, NEXT_CHARACTER))


def test_a_data_set_alone_runs(cache, tmp_path, no_figures):
    small = (
        "model.size=32",
        "model.options={width: 2}",
        "data.limit=3",
        "data.val=1",
        "data.test=1",
        "rounds=1",
    )
    place = (f"data.cache={cache}", f"output={tmp_path / 'r'}", "cluster=inline", "data.domains=[RUNMC, HK]")
    result = rayfed.simulate(["data=prostate_mini", *small, *place])
    assert 0 < result.metrics["dice"] < 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("fedavg", "char_lstm", "full")),
        (("algorithm=qffl",), ("qffl", "char_lstm", "full")),
        (("tuning=head",), ("fedavg", "char_lstm", "head")),
        (("model=vit_mini",), ("fedavg", "vit_mini", "full")),
        (("experiment=fft_gp/pacs",), ("fft_gp", "char_lstm", "full")),
        (("algorithm=fedclip",), ("fedclip", "char_lstm", "full")),
    ],
)
def test_what_is_chosen_wins_over_what_a_data_set_brings(overrides, expected):
    for order in ([*overrides, "data=shakespeare"], ["data=shakespeare", *overrides]):
        tree = compose(order)
        assert (tree["algorithm"], tree["model"]["name"], tree["tuning"]["name"]) == expected


def test_a_data_set_on_top_of_a_saved_config_brings_its_model_and_keeps_the_method():
    saved = to_dict(load_config(["algorithm=qffl", "rounds=3"]))
    tree = compose(["data=shakespeare"], saved)
    assert (tree["algorithm"], tree["model"]["name"], tree["rounds"]) == ("qffl", "char_lstm", 3)
    assert saved["model"]["name"] == "vit_mini"


def test_the_inner_scheme_of_exits_has_a_default():
    inner = load_config(["algorithm=depthfl", "tuning.inner={rank: 3}"]).tuning["inner"]
    assert (inner["name"], inner["rank"]) == ("lora", 3)


SGD = ("sgd", 0.02)
ADAMW = ("adamw", 0.001)


def trained(*overrides):
    train = load_config(overrides).train
    return train.optimizer, train.lr


@pytest.mark.parametrize("name", TUNINGS.names())
def test_every_tuning_that_adds_tensors_brings_an_optimizer_and_its_source(name):
    file = folder() / "tuning" / f"{name}.yaml"
    assert file.exists() is (name not in ("head", "full"))
    method = "depthfl" if name == "exits" else "fedavg"
    if not file.exists():
        assert trained(f"algorithm={method}", f"tuning={name}") == SGD
        return
    brought = yaml.safe_load(file.read_text())
    assert brought["tuning"] == {"name": name}
    config = load_config([f"algorithm={method}", f"tuning={name}"])
    assert config.tuning["name"] == name
    assert {key: to_dict(config)["train"][key] for key in brought["train"]} == brought["train"]
    assert "[" in file.read_text().splitlines()[1] or "As " in file.read_text().splitlines()[1]


def test_user_then_experiment_then_method_then_tuning_say_how_a_run_trains():
    assert trained("algorithm=fedavg") == ADAMW
    assert trained("algorithm=fedavg", "tuning=head") == SGD
    assert trained("tuning=ssf", "algorithm=fedavg") == ("adamw", 0.01)
    for method in ("scaffold", "fednova", "qffl", "perfedavg"):
        assert trained(f"algorithm={method}") == SGD  # defined for steps of SGD
    assert trained("algorithm=promptfl") == ("sgd", 0.001)
    assert trained("algorithm=promptfl", "tuning=cocoop") == ("sgd", 0.001)
    assert trained("algorithm=scaffold", "train.optimizer=adamw", "train.lr=0.1") == ("adamw", 0.1)
    assert trained("experiment=fedra/table1/mini") == ("sgd", 0.01)
    assert trained("experiment=fedra/table1/mini", "algorithm=fedavg", "tuning=adapter") == ("sgd", 0.01)


def test_another_tuning_of_a_saved_config_exchanges_what_the_two_bring(tmp_path):
    file = tmp_path / "config.yaml"

    def again(*overrides, of=()):
        file.write_text(yaml.safe_dump(to_dict(load_config(of))))
        train = load_config(overrides, file).train
        return train.optimizer, train.lr, train.weight_decay, train.epochs

    lora = ("algorithm=fedavg", "train.epochs=3")
    assert again("tuning=head", of=lora) == (*SGD, 0.0, 3)
    assert again("tuning=ssf", of=lora) == ("adamw", 0.01, 5e-5, 3)
    assert again("tuning=lora", of=(*lora, "tuning=ssf")) == (*ADAMW, 0.0, 3)
    assert again("tuning=adapter", of=(*lora, "train.lr=0.5")) == ("adamw", 0.5, 0.0, 3)
    assert again("tuning=head", of=(*lora, "train.lr=0.5")) == (*SGD, 0.0, 3)
    assert again("tuning=head", "train.lr=0.5", of=lora) == ("sgd", 0.5, 0.0, 3)
    assert again("seed=1", of=(*lora, "train.lr=0.5")) == ("adamw", 0.5, 0.0, 3)
    assert again("tuning=cocoop", of=("algorithm=promptfl",)) == ("sgd", 0.001, 5e-4, 1)
