"""Equal work: how many rounds make it equal, what is refused, and what runs have afterwards."""

from dataclasses import replace

import pytest

import rayfed
from rayfed.columns import WORK, work_in
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.engine.measure_work import Work, work_of_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.equal_work import RunWork, equal_rounds
from rayfed.experiment.plan import make_plan
from rayfed.experiment.study import equal_cells
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.federation.method_registry import METHODS
from rayfed.record.readers import read_rows, read_yaml
from rayfed.report.work_notes import equal_notes, mean_work
from rayfed.resume import main as resume
from rayfed.run import main as run
from rayfed.testing import DOMAINS, small_setup
from tests.conftest import SMALL, STEADY, quickly

QUICK = ("fedavg", "fedbuff", "feddpa", "ditto")
OWN = {"fedbuff": ("server.buffer=2",)}
UNITS = ("steps", "examples", "flops", "bytes")
UNEQUAL = ("data.partition.scheme=imbalanced", "data.partition.factor=3", "train.batch_size=4")
FASTER = {"fedbuff": ("flops", "bytes")}
"""What is less than expected where clients that hold less of the model answer more often than others."""
BY_EXCHANGE = ("faa", "fedmix", "fft_gp", "slora")
"""Methods whose messages grow with the number of clients, or change in the middle of a run."""

BY_ANSWERS = ("fedgc", "fedgcr", "lora_a2")
"""Methods whose messages follow from answers: from the number of groups, or from which ranks are sent."""


def counted(rows):
    return {unit: work_in(unit, rows) for unit in UNITS}


@pytest.mark.parametrize("name", quickly(METHODS.names(), (*QUICK, "bgp")))
@pytest.mark.parametrize("capacity", [(), pytest.param(("capacity=[4,2,1]",), marks=STEADY)])
def test_the_work_of_rounds_is_that_of_a_run(name, capacity, cache):
    """Of every method; all clients train, and those that hold less of the model do less."""
    common = (f"algorithm={name}", DOMAINS, "rounds=5", "evaluation.every=0", *OWN.get(name, ()))
    try:
        setup = small_setup(*common, *capacity, f"data.cache={cache}")
    except ConfigError:
        assert capacity  # some methods need whole models
        return
    rounds = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    found = counted([each.row for each in rounds])
    first, later = work_of_rounds(setup)
    expected = first + later.times(4)
    for unit, value in found.items():
        if (unit == "bytes" and name in BY_EXCHANGE) or (capacity and unit in FASTER.get(name, ())):
            continue
        within = 0.05 if name == "fedbuff" else 0.001  # which clients answer first is drawn
        within = 0.01 if unit == "bytes" and name in BY_ANSWERS else within
        assert getattr(expected, unit) == pytest.approx(value, rel=within), unit


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "bgp"])
def test_the_work_of_clients_of_unequal_size_is_that_of_a_run(algorithm, tmp_path, cache):
    chosen = [text for text in SMALL if not text.startswith("algorithm=")]
    chosen += [f"algorithm={algorithm}", "cluster=inline", f"data.cache={cache}", "tensorboard=false"]
    plan = make_plan(load_config([*chosen, *UNEQUAL]), tmp_path / "plan")
    assert run([*chosen, *UNEQUAL, f"output={tmp_path / 'run'}"]) == 0
    first, later = work_of_rounds(plan.setup)
    found = counted(read_rows(tmp_path / "run"))
    expected = {unit: getattr(first + later, unit) for unit in UNITS}
    assert expected == pytest.approx(found)


def test_works_add_up():
    one = Work(steps=1, examples=2, flops=3, bytes=4)
    assert one + one.times(2) == Work(steps=3, examples=6, flops=9, bytes=12)
    assert (one + replace(one, flops=None)).flops is None


def works(rounds, first, later):
    return [RunWork(rounds=rounds, first=first, later=later)]


