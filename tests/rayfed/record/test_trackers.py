"""What MLflow and W&B are told is what the run wrote down, each step once; a run does not depend on them."""

import json
import os
import pickle
import re
import shutil
import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest

import rayfed
from rayfed.errors import ConfigError
from rayfed.record.claim import claim, look
from rayfed.record.trackers.mlflow import PREFIXES
from rayfed.record.trackers.tracker import Tracking, check_trackers, load_trackers, temporary_environment
from rayfed.resume import main
from rayfed.run import main as run_main
from rayfed.terminal.exit_code import STOP
from tests.conftest import SMALL
from tests.rayfed.malformed import last_wins
from tests.rayfed.record.trackers import FakeServer, logged

WANDB = """
import json, os
from pathlib import Path

class Run:
    starting_step = 0
    def __init__(self, **asked):
        self.file = Path(asked["dir"]) / "wandb" / "fake.jsonl"
        self.file.parent.mkdir(exist_ok=True)
        self.note(init=asked, mode=os.environ["WANDB_MODE"], silent=os.environ["WANDB_SILENT"])
    def note(self, **what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, values, step, commit):
        self.note(step=step, values=values)
    def finish(self, exit_code):
        self.note(exit=exit_code)

def init(**asked):
    return Run(**asked)
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty MLflow database; making one takes seconds."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with temporary_environment({}, PREFIXES):
        MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """No tracker of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def tracked(database, tmp_path, monkeypatch):
    """Read back the runs of this test, which has its own experiment."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    return lambda: logged(f"sqlite:///{database}", tmp_path.name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    """A run of two rounds that nobody tracks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return rayfed.simulate([*SMALL, f"data.cache={cache}", "cluster=inline", f"output={folder}"])


def rows(run):
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def assert_equal(found, run):
    """Every number of every round is there, and nothing else of these columns."""
    for row in rows(run):
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "round"}
        assert {key: found[key, row["round"]] for key in numbers} == pytest.approx(numbers)
        assert found[f"domain/{row['worst_domain']}/accuracy", row["round"]] == row["worst_domain_accuracy"]
    assert {step for _, step in found} == {row["round"] for row in rows(run)}


