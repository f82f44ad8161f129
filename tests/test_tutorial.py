"""docs/tutorial.md: every command and program of it runs, in its order, in an empty folder."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"(?:Save this as `([^`]+)`:\n\n)?```(bash|python)\n(.*?)```", PAGE, re.DOTALL)


def commands():
    """The commands of the page, and its programs, in order."""
    for file, language, text in BLOCKS:
        if language == "bash":
            yield from (("", line) for line in re.sub(r"\\\n\s*", "", text).splitlines())
        else:
            yield file, text


def test_the_page_shows_every_step():
    lines = [text for file, text in commands() if not file]
    assert [
        word
        for word in ("run", "view", "report", "prepare", "list", "resume")
        if not any(line.startswith(f"rayfed {word}") for line in lines)
    ] == []
    assert [file for file, _ in commands() if file] == ["mine/smooth.py"]


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.timeout(1800)  # twenty commands, each in a new process
def test_everything_on_the_page_runs(tmp_path, cache):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAYFED_CACHE": str(cache), "COLUMNS": "200"}
    for file, text in commands():
        if file:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
            continue
        if text.startswith("rayfed "):
            words = text.replace("rayfed ", "-m rayfed ", 1)
            command = f"{sys.executable} {words}"
        else:
            (tmp_path / "program.py").write_text(text)
            command = f"{sys.executable} program.py"
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (tmp_path / "compared.html").is_file()
    assert (tmp_path / "clients.png").is_file()
    assert len((tmp_path / "runs" / "first" / "rounds.jsonl").read_text().splitlines()) == 4
