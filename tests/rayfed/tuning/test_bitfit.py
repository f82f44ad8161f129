"""BitFit: which parameters train, and that the rest stays as it is."""

import pytest
import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.tuning.base import apply_tuning, export, trainable
from rayfed.tuning.bitfit import BitFit
from tests.rayfed.models.small import NETS, small


@pytest.mark.parametrize("kind", NETS)
def test_biases_and_the_head_train_and_travel(kind):
    model = apply_tuning(small(kind), BitFit(), 0)
    names = set(trainable(model))
    assert {name for name in names if not name.startswith("head.")} == {
        name for name in small(kind).slots() if name.endswith("bias") and not name.startswith("head.")
    }
    assert {name for name in names if name.startswith("head.")} == {"head.weight", "head.bias"}
    assert set(export(model)) == names  # BatchNorm statistics stay: a bias alone does not train the layer


def test_the_number_of_biases_of_a_transformer():
    """Width 32. A block: two norms, qkv (96), projection, MLP (128, 32). Beside them: last norm, patches."""
    model = apply_tuning(small("vit"), BitFit(train_head=False), 0)
    assert sum(p.numel() for p in trainable(model).values()) == 4 * (64 + 96 + 32 + 128 + 32) + 32 + 32


def test_a_model_without_biases_is_refused():
    model = small("vit")
    for module in model.net.modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias = None
    model.refresh()
    with pytest.raises(ConfigError, match="no biases to train"):
        apply_tuning(model, BitFit(), 0)


def test_nothing_else_changes_in_training():
    model = apply_tuning(small("vit"), BitFit(), 0)
    before = {name: slot.tensor.detach().clone() for name, slot in model.slots().items()}
    torch.nn.functional.cross_entropy(model(torch.rand(2, 3, 32, 32)), torch.tensor([0, 1])).backward()
    torch.optim.SGD(trainable(model).values(), lr=1.0).step()
    changed = {name for name, slot in model.slots().items() if not torch.equal(slot.tensor, before[name])}
    assert changed
    assert changed <= set(trainable(model))
