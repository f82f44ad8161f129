"""The channel of a client's trained values to the server: clipping, noise and compression, before the sum.

Each stage takes what the stage before it made. `clip` and `noise` change the values; `top_k`, `fp16` and
`int8` send the change of the values since the broadcast in fewer bytes, and the server adds what arrives to
the values that it sent. Running statistics of BatchNorm and what a method sends in `extra` pass unchanged;
tensors that the server did not send are not compressed.

Tensors in fewer bytes: 16-bit floats, 8-bit integers, and only the entries of largest absolute value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from annotated_types import Gt, Le
from torch import Tensor

from rayfed.errors import ConfigError
from rayfed.federation.client import Client
from rayfed.federation.executor import Content, Leave
from rayfed.seeds import derive
from rayfed.types import (
    Broadcast,
    NonNegative,
    Params,
    Positive,
    Update,
    is_statistic,
    up_to_rank,
)

Code: TypeAlias = Literal["top_k", "fp16", "int8"]

INT8_STEPS = 127


def compress(change: Tensor, codes: Sequence[Code], top_k: float = 1.0) -> dict[str, Tensor]:
    """A tensor in fewer bytes.

    Args:
        change: float32, any shape.
        codes: What is done, in order. `fp16`: 16-bit floats. `int8`: whole multiples, from -127 to 127, of
            the largest absolute value / 127. `top_k`: only the entries with the largest absolute values, with
            their positions (int32).
        top_k: Share of the entries that are sent, at least one.

    Returns:
        `values` in the order of the flat tensor, and `index` and `scale` where there are such.
    """
    coded = {"values": change.reshape(-1)}
    for code in codes:
        values = coded["values"]
        if code == "fp16":
            coded["values"] = values.half()
        elif code == "int8":
            scale = values.float().abs().max() / INT8_STEPS
            coded["scale"] = scale
            coded["values"] = torch.round(values.float() / torch.where(scale > 0, scale, 1)).to(torch.int8)
        else:
            count = max(1, math.ceil(top_k * values.numel()))
            index = torch.topk(values.float().abs(), count, sorted=False).indices.sort().values
            coded["index"] = index.to(torch.int32)
            coded["values"] = values[index]
    return coded


def expand(coded: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """The tensor of this shape that `compress` made smaller, float32, with zeros where nothing was sent."""
    values = coded["values"].float()
    if "scale" in coded:
        values = values * coded["scale"]
    if "index" not in coded:
        return values.reshape(shape)
    flat = torch.zeros(math.prod(shape), device=values.device)
    flat[coded["index"].long()] = values
    return flat.reshape(shape)


CODED = "_coded"  # reserved name in the `extra` of an update: what the compressing stages made
RESIDUE = "_residue"  # reserved name in a client's store: what top_k has not sent yet


Kind: TypeAlias = Literal["clip", "noise", "top_k"]
KINDS: tuple[Kind, ...] = ("clip", "noise", "top_k")


@dataclass(frozen=True, kw_only=True)
class ChannelStage:
    """A stage of the channel that has a strength; exactly one is set.

    Attributes:
        clip: Largest L2 norm of the change of all trained values; `inf`: it is not limited.
        noise: Standard deviation of Gaussian noise, as a multiple of `clip`.
        top_k: Share of the entries of each tensor that are sent, those with the largest absolute change; what
            is not sent is added to the change of the next visit (error feedback; Stich et al., Sparsified SGD
            with Memory, NeurIPS 2018 [stich2018memory], Algorithm 1).
    """

    clip: Positive | Literal["inf"] | None = None
    noise: NonNegative | None = None
    top_k: Annotated[float, Gt(0), Le(1)] | None = None

    @property
    def kind(self) -> Kind:
        """The name of what is set.

        Raises:
            ConfigError: Nothing is set, or more than one.
        """
        names = [name for name in KINDS if getattr(self, name) is not None]
        if len(names) != 1:
            raise ConfigError(
                f"channel: {' and '.join(names) or 'an empty stage'} in one stage; write one stage for each, "
                f"as in channel='[{{clip: 1.0}}, {{noise: 1.0}}, fp16]'"
            )
        return names[0]


ChannelConfig: TypeAlias = tuple[Literal["fp16", "int8"] | ChannelStage, ...]
"""The config value `channel`: the stages in the order in which they are applied."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Changes of a client's answer between its training and the sum on the server.

    Attributes:
        clip: Largest L2 norm of the change of a client's trained values.
        noise: Standard deviation of the noise, as a multiple of `clip`; 0: no noise.
        at_client: Whether each client adds noise to its own answer; otherwise the server adds it to the mean.
        codes: Compressing stages, in order.
        top_k: Share of the entries that `top_k` sends.
        expected: Expected number of clients in a round, by which the noisy sum is divided.
        seed: Seed of the experiment, from which the server draws the noise of each round.
    """

    clip: float = math.inf
    noise: float = 0.0
    at_client: bool = False
    codes: tuple[Code, ...] = ()
    top_k: float = 1.0
    expected: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, stages: ChannelConfig, **others: Any) -> Channel:
        """The channel of a config.

        Args:
            stages: The config value `channel`.
            others: Further fields.

        Raises:
            ConfigError: A stage is listed twice, has no effect, or is in a place where it cannot be applied.
        """
        names = [stage if isinstance(stage, str) else stage.kind for stage in stages]
        given = {s.kind: getattr(s, s.kind) for s in stages if not isinstance(s, str)}
        _check_order(names)
        return cls(
            clip=float(given.get("clip", math.inf)),
            noise=given.get("noise", 0.0),
            codes=tuple(cast(Code, name) for name in names if name not in ("clip", "noise")),
            top_k=given.get("top_k", 1.0),
            **others,
        )

    @property
    def changes(self) -> bool:
        """Whether an answer is changed at all at the client."""
        return bool(self.codes) or self.clip < math.inf

    @property
    def noisy_mean(self) -> bool:
        """Whether the server adds noise to the mean."""
        return self.noise > 0 and not self.at_client

    @property
    def leaves(self) -> tuple[Leave, ...]:
        """The client's side of the channel, as of `Call`."""
        return (partial(leave, self),) if self.changes else ()

    def receive(self, sent: Broadcast, update: Update) -> Update:
        """The answer as the server uses it: with the values of a compressed change added to those it sent.

        Args:
            sent: The message to the client.
            update: Its answer as it arrived.
        """
        if CODED not in update.extra:
            return update
        extra = dict(update.extra)
        params = dict(update.params)
        for name, coded in extra.pop(CODED).items():
            value = sent.params[name].clone()
            held = up_to_rank(name, value, sent.rank)
            params[name] = value
            held += expand(coded, held.shape)
        return replace(update, params=params, extra=extra)

    def with_noise(self, sent: Mapping[str, Broadcast], answers: dict[str, Update]) -> dict[str, Update]:
        """Answers whose uniform mean is the noisy mean of DP-FedAvg.

        With the sum S of the n changes and m expected clients, that mean is S / m plus Gaussian noise of
        standard deviation noise x clip / m in each entry (McMahan et al., Learning Differentially Private
        Recurrent Language Models, ICLR 2018 [mcmahan2018dp], Algorithm 1, the estimator with a fixed
        denominator). A tensor that was sent and that an answer leaves out counts as unchanged, so that every
        tensor gets noise in every round, as in a round in which no client answers (`noise_alone`).

        Args:
            sent: The message to each client, by id.
            answers: Their answers, by id; not empty.
        """
        if not self.noisy_mean:
            return answers
        factor = len(answers) / self.expected
        held = {cid: sent[cid].params for cid in answers}
        first = next(iter(answers))
        noise = self._draw(sent[first].round, held[first])
        return {
            cid: replace(update, params=_move(held[cid] | update.params, held[cid], factor, noise))
            for cid, update in answers.items()
        }

    def noise_alone(self, round: int, params: Params) -> Params:
        """The mean of a round in which no client answered: the parameters before it with the noise.

        Args:
            round: Round index, from 0.
            params: Parameters before the round.
        """
        return (
            {**params, **_move(params, params, 1.0, self._draw(round, params))} if self.noisy_mean else params
        )

    def _draw(self, round: int, like: Params) -> Params:
        """Noise of the mean for every trained tensor, drawn from the seed and the round."""
        rng = torch.Generator().manual_seed(derive(self.seed, "channel noise", round))
        scale = self.noise * self.clip / self.expected
        trained = sorted(name for name in like if not is_statistic(name))
        return {name: torch.randn(like[name].shape, generator=rng) * scale for name in trained}


