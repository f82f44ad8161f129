"""Krum: the answer of the client that is closest to its nearest neighbours, or the mean of several such.

Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017 [blanchard2017krum], section 4 of the first preprint, arXiv:1703.02757v1. Multi-Krum is
the variant that averages the m answers with the smallest scores, which the preprint names in section 7; its
own m-Krum (section 6) removes an answer before it chooses the next one. The paper compares gradients at one
point; here, as in FedAvg, these are the changes of the parameters by local training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from rayfed import Cohort, Method, Server, ServerState, Update
from rayfed.errors import ConfigError
from rayfed.types import Count


@dataclass(frozen=True)
class KrumServer(Server):
    """Averages the answers with the smallest scores, without weights.

    Attributes:
        byzantine: Number f of wrong answers that a round tolerates; auto: 1. The paper needs 2 f + 2 < n
            answers. A number for which the clients of a round are too few is refused; with auto, and in a
            round in which answers are missing, f is smaller, as the column `tolerated` says.
        selected: Number m of answers that are averaged; 1 is Krum, more are Multi-Krum.
    """

    byzantine: Literal["auto"] | Annotated[int, Ge(0)] = "auto"
    selected: Count = 1

    sent_tensors_only: ClassVar[bool] = True

    def check(self, clients: int) -> None:
        if self.byzantine == "auto" or clients >= (needed := 2 * self.byzantine + 3):
            return
        most = (clients - 3) // 2
        allowed = f"0..{most} or auto" if most > 0 else "0 or auto" if most == 0 else "auto"
        raise ConfigError(
            f"server.byzantine: {self.byzantine} wrong answers need rounds of {needed} clients (2 f + 3) or "
            f"more, and there are {clients}; set server.byzantine={allowed}"
        )

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        wanted = 1 if self.byzantine == "auto" else self.byzantine
        tolerated = max(0, min(wanted, (len(updates) - 3) // 2))
        cohort.measure(tolerated=float(tolerated))
        order = sorted(range(len(updates)), key=scores(updates, tolerated).__getitem__)
        chosen = [updates[i] for i in sorted(order[: self.selected])]
        weights = [1 / len(chosen)] * len(chosen)
        self.record_weights(cohort, chosen, weights)
        return self.average(state, chosen, weights)


def scores(updates: Sequence[Update], byzantine: int) -> list[float]:
    """Score s(i) of each of n answers: sum of the squared distances to its n - f - 2 nearest answers.

    A distance is over the tensors that both clients hold.

    Args:
        updates: Answers of clients.
        byzantine: Number f of wrong answers.
    """
    n = len(updates)
    distances = [[_distance(a, b) for b in updates] for a in updates]
    near = max(1, n - byzantine - 2)
    return [sum(sorted(row[:i] + row[i + 1 :])[:near]) for i, row in enumerate(distances)]


def _distance(a: Update, b: Update) -> float:
    """Squared distance of the values of two clients."""
    shared = [name for name in a.params if name in b.params]
    return sum(float((a.params[n].double() - b.params[n].double()).pow(2).sum()) for n in shared)


METHOD = Method(server=KrumServer, knob="how many answers may be false is a fact about the setting")
