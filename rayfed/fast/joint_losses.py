"""Losses of several clients at once: the code of one client, with the tensors of all of them.

A loss that is marked as `pure` (`rayfed.federation.local`) is called once for K clients, by `torch.vmap`:
each of its tensors has one more dimension, which its code does not see. Passes of the network, which that
code asks for, are computed for the rows of all clients. One backward pass gives the gradients of all of them.

Some clients have fewer rows in a batch. Where a loss is a mean over rows, it is computed for each row alone,
and rows that fill the place of a client have no share in the mean. Other losses are those of clients with
equally many rows.

Letters in shapes: K clients, m rows that each has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rayfed.devices import move
from rayfed.fast.loss_requests import Loss, own_part
from rayfed.fast.member import MemberModel, Pass
from rayfed.federation.passes import PLAIN
from rayfed.models.backbone import Backbone
from rayfed.types import RESIDUAL, Params

CLIENTS, ROWS = 1, 2
"""Dimensions that the code of a loss does not see: that of the clients, and that of their rows."""

Run: TypeAlias = Callable[[Pass, Tensor, "Tensor | None", "Mapping[str, tuple[Tensor, bool]]"], Any]
"""Computes a pass for the rows of all clients, shape (K m, ...).

Its arguments are the request, the rows, their known features, and values by global name that replace those of
the clients, each with whether it has one for each client.
"""


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor among those of `Joined`."""

    number: int


@dataclass
class Joined:
    """Parts of messages and stores of K clients as those of one, with tensors that have values by client.

    Attributes:
        device: Device of the clients.
        known: Tensors that were joined before, by their place; used again while no client changes its own.
        tensors: Tensors of all clients.
        dims: 0 for a tensor of shape (K, ...), None for one that all clients have in common.
    """

    device: torch.device
    known: dict[Any, tuple[Any, Sequence[Any], Tensor]]
    tensors: list[Tensor] = field(default_factory=list)
    dims: list[int | None] = field(default_factory=list)

    def place(self, values: Sequence[Any], path: tuple[Any, ...]) -> Any:
        """A part with a slot in place of each tensor that is not the same for all.

        Args:
            values: The part of each client; all have the same form (`_form`).
            path: Names by which it is found.
        """
        first = values[0]
        if isinstance(first, Mapping):
            return {key: self.place([each[key] for each in values], (*path, key)) for key in first}
        if isinstance(first, list | tuple):
            parts = (self.place(each, (*path, i)) for i, each in enumerate(zip(*values, strict=True)))
            return type(first)(parts)
        if isinstance(first, Tensor):
            is_common = all(each is first for each in values)
            return self.slot(first if is_common else self._stacked(values, path), not is_common)
        if all(each == first for each in values):
            return first
        return self.slot(self._stacked(values, path), True)

    def slot(self, tensor: Tensor, is_by_client: bool) -> _Slot:
        """The place of one more tensor."""
        self.tensors.append(tensor)
        self.dims.append(0 if is_by_client else None)
        return _Slot(len(self.tensors) - 1)

    def _stacked(self, values: Sequence[Any], path: tuple[Any, ...]) -> Tensor:
        """The values of all clients in one tensor, shape (K, ...)."""
        are_tensors = isinstance(values[0], Tensor)
        now = tuple((id(each), each._version) if are_tensors else each for each in values)
        before = self.known.get((len(values), *path))
        if before is not None and before[0] == now:
            return before[2]
        made = torch.stack(list(values)) if are_tensors else move(torch.tensor(values), self.device)
        self.known[(len(values), *path)] = (now, values, made)  # with the values, so that no id is used again
        return made


