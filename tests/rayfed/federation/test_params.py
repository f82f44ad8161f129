import re

import pytest
import torch

from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.params import digest, sq_distance, subtract
from rayfed.types import Broadcast, ServerState, Update, block_of, num_bytes
from tests.rounding import near


def update(client, num_examples=1, **params):
    return Update(
        client=client, params={n: torch.tensor(v) for n, v in params.items()}, num_examples=num_examples
    )


def test_mean_is_weighted_per_name_over_holders():
    """a: (1*1 + 3*5) / 4 = 4; b is held by the second client alone; c by nobody."""
    mean = mean_by_name([update("x", a=[1.0, 2.0]), update("y", a=[5.0, 6.0], b=[7.0])], [1, 3])
    assert mean["a"].tolist() == [4.0, 5.0]
    assert mean["b"].tolist() == [7.0]
    assert set(mean) == {"a", "b"}


def test_mean_changes_no_argument_and_a_weight_of_zero_is_no_holder():
    one = update("x", a=[1.0])
    two = update("y", a=[9.0], b=[2.0])
    mean = mean_by_name([one, two], [1, 0])
    assert mean["a"].tolist() == [1.0]
    assert "b" not in mean
    assert one.params["a"].tolist() == [1.0]
    assert two.params["a"].tolist() == [9.0]


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        mean_by_name([update("x", a=[1.0]), update("y", a=[2.0])], weights)


@pytest.mark.parametrize("more", [{}, {"b": [1.0]}])
def test_different_shapes_name_the_client(more):
    text = "client 'y' sent 'a' with shape (2,), but other clients sent (1,)"
    with pytest.raises(ValueError, match=re.escape(text)):
        mean_by_name([update("x", c=[0.0], a=[1.0], **more), update("y", c=[0.0], a=[2.0, 3.0])], [1, 1])


def test_the_bits_of_a_mean_do_not_depend_on_which_other_names_clients_hold():
    random = torch.Generator().manual_seed(0)
    weights = [0.1, 3.0, 0.7, 1.3, 2.2]
    kinds = {"a": torch.float32, "b": torch.float64, "c": torch.bfloat16}
    each = [
        {name: torch.randn(3, 5, generator=random).to(kind) for name, kind in kinds.items()} for _ in weights
    ]
    each[1] = dict(reversed(each[1].items()))
    same = mean_by_name([Update(client="x", params=params) for params in each], weights)
    each[3]["more"] = torch.zeros(1)
    mixed = mean_by_name([Update(client="x", params=params) for params in each], weights)
    assert list(same) == list(kinds)
    for name, value in same.items():
        by_hand = each[0][name] * (weights[0] / sum(weights))
        for params, weight in zip(each[1:], weights[1:], strict=True):
            by_hand.add_(params[name], alpha=weight / sum(weights))
        assert torch.equal(mixed[name], value)
        # By hand each of the five numbers is multiplied and added; the largest is below 3.
        near(value.double(), by_hand.double(), 2 * 5, 3.0, kinds[name])


def test_clients_may_send_nothing():
    assert mean_by_name([update("x"), update("y")], [1, 2]) == {}
    assert mean_by_name([update("x"), update("y")], [0, 0]) == {}


def test_arithmetic():
    a = {"w": torch.tensor([3.0, 4.0])}
    b = {"w": torch.tensor([0.0, 0.0]), "more": torch.tensor(1.0)}
    assert subtract(a, b)["w"].tolist() == [3.0, 4.0]
    assert float(sq_distance(a, b)) == 25.0


def test_digest_depends_on_every_bit_and_not_on_order():
    a = torch.tensor([1.0, 2.0])
    b = torch.tensor([3.0])
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})
    assert digest({"a": a}) != digest({"a": torch.nextafter(a, a + 1)})
    assert digest({"a": a}) != digest({"a": a.double()})
    assert digest({"a": a}) != digest({"b": a})


def test_a_client_downloads_only_what_it_can_hold():
    params = {f"blocks.{i}.w": torch.zeros(10) for i in range(3)} | {"head.weight": torch.zeros(5)}
    state = ServerState(round=0, params=params, shared={"centre": torch.zeros(2)})
    assert state.broadcast().num_bytes() == 4 * (30 + 5 + 2)
    assert state.broadcast(blocks=(0, 2)).num_bytes() == 4 * (20 + 5 + 2)
    assert not Broadcast(round=0, params={}, blocks=(1,)).holds("blocks.11.w")
    assert (block_of("blocks.11.w"), block_of("prompt")) == (11, None)
    assert num_bytes({"a": [torch.zeros(3, dtype=torch.float64), 7, "text"]}) == 24
