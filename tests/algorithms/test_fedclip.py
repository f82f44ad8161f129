"""FedCLIP's loss and gate against the numbers of the specification, and short runs."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedclip import both_sides, symmetric_loss
from rayfed.config.schema import load_config
from rayfed.config.variants import comparisons
from rayfed.errors import ConfigError
from rayfed.federation.aggregation import mean_by_name
from rayfed.testing import small_setup
from rayfed.tuning.attention_adapter import AttentionAdapter
from rayfed.types import Update
from tests.rounding import equally_near, near
from tests.vectors import vector

V1 = vector("fedclip_fftgp", "V1")
V2 = vector("fedclip_fftgp", "V2")
V3 = vector("fedclip_fftgp", "V3")


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def features_with(logits, scale=10.0):
    """Image features of length 1 whose cosines with the axes are logits / scale."""
    images = logits / scale
    rest = (1 - images.square().sum(1, keepdim=True)).sqrt()
    texts = torch.eye(logits.shape[1], logits.shape[1] + 1, dtype=logits.dtype)
    return torch.cat((images, rest), dim=1), texts, scale


@pytest.mark.parametrize("case", [0, 1])
def test_v2_symmetric_loss(case):
    labels = V2.inputs["labels"][case]
    images, texts, scale = features_with(doubles(V2.inputs["logits"][case]))
    V2.matches(symmetric_loss(images, texts, torch.tensor(labels), scale), V2.expected["loss"][case])
    longer = symmetric_loss(3 * images.numpy(), 0.2 * texts.numpy(), labels, scale)
    assert isinstance(longer, np.floating)
    V2.matches(longer, V2.expected["loss"][case])


@pytest.mark.parametrize("case", [0, 1])
def test_v2_both_sides(case):
    given = features_and_labels(V2.inputs["logits"][case], V2.inputs["labels"][case])
    image_side, text_side = both_sides(*given)
    V2.matches(image_side, V2.expected["image_side"][case])
    V2.matches(text_side, V2.expected["text_side"][case])


def features_and_labels(logits, labels):
    images, texts, scale = features_with(doubles(logits))
    return images, texts, torch.tensor(labels), scale


def test_v2_repeated_labels_are_pairs_of_their_own():
    """The same as with one class for each image of the batch, whose columns are gathered by label."""
    repeated = both_sides(*features_and_labels(V2.inputs["logits"][1], V2.inputs["labels"][1]))
    single = both_sides(*features_and_labels(V2.expected["gathered"], [0, 1, 2]))
    for sides in (repeated, single):
        V2.matches(sides[0], V2.expected["image_side_identity"])
        V2.matches(sides[1], V2.expected["text_side_identity"])


def test_the_floor_is_the_mean_of_log_counts():
    texts = torch.eye(4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 3])
    found = symmetric_loss(texts[labels], texts, labels, 1000.0)
    near(found, math.log(2) / 2, 4 * 10, size=1000.0, precision=torch.float64)


def test_v2_floor():
    """Two images of label 0 among three: with a huge scale, only the counts are left of the image side."""
    labels = torch.tensor(V2.inputs["labels"][1])
    texts = torch.eye(2, dtype=torch.float64)
    V2.matches(both_sides(texts[labels], texts, labels, 1000.0)[0], V2.expected["floor"])


def gate():
    adapter = AttentionAdapter(3).double()
    names = [f"{layer}_{kind}" for layer in ("inner", "outer") for kind in ("weight", "bias")]
    adapter.load_state_dict({name.replace("_", "."): doubles(V1.inputs[name]) for name in names})
    return adapter


def test_v1_gate():
    x = doubles([V1.inputs["image"]])
    adapter = gate()
    hidden = adapter.inner(x).tanh()
    gated = adapter(x)
    unit = F.normalize(gated, dim=-1)
    logits = V1.inputs["scale"] * unit @ F.normalize(doubles(V1.inputs["texts"]), dim=-1).T
    for found, name in (
        (hidden, "hidden"),
        (adapter.outer(hidden), "before_softmax"),
        (adapter.attention(x), "attention"),
        (gated, "gated"),
        (unit, "normalised"),
        (logits, "logits"),
        (logits.softmax(-1), "probabilities"),
    ):
        V1.matches(found[0], V1.expected[name])
    V1.matches(gated.norm(), V1.expected["length"])
    assert logits.argmax().item() == V1.expected["class"]


def test_v1_size():
    assert {"inner_weight", "inner_bias", "outer_weight", "outer_bias"} < V1.inputs.keys()
    adapter = AttentionAdapter(V1.inputs["width"])
    assert sum(p.numel() for p in adapter.parameters()) == V1.expected["parameters"]


def test_the_uniform_gate_changes_no_direction():
    adapter = AttentionAdapter(8)
    torch.nn.init.zeros_(adapter.outer.weight)
    torch.nn.init.constant_(adapter.outer.bias, 0.7)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    near(F.normalize(adapter(x), dim=-1), F.normalize(x, dim=-1), 8 + 8, size=1.0)


def test_v3_means_of_adapters():
    sizes = V3.inputs["num_examples"]
    updates = [Update(client=str(i), params={"g": doubles(v)}) for i, v in enumerate(V3.inputs["params"])]
    V3.matches(mean_by_name(updates, sizes)["g"], V3.expected["by_data"])
    V3.matches(mean_by_name(updates, [1] * len(sizes))["g"], V3.expected["uniform"])


RANDOM = ("model.options={depth: 1}", "rounds=2")


@pytest.mark.parametrize("name", ["fedclip", "promptfl", "fft_gp_clip", "fft_gp_prompt", "zero_shot"])
def test_runs_by_name_and_only_small_tensors_travel(short, name):
    result = short(name, *RANDOM)
    names = {"fedclip": "adapter.", "fft_gp_clip": "adapter.", "zero_shot": "head.weight"}
    assert all(n.startswith(names.get(name, "text.context")) for n in result.params)
    assert 0 <= result.metrics["accuracy"] <= 1


def losses(run):
    """The loss of each client in the only round, shape (clients,), float64."""
    rows = pq.read_table(run.path / "clients.parquet").to_pylist()
    return torch.tensor([r["value"] for r in rows if r["metric"] == "loss"], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.steady
def test_zero_shot_is_the_same_under_every_tuning(short, exact):
    """Adapters and learned prompts are left out, so it can stand beside any method in a table."""
    tunings = ("head", "attention_adapter", "residual_adapter", "text_prompt", "lora", "full")
    once = ("zero_shot", "rounds=1", "model.pretrained=true", "model.options={}")
    runs = [short(*once, f"tuning={name}") for name in tunings]
    judge = losses(exact(*once, "tuning=head"))
    for run in runs[1:]:
        equally_near([losses(runs[0])], [losses(run)], [judge])
    assert runs[0].metrics["accuracy"] > 0.4
    beside = short("fedclip", *RANDOM, "compare=zero_shot")
    assert "| zero_shot | " in (beside.path / "report.md").read_text()


def test_zero_shot_runs_for_one_round_beside_others():
    config = load_config(["algorithm=fedclip", "compare=[zero_shot,fedavg]", "rounds=7"])
    assert {name: other.rounds for name, other in comparisons(config).items()} == {
        "zero_shot": 1,
        "fedavg": 7,
    }


def test_cached_features_change_no_bit(short, exact):
    """Kept features give the same tensors; asking for them where they would be wrong is refused."""
    kept = short("fedclip", *RANDOM, "train.cache_features=on")
    again = short("fedclip", *RANDOM)
    encoded = short("fedclip", *RANDOM, "train.cache_features=off")
    assert kept.sha256 == again.sha256
    judge = exact("fedclip", *RANDOM, "train.cache_features=off")
    equally_near(encoded.params, kept.params, judge.params)
    with pytest.raises(ConfigError, match=r"train\.cache_features: on is not exact .* network train"):
        short("fedavg", *RANDOM, "train.cache_features=on", "tuning=full")


def metrics_of(run, exchange, model):
    """Values by metric, in the order of rounds and clients."""
    found = {}
    for row in pq.read_table(run.path / "clients.parquet").to_pylist():
        if row["exchange"] == exchange and row["model"] == model:
            found.setdefault(row["metric"], []).append(row["value"])
    return found


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [
        ("fedclip", ["tuning=cocoop"], "others for each image"),
        ("bgp", ["tuning=transport_prompt"], "several for each class"),
        ("fedclip", ["tuning=lora", "model=vit_mini"], r"model\.name: 'vit_mini' has no text tower"),
    ],
)
def test_a_loss_that_lacks_its_class_features_is_refused_before_a_client_starts(method, options, error):
    with pytest.raises(ConfigError, match=error):
        small_setup(f"algorithm={method}", "model=clip_mini", *options)


@pytest.mark.parametrize(
    ("method", "option"), [("fedclip", "local.objective=class"), ("bgp", "local.align_weight=0")]
)
def test_without_that_loss_class_prompts_may_depend_on_images(short, method, option):
    run = short(method, "rounds=1", "data.limit=4", "model=clip_mini", "tuning=cocoop", option)
    assert "text.prompter.inner.weight" in run.params


def test_norms_and_attention_are_logged_and_weight_decay_shrinks_them(short):
    few = (*RANDOM, "compare=[]", "train.batch_size=8", "rounds=3")
    decayed, free = (
        metrics_of(short("fedclip", *few, f"train.weight_decay={d}"), "fit", "gate") for d in (0.2, 0)
    )
    assert decayed.keys() == {"inner_norm", "outer_norm", "attention_variation"}
    assert len(decayed["inner_norm"]) == 3 * 5
    assert decayed["outer_norm"][-1] < free["outer_norm"][-1]
    assert all(value > 0 for value in decayed["attention_variation"])


def test_any_method_runs_on_a_clip_model_with_the_default_tuning(short):
    """LoRA in the image tower's MLPs; every adapter learns."""
    run = short("ga", "model=clip_mini", "rounds=1", "data.val=4", "model.options={depth: 2}")
    factors = {n: v for n, v in run.params.items() if n.endswith("lora_B")}
    assert sorted(factors) == [f"blocks.{i}.mlp.c_proj.lora_B" for i in (0, 1)]
    assert all(v.abs().max() > 0 for v in factors.values())
    with pytest.raises(ConfigError, match=r"tuning\.sites: \['l0'\] match no linear layer"):
        short("ga", "model=clip_mini", "rounds=1", "tuning.sites=[l0]")