@pytest.mark.slow
@pytest.mark.steady
def test_mlflow_has_the_config_and_every_number_and_changes_nothing(small, plain, database, tmp_path):
    """Without a server, in a database beside the run."""
    shutil.copyfile(database, tmp_path / "mlflow.db")
    result = small("trackers=[mlflow]")
    assert result.sha256 == plain.sha256
    (run,) = logged(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (run.name, run.status) == (result.path.name, "FINISHED")
    assert (run.params["train.lr"], run.params["tuning.rank"]) == ("0.02", "2")
    assert_equal(run.metrics, result.path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlflow.db", result.path.name]
    assert (result.path / "trackers.json").exists()
    with claim(result.path, look(result.path, True), overwrite=True):  # another run takes its place
        pass
    assert not (result.path / "trackers.json").exists()


@pytest.mark.slow
@pytest.mark.steady
def test_a_run_that_was_killed_goes_on_and_repeats_no_step(small, tracked, monkeypatch, tmp_path):
    def stop_after_two(row, rounds):
        if row["round"] == 2:
            STOP.set()
        return ""

    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("rayfed.terminal.console.line", stop_after_two)
        three = last_wins([*SMALL, "rounds=3"])
        assert run_main([*three, "trackers=[mlflow]", "cluster=inline", f"output={path}"]) == 130
    assert [run.status for run in tracked()] == ["KILLED"]
    # As after kill -9 in round 2, when MLflow had it but neither a checkpoint nor our memory did.
    shutil.rmtree(path / "checkpoints" / "round-000002")
    memory = json.loads((path / "trackers.json").read_text())
    assert memory["mlflow"]["step"] == 2
    memory["mlflow"]["step"] = 1
    (path / "trackers.json").write_text(json.dumps(memory))
    before = rows(path)
    assert main([str(path), "--quiet"]) == 0
    (run,) = tracked()
    assert run.status == "FINISHED"
    assert run.metrics["seconds", 2] == before[1]["seconds"]  # sent once, when it was there first
    assert {step: run.metrics["loss", step] for step in (1, 2, 3)} == {
        r["round"]: r["loss"] for r in rows(path)
    }


@pytest.mark.slow
@pytest.mark.steady
def test_it_can_be_switched_on_when_a_run_goes_on(plain, tracked, tmp_path):
    path = shutil.copytree(plain.path, tmp_path / "run")
    assert main([str(path), "rounds=+1", "trackers=[mlflow]", "--quiet"]) == 0
    (run,) = tracked()
    assert {step for _, step in run.metrics} == {1, 2, 3}
    assert_equal(run.metrics, path)  # the rounds before it, too


def test_a_server_that_goes_away_does_not_stop_the_run(small, plain, monkeypatch, caplog):
    with FakeServer() as server:
        address = server.address
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//me:hunter2@"))
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "away")
        server.dies_after = 1  # rounds
        path, digest = (result := small("trackers=[mlflow]")).path, result.sha256
        assert {step for _, step in server.metrics()} == {1}
    assert digest == plain.sha256
    assert len([r for r in caplog.records if r.name == "rayfed.record.trackers.tracker"]) == 1
    assert "hunter2" not in caplog.text
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert {(event["kind"], event["action"], event["round"]) for event in events} == {
        ("tracker_lost", "nothing", 2)
    }
    assert "rounds not sent: 1" in events[-1]["message"]
    for file in path.rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes(), file
    with FakeServer(server) as server:  # it is back, and knows what it knew
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        assert main([str(path), "rounds=+1", "--quiet"]) == 0
        assert_equal(server.metrics(), path)
        assert server.experiment == "away"


def test_wandb_has_every_number_once_also_after_a_resume(small, plain, monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = small("trackers=[wandb]")
    assert run.sha256 == plain.sha256
    assert main([str(run.path), "rounds=+1", "--quiet"]) == 0
    notes = [json.loads(line) for line in (run.path / "wandb" / "fake.jsonl").read_text().splitlines()]
    begun = [note for note in notes if "init" in note]
    assert [(note["mode"], note["silent"]) for note in begun] == [("offline", "true")] * 2
    assert begun[0]["init"]["id"] == begun[1]["init"]["id"]
    assert begun[0]["init"]["config"]["train"]["lr"] == 0.02
    assert [note["exit"] for note in notes if "exit" in note] == [0, 0]
    sent = [note for note in notes if "step" in note]
    assert [note["step"] for note in sent] == [1, 2, 3]
    assert_equal({(key, note["step"]): v for note in sent for key, v in note["values"].items()}, run.path)
    monkeypatch.delitem(sys.modules, "wandb")


TRACKIO = """
import json, os
from pathlib import Path

class Run:
    def __init__(self, **asked):
        print("noise")
        self.file = Path(os.environ["TRACKIO_DIR"]) / "fake.jsonl"
        self.note(init=asked)
    def note(self, **what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, values, step):
        self.note(step=step, values=values)
    def finish(self):
        self.note(finished=True)

def init(**asked):
    return Run(**asked)
"""


def test_trackio_has_every_number_once_also_after_a_resume(small, plain, monkeypatch, tmp_path, capsys):
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    done = small("trackers=[trackio]")
    assert done.sha256 == plain.sha256
    assert main([str(done.path), "rounds=+1", "--quiet"]) == 0
    notes = [json.loads(line) for line in (tmp_path / "fake.jsonl").read_text().splitlines()]
    inits = [note["init"] for note in notes if "init" in note]
    assert [(init["project"], init["name"], init["resume"]) for init in inits] == [
        ("rayfed", done.path.name, "allow")
    ] * 2
    sent = [note for note in notes if "step" in note]
    assert [note["step"] for note in sent] == [1, 2, 3]
    assert_equal({(key, note["step"]): v for note in sent for key, v in note["values"].items()}, done.path)
    assert sum("finished" in note for note in notes) == 2
    assert "noise" not in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "trackio")


REFUSED = {
    "unknown": ("trackers=[mlfow]", {}, "trackers.*mlfow.*mlflow"),
    "not a list": ("trackers=mlflow", {}, "trackers.*mlflow"),
    "nobody there": ("trackers=[mlflow]", {"MLFLOW_TRACKING_URI": "http://me:pw@127.0.0.1:9"}, "refused"),
    "no such scheme": (
        "trackers=[mlflow]",
        {"MLFLOW_TRACKING_URI": "ftp://x"},
        "MLFLOW_TRACKING_URI: ftp://x",
    ),
}


@pytest.mark.parametrize(("override", "variables", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_quickly(override, variables, message, monkeypatch, tmp_path, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    waits = []
    here, sleep = threading.current_thread(), time.sleep

    def wait(seconds):
        if threading.current_thread() is here:  # between the attempts of a library
            waits.append(seconds)
        else:
            sleep(seconds)

    monkeypatch.setattr("time.sleep", wait)
    path = tmp_path / "new"
    assert run_main([*SMALL, override, "cluster=inline", f"output={path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert "pw" not in error
    assert not path.exists()
    assert sum(waits) < 10


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_a_library_that_is_not_installed_is_named(name, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"{name} is not installed; install rayfed-sim\[{name}\]"):
        check_trackers([name])


def test_wandb_without_a_key_is_refused(monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*WANDB_MODE=offline"):
        check_trackers(["wandb"])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password abc\n")
    check_trackers(["wandb"])
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])


def test_the_environment_of_the_shell_goes_along_and_is_not_shown(monkeypatch, tmp_path):
    """The driver is an actor: it may have been started from another shell, with other variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    tracking = Tracking.of(load_trackers(["mlflow", "wandb", "mlflow"]), {})
    assert list(tracking.kinds) == ["mlflow", "wandb"]
    assert "hunter2" not in repr(tracking)
    assert Tracking.of({}, {}).environment == {}
    monkeypatch.setenv("WANDB_API_KEY", "other")
    monkeypatch.setenv("WANDB_PROJECT", "other")
    with temporary_environment(pickle.loads(pickle.dumps(tracking)).environment, ("MLFLOW_", "WANDB_")):
        assert os.environ["WANDB_API_KEY"] == "hunter2"
        assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mine.db"
        assert "WANDB_PROJECT" not in os.environ
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["WANDB_API_KEY"] == os.environ["WANDB_PROJECT"] == "other"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


class Lines:
    """A tracker of a user, which writes a file."""

    def open(self, run, config):
        self.file = run / "lines.txt"
        self.note(f"open {config['algorithm']}")

    def send(self, round, values):
        self.note(f"{round} {sorted(values) == sorted(set(values))} {values['loss']:.6f}")

    def end(self, ending):
        self.note(ending)

    def note(self, text):
        with self.file.open("a") as file:
            file.write(text + "\n")


class Broken(Lines):
    def send(self, round, values):
        raise OSError("no route to the board")


class Half:
    def open(self, run, config): ...


def expected_lines(run):
    return [f"{row['round']} True {row['loss']:.6f}" for row in rows(run)]


@pytest.mark.parametrize("way", ["a name", "a class", "an entry point"])
def test_a_tracker_of_a_user_gets_every_round_once_also_after_a_resume(
    way, small, plain, monkeypatch, tmp_path
):
    name = f"{__name__}:Lines"
    if way == "an entry point":
        point = EntryPoint("board", name, "rayfed.trackers")
        monkeypatch.setattr("rayfed.record.trackers.tracker.entry_points", lambda group: [point])
        name = "board"
    if way == "a class":
        done = (
            rayfed.Experiment.of(plain.config).changed(trackers=[Lines], overwrite=True).run(tmp_path / "run")
        )
    else:
        done = small(f"trackers=[{name}]")
    path = done.path
    assert done.sha256 == plain.sha256
    said = (path / "lines.txt").read_text().splitlines()
    assert said == ["open fedavg", *expected_lines(path), "finished"]
    assert main([str(path), "rounds=+1", "--quiet"]) == 0
    said = (path / "lines.txt").read_text().splitlines()
    assert [line for line in said if line[0].isdigit()] == expected_lines(path)
    assert len(expected_lines(path)) == 3


def test_a_tracker_that_fails_does_not_stop_the_run(small, plain, caplog):
    done = small(f"trackers=[{__name__}:Broken]")
    assert done.sha256 == plain.sha256
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "rayfed.record.trackers.tracker"]
    assert "no route to the board; the run continues" in warning
    assert {event["kind"] for event in done.recorded.events} == {"tracker_lost"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{__name__}:Half", "is not a tracker: a class with open"),
        (f"{__name__}:Missing", "defines no Missing"),
        ("no_such_module:Board", "no_such_module"),
        ("mlfow", "mlflow"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_starts(name, told, tmp_path, capsys):
    assert run_main([*SMALL, f"trackers=[{name}]", "cluster=inline", f"output={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: trackers")
    assert told in error
    with pytest.raises(ConfigError, match="is not a tracker"):
        rayfed.Experiment(trackers=[Half]).config()


@pytest.mark.slow
@pytest.mark.ray
def test_a_tracker_of_a_user_runs_where_the_driver_runs(small, plain):
    done = small(f"trackers=[{__name__}:Lines]", "cluster.executor=ray", "cluster.num_gpus=0")
    assert done.sha256 == plain.sha256
    assert (done.path / "lines.txt").read_text().splitlines()[-1] == "finished"
