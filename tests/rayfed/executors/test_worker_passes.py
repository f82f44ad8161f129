"""The plain form of what a worker computes: everything trains without the package of the fast form."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker_passes import FAST, WorkerPasses, quickest_passes
from rayfed.fast.fast_passes import FastPasses
from rayfed.federation.method_registry import METHODS
from rayfed.federation.params import digest
from rayfed.testing import DOMAINS, small_setup
from tests.conftest import ROOT

ALONE = ("train.group=1", "train.graphs=false")

PROGRAM = """
import json, sys
from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.params import digest
from rayfed.testing import small_setup

assert "rayfed.fast" not in sys.modules
found = {}
for overrides in json.load(sys.stdin):
    setup = small_setup(*overrides)
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    found[overrides[0]] = digest(last.state.params)
print(json.dumps(found))
"""
"""Prints the digest of the final tensors of each experiment that is asked for, by its first override."""


@pytest.fixture(scope="module")
def without_fast(tmp_path_factory):
    """A folder with all code but the package of the fast form."""
    root = tmp_path_factory.mktemp("without_fast")
    for name in ("rayfed", "algorithms", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(root / FAST.replace(".", "/"))
    return root


def trained(overrides):
    """Digest of the final tensors of a small experiment."""
    setup = small_setup(*overrides)
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    return digest(last.state.params)


def check_without(root, cache, *settings):
    """Experiments have the same bits where the package is deleted."""
    common = (DOMAINS, "evaluation.every=0", f"data.cache={cache}")
    wanted = [[*each.split(), *common] for each in settings]
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert there.returncode == 0, there.stderr
    found = json.loads(there.stdout.splitlines()[-1])
    assert found == {overrides[0]: trained([*overrides, *ALONE]) for overrides in wanted}


SOME = (
    "algorithm=fedavg tuning.dropout=0.3 train.batch_size=2",
    "algorithm=scaffold train.precision=bf16",
    "algorithm=fedgcr",
    "algorithm=ditto train.optimizer=adamw train.keep_optimizer=true train.clip_norm=0.1",
)
"""Dropout of adapters, mixed precision, prompts of images, and what optimizers keep."""


def test_methods_train_to_the_same_bits_without_the_fast_package(without_fast, cache):
    check_without(without_fast, cache, *(f"{each} rounds=1" for each in SOME))


@pytest.mark.slow
@pytest.mark.steady
def test_every_method_trains_to_the_same_bits_without_the_fast_package(without_fast, cache):
    check_without(without_fast, cache, *(f"algorithm={name} rounds=1" for name in METHODS.names()))


def test_the_fast_form_is_used_where_it_is_there_and_else_the_plain_one(monkeypatch):
    assert quickest_passes() == FastPasses() == small_setup("algorithm=fedavg").context.passes
    monkeypatch.setitem(sys.modules, FAST, None)
    assert quickest_passes() == WorkerPasses()


@pytest.mark.parametrize(
    ("override", "advice"), [("group=4", "set train.group=1"), ("graphs=true", "leave it")]
)
def test_what_only_the_fast_form_has_is_refused_without_it(override, advice, monkeypatch):
    monkeypatch.setitem(sys.modules, FAST, None)
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"^train.{key}: {value} needs the package rayfed.fast; {advice}"):
        small_setup("algorithm=fedavg", f"train.{override}")
    setup = small_setup("algorithm=fedavg")
    assert (setup.group.clients, setup.group.sentence, setup.context.train.graphs) == (1, "", False)
