"""Executors by their facts: those that ship, and one of a user, which is one file with one row."""

import re
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import yaml

import rayfed
import tune
from rayfed.config.schema import load_config
from rayfed.doctor import main as doctor
from rayfed.errors import ConfigError
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.kinds.base import EXECUTORS, ExecutorKind, kind_of
from rayfed.experiment.diagnosis import _lanes
from rayfed.experiment.plan import prepared
from rayfed.experiment.study.cluster_share import share
from rayfed.experiment.study.side_by_side import SideBySide, side_by_side
from rayfed.resume import main as resume
from rayfed.run import main as run
from tests.conftest import ROOT, SMALL, refused
from tests.test_contributing import RECIPES
from tune.resources import Demand, bundles

NAME = "mine.shortest_first:EXECUTOR"
FILE = "mine/shortest_first.py"
"""The executor of the page, in a folder of a user."""


@pytest.fixture
def own_folder(tmp_path, cache, monkeypatch):
    """A folder that holds the executor and nothing else, in which commands are started."""
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(RECIPES[FILE])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def experiment(cluster, **given):
    return rayfed.Experiment(
        method="scaffold",
        model="vit_mini",
        tuning="head",
        cluster=cluster,
        train={"optimizer": "sgd", "lr": 0.02, "momentum": 0.0, "max_steps": 2},
        **{"data.limit": 24, "rounds": 2, **given},
    )


def calls_in(monkeypatch, work):
    """The clients that executors in this process were given in each call of `map` while `work` ran."""
    given = []
    plain = InlineExecutor.map

    def spied(self, calls):
        given.append([call.client for call in calls])
        return plain(self, calls)

    with monkeypatch.context() as patch:
        patch.setattr(InlineExecutor, "map", spied)
        work()
    return given


def test_every_executor_that_ships_is_a_row_of_its_facts():
    assert EXECUTORS.names() == ["inline", "ray"]
    inline, on_ray = map(EXECUTORS.load, EXECUTORS.names())
    assert (inline.needs_cluster, on_ray.needs_cluster) == (False, True)
    assert inline.make is InlineExecutor
    assert load_config(["cluster=ray"]) == load_config(["cluster=local"]) == load_config([])


@pytest.mark.slow
@pytest.mark.steady
def test_a_config_of_any_executor_imports_no_ray():
    program = (
        "import sys; from rayfed.config.schema import load_config; "
        "load_config(['cluster=local']); load_config(['cluster=inline']); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_no_module_asks_for_the_name_of_an_executor():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("rayfed", "tune")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"executor *(==|!=|in )", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cluster.executor=slurm", "cluster.executor: 'slurm' does not exist. Choose one of: inline, ray"),
        ("cluster=slurm", "cluster: 'slurm' does not exist. Choose one of: inline, local, ray"),
        ("cluster=mine.py", "for the file mine.py here write mine:EXECUTOR"),
        ("cluster=nowhere:EXECUTOR", "cluster.executor: 'nowhere:EXECUTOR': there is no module 'nowhere'"),
        ("cluster=rayfed.executors.inline:InlineExecutor", "is not an executor, such as EXECUTOR = "),
    ],
)
def test_what_is_no_executor_is_refused_before_the_run(value, message):
    assert message in refused(value)


def test_an_executor_says_what_of_the_config_it_refuses(cache, own_folder):
    wanted = [*SMALL, "cluster.device=cuda:7"]
    with pytest.raises(ConfigError, match=r"^cluster\.device: 'cuda:7' is for cluster=inline"):
        prepared(load_config(wanted).alone())
    with pytest.raises(ConfigError, match=r"^cluster\.device: 'cuda:7' (cannot be used|does not exist)"):
        prepared(load_config([*wanted, "cluster=inline"]).alone())
    with (own_folder / FILE).open("a") as file:
        file.write(
            "\n\ndef alone(cluster):\n"
            "    if cluster.threads > 1:\n"
            '        raise ConfigError(f"cluster.threads: {cluster.threads} is too many; write 1")\n'
            "\n\nfrom rayfed.errors import ConfigError\n"
            "EXECUTOR = ExecutorKind(make=ShortestFirst, fits=alone)\n"
        )
    assert run([*SMALL, f"cluster={NAME}", "cluster.threads=2", "output=run"]) == 2
    assert not (own_folder / "run").exists()
    with pytest.raises(ConfigError, match=r"^cluster\.threads: 2 is too many; write 1$"):
        prepared(load_config([*SMALL, f"cluster={NAME}", "cluster.threads=2"]).alone())


def test_the_number_of_clients_at_once_is_a_number():
    with pytest.raises(ConfigError, match=r"^clients_at_once: 0 is not a number of clients; write 1 or more"):
        ExecutorKind(make=InlineExecutor, clients_at_once=0)


def test_an_executor_of_a_user_runs_clients_in_its_order_to_the_same_digest(own_folder, monkeypatch):
    runs = []
    inline = calls_in(monkeypatch, lambda: runs.append(experiment("inline").run(quiet=True)))
    other = calls_in(monkeypatch, lambda: runs.append(experiment(NAME).run(quiet=True)))
    assert runs[0].sha256 == runs[1].sha256
    assert len(inline[0]) > 1  # all calls of an exchange, which it ran in the opposite order of `units`
    assert {len(calls) for calls in other} == {1}
    assert sorted(one for calls in inline for one in calls) == sorted(calls[0] for calls in other)
    assert [calls[0] for calls in other[: len(inline[0])]] != inline[0]


