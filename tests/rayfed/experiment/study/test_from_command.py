"""Studies of one command: compared methods and folds, in one session, with one table and one figure."""

import json
from pathlib import Path

import pytest
import yaml

import rayfed
from rayfed.errors import OutputClosedError
from rayfed.federation.params import digest
from rayfed.models.trunk import FeatureCache
from rayfed.record.readers import read_tensors
from rayfed.resume import main as resume
from rayfed.run import main
from rayfed.terminal.exit_code import CLOSED, STOP
from tests.conftest import SMALL, STEADY

BROKEN = "tests.rayfed.experiment.methods:BROKEN"
FEW = [text for text in SMALL if not text.startswith(("algorithm", "tuning"))]
HOW = "## How it was run"
DOMAINS = "data.domains=[plain,street]"


def cells(folder):
    """Names of the folders of the runs, in the order in which they are run."""
    return [Path(cell["folder"]).name for cell in json.loads((folder / "study.json").read_text())["cells"]]


def sha(folder):
    return digest(read_tensors(folder / "model" / "params.safetensors"))


@pytest.fixture
def command(tmp_path, cache):
    def run(*overrides, flags=()):
        own = [*FEW, DOMAINS, f"data.cache={cache}", "cluster=inline", f"output={tmp_path / 'run'}"]
        given = {text.partition("=")[0]: text for text in (*own, *overrides)}  # nothing may be given twice
        return main([*given.values(), *flags])

    return run


