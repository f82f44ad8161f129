"""Operations of a training step by hand, and the same with and without values."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rayfed.engine import count_cost as counting
from rayfed.engine.count_cost import step_operations
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import skeleton
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.full import Full
from rayfed.tuning.head import Head
from rayfed.tuning.lora import Lora
from rayfed.tuning.transport_prompt import TransportPrompt
from tests.rayfed.models.small import small

WIDTH, CLASSES = 32, 5


def tuned(kind, scheme, **options):
    return skeleton(lambda: apply_tuning(small(kind, **options), scheme, 0))


def test_a_head_on_kept_features_by_hand():
    """Forward: a product and a sum for each weight. Backward: the same for its gradient."""
    assert step_operations(tuned("vit", Head()), True) == (0, 2 * WIDTH * CLASSES * 2)


def test_kept_features_have_the_shape_that_the_head_needs():
    """Cosines of 16 patches with two prompts of each class, and their gradients of the prompts."""
    names = [f"class {c}" for c in range(CLASSES)]
    clip = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 1})
    model = skeleton(lambda: apply_tuning(build_backbone(clip, names, 0), TransportPrompt(), 0))
    _, row = step_operations(model, True)
    assert row == 2 * 16 * 2 * CLASSES * 64 * 2


def test_a_frozen_network_is_gone_through_forward_only():
    """Without kept features, patches (3 * 8 * 8 * 32 for 16 tokens) and blocks are added to the head."""
    model = tuned("vit", Head(), depth=1)
    tokens = 17
    linear = tokens * (3 * WIDTH**2 + WIDTH**2 + 2 * 4 * WIDTH**2)
    attention = 2 * tokens**2 * WIDTH
    patches = 16 * 3 * 8 * 8 * WIDTH
    network = 2 * (linear + attention + patches)
    assert step_operations(model, False) == (0, network + 2 * WIDTH * CLASSES * 2)


@pytest.mark.parametrize(("kind", "scheme"), [("vit", Head()), ("mixer", Lora()), ("resnet", Full())])
def test_a_model_with_values_costs_the_same(kind, scheme):
    """Not with attention, whose fused kernel computes products once more in the backward pass."""
    without = tuned(kind, scheme)
    assert without.head.weight.is_meta
    assert step_operations(without, True) == step_operations(apply_tuning(small(kind), scheme, 0), True)


def test_attention_of_a_frozen_tower_is_counted_with_values_too(monkeypatch):
    """PyTorch computes attention without gradients in one step, which its counter does not know."""
    clip = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 1})
    model = skeleton(lambda: apply_tuning(build_backbone(clip, ["a", "b"], 0), Lora(sites=("l1",)), 0))
    counted = step_operations(model, False)
    assert torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(counting, "SMALL", 0)
    assert step_operations(model, False) == counted


def test_training_everything_costs_about_three_passes():
    (_, full), (_, frozen) = (
        step_operations(tuned("vit", scheme), keeps) for scheme, keeps in ((Full(), True), (Head(), False))
    )
    assert 2.9 < full / frozen < 3


def test_counting_leaves_no_gradient_behind():
    model = apply_tuning(small("vit"), Lora(), 0)
    step_operations(model, True)
    assert all(p.grad is None for p in model.parameters())
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("kind", "scheme"), [("vit", Lora()), ("vit", Full()), ("mixer", Lora()), ("resnet", Full())]
)
@pytest.mark.parametrize("keeps", [True, False])
def test_zeros_and_no_values_give_the_count_of_torchs_own_counter(kind, scheme, keeps, monkeypatch):
    model = tuned(kind, scheme)
    with_zeros = step_operations(model, keeps)
    monkeypatch.setattr(counting, "SMALL", 0)
    assert step_operations(model, keeps) == with_zeros
    model.train()
    with FlopCounterMode(display=False) as counter:
        model(model.sample(2)).sum().backward()
    assert keeps or counter.get_total_flops() == 2 * with_zeros[1]
