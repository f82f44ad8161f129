"""Local: each client trains its own model without communication, as a reference without federation.

Smith et al., Federated Multi-Task Learning, NeurIPS 2017 [smith2017mocha], section 5, call these local
models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rayfed import Broadcast, Client, Cohort, Local, Method, Server, ServerState, Update


@dataclass(frozen=True)
class NoBroadcast(Server):
    """Server that sends no parameters."""

    sent_tensors_only: ClassVar[bool] = True

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        return {cid: state.broadcast(params={}, blocks=cohort.prefix(cid)) for cid in cohort.ids}


@dataclass(frozen=True)
class LocalOnly(Local):
    """Training that continues from the client's own parameters, and sends none back.

    In its first round a client begins with the common initial values.
    """

    deploys: ClassVar[Literal["global", "personal"]] = "personal"

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        client.load(client.store.get("own", {}))
        update = super().train(client, sent)
        client.store["own"] = update.params
        return client.update(params={}, metrics=update.metrics)

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        client.load(client.store.get("own", {}))


METHOD = Method(server=NoBroadcast, local=LocalOnly, knob="it has no hyperparameter")
