"""One guard for all commands: exit codes, one line for an error, --debug, signals."""

import importlib
import logging
import os
import signal

import pytest

from rayfed.errors import ClientError, ConfigError, OutputClosedError, RayFedError
from rayfed.terminal import exit_code
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import STOP, run_guarded

COMMANDS = {
    "rayfed.run": ["rouds=3"],
    "rayfed.resume": ["NOWHERE"],
    "rayfed.view": ["NOWHERE"],
    "rayfed.doctor": ["rouds=3"],
    "rayfed.prepare.__main__": ["pacs", "--root", "NOWHERE"],
    "rayfed.report.landscape": ["NOWHERE"],
    "rayfed.report.feature_map": ["NOWHERE"],
    "rayfed.report.slopes": ["NOWHERE"],
    "rayfed.report.measures": ["NOWHERE"],
    "rayfed.report.answers": ["NOWHERE"],
    "tune.run": ["sweep=nothing"],
}
"""A command, and arguments that are bad input."""


@pytest.fixture
def handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not STOP.is_set()  # the next run of this process would be interrupted


@pytest.mark.parametrize("module", COMMANDS)
def test_bad_input_is_one_line_and_exit_code_2(module, tmp_path, capsys, handlers):
    arguments = [str(tmp_path / "nowhere") if text == "NOWHERE" else text for text in COMMANDS[module]]
    main = importlib.import_module(module).main
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert main([*arguments, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("module", [*COMMANDS, "rayfed.config.catalog"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_command_with_130(module, number, tmp_path, capsys, handlers, monkeypatch):
    """Whatever a command asks the guard to do, a signal ends it there."""
    found = importlib.import_module(module)

    def under_signal(_, *rest):
        return run_guarded(lambda: os.kill(os.getpid(), number), *rest)

    monkeypatch.setattr(found, "run_guarded", under_signal, raising=False)
    monkeypatch.setattr(found, "work", lambda args: os.kill(os.getpid(), number), raising=False)
    assert found.main(COMMANDS.get(module, [])) == 130
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("interrupted; ")


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "code", "line"),
    [
        (lambda: None, 0, ""),
        (lambda: 0, 0, ""),
        (lambda: 2, 2, ""),
        (raising(ConfigError("rounds: no")), 2, "error: rounds: no\n"),
        (raising(RayFedError("two\nlines")), 1, "error: two lines\n"),
    ],
)
def test_the_exit_code_and_the_line(work, code, line, capsys, handlers):
    assert run_guarded(work) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rayfed.config.schema", "warning: rounds: a sentence\n"),
        ("algorithms.fedra", "warning: rounds: a sentence\n"),
        ("urllib3.connection", "warning from urllib3: rounds: a sentence\n"),
    ],
)
def test_a_warning_is_a_sentence_without_the_name_of_a_module(name, line, capsys, handlers, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert run_guarded(lambda: logging.getLogger(name).warning("rounds: %s", "a sentence")) == 0
    assert capsys.readouterr().err == line


def test_a_warning_shows_control_and_direction_characters_escaped(capsys, handlers, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert run_guarded(lambda: logging.getLogger("rayfed").warning("%s", "\x1b[31mred\u202e\nnext")) == 0
    assert capsys.readouterr().err == "warning: \\x1b[31mred\\u202e\nnext\n"


def test_a_mistake_in_the_code_keeps_its_traceback(handlers):
    with pytest.raises(ZeroDivisionError):
        run_guarded(lambda: 1 // 0)


@pytest.mark.parametrize("note", ["", "finished rounds are kept"])
def test_output_that_nobody_reads_ends_a_command_quietly(note, capsys, handlers, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)

    def work():
        try:
            say("a line")
        except OutputClosedError as err:
            if note:
                err.add_note(note)
            raise

    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        assert run_guarded(work) == 141
        say("dropped")  # as is what Python writes when it ends
    assert capsys.readouterr().err == (f"error: the output is no longer read; {note}\n" if note else "")


@pytest.mark.parametrize("debug", [False, True])
def test_the_traceback_of_a_client_is_offered_or_shown(debug, capsys):
    def work():
        raise ClientError("c1", 0, "fit", "ValueError: odd", "Traceback of the client")

    assert run_guarded(work, debug) == 1
    *before, line = capsys.readouterr().err.splitlines()
    assert ("Traceback of the client" in before) == debug
    assert line.endswith("--debug shows the traceback") != debug


def test_a_signal_waits_for_the_round_that_is_recorded_and_a_second_one_does_not(handlers):
    done = []
    with exit_code.stoppable():
        with pytest.raises(KeyboardInterrupt), exit_code.finishing():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("recorded")
        with pytest.raises(KeyboardInterrupt), exit_code.finishing():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("not reached")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert done == ["recorded"]