OPEN = Channel()
"""The channel that changes nothing."""


def _check_order(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"channel: {name} is listed twice; list each stage once")
    if "noise" in names and names[: names.index("noise")] != ["clip"]:
        raise ConfigError(
            "channel: noise is a multiple of the largest norm of an answer, so that clip must come directly "
            "before it, as in channel='[{clip: 1.0}, {noise: 1.0}]'"
        )
    if "clip" in names and names[0] != "clip":
        raise ConfigError(f"channel: clip after {names[0]} would change compressed values; list clip first")
    if "int8" in names and "fp16" in names[names.index("int8") :]:
        raise ConfigError("channel: fp16 after int8 would need more bytes, not less; leave fp16 out")


@torch.no_grad()
def leave(
    channel: Channel, client: Client, sent: Broadcast, params: Params, extra: Mapping[str, Any]
) -> Content:
    """The answer as it leaves the client; measures the norm of its change before clipping.

    With `clip`, an answer that holds NaN or infinity counts as no change: nothing bounds its norm otherwise.
    Its norm is measured as it is, so that the round records it as not finite.

    Args:
        client: The client, whose store keeps what `top_k` does not send.
        sent: The message that the client received.
        params: Values that its task answered with.
        extra: What the task added to them.

    Raises:
        ConfigError: The channel adds noise, and the task added something, which noise does not protect.
    """
    start = sent.params
    if channel.noise and extra:
        raise ConfigError(
            f"channel: noise protects the trained values only, and the answer also has {', '.join(extra)}; "
            f"leave noise out"
        )
    if channel.clip < math.inf:
        size = change_norm(params, start)
        client.measure(change_norm=size)
        if not math.isfinite(size):
            params = _without_change(params, start)
        elif size > channel.clip:
            params = _move(params, start, channel.clip / size, {})
        if channel.noise and channel.at_client:
            scale = channel.noise * channel.clip
            trained = sorted(name for name in params if not is_statistic(name))
            noise = {
                n: client.to_device(torch.randn(params[n].shape, generator=client.rng) * scale)
                for n in trained
            }
            params = _move(params, start, 1.0, noise)
    return _compress(channel, client, sent, params, extra) if channel.codes else (params, extra)


