"""What a command is doing is said: in one line that changes on a terminal, in a few lines elsewhere."""

import io
import logging

import pytest

from rayfed.terminal import console
from rayfed.terminal.console import count_up, say, screen_of, showing, stage, use_screen
from rayfed.terminal.exit_code import _Log, run_guarded


def a_terminal(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def count(total):
    with count_up("images decoded", total) as advance:
        for _ in range(total):
            advance()


def test_nothing_is_shown_without_a_screen(capsys):
    stage("starting Ray")
    count(10)
    with use_screen(screen_of(quiet=True)):
        stage("starting Ray")
    assert capsys.readouterr() == ("", "")


def test_elsewhere_a_stage_is_a_line_and_a_count_one_every_few_seconds(capsys, monkeypatch):
    with use_screen(screen_of()):
        stage("starting Ray")
        stage("starting Ray")
        stage("reading", passing=True)
        count(1000)
        assert capsys.readouterr().out == "starting Ray\nimages decoded: 1,000 of 1,000\n"
        count(3)
        assert capsys.readouterr().out == "".join(f"images decoded: {n} of 3\n" for n in (1, 2, 3))
        monkeypatch.setattr(console, "EVERY", -1.0)
        count(11)
        assert len(capsys.readouterr().out.splitlines()) == 11
    with use_screen(screen_of(as_json=True)):
        stage("starting Ray")
    assert capsys.readouterr() == ("", "starting Ray\n")


def test_on_a_terminal_the_line_goes_before_anything_else_is_written(monkeypatch):
    terminal = a_terminal(monkeypatch)
    clear = console.CLEAR

    def work():
        with use_screen(screen_of()):
            stage("reading", passing=True)
            stage("starting Ray")
            say("2 actors")
            stage("drawing")
            _Log().emit(logging.makeLogRecord({"msg": "careful"}))
            assert terminal.getvalue().endswith(f"drawing{clear}")
            stage("the end")

    assert run_guarded(work) == 0
    assert terminal.getvalue() == (
        f"{clear}reading{clear}starting Ray{clear}2 actors\n{clear}drawing{clear}{clear}the end{clear}"
    )


def test_before_the_first_round_the_progress_bar_says_what_begins(monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "150")

    with use_screen(screen_of()), showing(3) as show:
        stage("starting Ray on this machine")
        show({"sha256": "x"})
    assert "starting Ray on this machine" in terminal.getvalue()


@pytest.mark.slow
@pytest.mark.steady
def test_an_experiment_says_what_it_loads_and_draws(cache, tmp_path, capsys):
    from rayfed import run
    from tests.conftest import SMALL

    small = [option for option in SMALL if option != "figures=false"]
    options = [*small, f"data.cache={cache}", "cluster=inline", f"output={tmp_path / 'run'}"]
    assert run.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "loading the data digits-five-mini and the model vit_mini" in lines
    assert "drawing the figures" in lines
    assert run.main([*options, "overwrite=true", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
