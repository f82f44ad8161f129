"""A run that ends too early says what is kept, and what can be done about it."""

from contextlib import contextmanager

import pytest

from rayfed import resume, run
from rayfed.engine import session
from rayfed.experiment.study.from_command import _advising
from rayfed.record.folder import how_to_go_on
from tests.conftest import SMALL


@pytest.fixture
def stopped(tmp_path, cache, monkeypatch, capsys):
    """Interrupt a run after so many rounds; its folder, and what was written to standard error."""
    original = session.launch

    def stop(rounds, *overrides):
        def until(rows):
            for row in rows:
                if row.get("round", rounds) == rounds:
                    raise KeyboardInterrupt
                yield row

        @contextmanager
        def interrupted(*args):
            with original(*args) as rows:
                yield until(rows)

        def at_once(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(session, "launch", interrupted if rounds else at_once)
            assert run.main(arguments(*overrides)) == 130
        return tmp_path / "run", capsys.readouterr().err.strip()

    def arguments(*overrides):
        return [*SMALL, f"output={tmp_path / 'run'}", f"data.cache={cache}", "cluster=inline", *overrides]

    stop.arguments = arguments
    return stop


def test_without_a_finished_round_it_is_started_again(stopped, capsys):
    path, said = stopped(0)
    assert said == "interrupted; no round was finished; run the same command again"
    assert (path / "config.yaml").exists()
    (path / "notes.txt").write_text("mine")
    assert run.main(stopped.arguments()) == 0
    assert (path / "report.md").exists()
    assert (path.with_name("run.before-1") / "notes.txt").read_text() == "mine"
    assert run.main(stopped.arguments()) == 2
    again = f"choose another folder, set overwrite=true or continue it with python -m rayfed.resume {path}"
    assert again in capsys.readouterr().err


def test_leave_one_out_without_a_finished_round_is_started_again_too(stopped, capsys):
    path, _ = stopped(0, "protocol=leave_one_out", "data.domains=[plain, street, fonts]")
    cell = path / "cells" / "fedavg-plain-seed0"
    assert (cell / "config.yaml").exists()
    (cell / "rounds.jsonl").write_text("{}\n")
    assert run.main(stopped.arguments()) == 2
    assert "choose another folder or set overwrite=true\n" in capsys.readouterr().err
    (cell / "rounds.jsonl").unlink()
    assert run.main(stopped.arguments()) == 0


def test_with_a_checkpoint_it_is_continued(stopped, capsys):
    path, said = stopped(1)
    assert said == f"interrupted; finished rounds are kept; continue with: python -m rayfed.resume {path}"
    assert run.main(stopped.arguments()) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_after_the_last_round_it_is_continued_too(stopped, monkeypatch, capsys, tmp_path):
    """The tables, figures and the report are written after the rounds."""
    path = tmp_path / "run"

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rayfed.experiment.runner.report", stop)
        assert run.main(stopped.arguments()) == 130
    said = f"interrupted; finished rounds are kept; continue with: python -m rayfed.resume {path}"
    assert capsys.readouterr().err.strip() == said
    assert (path / "model" / "params.safetensors").exists()
    with monkeypatch.context() as patch:
        patch.setattr("rayfed.experiment.runner.report", stop)
        assert resume.main([str(path)]) == 130
    assert capsys.readouterr().err.strip().endswith(said)
    assert resume.main([str(path)]) == 0
    assert (path / "report.md").exists()


def test_after_the_last_run_of_a_study_it_is_continued_too(tmp_path):
    with pytest.raises(KeyboardInterrupt) as stop, _advising(tmp_path):
        raise KeyboardInterrupt
    said = f"what is finished is kept; continue with: python -m rayfed.resume {tmp_path}"
    assert stop.value.__notes__ == [said]


def test_rounds_without_a_checkpoint_are_not_to_be_continued(stopped):
    import shutil

    path, _ = stopped(1)
    shutil.rmtree(path / "checkpoints")
    assert "cannot be continued" in how_to_go_on(path)
