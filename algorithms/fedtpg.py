"""FedTPG: a network that makes the class prompts from the names of the classes, averaged by FedAvg.

Qiu et al., Federated Text-driven Prompt Generation for Vision-Language Models, ICLR 2024 [qiu2024fedtpg], and
the released code, whose network `tuning=prompt_network` is.

Differs from the released code's experiments: each client has all class names of the data set; there it has
those of its classes, and is trained to choose among these.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed import Method, Server


@dataclass(frozen=True)
class FedTpg(Server):
    """The mean of the clients' networks."""

    needs: ClassVar[frozenset[str]] = frozenset({"prompts by name"})


METHOD = Method(server=FedTpg, knob="it has no hyperparameter")