@pytest.mark.slow
@pytest.mark.steady
def test_exactly_what_is_listed_runs_and_is_shown_once(command, tmp_path, capsys):
    run = tmp_path / "run"
    assert command("compare=[fedavg,afl]", "figures=true", "report=true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("loading the data") for line in lines) == 1
    headings = [number for number, line in enumerate(lines) if line.startswith("client ")]
    assert len(headings) == 1
    assert lines.index("comparing fedavg, afl (2 rounds each)") < headings[0]
    assert [line for line in lines if line.startswith("cell ")] == [
        "cell 1 of 2: fedavg, seed=0",
        "cell 2 of 2: afl, seed=0",
    ]
    table = [line.split()[0] for line in lines if "  " in line and line.split()[0] in ("fedavg", "afl")]
    assert table == ["fedavg", "afl"]
    assert not [line for line in lines if line.startswith("domain")]
    assert yaml.safe_load((run / "config.yaml").read_text())["algorithm"] == "fedavg"
    assert {path.name for path in (run / "cells").iterdir()} == {"fedavg-seed0", "afl-seed0"}
    assert (run / "figures" / "comparison.png").exists()
    assert f"everything on one page: {run}/report.html" in lines
    assert [*run.rglob("report.html")] == [run / "report.html"]  # one page about both
    assert "afl, seed 0" in (run / "report.html").read_text()
    report = (run / "report.md").read_text()
    assert report.startswith("# fedavg, afl on digits-five-mini")
    assert "figures/comparison.png" in report
    assert "- `sigma_client`: population standard deviation" in report
    assert "\n4 rounds of 2 runs in " in report


def test_an_algorithm_that_is_given_runs_first(command, tmp_path, capsys):
    assert command("algorithm=fedprox", "compare=[fedavg,fedprox]", "rounds=1") == 0
    shown = capsys.readouterr().out
    assert shown.count(f"everything on one page: python -m rayfed.report {tmp_path / 'run'}\n") == 1
    assert "\ncomparing fedprox, fedavg (1 round each)\n" in shown
    assert cells(tmp_path / "run") == ["fedprox-seed0", "fedavg-seed0"]


@pytest.mark.parametrize("tuning", ["head", pytest.param("lora", marks=STEADY)])
def test_every_result_is_that_of_the_run_alone(tuning, small, tmp_path):
    """With features from a disk that an earlier method filled, too."""
    fresh = [f"data.cache={tmp_path / 'cache'}", f"tuning={tuning}", "tuning.rank=2"]
    fresh = fresh if tuning == "lora" else fresh[:2]
    names = ("fedavg", "afl", "fedprox")
    plain = [text for text in SMALL if not text.startswith("tuning")]
    together = tmp_path / "together"
    listed = ("compare=[fedavg,afl,fedprox]", "cluster=inline", f"output={together}")
    assert main([*[text for text in plain if not text.startswith("algorithm")], *fresh, *listed]) == 0
    for name in names:
        path = tmp_path / f"alone-{name}"
        chosen = [f"algorithm={name}", "cluster=inline", f"output={path}"]
        alone = rayfed.simulate([*plain, *fresh, *chosen])
        assert sha(together / "cells" / f"{name}-seed0") == alone.sha256


def test_methods_encode_every_image_once(command, tmp_path, monkeypatch):
    written = []
    put = FeatureCache.__setitem__
    monkeypatch.setattr(
        FeatureCache, "__setitem__", lambda self, key, value: (written.append(key), put(self, key, value))
    )
    fresh = f"data.cache={tmp_path / 'cache'}"
    assert command("compare=[fedavg,afl,fedprox]", "tuning=head", "rounds=1", fresh) == 0
    files = list((tmp_path / "cache").rglob("*.npy"))
    assert len(written) == len(set(written)) > 0
    assert len(files) <= len(written)


def test_a_method_that_fails_loses_nothing_of_the_others(command, tmp_path, capsys):
    run = tmp_path / "run"
    assert command(f"compare=[fedavg,{BROKEN},afl]") == 1
    shown = capsys.readouterr()
    (error,) = shown.err.strip().splitlines()
    assert "1 of 3 methods failed" in error
    assert BROKEN in error
    assert "no weight is left" in error
    assert f"rayfed.resume {run}" in error
    for name in ("fedavg", "afl"):
        assert (run / "cells" / f"{name}-seed0" / "model" / "params.safetensors").exists()
    report = (run / "report.md").read_text()
    assert f"{BROKEN}: 0 of 2 rounds are finished" in report
    assert "| afl |" in report


def test_the_main_method_may_be_the_one_that_fails(command, tmp_path, capsys):
    assert command(f"algorithm={BROKEN}", "compare=[fedavg]") == 1
    assert "1 of 2 methods failed" in capsys.readouterr().err
    assert (tmp_path / "run" / "cells" / "fedavg-seed0" / "model" / "params.safetensors").exists()
    assert "| fedavg |" in (tmp_path / "run" / "report.md").read_text()


def test_a_comparison_ends_where_nobody_reads_its_output(command, tmp_path, monkeypatch):
    def closed(*args):
        raise OutputClosedError("the output is no longer read")

    monkeypatch.setattr("rayfed.experiment.runner.run_alone", closed)
    assert command("compare=[fedavg,afl]") == CLOSED
    assert not list((tmp_path / "run" / "cells").glob("*/model"))


def test_an_interrupted_comparison_goes_on_with_the_method_where_it_stopped(
    command, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    assert command("compare=[fedavg,afl,fedprox]") == 0
    wanted = {name: sha(run / "cells" / name) for name in cells(run)}
    report = (run / "report.md").read_text()
    seen = []

    def stop_in_the_second_method(row, rounds):
        seen.append(row["round"])
        if len(seen) == 3:
            STOP.set()
        return ""

    monkeypatch.setattr("rayfed.terminal.console.line", stop_in_the_second_method)
    assert command("compare=[fedavg,afl,fedprox]", "overwrite=true") == 130
    assert f"continue with: python -m rayfed.resume {run}\n" in capsys.readouterr().err
    monkeypatch.undo()
    assert not (run / "cells" / "fedprox-seed0").exists()
    history = run / "cells" / "fedavg-seed0" / "history" / "000001.json.gz"
    first = history.stat().st_mtime_ns
    assert resume([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("round")] == ["2/2", "1/2", "2/2"]
    assert {name: sha(run / "cells" / name) for name in wanted} == wanted
    assert (run / "report.md").read_text().split(HOW)[0] == report.split(HOW)[0]
    assert history.stat().st_mtime_ns == first


@pytest.mark.slow
@pytest.mark.steady
def test_folds_have_one_table_of_clients_and_figures_of_all(command, tmp_path, capsys):
    run = tmp_path / "run"
    folds = ("protocol=leave_one_out", "data.val=4")
    assert command("compare=[fedavg,afl]", "rounds=1", "figures=true", *folds) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("holding out plain, street in turn: fedavg, afl (1 round each)") == 1
    assert sum(line.startswith("client ") for line in lines) == 1
    assert sum(line.startswith("held out") and "method" in line for line in lines) == 1
    assert sum(line.startswith("comparing") for line in lines) == 0
    assert {path.name for path in (run / "figures").iterdir()} == {"folds.png", "folds_by_round.png"}
    report = (run / "report.md").read_text()
    assert "figures/folds.png" in report
    assert "- `cells/afl-plain-seed0`: the run of afl with plain held out\n" in report
    assert "4 rounds of 4 runs in " in report
    assert "    python -m rayfed.run " in report


def test_the_table_of_clients_marks_those_that_never_train(command, capsys, monkeypatch):
    few = ("protocol=unseen_clients", "compare=[]", "data.partition.clients_per_domain=2", "data.val=0")

    def first_words(*share):
        command(*few, *share, "rounds=1", "evaluation.every=0", "evaluation.local_steps=1", "tuning=head")
        return capsys.readouterr().out.splitlines()

    lines = first_words("data.unseen_clients=[2]")
    (unseen,) = {line for line in lines if line.startswith("never train")}
    assert unseen.startswith("never train (data.unseen_clients): c0")
    marked = [line.split()[0] for line in lines if "(unseen)" in line]
    assert ", ".join(marked) == unseen.partition(": ")[2]
    assert sum(line.startswith("client ") for line in lines) == 1

    def fails(*args):
        raise ValueError("not run")

    monkeypatch.setattr("rayfed.experiment.runner.Runner.run", fails)
    lines = first_words("data.unseen_clients=[0,1,2]", "overwrite=true")
    assert not [line for line in lines if "(unseen)" in line]
    assert f"unseen-2: {unseen}" in lines
    assert [line.partition(":")[0] for line in lines if "never train" in line] == ["unseen-1", "unseen-2"]


def test_a_fold_that_fails_loses_nothing_of_the_others(command, tmp_path, capsys, monkeypatch):
    from rayfed.experiment import runner

    alone = runner.run_alone

    def fail_once(config, *rest):
        if config.data.held_out == "plain":
            raise ArithmeticError("as it happens")
        return alone(config, *rest)

    monkeypatch.setattr(runner, "run_alone", fail_once)
    folds = ("protocol=leave_one_out", "data.val=4", "algorithm=fedavg", "rounds=1")
    assert command(*folds) == 1
    assert (
        "1 of 2 runs failed: plain: ArithmeticError: as it happens (test_from_command.py, line"
        in capsys.readouterr().err
    )
    assert "| street | fedavg |" in (tmp_path / "run" / "report.md").read_text()
    monkeypatch.undo()
    assert resume([str(tmp_path / "run"), "--quiet"]) == 0
    assert "| plain | fedavg |" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
def test_all_methods_run_on_one_ray_and_on_the_same_actors(command, tmp_path, ray_cluster, capsys):
    """After a method that failed, new actors are started."""
    names = ("fedavg", "afl", BROKEN, "fedprox")
    listed = f"compare=[{','.join(names)}]"
    wanted = {}
    assert command(listed, "tuning=head", "rounds=1") == 1
    for name in ("fedavg", "afl", "fedprox"):
        wanted[name] = sha(tmp_path / "run" / "cells" / f"{name}-seed0")
    capsys.readouterr()
    there = tmp_path / "there"
    on_ray = ("cluster=local", "cluster.actors=2", "cluster.cpus_per_actor=0.1", f"output={there}")
    assert command(listed, "tuning=head", "rounds=1", *on_ray) == 1
    shown = capsys.readouterr()
    assert "1 of 4 methods failed" in shown.err
    assert shown.out.count("2 client actors with") == 2
    assert {name: sha(there / "cells" / f"{name}-seed0") for name in wanted} == wanted


@pytest.mark.parametrize("where", ["cluster=local", "cluster=inline"])
def test_a_dry_run_says_that_it_asks_no_cluster(where, command, capsys, monkeypatch):
    monkeypatch.setattr("rayfed.experiment.runner.check", lambda *_: None)
    assert command("algorithm=fedavg", where, "cluster.address=127.0.0.1:9", flags=("--dry-run",)) == 0
    said = "not checked: whether it fits on the cluster; see python -m rayfed.doctor"
    assert (said in capsys.readouterr().out) is (where == "cluster=local")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("capacity=99", "capacity: "),  # more blocks than the network has
        ("train.batch_size=4", ""),
        ("data.root=nowhere", "data.root: "),
        ("output=taken", "taken"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(command, tmp_path, capsys, monkeypatch, override, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("not a run")
    code = command("algorithm=fedavg", "tuning=lora", override, flags=("--dry-run",))
    out, err = capsys.readouterr()
    assert "fedavg" in out
    assert (code, said in err) == ((2, True) if said else (0, True))
    assert ("checked: config, data, model and folder" in out) is not bool(said)
    assert not (tmp_path / "run").exists()
