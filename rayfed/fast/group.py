"""Plays a group of clients at once: one forward and one backward pass for the rows of all of them.

The code of every client runs as if it were alone, in its own thread, of which exactly one runs at a
time. Where it asks its model for a pass, it waits until all clients of the group ask for something, and its
thread wakes the next one; passes of the same kind are then computed together, with the values of each
client for its rows, and every client continues with its own rows of the result. Likewise, where it calls
`backward`, the gradients of all clients go through the shared network in one pass. The order of everything
is fixed, and global random states belong to the client whose turn it is.
"""

from __future__ import annotations

import contextvars
import logging
import random
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor, nn

from rayfed.data.text import PAD
from rayfed.devices import (
    HOST,
    CountedDraws,
    count_for,
    counting,
    random_state,
    seeded_state,
    set_random_state,
)
from rayfed.errors import one_line
from rayfed.executors.worker import is_fault, is_out_of_memory
from rayfed.fast.joint_batches import JointBatches
from rayfed.fast.joint_losses import JointLosses
from rayfed.fast.loss_requests import Loss, alike
from rayfed.fast.member import TEXTS, AllSteps, Batches, MemberModel, MemberPasses, NotShareableError, Pass
from rayfed.fast.shareable import trains_whole
from rayfed.fast.stacked import Stacked, dropouts, joint_pass, stackable, tokens_of_clients
from rayfed.fast.steps import JointSteps, Step, join_tensors
from rayfed.fast.training import Members, train_all
from rayfed.fast.unequal_blocks import (
    CountedDrawing,
    Drawing,
    Holders,
    RowsOfHolders,
    values_of,
    why_equal_blocks,
)
from rayfed.fast.whole import WholeStack, dropping_by_client, run_whole
from rayfed.federation.passes import logits
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor, bound
from rayfed.types import Params

R = TypeVar("R")

NUMPY: Any = np.random  # its annotations leave out what sets the global generator


class Cancelled(BaseException):
    """Ends the code of a client because another client of its group failed."""


