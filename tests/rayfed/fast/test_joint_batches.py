"""Batches of several clients on a device are those of each client."""

import numpy as np
import torch

from rayfed.data.examples import OnDevice
from rayfed.fast.joint_batches import JointBatches
from tests.pretended import pretended
from tests.rayfed.data.test_examples import IMAGES, LABELS, ORDER, SPLITS


def test_batches_of_several_clients_are_collected_at_once():
    orders = {"a": ORDER, "b": torch.tensor([1, 0])}
    with pretended() as device:
        examples = OnDevice(
            IMAGES, LABELS, SPLITS | {"b": {"train": np.array([3, 4])}}, torch.device(device.name)
        )
        each = {name: examples.positions(name, "train", order).split(2) for name, order in orders.items()}
        device.counts.clear()
        joint = JointBatches(examples, lambda images: images.float(), dict(enumerate(each.values())), {})
        asked = [(0, 0), (1, 0), (0, 1), (0, 2), (0, 1)]  # the last one after all others were dropped
        found = [joint.batch(*which) for which in asked]
        assert (device.counts.down, device.counts.waits) == (1, 0)
        assert device.counts.kernels == 3 * 4  # pixels, labels and float32, for four of the five
        for (client, number), (x, y, _) in zip(asked, found, strict=True):
            name = "ab"[client]
            alone = list(examples.batches(name, "train", orders[name], 2))[number]
            assert torch.equal(x.cpu(), alone[0].float().cpu())
            assert torch.equal(y.cpu(), alone[1].cpu())
