import sys

import pytest
import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import (
    TUNINGS,
    apply_tuning,
    copies,
    export,
    freeze,
    load,
    sent_tensors,
    train_mode,
    trainable,
)
from rayfed.tuning.full import Full
from rayfed.tuning.head import Head
from rayfed.tuning.lora import Lora
from rayfed.tuning.visual_prompt import VisualPrompt
from tests.pretended import pretended
from tests.rayfed.models.small import images, small

HEAD = {"head.weight", "head.bias"}


def lora_names(blocks, sites):
    return {f"blocks.{j}.{site}.lora_{m}" for j in blocks for site in sites for m in "AB"}


SCHEMES = [
    ("vit", Lora(rank=2), lora_names(range(4), ("attn.proj", "mlp.fc2")) | HEAD),
    ("beit", Lora(rank=2), lora_names(range(4), ("attn.proj", "mlp.fc2")) | HEAD),
    ("mixer", Lora(rank=2), lora_names(range(4), ("mlp_tokens.fc2", "mlp_channels.fc2")) | HEAD),
    ("vit", Lora(rank=2, sites=("l1",), train_head=False), lora_names(range(4), ("mlp.fc2",))),
    ("vit", VisualPrompt(), {"prompt"} | HEAD),
    ("deit", VisualPrompt(train_head=False), {"prompt"}),
    ("vit", Head(), HEAD),
    ("mixer", Head(), HEAD),
    ("resnet", Head(), HEAD),
    ("vit", Full(), None),
    ("resnet", Full(), None),
]


def ids(value):
    return value if isinstance(value, str) else type(value).__name__


def tuned(kind, tuning, seed=0):
    return apply_tuning(small(kind), tuning, seed)


def test_values_are_written_and_copied_together_on_a_device():
    with pretended() as device:
        model = tuned("vit", Lora(rank=2)).to(device.name)
        own = copies(model)
        device.counts.clear()
        load(model, copies(model))
        assert device.counts.kernels == 2  # of 18 tensors
        assert all((copies(model)[name] == value).all() for name, value in own.items())


@pytest.mark.parametrize(("kind", "tuning", "names"), SCHEMES, ids=ids)
def test_a_scheme_trains_exactly_its_own_tensors(kind, tuning, names):
    model = tuned(kind, tuning)
    expected = {n for n, s in model.tensors().items() if not s.is_buffer} if names is None else names
    assert trainable(model).keys() == expected
    before = {n: t.clone() for n, t in model.state_dict().items()}
    optimizer = torch.optim.SGD(trainable(model).values(), lr=1.0)
    train_mode(model)
    for _ in range(2):  # LoRA's A has no gradient while B is zero
        model.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    paths = {model.module_name(n) for n in expected}
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed - {n for n, _ in model.named_buffers()} == paths


@pytest.mark.parametrize("kind", ["vit", "mixer"])
@torch.no_grad()
def test_lora_starts_as_the_frozen_model(kind):
    plain, model = small(kind).eval(), tuned(kind, Lora(rank=2)).eval()
    assert torch.equal(model(images()), plain(images()))


def test_start_values_depend_on_the_seed_only():
    torch.rand(3)
    first, second = export(tuned("vit", Lora(rank=2))), export(tuned("vit", Lora(rank=2)))
    other = export(tuned("vit", Lora(rank=2), seed=1))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["blocks.0.attn.proj.lora_A"], other["blocks.0.attn.proj.lora_A"])
    assert not torch.equal(first["blocks.0.attn.proj.lora_A"], first["blocks.1.attn.proj.lora_A"])


def test_inactive_blocks_neither_train_nor_travel():
    model = tuned("vit", Lora(rank=2))
    model.active = (1, 3)
    expected = lora_names((1, 3), ("attn.proj", "mlp.fc2")) | HEAD
    assert trainable(model).keys() == sent_tensors(model).keys() == export(model).keys() == expected
    model.active = None
    assert len(trainable(model)) == 4 * 4 + 2


def test_export_is_a_copy_and_load_puts_it_back():
    model = tuned("vit", Lora(rank=2))
    sent = export(model)
    assert not any(t.requires_grad for t in sent.values())
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(1)
    assert all(not torch.equal(p, sent[n]) for n, p in trainable(model).items())
    addresses = {n: p.data_ptr() for n, p in trainable(model).items()}
    load(model, sent)
    assert all(torch.equal(p, sent[n]) for n, p in trainable(model).items())
    assert {n: p.data_ptr() for n, p in trainable(model).items()} == addresses