def change_norm(params: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """L2 norm of the change of all trained values together; a value that was not sent counts from 0."""
    changes = [_change(v, n, start) for n, v in params.items() if not is_statistic(n)]
    total = sum(((change.double() ** 2).sum() for change in changes), torch.zeros((), dtype=torch.float64))
    return math.sqrt(float(total))


def _change(value: Tensor, name: str, start: Mapping[str, Tensor]) -> Tensor:
    return value - start[name] if name in start else value


def _without_change(params: Params, start: Mapping[str, Tensor]) -> Params:
    """Values as they were sent, and zero where none was sent; statistics are kept."""
    return {
        name: value if is_statistic(name) else start.get(name, torch.zeros_like(value)).clone()
        for name, value in params.items()
    }


def _move(
    params: Mapping[str, Tensor], start: Mapping[str, Tensor], factor: float, noise: Mapping[str, Tensor]
) -> Params:
    """Values whose change is multiplied by a factor, plus noise; with factor 1 the values keep their bits."""
    moved = dict(params)
    for name, value in params.items():
        if is_statistic(name):
            continue
        if factor != 1:
            change = _change(value, name, start) * factor
            moved[name] = start[name] + change if name in start else change
        if name in noise:
            moved[name] = moved[name] + noise[name]
    return moved


def _compress(
    channel: Channel, client: Client, sent: Broadcast, params: Params, extra: Mapping[str, Any]
) -> Content:
    start = sent.params
    kept = client.store.get(RESIDUE, {})
    residue = dict(kept)
    coded: dict[str, dict[str, Tensor]] = {}
    rest = dict(params)
    for name in params:
        if is_statistic(name) or name not in start:
            continue
        change = up_to_rank(name, rest.pop(name) - start[name], sent.rank).contiguous()
        if "top_k" in channel.codes and name in kept:
            change = change + kept[name]
        coded[name] = compress(change, channel.codes, channel.top_k)
        if "top_k" in channel.codes:
            residue[name] = change - expand(coded[name], change.shape)
    if residue:
        client.store[RESIDUE] = residue
    return rest, {**extra, CODED: coded}