def _filled(part: Any, tensors: Sequence[Tensor]) -> Any:
    """A part with the tensors of its slots."""
    if isinstance(part, _Slot):
        return tensors[part.number]
    if isinstance(part, dict):
        return {key: _filled(each, tensors) for key, each in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(_filled(each, tensors) for each in part)
    return part


class _PassOfRows(torch.autograd.Function):
    """A pass for the rows of all clients, as the code of one of them asks for it."""

    @staticmethod
    def forward(*_: Any) -> Any:
        raise NotImplementedError("a pass whose rows do not belong to clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: operations of the pass have gradients themselves."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        run: Run,
        request: Pass,
        depth: int,
        x: Tensor,
        known: Tensor | None,
        *values: Tensor,
    ) -> Any:
        """The pass without the outermost of the dimensions that the code does not see."""
        _, _, _, of_x, of_known, *of_values = in_dims
        joined = _rows_of(x, of_x, info.batch_size)
        features = None if known is None else _rows_of(known, of_known, info.batch_size)
        if depth == ROWS:
            if any(dim is not None for dim in of_values):
                raise NotImplementedError("values that depend on the rows of a batch")
            outputs = _PassOfRows.apply(run, request, CLIENTS, joined, features, *values)
        else:
            given = zip(request.values, values, of_values, strict=True)
            by_name = {
                name: (value if dim is None else value.movedim(dim, 0), dim is not None)
                for name, value, dim in given
            }
            outputs = run(request, joined, features, by_name)
        shape = (info.batch_size, -1)
        if isinstance(outputs, Tensor):
            return outputs.unflatten(0, shape), 0
        return tuple(each.unflatten(0, shape) for each in outputs), (0,) * len(outputs)


def _rows_of(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Rows of all parts behind each other. Args: x: rows. dim: dimension of the parts. size: their number."""
    parts = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return parts.flatten(0, 1)


class _ModelOfAll(MemberModel):
    """The model as the code of a loss sees it; values of all clients do not say that they are trained."""

    def __init__(self, model: Backbone, values: Params, like: MemberModel, ask: Callable[[Any], Any]) -> None:
        """Begin.

        Args:
            model: The model that they share.
            values: Values by global name, as the code sees them.
            like: The model of one of the clients.
            ask: As of `MemberModel`.
        """
        super().__init__(model, values, like.active, ask)
        self.training, self.untuned = like.training, like.untuned
        self._learned = frozenset(name for name, value in like.own.items() if value.requires_grad)

    def trained(self, buffers: bool) -> dict[str, Tensor]:
        """As of `MemberModel`."""
        own = self.own.items()
        return {n: v for n, v in own if n in self._learned or (buffers and n.endswith(RESIDUAL))}

    def tensors(self) -> Any:
        """Raise: these tensors do not say what is trained."""
        raise NotImplementedError("a loss that asks its model for named tensors")


class _FewerOperations(TorchFunctionMode):
    """Computes cross entropies of classes in a third of the operations that `torch.vmap` makes of them.

    It asks of each target whether it is one that is left out, which those of texts are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rest = kwargs or {}
        if func is F.cross_entropy and not rest.get("label_smoothing") and all(w is None for w in args[2:]):
            output, y = args[:2]
            if output.ndim == 2 and not y.is_floating_point() and rest.get("weight") is None:
                losses = -F.log_softmax(output, 1).gather(1, y[:, None]).squeeze(1)
                how = rest.get("reduction", "mean")
                return losses if how == "none" else losses.mean() if how == "mean" else losses.sum()
        return func(*args, **rest)


class JointLosses:
    """Losses of K clients in one call of the code of the first."""

    def __init__(
        self,
        model: Backbone,
        losses: Sequence[Loss],
        values: Params,
        run: Run,
        known: dict[Any, Any],
    ) -> None:
        """Begin.

        Args:
            model: The model that they share.
            losses: The losses; all have the same key.
            values: Values of all tensors of the clients by global name, shape (K, ...).
            run: Computes passes with these values.
            known: As of `Joined`, kept from call to call.
        """
        self._model = model
        self._first = losses[0]
        self._values = values
        self._run = run
        self._joined = Joined(self._first.client.device, known)
        parts = [(each.sent.params, each.sent.shared, own_part(each.client.store)) for each in losses]
        self._parts = self._joined.place(parts, ())
        self.measured: list[str] = []

    def compute(self, x: Tensor, y: Tensor, known: Tensor | None, shares: Tensor | None) -> list[Tensor]:
        """The loss of each client and what it measures, shape (K,) each.

        Args:
            x: Inputs, shape (K, m, ...).
            y: Targets, shape (K, m, ...).
            known: Frozen features of the inputs, shape (K, m, ...); None: they are not known.
            shares: Share of each row in the loss of its client, shape (K, m); None: the loss is computed from
                all rows of a client at once.
        """
        dims = (0, 0, None if known is None else 0)
        found: list[Tensor] = torch.vmap(
            partial(self._of_client, is_by_row=shares is not None),
            in_dims=([0] * len(self._values), self._joined.dims, *dims),
        )([*self._values.values()], self._joined.tensors, x, y, known)
        if shares is None:
            return found
        return [(each * shares).sum(1) for each in found]

    def _of_client(
        self,
        own: Sequence[Tensor],
        tensors: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        known: Tensor | None,
        is_by_row: bool,
    ) -> list[Tensor]:
        """The loss of one client and what it measures, or those of each of its rows."""
        values = dict(zip(self._values, own, strict=True))
        params, shared, store = _filled(self._parts, tensors)
        code = partial(self._call, values, params, shared, store)
        if not is_by_row:
            return code(CLIENTS, x, y, known)
        rows = [None if each is None else each[:, None] for each in (x, y, known)]
        dims = tuple(None if each is None else 0 for each in rows)
        found: list[Tensor] = torch.vmap(partial(code, ROWS), in_dims=dims)(*rows)
        return found

    def _call(
        self,
        values: Params,
        params: Params,
        shared: Mapping[str, Any],
        store: dict[str, Any],
        depth: int,
        x: Tensor,
        y: Tensor,
        known: Tensor | None,
    ) -> list[Tensor]:
        """Call the code of the loss."""
        first = self._first
        own: Any = first.client.model
        model: Any = _ModelOfAll(self._model, values, own, partial(self._ask, depth))
        if known is not None:
            model.remember_frozen_features(x, known)
        unknown: Any = None  # what is of one client and not of the others
        data: Any = SimpleNamespace(device=first.client.device)
        kept = {"store": store, "measured": {}, "data": data, "id": unknown, "rng": unknown}
        client = replace(first.client, model=model, passes=PLAIN, **kept)
        sent = replace(first.sent, params=params, shared=shared)
        with nullcontext() if first.client.objective.tokens else _FewerOperations():
            loss = first.method(first.local, client, sent, (x, y))
        every = [(name, each) for name, several in client.measured.items() for each in several]
        self.measured = [name for name, _ in every]
        return [loss, *(torch.as_tensor(each, device=loss.device) for _, each in every)]

    def _ask(self, depth: int, request: Any) -> Any:
        """The output of a pass. Args: depth: as of `_PassOfRows`. request: what the code asks for."""
        if not isinstance(request, Pass) or request.kind == "frozen_features":
            raise NotImplementedError("a loss that asks for more than passes with its values")
        nothing: Any = None  # tensors are handed over besides, so that they lose the dimensions
        bare = replace(request, x=nothing, known=None, values=dict.fromkeys(request.values, nothing))
        given = request.values.values()
        found = _PassOfRows.apply(self._run, bare, depth, request.x, request.known, *given)
        return list(found) if request.kind == "forward" and isinstance(found, tuple) else found
