"""Steps of the optimizers of a group at once, where all clients have the same settings.

Letters in shapes: K clients.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed.types import Params


@dataclass(frozen=True, eq=False)
class Step:
    """A step that a client asks for.

    Attributes:
        optimizer: Its optimizer.
    """

    optimizer: torch.optim.Optimizer


def ask_for_steps(optimizer: torch.optim.Optimizer, ask: Callable[[Step], Any]) -> None:
    """Let the steps of an optimizer be requests of its client's turn.

    Args:
        optimizer: An optimizer.
        ask: Waits for the answer to a request.
    """

    def step(closure: Any = None) -> Any:
        if closure is None:
            return ask(Step(optimizer))
        return type(optimizer).step(optimizer, closure)

    vars(optimizer)["step"] = step


@dataclass(frozen=True, eq=False)
class JointOptimizer:
    """An optimizer for the stacks, and those of the clients that it stands for."""

    whole: torch.optim.Optimizer
    members: Sequence[torch.optim.Optimizer]

    def is_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether it stands for these."""
        return all(a is b for a, b in zip(self.members, optimizers, strict=True))


@dataclass(frozen=True, eq=False)
class HeldStacks:
    """Values of trained tensors that only some clients hold.

    Attributes:
        values: One stack for each tensor, shape (H, ...).
        clients: Numbers of the H clients of each, ascending.
    """

    values: Sequence[Tensor]
    clients: Sequence[Sequence[int]]


