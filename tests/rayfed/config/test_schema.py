"""Composition: groups, values, saved configs, and the frozen surface."""

import dataclasses

import pytest
import yaml

from rayfed.config.compose import compose, folder
from rayfed.config.schema import Config, ConfigError, Request, build_parts, load_config, to_dict
from rayfed.federation.executor import Policy
from tests.conftest import refused


def test_the_default_experiment():
    config = load_config()
    assert (config.algorithm, config.data.name, config.model.name) == (
        "fedgcr",
        "digits-five-mini",
        "vit_mini",
    )
    assert (config.data.partition.scheme, config.data.partition.factor) == ("imbalanced", 5)
    assert config.cluster.executor == "ray"


def test_values_win_over_groups_whatever_the_order():
    for overrides in (["local.mu=0.5", "algorithm=fedprox"], ["algorithm=fedprox", "local.mu=0.5"]):
        wanted = {"name": "fedprox", "mu": 0.5, "form": "squared", "stays": []}
        assert load_config(overrides).local == wanted


def test_halves_are_exchanged_by_name():
    config = load_config(["algorithm=fedprox", "server.name=fedavg", "server.weighting=uniform"])
    parts = build_parts(config)
    assert (type(parts.local).__name__, parts.server.weighting) == ("FedProx", "uniform")


def test_any_timm_model_by_name():
    assert (
        load_config(["model=deit_tiny_patch16_224", "model.pretrained=false"]).model.name
        == "deit_tiny_patch16_224"
    )


def test_numbers_are_read_as_people_write_them():
    config = load_config(["train.lr=1e-3", "train.clip_norm=null", "train.local_steps=5", "data.val=0"])
    assert (config.train.lr, config.train.clip_norm, config.train.local_steps) == (0.001, None, 5)


def test_a_saved_config_is_complete_and_loads_to_the_same(tmp_path):
    config = load_config(
        ["algorithm=fedprox", "local.mu=0.5", "capacity={12: 1, 6: 2}", "clients_per_round=3"]
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(config)))
    assert load_config([], file) == config
    assert set(to_dict(config)) == {f.name for f in dataclasses.fields(Request)}


def test_a_group_on_top_of_a_saved_config_replaces_its_sections(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(load_config(["algorithm=fedprox", "tuning=head", "rounds=3"]))))
    config = load_config(["algorithm=fedavg"], file)
    assert (config.algorithm, config.local, config.tuning["name"], config.rounds) == (
        "fedavg",
        {"name": "fedavg", "stays": []},
        "head",
        3,
    )
    assert load_config(["tuning=lora", "tuning.rank=3"], file).tuning["rank"] == 3


FILES = [(p.relative_to(folder()).parts[0], p) for p in sorted(folder().rglob("*/*.yaml"))]
FILES = [(group, p) for group, p in FILES if group not in ("sweep", "papers")]  # tests of their own
NEEDS = {"timm": ["model.name=resnet18"], "image_folder": ["data.root=x"], "pacs": ["data.root=x"]}


@pytest.mark.parametrize(("group", "path"), FILES, ids=[str(p.relative_to(folder())) for _, p in FILES])
def test_every_config_that_ships_composes(group, path):
    name = str(path.relative_to(folder() / group).with_suffix(""))
    config = load_config([f"{group}={name}", *NEEDS.get(path.stem, [])])
    build_parts(config)


def test_unknown_names_suggest_and_list():
    with pytest.raises(ConfigError, match=r"did you mean 'fedprox'.*fedavg"):
        compose(["algorithm=fedprx"])
    with pytest.raises(ConfigError, match=r"^protocol: 'fewshot' is not .*; did you mean 'few_shot'\?$"):
        load_config(["protocol=fewshot"])


SURFACE = (
    *(
        "algorithm",
        "server",
        "local",
        "tuning",
        "model",
        "data",
        "head",
        "task",
        "train",
        "evaluation",
        "cluster",
        "rounds",
        "seed",
    ),
    *("clients_per_round", "sampling", "channel", "privacy", "capacity"),
    *("faults", "deterministic"),
    *("stop", "checkpoint", "failures", "on_nonfinite", "tensorboard", "figures", "report", "trackers"),
    *("output", "overwrite"),
)


def test_the_surface_grows_on_purpose_only():
    request = load_config([])
    assert tuple(to_dict(request.alone())) == SURFACE  # in the order of config.yaml
    more = ("compare", "compare_options", "equal", "protocol")
    assert tuple(to_dict(request)) == (*SURFACE, *more)
    assert {f.name for f in dataclasses.fields(Config)} == set(SURFACE)


def test_the_config_of_a_run_has_nothing_of_a_command_with_several():
    request = load_config(["compare=[fedavg,fedprox]", "protocol=few_shot", "data.shots=[1]", "rounds=3"])
    alone = request.alone()
    assert (type(alone), alone.rounds, request.protocol) == (Config, 3, "few_shot")
    assert set(to_dict(request)) - set(to_dict(alone)) == {
        "compare",
        "compare_options",
        "equal",
        "protocol",
    }
    assert Request.of(alone, "few_shot").alone() == alone
    assert Request.of(alone, "few_shot").protocol == "few_shot"


def test_the_policy_of_failures_is_the_section():
    config = load_config(["failures.on_client_error=drop", "failures.retries=5", "failures.watchdog=null"])
    assert config.failures == Policy(on_client_error="drop", retries=5, watchdog=None)
    assert load_config([]).failures == Policy()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("failures.on_client_error=ignore", "failures.on_client_error: 'ignore'"),
        ("failures.retries=-1", "failures.retries: -1"),
        ("failures.client_timeout=0", "failures.client_timeout: 0"),
        ("failures.watchdog=-5", "failures.watchdog: -5"),
        ("failures.patience=0", "failures.patience: 0"),
    ],
)
def test_a_policy_out_of_range_is_refused(override, words):
    assert words in refused(override)


@pytest.mark.parametrize("value", ["x", "[1]", "1.5", "true"])
def test_a_population_that_is_none_says_what_is_allowed(value):
    with pytest.raises(
        ConfigError, match=r"data\.population=1000, or .*keys of the section: size, sigma, alpha"
    ):
        load_config([f"data.population={value}"])
