"""Spaces and sweeps: what they accept, what they refuse, and what they suggest."""

import optuna
import pytest
from optuna.trial import FixedTrial

from rayfed.errors import ConfigError
from tests.conftest import quickly
from tune.checks import check_sweep
from tune.experiment import Base
from tune.space import read_space
from tune.sweep import load_sweep, make_sweep, sweep_names

BASE = Base(("algorithm=fedprox", "cluster=inline"))
CONDITIONAL = {
    "tuning": {"choice": ["lora", "head"]},
    "tuning.rank": {"randint": [2, 4], "when": {"tuning": "lora"}},
    "tuning.dropout": {"uniform": [0, 0.5], "when": {"tuning.rank": [3, 4]}},
}


def study(seed=0):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))


def test_every_kind_stays_in_its_range():
    space = read_space(
        {
            "a": {"uniform": [-1, 2]},
            "b": {"loguniform": [0.01, 10]},
            "c": {"quniform": [0, 1, 0.25]},
            "d": {"randint": [2, 4]},
            "e": {"lograndint": [1, 100]},
            "f": {"choice": [None, 1, "x", [1, 2]]},
        }
    )
    drawn = [space.suggest(study(seed).ask()) for seed in range(60)]
    assert all(space.parameters[i].contains(v) for values in drawn for i, v in enumerate(values.values()))
    assert {values["c"] for values in drawn} == {0, 0.25, 0.5, 0.75, 1}
    assert {values["d"] for values in drawn} == {2, 3, 4}  # both ends
    assert [1, 2] in [values["f"] for values in drawn]  # a list comes back as a list
    below = sum(values["b"] < 10**-0.5 for values in drawn)
    assert 15 < below < 45  # half of the draws are below the middle of the logarithm


def test_a_condition_decides_what_exists():
    space = read_space(CONDITIONAL)
    drawn = [space.suggest(study(seed).ask()) for seed in range(40)]
    assert {tuple(values) for values in drawn} == {
        ("tuning",),
        ("tuning", "tuning.rank"),
        ("tuning", "tuning.rank", "tuning.dropout"),
    }
    assert all(("tuning.rank" in values) == (values["tuning"] == "lora") for values in drawn)
    chosen = space.select({"tuning": "head", "tuning.rank": 2})
    assert chosen == {"tuning": "head"}
    assert space.suggest(FixedTrial({"tuning": "lora", "tuning.rank": 2})) == {
        "tuning": "lora",
        "tuning.rank": 2,
    }


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, ["space", "no parameter"]),
        ({"a": 3}, ["space.a", "3", "uniform"]),
        ({"a": {"uniform": [0, 1], "choice": [1]}}, ["space.a", "exactly one"]),
        ({"a": {"unifrom": [0, 1]}}, ["space.a", "did you mean 'uniform'"]),
        ({"a": {"uniform": [1, 0]}}, ["space.a.uniform", "1 is not below 0"]),
        ({"a": {"uniform": [0]}}, ["space.a.uniform", "2 numbers"]),
        ({"a": {"loguniform": [0, 1]}}, ["space.a.loguniform", "above 0"]),
        ({"a": {"randint": [0.5, 2]}}, ["whole numbers"]),
        ({"a": {"choice": [1, 1]}}, ["space.a.choice", "once"]),
        ({"a": {"choice": "lora"}}, ["space.a.choice", "not a list"]),
        ({"a": {"uniform": [0, 1], "when": {"b": 1}}, "b": {"choice": [1]}}, ["space.a.when", "further up"]),
        (
            {"b": {"choice": [1]}, "a": {"uniform": [0, 1], "when": {"b": 2}}},
            ["space.a.when.b", "2 is never"],
        ),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_by_key(tree, words):
    with pytest.raises(ConfigError) as err:
        read_space(tree)
    assert all(word in str(err.value) for word in words), err.value


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"local.muu": {"uniform": [0, 1]}}, ["space.local.muu", "no such key", "'mu'"]),
        ({"local.mu": {"uniform": [-1, 1]}}, ["space.local.mu", "-1", "at least 0"]),
        ({"tuning": {"choice": ["lora", "loar"]}}, ["space.tuning", "'loar'", "did you mean 'lora'"]),
        ({"tuning.rank": {"choice": [4, "many"]}}, ["space.tuning.rank", "'many'"]),
    ],
)
def test_a_space_is_checked_against_the_config(tree, words):
    with pytest.raises(ConfigError) as err:
        read_space(tree).check(BASE.config)
    assert all(word in str(err.value) for word in words), err.value


