import random
import traceback

import numpy as np
import pytest
import torch

from rayfed.seeds import derive, generator, use_seed


def test_streams_have_names():
    assert derive(0, "fit", 3, "c1") == derive(0, "fit", 3, "c1")
    others = [
        derive(1, "fit", 3, "c1"),
        derive(0, "fit", 31, "c"),
        derive(0, "fit", 3, "c2"),
        derive(0, "fit3", "c1"),
    ]
    assert len({derive(0, "fit", 3, "c1"), *others}) == 5
    assert 0 <= derive(0) < 2**63


def test_the_same_seed_is_the_same_in_every_process():
    """A constant: hash() would be salted, and a changed derivation would change every result."""
    assert derive(7, "fit", 0, "c0") == 6756123503565748328


def test_global_streams_are_set_for_one_call_and_restored():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with use_seed(5) as rng:
        inside = random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, generator=rng).item()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before
    with use_seed(5) as rng:
        again = random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, generator=rng).item()
    assert inside == again


def test_streams_are_restored_after_an_error():
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError), use_seed(9):
        torch.rand(5)
        raise RuntimeError
    assert torch.rand(1).item() == expected


def test_generator_is_private():
    assert generator(0, "sample", 1).integers(1000) == generator(0, "sample", 1).integers(1000)


class Seeds:
    """A module of torch for a type of device, which has the functions of `names` and keeps their seeds."""

    def __init__(self, *names):
        self.of = {name: [] for name in names}
        for name in names:
            setattr(self, name, self.of[name].append)


@pytest.mark.parametrize(
    ("names", "called"),
    [(("manual_seed", "manual_seed_all"), "manual_seed_all"), (("manual_seed",), "manual_seed")],
)
@pytest.mark.parametrize("there", [False, True])
def test_devices_are_seeded_where_there_are_any(there, names, called, monkeypatch):
    module = Seeds(*names)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(traceback, "format_stack", None)  # called for each type of device that is not there
    with use_seed(5):
        inside = torch.rand(1)
    assert module.of[called] == [5] * there
    assert sum(map(len, module.of.values())) == there
    assert torch.equal(inside, torch.rand(1, generator=torch.Generator().manual_seed(5)))
