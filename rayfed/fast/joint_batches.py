"""Batches of several clients on a device, which are collected at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rayfed.data.examples import OnDevice, network_input
from rayfed.devices import move
from rayfed.types import Batch


class JointBatches:
    """Batches of several clients, each of which is collected for all of them at once.

    Clients take their batches in turns: the first one that wants its next batch collects that of the others
    too. Only the last batch is kept; a client that wants another one gets it alone.
    """

    def __init__(
        self,
        examples: OnDevice,
        normalize: Callable[[Tensor], Tensor],
        places: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """Bring the places of all batches to the device in one copy.

        Args:
            examples: The stored examples of all clients.
            normalize: As of `ClientData`.
            places: Places of the examples of each batch, as of `OnDevice.positions`, by number of the client.
        """
        self._examples = examples
        self._normalize = normalize
        last = max(len(own) for own in places.values())
        parts = [[(k, own[i]) for k, own in places.items() if i < len(own)] for i in range(last)]
        self._rows: list[dict[int, slice]] = []
        end = 0
        for batch in parts:
            rows = {}
            for k, own in batch:
                rows[k] = slice(end, end := end + len(own))
            self._rows.append(rows)
        every = [own for batch in parts for _, own in batch]
        self._places = move(torch.cat(every), examples.device)
        self._kept: tuple[int, int, Batch] | None = None

    def batch(self, client: int, number: int) -> Batch:
        """A batch of a client.

        Args:
            client: Number of the client.
            number: Number of its batch.
        """
        own = self._rows[number][client]
        if self._kept is None or self._kept[0] < number:
            every = list(self._rows[number].values())
            self._kept = (number, every[0].start, self._collected(slice(every[0].start, every[-1].stop)))
        kept, start, (x, y) = self._kept
        if kept != number:
            return self._collected(own)
        return x[own.start - start : own.stop - start], y[own.start - start : own.stop - start]

    def _collected(self, rows: slice) -> Batch:
        return network_input(self._normalize, self._examples.at(self._places[rows]))
