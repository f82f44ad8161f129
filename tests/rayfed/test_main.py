"""The command `rayfed`: its verbs, its help, its exit codes."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import rayfed
from rayfed import __main__ as command
from rayfed import run
from tests.conftest import ROOT

MODULES = {
    "run": "rayfed.run",
    "resume": "rayfed.resume",
    "view": "rayfed.view",
    "replay": "rayfed.replay",
    "ps": "rayfed.ps",
    "report": "rayfed.report",
    "doctor": "rayfed.doctor",
    "prepare": "rayfed.prepare",
    "reproduce": "rayfed.reproduce",
    "study": "rayfed.study",
    "sweep": "tune.run",
    "list": "rayfed.config.catalog",
}


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_alone_it_lists_its_verbs(arguments, capsys):
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(MODULES)]] == list(MODULES)
    assert all(len(line.split()) > 2 for line in lines[2 : 2 + len(MODULES)])


def test_the_version_is_that_of_the_package(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rayfed {rayfed.__version__}\n"


def test_a_wrong_verb_names_the_nearest(capsys):
    assert command.main(["resum"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'resume'?" in error
    assert len(error.splitlines()) == 1


def test_the_installed_command_is_this_one():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"rayfed": "rayfed.__main__:main"}


@pytest.mark.parametrize("verb", MODULES)
def test_the_help_of_each_verb_shows_an_example_and_loads_no_torch(verb):
    script = (
        "import sys\nfrom rayfed.__main__ import main\n"
        f"try:\n    main([{verb!r}, '--help'])\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "print([m for m in ('torch', 'ray', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True, timeout=300
    )
    text, _, loaded = done.stdout.strip().rpartition("\n")
    assert loaded == "[]"
    assert "--debug" in text
    assert text.startswith(f"usage: rayfed {verb} ")
    assert sum(line.startswith(f"  rayfed {verb} ") for line in text.splitlines()) >= 1, text
    assert "python -m" not in text
    assert re.search(r"^Exit code: 0 .*2 bad input", text, re.M)
    assert max(map(len, text.splitlines())) <= 80


def test_exit_codes_and_arguments_pass_through(tmp_path, capsys):
    assert command.main(["run", "rouds=3", f"output={tmp_path / 'r'}"]) == 2
    assert "did you mean 'rounds'" in capsys.readouterr().err
    assert command.main(["view", str(tmp_path)]) == 2
    assert command.main(["sweep", "--list"]) == 0
    assert "fedgcr" in capsys.readouterr().out


def test_python_m_rayfed_is_the_same():
    command_line = [sys.executable, "-m", "rayfed", "resum"]
    done = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "did you mean 'resume'?" in done.stderr


def test_list_is_the_list_of_run_and_loads_no_torch(capsys):
    script = (
        "from rayfed.__main__ import main; import sys; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command_line = [sys.executable, "-c", script, "list", "--json"]
    listed = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert run.main(["--list", "--json"]) == 0
    assert capsys.readouterr().out == listed.stdout
    assert json.loads(listed.stdout)["data"]
