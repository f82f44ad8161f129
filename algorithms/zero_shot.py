"""Zero-shot: a CLIP model without adapters, learned prompts or training, as a reference.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021
[radford2021clip], section 3.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed import Broadcast, Client, Cohort, Local, Method, Server, ServerState


@dataclass(frozen=True)
class NoTraining(Server):
    """Server that calls no client and leaves the state unchanged."""

    trains: ClassVar[bool] = False

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        return state


@dataclass(frozen=True)
class Untuned(Local):
    """Switches off adapters and learned prompts before the model is scored."""

    def prepare(self, client: Client, sent: Broadcast) -> None:
        client.model.untuned = True


METHOD = Method(server=NoTraining, local=Untuned, knob="it trains nothing")
