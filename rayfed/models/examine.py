"""Finds out, by running it before the first round, what a user's network does (`rayfed.models.behaviour`).

A short training shows which tensors move although no optimizer trains them. Passes with the same row among
other ones show whether the rows of a batch change each other's outputs. So nothing of this is guessed from
names or types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.behaviour import Behaviour
from rayfed.models.named_tensors import global_name
from rayfed.models.put_back import OF_TORCH, PutBack, modules_with_attributes
from rayfed.seeds import derive, use_seed
from rayfed.types import Batch

DRAWS = 3
"""Random changes of all values of a network under which it is examined, besides its start values."""

SMALL = 1_000_000
"""Parameters, and numbers in a row of inputs, up to which a network is examined in all these ways.

A larger one is examined with one random change only. Time does not decide, because it differs by machine."""

CLOSE = 1e-4
"""Largest difference of outputs, as a share of the largest one, that rounding explains."""


def give(model: Backbone, behaviour: Behaviour | None) -> Backbone:
    """Let a model know how its network behaves, so that what moves is among its tensors; returns it."""
    if behaviour is not None:
        model.behaviour = behaviour
        model.refresh()
    return model


def examine(
    fresh: Callable[[], Backbone], loss: Callable[[Any, Tensor], Tensor], batches: Sequence[Batch], seed: int
) -> Behaviour:
    """Find out how a tuned network behaves.

    Args:
        fresh: Makes a copy of the tuned model, with values, on the CPU.
        loss: Loss of a batch from the output of the model and its targets, a scalar.
        batches: Inputs and targets of two clients, or of one.
        seed: Seed of the experiment.

    Raises:
        ConfigError: A tensor moves in a way that no rule covers.
    """
    with torch.enable_grad(), use_seed(derive(seed, "examine")):
        trained = fresh()
        in_training = _moved(trained, lambda: _train(trained, loss, batches))
        trained.eval()
        in_evaluation = _moved(trained, lambda: _no_grad(trained, batches[0][0]))
    moved = {**in_evaluation.tensors, **in_training.tensors}
    travels, back = set(), []
    for path, tensor in moved.items():
        if not tensor.is_floating_point() or path in _generators(trained):
            back.append(path)
        else:
            travels.add(path)
    attributes = tuple(dict.fromkeys((*in_training.attributes, *in_evaluation.attributes)))
    still = give(fresh(), Behaviour(moves=frozenset(travels), put_back=tuple(back)))
    rows = _rows(batches)
    mixes = dict.fromkeys((True, False), False)
    varies = False
    with use_seed(derive(seed, "other rows")):
        for draw in draws_of(still, rows):
            if draw:
                perturb(still, derive(seed, "perturb", draw))
            passes = _Passes(still)
            for mode in (True, False):
                mixes[mode] |= _mixes(passes, rows, mode)
            varies |= _varies(passes, rows)
    return Behaviour(
        moves=frozenset(travels),
        put_back=tuple(back),
        attributes=attributes,
        mixes_training=mixes[True],
        mixes_evaluation=mixes[False],
        moves_in_evaluation=bool(in_evaluation.tensors or in_evaluation.attributes),
        varies=varies,
    )


def _train(model: Backbone, loss: Callable[[Any, Tensor], Tensor], batches: Sequence[Batch]) -> None:
    """Two steps of plain gradient descent, and a pass after them."""
    model.train()
    live = [entry.tensor for entry in model.tensors().values() if entry.is_trained and not entry.is_buffer]
    optimizer = torch.optim.SGD(live, lr=0.01)
    for x, y in (*batches, batches[0])[:2]:  # two steps, of two clients where there are two
        loss(model(x.clone()), y).backward()
        optimizer.step()
        model.zero_grad()
    _no_grad(model, batches[0][0])


@torch.no_grad()
def _no_grad(model: Backbone, x: Tensor) -> None:
    model.forget()
    model(x.clone())


@dataclass(frozen=True)
class _Moved:
    """Tensors that changed, as they were before, by path, and names of attributes that did."""

    tensors: dict[str, Tensor]
    attributes: list[str]


def _moved(model: Backbone, run: Callable[[], None]) -> _Moved:
    """The tensors that no optimizer trains, and the attributes, that change while something runs.

    Raises:
        ConfigError: A tensor gets another shape, or is complex.
    """
    before = {path: (tensor, tensor._version, _print_of(tensor)) for path, tensor in _fixed(model)}
    noted = dict(_attributes(model))
    run()
    after = dict(_fixed(model))
    tensors = {}
    for path, (tensor, version, printed) in before.items():
        now = after.get(path)
        if now is tensor and tensor._version == version and _print_of(tensor) == printed:
            continue
        if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype or now.is_complex():
            kind = "is complex" if now is not None and now.is_complex() else "gets another shape or type"
            raise ConfigError(
                f"model: {global_name(path)} of {model.label!r} {kind} in training, so that it can neither "
                "be averaged nor put back; keep its shape, or make it an attribute that is no buffer"
            )
        tensors[path] = tensor
    if new := [path for path in after if path not in before]:
        raise ConfigError(
            f"model: a pass of {model.label!r} makes the tensor {global_name(new[0])}; make it when the "
            "network is made, because clients begin with the same tensors"
        )
    changed = [name for name, printed in dict(_attributes(model)).items() if noted.get(name) != printed]
    return _Moved(tensors, changed)


def _fixed(model: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Buffers and frozen parameters of a model, by path."""
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.requires_grad:
                yield f"{prefix}.{leaf}" if prefix else leaf, tensor