class JointSteps:
    """Takes the steps of all clients of a group: in one, or those of each client alone.

    Values of a joint step are those of single steps, in tensors of shape (K, ...) in place of K tensors. The
    state of a client's optimizer consists of views of the joint state, which can be read at any time.
    """

    def __init__(self, stacks: Mapping[str, Tensor], values: Sequence[Params]) -> None:
        """Remember which tensor of a client is part of which stack.

        Args:
            stacks: Values of all clients by global name, shape (K, ...).
            values: The tensors of each client by global name, which are views of the stacks.
        """
        self._stacks = stacks
        self._names = [{id(own[name]): name for name in stacks} for own in values]
        self._joints: list[JointOptimizer] = []

    def of_all(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        learned: Sequence[str],
        keeps: bool,
        held: HeldStacks | None = None,
    ) -> StepsOfAll | None:
        """Steps of the optimizers of all clients from their first to their last one.

        Args:
            optimizers: Optimizers that have taken no step since they were made. Their hooks, which drop what
                lies beyond the rank of a client, are not called: the caller drops it.
            learned: Names of what they train, of which the gradients are in this order.
            keeps: Whether their state is read afterwards.
            held: In place of the stacks, where clients train different tensors; in the order of `learned`.

        Returns:
            The steps; None: the optimizers differ, or train something else.
        """
        if held is not None:
            return self._of_holders(optimizers, learned, keeps, held)
        kind = self._kind(0, optimizers[0], may_have_hooks=True)
        if kind is None or sorted(kind[1]) != sorted(learned):
            return None
        if not self._are_alike(optimizers, known=False, may_have_hooks=True):
            return None
        places = [kind[1].index(name) for name in learned]
        whole: Any = self._join(optimizers)
        whole._optimizer_step_pre_hooks = OrderedDict()
        (group,) = whole.param_groups
        group["params"] = [group["params"][i] for i in places]
        members = [(each, [each.param_groups[0]["params"][i] for i in places]) for each in optimizers]
        return StepsOfAll(whole, members if keeps else (), len(optimizers))

    def _of_holders(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        learned: Sequence[str],
        keeps: bool,
        held: HeldStacks,
    ) -> StepsOfAll | None:
        """As `of_all`, where clients train different tensors and their optimizers have no state yet."""
        kinds = [self._kind(k, each, may_have_hooks=True) for k, each in enumerate(optimizers)]
        trained = [
            [name for name, clients in zip(learned, held.clients, strict=True) if k in clients]
            for k in range(len(optimizers))
        ]
        for kind, optimizer, own in zip(kinds, optimizers, trained, strict=True):
            if kind is None or optimizer.state or any(kind[2]) or sorted(kind[1]) != sorted(own):
                return None
            if (kind[0], kind[3]) != (kinds[0][0], kinds[0][3]):
                return None
        whole: Any = _bare_copy(optimizers[0])
        whole._optimizer_step_pre_hooks = OrderedDict()
        (group,) = optimizers[0].param_groups
        whole.param_groups = [{**group, "params": list(held.values)}]
        whole.state = defaultdict(dict)
        members = []
        for kind, optimizer in zip(kinds, optimizers, strict=True):
            params = dict(zip(kind[1] if kind else (), optimizer.param_groups[0]["params"], strict=True))
            members.append((optimizer, [params.get(name) for name in learned]))
        return StepsOfAll(whole, members if keeps else (), len(optimizers), held.clients)

    def take(self, requests: Mapping[int, torch.optim.Optimizer]) -> None:
        """Take a step with the optimizers of these clients.

        Args:
            requests: Optimizers by number of the client.
        """
        optimizers = [requests[k] for k in sorted(requests)]
        if len(optimizers) == len(self._names) > 1:
            joint = next((each for each in self._joints if each.is_of(optimizers)), None)
            if self._are_alike(optimizers, joint is not None):
                self._together(optimizers, joint)
                return
        self._part(optimizers)
        _step_each(optimizers)

    def _are_alike(
        self, optimizers: Sequence[torch.optim.Optimizer], known: bool, may_have_hooks: bool = False
    ) -> bool:
        kinds = [self._kind(k, each, may_have_hooks) for k, each in enumerate(optimizers)]
        if kinds[0] is None or any(kind != kinds[0] for kind in kinds):
            return False
        if known:
            return True
        states = [_state_of(each) for each in optimizers]
        return states[0] is not None and all(state == states[0] for state in states)

    def _kind(self, k: int, optimizer: torch.optim.Optimizer, may_have_hooks: bool = False) -> Any:
        """Settings and names of trained tensors, which are equal where optimizers join; None: it is alone."""
        hooks: Any = optimizer
        if len(optimizer.param_groups) != 1:
            return None
        if not may_have_hooks and (hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks):
            return None
        (group,) = optimizer.param_groups
        names = [self._names[k].get(id(p)) for p in group["params"]]
        given = [p.grad is not None for p in group["params"]]
        return None if None in names else (type(optimizer), names, given, _settings(optimizer))

    def _together(self, optimizers: Sequence[torch.optim.Optimizer], joint: JointOptimizer | None) -> None:
        if joint is None:
            self._part(optimizers)
            joint = JointOptimizer(self._join(optimizers), optimizers)
            self._joints.append(joint)
        whole: Any = joint.whole
        whole.param_groups[0].update(_settings(optimizers[0]))
        each = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
        stacks = whole.param_groups[0]["params"]
        given = [i for i, own in enumerate(each[0]) if own.grad is not None]
        for i, grad in zip(given, join_tensors([[own[i].grad for own in each] for i in given]), strict=True):
            stacks[i].grad = grad
        type(whole).step(whole)
        for i in given:
            stacks[i].grad = None
            if whole.state.get(stacks[i]) and not optimizers[0].state.get(each[0][i]):
                for k, optimizer in enumerate(optimizers):
                    optimizer.state[each[k][i]] = _own(whole.state[stacks[i]], stacks[i].shape, k)

    def _join(self, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """One optimizer for the stacks, with the states of all, which are views of its state from now on."""
        (group,) = optimizers[0].param_groups
        whole = _bare_copy(optimizers[0])
        stacks = [self._stacks[self._names[0][id(p)]].detach() for p in group["params"]]
        whole.param_groups = [{**group, "params": stacks}]
        whole.state = defaultdict(dict)
        for i, stack in enumerate(stacks):
            places = [(each, each.param_groups[0]["params"][i]) for each in optimizers]
            states = [each.state.pop(parameter, {}) for each, parameter in places]
            if states[0]:
                whole.state[stack] = {key: _stack_entries([s[key] for s in states]) for key in states[0]}
                for k, (each, parameter) in enumerate(places):
                    each.state[parameter] = _own(whole.state[stack], stack.shape, k)
        return whole

    def _part(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give clients that leave a joint step their own counts, which it shares."""
        for joint in list(self._joints):
            if any(one is each for one in optimizers for each in joint.members):
                self._joints.remove(joint)
                for state in (state for each in joint.members for state in each.state.values()):
                    state.update({key: value.clone() for key, value in state.items() if _is_number(value)})


def _step_each(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take a step with each optimizer, in one call for those that have one kind and the same settings."""
    like: list[tuple[Any, list[Any]]] = []
    for each in optimizers:
        kind = _bare_kind(each)
        alike = (some for other, some in like if kind is not None and other == kind)
        some = next(alike, None)
        if some is None:
            like.append((kind, [each]))
        else:
            some.append(each)
    for _, some in like:
        if len(some) == 1:
            type(some[0]).step(some[0])
        else:
            _step_at_once(some)


def _bare_kind(optimizer: Any) -> Any:
    """Type and settings, which are equal where optimizers take a step at once; None: this one does not."""
    if len(optimizer.param_groups) != 1 or optimizer._optimizer_step_pre_hooks:
        return None
    return None if optimizer._optimizer_step_post_hooks else (type(optimizer), _settings(optimizer))


def _step_at_once(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take a step with the tensors of all optimizers as those of one, which has their states."""
    whole: Any = _bare_copy(optimizers[0])
    each = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    whole.param_groups = [{**optimizers[0].param_groups[0], "params": [p for own in each for p in own]}]
    whole.state = defaultdict(dict)
    for optimizer in optimizers:
        whole.state.update(optimizer.state)
    type(whole).step(whole)
    for optimizer, own in zip(optimizers, each, strict=True):
        optimizer.state.update({p: whole.state[p] for p in own if whole.state.get(p)})


class StepsOfAll:
    """Steps of all clients of a group, of whom those at the end of the list stop first."""

    def __init__(
        self,
        whole: torch.optim.Optimizer,
        members: Sequence[tuple[torch.optim.Optimizer, Sequence[Tensor | None]]],
        clients: int,
        held: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Begin with all clients.

        Args:
            whole: An optimizer for the stacks, with the states of all clients.
            members: The optimizer of each client and its tensors, None for one that it does not hold; empty:
                their states are not read.
            clients: Number K of clients.
            held: The clients that hold each stack, ascending; None: all clients hold all of them.
        """
        stacks = whole.param_groups[0]["params"]
        self._held = [range(clients)] * len(stacks) if held is None else held
        self._whole: Any = whole
        self._members = members
        self._clients = clients

    def take(self, clients: int, grads: Sequence[Tensor | None]) -> None:
        """Take a step of the first clients.

        Args:
            clients: Their number, at most that of the last step.
            grads: Gradients of each stack, for as many of its holders or more; None: it has none.
        """
        if clients < self._clients:
            self._leave(clients)
        stacks = self._whole.param_groups[0]["params"]
        for stack, grad in zip(stacks, grads, strict=True):
            stack.grad = None if grad is None else grad[: len(stack)]
        self._whole.step()

    def end(self) -> None:
        """Give every client the state of its optimizer."""
        self._leave(0)

    def _leave(self, clients: int) -> None:
        """Go on with fewer clients."""
        before, (group,) = self._whole.state, self._whole.param_groups
        for k, (optimizer, own) in enumerate(self._members[clients : self._clients], clients):
            for stack, clients_of, parameter in zip(group["params"], self._held, own, strict=True):
                if parameter is not None and (state := before.get(stack)):
                    found = _own(state, stack.shape, clients_of.index(k)).items()
                    optimizer.state[parameter] = {n: v.clone() if _is_number(v) else v for n, v in found}
        self._clients = clients
        left = [
            stack[: bisect_left(own, clients)] for stack, own in zip(group["params"], self._held, strict=True)
        ]
        states = [(a, b.shape, before.get(b)) for a, b in zip(left, group["params"], strict=True)]
        group["params"] = left
        self._whole.state = defaultdict(dict)
        for first, shape, state in states:
            if state:
                self._whole.state[first] = {
                    key: value[: len(first)] if isinstance(value, Tensor) and value.shape == shape else value
                    for key, value in state.items()
                }


def _bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy that takes its steps itself (`ask_for_steps`), and shares everything else."""
    whole = copy.copy(optimizer)  # which leaves out what is not of the state of an optimizer
    vars(whole).update({n: v for n, v in vars(optimizer).items() if n != "step" and n not in vars(whole)})
    return whole


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def join_tensors(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Tensors of K clients as one, shape (K, ...), for each of several such lists.

    They are views where the tensors lie behind each other in the same memory, as the gradients of a joint
    backward pass do. All others are copied at once.
    """
    found: list[Tensor | None] = [_whole(each) for each in tensors]
    rest = [each for each, whole in zip(tensors, found, strict=True) if whole is None]
    copies = [each[0].new_empty((len(each), *each[0].shape)) for each in rest]
    if rest:
        targets = [one for made in copies for one in made.unbind(0)]
        torch._foreach_copy_(targets, [one for each in rest for one in each])
    further = iter(copies)
    return [next(further) if whole is None else whole for whole in found]


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie behind each other in memory as one view; None: they do not."""
    first = tensors[0]
    size = first.numel()
    place, step = first.data_ptr(), size * first.element_size()
    if not place or any(each.data_ptr() != place + k * step for k, each in enumerate(tensors)):
        return None  # tensors of a class that wraps others have no memory, and the address 0
    end = (first.storage_offset() + len(tensors) * size) * first.element_size()
    if end > first.untyped_storage().nbytes() or not all(each.is_contiguous() for each in tensors):
        return None
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()), first.storage_offset())


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _own(state: Mapping[str, Any], shape: torch.Size, k: int) -> dict[str, Any]:
    """The part of client k in the state of a stack of this shape."""
    return {
        key: value[k] if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in state.items()
    }


def _stack_entries(values: Sequence[Any]) -> Any:
    """Entries of the states of clients as one; numbers are equal."""
    if not isinstance(values[0], Tensor):
        return values[0]
    return values[0].clone() if _is_number(values[0]) else torch.stack(list(values))


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Names and counts of a state, equal where optimizers join; None: to read them would be to wait."""
    found = []
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state.get(parameter, {})
        counts = {key: value for key, value in state.items() if _is_number(value)}
        if any(value.device.type != "cpu" for value in counts.values()):
            return None
        numbers = {key: float(value) for key, value in counts.items()}
        kept = sorted(key for key, value in state.items() if value is None)
        found.append((sorted(state), kept, numbers))
    return found
