"""Equal numbers of steps: what makes them equal, and what is refused; worked out by hand."""

from dataclasses import replace

import pytest

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.experiment.equal_steps import batches_of, passes, with_passes
from rayfed.experiment.plan import make_plan
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.record.readers import read_rows, read_yaml
from rayfed.report.final_table import total_steps
from rayfed.resume import main as resume
from rayfed.run import main as run
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def config():
    return load_config(["algorithm=fedavg", "cluster=inline"])


def test_rows_train_as_often_as_the_one_that_trains_most():
    assert passes({"a": 300.0, "b": 100.0, "c": 0.0}) == {"a": 1, "b": 3, "c": 1}
    assert passes({"none": 0.0}) == {"none": 1}


def test_a_part_of_a_pass_is_refused():
    with pytest.raises(
        ConfigError, match=r"^equal_steps: a trains on 1\.5 times as many batches as b, which"
    ):
        passes({"a": 300.0, "b": 200.0})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"epochs": 2}, {"epochs": 6}),
        ({"local_steps": 5}, {"local_steps": 15}),
        ({"epochs": 1, "max_steps": 4}, {"epochs": 3, "max_steps": 12}),
    ],
)
def test_steps_are_multiplied(config, before, after):
    given = replace(config, train=replace(config.train, **before))
    assert with_passes(given, "row", 3).train == replace(given.train, **after)
    assert with_passes(given, "row", 1) == given
    assert with_passes(given, "row", 3).train.steps(100) == 3 * given.train.steps(100)


def test_steps_that_depend_on_other_clients_are_refused(config):
    given = replace(config, train=replace(config.train, local_steps="min_over_clients_plus_one"))
    with pytest.raises(ConfigError, match=r"^equal_steps: the steps of AFL depend on the smallest client"):
        with_passes(given, "AFL", 2)


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "bgp"])
def test_the_batches_are_those_that_a_run_takes(algorithm, tmp_path, cache):
    """Clients are of unequal size, so that the mean over them counts."""
    chosen = [text for text in SMALL if not text.startswith("algorithm=")]
    chosen += [f"algorithm={algorithm}", "cluster=inline", f"data.cache={cache}", "tensorboard=false"]
    chosen += ["data.partition.scheme=imbalanced", "data.partition.factor=3", "train.batch_size=4"]
    plan = make_plan(load_config(chosen), tmp_path / "plan")
    assert run([*chosen, f"output={tmp_path / 'run'}"]) == 0
    assert batches_of((plan.setup,)) == pytest.approx(total_steps(read_rows(tmp_path / "run"))[0])


def test_compared_methods_train_as_often_as_the_one_that_trains_most(tmp_path, cache, capsys):
    """In any order; each round of both is the same when the command is given again."""
    chosen = [text for text in SMALL if not text.startswith("algorithm=")]
    chosen += ["cluster=inline", f"data.cache={cache}", "tensorboard=false", "equal_steps=true"]
    folder = tmp_path / "run"
    assert run([*chosen, "compare=[fedavg,bgp]", f"output={folder}"]) == 0
    fedavg, bgp = (folder / "cells" / f"{name}-seed0" for name in ("fedavg", "bgp"))
    assert total_steps(read_rows(fedavg)) == total_steps(read_rows(bgp))
    assert read_yaml(bgp / "config.yaml")["train"]["epochs"] == 1
    assert read_yaml(fedavg / "config.yaml")["train"]["epochs"] == 2
    before = (fedavg / "rounds.jsonl").read_bytes()
    assert resume([str(folder)]) == 0
    assert (fedavg / "rounds.jsonl").read_bytes() == before
    capsys.readouterr()
    assert run([*chosen, "algorithm=fedavg", f"output={tmp_path / 'other'}"]) == 2
    assert "equal_steps: nothing is compared" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_setting_with_one_method_stays_as_it_is_where_another_one_compares(monkeypatch):
    from rayfed.experiment.study import equal_cells

    once = load_config(["train.epochs=1"]).alone()
    twice = load_config(["train.epochs=2"]).alone()
    cells = {("a", "x", 0): once, ("b", "x", 0): twice, ("a", "y", 0): once}
    monkeypatch.setattr(equal_cells, "batches_of", lambda setups: sum(each.train.epochs for each in setups))

    def equally(cells):
        names = ("method", "setting", "seed")
        return equal_cells.equally_trained(cells, names, (), CommonParts(), lambda config, common: (config,))

    found = {key: config.train.epochs for key, config in equally(cells).items()}
    assert found == {("a", "x", 0): 2, ("b", "x", 0): 2, ("a", "y", 0): 1}
    with pytest.raises(ConfigError, match="nothing is compared"):
        equally({key: config for key, config in cells.items() if key[0] == "a"})