def test_an_object_and_its_path_are_the_same_executor(own_folder, monkeypatch):
    assert experiment(EXECUTORS.load("inline")).config() == experiment("inline").config()
    own = ExecutorKind(make=type("Own", (InlineExecutor,), {}))
    name = experiment(own).config().cluster.executor
    assert name.startswith("Own-")
    assert kind_of(ClusterConfig(executor=name)) is own
    assert experiment(replace(own, clients_at_once=2)).config().cluster.executor != name
    assert experiment(own).run(quiet=True).sha256 == experiment("inline").run(quiet=True).sha256
    with pytest.raises(ConfigError, match=r"^cluster: an ExecutorKind without make runs on Ray"):
        experiment(ExecutorKind(make=None)).config()


class ContractOnly:
    """Has what `Executor` asks for and nothing else, and notes how it was made and closed."""

    made: list[tuple] = []
    closed = 0
    actors = 0

    def __init__(self, context, weights, policy, device):
        self.made.append((context.seed, sorted(weights)[:1] != [], policy.retries, device.type))
        inner = InlineExecutor(context, weights, policy, device)
        self.map, self.stores, self.fetch = inner.map, inner.stores, inner.fetch
        self.restore, self.forget, self.stop = inner.restore, inner.forget, inner.stop
        self.on_event = self.on_visit = lambda _: None

    def close(self):
        type(self).closed += 1


def test_an_executor_needs_the_contract_alone_and_is_closed(cache, monkeypatch):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    monkeypatch.setattr(ContractOnly, "made", [])
    monkeypatch.setattr(ContractOnly, "closed", 0)
    kind = ExecutorKind(make=ContractOnly)
    given = {"seed": 5, "failures": {"retries": 7}, "cluster": kind}
    whole = experiment("inline", seed=5).run(quiet=True)
    assert experiment(**given).run(quiet=True).sha256 == whole.sha256
    assert ContractOnly.made == [(5, True, 7, "cpu")]
    assert ContractOnly.closed == 1
    for _ in experiment(**given):
        break  # the loop is left early
    assert ContractOnly.closed == 2


def test_the_command_runs_it_and_goes_on_with_it(own_folder, capsys):
    options = [*SMALL, f"cluster={NAME}"]
    short = [text for text in options if not text.startswith("rounds=")]
    assert run([*options, "output=whole", "--quiet"]) == 0
    assert run([*short, "rounds=1", "output=part", "--quiet"]) == 0
    assert resume(["part", "rounds=2", "--quiet"]) == 0
    assert run([*SMALL, "cluster=inline", "output=inline", "--quiet"]) == 0
    whole, part, inline = (rayfed.load(own_folder / name) for name in ("whole", "part", "inline"))
    assert whole.sha256 == part.sha256 == inline.sha256
    saved = yaml.safe_load((own_folder / "part" / "config.yaml").read_text())
    assert saved["cluster"]["executor"] == NAME
    assert resume(["part", "rounds=3", "cluster=inline", "--quiet"]) == 0  # who computes may change
    capsys.readouterr()
    assert run([*options, "--dry-run"]) == 0
    assert "not checked" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.steady
def test_the_doctor_knows_it(own_folder, capsys):
    assert doctor([*SMALL, f"cluster={NAME}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"cluster none: everything in one process (cluster={NAME})" in said
    assert "needs one process;" in said


def test_cells_of_a_study_run_side_by_side_with_it(own_folder):
    """By its path, and as an object that cannot be imported, which travels to the processes."""
    names = {}
    exec(RECIPES[FILE], names)
    cells = {("path",): experiment(NAME), ("object",): experiment(names["EXECUTOR"])}
    done = rayfed.Study(cells).run(own_folder / "study", at_once=2, quiet=True)
    alone = experiment("inline").run(quiet=True)
    assert [one.sha256 for one in done.finished.values()] == [alone.sha256] * 2


@pytest.mark.slow
@pytest.mark.steady
def test_a_sweep_in_python_and_one_on_ray_run_with_it(ray_cluster, own_folder):
    searched = {"train.lr": [0.02, 0.1]}
    own, inline = (rayfed.sweep(experiment(one, rounds=1), searched, at_once=2) for one in (NAME, "inline"))
    pd.testing.assert_frame_equal(own.results, inline.results)
    space = {"train.lr": {"choice": [0.02, 0.1]}}
    for number, cluster in enumerate(["inline", NAME]):
        options = [*SMALL, f"cluster={cluster}"]
        tune.search(options, space, trials=2, objective="accuracy", output=f"sweep-{number}")
    digests = [
        [run.sha256 for run in rayfed.load(own_folder / f"sweep-{number}").finished.values()]
        for number in (0, 1)
    ]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


def test_what_computes_several_clients_at_once_counts_as_many_processors(own_folder, monkeypatch):
    text = RECIPES[FILE].replace("make=ShortestFirst", "make=ShortestFirst, clients_at_once=3")
    (own_folder / FILE).write_text(text)
    cluster = ClusterConfig(executor=NAME, threads=2)
    kind = kind_of(cluster)
    assert kind.cpus(cluster) == 6
    nodes = ({"CPU": 2.0}, {"CPU": 8.0})
    demand = Demand(clients=4, per_round=4, together=2, nodes=nodes)
    assert bundles(cluster, demand) == [{"CPU": 6.0}]
    with pytest.raises(ConfigError, match=r"with 12 threads does not fit.*cluster\.threads=2$"):
        bundles(replace(cluster, threads=4), demand)
    assert _lanes(None, nodes, False, kind.clients_at_once) == 3.0
    assert _lanes(None, nodes[:1], False, kind.clients_at_once) == 2.0
    assert share(cluster, 5, nodes, 2).actors == 3
    monkeypatch.setattr("rayfed.experiment.study.side_by_side._cores", lambda: 12)
    configs = [load_config([f"cluster={NAME}", "cluster.threads=2", f"seed={seed}"]) for seed in range(5)]
    assert side_by_side("auto", configs, None) == SideBySide(size=2)
