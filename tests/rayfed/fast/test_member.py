"""The model of a client of a group: which tensors its code trains and sends."""

from dataclasses import replace

import numpy as np
import torch

from rayfed.data.examples import ClientData, OnDevice
from rayfed.fast.group import _collected
from rayfed.fast.member import MemberModel, MemberPasses
from rayfed.objective import Classification, OwnObjective, Task
from rayfed.testing import small_setup
from rayfed.tuning.base import copies, sent_tensors, trainable
from rayfed.types import RESIDUAL
from tests.pretended import pretended


def member(*overrides, active=None):
    model = small_setup("algorithm=fedavg", *overrides).context.build()
    names = sent_tensors(model)
    own = {name: torch.nn.Parameter(value.detach().clone()) for name, value in trainable(model).items()}
    own |= {name: value.clone() for name, value in names.items() if name not in own}
    return model, MemberModel(model, own, model.active if active is None else active, lambda request: request)


def test_residuals_are_received_and_not_trained():
    model, client = member("tuning.residual=true")
    assert any(name.endswith(RESIDUAL) for name in sent_tensors(client))
    assert sent_tensors(client).keys() == sent_tensors(model).keys()
    assert sent_tensors(client, buffers=False).keys() == trainable(client).keys() == trainable(model).keys()
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


def test_only_batches_in_random_order_on_a_device_are_joined():
    asked = []

    def ask(request):
        asked.append(request)
        return _collected({0: request})[0]

    pixels, labels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), np.array([1, 4])
    splits = {"a": {"train": np.array([1, 0]), "val": np.array([0])}}
    with pretended() as device:
        examples = OnDevice(pixels, labels, splits, torch.device(device.name))
        alone = ClientData("a", examples, splits["a"], torch.Tensor.float)
        unit = torch.ones((), device=device.name)
        data = MemberPasses(ask, unit).join_batches(alone)
        flipped = replace(data, relabel=lambda y: 9 - y)
        order = torch.tensor([1, 0])
        for joint, count in ((data.batches("train", order, 1), 1), (data.batches("val", None, 1), 1)):
            alike = alone.batches("train", order, 1) if not asked else alone.batches("val", None, 1)
            for (x, y), (other, label) in zip(joint, alike, strict=True):
                assert torch.equal(x.cpu(), other.cpu())
                assert y.tolist() == label.tolist()
            assert len(asked) == count
        assert [y.tolist() for _, y in flipped.batches("train", order, 1)] == [[8], [5]]
        assert [y.tolist() for _, y in flipped.batches("val", torch.tensor([0]), 1)] == [[1]]
        assert [len(y) for _, y in data.batches("train", order[:0], 1)] == [0]  # as alone
        assert len(asked) == 3
    assert MemberPasses(ask).join_batches(alone) is alone  # on the CPU


def test_only_losses_that_are_means_over_examples_are_joined():
    model, _ = member()
    asked = []
    x, y = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)

    def ask(request):
        asked.append(request)
        return torch.zeros(2, 3) if request.targets is None else torch.ones(1)

    own = OwnObjective(Task(loss=lambda output, y: output.mean(), metrics={"a": len}))
    client = MemberModel(model, {}, (0,), ask)
    joint = MemberPasses(ask, torch.ones(()))
    assert joint.loss(client, Classification(), (x, y)) == 1
    assert asked[0].targets is y
    others = ((joint, own, x), (joint, Classification(), x.clone().requires_grad_()))
    for passes, objective, rows in (*others, (MemberPasses(ask), Classification(), x)):
        assert passes.loss(client, objective, (rows, y)) != 1
        assert asked.pop().targets is None
    assert len(asked) == 1
