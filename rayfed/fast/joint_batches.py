"""Batches of several clients on a device, which are collected at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayfed.data.examples import OnDevice, network_input
from rayfed.devices import move

Joint: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]
"""Inputs, targets, and rows of a table."""


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
        tables: Mapping[int, tuple[Tensor, Sequence[Tensor]]],
    ) -> None:
        """Bring the places of all batches to the device in one copy.

        Args:
            examples: The stored examples of all clients.
            normalize: As of `ClientData`.
            places: Places of the examples of each batch, as of `OnDevice.positions`, by number of the client.
            tables: A table of each client, whose rows belong to its examples, and the rows of each batch,
                on the CPU; empty: there are none.
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
        self._table: Tensor | None = None
        if tables:
            starts = np.cumsum([0, *(len(table) for table, _ in tables.values())]).tolist()
            moved = {
                k: [own + start for own in rows]
                for (k, (_, rows)), start in zip(tables.items(), starts, strict=False)
            }
            listed = [moved[k][i] for i, batch in enumerate(parts) for k, _ in batch]
            self._places = move(torch.stack([torch.cat(every), torch.cat(listed)]), examples.device)
            self._table = torch.cat([table for table, _ in tables.values()])
        else:
            self._places = move(torch.cat(every)[None], examples.device)
        self._kept: tuple[int, int, Joint] | None = None

    def batch(self, client: int, number: int) -> Joint:
        """A batch of a client, and its rows of the table, if there is one.

        Args:
            client: Number of the client.
            number: Number of its batch.
        """
        own = self._rows[number][client]
        if self._kept is None or self._kept[0] < number:
            every = list(self._rows[number].values())
            self._kept = (number, every[0].start, self._collected(slice(every[0].start, every[-1].stop)))
        kept, start, joint = self._kept
        if kept != number:
            return self._collected(own)
        x, y, table = (None if part is None else part[own.start - start : own.stop - start] for part in joint)
        assert x is not None
        assert y is not None
        return x, y, table

    def _collected(self, rows: slice) -> Joint:
        x, y = network_input(self._normalize, self._examples.at(self._places[0, rows]))
        return x, y, None if self._table is None else self._table[self._places[1, rows]]
