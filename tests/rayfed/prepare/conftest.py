"""A small folder of images like PACS, and the command that prepares it."""

import pytest

from rayfed.prepare.__main__ import main
from tests.rayfed.data.folders import make_folder

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / "PACS", DOMAINS, CLASSES, count=2)


@pytest.fixture
def run(tmp_path, capsys):
    def run(*argv):
        code = main([*argv, "--cache", str(tmp_path / "cache"), "--image-size", "8"])
        out, err = capsys.readouterr()
        return code, out, err

    return run
