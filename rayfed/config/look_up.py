"""Looks up every name of a config, once, so that an experiment is made of objects."""

from __future__ import annotations

from dataclasses import fields

from rayfed.config.design import Design
from rayfed.config.own_network import network_of
from rayfed.config.schema import Config, compatible_parts, names_of, objects_of, to_dict
from rayfed.config.settings import Settings
from rayfed.data.source import READERS
from rayfed.executors.kinds.base import kind_of
from rayfed.objective import objective
from rayfed.sampling.base import SAMPLERS


def design_of(config: Config) -> Design:
    """The objects that a config names.

    Raises:
        ConfigError: A name does not exist, a hyperparameter is wrong, or the parts do not fit together.
    """
    settings = {each.name: getattr(config, each.name) for each in fields(Settings)}
    return Design(
        **settings,
        parts=compatible_parts(config),
        network=network_of(config.model.name),
        reader=READERS.load(config.data.reader),
        goal=None if config.task is None else objective(config.task),
        rule=SAMPLERS.load(config.sampling),
        executor=kind_of(config.cluster),
        names=names_of(config),
        described=to_dict(config),
        objects=objects_of(config),
    )
