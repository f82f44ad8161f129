"""Base class of servers that have their own rule for LoRA adapters."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed import Server
from rayfed.errors import ConfigError


@dataclass(frozen=True)
class LoraServer(Server):
    """Server that averages every tensor, and then combines the factors of LoRA adapters in its own way."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})

    def __post_init__(self) -> None:
        check_own_rule(self)


def check_own_rule(server: Server) -> None:
    """Refuse another rule for LoRA factors where the server has its own.

    Raises:
        ConfigError: `server.lora_agg` has a value without effect.
    """
    if server.lora_agg != "factor_mean":
        raise ConfigError(
            f"server.lora_agg: {server.lora_agg!r} has no effect, because this method combines updates in "
            f"its own way; leave it out, or choose algorithm=fedavg"
        )
