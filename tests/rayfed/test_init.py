"""What `import rayfed` offers, and that it loads nothing heavy."""

import ast
import os
import subprocess
import sys

import pytest

import rayfed
from rayfed.errors import ConfigError
from tests.conftest import ROOT

AUTHOR = ("Server", "Local", "Client", "Cohort", "Method", "Broadcast", "Update", "ServerState", "simulate")
HEAVY = ("torch", "torchvision", "ray", "numpy", "pandas", "pyarrow", "pydantic", "timm", "peft")


def python(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    return done.stdout.strip()


def test_a_python_without_the_libraries_says_which_one_to_use():
    for code, names, arguments in (
        (2, "numpy, torch, yaml, ray", ["-m", "rayfed.run"]),
        (1, "numpy, torch, yaml", ["-c", "import rayfed"]),
    ):
        command = [sys.executable, "-S", *arguments]
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=bare, timeout=300)
        assert done.returncode == code
        *before, last = done.stderr.splitlines()
        assert f"does not have {names}; in a checkout, `make run` installs them" in last
        assert not before or code == 1


@pytest.mark.parametrize("config", ["algorithm=fedprox", {"algorithm": "fedprox"}, 5, None])
def test_overrides_that_are_no_list_are_answered_with_one(config):
    with pytest.raises(ConfigError, match=r"is no list, such as \['algorithm=fedprox', 'rounds=5'\]"):
        rayfed.simulate(config)


def test_overrides_from_a_generator_all_count_and_other_values_are_named():
    """A generator was read once, and the default run began."""
    with pytest.raises(ConfigError, match=r"^rounds: 0 is not allowed"):
        rayfed.simulate(text for text in ("algorithm=fedprox", "rounds=0"))
    with pytest.raises(ConfigError, match=r"^config: 1 is no text, such as 'algorithm=fedprox'"):
        rayfed.simulate([1])


def test_an_author_needs_no_other_module():
    from rayfed.experiment.experiment import simulate
    from rayfed.federation import client, cohort, local, method_registry, server
    from rayfed.types import Broadcast, ServerState, Update

    own = (server.Server, local.Local, client.Client, cohort.Cohort, method_registry.Method)
    assert tuple(getattr(rayfed, name) for name in AUTHOR) == (*own, Broadcast, Update, ServerState, simulate)


def test_a_method_in_a_file_of_ones_own_runs(tmp_path, monkeypatch, small):
    (tmp_path / "halved.py").write_text(
        "from dataclasses import dataclass\n"
        "from rayfed import Local, Method\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Halved(Local):\n"
        "    share: float = 0.5\n\n"
        "    def loss(self, client, model, batch):\n"
        "        return self.share * super().loss(client, model, batch)\n\n\n"
        "METHOD = Method(local=Halved)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = "algorithm=halved:METHOD"
    assert small(named, "rounds=1").sha256 != small("rounds=1").sha256
    assert small(named, "local.share=1", "rounds=1").sha256 == small("rounds=1").sha256


def test_what_it_lists_is_there():
    assert set(AUTHOR) < set(rayfed.__all__)
    assert set(rayfed.__all__) <= set(dir(rayfed))
    with pytest.raises(AttributeError, match="'rayfed' has no attribute 'Sever'"):
        rayfed.Sever  # noqa: B018


def test_the_types_are_of_the_same_names_and_modules():
    stub = ast.parse((ROOT / "rayfed" / "__init__.pyi").read_text())
    imported = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == rayfed._HOME


def test_importing_it_loads_nothing_heavy():
    script = f"import rayfed, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(script) == "[]"


def test_importing_it_takes_less_time_than_modules_of_python():
    script = "import time; began = time.process_time(); {}; print(time.process_time() - began)"
    ours, others = (
        min(float(python(script.format(code))) for _ in range(3))
        for code in ("import rayfed; dir(rayfed)", "import asyncio, http.server, unittest.mock")
    )
    assert ours < others
