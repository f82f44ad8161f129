"""The examples of a data set and the data of one client, as client calls read them.

Examples are mapped, resident on a device, or streamed to it; batches are normalized on the device of the
client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayfed.client_facts import Indices, RowTable, Splits
from rayfed.data.text import Inputs, Targets
from rayfed.devices import HOST, as_made_here, can_pin, free_memory, move
from rayfed.types import Batch

Array: TypeAlias = Any
"""Inputs or targets of all samples: a NumPy array, or texts (`rayfed.data.text`); rows are read by index."""
Stored: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets of a batch as they are stored, on the device: uint8 (B, ...), and int64 (B,) or uint8
(B, H, W)."""

Resident: TypeAlias = Literal["auto"] | bool
MOST_PLACED = 10_000
"""Splits of drawn clients whose positions a process keeps on its device."""

PART = 32_000_000
"""Bytes of examples that are on their way to a device at the same time."""

SHARE = 0.5
"""Largest share of a device's free memory that `resident=auto` fills with examples."""


class Examples(Protocol):
    """The inputs and targets of all clients of a process.

    Attributes:
        device: Device of the batches.
        resident: Whether the examples are on the device already.
    """

    device: torch.device
    resident: bool

    def batches(self, owner: str, split: str, order: Tensor | None, size: int) -> Iterator[Stored]:
        """Batches of a split.

        Args:
            owner: Id of a client or of an evaluation set.
            split: Name of one of its splits.
            order: Positions in the split, int64; None: all in ascending order. On the CPU, or, if the
                examples are resident, on their device.
            size: Examples in a batch; the last one may have fewer.
        """


class Mapped:
    """Examples that are read from mapped memory, for clients on the CPU."""

    resident = False

    def __init__(self, inputs: Array, targets: Array, splits: Mapping[str, Splits]) -> None:
        """Args: inputs, targets: all of the data set. splits: row numbers by owner and split."""
        self.device = HOST
        self.inputs = inputs
        self.targets = targets
        self.splits = splits

    def batches(self, owner: str, split: str, order: Tensor | None, size: int) -> Iterator[Stored]:
        return self._read(self.rows(owner, split, order, size))

    def positions(self, owner: str, split: str, order: Tensor) -> Tensor:
        """Row numbers of examples in the data set, int64. Args: as of `batches`."""
        return torch.from_numpy(np.asarray(self.splits[owner][split][order.numpy()], np.int64))

    def stream(self, batches: Sequence[Tensor]) -> Iterator[Stored]:
        """The examples of each of these batches. Args: batches: row numbers, as of `positions`."""
        return self._read([batch.numpy() for batch in batches])

    def _read(self, batches: Sequence[Indices]) -> Iterator[Stored]:
        for rows in batches:
            yield torch.from_numpy(self.inputs[rows]), torch.from_numpy(self.targets[rows])

    def rows(self, owner: str, split: str, order: Tensor | None, size: int) -> list[Indices]:
        """Row numbers of each batch."""
        every = self.splits[owner][split]
        chosen = every if order is None else every[order.numpy()]
        return [chosen[start : start + size] for start in range(0, len(chosen), size)]


class OnDevice:
    """Examples whose pixels and labels are on the device; a batch needs no copy."""

    resident = True

    def __init__(
        self, inputs: Array, targets: Array, splits: Mapping[str, Splits], device: torch.device
    ) -> None:
        """Copy all examples of the splits to the device. Args: as of `choose`."""
        used = rows_of(splits)
        self.device = device
        self._inputs = _copy_rows(inputs, used, device)
        self._targets = _copy_rows(targets, used, device)
        listed = splits.listed() if isinstance(splits, RowTable) else splits
        names = [(owner, split) for owner in listed for split in splits[owner]]
        rows = [splits[owner][split] for owner, split in names]
        places = torch.from_numpy(np.searchsorted(used, np.concatenate([*rows, np.empty(0, np.int64)])))
        parts = places.to(device).split([len(each) for each in rows]) if rows else ()
        self._places = dict(zip(names, parts, strict=True))
        self._splits = splits
        self._used = used
        self._drawn: dict[tuple[str, str], Tensor] = {}

    def positions(self, owner: str, split: str, order: Tensor) -> Tensor:
        """Places of examples on the device, int64, on the CPU. Args: as of `batches`, on the CPU."""
        rows = self._splits[owner][split][order.numpy()]
        return torch.from_numpy(np.searchsorted(self._used, rows))

    def stream(self, batches: Sequence[Tensor]) -> Iterator[Stored]:
        """The examples of each of these batches. Args: batches: their places, as of `positions`."""
        every = move(torch.cat(list(batches)), self.device)
        for places in every.split([len(batch) for batch in batches]):
            yield self.at(places)

    def at(self, places: Tensor) -> Stored:
        """Examples at these places, int64, shape (B,), on the device."""
        return self._inputs[places], self._targets[places]

    def batches(self, owner: str, split: str, order: Tensor | None, size: int) -> Iterator[Stored]:
        every = self._places_of(owner, split)
        chosen = every if order is None else every[move(order, self.device)]
        for rows in chosen.split(size):
            yield self.at(rows)

    def _places_of(self, owner: str, split: str) -> Tensor:
        """Positions of a split among the examples on the device."""
        if (owner, split) in self._places:
            return self._places[owner, split]
        if (owner, split) not in self._drawn:  # a client whose rows are not stored, but drawn
            if len(self._drawn) >= MOST_PLACED:
                self._drawn.clear()
            places = np.searchsorted(self._used, self._splits[owner][split])
            self._drawn[owner, split] = torch.from_numpy(places).to(self.device)
        return self._drawn[owner, split]