@pytest.mark.slow
@pytest.mark.steady
def test_the_baselines_with_fedclips_loss(short):
    """FedProx's term holds the gate back; both towers train with tuning.towers."""
    few = (*RANDOM, "compare=[]", "train.batch_size=8")
    plain, held = (short("fedclip", *few, *mu) for mu in ((), ("local.mu=50",)))
    start = short("fedclip", *few, "rounds=1", "train.lr=1.0e-9").params
    moved = [sum(float((run.params[n] - v).norm()) for n, v in start.items()) for run in (plain, held)]
    assert 0 < moved[1] < moved[0]
    towers = short("fedclip", *RANDOM, "compare=[]", "tuning.towers=true", "rounds=1", "train.lr=1.0e-4")
    names = set(towers.params)
    assert any(n.startswith("adapter.") for n in names)
    assert any(n.startswith("text.tower.") for n in names)
    assert any("blocks.0." in n for n in names)


def test_fine_tuned_models_are_scored_as_personal(short):
    """Figure 3c: fine-tuning changes what is scored as personal, and nothing that is sent."""
    few = (
        *RANDOM,
        "compare=[]",
        "evaluation.personal=true",
        "data.val=0",  # with validation images the best pass is kept, here the first one
        "model.pretrained=true",
        "model.options={}",
    )
    plain = short("fedclip", *few)
    tuned = short("fedclip", *few, "local.finetune_epochs=3")
    assert plain.sha256 == tuned.sha256
    before, after = (metrics_of(run, "fit", "personal")["loss"] for run in (plain, tuned))
    assert before != after
    assert sum(after) < 0.95 * sum(before)
