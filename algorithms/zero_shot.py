"""Zero-shot: nothing trains; the start model is scored. The reference row of a CLIP model."""

from dataclasses import dataclass

from rayfed.cohort import Cohort
from rayfed.local import Local
from rayfed.method import Method
from rayfed.server import Server
from rayfed.types import ServerState


@dataclass(frozen=True)
class Idle(Server):
    """Calls nobody."""

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        return state


METHOD = Method(server=Idle)