def test_rows_get_the_rounds_that_are_nearest_to_the_most_work():
    rows = {
        "two": works(8, 10.0, 20.0),  # 150
        "plain": works(8, 10.0, 10.0),  # 80: 15 rounds
        "early": works(8, 6.0, 6.0),  # 48: 25 rounds
        "none": works(1, 0.0, 0.0),
    }
    assert equal_rounds(rows, "steps") == {"two": [8], "plain": [15], "early": [25], "none": [1]}
    assert equal_rounds({"none": works(3, 0.0, 0.0)}, "steps") == {"none": [3]}
    parts = {"a": [*works(4, 1.0, 1.0), *works(8, 1.0, 1.0)], "b": [*works(4, 2.0, 2.0), *works(8, 2.0, 2.0)]}
    assert equal_rounds(parts, "steps") == {"a": [8, 16], "b": [4, 8]}


def test_a_row_that_would_need_too_many_rounds_is_refused():
    rows = {"seeds": works(4, 1.0, 1.0), "tensors": works(4, 500.0, 500.0)}
    with pytest.raises(
        ConfigError, match=r"^equal: bytes: seeds would need 500 times its rounds for as many"
    ):
        equal_rounds(rows, "bytes")


def test_operations_that_were_not_counted_are_refused(cache):
    setup = small_setup("algorithm=fedavg", DOMAINS, f"data.cache={cache}")
    bare = replace(setup, experiment=replace(setup.experiment, cost=None))
    from rayfed.experiment.equal_work import expected_work

    assert expected_work(setup, "mine", "flops").first > 0
    with pytest.raises(ConfigError, match=r"^equal: flops: the operations of mine cannot be counted; set"):
        expected_work(bare, "mine", "flops")


FOUR = ("compare=[fedavg,fedbuff,feddpa,ditto]", "server.buffer=3", "clients_per_round=all")


@pytest.mark.parametrize(
    "unit", ["examples", *(pytest.param(unit, marks=STEADY) for unit in ("steps", "flops"))]
)
def test_four_methods_have_equal_work_to_one_round_which_the_table_states(unit, tmp_path, cache, capsys):
    """FedBuff ends a round early, FedDPA trains two models from the second round on, Ditto always."""
    chosen = [text for text in SMALL if not text.startswith(("algorithm=", "rounds="))]
    chosen += ["cluster=inline", f"data.cache={cache}", "tensorboard=false", "rounds=4", *UNEQUAL]
    folder = tmp_path / "run"
    assert run([*chosen, *FOUR, f"equal={unit}", f"output={folder}"]) == 0
    found = {name: read_rows(folder / "cells" / f"{name}-seed0") for name in QUICK}
    rounds = {name: len(rows) for name, rows in found.items()}
    assert rounds["ditto"] == 4
    assert rounds["feddpa"] in (4, 5)
    assert rounds["fedavg"] == 8
    assert rounds["fedbuff"] > 8
    total = {name: work_in(unit, rows) for name, rows in found.items()}
    one_round = max(total[name] / rounds[name] for name in QUICK)
    assert max(total.values()) - min(total.values()) <= one_round
    said = " ".join(capsys.readouterr().out.split())
    assert f"equal={unit}, to one round: fedavg {total['fedavg']:,.0f} in 8 rounds of" in said
    assert "more than a round" not in said
    study = rayfed.load(folder)
    [note] = [text for text in study.notes if text.startswith(f"equal={unit}")]
    assert f"ditto {total['ditto']:,.0f} in 4 rounds of {total['ditto'] / 4:,.0f}" in note
    assert study.table.loc["feddpa", WORK[unit][0].pattern] == total["feddpa"]
    before = (folder / "cells" / "fedavg-seed0" / "rounds.jsonl").read_bytes()
    assert resume([str(folder)]) == 0
    assert (folder / "cells" / "fedavg-seed0" / "rounds.jsonl").read_bytes() == before


def test_bytes_are_equal_from_python_too(tmp_path, cache):
    common = {
        "data": "digits_five_mini",
        "data.cache": str(cache),
        "data.limit": 24,
        "model.options": {"depth": 4},
        "model.pretrained": False,
        "tuning": "lora",
        "rounds": 3,
        "cluster": "inline",
    }
    both = [rayfed.Experiment(method=name, **common) for name in ("fedavg", "scaffold")]
    study = rayfed.compare(both, equal="bytes", output=tmp_path / "both", quiet=True)
    table = study.table
    assert table.loc["scaffold", "local_steps"] < table.loc["fedavg", "local_steps"]
    rounds = {name: len(runs[0].history) for name, runs in study.rows.items()}
    assert rounds["scaffold"] == 3 < rounds["fedavg"]
    most = table["bytes"].max()
    assert most - table["bytes"].min() <= max(table["bytes"] / [rounds[name] for name in table.index])
    again = rayfed.load(tmp_path / "both")
    assert again.run(tmp_path / "both", quiet=True).table["bytes"].tolist() == table["bytes"].tolist()
    with pytest.raises(ConfigError, match=r"^equal: .*epochs.*steps"):
        rayfed.compare(both, equal="epochs")


