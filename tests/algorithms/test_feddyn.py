import pytest
import torch
from torch import nn

import rayfed
from algorithms._blocks import dynamic_step
from algorithms.feddyn import DynamicRegularization, DynamicServer
from algorithms.inclusivefl import InclusiveServer
from rayfed import simulate
from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.method_registry import check_compatible
from rayfed.federation.passes import PLAIN
from rayfed.tuning.lora import Lora
from rayfed.types import Broadcast, ServerState, Update
from tests.algorithms.depth import block, cohort, numbers, scalars, update
from tests.conftest import SMALL, quickly
from tests.rayfed.experiment.test_experiment import clients
from tests.rounding import near
from tests.vectors import vector

V4 = vector("fedra", "V4")
ALPHA = V4.inputs["alpha"]
TARGETS = torch.tensor(V4.inputs["targets"], dtype=torch.float64)


class Quadratic(nn.Module):
    """A model whose loss is half the squared distance to a target; a few plain SGD steps."""

    passes = PLAIN

    def __init__(self, x, target, store):
        super().__init__()
        self.x = nn.Parameter(x.clone())
        self.target = target
        self.store = store

    def trainable(self):
        return {"x": self.x}

    def batches(self):
        return [None] * V4.inputs["steps"]

    def optimizer(self):
        return torch.optim.SGD([self.x], lr=V4.inputs["rate"])

    def backward(self, loss, batch):
        loss(batch).backward()

    def clip_gradients(self):
        pass

    def update(self):
        return Update(client="", params={"x": self.x.detach().clone()}, num_examples=1)


def train(monkeypatch, i, params, stores):
    monkeypatch.setattr(Local, "loss", lambda self, c, sent, batch: (c.x - c.target).pow(2).sum() / 2)
    client = Quadratic(params["x"], TARGETS[i], stores[i])
    sent = Broadcast(round=0, params=params, shared={"feddyn_alpha": ALPHA})
    return DynamicRegularization().train(client, sent)


def test_v4_two_rounds_by_hand(monkeypatch):
    state = ServerState(round=0, params={"x": torch.tensor(V4.inputs["start"], dtype=torch.float64)})
    stores = [{}, {}, {}, {}]
    server = DynamicServer(feddyn_alpha=ALPHA)
    context = cohort(dict.fromkeys("0123", 1), depth=1)
    for who, name in zip(V4.inputs["participants"], ("round1", "round2"), strict=True):
        expected = V4.expected[name]
        updates = [train(monkeypatch, i, state.params, stores) for i in who]
        for i, answer in zip(who, updates, strict=True):
            V4.matches(answer.params["x"], expected[f"theta_{i}"])
        V4.matches(torch.stack([answer.params["x"] for answer in updates]).mean(0), expected["mean"])
        for store, dual in zip(stores, expected["lambda"], strict=True):
            V4.matches(store["g"]["x"] / -ALPHA if store else torch.zeros(3), dual)
        state = server.aggregate(state, context, updates)
        V4.matches(state.memory["h"]["x"], expected["h"])
        V4.matches(state.params["x"], expected["server"])
    assert stores[3] == {}


def test_v4_the_server_step_per_block():
    given = V4.inputs["masked"]
    expected = V4.expected["masked"]
    start = scalars(dict(enumerate(given["round_start"])))
    held = [{j: v for j, v in enumerate(row) if v is not None} for row in given["client_values"]]
    updates = [update(cid, values) for cid, values in zip("abc", held, strict=True)]
    by_block = {j: [values[j] for values in held if j in values] for j in range(4)}
    mean = {**start, **scalars({j: sum(v) / len(v) for j, v in by_block.items() if v})}
    h = scalars(dict(enumerate(given["h_before"])))
    clients = V4.inputs["masked_clients"]
    params, after = dynamic_step(start, mean, updates, h, alpha=ALPHA, num_clients=clients)
    V4.matches(numbers(after, 4), expected["h_after"])
    V4.matches(numbers(params, 4), expected["r_after"])
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
    quickly(
        ["algorithm=feddyn", "algorithm=fedra_feddyn", "algorithm=inclusivefl server.feddyn_alpha=0.1"],
        ["algorithm=fedra_feddyn"],
    ),
)
def test_a_run(tmp_path, overrides):
    common = ["cluster=inline", "rounds=2", "data.limit=40", "capacity=[12,10,8,6,3]", "evaluation.every=2"]
    common += ["model.pretrained=false", "figures=false", f"output={tmp_path}/r"]
    result = simulate([*common, *overrides.split(), "local.name=feddyn"])
    assert result.metrics["round"] == 2
    assert all(torch.isfinite(v).all() for v in result.params.values())


def test_frozen_blocks_are_at_the_clients_as_with_fedavg():
    """Each was said to download the frozen network in the first round, which made 24 MB."""
    first, second = simulate([*SMALL, "algorithm=feddyn", "rounds=2", "data.limit=24"]).history["bytes_down"]
    assert first == second


def test_a_network_without_blocks_trains_by_the_equations(tmp_path, monkeypatch, cache, no_figures):
    """Two clients with all rows in a batch, against gradient descent written out (Algorithm 1)."""
    monkeypatch.setenv("RAYFED_CACHE", str(cache))
    alpha, rate, passes, rounds = 0.3, 0.2, 3, 3
    rows = clients(2, 20)
    torch.manual_seed(0)
    start = nn.Linear(6, 3)
    experiment = rayfed.Experiment(
        method="feddyn",
        model=start,
        data={name: {"train": (x, y), "test": (x, y)} for name, (x, y) in rows.items()},
        tuning="full",
        server={"feddyn_alpha": alpha},
        train={"optimizer": "sgd", "lr": rate, "momentum": 0, "batch_size": 20, "epochs": passes},
        rounds=rounds,
        cluster="inline",
    )
    found = experiment.run(quiet=True).params
    common = torch.cat([start.weight.detach(), start.bias.detach()[:, None]], 1).double()
    h, g = torch.zeros_like(common), [torch.zeros_like(common) for _ in rows]
    for _ in range(rounds):
        ends = []
        for i, (x, y) in enumerate(rows.values()):
            inputs = torch.cat([torch.tensor(x), torch.ones(len(x), 1)], 1).double()
            own = common.clone()
            for _ in range(passes):
                own.requires_grad_(True)
                loss = nn.functional.cross_entropy(inputs @ own.T, torch.tensor(y))
                slope = torch.autograd.grad(loss, own)[0] - g[i] + alpha * (own - common)
                own = (own - rate * slope).detach()
            g[i] = g[i] - alpha * (own - common)
            ends.append(own)
        h = h - alpha / len(ends) * sum(own - common for own in ends)
        common = sum(ends) / len(ends) - h / alpha
    whole = torch.cat([found["weight"], found["bias"][:, None]], 1)
    # Sums over 20 rows, 7 inputs and 3 classes with some 10 operations in each pass; h is divided by alpha.
    near(whole, common, rounds * passes * (20 + 7 + 3 + 10), float(common.abs().max()) / alpha)
    assert (whole - torch.cat([start.weight, start.bias[:, None]], 1)).abs().max() > 0.01
    with pytest.raises(ConfigError, match="no uniform blocks"):
        experiment.changed(capacity=1).run(quiet=True)
