"""Graphs of a network on a device: its operations are recorded once, and started together afterwards.

A GPU waits for the processor where each operation is short. A graph has all operations of a pass of one
shape, forward or backward, at fixed places in memory. Before it is replayed, what changes between passes is
copied there: the inputs, the trained tensors of one client or of a group, and what dropout counts. It has the
same kernels as a pass without graphs, so results are the same.

All graphs of a process share their memory. So a pass uses a graph only while no earlier one waits for its
backward pass; otherwise, and where a pass cannot be recorded, operations are started one by one.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rayfed.devices import (
    CountedDraws,
    clone_all,
    counted,
    counted_seeds,
    counting,
    move,
    random_state,
    same_draws,
)
from rayfed.errors import ConfigError
from rayfed.fast.dropout import CountedDropout
from rayfed.fast.stacked import Stacked
from rayfed.federation.method_registry import Parts
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone, compute_part
from rayfed.models.blocks import BlockStack
from rayfed.models.lora_layer import is_twice_differentiable
from rayfed.models.named_tensors import RESIDUAL_LEAF, NamedTensor, bound

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST = 8
"""Most kinds of passes of a process that are recorded; further ones are computed without graphs."""

PLAIN_FIRST = 1
"""Passes of a kind that are computed without a graph before it is recorded, as many kinds come only once."""


class Recorder(Protocol):
    """Records operations of a device, so that they can be repeated at once."""

    def run_unrecorded(self, work: Callable[[], object]) -> None:
        """Run operations in the way in which they are recorded, without recording them."""
        ...

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record operations, whose results have no values yet.

        Args:
            work: Starts the operations. Tensors that it did not make must stay where they are.

        Returns:
            A function that computes them anew, and what `work` returned, which is overwritten each time.
        """
        ...

    def address(self, tensor: Tensor) -> int:
        """Place of a tensor in the memory of the device."""
        ...


class CudaRecorder:
    """Records graphs of CUDA, all of which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: a GPU."""
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def run_unrecorded(self, work: Callable[[], object]) -> None:
        """Run operations on the stream of the graphs."""
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            work()
        before.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record operations; other threads of the process may go on, such as one that collects batches."""
        graph = torch.cuda.CUDAGraph()
        kind: Any = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, kind):
            result = work()
        return graph.replay, result

    def address(self, tensor: Tensor) -> int:
        """Address of its first element."""
        return tensor.data_ptr()


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Recorders by the type of the device; others have no graphs."""


class NotRepeatableError(Exception):
    """A pass cannot be recorded, because it would not be the same when it is replayed."""


class Open:
    """A pass that can still go backward, as long as autograd holds it.

    Attributes:
        ended: It went backward for the last time.
    """

    ended = False


@dataclass(frozen=True, eq=False)
class Recorded:
    """The graphs of one kind of passes, and the places in memory where they read and write.

    Attributes:
        inputs: The rows, and the values of trained tensors.
        seeds: Seeds of the clients of dropout, int64, shape (K,).
        counts: How often each layer drew before, int64, shape (layers, K).
        drawn: How often a layer draws in the pass, by its number; layers that do not draw are left out.
        forward: Computes the output.
        output: The output.
        backward: Computes the gradients; None: there are none.
        grad: Gradient of the output; None as well.
        grads: Gradients of the inputs; None for those without.
    """

    inputs: Sequence[Tensor]
    seeds: Tensor
    counts: Tensor
    drawn: Mapping[int, int]
    forward: Callable[[], None]
    output: Tensor
    backward: Callable[[], None] | None
    grad: Tensor | None
    grads: Sequence[Tensor | None]

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        """A copy of the output for these inputs; dropout draws for the clients of `counted`."""
        self.inputs[0].detach().copy_(inputs[0])
        if len(inputs) > 1:
            torch._foreach_copy_([own.detach() for own in self.inputs[1:]], list(inputs[1:]))
        if self.drawn:
            clients = counted()
            self.seeds.copy_(counted_seeds(self.seeds.device))
            counts = [[client.drawn(layer) for client in clients] for layer in range(len(self.counts))]
            numbers = {number for layer in self.drawn for number in counts[layer]}
            if len(numbers) == 1:
                self.counts.fill_(numbers.pop())
            else:
                self.counts.copy_(move(torch.tensor(counts), self.counts.device))
            for client in clients:
                client.advance(self.drawn)
        self.forward()
        return self.output.clone()

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """Copies of the gradients of the inputs, for the last pass."""
        assert self.grad is not None
        assert self.backward is not None
        self.grad.copy_(grad)
        self.backward()
        copies = clone_all({i: found for i, found in enumerate(self.grads) if found is not None})
        return [copies.get(i) for i in range(len(self.grads))]


