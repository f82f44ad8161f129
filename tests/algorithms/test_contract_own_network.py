"""Every method on a small network of a user: it keeps its contract, or is refused by what is missing."""

import pytest
import torch
from torch import nn

import rayfed
from rayfed.config.own_network import register
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS
from rayfed.testing import (
    DOMAINS,
    leaves_messages_and_frozen_weights_alone,
    repeats_itself_after_an_interruption,
)
from tests.conftest import STEADY

NAMES = METHODS.names()
QUICK = ("depthfl", "fedra", "fedclip")


class Half(nn.Module):
    """A block: mixes the tokens by attention, then each of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        z = self.norm(x)
        weights = (self.query(z) @ self.key(z).mT / 4).softmax(-1)
        return x + self.second(self.first(weights @ z).relu())


class Patches(nn.Module):
    """Maps images (B, 3, 32, 32) to ten logits, by 16 tokens and four blocks."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 8, 8)
        self.middle = nn.ModuleList(Half() for _ in range(4))
        self.answer = nn.Linear(16, 10)

    def forward(self, x):
        tokens = self.cut(x).flatten(2).mT
        for block in self.middle:
            tokens = block(tokens)
        return self.answer(tokens.mean(1))


@pytest.fixture(scope="module")
def overrides(cache):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Patches()
    name = register(rayfed.Model(net, blocks="middle", mean=0.5, std=0.5))
    return [f"model={name}", "model.options={}", "model.size=32", DOMAINS, f"data.cache={cache}"]


TEXT = "text tower"
TOKENS = "only timm's VisionTransformer and Beit families are known to take additional tokens"
REFUSED = {
    **dict.fromkeys(("fedclip", "fedotp", "fedpgp", "fedtpg", "pfedmma", "promptfl"), TEXT),
    **dict.fromkeys(("fedgc", "fedgcr", "fedgr"), TOKENS),
}
"""Methods that cannot use such a network, and what the message says is missing."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=STEADY) for n in NAMES])
def test_it_keeps_its_contract_or_says_what_is_missing(name, overrides):
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            leaves_messages_and_frozen_weights_alone(name, overrides)
        return
    leaves_messages_and_frozen_weights_alone(name, overrides)
    repeats_itself_after_an_interruption(name, overrides)
