"""Modules of one's own are found in the folder in which a command is started."""

import sys

import pytest

from rayfed.errors import ConfigError
from rayfed.federation.method import METHODS, Method


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
