"""Other experiments that a config asks for: compared algorithms, and one run for each held-out domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayfed.config.schema import Config, compatible_parts, with_method
from rayfed.errors import ConfigError
from rayfed.federation.method import METHODS


def comparisons(config: Config, path: Path) -> dict[str, Config]:
    """The other experiments of `compare`, by algorithm: the same but for the method, which has its defaults.

    Args:
        config: The main experiment.
        path: Folder of the main run.

    Raises:
        ConfigError: An algorithm does not exist, or does not fit the tuning.
    """
    names = (config.compare,) if isinstance(config.compare, str) else config.compare
    found = {}
    for name in names:
        if name == config.algorithm:
            continue
        rounds = config.rounds if METHODS.load(name, "compare").server.trains else 1
        place = {"output": str(path / "compare" / name), "overwrite": True}
        found[name] = with_method(config, name, compare=(), rounds=rounds, **place)
        compatible_parts(found[name])
    return found


def folds(config: Config, domains: tuple[str, ...], path: Path) -> dict[str, Config]:
    """One experiment per domain, with that domain held out, in a folder of its name.

    Raises:
        ConfigError: A domain is held out already, there is only one, or there is nothing to select with.
    """
    if config.data.held_out:
        raise ConfigError(
            f"data.held_out: {config.data.held_out!r} is set, but protocol=leave_one_out holds out each"
        )
    if len(domains) < 2:
        raise ConfigError(f"protocol: leave_one_out needs two or more domains, there is {', '.join(domains)}")
    if not config.data.val:
        raise ConfigError(
            f"data.val: {config.data.val!r} leaves no images to choose a round with; set data.val=0.1"
        )
    evaluation = replace(
        config.evaluation, every=config.evaluation.every or 1, personal=True, validation=True
    )
    return {
        name: replace(
            config,
            protocol="single",
            data=replace(config.data, held_out=name),
            evaluation=evaluation,
            output=str(path / name),
            overwrite=True,
        )
        for name in domains
    }