def test_equal_work_of_one_method_is_refused_and_the_former_name_says_the_new_one(tmp_path, cache, capsys):
    chosen = [*SMALL, "cluster=inline", f"data.cache={cache}"]
    assert run([*chosen, "equal=steps", f"output={tmp_path / 'other'}"]) == 2
    assert "equal: nothing is compared" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert run([*chosen, "compare=[fedavg,bgp]", "equal_steps=true"]) == 2
    assert "equal_steps: True is equal=steps now" in capsys.readouterr().err
    assert load_config([*chosen, "equal_steps=false"]) == load_config(chosen)
    with pytest.raises(ConfigError, match=r"^equal: 'epochs'"):
        load_config([*chosen, "equal=epochs"])


def test_an_earlier_study_keeps_its_rounds_when_it_is_opened(tmp_path, cache):
    chosen = [text for text in SMALL if not text.startswith("algorithm=")]
    chosen += ["cluster=inline", f"data.cache={cache}", "tensorboard=false"]
    assert run([*chosen, "compare=[fedavg,bgp]", "equal=steps", f"output={tmp_path / 'run'}"]) == 0
    study = rayfed.load(tmp_path / "run")
    digests = {key: one.sha256 for key, one in study.finished.items()}
    study.run(tmp_path / "run", quiet=True)
    assert {key: one.sha256 for key, one in study.finished.items()} == digests
    assert read_yaml(tmp_path / "run" / "cells" / "fedavg-seed0" / "config.yaml")["rounds"] == 4


def test_a_setting_with_one_method_stays_as_it_is_where_another_one_compares(monkeypatch):
    once = load_config(["rounds=2"]).alone()
    cells = {
        ("a", "x", 0): once,
        ("b", "x", 0): once,
        ("a", "y", 0): once,
        ("a", "x", 1): replace(once, seed=1),
    }

    def work(setup, name, unit):
        assert setup.seed == 0
        return RunWork(rounds=setup.rounds, first=1.0 + (name == "b"), later=1.0 + (name == "b"))

    monkeypatch.setattr(equal_cells, "expected_work", work)

    def equally(cells):
        names = ("method", "setting", "seed")
        alone = lambda config, common: (config,)  # noqa: E731
        return equal_cells.with_equal_work(cells, names, (), "steps", CommonParts(), alone)

    found = {key: config.rounds for key, config in equally(cells).items()}
    assert found == {("a", "x", 0): 4, ("b", "x", 0): 2, ("a", "y", 0): 2, ("a", "x", 1): 4}
    with pytest.raises(ConfigError, match="nothing is compared"):
        equally({key: config for key, config in cells.items() if key[0] == "a"})


def test_the_note_says_where_the_work_is_not_equal():
    def rows(number, steps):
        return [{"local_steps": steps}] * number

    [fine] = equal_notes([{"a": [rows(4, 10)], "b": [rows(5, 9)], "none": [rows(1, 0)]}], "steps")
    assert fine == "equal=steps, to one round: a 40 in 4 rounds of 10; b 45 in 5 rounds of 9"
    _, apart = equal_notes([{"a": [rows(4, 10)], "b": [rows(5, 5)]}], "steps")
    assert apart.startswith("b has 38% fewer steps than a, more than a round")


def test_work_that_was_not_counted_is_left_out():
    found = mean_work([[{"local_steps": 2, "bytes_up": 1, "bytes_down": 2}], [{"local_steps": 4}]])
    assert (found["local_steps"], found["bytes"], found["flops"], found["local_tokens"]) == (
        3,
        1.5,
        None,
        None,
    )
