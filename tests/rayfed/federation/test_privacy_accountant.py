"""The guarantee of privacy: epsilon is the accountant's, and settings that break it are refused."""

from dataclasses import dataclass, replace

import pytest
import torch

from algorithms.fedadam import FedAdam
from algorithms.fedavgm import FedAvgM
from algorithms.fedit import FedIT
from algorithms.qffl import FairServer
from algorithms.scaffold import ScaffoldLocal
from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.method_registry import METHODS
from rayfed.federation.noise_and_compression import Channel
from rayfed.federation.privacy_accountant import (
    FINEST,
    Privacy,
    PrivacyConfig,
    check_private,
    check_values,
    guarantee,
    with_epsilon,
)
from rayfed.federation.server import Server
from rayfed.federation.train_config import TrainConfig
from tests.rounding import near

NOISY = Channel(clip=1.0, noise=1.1)
UNIFORM = Server(weighting="uniform")


@dataclass(frozen=True)
class Subclass(Server):
    """It sees the answers of single clients, of which it may use more than the mean."""

    def aggregate(self, state, cohort, updates):
        return super().aggregate(state, cohort, updates)


def test_epsilon_is_that_of_the_accountant_for_the_same_steps():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(7):
        accountant.step(noise_multiplier=1.1, sample_rate=0.25)
    found = guarantee(PrivacyConfig(), NOISY, clients=20, rate=0.25)
    assert found == Privacy(1.1, 0.25, 0.005)
    near(found.epsilon(7), accountant.get_epsilon(0.005), 7, precision=torch.float64)  # a sum over steps
    local = guarantee(
        PrivacyConfig(noise_at="client"), Channel(clip=1.0, noise=1.1, at_client=True), 20, 0.25
    )
    assert local == Privacy(0.55, 1.0, 1e-5)
    assert guarantee(PrivacyConfig(), Channel(clip=1.0), 20, 0.25) is None


@pytest.mark.parametrize(("epsilon", "rate", "noise_at"), [(8.0, 0.25, "server"), (0.5, 1.0, "client")])
def test_the_noise_of_an_epsilon_is_the_least_that_is_enough(epsilon, rate, noise_at):
    config = PrivacyConfig(epsilon=epsilon, noise_at=noise_at)
    channel = Channel(clip=1.0, at_client=noise_at == "client")
    found = with_epsilon(config, channel, 20, rate, 7)
    assert replace(found, noise=0.0) == channel

    def counted(noise):
        return guarantee(config, replace(channel, noise=noise), 20, rate).epsilon(7)

    assert counted(found.noise) <= epsilon < counted(found.noise - FINEST)
    assert with_epsilon(config, channel, 20, rate, 14).noise > found.noise  # more rounds need more
    assert with_epsilon(PrivacyConfig(), channel, 20, rate, 7) == channel


@pytest.mark.parametrize(
    ("epsilon", "channel", "message"),
    [
        (8.0, Channel(clip=1.0, noise=1.0), "privacy.epsilon: the noise follows from it"),
        (8.0, Channel(), "clip=inf limits nothing"),
        (1e-6, Channel(clip=1.0), "would need a noise of more than 10000 times clip"),
    ],
)
def test_an_epsilon_for_which_there_is_no_noise_is_refused(epsilon, channel, message):
    with pytest.raises(ConfigError, match=message):
        with_epsilon(PrivacyConfig(epsilon=epsilon), channel, 20, 1.0, 3)


@pytest.mark.parametrize(
    ("config", "channel", "message"),
    [
        (PrivacyConfig(delta=0.05), NOISY, "privacy.delta: 0.05 is not less than 1 / 20 clients"),
        (PrivacyConfig(), Channel(noise=1.0), "clip=inf limits nothing"),
    ],
)
def test_a_guarantee_without_meaning_is_refused(config, channel, message):
    with pytest.raises(ConfigError, match=message):
        guarantee(config, channel, clients=20, rate=0.25)