class Unseeded(ISeedSequence):
    """Begins a generator of numpy that gets its seed afterwards; a usual one takes three times as long."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.zeros(n_words, dtype)


UNSEEDED: Any = Unseeded()


class Streams:
    """The random streams of one client, as `rayfed.seeds.seeded` begins them.

    What is not kept by client is the normal number that `np.random.randn` and its like hold back after an odd
    number of draws, because reading it takes 35 microseconds in each turn; code of clients should draw normal
    numbers from torch.

    Attributes:
        device: Device of the model, whose stream is kept too.
        own: The generator that the client's code gets.
        counted: What dropout on a device draws from.
        torch: State of torch's global CPU stream while it is not this client's turn.
    """

    def __init__(self, seed: int, device: torch.device = HOST) -> None:
        """Args: seed: seed of the client's call. device: that of the model."""
        self.device = device
        self._there = seeded_state(device, seed)
        self.counted = CountedDraws(seed)
        self.own = torch.Generator().manual_seed(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.MT19937(UNSEEDED)
        np.random.RandomState(self._numpy).seed(seed % 2**32)

    def begin(self) -> None:
        """Make these the global streams."""
        torch.set_rng_state(self.torch.get_state())
        set_random_state(self.device, self._there)
        count_for([self.counted])
        random.setstate(self._python)
        NUMPY.set_bit_generator(self._numpy)

    def end(self) -> None:
        """Keep the states of the global streams until this client's next turn."""
        self.torch.set_state(torch.get_rng_state())
        self._there = random_state(self.device)
        self._python = random.getstate()

    def kept(self, rows: Tensor, p: float) -> Tensor:
        """Draw, outside of the client's turn, which entries of its rows F.dropout would keep on the CPU.

        Args:
            rows: A tensor of the shape and the type of the rows.
            p: Probability with which an entry is dropped.

        Returns:
            1 for an entry that is kept, and 0 for another one.
        """
        return self.keep(torch.empty_like(rows), p)

    def keep(self, rows: Tensor, p: float) -> Tensor:
        """As `kept`, written into the rows."""
        return rows.bernoulli_(1 - p, generator=self.torch)


@contextmanager
def restore_streams() -> Iterator[None]:
    """Put the global streams back afterwards, which the turns of clients change."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), NUMPY.get_bit_generator()
    try:
        with counting([]):
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        NUMPY.set_bit_generator(numpy)


class Turn(Generic[R]):
    """The code of one client, which can be stopped at a request and continued with its answer.

    Attributes:
        streams: Random streams of the client.
        request: What the client waits for; None: its code has ended.
        result: What its code returned.
        error: What its code raised.
    """

    def __init__(self, work: Callable[[], R], streams: Streams) -> None:
        self.streams = streams
        self.request: Any = None
        self.result: R | None = None
        self.error: BaseException | None = None
        self._answer: Any = None
        self._cancelled = False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._paused: Callable[[], None] = _nobody_waits
        self._ended = allocate_lock()
        self._ended.acquire()
        # The thread alone holds the work, which refers to what holds this turn, and drops it at its end.
        # threading.Thread would wait here until the thread runs, which takes three times as long.
        start_new_thread(contextvars.copy_context().run, (self._run, work))

    def resume(self, answer: Any, paused: Callable[[], None]) -> None:
        """Let the client's code run, with the answer to its request; its thread calls `paused` afterwards."""
        self._answer = answer
        self._paused = paused
        self.request = None
        self.streams.begin()
        self._go.put(None)

    def ask(self, request: Any) -> Any:
        """Called by the client's code: wait for the answer to a request."""
        if not self._cancelled:  # else the code ends, and its cleaning up asks again
            self.request = request
            self._hand_over()
            self._go.get()
        if self._cancelled:
            raise Cancelled
        return self._answer

    def cancel(self) -> None:
        """End the client's code at its request."""
        self._cancelled = True
        self._go.put(None)
        with self._ended:
            pass

    def _hand_over(self) -> None:
        """Let the next client run."""
        self.streams.end()
        paused, self._paused = self._paused, _nobody_waits
        paused()

    def _run(self, work: Callable[[], R]) -> None:
        try:
            self._go.get()
            if not self._cancelled:
                self.result = work()
        except BaseException as err:
            self.error = err
        finally:
            self.request = None
            self._hand_over()
            self._ended.release()


def _nobody_waits() -> None:
    """Do nothing: the code of the client was ended, so that no thread waits for it."""


def take_turns(turns: Sequence[Turn[Any]], answers: Sequence[Any]) -> None:
    """Let the code of clients run, one after the other, each until its next request or its end.

    The thread of a client wakes that of the next one itself: to wake the caller in between would take as long
    once more. After the error of a client those after it do not run.

    Args:
        turns: The clients, in the order in which they run.
        answers: What each of them asked for; None for those that begin.
    """
    order = _Order(zip(turns, answers, strict=True))
    with restore_streams():
        order.proceed()
        order.ended.get()


class _Order:
    """Clients whose code is still to run. A class, because a function that hands itself on is freed late."""

    def __init__(self, waiting: Iterator[tuple[Turn[Any], Any]]) -> None:
        self._waiting = waiting
        self.ended: SimpleQueue[None] = SimpleQueue()

    def proceed(self, last: Turn[Any] | None = None) -> None:
        """Let the next client run, unless the last one failed."""
        following = None if last is not None and last.error is not None else next(self._waiting, None)
        if following is None:
            self.ended.put(None)
        else:
            turn, answer = following
            turn.resume(answer, partial(self.proceed, turn))


@dataclass(frozen=True)
class Rows:
    """Division of the rows of a joint batch among clients.

    Attributes:
        members: Numbers of the clients, in the order of their rows.
        sizes: Rows of each client. Every client has room for as many as the largest one; its first row is
            repeated in the rest, and no result of these rows is used.
        lengths: Tokens of the texts of each client, which are padded to the longest; empty: no texts. What is
            returned for a client has its own length.
        least: Rows that every client has room for at least.
    """

    members: Sequence[int]
    sizes: Sequence[int]
    lengths: Sequence[int] = ()
    least: int = 0

    @property
    def room(self) -> int:
        """Number m of rows that every client has room for."""
        return max(self.least, *self.sizes)

    def of(self, places: Sequence[int]) -> Rows:
        """The division among the clients at these places, in the same room."""
        members, sizes = ([every[i] for i in places] for every in (self.members, self.sizes))
        return Rows(members, sizes, [self.lengths[i] for i in places] if self.lengths else (), self.room)

    @property
    def is_even(self) -> bool:
        """Whether all clients have equally many rows of equally many tokens."""
        return min(self.sizes) == self.room and len(set(self.lengths)) <= 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all clients, shape (K m, ...); texts are padded on the right with `PAD`."""
        if len(parts) == 1 and len(parts[0]) == self.room:
            return parts[0]
        filled = []
        longest = max((part.shape[1] for part in parts if self.lengths and part.ndim > 1), default=0)
        for part in parts:
            if self.lengths and part.ndim > 1 and (shorter := longest - part.shape[1]):
                ends = (0, 0) * (part.ndim - 2) + (0, shorter)
                part = F.pad(part, ends, value=PAD)
            filled.append(part)
            if short := self.room - len(part):
                one = part[:1] if len(part) else part.new_zeros(1, *part.shape[1:])
                filled.append(one.expand(short, *part.shape[1:]))
        return torch.cat(filled)

    def by_client(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all clients, shape (K, m, ...), with a dimension for the clients."""
        if self.is_even:
            return join_tensors([parts])[0]
        return self.join(parts).unflatten(0, (len(parts), self.room))

    def means(self, each: Tensor) -> Tensor:
        """Means over the rows of every client, shape (K,). Args: each: a number of each row, shape (K m,)."""
        by_client = each.view(len(self.sizes), self.room)
        if min(self.sizes) == self.room:
            return by_client.mean(1)
        counted = self.counted(each)
        return (by_client * counted).sum(1) / counted.sum(1)

    def counted(self, like: Tensor) -> Tensor:
        """1 for a row of a client and 0 for one that fills its place, shape (K, m), of this type."""
        ones, zeros = like.new_ones(self.room), like.new_zeros(self.room)
        parts = [part for size in self.sizes for part in (ones[:size], zeros[size:])]
        return torch.cat(parts).view(-1, self.room)

    @property
    def single(self) -> Rows:
        """The division of one number of each client."""
        return Rows(self.members, [1] * len(self.members))

    def own(self, i: int, joint: Tensor) -> Tensor:
        """Rows of the client at place i."""
        start = i * self.room
        rows = joint[start : start + self.sizes[i]]
        return rows[:, : self.lengths[i]] if self.lengths and joint.ndim > TEXTS else rows


class Joint:
    """A pass that was computed for several clients."""

    def __init__(
        self,
        rows: Rows,
        output: Any,
        leaves: Mapping[str, Tensor],
        x: Tensor | None,
        places: Mapping[str, Sequence[int]],
    ) -> None:
        """Keep what the backward pass needs.

        Args:
            rows: Division of the rows of the output.
            output: The output, or several of them.
            leaves: Tensors that get gradients, by global name, shape (H, ...).
            x: The input; None: it gets no gradients.
            places: Places of the H clients whose values a leaf has, by its name.
        """
        self._rows = rows
        self._output = output
        self._flat = [output] if isinstance(output, Tensor) else list(output)
        self._x = x
        self._leaves = leaves
        self._waiting = set(rows.members)
        self._names = [*leaves]
        self._held: list[list[tuple[int, int]]] = [[] for _ in rows.members]
        for number, name in enumerate(leaves):
            for position, place in enumerate(places[name]):
                self._held[place].append((number, position))

    def names(self, i: int) -> list[str]:
        """Global names of the tensors of the client at place i that get gradients."""
        return [self._names[number] for number, _ in self._held[i]]

    def shape_as_returned(self, flat: Sequence[Tensor]) -> Any:
        """Outputs in the form in which the model returned them: a tensor, a list or a tuple."""
        return flat[0] if isinstance(self._output, Tensor) else type(self._output)(flat)

    def parts(self, i: int) -> list[Tensor]:
        """Outputs for the rows of the client at place i, without gradients."""
        return [self._rows.own(i, out.detach()) for out in self._flat]

    def answers(self) -> dict[int, Any]:
        """The answer for each client: its rows, or what connects them to the gradients."""
        members = enumerate(self._rows.members)
        if any(out.requires_grad for out in self._flat):
            return {k: Share(self, i) for i, k in members}
        return {k: self.shape_as_returned(self.parts(i)) for i, k in members}

    def backward(self, grads: Mapping[int, Sequence[Tensor | None]]) -> dict[int, list[Tensor | None]]:
        """One backward pass for the clients that asked for it.

        Args:
            grads: Gradients of each output for the rows of a client, by number of the client.

        Returns:
            For each client the gradients of its rows (None unless they require gradients) and of its tensors.
        """
        self._waiting -= grads.keys()
        outputs = []
        incoming = []
        for j, out in enumerate(self._flat):
            if out.requires_grad and any(given[j] is not None for given in grads.values()):
                outputs.append(out)
                incoming.append(self._incoming(j, out, grads))
        inputs = [*([] if self._x is None else [self._x]), *self._leaves.values()]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if outputs:
            keep = bool(self._waiting)
            found = torch.autograd.grad(outputs, inputs, incoming, retain_graph=keep, allow_unused=True)
        of_x = None if self._x is None else found[0]
        # Contiguous: autograd copies the gradient of each client otherwise.
        each = [
            None if g is None else g.contiguous().unbind(0) for g in found[len(inputs) - len(self._leaves) :]
        ]
        answers: dict[int, list[Tensor | None]] = {}
        for i, k in enumerate(self._rows.members):
            if k in grads:
                mine = None if of_x is None else self._rows.own(i, of_x)
                own = [(each[number], position) for number, position in self._held[i]]
                answers[k] = [mine, *(None if g is None else g[position] for g, position in own)]
        return answers

    def _incoming(self, j: int, out: Tensor, grads: Mapping[int, Sequence[Tensor | None]]) -> Tensor:
        parts = [grads[k][j] if k in grads else None for k in self._rows.members]
        given = [part for part in parts if part is not None]
        if len(given) == len(parts) and self._rows.is_even:
            return torch.cat(given)
        if not self._rows.lengths:
            return torch.cat(self._pad(parts, out))
        whole = torch.zeros_like(out)
        for i, part in enumerate(parts):
            if part is not None:
                self._rows.own(i, whole).copy_(part)
        return whole

    def _pad(self, parts: Sequence[Tensor | None], out: Tensor) -> list[Tensor]:
        """Gradients for the rows of each client, with zeros for rows that have none."""
        zero = out.new_zeros(1, *out.shape[1:])
        filled = []
        for part in parts:
            filled += [] if part is None else [part]
            if missing := self._rows.room - (0 if part is None else len(part)):
                filled.append(zero.expand(missing, *out.shape[1:]))
        return filled


@dataclass(frozen=True, eq=False)
class Share:
    """The part of one client in a joint pass.

    Attributes:
        joint: The pass.
        place: Place of the client in it.
    """

    joint: Joint
    place: int


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward pass that a client asks for.

    Attributes:
        joint: The pass whose outputs have these gradients.
        grads: Gradient of each output for the client's rows; None: the output was not used.
    """

    joint: Joint
    grads: Sequence[Tensor | None]


Request: TypeAlias = Pass | Backward | Step | Batches | AllSteps | Loss
"""Something that the code of a client waits for."""


class JointPass(torch.autograd.Function):
    """One client's rows of a joint pass, as a function of its rows and its tensors.

    The backward pass waits for the other clients; second derivatives do not exist.
    """

    @staticmethod
    def forward(ctx: Any, share: Share, ask: Callable[[Any], Any], x: Tensor, *leaves: Tensor) -> Any:
        ctx.share = share
        ctx.ask = ask
        ctx.set_materialize_grads(False)
        return tuple(share.joint.parts(share.place))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = ctx.ask(Backward(ctx.share.joint, grads))
        given = (None, None, *found)
        found.clear()  # of tensors that nobody else refers to, autograd makes no copies
        return given


@contextmanager
def dropping(model: Backbone, rows: Rows, streams: Sequence[Streams]) -> Iterator[Drawing]:
    """Let every dropout layer draw the rows of each client from its own numbers.

    Yields:
        Lets the layers draw for some of the clients, which are given by their places in the rows.
    """
    on_cpu = streams[0].device == HOST
    layers = list(dropouts(model)) if model.training and on_cpu else []
    now = [rows]
    for layer in layers:
        vars(layer)["forward"] = partial(_dropout, p=layer.p, now=now, streams=streams)
    try:
        draws = [] if on_cpu else [streams[k].counted for k in rows.members]
        with counting(draws):
            yield partial(_among, now) if on_cpu else CountedDrawing(draws, streams[0].device)
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@contextmanager
def _among(now: list[Rows], places: Sequence[int]) -> Iterator[None]:
    """Let dropout on the CPU draw for some of the clients of the rows that it draws for now."""
    now.append(now[0].of(places))
    try:
        yield
    finally:
        now.pop()


def _dropout(x: Tensor, p: float, now: Sequence[Rows], streams: Sequence[Streams]) -> Tensor:
    """Dropout that draws for a client what F.dropout would draw for its rows alone.

    Args:
        x: Rows of some clients.
        p: Probability with which an entry is dropped.
        now: Its last entry divides these rows among the clients.
        streams: Random streams of all clients.
    """
    rows = now[-1]
    if tokens := tokens_of_clients():
        parts = zip(x.detach().split([*tokens], 1), rows.members, strict=True)
        kept = torch.cat([streams[k].kept(part, p) for part, k in parts], 1)
        return x * kept.div_(1 - p)
    if rows.is_even:
        noise = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part, k in zip(noise.split(rows.room), rows.members, strict=True):
            streams[k].keep(part, p)
        return x * noise.div_(1 - p)
    each = [streams[k].kept(rows.own(i, x.detach()), p) for i, k in enumerate(rows.members)]
    return x * rows.join(each).div_(1 - p)


log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Most rows of a joint pass without gradients, unless those of one client are more."""


class MemberError(Exception):
    """The code of a client of a group failed; its error is the cause of this one."""


class Group:
    """Clients that share their passes.

    Attributes:
        models: The model of each client, to be used in its code only.
        passes: How each client computes.
        streams: The random streams of each client.
    """

    def __init__(
        self,
        model: Backbone,
        values: Sequence[Params],
        active: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
    ) -> None:
        """Make the models of the clients.

        Args:
            model: The model; it is changed during passes only.
            values: Values of all trained tensors of each client, by global name.
            active: Blocks that each client holds.
            seeds: Seed of the random streams of each client.
        """
        self._model = model
        self._places = stackable(model)
        self._is_whole = trains_whole(model)
        self._stacked = WholeStack if self._is_whole else Stacked
        # Rows of whole networks lie example by example, so none of a client can be left out.
        self._may_differ = not self._is_whole and not why_equal_blocks(model)
        self._stacks = {name: torch.stack([own[name] for own in values]) for name in values[0]}
        entries = model.tensors()
        self._turns: list[Turn[Any]] = []
        self._joined: dict[Any, Any] = {}
        self._apart: set[Any] = set()
        device = next(model.parameters()).device
        self.streams = [Streams(seed, device) for seed in seeds]
        each = self._split_stacks(entries, len(values))
        views = {name: stack for name, stack in self._stacks.items() if name in self._places}
        self._steps = JointSteps(views, each)
        unit = None if device == HOST else torch.ones((), device=device)
        self.passes = [MemberPasses(partial(self._ask, k), unit, self._is_whole) for k in range(len(values))]
        self.models = [
            MemberModel(model, own, blocks, passes.ask)
            for own, blocks, passes in zip(each, active, self.passes, strict=True)
        ]

    def _split_stacks(self, entries: Mapping[str, NamedTensor], clients: int) -> list[Params]:
        """Trained tensors of each client: views of the stacks, so that a joint pass need not copy them.

        Those of the text side are copies. A client computes with them alone, and must be able to go backward
        through that after another one has changed its own, which counts as a change of every view.
        """
        each: list[Params] = [{} for _ in range(clients)]
        for name, stack in self._stacks.items():
            is_view = name in self._places
            is_buffer = entries[name].is_buffer
            for own, value in zip(each, stack.unbind(0), strict=True):
                value = value if is_view else value.clone()
                own[name] = value if is_buffer else nn.Parameter(value)
        return each

    def run(self, tasks: Sequence[Callable[[], R]]) -> list[R]:
        """Run the code of every client to its end.

        Args:
            tasks: The code of each client.

        Raises:
            MemberError: The code of a client raised an error; that of the others was ended.
        """
        self._turns = [
            Turn(partial(_in_one_thread, task), own) for task, own in zip(tasks, self.streams, strict=True)
        ]
        self._model.train()  # a new model is in no defined mode, in which frozen layers may round differently
        try:
            self._resume(dict.fromkeys(range(len(tasks))))
            while requests := {k: t.request for k, t in enumerate(self._turns) if t.request is not None}:
                self._resume(self._answers(requests))
        finally:
            for turn in self._turns:
                turn.cancel()
            self.passes.clear()
            self.models.clear()  # they refer to this group, which would be freed late otherwise
            self._model.active = None if self._model.num_blocks else ()
            self._model.untuned = False
        return [turn.result for turn in self._turns if turn.result is not None]

    def _resume(self, answers: Mapping[int, Any]) -> None:
        """Let the code of these clients run until each has a new request or has ended."""
        members = sorted(answers)
        take_turns([self._turns[k] for k in members], [answers[k] for k in members])
        for turn in self._turns:
            if turn.error is not None:
                raise MemberError from turn.error

    def _ask(self, k: int, request: Request) -> Any:
        """Wait for the joint pass of client k's model, and connect its result to the gradients."""
        answer = self._turns[k].ask(request)
        if not isinstance(answer, Share):
            return answer
        own = self.models[k].own
        leaves = [own[name] for name in answer.joint.names(answer.place)]
        assert isinstance(request, Pass)
        outputs = JointPass.apply(answer, partial(self._ask, k), request.x, *leaves)
        return answer.joint.shape_as_returned(outputs)

    def _answers(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Compute all requests, those of the same kind together."""
        if trainings := {k: r for k, r in requests.items() if isinstance(r, AllSteps)}:
            rest = {k: request for k, request in requests.items() if k not in trainings}
            return self._train(trainings) | (self._answers(rest) if rest else {})
        steps = {k: request.optimizer for k, request in requests.items() if isinstance(request, Step)}
        self._steps.take(steps)
        batches = {k: request for k, request in requests.items() if isinstance(request, Batches)}
        passes = {k: r for k, r in requests.items() if isinstance(r, Pass | Backward)}
        losses = {k: request for k, request in requests.items() if isinstance(request, Loss)}
        return dict.fromkeys(steps) | _collected(batches) | self._compute(passes) | self._descended(losses)

    def _train(self, requests: Mapping[int, AllSteps]) -> dict[int, bool]:
        """Whether these clients were trained in one loop, for each of them."""
        whole = len(requests) == len(self.streams)
        draws = [stream.counted for stream in self.streams]
        values = (self._stacks, self._places, self._stacked, self._steps)
        members = Members(self._model, *values, draws, self._dropping)
        done = whole and train_all(members, [requests[k] for k in range(len(requests))])
        return dict.fromkeys(requests, done)

    def _descended(self, requests: Mapping[int, Loss]) -> dict[int, bool]:
        """Whether the gradients of these losses were added to those of the clients, for each of them."""
        done = dict.fromkeys(requests, False)
        for members in alike(requests):
            first = requests[members[0]]
            if len(members) > 1 and first.method not in self._apart:
                done |= dict.fromkeys(members, self._descend(members, [requests[k] for k in members]))
        return done

    def _descend(self, members: Sequence[int], losses: Sequence[Loss]) -> bool:
        """Whether the gradients of the losses of these clients were computed together."""
        draws = [self.streams[k].counted.state for k in members]
        try:
            self._gradients(members, losses)
        except Exception as err:
            if is_fault(err) or is_out_of_memory(err):
                raise
            for k, state in zip(members, draws, strict=True):
                self.streams[k].counted.state = state
            log.info("clients compute their losses one by one: %s", err)
            self._apart.add(losses[0].method)
            return False
        return True

    def _gradients(self, members: Sequence[int], losses: Sequence[Loss]) -> None:
        """Add the gradients of the losses of these clients to their own ones."""
        rows = Rows(members, [len(each.batch[1]) for each in losses])
        each = [self.models[k] for k in members]
        stacked = join_tensors([[model.own[name].detach() for model in each] for name in self._stacks])
        values = dict(zip(self._stacks, stacked, strict=True))
        learned = [name for name, value in each[0].own.items() if value.requires_grad]
        for name in learned:
            values[name] = values[name].detach().requires_grad_()
        run = partial(self._pass_of_rows, rows, values)
        joint = JointLosses(self._model, losses, values, run, self._joined)
        x, y = (rows.by_client([part[i] for part in (loss.batch for loss in losses)]) for i in range(2))
        features = [
            model.remembered_features(loss.batch[0]) for model, loss in zip(each, losses, strict=True)
        ]
        known = None if features[0] is None else rows.by_client([f for f in features if f is not None])
        with torch.enable_grad():
            loss, *measured = joint.compute(x, y, known, None if rows.is_even else self._shares(rows, x))
        inputs = [values[name] for name in learned]
        found = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        for name, grad in zip(learned, found, strict=True):
            if grad is not None:
                for model, part in zip(each, grad.contiguous().unbind(0), strict=True):
                    own = model.own[name]
                    own.grad = part if own.grad is None else own.grad + part
        for name, several in zip(joint.measured, measured, strict=True):
            for request, value in zip(losses, several.detach().unbind(0), strict=True):
                request.client.measure(**{name: value})

    def _shares(self, rows: Rows, x: Tensor) -> Tensor:
        """The share of each row in the loss of its client, shape (K, m)."""
        key = ("shares", rows.room, *rows.sizes)
        if key not in self._joined:
            counted = rows.counted(x.new_empty((), dtype=torch.float32))
            self._joined[key] = counted / counted.sum(1, keepdim=True)
        found: Tensor = self._joined[key]
        return found

    def _pass_of_rows(
        self,
        rows: Rows,
        values: Params,
        request: Pass,
        x: Tensor,
        known: Tensor | None,
        given: Mapping[str, tuple[Tensor, bool]],
    ) -> Any:
        """A pass within the losses of several clients; arguments and result as of `joint_losses.Run`."""
        training, gradients, active, untuned = request.state
        model = self._model
        model.active = active
        model.untuned = untuned
        if model.training != training:
            model.train(training)
        held = {n: v for n, v in self._places.items() if v.block is None or v.block in active}
        leaves: dict[str, Any] = {n: self._stacked(values[n]) for n in held}
        for name, (value, is_by_client) in given.items():
            leaves[name] = self._stacked(value) if is_by_client else value
        if known is not None:
            x = known if model.has_frozen_features and not x.requires_grad else x
            model.remember_frozen_features(x, known)
        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            stack.enter_context(bound(held.values(), (leaves[name] for name in held)))
            stack.enter_context(dropping(model, rows, self.streams))
            stack.enter_context(joint_pass(rows.sizes))
            return getattr(model, request.kind)(x, **request.options)

    def _dropping(self, sizes: Sequence[int], room: int) -> AbstractContextManager[Any]:
        """As `Members.drawing`."""
        return dropping(self._model, Rows(range(len(sizes)), sizes, least=room), self.streams)

    def _compute(self, requests: Mapping[int, Pass | Backward]) -> dict[int, Any]:
        backward: dict[Joint, dict[int, Sequence[Tensor | None]]] = {}
        forward: dict[Any, dict[int, Pass]] = {}
        for k, request in requests.items():
            if isinstance(request, Backward):
                backward.setdefault(request.joint, {})[k] = request.grads
            else:
                forward.setdefault(request.key(self._may_differ), {})[k] = request
        answers: dict[int, Any] = {}
        for joint, grads in backward.items():
            answers |= joint.backward(grads)
        for (kind, *_), passes in forward.items():
            if kind == "frozen_features":
                answers |= {k: self._compute_alone(request) for k, request in passes.items()}
            else:
                for some in _portions(passes):
                    answers |= self._together(some)
        return answers

    def _compute_alone(self, request: Pass) -> Tensor:
        self._model.active = request.state[2]
        return self._model.frozen_features(request.x)

    def _together(self, requests: Mapping[int, Pass]) -> dict[int, Any]:
        """One pass of the network for the rows of these clients."""
        members = list(requests)
        passes = list(requests.values())
        training, gradients, _, untuned = passes[0].state
        holders = Holders([p.state[2] for p in passes])
        model = self._model
        model.active = holders.all_blocks
        model.untuned = untuned
        if model.training != training:
            model.train(training)
        texts = passes[0].x.dtype == torch.long and passes[0].x.ndim == TEXTS
        lengths = [p.x.shape[1] for p in passes] if texts else []
        rows = Rows(members, [len(p.x) for p in passes], lengths)
        places = {n: holders.of(v.block) for n, v in self._places.items()}
        held = {n: v for n, v in self._places.items() if places[n]}
        leaves = self._values({n: places[n] for n in held}, members, passes)
        own = held.keys() - passes[0].values.keys()  # what a client gave for this pass gets no gradients
        learned = [n for n, v in held.items() if gradients and n in own and not v.is_buffer]
        for name in learned:
            leaves[name].value.requires_grad_()
        x = rows.join([p.x.detach() for p in passes])
        if passes[0].x.requires_grad:
            x.requires_grad_()
        if features := [p.known for p in passes if p.known is not None]:  # of all of them, or of none
            known = rows.join(features)
            x = known if model.has_frozen_features and not x.requires_grad else x
            model.remember_frozen_features(x, known)
        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            stack.enter_context(bound(held.values(), (leaves[name] for name in held)))
            drawing = stack.enter_context(dropping(model, rows, self.streams))
            stack.enter_context(joint_pass(rows.sizes))
            if not holders.are_equal:
                apart = _by_block(held) if x.device == HOST else None
                drops = training and any(dropouts(model))
                change = RowsOfHolders(model.stack, holders, drawing, apart, drops)
                stack.enter_context(model.stack.use_change(change))
            output = self._output(passes, rows, x)
        given = rows if passes[0].targets is None else rows.single
        of_x = x if x.requires_grad else None
        return Joint(given, output, {n: leaves[n].value for n in learned}, of_x, places).answers()

    def _output(self, passes: Sequence[Pass], rows: Rows, x: Tensor) -> Any:
        """Output of the network for the rows of all clients, or the loss of each client, shape (K,)."""
        options = dict(passes[0].options)
        objective = options.pop("objective", None)
        network = getattr(self._model, passes[0].kind)
        if self._is_whole:
            with dropping_by_client(self._model, len(passes)):
                output = run_whole(network, x, len(passes), **options)
        else:
            output = network(x, **options)
        targets = [p.targets for p in passes if p.targets is not None]
        if not targets:
            return output
        return rows.means(objective.losses(logits(output), rows.join(targets)))

    def _values(
        self, places: Mapping[str, Sequence[int]], members: Sequence[int], passes: Sequence[Pass]
    ) -> dict[str, Any]:
        """The values of tensors for clients: their own, or those that they gave for this pass.

        Args:
            places: Places of the clients that hold a tensor, by its global name.
            members: Numbers of the clients.
            passes: Their requests.
        """
        given = passes[0].values
        own = {name: self._stacks[name].detach() for name in places if name not in given}
        wanted = {name: [members[place] for place in places[name]] for name in own}
        # Copies: a client may change its values before another one has gone backward through this pass.
        values: dict[str, Any] = {n: self._stacked(value) for n, value in values_of(own, wanted).items()}
        for name in (name for name in places if name in given):
            each = [passes[place].values[name] for place in places[name]]
            device = self._stacks[name].device
            if all(value is each[0] for value in each):
                values[name] = each[0].to(device)
            else:
                values[name] = self._stacked(torch.stack([value.to(device) for value in each]))
        return values


def _collected(requests: Mapping[int, Batches]) -> dict[int, Callable[[int], Any]]:
    """Functions that give each client its batches, by number of the batch."""
    if not requests:
        return {}
    first = next(iter(requests.values()))  # all have the same examples
    found: dict[int, Callable[[int], Any]] = {}
    for with_table in (False, True):
        some = {k: r for k, r in requests.items() if (r.features is not None) == with_table}
        if some:
            tables = {k: (r.features, r.rows) for k, r in some.items() if r.features is not None}
            places = {k: r.places for k, r in some.items()}
            joint = JointBatches(first.examples, first.normalize, places, tables)
            found |= {k: partial(joint.batch, k) for k in some}
    return found


def _by_block(places: Mapping[str, NamedTensor]) -> dict[int, list[NamedTensor]]:
    """Places of tensors by the index of their block; those outside the blocks are left out."""
    found: dict[int, list[NamedTensor]] = {}
    for place in places.values():
        if place.block is not None:
            found.setdefault(place.block, []).append(place)
    return found


def _portions(passes: Mapping[int, Pass]) -> list[dict[int, Pass]]:
    """All clients together in a pass with gradients; without gradients, as many as `MOST_ROWS` allows.

    Batches of an evaluation are large already: more rows would cost memory and save nothing.
    """
    members = list(passes.items())
    gradients = members[0][1].state[1]
    each = max(1, MOST_ROWS // max(len(p.x) for p in passes.values()))
    size = len(members) if gradients else each
    return [dict(members[i : i + size]) for i in range(0, len(members), size)]


def log_failure(clients: Sequence[str], err: BaseException, together: bool) -> None:
    """Log that clients of a group are run one by one.

    It is a warning where the method or the model cannot be grouped, because then every group costs an
    attempt, and where what is computed for all of them failed, which no code of a client explains.

    Args:
        clients: Their ids.
        err: The error.
        together: Whether it was raised where all of them are computed, and not in the code of one.
    """
    log.info("clients %s are run one by one: %s", ", ".join(clients), err)
    if isinstance(err, NotShareableError | NotImplementedError):
        _warn(str(err))
    elif together and not isinstance(err, FloatingPointError):
        _warn(f"{type(err).__name__}: {one_line(err)}")


@cache
def _warn(cause: str) -> None:
    """Warn once per process and cause."""
    log.warning(
        "clients cannot share their passes and are run one by one: %s; train.group=1 saves the attempts",
        cause,
    )


def _in_one_thread(task: Callable[[], R]) -> R:
    """Run a task with its backward passes in its own thread, which may wait in them, on a GPU too."""
    with torch.autograd.set_multithreading_enabled(False):
        return task()
