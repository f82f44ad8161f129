"""Finds out, by running it before the first round, what a user's network does (`rayfed.models.behaviour`).

A short training shows which tensors move although no optimizer trains them. Passes with the same row among
other ones show whether the rows of a batch change each other's outputs. So nothing of this is guessed from
names or types.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.behaviour import Behaviour
from rayfed.models.named_tensors import global_name
from rayfed.models.put_back import OF_TORCH, PutBack, modules_with_attributes, print_of
from rayfed.seeds import derive, use_seed
from rayfed.types import Batch

DRAWS = 3
"""Random changes of all values of a network under which it is examined, besides its start values."""

SMALL = 1_000_000
"""Parameters, and numbers in a row of inputs, up to which a network is examined in all ways.

A larger one is examined with one random change, and without many passes and whole batches. Time does not
decide, because it differs by machine."""

MANY = 100
"""Passes of a small network that counts something, because what it does may begin after some of them."""

RATE = 0.01
"""Learning rate of the steps of gradient descent that show what training moves."""

AGAIN = 4
"""Passes of a small network in training, and in evaluation, that repeat after everything was put back."""

MOST_ROWS = 256
"""Rows of the largest batch with which a small network is examined."""

MOST_NUMBERS = 200_000
"""Numbers in such a batch up to which it is larger than one of the training."""

CLOSE = 1e-4
"""Largest difference of outputs, as a share of the largest one, that rounding explains."""


def examine(
    fresh: Callable[[], Backbone],
    loss: Callable[[Any, Tensor], Tensor],
    batches: Sequence[Batch],
    seed: int,
    whole: Batch | None = None,
) -> Behaviour:
    """Find out how a tuned network behaves.

    Args:
        fresh: Makes a copy of the tuned model, with values, on the CPU.
        loss: Loss of a batch from the output of the model and its targets, a scalar.
        batches: Inputs and targets of two clients, or of one.
        whole: A batch as large as those of the training; small networks are examined with it, too.

    Raises:
        ConfigError: A tensor moves in a way that no rule covers.
    """
    with torch.enable_grad(), use_seed(derive(seed, "examine")):
        trained = fresh()
        small = is_small(trained, batches[0][0])
        more = [] if whole is None or not small else [whole]
        counted: list[str] = []

        def train() -> None:
            before = _Noted(trained)
            _train(trained, loss, batches)
            _pass_more(trained, loss, more)
            counted.extend(before.counters())
            if small and counted:
                _pass_more(trained, loss, [batches[n % len(batches)] for n in range(MANY)])

        def evaluate() -> None:
            many = MANY if small and counted else 0
            for x in (batches[0][0], *(x for x, _ in more), *[batches[0][0]] * many):
                _no_grad(trained, x)

        in_training = _moved(trained, train)
        trained.eval()
        in_evaluation = _moved(trained, evaluate)
    moved = {**in_evaluation.tensors, **in_training.tensors}
    travels, back = set(), []
    for path, tensor in moved.items():
        if not tensor.is_floating_point() or path in _generators(trained):
            back.append(path)
        else:
            travels.add(path)
    attributes = tuple(dict.fromkeys((*in_training.attributes, *in_evaluation.attributes)))
    still = fresh().note(Behaviour(moves=frozenset(travels), put_back=tuple(back)))
    again = AGAIN if small else 1
    _check_repeats(still, [batches[0][0], *(x for x, _ in more)], again, derive(seed, "again"))
    if kept := [*(n for n in map(global_name, back) if not n.endswith("num_batches_tracked")), *attributes]:
        _check_begins_once(still, batches[0][0], kept, derive(seed, "begin"))
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
                if draw == 1 and not mixes[mode]:  # once, because so many rows take long
                    mixes[mode] = any(_mixes_all(passes, _many_rows(x), mode) for x, _ in more)
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
    for x, y in (*batches, batches[0])[:2]:  # two steps, of two clients where there are two
        loss(model(x.clone()), y).backward()
        with torch.no_grad():  # by hand, because an optimizer of torch imports its compiler
            for tensor in live:
                if tensor.grad is not None:
                    tensor.sub_(RATE * tensor.grad)
        model.zero_grad()
    _no_grad(model, batches[0][0])


def _pass_more(model: Backbone, loss: Callable[[Any, Tensor], Tensor], batches: Sequence[Batch]) -> None:
    """Passes of a training that changes no trained tensor."""
    model.train()
    with suppress(Exception):  # of values that this short training has spoilt
        for x, y in batches:
            loss(model(x.clone()), y).backward()
            model.zero_grad()


class _Noted:
    """Present values of what may count passes: buffers with whole or with single numbers, and attributes."""

    def __init__(self, model: Backbone) -> None:
        self._model = model
        self._before = dict(self._now())

    def _now(self) -> Iterator[tuple[str, Any]]:
        for path, tensor in _fixed(self._model):
            may_count = not tensor.is_floating_point() or tensor.numel() == 1
            if may_count and not path.endswith("num_batches_tracked"):
                yield path, print_of(tensor)
        yield from _attributes(self._model)

    def counters(self) -> list[str]:
        """Names of what is another now."""
        return [name for name, printed in self._now() if self._before.get(name) != printed]


def _check_repeats(model: Backbone, inputs: list[Tensor], times: int, seed: int) -> None:
    """Check that a network repeats its outputs after everything it holds was put back.

    It does not where it keeps something elsewhere: in a variable of a module or a function, in an attribute
    of a class, or in an object that cannot be put back. One client's data would then reach the next client.

    Args:
        model: A copy of the tuned model, with values.
        inputs: Batches.
        times: Passes of the first batch in each mode; the others have one.
        seed: Of the random numbers of its passes.

    Raises:
        ConfigError: It does not repeat them.
    """
    begin = _Start(model)
    begin()
    noted = dict(_attributes(model))
    runs: list[list[Tensor]] = []
    for _ in range(2):
        begin()
        outputs = []
        for training in (True, False):
            model.train(training)
            for number, x in enumerate((*inputs, *inputs[:1] * (times - 1))):
                with use_seed(derive(seed, str(number))), torch.no_grad():
                    model.forget()
                    output = model(x.clone())
                outputs += output if isinstance(output, list) else [output]
        runs.append([output.clone() for output in outputs])
    begin()
    changed = [name for name, printed in _attributes(model) if noted.get(name) != printed]
    if changed or any(not is_close(one, other) for one, other in zip(*runs, strict=True)):
        what = f"its attribute {changed[0]!r}" if changed else "something outside its buffers and attributes"
        raise ConfigError(
            f"model: passes of {model.label!r} change {what}, which can neither be copied nor put back, so "
            "that one client's data would reach the next client; keep state in buffers, or in numbers, "
            "lists, dicts and tensors as attributes of modules, and draw random numbers from torch's stream"
        )


@torch.no_grad()
def _check_begins_once(model: Backbone, x: Tensor, put_back: list[str], seed: int) -> None:
    """Check that trained parameters stay as they were sent where something is put back before each call.

    A layer that takes its start values from the first batch, and remembers that it did, would do so in each
    call of a client, and in each score.

    Args:
        model: A copy of the tuned model, with values.
        put_back: Names of what is put back.
        seed: Of the random numbers of its passes.

    Raises:
        ConfigError: What a pass writes into a trained parameter depends on what is put back.
    """
    begin = _Start(model)
    entries = {name: entry for name, entry in model.tensors().items() if entry.is_trained}
    sent = {name: entry.tensor + 1 for name, entry in entries.items()}

    def written() -> dict[str, int]:
        """The parameters that were sent, after a pass."""
        for name, entry in entries.items():
            entry.tensor.copy_(sent[name])
        with use_seed(seed):
            _no_grad(model, x)
        return {name: print_of(entry.tensor) for name, entry in entries.items() if not entry.is_buffer}

    for training in (True, False):
        begin()
        model.train(training)
        first = written()
        if all(printed == print_of(sent[name]) for name, printed in first.items()):
            continue
        later = written()  # what would be put back before the next call is as the first pass left it
        if other := [name for name, printed in first.items() if printed != later[name]]:
            raise ConfigError(
                f"model: passes of {model.label!r} write into the trained {other[0]} until {put_back[0]!r} "
                "says that it was done, which is put back before each call of a client, so that it would be "
                "done again; pass a batch through the network before you hand it over"
            )
    begin()


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
        ConfigError: A tensor gets another shape, is made or is complex, or another tensor trains.
    """
    before = {path: (tensor, tensor._version, print_of(tensor)) for path, tensor in _fixed(model)}
    noted = dict(_attributes(model))
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    run()
    if other := [n for n, p in model.named_parameters() if p.requires_grad != trains.get(n, p.requires_grad)]:
        raise ConfigError(
            f"model: a pass of {model.label!r} changes requires_grad of {global_name(other[0])}; what trains "
            "is the same in all rounds, so set it when the network is made"
        )
    after = dict(_fixed(model))
    tensors = {}
    for path, (tensor, version, printed) in before.items():
        now = after.get(path)
        if now is tensor and tensor._version == version and print_of(tensor) == printed:
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


