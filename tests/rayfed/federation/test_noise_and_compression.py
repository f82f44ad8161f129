"""The channel: clipping and noise by hand, error feedback, and orders of stages that are refused."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.executors.worker import check_finite
from rayfed.federation.noise_and_compression import CODED, Channel, ChannelStage
from rayfed.federation.noise_and_compression import leave as leave_client
from rayfed.types import Broadcast, Update, num_bytes

START = {"w": torch.zeros(2), "b": torch.ones(1), "norm.running_var": torch.tensor([1.0])}
TRAINED = {"w": torch.tensor([2.0, 4.0]), "b": torch.tensor([5.0]), "norm.running_var": torch.tensor([9.0])}


def client():
    seen = {}
    rng = torch.Generator().manual_seed(3)
    return SimpleNamespace(
        store={}, rng=rng, measured=seen, to_device=lambda v: v, measure=lambda **kw: seen.update(kw)
    )


def sent(round=0):
    return Broadcast(round=round, params=START)


def leave(channel, client, sent, update):
    params, extra = leave_client(channel, client, sent, update.params, update.extra)
    return replace(update, params=params, extra=extra)


def update(cid="a", **params):
    return Update(client=cid, params=params or TRAINED)


def test_clipping_scales_the_change_of_all_trained_values_together():
    """The change is (2, 4, 4), of norm 6: clipped to 3 it is halved; statistics stay."""
    one = client()
    out = leave(Channel(clip=3.0), one, sent(), update())
    assert out.params["w"].tolist() == [1.0, 2.0]
    assert out.params["b"].tolist() == [3.0]
    assert out.params["norm.running_var"].tolist() == [9.0]
    assert one.measured == {"change_norm": 6.0}


def test_a_small_change_keeps_its_bits():
    values = {name: value / 3 for name, value in TRAINED.items()}
    out = leave(Channel(clip=100.0), client(), sent(), update(**values))
    assert all(torch.equal(out.params[name], value) for name, value in values.items())


def test_what_top_k_does_not_send_is_sent_later():
    channel = Channel(codes=("top_k",), top_k=0.5)
    one = client()
    first = leave(channel, one, sent(), update(w=torch.tensor([2.0, 4.0])))
    assert channel.receive(sent(), first).params["w"].tolist() == [0.0, 4.0]
    assert num_bytes(first.extra) == 8
    second = leave(channel, one, sent(), update(w=torch.tensor([1.5, 3.0])))  # 1.5 + 2.0 is more than 3.0
    arrived = channel.receive(sent(), second)
    assert arrived.params["w"].tolist() == [3.5, 0.0]
    assert CODED not in arrived.extra


def test_noise_of_the_mean_has_the_variance_of_the_algorithm():
    """m = 8 are expected and n = 4 answer: the change of the mean is half, its noise has 0.5 x 2 / 8."""
    channel = Channel(clip=2.0, noise=0.5, expected=8.0, seed=1)
    size = 20_000
    message = Broadcast(round=4, params={"w": torch.ones(size)})
    answers = {str(i): update(str(i), w=torch.full((size,), 3.0)) for i in range(4)}
    out = channel.with_noise(dict.fromkeys(answers, message), answers)
    mean = torch.stack([one.params["w"] for one in out.values()]).mean(0)
    assert mean.mean().item() == pytest.approx(1 + 2 / 2, abs=0.005)
    assert mean.std().item() == pytest.approx(0.125, rel=0.03)
    again = channel.with_noise(dict.fromkeys(answers, message), answers)
    assert torch.equal(again["0"].params["w"], out["0"].params["w"])
    later = channel.noise_alone(5, {"w": torch.zeros(size)})["w"]
    assert later.std().item() == pytest.approx(0.125, rel=0.03)
    assert torch.equal(channel.noise_alone(5, {"w": torch.zeros(size)})["w"], later)
    assert (later - (mean - 2)).abs().max() > 0.1  # another round has other noise


def test_noise_at_the_client_is_that_of_one_answer():
    channel = Channel(clip=2.0, noise=0.5, at_client=True, expected=8.0)
    size = 20_000
    out = leave(
        channel, client(), Broadcast(round=0, params={"w": torch.zeros(size)}), update(w=torch.zeros(size))
    )
    assert out.params["w"].std().item() == pytest.approx(1.0, rel=0.03)
    assert channel.noise_alone(0, out.params) is out.params


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at_client", [False, True])
def test_an_answer_that_is_not_finite_counts_as_no_change(value, at_client):
    """Nothing else bounds its norm: the mean would tell with certainty that the client took part."""
    one = client()
    channel = Channel(clip=3.0, noise=float(at_client), at_client=at_client)
    out = leave(channel, one, sent(), update(w=torch.tensor([1.0, value]), new=torch.tensor([value])))
    check_finite([out])
    assert not math.isfinite(one.measured["change_norm"])
    if not at_client:
        assert {name: v.tolist() for name, v in out.params.items()} == {"w": [0.0, 0.0], "new": [0.0]}


def test_a_tensor_that_an_answer_leaves_out_gets_its_noise_too():
    channel = Channel(clip=2.0, noise=0.5, expected=1.0, seed=1)
    message = Broadcast(round=4, params={"w": torch.zeros(2), "b": torch.ones(3)})
    [out] = channel.with_noise({"a": message}, {"a": update(w=torch.zeros(2))}).values()
    alone = channel.noise_alone(4, message.params)
    assert all(torch.equal(out.params[name], alone[name]) for name in message.params)


@pytest.mark.parametrize("at_client", [False, True])
def test_with_noise_a_client_sends_nothing_besides_what_it_trained(at_client):
    answer = replace(update(), extra={"gradient": torch.ones(2)})
    with pytest.raises(ConfigError, match="the answer also has gradient"):
        leave(Channel(clip=3.0, noise=1.0, at_client=at_client), client(), sent(), answer)
    assert leave(Channel(clip=3.0), client(), sent(), answer).extra is answer.extra


@pytest.mark.parametrize("codes", [(), ("fp16",), ("int8",), ("top_k", "int8")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_compressed_answer_that_is_not_finite_is_found(codes, value):
    out = leave(Channel(codes=codes), client(), sent(), update(w=torch.tensor([1.0, value])))
    with pytest.raises(FloatingPointError, match="w is not finite"):
        check_finite([out])
    check_finite([leave(Channel(codes=codes), client(), sent(), update())])


def test_a_change_that_is_too_large_for_16_bits_is_found():
    out = leave(Channel(codes=("fp16",)), client(), sent(), update(w=torch.tensor([1.0, 70_000.0])))
    with pytest.raises(FloatingPointError, match="w is not finite"):
        check_finite([out])


CLIP = ChannelStage(clip=1.0)
NOISE = ChannelStage(noise=1.0)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((NOISE,), "clip must come directly before"),
        (("fp16", CLIP), "list clip first"),
        ((CLIP, "fp16", NOISE), "clip must come directly before"),
        (("int8", "fp16"), "leave fp16 out"),
        (("fp16", "fp16"), "listed twice"),
        ((ChannelStage(),), "empty stage"),
        ((ChannelStage(clip=1.0, noise=1.0),), "one stage for each"),
    ],
)
def test_an_order_without_meaning_is_refused(stages, message):
    with pytest.raises(ConfigError, match=message):
        Channel.of(stages)


def test_stages_of_a_config():
    channel = Channel.of(
        (ChannelStage(clip="inf"), ChannelStage(noise=0.0), "fp16", "int8", ChannelStage(top_k=0.1))
    )
    assert (channel.clip, channel.noise, channel.top_k) == (math.inf, 0.0, 0.1)
    assert channel.codes == ("fp16", "int8", "top_k")
