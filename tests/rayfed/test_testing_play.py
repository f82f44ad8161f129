"""Every method, tuning and kind of model on a pretended accelerator, with the results of the CPU."""

import os
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu_check import dropping_as_devices
from rayfed.config.schema import load_config
from rayfed.devices import same_draws, set_deterministic
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from rayfed.federation.method_registry import METHODS
from rayfed.testing import play
from rayfed.tuning.base import TUNINGS
from tests.conftest import ROOT, STEADY, quickly
from tests.conftest import SMALL as SMALL_OF_RUN
from tests.matrix import KINDS, TINY, TUNINGS_OF, fitting, of_kind, with_dropout
from tests.pretended import COUNTS, TYPE, Mode, pretended
from tests.rounding import equally_near, exact_play

OPTIONS = {
    "fedprox, distance": "algorithm=fedprox local.form=norm local.mu=0.1",
    "ditto, one model": "algorithm=ditto local.variant=mediabrain",
    "fedclip with mu": "algorithm=fedclip local.mu=0.1 local.finetune_epochs=1",
    "fedgc, all kept": "algorithm=fedgc train.keep_optimizer=true local.z0_model=stale "
    "local.optimizer=authors",
    "Adam kept": "algorithm=fedprox train.keep_optimizer=true train.optimizer=adam",
    "augmented, in parts": "algorithm=fedavg data.augment=[flip,jitter] train.micro_batch=1 "
    "train.schedule=cosine",
    "fedmix, all pairs": "algorithm=fedmix local.lam=0.3 local.pairing=all",
    "maml": "algorithm=bgp local.meta_update=second_order",
    "mean of products": "algorithm=fedavg tuning=lora server.lora_agg=residual tuning.residual=true",
    "own statistics": "algorithm=fedavg model=test_resnet model.options={} model.size=64 tuning=full "
    "train.batch_norm=local",
    "running losses": "algorithm=qffl server.loss=running",
    "clipped AdamW": "algorithm=fedsam tuning=lora train.optimizer=adamw train.clip_norm=1",
    "two epochs": "algorithm=scaffold train.epochs=2 train.local_steps=3",
    "no cache": "algorithm=fedavg tuning=head train.cache_features=false",
    "fedgr, local model": "algorithm=fedgr server.rep_model=local server.rep_batches=1",
}
"""Options that keep state, or that mix what a client has with what it receives."""

QUICK_OPTIONS = ("Adam kept",)
"""Moments of an optimizer in stores."""

NOT_TRAINED = {"fedkseed", "local", "slora", "zero_shot"}
"""Methods that send nothing back or train without dropout, which then changes no tensor of the run."""

QUICK_KINDS = (("vit", "exits"), ("vit", "gc_prompt"), ("mixer", "lora"))
"""Several exits, prompts by image, and dropout."""


def played(overrides, tmp_path, cache, device=None, draws_as_cpu=False, **options):
    """The result and the counts of an experiment, on the CPU or on the pretended device."""
    settings = [*overrides, f"data.cache={cache}", f"output={tmp_path / (device or 'cpu')}"]
    with pretended(draws_as_cpu) if device else nullcontext():
        return play(settings, f"{device}:0" if device else "cpu", **options), vars(COUNTS).copy()


def scores(run):
    return [v for n, v in sorted(run.metrics.items()) if isinstance(v, float) and "seconds" not in n]


def agree(overrides, tmp_path, cache):
    """Assert that the tensors and the scores of both devices agree, with dropout where the tuning has any.

    Both draw the same numbers for it.
    """
    overrides = with_dropout(overrides, 0.5)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel that torch has for the CPU only
    try:
        with dropping_as_devices():
            here, _ = played(overrides, tmp_path, cache)
        there, _ = played(overrides, tmp_path, cache, TYPE, draws_as_cpu=True)
        same = [here.sha256, *scores(here)] == [there.sha256, *scores(there)]
        with exact_play(), dropping_as_devices():  # the judge; not needed where both have the same bits
            exact = None if same else played(overrides, tmp_path / "exact", cache)[0]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if exact is not None:
        equally_near(here.params, there.params, exact.params)
        equally_near(*([torch.tensor(scores(run)).double()] for run in (here, there, exact)))
    return there


@pytest.mark.parametrize("name", quickly(METHODS.names(), ["fedgcr", "fedra", "scaffold"]))
def test_a_method_plays_on_a_device_as_on_the_cpu(name, tmp_path, cache):
    agree([*TINY, f"algorithm={name}"], tmp_path, cache)


@pytest.mark.parametrize("name", quickly(METHODS.names(), ["fedavg"]))
def test_a_method_with_dropout_repeats_itself_on_a_device(name, tmp_path, cache):
    plain = [*TINY, f"algorithm={name}"]
    settings = with_dropout(plain, 0.5)
    first, _ = played(settings, tmp_path / "first", cache, TYPE)
    again, _ = played(settings, tmp_path / "again", cache, TYPE)
    assert first.sha256 == again.sha256
    assert all(value.isfinite().all() for value in first.params.values())
    if settings != plain and name not in NOT_TRAINED:
        here, _ = played(settings, tmp_path / "here", cache)
        assert here.sha256 != first.sha256


