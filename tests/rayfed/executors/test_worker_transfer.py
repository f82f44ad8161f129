"""Answers of clients: values that are not finite are found, whoever sent them."""

import math

import pytest
import torch

from rayfed.executors.worker import check_finite
from rayfed.types import Update


def update(**params):
    return Update(client="c", params=params)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_tensor_of_any_client_is_named(kind, value, place):
    answers = [update(a=torch.randn(4), b=torch.randn(3, 5).to(kind)) for _ in range(3)]
    check_finite(answers)
    answers[place].params["b"][2, 1] = value
    with pytest.raises(FloatingPointError, match=r"^b is not finite"):
        check_finite(answers)


def test_clients_may_hold_different_tensors_and_shapes():
    answers = [
        update(a=torch.randn(4)),
        update(a=torch.randn(2, 2), count=torch.tensor([2**40])),
        update(),
        update(empty=torch.zeros(0, 3), scalar=torch.tensor(1.0)),
    ]
    check_finite(answers)
    answers[1].params["a"][1, 1] = math.nan
    with pytest.raises(FloatingPointError, match=r"^a is not finite"):
        check_finite(answers)
