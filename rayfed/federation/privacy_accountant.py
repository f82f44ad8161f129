"""The guarantee of differential privacy of a run: which settings have one, and its epsilon after each round.

Client-level privacy, of two sets of clients of which one has a client more (McMahan et al., Learning
Differentially Private Recurrent Language Models, ICLR 2018 [mcmahan2018dp], Algorithm 1). Opacus counts the
privacy loss.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Gt, Lt

from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.noise_and_compression import Channel
from rayfed.federation.server import Server
from rayfed.federation.train_config import TrainConfig
from rayfed.types import Params, Positive, is_statistic

AccountantName: TypeAlias = Literal["rdp", "prv"]

MOST_BY_PRV = 500
"""Largest epsilon, by `rdp`, up to which `prv` is used."""
FINEST = 1 / 1024
"""Step of the noise that is computed from an epsilon."""
MOST_NOISE = 10_000
"""Largest noise that is computed from an epsilon."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The section `privacy`: which guarantee `channel` with `noise` gives.

    Attributes:
        noise_at: `server`: the server adds the noise to the mean (central privacy; the clients trust the
            server). `client`: each client adds it to its own answer (local privacy).
        delta: Probability with which the guarantee may fail; auto: 1 / (10 x number of clients), and for
            `client` 1e-5.
        accountant: Counts the privacy loss: by Renyi divergences (rdp), or numerically, which is tighter and
            slower (prv).
        epsilon: Largest epsilon of the whole run, counted by rdp, from which the noise is computed; none:
            `channel` says the noise.
    """

    noise_at: Literal["server", "client"] = "server"
    delta: Literal["auto"] | Annotated[float, Gt(0), Lt(1)] = "auto"
    accountant: AccountantName = "rdp"
    epsilon: Positive | None = None


@dataclass(frozen=True)
class Privacy:
    """Counts the privacy loss.

    Attributes:
        multiplier: Standard deviation of the noise as a multiple of the sensitivity.
        rate: Probability with which a client takes part in a round.
        delta: Probability with which the guarantee may fail.
        accountant: Name of the accountant.
    """

    multiplier: float
    rate: float
    delta: float
    accountant: AccountantName = "rdp"

    def epsilon(self, rounds: int) -> float:
        """Epsilon after this many rounds, of the Poisson-sampled Gaussian mechanism."""
        accountant = _accountants().create_accountant(self.accountant)
        accountant.history = [(self.multiplier, self.rate, rounds)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Opacus, that a bound by Renyi divergences could be tighter
            return float(accountant.get_epsilon(delta=self.delta))

    def check(self, rounds: int) -> None:
        """Check before a run that its privacy loss can be counted.

        The numbers that `prv` computes with overflow beyond `MOST_BY_PRV`, after minutes or gigabytes.

        Args:
            rounds: Number of rounds of the run.

        Raises:
            ConfigError: The noise is so small that it cannot.
        """
        try:
            largest = replace(self, accountant="rdp").epsilon(rounds)
        except ArithmeticError:
            largest = math.inf
        if not math.isfinite(largest):
            raise ConfigError(
                f"channel: noise is too small: epsilon would be infinite after {rounds} rounds; set a larger "
                f"noise, or leave it out"
            )
        if self.accountant == "prv" and largest > MOST_BY_PRV:
            raise ConfigError(
                f"privacy.accountant: prv cannot count an epsilon of more than {MOST_BY_PRV}, and that of "
                f"{rounds} rounds is about {largest:.3g}; set a larger noise in channel, fewer rounds, or "
                f"privacy.accountant=rdp"
            )


def _accountants() -> Any:
    try:
        return importlib.import_module("opacus.accountants")
    except ImportError as err:
        raise ConfigError(
            'channel: noise needs Opacus, which counts the privacy loss: pip install "rayfed-sim[privacy]"'
        ) from err


AUTO_DELTA = {"server": "1 / (10 x clients)", "client": "1e-5"}
"""The value of `privacy.delta=auto` in words, by `privacy.noise_at`."""


def guarantee(config: PrivacyConfig, channel: Channel, clients: int, rate: float) -> Privacy | None:
    """The accountant of a run's privacy loss; None: its channel adds no noise.

    With noise at the client, a message is protected against any other message of that client, at a distance
    of up to 2 x clip, and the server knows who sent it: the multiplier is halved, and no sampling helps. The
    epsilon is that of a client that takes part in every round.

    Args:
        config: The section `privacy`.
        clients: Number of clients of the experiment.
        rate: Probability with which a client takes part in a round.

    Raises:
        ConfigError: The norm is not limited, or compression may change it after that; delta is too large,
            Opacus is not installed, or the section is set and there is no noise.
    """
    if not channel.noise:
        if given := [name for name, value in vars(config).items() if value != vars(PrivacyConfig())[name]]:
            raise ConfigError(
                f"privacy: {given[0]} has no effect without noise in the channel; leave it out, or add it, "
                f"as in channel='[{{clip: 1.0}}, {{noise: 1.0}}]'"
            )
        return None
    if not math.isfinite(channel.clip):
        raise ConfigError(
            "channel: clip=inf limits nothing, so that noise cannot be a multiple of it; set clip to a "
            "number, for example the median of the metric change_norm in clients.parquet of a run with a "
            "very large clip, such as channel='[{clip: 1e9}]'"
        )
    _accountants()
    if channel.at_client:
        delta = 1e-5 if config.delta == "auto" else config.delta
        return Privacy(channel.noise / 2, 1.0, delta, config.accountant)
    if channel.codes:
        raise ConfigError(
            f"channel: {channel.codes[0]} at the client comes before the noise of the server, and can make a "
            f"clipped change larger than clip; leave it out, or set privacy.noise_at=client"
        )
    delta = 1 / (10 * clients) if config.delta == "auto" else config.delta
    if delta >= 1 / clients:
        raise ConfigError(
            f"privacy.delta: {delta:g} is not less than 1 / {clients} clients, with which the data of a "
            f"client could be published as it is; set privacy.delta=auto or a smaller number"
        )
    return Privacy(channel.noise, rate, delta, config.accountant)


def with_epsilon(config: PrivacyConfig, channel: Channel, clients: int, rate: float, rounds: int) -> Channel:
    """The channel with the least noise whose epsilon, counted by rdp, is at most `privacy.epsilon`.

    The noise is a multiple of `FINEST`, so that it does not depend on how a processor rounds.

    Args:
        config: The section `privacy`.
        clients: Number of clients of the experiment.
        rate: Probability with which a client takes part in a round.
        rounds: Number of rounds of the run.

    Raises:
        ConfigError: The channel has noise or no clip, or no noise is enough.
    """
    if (target := config.epsilon) is None:
        return channel
    if channel.noise:
        raise ConfigError(
            "privacy.epsilon: the noise follows from it, and channel has noise, too; leave one of the two out"
        )
    by_rdp = replace(config, accountant="rdp")

    def enough(steps: int) -> bool:
        noisy = replace(channel, noise=steps * FINEST)
        counted = guarantee(by_rdp, noisy, clients, rate)
        assert counted is not None
        try:
            return counted.epsilon(rounds) <= target
        except ArithmeticError:  # the noise is so small that epsilon is infinite
            return False

    high = round(1 / FINEST)
    while not enough(high):
        high *= 2
        if high * FINEST > MOST_NOISE:
            raise ConfigError(
                f"privacy.epsilon: {target:g} would need a noise of more than {MOST_NOISE} times clip in "
                f"{rounds} rounds; set a larger one, or fewer rounds"
            )
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return replace(channel, noise=high * FINEST)


WITHOUT_VALUES = ("uniform", "poisson", "one_per_domain")
"""Rules for drawing clients that use nothing of their examples; of others nothing is known."""


def check_private(
    server: Server,
    local: Local,
    channel: Channel,
    sampling: str,
    everyone: bool,
    train: TrainConfig,
) -> None:
    """Refuse what breaks the guarantee of noise.

    Args:
        sampling: Name of the rule that draws cohorts.
        everyone: Whether as many clients as there are take part in every round.
        train: Settings of local optimization.

    Raises:
        ConfigError: Names the key and what can be set instead.
    """
    if not channel.noise:
        return
    if type(local).exchange is not Local.exchange or local.offers:
        raise ConfigError(
            f"channel: noise protects the trained values only, and the client half {type(local).__name__} "
            f"also sends other values; use algorithm=fedavg, or leave noise out"
        )
    if train.local_steps == "min_over_clients_plus_one":
        raise ConfigError(
            f"train.local_steps: with {train.local_steps} the smallest client sets the steps of all others, "
            f"which the noise of channel does not hide; set train.local_steps=full_epoch or a number"
        )
    if sampling not in WITHOUT_VALUES:
        raise ConfigError(
            f"sampling: {sampling} may draw clients by what they send without noise, or by their numbers of "
            f"examples; with noise in channel use {', '.join(WITHOUT_VALUES)}"
        )
    if channel.at_client:
        _check_answers(server)
    else:
        _check_server(server)
        _check_sampling(sampling, everyone)


def _check_answers(server: Server) -> None:
    """Refuse server halves that use what clients send without noise: losses, numbers of examples, extras."""
    if server.weighting != "uniform":
        raise ConfigError(
            f"server.weighting: {server.weighting} uses a number of each client, to which channel adds no "
            f"noise; set server.weighting=uniform"
        )
    if not server.uses_sent_tensors_only():
        raise ConfigError(
            f"privacy.noise_at: client adds noise to the trained tensors that clients send, and the server "
            f"half {type(server).__name__} may use other values of theirs, such as losses; use "
            f"algorithm=fedavg, or leave noise out"
        )


def _check_server(server: Server) -> None:
    if not server.uses_mean_only():
        raise ConfigError(
            f"channel: noise is for the mean of the answers, and the server half {type(server).__name__} "
            f"uses more than the mean; use algorithm=fedavg, set privacy.noise_at=client, or leave noise out"
        )
    if server.weighting != "uniform":
        raise ConfigError(
            f"server.weighting: {server.weighting} lets a client weigh more than the noise was made for; set "
            f"server.weighting=uniform"
        )
    if server.lora_agg != "factor_mean":
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg} uses more than the noisy mean of the factors; set "
            f"server.lora_agg=factor_mean"
        )


def _check_sampling(sampling: str, everyone: bool) -> None:
    if sampling == "one_per_domain" or (not everyone and sampling != "poisson"):
        raise ConfigError(
            f"sampling: with {sampling} the privacy loss is not that of the accountant; set "
            f"sampling=poisson, or sampling=uniform with clients_per_round=all"
        )


def check_values(
    channel: Channel,
    start: Params,
    capacity: Mapping[str, int] | None,
    depth: int,
    ranks: Mapping[str, int],
    rank: int,
) -> None:
    """Refuse models whose answers the noise does not protect entirely.

    Args:
        start: Tensors that are sent and trained, by global name.
        capacity: Number of blocks of each client, by id; None: drawn in each round.
        depth: Number of blocks of the model.
        ranks: Rank of the LoRA adapters of each client, by id; empty: that of the tuning for all.
        rank: Rank of the tuning.

    Raises:
        ConfigError: Names the key and what can be set instead.
    """
    if not channel.noise:
        return
    if any(map(is_statistic, start)):
        raise ConfigError(
            "train.batch_norm: average sends running statistics of the data, to which channel adds no noise; "
            "set train.batch_norm=local"
        )
    if channel.at_client:
        return
    if any(held != rank for held in ranks.values()):
        raise ConfigError(
            f"capacity.rank: where clients hold different parts of the adapters, the mean tells who took "
            f"part, which the noise of channel does not hide; leave it out, so that all have rank {rank}, or "
            f"set privacy.noise_at=client"
        )
    if capacity is None or any(held != depth for held in capacity.values()):
        raise ConfigError(
            "capacity: where clients hold different blocks, a mean is over fewer of them than the noise of "
            "channel was made for; leave capacity out, or set privacy.noise_at=client"
        )