class Streamed(Mapped):
    """Examples that are copied to the device batch by batch, one copy for inputs and targets.

    While a batch is used, a thread collects the next one in pinned memory, and it is copied on a separate
    stream where the device has streams, so that the copy runs during the computation.
    """

    def __init__(
        self, inputs: Array, targets: Array, splits: Mapping[str, Splits], device: torch.device
    ) -> None:
        """Args: as of `choose`."""
        super().__init__(inputs, targets, splits)
        self.device = device
        self._pinned = can_pin(device)
        module = torch.get_device_module(device) if self._pinned else None
        self._module = module if hasattr(module, "Stream") and hasattr(module, "current_stream") else None
        self._stream = self._module.Stream(device) if self._module is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def _read(self, batches: Sequence[Indices]) -> Iterator[Stored]:
        if not batches:
            return
        ready = self._send(*self._collect(batches[0]))
        for following in batches[1:]:
            ahead = self._thread.submit(self._collect, following)
            yield self._receive(ready)
            ready = self._send(*ahead.result())
        yield self._receive(ready)

    def _collect(self, rows: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes of a batch, targets first, and empty tensors that show types and shapes of both parts."""
        targets = np.ascontiguousarray(self.targets[rows])
        inputs = np.ascontiguousarray(self.inputs[rows])
        together = torch.empty(targets.nbytes + inputs.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        flat = together.numpy()
        flat[: targets.nbytes] = targets.reshape(-1).view(np.uint8)
        flat[targets.nbytes :] = inputs.reshape(-1).view(np.uint8)
        return together, torch.from_numpy(inputs).to("meta"), torch.from_numpy(targets).to("meta")

    def _send(self, together: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Stored]:
        if self._module is None:
            there = together.to(self.device, non_blocking=self._pinned)
        else:
            with self._module.stream(self._stream):
                there = together.to(self.device, non_blocking=True)
        first, rest = there.split([targets.nbytes, inputs.nbytes])
        labels = first.view(targets.dtype).view(targets.shape)
        return there, (rest.view(inputs.dtype).view(inputs.shape), labels)

    def _receive(self, sent: tuple[Tensor, Stored]) -> Stored:
        if self._module is not None:  # whatever reads the batch waits for its copy
            current = self._module.current_stream(self.device)
            current.wait_stream(self._stream)
            sent[0].record_stream(current)
        return sent[1]


def choose(
    inputs: Array,
    targets: Array,
    splits: Mapping[str, Splits],
    device: torch.device,
    resident: Resident,
    budget: float,
) -> Examples:
    """The examples for the clients of a process.

    Args:
        inputs: All inputs of the data set, read-only: images (N, H, W, 3) or symbols (N, length), uint8, or
            texts of different lengths.
        targets: All targets: labels, int64, shape (N,), masks, uint8, shape (N, H, W), or those of texts.
        splits: Row numbers by owner and split.
        device: Device of the clients' models.
        resident: Whether the examples are copied to the device once; `auto`: where they need at most `budget`
            bytes and half of the device's free memory. On the CPU they are always mapped, and texts are
            always copied by batch.
        budget: Bytes.
    """
    if device == HOST:
        return Mapped(inputs, targets, splits)
    if isinstance(inputs, Inputs):  # few bytes for each batch, of a length that follows from the batch
        return Streamed(inputs, targets, splits, device)
    need = bytes_of(inputs, targets, splits)
    free = free_memory(device)
    fits = need <= budget and (free is None or need <= SHARE * free)
    kind = OnDevice if resident is True or (resident == "auto" and fits) else Streamed
    return kind(inputs, targets, splits, device)


def bytes_of(inputs: Array, targets: Array, splits: Mapping[str, Splits]) -> int:
    """Bytes of all examples of all splits, each counted once; arguments as of `choose`."""
    return len(rows_of(splits)) * (inputs[:1].nbytes + targets[:1].nbytes)


def rows_of(splits: Mapping[str, Splits]) -> Indices:
    """Row numbers of all examples of all splits, each once, ascending."""
    if isinstance(splits, RowTable):
        return splits.used()
    every = [rows for own in splits.values() for rows in own.values()]
    return np.unique(np.concatenate([np.empty(0, np.int64), *every]))


def _copy_rows(values: Array, rows: Indices, device: torch.device) -> Tensor:
    """Rows of an array on a device; they pass through memory of the CPU in parts of about `PART` bytes."""
    kind = torch.from_numpy(np.empty(0, values.dtype)).dtype
    there = torch.empty((len(rows), *values.shape[1:]), dtype=kind, device=device)
    some = min(max(1, PART // max(1, values[:1].nbytes)), max(1, len(rows)))
    part = torch.empty((some, *values.shape[1:]), dtype=kind, pin_memory=can_pin(device))
    for start in range(0, len(rows), some):
        chosen = rows[start : start + some]
        part.numpy()[: len(chosen)] = values[chosen]
        there[start : start + len(chosen)].copy_(part[: len(chosen)])  # waits, so that `part` can change
    return there


class Normalizer:
    """Converts uint8 images into the input of a backbone: (x / 255 - mean) / std by channel."""

    def __init__(
        self,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        device: torch.device = HOST,
    ) -> None:
        """Args: mean, std: by channel. device: that of the images."""
        spread = torch.tensor(std, device=device).view(1, 3, 1, 1)
        self._factor = 1 / (255 * spread)
        self._offset = torch.tensor(mean, device=device).view(1, 3, 1, 1) / spread

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize a batch.

        Args:
            images: uint8, shape (B, H, W, 3).

        Returns:
            float32, shape (B, 3, H, W), on the same device.
        """
        channels = images.permute(0, 3, 1, 2)
        x = channels.to(torch.float32, memory_format=torch.contiguous_format)  # else several times slower
        return x.mul_(self._factor).sub_(self._offset)


@dataclass(frozen=True)
class ClientData:
    """The splits of one client, in examples that all clients of a process share.

    Attributes:
        client: Id of the client or of the evaluation set.
        examples: The stored examples of all clients.
        splits: Indices of the samples of this client by split.
        normalize: Converts stored inputs into network input, on their device.
        relabel: Changes the targets of training examples; None: they stay as they are.
    """

    client: str
    examples: Examples
    splits: Splits
    normalize: Callable[[Tensor], Tensor]
    relabel: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self.examples.device

    def size(self, split: str) -> int:
        """Number of examples in a split; 0 if the client has no such split."""
        rows = self.splits.get(split)
        return 0 if rows is None else len(rows)

    def tokens(self, split: str, order: Tensor) -> tuple[int, int]:
        """Number of tokens of texts of a split, and of those that are learned.

        Args:
            order: Positions of the texts, int64, on the CPU.
        """
        examples: Any = self.examples
        rows, starts = self.splits[split][order.numpy()], examples.inputs.starts
        learned = examples.targets.learned_in(rows) if isinstance(examples.targets, Targets) else 0
        return int((starts[rows + 1] - starts[rows]).sum()), learned

    def batch(self, split: str, positions: Tensor) -> Batch:
        """The examples at some positions of a split, in the order of the positions.

        Args:
            positions: Positions in the split, int64, shape (B,), on the CPU.

        Returns:
            Network input, shape (B, ...), and targets, int64, shape (B,) or (B, H, W).
        """
        return next(self.batches(split, positions, len(positions)))

    def batches(self, split: str, order: Tensor | None, size: int) -> Iterator[Batch]:
        """Batches of a split, as `batch`; the next one may be copied to the device while one is used.

        Args:
            order: Positions in the split, int64, in the order of the batches; None: all in ascending order.
                On the CPU; resident examples also take it on their device.
            size: Examples in a batch; the last one may have fewer.
        """
        relabel = self.relabel if split == "train" else None
        for stored in self.examples.batches(self.client, split, order, size):
            x, y = network_input(self.normalize, stored)
            yield x, y if relabel is None else relabel(y)

    def batches_with(
        self, features: Tensor, split: str, order: Tensor | None, size: int
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Batches of a split, each with its rows of a table.

        Args:
            features: A row for each example of the split, shape (n, ...), on the device of the examples.
            split, order, size: As of `batches`, with the order on the CPU.
        """
        placed = None if order is None else move(order, self.device)
        batches = self.batches(split, placed if self.examples.resident else order, size)
        parts = features.split(size) if placed is None else (features[rows] for rows in placed.split(size))
        for own, batch in zip(parts, batches, strict=True):
            yield batch, own


def network_input(normalize: Callable[[Tensor], Tensor], stored: Stored) -> Batch:
    """Stored examples as a network and its loss take them. Args: normalize: as of `ClientData`."""
    inputs, targets = stored
    return as_made_here((normalize(inputs), targets if targets.is_floating_point() else targets.long()))
