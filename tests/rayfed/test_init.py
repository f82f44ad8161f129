"""The public names of the package."""

import re
import subprocess
import sys

import pytest

import rayfed
from tests.conftest import ROOT

FACE = {"Server", "Local", "Client", "Cohort", "Method", "Broadcast", "Update", "ServerState", "simulate"}


def test_every_public_name_can_be_imported_and_is_declared():
    assert set(rayfed.__all__) == FACE
    stub = (ROOT / "rayfed" / "__init__.pyi").read_text()
    assert dict.fromkeys(FACE) == dict.fromkeys(re.findall(r" as (\w+)", stub))
    for name in FACE:
        value = getattr(rayfed, name)
        module = re.search(rf"from (\S+) import {name} as", stub)[1]
        assert value.__module__ == module
        assert name in dir(rayfed)
    with pytest.raises(AttributeError, match="nonsense"):
        rayfed.nonsense  # noqa: B018


def test_the_package_alone_loads_neither_torch_nor_ray():
    code = "import rayfed, sys; print(sorted({'torch', 'ray', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
