"""Every tuning scheme passes the contract tests; schemes that break them are found."""

import random
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from rayfed import testing as checks
from rayfed.config.schema import compatible_parts, load_config
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS
from rayfed.testing import TUNING_CHECKS, check_tuning
from rayfed.tuning.base import TUNINGS, freeze

OF_TEXT_TOWERS = {
    *("cocoop", "low_rank_prompt", "maple", "multimodal_adapter", "prompt_network", "text_prompt"),
    "transport_prompt",
}
"""Tunings that need a CLIP model."""


@pytest.mark.parametrize("name", TUNINGS.names())
@pytest.mark.parametrize("check", TUNING_CHECKS, ids=lambda check: check.__name__)
def test_contract(check, name):
    model = (
        ("model=clip_mini", "model.pretrained=false", "model.options={}")
        if name in {*OF_TEXT_TOWERS, "attention_adapter"}
        else ()
    )
    check(name, model)


def fits(algorithm, tuning):
    try:
        compatible_parts(load_config([f"algorithm={algorithm}", f"tuning={tuning}"]))
    except ConfigError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("tuning", ["adapter", "bitfit", "ia3", "ssf"])
def test_a_method_that_takes_lora_for_no_reason_of_its_own_takes_other_tunings(tuning):
    others = ("feddpa", "fedit", "fed_sb", "flora", "hetlora")
    of_lora = {name for name in METHODS.names() if "lora" in name or name in others}
    taken = {name for name in METHODS.names() if fits(name, "lora")}
    assert {name for name in taken if not fits(name, tuning)} <= of_lora
    assert len(taken - of_lora) > 25


@dataclass(frozen=True)
class Scheme:
    offers: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True)
class TrainsNothing(Scheme):
    def apply(self, model):
        freeze(model, train_head=False)
        return model


@dataclass(frozen=True)
class StartsAtRandom(Scheme):
    def apply(self, model):
        freeze(model)
        if not model.head.bias.is_meta:
            torch.nn.init.constant_(model.head.bias, random.SystemRandom().random())
        return model


@dataclass(frozen=True)
class FrozenButChanging(Scheme):
    def apply(self, model):
        freeze(model)

        def disturb(module, inputs):
            next(module.parameters()).data.add_(1.0)

        model.net.register_forward_pre_hook(disturb)
        return model


@dataclass(frozen=True)
class KeepsAPartAtHome(Scheme):
    """Its factor requires gradients and is hidden from the list of what travels."""

    def apply(self, model):
        freeze(model)
        model.head.register_forward_hook(lambda module, inputs, output: output + random.random())
        return model


@pytest.mark.parametrize(
    ("scheme", "check", "message"),
    [
        ("TrainsNothing", checks.trains_some_parameters_and_only_those, "nothing requires gradients"),
        ("StartsAtRandom", checks.starts_the_same_everywhere, "start values"),
        ("FrozenButChanging", checks.trains_some_parameters_and_only_those, "frozen weight"),
        ("KeepsAPartAtHome", checks.travels_completely, "does not determine"),
    ],
)
def test_a_broken_scheme_is_found(scheme, check, message):
    with pytest.raises(AssertionError, match=message):
        check(f"{__name__}:{scheme}")


def test_check_tuning_runs_the_checks_of_methods_too(monkeypatch):
    seen = []
    monkeypatch.setattr(checks, "TUNING_CHECKS", (lambda *args: seen.append(args),))
    monkeypatch.setattr(checks, "METHOD_CHECKS", (lambda *args: seen.append(args),))
    monkeypatch.setattr(checks, "same_tensors_on_actors", lambda *args: seen.append(args))
    check_tuning("head", ["a=1"])
    assert seen == [("head", ["a=1"]), ("fedavg", ("tuning=head", "a=1"))]
    check_tuning("head", actors=True)
    assert len(seen) == 5