def test_options_of_fedbuff_and_of_tunings_can_be_searched():
    tree = {
        "server.buffer": {"randint": [1, 10]},
        "server.staleness_power": {"uniform": [0, 1]},
        "tuning": {"choice": ["adapter", "ia3", "ssf"]},
        "tuning.bottleneck": {"lograndint": [1, 64], "when": {"tuning": "adapter"}},
    }
    base = Base(("algorithm=fedbuff", "cluster=inline"))
    read_space(tree).check(base.config)
    chosen = base.config({"server.buffer": 3, "tuning": "adapter", "tuning.bottleneck": 16})
    assert (chosen.server["buffer"], chosen.tuning["bottleneck"]) == (3, 16)
    with pytest.raises(ConfigError, match=r"space.server.buffer.*0"):
        read_space({"server.buffer": {"randint": [0, 10]}}).check(base.config)


def test_the_values_of_a_trial_become_its_config():
    config = BASE.config({"local.mu": 1e-5, "tuning": "head", "train.lr": 0.5}, seed=7)
    assert (config.local["mu"], config.tuning["name"], config.train.lr, config.seed) == (1e-5, "head", 0.5, 7)
    assert BASE.config({}).tuning["name"] == "lora"  # nothing of it stays


@pytest.mark.parametrize("name", quickly(sweep_names(), ("fedgcr", "prompts")))
def test_the_sweeps_that_ship_are_accepted_and_start_with_the_papers_values(name, tmp_path):
    sweep, overrides = load_sweep([f"sweep={name}", f"output={tmp_path / 'out'}"])
    found = check_sweep(sweep, overrides, None, tmp_path)
    assert {key: found.points[0][key] for key in sweep.default} == sweep.default
    assert found.config.evaluation.validation


def test_overrides_reach_the_sweep_or_the_experiment():
    sweep, overrides = load_sweep(
        [
            "sweep=fedgcr",
            "trials=3",
            "rounds=4",
            "seed=5",
            "sweep.seed=6",
            "scheduler.grace=2",
            "space.server.q={uniform: [0, 1]}",
            "space.local.tau=null",
            "space.train.lr={loguniform: [0.001, 0.1]}",
            "objective={accuracy: max}",
        ]
    )
    assert (sweep.trials, sweep.seed, sweep.schedule.grace, sweep.objectives) == (
        3,
        6,
        2,
        {"accuracy": "max"},
    )
    assert overrides[-2:] == ("rounds=4", "seed=5")
    space = {p.key: p for p in sweep.read_space().parameters}
    assert space["server.q"].args == (0, 1)
    assert "local.tau" not in space
    assert "train.lr" in space


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["sweep: missing", "fedgcr", "or the path of a YAML file"]),
        (["sweep=fedgrc"], ["did you mean 'fedgcr'?", "fedclip", "or give the path of a YAML file"]),
        (["sweep=mine.yaml"], ["'mine.yaml' does not exist", "or give the path of a YAML file"]),
        (["sweep=fedgrc"], ["sweep", "did you mean 'fedgcr'"]),
        (["sweep=fedgcr", "trials=0"], ["trials", "0", "at least 1"]),
        (["sweep=fedgcr", "sweep.trails=3"], ["trails", "did you mean 'trials'"]),
        (["sweep=fedgcr", "searcher=tpo"], ["searcher", "tpo"]),
        (["sweep=fedgcr", "space.rounds={randint: [1, 5]}"], ["space.rounds", "whole sweep"]),
        (["sweep=fedgcr", "space.cluster.num_gpus={choice: [1, 2]}"], ["cluster.num_gpus", "whole sweep"]),
        (
            ["sweep=fedgcr", "objective=quality"],
            ["objective: 'quality'", "'objective={quality: max}' or min"],
        ),
        (
            ["sweep=fedgcr", "objective=[accuracy, sigma_type]", "scheduler=asha"],
            ["scheduler", "one objective"],
        ),
        (["sweep=fedgcr", "rouds=3"], ["rouds", "did you mean 'rounds'"]),
        (["sweep=fedgcr", "default.server.q=99"], ["default.server.q", "99", "outside"]),
        (["sweep=fedgcr", "default.server.p=1"], ["default.server.p", "did you mean 'server.q'"]),
        (["sweep=fedgcr", "points=[{server.q: 99}]"], ["points.0.server.q", "99", "outside"]),
        (["sweep=fedclip", "points=[{tuning: residual_adapter}]"], ["points.0.tuning.multiplier", "missing"]),
        (["sweep=fedgcr", "evaluation.every=0"], ["evaluation.every"]),
        (["sweep=fedgcr", "evaluation.validation=false"], ["val_accuracy", "evaluation.validation=true"]),
        (["sweep=fedgcr", "objective=held_out_accuracy"], ["data.held_out"]),
        (["sweep=fedgcr", "scheduler.name=asha", "scheduler.grace=99"], ["scheduler.grace", "15 rounds"]),
        (["sweep=fedgcr", "protocol=leave_one_out"], ["protocol"]),
        (["sweep=fedgcr", "compare=[fedavg,afl]"], ["compare: ['fedavg', 'afl']", "runs one method"]),
        (["sweep=fedgcr", "loggers=[mlflow]"], ["loggers", "rayfed-sim[mlflow]"]),
        (
            ["sweep=fedgcr", "tuning=head"],
            ["tuning: 'head' cannot be used with algorithm=fedgcr", "tuning=gc_prompt"],
        ),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_in_one_line(arguments, words, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else real(name))
    with pytest.raises(ConfigError) as err:
        sweep, overrides = load_sweep(arguments)
        check_sweep(sweep, overrides, None, tmp_path)
    assert all(word in str(err.value) for word in words), err.value
    assert "\n" not in str(err.value)