@pytest.mark.parametrize("case", quickly(OPTIONS, QUICK_OPTIONS))
def test_options_that_keep_state_play_on_a_device(case, tmp_path, cache):
    agree([*TINY, *re.split(r" (?=\S+=)", OPTIONS[case])], tmp_path, cache)


@pytest.mark.parametrize(
    ("kind", "name"),
    [case if case in QUICK_KINDS else pytest.param(*case, marks=STEADY) for case in fitting()],
)
def test_a_tuning_plays_on_a_kind_of_model(kind, name, tmp_path, cache):
    agree(of_kind(kind, name, tmp_path), tmp_path, cache)


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_refuses_every_other_tuning(kind, tmp_path):
    for name in {*TUNINGS.names()} - {*TUNINGS_OF[kind]}:
        with pytest.raises(ConfigError):
            prepared(load_config(of_kind(kind, name, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.names())
def test_a_method_keeps_its_optimizers_on_a_device(name, tmp_path, cache):
    agree([*TINY, f"algorithm={name}", "train.keep_optimizer=true"], tmp_path, cache)


@pytest.mark.slow
@pytest.mark.steady
def test_second_derivatives_of_text_play_on_a_device(tmp_path, cache):
    settings = of_kind("lstm", "full", tmp_path)
    agree([*settings, "algorithm=perfedavg", "local.meta_update=second_order"], tmp_path, cache)


CONTINUED = ("ditto", "scaffold train.keep_optimizer=true train.optimizer=adam")


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_is_continued_on_a_device(name, tmp_path, cache):
    settings = [*TINY, *f"algorithm={name}".split(), "rounds=3", "evaluation.every=3"]
    whole, _ = played(settings, tmp_path / "whole", cache, TYPE)
    played([*settings, "rounds=1"], tmp_path / "parts", cache, TYPE)
    parts, _ = played(settings, tmp_path / "parts", cache, TYPE, resume=True)
    assert parts.sha256 == whole.sha256
    assert len(parts.history) == 3


ONE_BY_ONE = "train.batch_size=1"


def counted(overrides, tmp_path, cache):
    """Counts of the last of two rounds: what the start costs is left out."""
    _, one = played([*overrides, "rounds=1"], tmp_path / "one", cache, TYPE)
    _, two = played([*overrides, "rounds=2"], tmp_path / "two", cache, TYPE)
    return {name: two[name] - one[name] for name in one}


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_visit_costs_two_copies_down_and_one_up(tuning, tmp_path, cache):
    settings = [*TINY, "algorithm=fedavg", f"tuning={tuning}", "evaluation.personal=false", ONE_BY_ONE]
    quiet = counted([*settings, "evaluation.every=0"], tmp_path / "quiet", cache)
    clients = prepared(load_config([*settings, f"data.cache={cache}"])).partition.clients
    visits = len(clients)
    batches = sum(len(client.train) for client in clients)
    assert quiet["down"] == 2 * visits  # the parameters, and the order of the examples
    assert quiet["up"] == visits
    assert quiet["waits"] == visits  # for the answer alone, so that the next visit can be queued before
    scored = counted([*settings, "evaluation.every=1"], tmp_path / "scored", cache)
    assert scored["down"] - quiet["down"] == visits  # the parameters; both test sets in each round
    assert scored["up"] == quiet["up"]
    assert scored["waits"] == quiet["waits"] + visits
    streamed = counted([*settings, "evaluation.every=0", "data.resident=false"], tmp_path / "streamed", cache)
    assert streamed["down"] == visits + batches
    assert streamed["up"] == visits
    assert streamed["waits"] == visits


@pytest.mark.slow
@pytest.mark.steady
def test_streamed_and_resident_examples_give_the_same(tmp_path, cache):
    settings = [*TINY, "algorithm=fedgcr"]
    resident, _ = played([*settings, "data.resident=true"], tmp_path / "a", cache, TYPE)
    streamed, _ = played([*settings, "data.resident=false"], tmp_path / "b", cache, TYPE)
    tight, counts = played([*settings, "data.resident_memory=1e-6"], tmp_path / "c", cache, TYPE)
    assert resident.sha256 == streamed.sha256 == tight.sha256
    _, roomy = played([*settings], tmp_path / "d", cache, TYPE)
    assert counts["down"] > roomy["down"]  # `auto` streams what is larger than the budget


def test_the_device_refuses_what_a_gpu_refuses():
    with pretended() as device:
        there, here = torch.ones(2).to(device.name), torch.ones(2)
        with pytest.raises(RuntimeError, match="found at least two devices"):
            there + here
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.randperm(3, generator=torch.Generator(), device=device.name)
        assert (there * torch.tensor(2.0)).tolist() == [2, 2]  # numbers may come from the CPU
        assert (device.counts.down, device.counts.up, device.counts.waits) == (1, 0, 2)
        assert float(there.sum()) == 2
        assert there.cpu().sum().item() == 2
        assert there[there > 0].shape == (2,)
        assert (device.counts.up, device.counts.waits) == (1, 5)


@pytest.mark.parametrize(
    ("pinned", "goes_on", "waits"), [(True, True, 0), (True, False, 1), (False, True, 1)]
)
def test_the_device_waits_for_a_copy_of_memory_that_is_not_pinned(pinned, goes_on, waits):
    with pretended() as device:
        here = torch.empty(4, pin_memory=pinned)[1:].view(3, 1)
        there = here.to(device.name, non_blocking=goes_on)
        assert (device.counts.down, device.counts.waits) == (1, waits)
        there.copy_(here, non_blocking=goes_on)
        assert (device.counts.down, device.counts.waits) == (2, 2 * waits)


def test_the_device_draws_from_another_generator():
    with pretended() as device:
        torch.manual_seed(1)
        there, here = torch.rand(4, device=device.name).tolist(), torch.rand(4).tolist()
        torch.manual_seed(1)
        assert torch.rand(4).tolist() == here != there
        assert torch.rand(4, device=device.name).tolist() == there
        with same_draws(torch.device(device.name)):
            first = torch.rand(4, device=device.name).tolist()
        assert torch.rand(4, device=device.name).tolist() == first
    with pretended(draws_as_cpu=True) as device:
        torch.manual_seed(1)
        assert torch.rand(4, device=device.name).tolist() == here


class Products(Mode):
    """Notes the workspace that cuBLAS would have at each product of matrices on a device."""

    def __init__(self):
        super().__init__()
        self.workspaces = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm") and args[-1].device.type == TYPE:
            self.workspaces.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return func(*args, **(kwargs or {}))


def test_the_workspace_is_fixed_before_the_first_product(cache, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    settings = [*TINY, "algorithm=fedavg", "rounds=1", f"data.cache={cache}"]
    with pretended() as device, Products() as products:
        play(settings, device.name)
    assert products.workspaces
    assert set(products.workspaces) == {":4096:8"}


def test_the_device_refuses_sums_in_any_order():
    with (
        pytest.raises(RuntimeError, match="does not have a deterministic implementation"),
        pretended() as device,
    ):
        set_deterministic(torch.device(device.name), "auto")
        image = torch.ones(1, 1, 7, 7).to(device.name).requires_grad_()
        torch.nn.functional.adaptive_avg_pool2d(image, 6).sum().backward()


def test_no_method_moves_a_tensor_itself():
    pattern = re.compile(r"\.(to|cuda|cpu)\(")
    found = [file.name for file in (ROOT / "algorithms").glob("*.py") if pattern.search(file.read_text())]
    assert found == []


def test_play_writes_the_run_of_the_command(tmp_path, cache, small):
    fast = ("algorithm=fedprox", "rounds=1")
    run = small(*fast)
    again = play([*SMALL_OF_RUN, *fast, f"data.cache={cache}", f"output={tmp_path / 'played'}"])
    assert again.sha256 == run.sha256
    assert load_file(again.path / "model" / "params.safetensors").keys() == run.params.keys()
    assert again.metrics["accuracy"] == run.metrics["accuracy"]


def test_a_device_needs_no_index(tmp_path, cache):
    settings = [*TINY, "algorithm=fedavg", "rounds=1", f"data.cache={cache}"]
    with pretended() as device:
        one = play([*settings, f"output={tmp_path / 'a'}"], torch.device(TYPE))
        down = device.counts.down
        other = play([*settings, f"output={tmp_path / 'b'}"], f"{TYPE}:0")
    assert one.sha256 == other.sha256
    assert device.counts.down == 2 * down


def test_play_makes_a_folder_of_its_own(cache):
    result = play([*TINY, "algorithm=fedavg", "rounds=1", f"data.cache={cache}"])
    assert result.path.is_dir()
    assert len(result.history) == 1


def test_a_group_on_a_device_is_sent_and_computed_at_once(tmp_path, cache):
    settings = [*TINY, "algorithm=fedavg", "tuning=lora", "evaluation.every=0", "evaluation.personal=false"]
    alone = counted([*settings, "train.group=1"], tmp_path / "alone", cache)
    group = counted([*settings, "train.group=2"], tmp_path / "group", cache)
    assert (alone["up"], group["up"]) == (2, 1)
    assert (alone["waits"], group["waits"]) == (2, 1)
    # Of both at once: parameters, examples of all batches, their shares in a loss, seeds of dropout.
    assert group["down"] == 4
