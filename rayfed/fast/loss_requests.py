"""The request of a client of a group whose loss can be computed with those of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.types import Batch, Broadcast


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss whose gradients a client asks for; the answer is whether they were added to its own.

    Attributes:
        method: The function of the local half: `Local.loss`, or another one that is `pure`.
        local: The local half.
        client: The client.
        sent: The message to it.
        batch: Its batch.
    """

    method: Callable[..., Tensor]
    local: Local
    client: Client
    sent: Broadcast
    batch: Batch

    def key(self) -> tuple[Any, ...]:
        """Losses with the same key are computed together."""
        x, y = self.batch
        client = self.client
        model: Any = client.model  # that of a client of a group
        rows = None if self.local.averages_rows and client.objective.by_example else len(y)
        of_x = (x.shape[1:], x.dtype, model.remembered_features(x) is None)
        about = (self.method, self.local, client.rank, client.objective, self.sent.round)
        kept = (_form(self.sent.params), _form(self.sent.shared), _form(own_part(client.store)))
        return (*about, rows, of_x, y.shape[1:], y.dtype, model.state, *kept)


def own_part(store: Mapping[str, Any]) -> dict[str, Any]:
    """The private store without what the core keeps there, under names that begin with a line."""
    return {name: value for name, value in store.items() if not name.startswith("_")}


def _form(value: Any) -> Any:
    """The form of a part of a message or a store, which clients have in common that can be joined."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _form(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_form, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)
    return value


def alike(losses: Mapping[int, Loss]) -> Iterator[list[int]]:
    """Numbers of clients whose losses can be computed together. Args: losses: by number of the client."""
    found: dict[Any, list[int]] = {}
    for k, loss in losses.items():
        found.setdefault(loss.key(), []).append(k)
    yield from found.values()
