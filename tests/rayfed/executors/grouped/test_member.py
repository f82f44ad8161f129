"""The model of a client of a group: which tensors its code trains and sends."""

import torch

from rayfed.executors.grouped.member import MemberModel
from rayfed.testing import small_setup
from rayfed.tuning.base import copies, held, trainable
from rayfed.types import RESIDUAL


def member(*overrides, active=None):
    model = small_setup("algorithm=fedavg", *overrides).world.build()
    names = held(model)
    own = {name: torch.nn.Parameter(value.detach().clone()) for name, value in trainable(model).items()}
    own |= {name: value.clone() for name, value in names.items() if name not in own}
    return model, MemberModel(model, own, model.active if active is None else active, lambda request: request)


def test_residuals_are_received_and_not_trained():
    model, client = member("tuning.residual=true")
    assert any(name.endswith(RESIDUAL) for name in held(client))
    assert held(client).keys() == held(model).keys()
    assert held(client, buffers=False).keys() == trainable(client).keys() == trainable(model).keys()
    assert not any(name.endswith(RESIDUAL) for name in trainable(client))


def test_a_tensor_that_the_client_freezes_is_not_trained_any_more():
    _, client = member()
    first = next(iter(client.own))
    assert first in copies(client)
    client.own[first].requires_grad_(False)
    assert first not in copies(client)
    assert len(copies(client)) == len(client.own) - 1


def test_a_client_with_few_blocks_trains_those():
    model, client = member(active=(0,))
    assert {name.split(".")[1] for name in trainable(client) if name.startswith("blocks.")} == {"0"}
    model.active = (0,)
    assert trainable(client).keys() == trainable(model).keys()


def test_the_table_of_tensors_has_the_clients_own_values():
    model, client = member()
    table = client.tensors()
    assert table.keys() == model.tensors().keys()
    for name, value in client.own.items():
        assert table[name].tensor is value
        assert model.tensors()[name].tensor is not value