def test_partial_loads_and_loads_into_inactive_blocks():
    model = tuned("vit", Lora(rank=2))
    model.active = (0,)
    load(model, {"blocks.2.mlp.fc2.lora_B": torch.ones(32, 2)})
    model.active = None
    assert torch.equal(trainable(model)["blocks.2.mlp.fc2.lora_B"], torch.ones(32, 2))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            {"x.y": torch.ones(1), "a.b": torch.ones(1)},
            KeyError,
            r"'a.b' is not in the model \(2 such names\)",
        ),
        ({"blocks.0.attn.proj.weight": torch.ones(32, 32)}, KeyError, r"is frozen \(1 such names\)"),
        ({"head.bias": torch.ones(1)}, ValueError, r"'head.bias' has shape \(1,\), the model's has \(5,\)"),
    ],
)
def test_a_bad_load_changes_nothing(params, error, message):
    model = tuned("vit", Lora(rank=2))
    before = export(model)
    with pytest.raises(error, match=message):
        load(model, {"head.weight": torch.zeros(5, 32), **params})
    assert all(torch.equal(p, before[n]) for n, p in trainable(model).items())


def test_statistics_of_trained_norms_travel_if_wanted():
    model = tuned("resnet", Full())
    names = sent_tensors(model, buffers=True).keys() - sent_tensors(model, buffers=False).keys()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(names) == 2 * len(norms) > 0
    assert {n.rpartition(".")[2] for n in names} == {"running_mean", "running_var"}
    sent = export(model)
    train_mode(model)
    model(images())
    assert not torch.equal(sent_tensors(model)["bn1.running_mean"], sent["bn1.running_mean"])
    load(model, sent)
    assert torch.equal(model.net.bn1.running_mean, sent["bn1.running_mean"])


def test_statistics_of_frozen_norms_stay():
    model = tuned("resnet", Head())
    assert sent_tensors(model, buffers=True).keys() == HEAD
    with pytest.raises(KeyError, match="is frozen"):
        load(model, {"bn1.running_mean": torch.zeros_like(model.net.bn1.running_mean)})
    before = {n: b.clone() for n, b in model.named_buffers()}
    train_mode(model)
    model(images() + 3)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_norms_follow_their_own_parameters():
    model = tuned("resnet", Full())
    model.net.bn1.requires_grad_(False)
    train_mode(model)
    assert not model.net.bn1.training
    assert model.net.layer1[0].bn1.training
    assert "bn1.running_mean" not in sent_tensors(model)
    assert "layer1.0.bn1.running_mean" in sent_tensors(model)


def test_norms_without_parameters_count_as_frozen():
    model = tuned("resnet", Full())
    model.net.bn1 = nn.BatchNorm2d(model.net.bn1.num_features, affine=False)
    model.refresh()
    train_mode(model)
    assert not model.net.bn1.training
    assert "bn1.running_mean" not in sent_tensors(model)
    assert model.net.act1.training


def noisy(tuning):
    return apply_tuning(small("vit", drop_path_rate=0.5, proj_drop_rate=0.5), tuning, 0)


@torch.no_grad()
def test_a_frozen_backbone_has_no_dropout_in_train_mode():
    model = noisy(Lora(rank=2, dropout=0.0))
    train_mode(model)
    assert model.training
    assert torch.equal(model(images()), model.eval()(images()))


@torch.no_grad()
def test_full_tuning_has_dropout_in_train_mode_only():
    model = noisy(Full())
    train_mode(model)
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


@torch.no_grad()
def test_lora_has_its_own_dropout_in_train_mode_only():
    model = tuned("vit", Lora(rank=2, dropout=0.5))
    for name, p in trainable(model).items():
        if name.endswith("lora_B"):
            p.fill_(1.0)
    train_mode(model)
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


def test_the_mode_follows_a_later_change_of_what_trains():
    model = tuned("resnet", Head())
    train_mode(model)
    assert not model.net.bn1.training
    model.requires_grad_(True)
    train_mode(model)
    assert model.net.bn1.training
    freeze(model)
    train_mode(model)
    assert not model.net.bn1.training
    assert model.head.training


def test_schemes_are_found_by_file_name():
    assert {"full", "head", "lora", "visual_prompt"} <= set(TUNINGS.names())
    assert "base" not in TUNINGS.names()
    for name in TUNINGS.names():
        assert isinstance(TUNINGS.load(name).offers, frozenset)
    assert TUNINGS.load("lora") is TUNINGS.load("rayfed.tuning.lora:Lora") is Lora


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loar", "tuning.name: 'loar' does not exist; did you mean 'lora'"),
        ("base", "does not exist"),
        ("nowhere.at_all:X", "there is no module 'nowhere'; install its package"),
        ("rayfed.tuning.lora:SITES", r"is not a tuning scheme, which is a class with apply\(\)"),
    ],
)
def test_unknown_schemes_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        TUNINGS.load(name)


def test_bookkeeping_of_a_call_takes_few_steps():
    model = build_backbone(ModelConfig(name="vit_mini", pretrained=False), 10, 0)
    apply_tuning(model, Lora(rank=4), 0)
    sent = export(model)
    assert len(sent) == 50
    for work in (
        lambda: trainable(model),
        lambda: export(model),
        lambda: load(model, sent),
        lambda: train_mode(model),
    ):
        work()  # the first time fills caches
        assert _steps(work) < 3000  # about a millisecond


def _steps(work):
    """Number of calls of functions, in Python and in C, which does not depend on what else runs."""
    steps = []
    sys.setprofile(lambda _, event, __: steps.append(0) if event in ("call", "c_call") else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(steps)