def _attributes(model: Backbone) -> Iterator[tuple[str, bytes]]:
    """Digests of the attributes of modules that are neither tensors of it nor modules, by name."""
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for prefix, module in modules_with_attributes(model):
        for name, value in vars(module).items():
            if name in OF_TORCH or isinstance(value, nn.Module | nn.Parameter):
                continue
            path = prefix.removeprefix("body.").removeprefix("body")
            yield f"{path}.{name}" if path else name, _digest_of(value, own)


def _digest_of(value: Any, own: set[int]) -> bytes:
    """A digest that another value has not; what cannot be written is compared by identity.

    Args:
        value: An attribute, such as a function that uses layers.
        own: Identities of the modules and tensors of the network, which are looked at elsewhere.
    """
    try:
        data = repr(print_of(value)).encode() if isinstance(value, Tensor) else _written(value, own)
    except Exception:
        data = str(id(value)).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _written(value: Any, own: set[int]) -> bytes:
    """An object as bytes, in which a random stream of torch is its state, and not also its memory.

    Args:
        value: The object.
        own: As of `_digest_of`; they are a name only.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in own:
                return str, (type(obj).__name__,)
            if isinstance(obj, torch.Generator):
                return bytes, (obj.get_state().numpy().tobytes(),)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


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


class _Start:
    """The present values of everything in a model; a call gives them back to it."""

    def __init__(self, model: Backbone) -> None:
        self._put_back = PutBack(model)
        self._trained = [(e, e.tensor.detach().clone()) for e in model.tensors().values() if e.is_trained]

    @torch.no_grad()
    def __call__(self) -> None:
        self._put_back()
        for entry, value in self._trained:
            entry.tensor.copy_(value)


class _Passes:
    """Passes of a model that all begin with the same values of everything."""

    def __init__(self, model: Backbone) -> None:
        self._model = model
        self._begin = _Start(model)
        self._known: dict[tuple[bytes, bool, int], Tensor] = {}

    @torch.no_grad()
    def output(self, x: Tensor, training: bool, seed: int = 0) -> Tensor:
        """Outputs in training or evaluation mode, with the random numbers of a seed, one row each."""
        key = (x.numpy().tobytes(), training, seed)
        if key not in self._known:
            self._known[key] = self._pass(x, training, seed)
        return self._known[key]

    def _pass(self, x: Tensor, training: bool, seed: int) -> Tensor:
        self._begin()
        self._model.train(training)
        self._model.forget()
        with use_seed(seed):
            output = self._model(x.clone())
        several = output if isinstance(output, list) else [output]
        return torch.cat([each.reshape(len(x), -1) for each in several], 1)


def _mixes(passes: _Passes, rows: Tensor, training: bool) -> bool:
    """Whether the output of a row changes with another row, or that of the first with their number.

    In evaluation mode also whether it changes with the random numbers.
    """
    one, other = rows[:2], rows[[0, -1 if len(rows) > 2 else 0]]
    if rows.is_floating_point():  # so that rows that happen to be equal differ
        other[1:] += torch.randn_like(other[1:])
    seed = 0 if training else 1
    first, second = passes.output(one, training)
    if not is_close(first, passes.output(other, training, seed)[0]):
        return True
    before = torch.cat([other[1:], one[1:]])  # the same second row, after another one
    if not is_close(second, passes.output(before, training, seed)[1]):
        return True
    if training:
        return False  # random numbers differ with the number of rows
    return not is_close(first, passes.output(one[:1], training)[0])


def _many_rows(rows: Tensor) -> Tensor:
    """The rows again and again, as many as batches may have in which clients are scored together."""
    number = min(MOST_ROWS, max(len(rows), MOST_NUMBERS // max(1, rows[0].numel())))
    return rows.repeat(-(-number // len(rows)), *[1] * (rows.ndim - 1))[:number]


def _mixes_all(passes: _Passes, rows: Tensor, training: bool) -> bool:
    """As `_mixes`, with a large batch: whether its first or last row changes with the others."""
    if len(rows) < 3:
        return False
    other = rows.roll(1, 0)
    if rows.is_floating_point():
        other = other + torch.randn_like(other)
    ends = [0, -1]
    other[ends] = rows[ends]
    found = passes.output(rows, training)[ends]
    if not is_close(found, passes.output(other, training)[ends]):
        return True
    return not training and not is_close(found, passes.output(rows[ends], training))


def _varies(passes: _Passes, rows: Tensor) -> bool:
    """Whether training passes with other random numbers differ, or training from evaluation."""
    one, other = (passes.output(rows[:2], True, seed) for seed in (0, 1))
    return not (torch.equal(one, other) and torch.equal(one, passes.output(rows[:2], False)))


def is_small(net: nn.Module, x: Tensor) -> bool:
    """Whether a network is examined in all ways. Args: x: inputs, shape (B, ...)."""
    return max(sum(p.numel() for p in net.parameters()), x[:1].numel()) <= SMALL


def draws_of(net: nn.Module, x: Tensor) -> Sequence[int]:
    """Numbers of the random changes under which a network is looked at; 0: its start values."""
    return range(DRAWS + 1) if is_small(net, x) else (1,)


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