@pytest.mark.parametrize(
    ("server", "local", "sampling", "everyone", "message"),
    [
        (Server(), Local(), "poisson", False, "server.weighting"),
        (UNIFORM, Local(), "uniform", False, "sampling=poisson"),
        (UNIFORM, Local(), "one_per_domain", False, "sampling=poisson"),
        (UNIFORM, Local(), "one_per_domain", True, "sampling=poisson"),
        (Subclass(weighting="uniform"), Local(), "poisson", False, "uses more than the mean"),
        (FairServer(), Local(), "poisson", False, "uses more than the mean"),
        (UNIFORM, ScaffoldLocal(), "poisson", False, "also sends other values"),
        (Server(weighting="uniform", lora_agg="product_svd"), Local(), "poisson", False, "server.lora_agg"),
    ],
)
def test_what_breaks_the_guarantee_is_refused(server, local, sampling, everyone, message):
    check_private(UNIFORM, Local(), NOISY, "poisson", False, TrainConfig())
    check_private(UNIFORM, Local(), NOISY, "uniform", True, TrainConfig())
    check_private(
        server, local, Channel(clip=1.0), sampling, everyone, TrainConfig()
    )  # without noise nothing is promised
    with pytest.raises(ConfigError, match=message):
        check_private(server, local, NOISY, sampling, everyone, TrainConfig())


@pytest.mark.parametrize("server", [FedAvgM, FedAdam, FedIT])
def test_a_rule_that_steps_from_the_mean_alone_keeps_the_guarantee(server):
    check_private(server(weighting="uniform"), Local(), NOISY, "poisson", False, TrainConfig())


def test_every_rule_that_sees_single_answers_is_known():
    servers = {name: METHODS.load(name, "algorithm").server for name in METHODS.names()}
    mean_only = {name for name, server in servers.items() if server.uses_mean_only()}
    assert {"fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedit"} <= mean_only
    assert not mean_only & {"afl", "fedbuff", "fednova", "fedra", "inclusivefl", "qffl", "scaffold", "term"}


@pytest.mark.parametrize("at_client", [False, True])
def test_steps_that_depend_on_other_clients_are_refused(at_client):
    """The smallest client sets the steps of all others (docs/realism.md)."""
    train = TrainConfig(local_steps="min_over_clients_plus_one")
    noisy = Channel(clip=1.0, noise=1.1, at_client=at_client)
    check_private(UNIFORM, Local(), Channel(clip=1.0), "poisson", False, train)
    with pytest.raises(ConfigError, match=r"train\.local_steps: .*set train\.local_steps=full_epoch"):
        check_private(UNIFORM, Local(), noisy, "poisson", False, train)


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize(
    ("accountant", "noise", "message"),
    [
        ("prv", 0.01, r"privacy\.accountant: prv cannot count"),
        ("prv", 1e-3, r"privacy\.accountant: prv cannot count"),
        ("prv", 1e-200, "channel: noise is too small"),
        ("rdp", 1e-200, "channel: noise is too small"),
    ],
)
def test_noise_too_small_to_count_is_refused_before_it_is_counted(
    accountant, noise, rate, message, monkeypatch
):
    """`prv` computed for minutes, or wanted 69 GB, and ended with NumPy's error."""
    import opacus.accountants

    asked = []
    monkeypatch.setattr(opacus.accountants.PRVAccountant, "get_epsilon", lambda *_, **__: asked.append(1))
    with pytest.raises(ConfigError, match=message):
        Privacy(noise, rate, 0.01, accountant).check(10)
    assert not asked
    Privacy(1.0, rate, 0.01, accountant).check(10)


def test_compression_is_only_of_what_has_its_noise():
    """With error feedback a change may be larger than clip, for which the noise of the server is made."""
    coded = {"clip": 1.0, "noise": 1.1, "codes": ("top_k",), "top_k": 0.5}
    with pytest.raises(ConfigError, match=r"channel: top_k .* privacy\.noise_at=client"):
        guarantee(PrivacyConfig(), Channel(**coded), clients=20, rate=0.25)
    assert guarantee(PrivacyConfig(), Channel(**coded, at_client=True), clients=20, rate=0.25) is not None


def test_statistics_and_capacities_are_refused():
    start = {"w": torch.zeros(1)}
    whole = {"ranks": {"a": 2}, "rank": 2}
    check_values(NOISY, start, {"a": 3}, depth=3, **whole)
    check_values(NOISY, start, {"a": 3}, depth=3, ranks={}, rank=0)
    with pytest.raises(ConfigError, match=r"capacity\.rank: .* all have rank 2"):
        check_values(NOISY, start, {"a": 3}, depth=3, ranks={"a": 2, "b": 1}, rank=2)
    with pytest.raises(ConfigError, match=r"train\.batch_norm"):
        check_values(NOISY, {**start, "norm.running_mean": torch.zeros(1)}, {"a": 3}, depth=3, **whole)
    for capacity in ({"a": 3, "b": 2}, None):
        with pytest.raises(ConfigError, match="capacity"):
            check_values(NOISY, start, capacity, depth=3, **whole)