def _print_of(tensor: Tensor) -> int:
    """A number that another value of the tensor would change."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(whole).sum(dtype=torch.int64)) if flat.numel() else 0


def _attributes(model: Backbone) -> Iterator[tuple[str, bytes]]:
    """Digests of the attributes of modules that are neither tensors of it nor modules, by name."""
    import cloudpickle

    for prefix, module in modules_with_attributes(model):
        for name, value in vars(module).items():
            if name in OF_TORCH or isinstance(value, nn.Module | nn.Parameter):
                continue
            try:
                text = cloudpickle.dumps(value) if not isinstance(value, Tensor) else repr(_print_of(value))
            except Exception:  # what cannot be written is compared by identity
                text = str(id(value))
            data = text if isinstance(text, bytes) else text.encode()
            path = prefix.removeprefix("body.").removeprefix("body")
            yield f"{path}.{name}" if path else name, hashlib.blake2b(data, digest_size=16).digest()


def _generators(model: Backbone) -> frozenset[str]:
    """Paths of the vectors of spectral norm, which a power iteration moves; means of them mean nothing."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _SpectralNorm):
            found |= {f"{prefix}.{leaf}" for leaf in module._buffers}
        hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
        found |= {f"{prefix}.{hook.name}_{leaf}" for hook in hooks for leaf in ("u", "v")}
    return frozenset(found)


def _rows(batches: Sequence[Batch]) -> Tensor:
    """Up to three rows of the clients, at least two."""
    rows = torch.cat([x for x, _ in batches])
    return rows[[0, 1, -1]] if len(rows) > 1 else torch.cat([rows, rows])


class _Passes:
    """Passes of a model that all begin with the same values of everything."""

    def __init__(self, model: Backbone) -> None:
        self._model = model
        self._put_back = PutBack(model)
        self._start = [(e, e.tensor.detach().clone()) for e in model.tensors().values() if e.is_trained]
        self._known: dict[tuple[bytes, bool, int], Tensor] = {}

    @torch.no_grad()
    def output(self, x: Tensor, training: bool, seed: int = 0) -> Tensor:
        """Outputs in training or evaluation mode, with the random numbers of a seed, one row each."""
        key = (x.numpy().tobytes(), training, seed)
        if key not in self._known:
            self._known[key] = self._pass(x, training, seed)
        return self._known[key]

    def _pass(self, x: Tensor, training: bool, seed: int) -> Tensor:
        self._put_back()
        for entry, value in self._start:
            entry.tensor.copy_(value)
        self._model.train(training)
        self._model.forget()
        with use_seed(seed):
            output = self._model(x.clone())
        several = output if isinstance(output, list) else [output]
        return torch.cat([each.reshape(len(x), -1) for each in several], 1)


def _mixes(passes: _Passes, rows: Tensor, training: bool) -> bool:
    """Whether the output of the first row changes with the second row, or with the number of rows.

    In evaluation mode also whether it changes with the random numbers.
    """
    one, other = rows[:2], rows[[0, -1 if len(rows) > 2 else 0]]
    if rows.is_floating_point():  # so that rows that happen to be equal differ
        other[1:] += torch.randn_like(other[1:])
    first = passes.output(one, training)[0]
    if not is_close(first, passes.output(other, training, 0 if training else 1)[0]):
        return True
    if training:
        return False  # random numbers differ with the number of rows
    return not is_close(first, passes.output(one[:1], training)[0])


def _varies(passes: _Passes, rows: Tensor) -> bool:
    """Whether training passes with other random numbers differ, or training from evaluation."""
    one, other = (passes.output(rows[:2], True, seed) for seed in (0, 1))
    return not (torch.equal(one, other) and torch.equal(one, passes.output(rows[:2], False)))


def draws_of(net: nn.Module, x: Tensor) -> Sequence[int]:
    """Numbers of the random changes under which a network is looked at; 0: its start values."""
    numbers = max(sum(p.numel() for p in net.parameters()), x[:1].numel())
    return range(DRAWS + 1) if numbers <= SMALL else (1,)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are equal but for rounding."""
    if torch.equal(one, other):
        return True
    scale = max(float(one.abs().max()), float(other.abs().max()))
    near = torch.isclose(one, other, rtol=0.0, atol=CLOSE * scale, equal_nan=True)
    return bool(near.all())


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Change all parameters and buffers of floats at random, in place: parts that start at zero then count.

    Args:
        model: A network whose values are not needed any more.
        seed: Decides the change, whatever the memory of the tensors.
    """
    random = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        spread = float(tensor.std(correction=0)) if tensor.numel() > 1 else float(tensor.abs().sum())
        noise = torch.randn(tensor.shape, generator=random).to(tensor.dtype)
        if name.endswith("var"):  # a variance stays positive
            tensor.mul_(torch.exp(noise / 4))
        else:
            tensor.add_(noise * (0.3 * spread + 0.1))
