"""What the list says about groups is what the methods and the tuned models decide."""

import pytest
import torch

from rayfed.config.catalog import catalog
from rayfed.config.grouping import TUNINGS_ALONE, one_by_one
from rayfed.errors import ConfigError
from rayfed.federation.group_size import why_alone
from rayfed.federation.method import METHODS
from rayfed.models.build import build_backbone
from rayfed.models.config import ModelConfig
from rayfed.models.stacked import why_not_joint
from rayfed.tuning.base import TUNINGS, apply_tuning


def test_the_list_names_the_methods_whose_clients_are_trained_one_by_one():
    assert one_by_one() == [name for name in METHODS.names() if why_alone(METHODS.load(name).local())]
    assert one_by_one() == ["fedmix"]
    assert "except with algorithm=fedmix, tuning=full, tuning=maple, " in catalog()


@pytest.mark.parametrize("name", TUNINGS.names())
def test_the_list_names_the_tunings_with_which_clients_are_trained_one_by_one(name):
    reasons = [
        why for model in ("vit_mini", "mixer_mini", "clip_mini") if (why := joint(name, model)) is not None
    ]
    assert reasons
    assert all(reasons) == (name in TUNINGS_ALONE)


def joint(name, model):
    """Why clients cannot share passes of a model; None: the model cannot be tuned in this way."""
    try:
        with torch.device("meta"):
            bare = build_backbone(ModelConfig(name=model), 3, 0)
        return why_not_joint(apply_tuning(bare, TUNINGS.load(name)(), 0))
    except ConfigError:
        return None
