"""Activation checkpointing gives the same tensors with less memory; torch.compile compiles the network."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.fast.graphs import allowed_graphs
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Parts
from rayfed.federation.server import Server
from rayfed.federation.train_config import TrainConfig
from rayfed.models import trunk
from rayfed.testing import small_setup
from tests.conftest import ROOT, STEADY
from tests.rayfed.models.small import images, small
from tests.rounding import equally_near, exactly_trained

OPTIONS = ("data.domains=[plain,fonts]", "model.options={depth: 3}", "rounds=2", "evaluation.every=0")


def trained(*overrides):
    setup = small_setup(*OPTIONS, *overrides)
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    return last.state.params


def check_alike(plain, other, *overrides):
    """The tensors of both runs are equally near to those in float64."""
    equally_near(plain, other, exactly_trained(small_setup(*OPTIONS, *overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=fedavg",),
        pytest.param(("algorithm=fedavg", "tuning=full"), marks=STEADY),
        ("algorithm=fedavg", "tuning=lora", "tuning.dropout=0.5"),
        pytest.param(("algorithm=fedgcr",), marks=STEADY),
        ("algorithm=fedra", "capacity=[2,1]"),
        pytest.param(("algorithm=fedmix", "local.lam=0.2"), marks=STEADY),
        pytest.param(("algorithm=bgp", "local.meta_update=second_order"), marks=STEADY),
        pytest.param(("algorithm=depthfl", "capacity=[3,2]"), marks=STEADY),
        pytest.param(("algorithm=promptfl", "model=clip_mini"), marks=STEADY),
        pytest.param(("algorithm=fedavg", "model=clip_mini", "tuning=full", "compare=[]"), marks=STEADY),
    ],
    ids=lambda overrides: "-".join(overrides).replace("algorithm=", ""),
)
def test_checkpointing_changes_nothing(overrides):
    check_alike(trained(*overrides), trained(*overrides, "train.checkpointing=true"), *overrides)


def kept_bytes(model):
    """Bytes that a forward pass keeps for the backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(images(4))
    assert output.requires_grad
    return sum(kept.values())


def test_checkpointing_keeps_less():
    model = small("vit")
    before = kept_bytes(model)
    trunk.use_checkpointing(model)
    assert kept_bytes(model) < before / 4


def test_a_network_without_uniform_blocks_uses_its_own_checkpointing():
    model = small("resnet")
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.requires_grad_(False)
    model.refresh()
    trunk.use_checkpointing(model)
    assert model.net.grad_checkpointing


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("model=resnet10t", "model.size=32", "model.options={}", "tuning=full"),
            "has trained BatchNorm layers",
        ),
        (("model=alexnet", "model.size=64", "model.options={}", "tuning=full"), "has no blocks"),
    ],
)
def test_checkpointing_is_refused_where_it_cannot_work(overrides, words):
    with pytest.raises(ConfigError) as caught:
        small_setup("algorithm=fedavg", *overrides, "train.checkpointing=true")
    assert words in str(caught.value)
    assert str(caught.value).startswith("train.checkpointing: ")


def test_graphs_are_recorded_by_default_for_what_ships_with_rayfed():
    def graphs(*overrides):
        return small_setup(*overrides).context.train.graphs

    assert graphs("algorithm=fedavg", "tuning=lora") == "auto"
    assert graphs("algorithm=fedgcr", "tuning=gc_prompt") == "auto"
    assert graphs("algorithm=fedavg", "tuning=lora", "train.graphs=false") is False
    assert graphs("algorithm=fedavg", "tuning=lora", "train.graphs=true") is True
    for never in ("train.checkpointing=true", "tuning=full"):
        assert graphs("algorithm=fedavg", never) is False


@pytest.mark.parametrize(("wanted", "found"), [("auto", False), (True, True), (False, False)])
def test_graphs_of_a_users_method_are_recorded_if_they_are_asked_for(wanted, found):
    class Own(Local):
        """A client half of a user, which may do more than start operations."""

    context = small_setup("algorithm=fedavg", "tuning=lora").context
    parts = Parts(server=Server(), local=Own(), tuning=context.tuning)
    assert allowed_graphs(TrainConfig(graphs=wanted), parts, context.skeleton()) is found


def test_compiling_is_refused_where_it_cannot_work(monkeypatch):
    curved = ("algorithm=fedmix", "local.lam=0.2")
    with pytest.raises(ConfigError, match=r"train.compile: true cannot be used .* half of fedmix"):
        small_setup(*curved, "train.compile=true")
    with pytest.raises(ConfigError, match=r"train.graphs: true .* its steps need second derivatives"):
        small_setup(*curved, "train.graphs=true")
    for way in ("train.compile=true", "train.checkpointing=true"):
        with pytest.raises(ConfigError, match=f"train.graphs: true .* {way[:-5]} runs the network"):
            small_setup("algorithm=fedavg", way, "train.graphs=true")
    with pytest.raises(ConfigError, match=r"train.compile: true cannot be used with capacity"):
        small_setup("algorithm=fedra", "capacity=[2,1]", "train.compile=true")
    monkeypatch.setattr(trunk, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package triton"):
        trunk.check_compiler("cuda")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile: true needs a C\+\+ compiler"):
        small_setup("algorithm=fedavg", "train.compile=true")


@pytest.mark.parametrize(("wanted", "expected"), [(None, str(torch.get_num_threads())), ("5", "5")])
def test_the_compiler_starts_as_many_processes_as_there_are_threads(wanted, expected, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    monkeypatch.setenv(trunk.WORKERS, wanted or "")
    if wanted is None:
        monkeypatch.delenv(trunk.WORKERS)
    trunk.use_compile(small("vit"), "cpu")
    assert os.environ[trunk.WORKERS] == expected


def test_compiling_keeps_names_and_compiles_the_network_only(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    setup = small_setup("algorithm=fedavg", "train.compile=true")
    worker = InlineExecutor(setup.context, setup.weights).worker
    assert compiled == [worker.model.net]
    assert worker.start_params().keys() == setup.start.keys()


KNOWS = """
import sys, torch
from rayfed.devices import set_deterministic, settings_restored
from rayfed.models import trunk
from tests.rayfed.models.small import small

with settings_restored():
    set_deterministic(torch.device("cpu"), True)
    assert torch.are_deterministic_algorithms_enabled()
    assert "torch._inductor" not in sys.modules
    trunk.use_compile(small("vit"), "cpu")
    from torch._inductor import config
    assert config.deterministic
assert not config.deterministic
with settings_restored():
    set_deterministic(torch.device("cpu"), True)
    assert config.deterministic
"""


@pytest.mark.slow
@pytest.mark.steady
def test_the_compiler_knows_of_deterministic_kernels_and_is_not_imported_for_them():
    subprocess.run([sys.executable, "-c", KNOWS], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_compiled_network_trains_alike():
    options = ("algorithm=fedavg", "tuning.dropout=0")
    check_alike(trained(*options), trained(*options, "train.compile=true"), *options)


@pytest.mark.slow
def test_dropout_in_a_compiled_network_depends_on_the_seed_only():
    options = ("algorithm=fedavg", "tuning.dropout=0.5", "train.compile=true")
    first, again, other = trained(*options), trained(*options), trained(*options, "seed=1")
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not all(torch.equal(other[name], value) for name, value in first.items())
