"""Going on after kill -9, from the command line, to the tensors and tables of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
import yaml

import rayfed
from rayfed.config.schema import load_config, to_dict
from rayfed.errors import ConfigError
from rayfed.resume import config_to_continue, main
from rayfed.terminal.exit_code import STOP
from tests.conftest import ROOT, SMALL, STEADY
from tests.rayfed.report.page import folders

LONG = (
    *(o for o in SMALL if not o.startswith("tuning.")),  # a method brings its own scheme
    "rounds=6",
    "data.val=4",
    "data.partition.scheme=by_domain",
    "data.partition.clients_per_domain=2",
    "clients_per_round=8",
    "cluster.dashboard=false",
)


def tables(folder):
    """Every table of a run without what a clock says, and without what failures leave."""
    found = {}
    for file in sorted(folder.glob("*.parquet")):
        if file.name != "events.parquet":
            table = pq.read_table(file)
            found[file.name] = table.select([n for n in table.column_names if "seconds" not in n]).to_pylist()
    return found


def killed(arguments, folder, rows, cell="."):
    """Start a run, or several of a command, and kill it with -9 in the middle of the round after so many.

    Args:
        arguments: Overrides of the command.
        folder: Its output.
        rows: Number of rounds of a cell, after which it is killed.
        cell: Folder of the cell below the output; of one run, the output.
    """
    # The last of equal keys counts: the command refuses a key that is given twice.
    arguments = {text.partition("=")[0]: text for text in arguments}.values()
    process = subprocess.Popen(
        [sys.executable, "-m", "rayfed.run", *arguments, f"output={folder}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = folder / cell / "rounds.jsonl"
    deadline = time.monotonic() + 300
    while not (result.exists() and len(result.read_text().splitlines()) >= rows):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.ray
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fedgcr", marks=STEADY),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ditto", "feddyn", "faa")),
    ],
)
def test_a_killed_run_goes_on_exactly_with_other_actors(name, cache, tmp_path, ray_cluster):
    options = [*LONG, f"algorithm={name}", f"data.cache={cache}"]
    whole = rayfed.simulate([*options, "cluster.executor=inline", f"output={tmp_path / 'whole'}"])
    run = tmp_path / "killed"
    killed([*options, "cluster.actors=2"], run, 2)
    done = len((run / "rounds.jsonl").read_text().splitlines())
    assert 2 <= done < 6
    assert main([str(run), "cluster.actors=3", "--quiet"]) == 0
    assert tables(run) == tables(whole.path)
    tensors = ("model", "params.safetensors")
    assert run.joinpath(*tensors).read_bytes() == whole.path.joinpath(*tensors).read_bytes()


def test_a_finished_run_can_be_made_longer(small, capsys):
    whole, run = (small(f"rounds={n}", "algorithm=ditto", "model.options={depth: 2}") for n in (2, 1))
    assert main([str(run.path), "rounds=+1"]) == 0
    shown = capsys.readouterr().out
    assert whole.sha256[:16] in shown
    assert f"{run.path}: continues after round 1 of 2\n" in shown
    assert tables(run.path) == tables(whole.path)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["rounds"] == 2
    assert "all 2 rounds are finished" not in capsys.readouterr().out
    assert main([str(run.path)]) == 0
    assert "all 2 rounds are finished; rounds=+20 adds 20 more" in capsys.readouterr().out


def test_a_damaged_last_checkpoint_costs_rounds_not_the_run(small, caplog):
    whole, run = small("rounds=3"), small("rounds=3")
    (run.path / "model" / "params.safetensors").unlink()
    file = run.path / "checkpoints" / "round-000003" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main([str(run.path), "--quiet"]) == 0
    assert "round-000003 cannot be used" in caplog.text
    assert tables(run.path) == tables(whole.path)


@pytest.mark.slow
@pytest.mark.steady
def test_rarer_checkpoints_and_one_when_it_is_interrupted(small, cache, tmp_path, monkeypatch):
    options = ("rounds=5", "algorithm=ditto", "checkpoint.every=2", "checkpoint.keep=9")
    whole = small(*options)
    folders = sorted(p.name for p in (whole.path / "checkpoints").glob("round*"))
    assert folders == ["round-000002", "round-000004", "round-000005"]

    def stop_after_three(row, rounds):
        if row["round"] == 3:
            STOP.set()
        return ""

    monkeypatch.setattr("rayfed.terminal.console.line", stop_after_three)
    broken = tmp_path / "broken"
    inline = (f"data.cache={cache}", "cluster=inline", f"output={broken}")
    with pytest.raises(KeyboardInterrupt):
        rayfed.simulate([*SMALL, *options, *inline], quiet=False)
    STOP.clear()
    monkeypatch.undo()
    assert (broken / "checkpoints" / "round-000003").is_dir()
    assert main([str(broken), "--quiet"]) == 0
    assert tables(broken) == tables(whole.path)


@pytest.mark.slow
@pytest.mark.steady
def test_comparisons_and_folds_are_continued_too(small):
    options = (
        "rounds=1",
        "protocol=leave_one_out",
        "data.domains=[plain,street]",
        "compare=local",
        "data.val=2",
    )
    whole, run = small(*options), small(*options)

    def results(folder):
        return (folder / "report.md").read_text().split("## How it was run")[0]

    wanted = results(run.path)
    for part in ("local-street-seed0", "fedavg-street-seed0"):
        (run.path / "cells" / part / "model" / "params.safetensors").unlink()
    (run.path / "report.md").unlink()
    kept = run.path / "cells" / "fedavg-plain-seed0" / "history" / "000001.json.gz"
    before = kept.stat().st_mtime_ns
    assert main([str(run.path), "--quiet"]) == 0
    assert results(run.path) == wanted == results(whole.path)
    assert (
        run.path / "cells" / "fedavg-plain-seed0" / "history" / "000001.json.gz"
    ).stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(
    ("several", "cell"),
    [
        (("algorithm=ditto", "compare=[fedavg]"), "fedavg-seed0"),
        (("algorithm=ditto", "protocol=leave_one_out", "data.domains=[plain,street]"), "ditto-street-seed0"),
    ],
)
def test_a_killed_command_with_several_runs_goes_on_to_the_same_bytes(several, cell, cache, tmp_path):
    options = [*SMALL, *several, "rounds=5", "data.val=4", "cluster=inline", f"data.cache={cache}"]
    whole, run = tmp_path / "whole", tmp_path / "killed"
    rayfed.simulate([*options, f"output={whole}"])
    killed(options, run, 2, f"cells/{cell}")
    first = next(own for own in sorted((run / "cells").iterdir()) if own.name != cell)
    finished = first / "model" / "params.safetensors"
    before = finished.stat().st_mtime_ns
    assert 2 <= len((run / "cells" / cell / "rounds.jsonl").read_text().splitlines()) < 5
    assert main([str(run), "--quiet"]) == 0
    assert finished.stat().st_mtime_ns == before
    names = sorted(own.name for own in (whole / "cells").iterdir())
    assert names == sorted(own.name for own in (run / "cells").iterdir())
    for name in names:
        ours, theirs = (folder / "cells" / name for folder in (run, whole))
        assert tables(ours) == tables(theirs)
        tensors = ("model", "params.safetensors")
        assert ours.joinpath(*tensors).read_bytes() == theirs.joinpath(*tensors).read_bytes()
    reports = [(folder / "report.md").read_text().split("## How it was run")[0] for folder in (run, whole)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.lr=0.5"], "train.lr: 0.5 would change the result"),
        (["seed=3"], "seed: 3 would change"),
        (["cluster.threads=2"], "rounds and stop, but not cluster.threads"),
        (["algorithm=fedprox"], "would change the result"),
        (["rounds=1"], "rounds: 1 is fewer than the 2"),
        (["rounds=+x"], "rounds: '+x' is not a number"),
        (["rouds=+1"], "did you mean 'rounds'"),
        (["cluster.actors=0"], "cluster.actors"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(overrides, words, finished, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*"))
    assert main([str(finished), *overrides]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*")) == before


def test_no_rounds_are_added_to_a_run_whose_noise_follows_from_its_rounds(tmp_path):
    config = load_config(["algorithm=fedavg", "rounds=2", "channel=[{clip: 1.0}]", "privacy.epsilon=8"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    assert config_to_continue(tmp_path).privacy.epsilon == 8.0
    with pytest.raises(ConfigError, match=r"rounds: 3 would need another noise than the 2 of .*epsilon=8"):
        config_to_continue(tmp_path, ["rounds=+1"])


def test_a_folder_without_a_run(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@contextmanager
def changed(run, file, old, new):
    """While the block runs, a file of the run has another text, and the trained tensors are missing."""
    path, tensors = run / file, run / "model" / "params.safetensors"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    tensors.rename(run / "aside")
    yield
    path.write_text(text)
    (run / "aside").rename(tensors)


def test_another_config_is_named_and_not_the_images_that_follow_from_it(finished, capsys):
    with changed(finished, "config.yaml", "\nseed: 0\n", "\nseed: 5\n"):
        assert main([str(finished)]) == 2
        assert "seed in config.yaml was 0" in capsys.readouterr().err


def test_other_images_are_refused(finished, capsys):
    with changed(finished, "environment.json", '"data_digest": "', '"data_digest": "0'):
        assert main([str(finished)]) == 2
        assert "data: the images changed" in capsys.readouterr().err


def test_two_processes_do_not_write_one_run(finished, monkeypatch, capsys):
    from rayfed.record.folder import RunFolder

    monkeypatch.setattr("rayfed.record.locks.LOCK_PATIENCE", 0.5)
    with RunFolder(finished, {}).lock():
        assert main([str(finished), "rounds=+1"]) == 2
    assert "another process is running" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    import rayfed

    folder = tmp_path_factory.mktemp("finished") / "run"
    rayfed.simulate([*SMALL, f"data.cache={cache}", "cluster=inline", f"output={folder}"])
    return folder


def test_a_folder_that_does_not_exist_is_named_in_resume(tmp_path, capsys):
    from rayfed.resume import main

    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder; give the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no run (there is no config.yaml)" in capsys.readouterr().err
    (tmp_path / "sweep.yaml").touch()
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "holds a sweep, which is no run" in told
    assert f"python -m tune.run resume={tmp_path} continues it" in told


@pytest.mark.parametrize("more", [(), pytest.param(("rounds=+1",), marks=STEADY)])
def test_a_damaged_line_of_rounds_is_written_anew_from_the_history(more, cache, tmp_path):
    run = tmp_path / "run"
    rayfed.simulate([*SMALL, "rounds=2", f"data.cache={cache}", "cluster.executor=inline", f"output={run}"])
    rows = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(rows + "{bad\n")
    assert main([str(run), *more, "--quiet"]) == 0
    assert (run / "rounds.jsonl").read_text().startswith(rows)
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 2 + len(more)


def test_a_study_of_a_program_is_continued_by_that_program(tmp_path, capsys):
    folders.write_study(tmp_path / "study", "", ["fedavg", "fedprox"], ["all"], rounds=lambda part: 1)
    assert main([str(tmp_path / "study")]) == 2
    said = "holds a study of a program or of rayfed study FILE.yaml; run that again to continue it"
    assert said in capsys.readouterr().err
