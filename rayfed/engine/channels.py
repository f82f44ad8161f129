"""Builds the channel of an experiment and the count of its privacy loss from the config."""

from __future__ import annotations

from rayfed.config.schema import Config
from rayfed.federation.channel import Channel
from rayfed.federation.method import Parts
from rayfed.federation.privacy import Privacy, check_private, guarantee


def make_channel(config: Config, parts: Parts, clients: int, expected: int) -> tuple[Channel, Privacy | None]:
    """The channel, and what counts the privacy loss where it adds noise.

    Args:
        config: The experiment.
        parts: Its method.
        clients: Number of clients of the experiment.
        expected: Expected number of clients in a round.

    Raises:
        ConfigError: The stages do not fit together, or the method breaks the guarantee of privacy.
    """
    at_client = config.privacy.noise_at == "client"
    seed = config.seed
    channel = Channel.of(config.channel, at_client=at_client, expected=float(expected), seed=seed)
    everyone = expected == clients
    check_private(parts.server, parts.local, channel, config.sampling, everyone, config.train)
    privacy = guarantee(config.privacy, channel, clients, expected / clients)
    if privacy is not None:
        privacy.check(config.rounds)
    return channel, privacy