def test_a_trial_has_no_second_method(tmp_path):
    """Else best.yaml, from which `rayfed.run` repeats a trial, would run it."""
    sweep, overrides = load_sweep(["sweep=fedclip", "model=clip_mini", "compare=[]"])
    assert not hasattr(check_sweep(sweep, overrides, None, tmp_path).config, "compare")
    base = check_sweep(sweep, ("algorithm=fedclip", "model=clip_mini"), None, tmp_path).base
    assert base.tree["compare"] == "zero_shot"
    assert not hasattr(base.config({}), "compare")


def test_a_sweep_is_read_by_the_rules_of_every_config(tmp_path):
    """1e-3 is a number in a file and in an override; a key that is there twice is refused."""
    path = tmp_path / "mine.yaml"
    path.write_text("space: {train.lr: {loguniform: [1e-3, 1]}}\n")
    overrides = ["space.train.weight_decay={loguniform: [1e-5, 1e-2]}", "default.train.lr=1e-2"]
    sweep = load_sweep([f"sweep={path}", *overrides])[0]
    assert sweep.default == {"train.lr": 0.01}
    space = {p.key: p.args for p in sweep.read_space().parameters}
    assert space == {"train.lr": (1e-3, 1), "train.weight_decay": (1e-5, 1e-2)}
    path.write_text("trials: 2\nspace: {train.lr: {uniform: [0.1, 1]}}\ntrials: 3\n")
    with pytest.raises(ConfigError, match="'trials' is there twice"):
        load_sweep([f"sweep={path}"])
    path.write_text("space: {train.lr: {uniform: [0.1, 1]}}\n")
    with pytest.raises(ConfigError, match=r"default: .* is not a YAML value"):
        load_sweep([f"sweep={path}", "default={train.lr: 0.1, train.lr: 0.2}"])


def test_directions_follow_from_names():
    sweep = make_sweep(
        {
            "space": {"train.lr": {"uniform": [0.1, 1]}},
            "objective": ["accuracy", "sigma_type", "virtual_time"],
        }
    )
    assert sweep.objectives == {"accuracy": "max", "sigma_type": "min", "virtual_time": "min"}
