"""What the driver knows of its actors, and what it hands them."""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayfed.executors.failures import Policy
from rayfed.federation.executor import Task


@dataclass(frozen=True)
class Slot:
    """Stands for an argument of the remote call, which Ray delivers from the object store."""

    index: int


@dataclass(frozen=True)
class WireCall:
    """A call whose large parts are arguments of the remote call."""

    client: str
    task: Task
    tag: str
    round: int
    blocks: tuple[int, ...] | None
    params: Slot
    shared: dict[str, Any]
    store: Slot | None


def namespace() -> str:
    """A Ray namespace of its own: Ray refuses a name twice in one, and run folders may be called the same."""
    return f"rayfed-{uuid.uuid4().hex[:12]}"


@dataclass(eq=False)
class Lane:
    """An actor and what it still has to do.

    Attributes:
        name: Name of the actor.
        options: Ray options it is started with.
        actor: Its handle.
        coming: Answers when a new actor is up; None once it is.
        place: Node and process, once it is up.
        failed_starts: How often it died before it was up.
        since: When what it does now began.
        own: Calls only this lane may run (an actor per client).
        busy: Chunks it has been given.
        started: Actors it has had.
        space: Namespace of their names, where `options` has none.
    """

    name: str
    options: dict[str, Any]
    actor: Any = None
    coming: Any = None
    place: dict[str, Any] = field(default_factory=dict)
    failed_starts: int = 0
    since: float = 0.0
    own: deque[int] = field(default_factory=deque)
    busy: int = 0
    started: int = 0
    space: str = field(default_factory=namespace)

    @property
    def ray_options(self) -> dict[str, Any]:
        """Options for the next actor; one that replaces another says so, as the old name may live on."""
        name = f"{self.name}+{self.started}" if self.started else self.name
        own = {"name": name, "namespace": self.space, "max_restarts": 0, "max_task_retries": 0}
        return {**own, **self.options}

    def begin(self, actor: Any) -> None:
        self.started += 1
        self.actor, self.coming = actor, actor.where.remote()
        self.since, self.busy = time.monotonic(), 0


class Pool(Protocol):
    """What an exchange needs of the executor."""

    policy: Policy
    lanes: list[Lane]
    home: dict[str, Lane]
    stopped: Any
    on_event: Any
    on_visit: Any

    def replace(self, lane: Lane) -> None: ...
    def retire(self, lane: Lane) -> None: ...
    def reference(self, client: str) -> Any: ...
    def keep(self, client: str, reference: Any) -> None: ...


@dataclass(frozen=True)
class Job:
    """A chunk under way."""

    lane: Lane
    indices: list[int]
    stores: list[Any]
    began: float
