"""Modules of one's own are found in the folder in which a command is started."""

import sys

import pytest

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS, Method


def test_the_current_folder_is_searched_last(tmp_path, monkeypatch):
    (tmp_path / "own_method_here.py").write_text("from rayfed import Method\n\nMETHOD = Method()\n")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with pytest.raises(ConfigError, match="start the command in the folder"):
        METHODS.load("own_method_here:METHOD")
    monkeypatch.chdir(tmp_path)
    assert isinstance(METHODS.load("own_method_here:METHOD"), Method)
    assert sys.path[-1] == str(tmp_path)
    before = list(sys.path)
    METHODS.load("own_method_here:METHOD")
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def x(:\n", r"algorithm: 'mine:METHOD' cannot be imported: SyntaxError: .*mine\.py, line 1\);"),
        ("\n1 / 0\n", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine\.py, line 2\);"),
        ("import no_such_package\n", r"cannot be imported: ModuleNotFoundError: .*mine\.py, line 1\);"),
        ("from rayfed import Method\nMETHOT = Method()\n", r"mine defines no METHOD; it has METHOT$"),
        ("METHOD = 3\n", r"is not .*: mine must define METHOD so, found 3$"),
    ],
)
def test_a_module_of_ones_own_with_a_mistake_is_named_with_the_line(text, words, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=words):
        METHODS.load("mine:METHOD")
    sys.modules.pop("mine", None)


def test_a_file_in_the_current_folder_is_named_in_the_error(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"for the file mine.py here write mine:METHOD$"):
        METHODS.load("mine")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm=mine/clipmix.py", "for the file mine/clipmix.py here write mine.clipmix:METHOD"),
        ("algorithm=./mine/clipmix.py", "write mine.clipmix:METHOD"),
        ("algorithm=mine.clipmix", "for the file mine/clipmix.py here write mine.clipmix:METHOD"),
        ("tuning=mine.bitfit", "write mine.bitfit:TUNING"),
        ("data=mine/arrays.py", "write mine.arrays:READER"),
        ("compare=[fedavg,mine.clipmix]", "write mine.clipmix:METHOD"),
    ],
)
def test_a_file_or_a_module_in_place_of_a_name_is_answered_with_what_to_write(override, hint):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert str(caught.value).endswith(hint)
    assert "fedprox" not in str(caught.value)
