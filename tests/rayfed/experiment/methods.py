"""Methods that fail, to be run among others."""

from dataclasses import dataclass

from rayfed.federation.method_registry import Method
from rayfed.federation.server import Server


@dataclass(frozen=True, kw_only=True)
class Broken(Server):
    """Fails when it combines the updates of the first round."""

    def aggregate(self, state, cohort, updates):
        raise ZeroDivisionError("no weight is left")


BROKEN = Method(server=Broken)
