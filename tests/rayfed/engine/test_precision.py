"""Training and scoring in bfloat16, on the CPU."""

import json

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.method_registry import METHODS
from rayfed.testing import play, small_setup
from tests.conftest import quickly
from tests.rounding import near

QUICK = (
    "rounds=1",
    "model.options={depth: 2}",
    "data.domains=[plain,fonts]",
    "data.limit=6",
    "evaluation.personal=true",
)


def run(*overrides):
    setup = small_setup(*QUICK, *overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    return last, executor.worker, setup


@pytest.mark.parametrize("name", quickly(METHODS.names()))
def test_a_method_trains_in_bfloat16(name):
    last, _, setup = run(f"algorithm={name}", "train.precision=bf16")
    assert all(value.dtype == torch.float32 for value in last.state.params.values())
    assert all(torch.isfinite(value).all() for value in last.state.params.values())
    if name not in ("local", "zero_shot"):  # these send nothing back
        assert any(not torch.equal(v, setup.start[n]) for n, v in last.state.params.items())


@pytest.mark.parametrize(
    "options",
    [
        "model=test_resnet model.options={} model.size=64 tuning=full",
        "model=mixer_mini model.options={num_blocks: 2}",
        "model=clip_mini tuning=full",
        "data=prostate_mini data.domains=[RUNMC,UCL] data.limit=3 data.val=0 data.test=1 model=unet "
        "model.options={width: 2} model.size=32 tuning=full",
    ],
)
def test_a_kind_of_model_trains_in_bfloat16(options):
    parts = options.replace(": ", ":").split()
    last, _, _ = run("algorithm=fedavg", *(p.replace(":", ": ") for p in parts), "train.precision=bf16")
    assert all(value.dtype == torch.float32 for value in last.state.params.values())
    assert all(torch.isfinite(value).all() for value in last.state.params.values())


def test_the_frozen_network_is_in_bfloat16_and_what_trains_is_not():
    last, worker, setup = run("algorithm=fedavg", "tuning=lora", "train.precision=bf16")
    exact, _, full = run("algorithm=fedavg", "tuning=lora")
    kinds = {name: p.dtype for name, p in worker.model.named_parameters()}
    assert kinds["net.blocks.0.mlp.fc1.weight"] == torch.bfloat16
    assert {kinds[n] for n, p in worker.model.named_parameters() if p.requires_grad} == {torch.float32}
    halved = sum(array.nbytes for array in setup.weights.values())
    whole = sum(array.nbytes for array in full.weights.values())
    trained = sum(value.numel() * 4 for value in setup.start.values())
    products = sum(p.numel() * 2 for p in worker.model.parameters() if p.dtype == torch.bfloat16)
    assert whole - halved == products
    assert halved - trained == pytest.approx((whole - trained) / 2, rel=0.03)
    # Forwards and backwards through two blocks with four products each, and the head.
    products = 2 * (2 * 4 + 1)
    for name, value in exact.state.params.items():
        start = setup.start[name]
        near(last.state.params[name] - start, value - start, products, precision=torch.bfloat16)
    near(last.row["loss"], exact.row["loss"], products, precision=torch.bfloat16)
    assert last.row["loss"] != exact.row["loss"]


@pytest.mark.parametrize("model", ["vit_mini", "clip_mini", "mixer_mini"])
def test_only_products_are_in_bfloat16(model):
    """As under automatic mixed precision of a network in float32, also what the blocks of a ViT add to."""
    options = [f"model={model}", "model.options={}"] if model != "vit_mini" else []
    setup = small_setup(*QUICK, "algorithm=fedavg", "tuning=head", "train.precision=bf16", *options)
    net = InlineExecutor(setup.context, setup.weights).worker.model
    halved = [name for name, p in net.named_parameters() if p.dtype == torch.bfloat16]
    assert any(".mlp" in name or ".attn" in name for name in halved)
    assert not [name for name in halved if name.endswith(("pos_embed", "cls_token", "embedding"))]
    assert not [name for name in halved if "norm" in name or ".ln_" in name]
    assert [name for name in halved if name.endswith("bias")]  # cast in every pass otherwise
    exact = small_setup(*QUICK, "algorithm=fedavg", "tuning=head", *options).context.build()
    for name, value in exact.named_parameters():
        if name not in halved:
            assert torch.equal(net.get_parameter(name), value), name
    if model != "vit_mini":
        return  # their stems compute the tokens in bfloat16, and add nothing in float32 to them
    seen = []
    net.stack[1].register_forward_hook(lambda _, args, out: seen.extend([args[0].dtype, out.dtype]))
    net.eval()
    net(torch.zeros(1, 3, net.size, net.size))
    assert seen == [torch.float32, torch.float32]


def test_early_exits_classify_in_float32():
    setup = small_setup(*QUICK, "algorithm=depthfl", "tuning=exits", "train.precision=bf16")
    model = InlineExecutor(setup.context, setup.weights).worker.model
    seen = []
    for layer in (*model.exits.values(), model.head):
        layer.register_forward_hook(lambda _, args, out: seen.extend([args[0].dtype, out.dtype]))
    model.eval()
    model(torch.zeros(1, 3, model.size, model.size))
    assert set(seen) == {torch.float32}


def test_tf32_is_fp32_on_a_cpu():
    assert (
        run("algorithm=fedavg", "train.precision=tf32")[0].row["loss"]
        == run("algorithm=fedavg")[0].row["loss"]
    )


def test_the_precision_is_in_the_manifest(small):
    result = small("train.precision=bf16")
    assert json.loads((result.path / "environment.json").read_text())["precision"] == "bf16"
    assert "precision: bf16" in (result.path / "config.yaml").read_text()


@pytest.mark.slow
def test_the_default_experiment_scores_in_bfloat16_as_in_fp32(cache):
    """Mean over three seeds within 1.5 points."""
    means = [
        sum(
            play([f"seed={seed}", f"train.precision={kind}", f"data.cache={cache}"]).metrics["accuracy"]
            for seed in range(3)
        )
        / 3
        for kind in ("fp32", "bf16")
    ]
    assert means[1] == pytest.approx(means[0], abs=0.015)
