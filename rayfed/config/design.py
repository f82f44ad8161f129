"""An experiment as objects: what a run is made of after every name was looked up.

The door (`rayfed.config.look_up`) makes it of a config. The engine gets these objects, and looks up no name
of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfed.config.settings import Settings
from rayfed.data.source import Reader
from rayfed.executors.kinds.base import ExecutorKind
from rayfed.federation.method_registry import Parts
from rayfed.models.user_model import Network
from rayfed.objective import Objective
from rayfed.sampling.base import Rule


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a method and its parts, for messages, folders and metrics.

    Attributes:
        algorithm: The method.
        server: The method that the server half is of.
        local: The method that the client half is of.
        tuning: The tuning scheme.
    """

    algorithm: str
    server: str
    local: str
    tuning: str


@dataclass(frozen=True, kw_only=True)
class Design(Settings):
    """A checked experiment as objects.

    Attributes:
        parts: Both halves of the method and the tuning scheme, with their hyperparameters.
        network: The network of a user; None: `model` describes one of a library.
        reader: What reads the data: a class whose fields are keys of `data`, or the examples of a user.
        goal: The task that was asked for; None: that of the data.
        rule: Draws the clients of a round.
        executor: Runs the calls of the clients.
        names: The names of the method and its parts.
        described: The experiment as plain containers, which config.yaml of a run holds.
        objects: Name, `repr` and digest of each object of a user, by key of the config.
    """

    parts: Parts
    network: Network | None = None
    reader: Reader
    goal: Objective | None = None
    rule: Rule
    executor: ExecutorKind
    names: Names
    described: Mapping[str, Any]
    objects: Mapping[str, Mapping[str, str]]