class Replayed(torch.autograd.Function):
    """A pass from a graph, as a function of its inputs; second derivatives do not exist."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, own: Open, *inputs: Tensor) -> Tensor:
        ctx.recorded, ctx.own = recorded, own
        return recorded.replay(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors  # raises torch's error in a second backward pass, before which others computed
        found = ctx.recorded.gradients(grad)
        ctx.own.ended = not torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, *found


class Graphs:
    """Gives the output of a network from graphs, where there is one for a pass, or one can be made.

    Where one is used depends on the passes before, and no result depends on it.

    Attributes:
        made: Number of kinds of passes that were recorded.
        used: Number of passes that came from graphs.
    """

    def __init__(self, model: Backbone, recorder: Recorder) -> None:
        """Find the tensors that change between passes.

        Args:
            model: The tuned model on its device; its modules must stay, its tensors may be replaced.
            recorder: Records operations of the device.
        """
        self.made = 0
        self.used = 0
        self._recorder = recorder
        self._modules = list(model.net.modules())
        blocks = getattr(model.net, "blocks", None)
        self._stack = blocks if isinstance(blocks, BlockStack) else None
        inside = {id(module) for module in self._modules}
        entries = [entry for entry in model.tensors().values() if id(entry.module) in inside]
        self._slots = [entry for entry in entries if entry.is_trained]
        self._may = not why_no_graphs(model) and model.gc_net is None
        mine = {(id(slot.module), slot.leaf) for slot in self._slots}
        self._frozen = [
            (held, leaf)
            for module in self._modules
            for held in (module._parameters, module._buffers)
            for leaf, tensor in held.items()
            if tensor is not None and (id(module), leaf) not in mine
        ]
        numbers = [module.number for module in self._modules if isinstance(module, CountedDropout)]
        self._layers = max(numbers, default=-1) + 1
        self._open: weakref.ref[Open] | None = None
        self._forget(())

    def _forget(self, addresses: tuple[int, ...]) -> None:
        """Begin anew, with frozen tensors at these addresses."""
        self._addresses = addresses
        self._recorded: dict[Any, Recorded] = {}
        self._seen: Counter[Any] = Counter()
        self._refused: set[Any] = set()

    def __call__(self, net: Callable[[Tensor], Tensor], x: Tensor, mixed: bool) -> Tensor:
        """The output of a pass, as of `rayfed.models.backbone.compute_part`.

        Args:
            net: The network, or a way to run it.
            mixed: As of `compute_part`.

        Raises:
            OutOfMemoryError: The device has too little memory for the graph.
        """
        found = self._from_graph(net, x, mixed)
        return compute_part(net, x, mixed) if found is None else found

    def _from_graph(self, net: Callable[[Tensor], Tensor], x: Tensor, mixed: bool) -> Tensor | None:
        """The output of a pass; None: it has to be computed without a graph."""
        if not self._may or self._waits or is_twice_differentiable():
            return None
        if torch._C._are_functorch_transforms_active() or (self._stack and self._stack.is_watched):
            return None
        frozen: list[Any] = [held[leaf] for held, leaf in self._frozen]
        if any(tensor.requires_grad for tensor in frozen):
            return None
        addresses = tuple(map(self._recorder.address, frozen))
        if addresses != self._addresses:
            self._forget(addresses)
        active = None if self._stack is None else self._stack.active
        slots = [slot for slot in self._slots if active is None or slot.block is None or slot.block in active]
        held: list[Any] = [slot.held[slot.leaf] for slot in slots]
        values = [value.value if isinstance(value, Stacked) else value for value in held]
        learns = torch.is_grad_enabled()
        forms = [(type(each) is Stacked, *_form(value)) for each, value in zip(held, values, strict=True)]
        modes = tuple(module.training for module in self._modules)
        clients = len(counted()) if any(modes) else 0
        whole = isinstance(net, nn.Module)
        key = (whole, *_form(x), learns, active, mixed, modes, clients, *forms)
        if key not in self._recorded and not self._can_record(key, net, x, mixed, slots, held):
            return None
        self.used += 1
        recorded = self._recorded[key]
        own = Open()
        self._open = weakref.ref(own)
        output: Tensor = Replayed.apply(recorded, own, x, *values)
        own.ended = not output.requires_grad
        return output

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the model has no graphs, which have its tensors at fixed places."""
        return compute_part

    @property
    def _waits(self) -> bool:
        """Whether the last pass from a graph can still go backward."""
        last = None if self._open is None else self._open()
        return last is not None and not last.ended

    def _can_record(
        self,
        key: Any,
        net: Callable[[Tensor], Tensor],
        x: Tensor,
        mixed: bool,
        slots: Sequence[NamedTensor],
        held: Sequence[Any],
    ) -> bool:
        """Record a kind of passes, unless it is too new, or it cannot or must not be recorded."""
        if key in self._refused or len(self._recorded) >= MOST:
            return False
        self._seen[key] += 1
        if self._seen[key] <= PLAIN_FIRST:
            return False
        try:
            self._recorded[key] = self._record(net, x, mixed, slots, held)
        except torch.OutOfMemoryError:
            raise
        except Exception as err:  # whatever it is, the pass without a graph gives the result, or the error
            self._refused.add(key)
            log.warning(
                "train.graphs: passes with inputs of shape %s are computed without a graph: %s: %s",
                tuple(x.shape),
                type(err).__name__,
                str(err).partition("\n")[0],
            )
            return False
        self.made += 1
        if len(self._recorded) == MOST:
            log.info("train.graphs: %d kinds of passes are recorded; others get no graph", MOST)
        return True

    def _record(
        self,
        net: Callable[[Tensor], Tensor],
        x: Tensor,
        mixed: bool,
        slots: Sequence[NamedTensor],
        held: Sequence[Any],
    ) -> Recorded:
        fixed = [_fixed_copy(value) for value in held]
        rows = x.detach().clone().requires_grad_(x.requires_grad)
        inputs = [rows, *(value.value if isinstance(value, Stacked) else value for value in fixed)]
        learned = [each for each in inputs if each.requires_grad] if torch.is_grad_enabled() else []
        number = len(counted())
        seeds = torch.zeros(number, dtype=torch.int64, device=x.device)
        counts = torch.zeros(self._layers, number, dtype=torch.int64, device=x.device)
        clients = [CountedDraws(0) for _ in range(number)]

        def forward() -> Tensor:
            with counting(clients, seeds, counts):
                return compute_part(net, rows, mixed)

        def gradients(output: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
            found: Sequence[Tensor | None] = torch.autograd.grad(output, learned, grad, allow_unused=True)
            return found

        def both() -> None:
            output = forward()
            if learned:
                gradients(output, torch.zeros_like(output))

        with bound(slots, fixed), torch.autograd.set_multithreading_enabled(False):
            with same_draws(x.device):
                before = _states(x.device)
                self._recorder.run_unrecorded(both)
                if not all(map(torch.equal, before, _states(x.device))):
                    raise NotRepeatableError("it draws random numbers that are not counted")
            for client in clients:
                client.state = {}
            replay, output = self._recorder.record(forward)
            backward: Callable[[], None] | None = None
            grad: Tensor | None = None
            grads: Iterator[Tensor | None] = iter(())
            if learned:
                incoming = torch.zeros_like(output)
                backward, found = self._recorder.record(lambda: gradients(output, incoming))
                grad, grads = incoming, iter(found)
        drawn = clients[0].state if clients else {}
        own = [next(grads) if any(each is one for one in learned) else None for each in inputs]
        result = output.detach()
        return Recorded(inputs, seeds, counts, drawn, replay, result, backward, grad, own)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Everything that tensors of a graph have in common but their values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _fixed_copy(value: Any) -> Any:
    """A copy of a tensor or of the values of several clients, for which a graph reads it."""
    own = value.value if isinstance(value, Stacked) else value
    copy = own.detach().clone().requires_grad_(own.requires_grad)
    return Stacked(copy) if isinstance(value, Stacked) else copy


def _states(device: torch.device) -> list[Tensor]:
    """States of the random streams of the CPU and of a device."""
    states = (torch.get_rng_state(), random_state(device))
    return [state for state in states if state is not None]


def why_no_graphs(model: Backbone) -> str:
    """Why passes of a model cannot be recorded; empty: they can.

    Args:
        model: The tuned model, with or without values.
    """
    inside = set(model.net.modules())
    trained = [entry for entry in model.tensors().values() if entry.is_trained and entry.module in inside]
    if model.is_own:
        return "a network of your own may do more than start operations"
    if any(entry.is_buffer and entry.leaf != RESIDUAL_LEAF for entry in trained):
        return "trained BatchNorm changes its statistics in each pass"
    if 2 * sum(entry.tensor.numel() for entry in trained) > sum(p.numel() for p in model.parameters()):
        return "most of the network is trained, and would be copied into each graph"
    return ""


def graphs_of(model: Backbone) -> Graphs | None:
    """Graphs of a model on its device; None: the device has none."""
    device = next(model.parameters()).device
    recorder = RECORDERS.get(device.type)
    return None if recorder is None else Graphs(model, recorder(device))


def use_graphs(model: Backbone) -> None:
    """Let the network of a model be computed from graphs where its device has them."""
    model.compute = graphs_of(model) or compute_part


def drop_graphs(model: Backbone) -> None:
    """Compute the network of a model without graphs from now on, which gives their memory back."""
    model.compute = compute_part


def graphs_in(model: Backbone) -> Graphs | None:
    """The graphs that a model uses; None: it uses none."""
    return model.compute if isinstance(model.compute, Graphs) else None


def allowed_graphs(train: TrainConfig, parts: Parts, model: Backbone) -> Literal["auto"] | bool:
    """The value of `train.graphs`, false in place of `auto` where passes cannot be recorded.

    Raises:
        ConfigError: They cannot, and the value is true.
    """
    if not train.graphs:
        return False
    ways = [f"train.{key} runs the network in another way" for key in OTHER_WAYS if getattr(train, key)]
    curved = ["its steps need second derivatives"] if parts.local.needs_curvature else []
    if parts.local.changes_passes:
        ways.append("the method changes what the network computes between passes")
    reason = next(iter((*ways, *curved)), why_no_graphs(model))
    if train.graphs == "auto":
        others = not all(map(_ships_with_rayfed, (parts.local, parts.tuning)))
        return False if reason or others or train.base_bits is not None else "auto"
    if reason:
        raise ConfigError(f"train.graphs: true cannot be used here, because {reason}; leave it out")
    return True


def _ships_with_rayfed(part: object) -> bool:
    """Whether a part of a method is not code of the user, which may do more than start operations."""
    return type(part).__module__.partition(".")[0] in ("algorithms", "rayfed")


OTHER_WAYS = ("checkpointing", "compile")
"""Keys of `train` with which the network is not run as one sequence of operations."""
