"""Contract tests that every tuning scheme must pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import torch

from rayfed.config.schema import build_parts, load_config
from rayfed.federation.params import digest
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.config import ModelConfig
from rayfed.models.sharing import attach, checksum, dump, skeleton
from rayfed.testing.method import METHOD_CHECKS, same_tensors_on_actors
from rayfed.testing.small import SMALL
from rayfed.tuning.base import Tuning, apply_tuning, export, load, trainable

CLASSES = 3
SEED = 0


def check_tuning(name: str, overrides: Sequence[str] = (), actors: bool = False) -> None:
    """Run every contract test on a tuning scheme, and those of methods on FedAvg with this scheme.

    Args:
        name: File name in rayfed/tuning/, or `package.module:NAME` of a class.
        overrides: Settings as on the command line, such as `tuning.train_head=false` or another model.
        actors: Also compare with two Ray actors, which takes some seconds more.

    Raises:
        AssertionError: The scheme breaks the contract; the message says how.
        ConfigError: There is no such scheme, or it refuses the model.
    """
    for one in TUNING_CHECKS:
        one(name, overrides)
    settings = (f"tuning={name}", *overrides)
    for check in METHOD_CHECKS:
        check("fedavg", settings)
    if actors:
        same_tensors_on_actors("fedavg", settings)


def starts_the_same_everywhere(name: str, overrides: Sequence[str] = ()) -> None:
    """Building the model twice with one seed gives the same values; a model without values can share them."""
    model, tuning = _config(name, overrides)
    first, second = _tuned(model, tuning), _tuned(model, tuning)
    assert digest(export(first)) == digest(export(second)), f"{name}: the start values change"
    assert pickle.loads(pickle.dumps(tuning)) == tuning, f"{name}: the scheme must survive pickling"
    shared = dump(first)
    bare = skeleton(lambda: _tuned(model, tuning))
    attach(bare, shared)
    assert digest(export(bare)) == digest(export(first)), f"{name}: apply() differs on the meta device"


def trains_some_parameters_and_only_those(name: str, overrides: Sequence[str] = ()) -> None:
    """Some tensors train, a training step changes them, and the rest of the model does not change."""
    model, tuning = _config(name, overrides)
    tuned = _tuned(model, tuning)
    live = trainable(tuned)
    assert live, f"{name}: nothing requires gradients; call requires_grad_(True) on what shall train"
    frozen, before = checksum(tuned), export(tuned)
    tuned.train()
    output = tuned.predict(tuned(torch.rand(2, 3, tuned.size, tuned.size)))
    optimizer = torch.optim.SGD(live.values(), lr=0.1)
    torch.nn.functional.cross_entropy(output, torch.tensor([0, 1])).backward()
    optimizer.step()
    assert checksum(tuned) == frozen, f"{name}: a frozen weight was changed"
    assert digest(export(tuned)) != digest(before), f"{name}: a training step changes nothing that travels"


@torch.no_grad()
def travels_completely(name: str, overrides: Sequence[str] = ()) -> None:
    """A model that loads the tensors that are sent gives the same output: training changes no others."""
    model, tuning = _config(name, overrides)
    sender, receiver = _tuned(model, tuning), _tuned(model, tuning)
    for value in trainable(sender).values():
        value.add_(0.01)
    load(receiver, export(sender))
    x = torch.rand(2, 3, sender.size, sender.size)
    answers = [one.eval().predict(one(x)) for one in (sender, receiver)]
    assert torch.equal(*answers), f"{name}: what travels does not determine the model's answer"


TUNING_CHECKS: tuple[Callable[[str, Sequence[str]], None], ...] = (
    starts_the_same_everywhere,
    trains_some_parameters_and_only_those,
    travels_completely,
)
"""Every contract test of a tuning scheme alone: functions of its name and of overrides."""


def _config(name: str, overrides: Sequence[str]) -> tuple[ModelConfig, Tuning]:
    config = load_config([*SMALL, "algorithm=fedavg", f"tuning={name}", *overrides])
    return config.model, build_parts(config).tuning


def _tuned(model: ModelConfig, tuning: Tuning) -> Backbone:
    classes = tuple(f"class {i}" for i in range(CLASSES))
    return apply_tuning(build_backbone(model, classes, SEED), tuning, SEED)
