import pytest
import torch
from torch import nn

from algorithms._blocks import dynamic_step
from algorithms.feddyn import DynamicRegularization, DynamicServer
from algorithms.inclusivefl import InclusiveServer
from rayfed import simulate
from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.method import check_compatible
from rayfed.tuning.lora import Lora
from rayfed.types import Broadcast, ServerState, Update
from tests.algorithms.depth import block, cohort, numbers, scalars, update

TARGETS = torch.tensor([[2, 0, -1], [1, 1, 1], [0, 1, 1], [-1, -1, 0.5]], dtype=torch.float64)


class Quadratic(nn.Module):
    """A model whose loss is half the squared distance to a target; two plain SGD steps of 0.1."""

    def __init__(self, x, target, store):
        super().__init__()
        self.x, self.target, self.store = nn.Parameter(x.clone()), target, store

    def trainable(self):
        return {"x": self.x}

    def batches(self):
        return [None, None]

    def optimizer(self):
        return torch.optim.SGD([self.x], lr=0.1)

    def clip_gradients(self):
        pass

    def update(self):
        return Update(client="", params={"x": self.x.detach().clone()}, num_examples=1)


def train(monkeypatch, i, params, stores):
    monkeypatch.setattr(Local, "loss", lambda self, c, sent, batch: (c.x - c.target).pow(2).sum() / 2)
    client = Quadratic(params["x"], TARGETS[i], stores[i])
    sent = Broadcast(round=0, params=params, shared={"feddyn_alpha": 0.1})
    return DynamicRegularization().train(client, sent)


def close(value, expected):
    assert value.flatten().tolist() == pytest.approx(expected, abs=2e-6)


def test_two_rounds_by_hand(monkeypatch):
    state = ServerState(round=0, params={"x": torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)})
    stores = [{}, {}, {}, {}]
    server = DynamicServer()
    world = cohort(dict.fromkeys("0123", 1), depth=1)
    expected = [
        (
            (0, 2),
            [[1.189000, -0.405500, 0.013750], [0.811000, -0.216500, 0.391750]],
            {0: [0.189000, 0.094500, -0.236250], 2: [-0.189000, 0.283500, 0.141750]},
            [0.000000, -0.009450, 0.002362],
            [1.000000, -0.216500, 0.179125],
        ),
        (
            (0, 1),
            [[1.185428, -0.177368, -0.039264], [1.000000, 0.013419, 0.334270]],
            {
                0: [0.374428, 0.133632, -0.454640],
                1: [0.000000, 0.229918, 0.155145],
                2: [-0.189000, 0.283500, 0.141750],
            },
            [-0.004636, -0.016176, 0.003944],
            [1.139071, 0.079788, 0.108067],
        ),
    ]
    for who, theta, dual, h, after in expected:
        updates = [train(monkeypatch, i, state.params, stores) for i in who]
        for update_, value in zip(updates, theta, strict=True):
            close(update_.params["x"], value)
        for i, value in dual.items():
            close(stores[i]["g"]["x"] / -0.1, value)
        state = server.aggregate(state, world, updates)
        close(state.memory["h"]["x"], h)
        close(state.params["x"], after)
    assert stores[3] == {}


def test_the_server_step_per_block():
    start, h = scalars(dict(enumerate([0.1, 0.2, 0.3, 0.4]))), scalars({0: 0.02, 1: -0.01, 2: 0.03, 3: 0.0})
    updates = [update("a", {0: 1, 1: 3}), update("b", {0: 5, 3: 7}), update("c", {1: -1, 3: 2})]
    mean = {**start, **scalars({0: 3.0, 1: 1.0, 3: 4.5})}
    params, after = dynamic_step(start, mean, updates, h, alpha=0.1, num_clients=5)
    assert numbers(after, 4) == pytest.approx([-0.096, -0.042, 0.030, -0.164], abs=2e-6)
    assert numbers(params, 4) == pytest.approx([3.96, 1.42, 0.3, 6.14], abs=2e-6)
    assert params[block(2)] is start[block(2)]


def test_running_statistics_are_not_corrected():
    start = {"norm.running_var": torch.ones(1)}
    moved = [Update(client="a", params={"norm.running_var": torch.zeros(1)}, num_examples=1)]
    params, h = dynamic_step(start, {"norm.running_var": torch.zeros(1)}, moved, {}, 0.1, 2)
    assert params["norm.running_var"].item() == 0
    assert h == {}


def test_halves_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match="DynamicRegularization needs feddyn_alpha"):
        check_compatible(InclusiveServer(), DynamicRegularization(), Lora())
    with pytest.raises(ConfigError, match="DynamicServer needs feddyn_update"):
        check_compatible(DynamicServer(), Local(), Lora())
    check_compatible(InclusiveServer(feddyn_alpha=0.1), DynamicRegularization(), Lora())
    with pytest.raises(ConfigError, match="factor_mean"):
        DynamicServer(lora_agg="product_svd")


@pytest.mark.parametrize(
    "overrides",
    [["algorithm=feddyn"], ["algorithm=fedra_feddyn"], ["algorithm=inclusivefl", "server.feddyn_alpha=0.1"]],
)
def test_a_run(tmp_path, overrides):
    common = ["cluster=inline", "rounds=2", "data.limit=40", "capacity=[12,10,8,6,3]", "evaluation.every=2"]
    result = simulate(
        [*common, *overrides, "local.name=feddyn", "model.pretrained=false", f"output={tmp_path}/r"]
    )
    assert result.metrics["round"] == 2
    assert all(torch.isfinite(v).all() for v in result.params.values())
