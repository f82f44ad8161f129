"""Zero-shot: nothing trains; a CLIP model is scored without adapters and learned prompts, for reference.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 3.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.server import Server
from rayfed.types import Broadcast, ServerState


@dataclass(frozen=True)
class Idle(Server):
    """Calls nobody."""

    trains: ClassVar[bool] = False

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        return state


@dataclass(frozen=True)
class Untuned(Local):
    """Scores the model as it was before any tuning."""

    def prepare(self, client: Client, sent: Broadcast) -> None:
        client.model.untuned = True


METHOD = Method(server=Idle, local=Untuned)
