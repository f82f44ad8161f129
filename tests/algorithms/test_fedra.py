"""FedRA, AllLarge and AllSmall: allocation of blocks, means over holders, and bytes."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from algorithms._blocks import BlockServer
from algorithms.allsmall import AllSmall
from algorithms.fedra import RandomAllocation
from rayfed import simulate
from rayfed.config.schema import load_config
from rayfed.engine.built_once import _block_bytes
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.client import Client
from rayfed.federation.params import digest
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import skeleton
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.lora import Lora
from rayfed.types import ServerState, Update, block_of, num_bytes
from tests.algorithms.depth import cohort
from tests.cohorts import make_cohort
from tests.vectors import vector

SMALL = ["cluster=inline", "data.limit=40", "model.pretrained=false", "figures=false"]


def run(folder, name, *overrides):
    fixed = ["rounds=2", "evaluation.every=2", f"output={folder}/{name}"]
    return simulate([*SMALL, *fixed, *overrides])


V1 = vector("fedra", "V1")
V8 = vector("fedra", "V8")
V9 = vector("fedra", "V9")


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def masked_updates():
    """One answer per client, whose blocks stand in local order in the vector."""
    found = []
    for i, row in enumerate(V1.inputs["M"]):
        held = [j for j, holds in enumerate(row) if holds]
        values = V1.inputs["client_blocks_in_local_order"][i]
        params = {f"blocks.{j}.x": doubles(v) for j, v in zip(held, values, strict=True)}
        params["head.x"] = doubles(V1.inputs["heads"][i])
        found.append(Update(client="abc"[i], params=params, num_examples=V1.inputs["data_sizes"][i]))
    return found


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("data_size", V1.expected["data_size"]), ("uniform", V1.expected["uniform"])],
)
def test_v1_each_block_is_averaged_over_its_holders(weighting, expected):
    params = {f"blocks.{j}.x": doubles(v) for j, v in enumerate(V1.inputs["round_start"])}
    state = ServerState(round=0, params={**params, "head.x": torch.zeros(2, dtype=torch.float64)})
    server = RandomAllocation(weighting=weighting)
    after = server.aggregate(state, cohort({"a": 2, "b": 2, "c": 2}, 4), masked_updates()).params
    for j, values in enumerate(expected["layers"]):
        V1.matches(after[f"blocks.{j}.x"], values)
    V1.matches(after["head.x"], expected["head"])
    assert torch.equal(after["blocks.2.x"], params["blocks.2.x"])  # bit for bit: nobody held it


def test_the_plan_is_recorded_and_depends_on_the_round_only():
    capacity = {"a": 12, "b": 6, "c": 3}
    context = cohort(capacity, round=4)
    state = RandomAllocation().plan(ServerState(round=4, params={}), context)
    again = RandomAllocation().plan(ServerState(round=4, params={}), cohort(capacity, round=4))
    assert state.memory == again.memory
    assert [len(state.memory["plan"][c]["blocks"]) for c in "abc"] == [12, 6, 3]
    rows = context.ledger.tables["allocations"]
    assert [(r["client"], r["capacity"]) for r in rows] == [("a", 12), ("b", 6), ("c", 3)]
    state = RandomAllocation().record_visits(state, context)
    visits = [r["visits"] for r in context.ledger.tables["block_visits"]]
    assert sum(visits) == 21
    assert min(visits) >= 1
    context = cohort(capacity, round=5)
    later = RandomAllocation().plan(state, context)
    held = later.memory["plan"]["a"]["blocks"] + later.memory["plan"]["c"]["blocks"]
    context.ledger.missing.append("b")  # its blocks were not trained
    later = RandomAllocation().record_visits(later, context)
    assert sum(later.memory["visits"]) == 21 + 15
    assert later.memory["last_round"] == [5 if j in held else 4 for j in range(12)]
    assert later.memory["plan"] != state.memory["plan"]


def test_what_cannot_be_covered(caplog):
    context = cohort({"a": 2, "b": 3})
    state = ServerState(round=0, params={})
    held = RandomAllocation(cover=True).allocate(state, context)
    assert not set(held["a"]) & set(held["b"])
    assert "cannot cover 12" in caplog.text
    assert (
        sum(map(len, RandomAllocation(cover=True, on_infeasible="eq3").allocate(state, context).values()))
        == 5
    )
    with pytest.raises(ConfigError, match="cannot cover 12"):
        RandomAllocation(cover=True, on_infeasible="error").allocate(state, context)
    stale = state.remember(last_round=[5] * 7 + [0] * 5)
    held = RandomAllocation(cover=True, prefer_stale=True).allocate(stale, context)
    assert sorted(held["a"] + held["b"]) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("cache", "frozen"),
    [
        ("none", [300, 300, 300]),
        ("all", [300, 100, 0]),
        ("lru", [300, 100, 200]),
        ("preinstalled", [0, 0, 0]),
    ],
)
def test_frozen_blocks_a_client_receives(cache, frozen, monkeypatch):
    plans = iter([(0, 1, 2), (1, 2, 3), (0, 1, 3)])
    monkeypatch.setattr(RandomAllocation, "allocate", lambda self, state, context: {"a": next(plans)})
    server = RandomAllocation(frozen_cache=cache, cache_blocks=2)
    state = ServerState(round=0, params={})
    found = []
    for _ in frozen:
        state = server.plan(state, cohort({"a": 3}, depth=4))
        found.append(server.send(state, cohort({"a": 3}, depth=4))["a"].num_bytes())
    # With two places: 0 1 2 leaves 1 2; block 3 is new and leaves 2 3; blocks 0 and 1 are new.
    assert found == frozen


def test_half_precision_costs_half():
    server = RandomAllocation(frozen_bytes_per_number=2)
    state = server.plan(ServerState(round=0, params={}), cohort({"a": 3}))
    assert state.memory["plan"]["a"]["frozen"] == 150


MEGABYTES = V8.expected["up_and_down_megabytes"]
PARAMETERS = V8.expected["up_and_down_parameters"]


@pytest.mark.parametrize("backbone", V8.inputs["backbones"])
def test_v8_bytes_of_the_papers_backbones(backbone):
    name, classes = backbone.split(", ")
    q = V8.inputs["bytes_per_number"]
    config = ModelConfig(name=name, pretrained=False)
    model = skeleton(lambda: apply_tuning(build_backbone(config, int(classes), 0), Lora(), 0))
    params = {n: s.tensor for n, s in model.tensors().items() if s.is_trained}
    state = ServerState(round=0, params=params)
    sizes = _block_bytes(model)
    for depth, megabytes in MEGABYTES[backbone].items():
        up, down = (round(1e6 * each) for each in megabytes)
        context = cohort({"a": int(depth)}, block_bytes=sizes)
        assert [up, down] == [q * n for n in PARAMETERS.get(backbone, {}).get(depth, [up // q, down // q])]
        server = RandomAllocation()
        sent = server.send(server.plan(state, context), context)["a"]
        assert sent.num_bytes() == down
        assert sum(num_bytes(v) for n, v in params.items() if sent.holds(n)) == up
        prefix = BlockServer()
        first = prefix.plan(state, context)
        assert prefix.send(first, context)["a"].num_bytes() == down
        assert prefix.send(prefix.plan(first, context), context)["a"].num_bytes() == up
    assert not any("patch_embed" in n for n in params)


def test_v9_a_clipped_momentum_step():
    p = torch.nn.Parameter(doubles(V9.inputs["p0"]))
    settings = {name: V9.inputs[name] for name in ("lr", "momentum", "weight_decay", "clip_norm")}
    client = Client("a", torch.nn.Module(), None, TrainConfig(**settings), torch.Generator())
    client.trainable = lambda: {"p": p}
    optimizer = client.optimizer()
    for gradient, expected in zip(V9.inputs["grads"], V9.expected["steps"], strict=True):
        p.grad = doubles(gradient)
        V9.matches(p.grad.norm(), expected["norm"])
        client.clip_gradients()
        V9.matches(p.grad, expected.get("clipped", gradient))
        optimizer.step()
        V9.matches(optimizer.state[p]["momentum_buffer"], expected["buf"])
        V9.matches(p, expected["p"])


@pytest.mark.slow
@pytest.mark.steady
def test_full_depth_is_alllarge_and_prefixes_are_plain_averaging(tmp_path, monkeypatch):
    uniform = "server.weighting=uniform"
    full = run(tmp_path, "full", "algorithm=fedra", "capacity=12", uniform)
    assert (
        full.sha256 == run(tmp_path, "large", "algorithm=alllarge", "capacity=[12,3,3,3,3]", uniform).sha256
    )
    some = "capacity=[12,10,8,6,3]"
    random = run(tmp_path, "random", "algorithm=fedra", some)
    monkeypatch.setattr(RandomAllocation, "allocate", BlockServer.allocate)
    prefix = run(tmp_path, "prefix", "algorithm=fedra", some)
    assert prefix.sha256 == run(tmp_path, "plain", "algorithm=fedavg", some).sha256
    assert prefix.sha256 != random.sha256


@pytest.mark.slow
@pytest.mark.steady
def test_three_blocks_a_client_train_all_twelve_and_bytes_add_up(tmp_path):
    result = run(tmp_path, "three", "algorithm=fedra", "capacity=[3,3,3,3,3]", "rounds=6", "figures=true")
    visits = pq.read_table(result.path / "block_visits.parquet").to_pylist()
    assert min(row["visits"] for row in visits if row["round"] == 6) >= 1
    moved = {block_of(n) for n, v in result.params.items() if n.endswith("lora_B") and v.any()}
    assert moved == set(range(12))
    block = sum(num_bytes(v) for n, v in result.params.items() if n.startswith("blocks.0."))
    head = sum(num_bytes(v) for n, v in result.params.items() if n.startswith("head"))
    d = 64
    frozen = 4 * (3 * d * d + 3 * d + d * d + d + 2 * (4 * d * d) + 5 * d + 4 * d)
    for row in pq.read_table(result.path / "transfers.parquet").to_pylist():
        assert (row["up"], row["down"]) == (3 * block + head, 3 * (block + frozen) + head)
    assert (result.path / "figures" / "allocations.png").stat().st_size > 1000


def test_only_the_chosen_blocks_change(tmp_path):
    setup = prepared(load_config([*SMALL, "algorithm=fedra", "capacity=[3,3,3,3,3]"]))
    executor = InlineExecutor(setup.context, setup.weights)
    context = make_cohort(setup.experiment, executor, 0)
    server = setup.experiment.server
    frozen = executor.worker.checksum()
    state = server.plan(server.start(setup.start), context)
    sent = server.send(state, context)
    for update in context.run(server.training_task(setup.experiment.local), sent):
        held = set(sent[update.client].blocks)
        assert {block_of(n) for n in update.params} == held | {None}
        resident = executor.worker.model.tensors()
        for name, value in setup.start.items():
            outside = block_of(name) is not None and block_of(name) not in held
            if outside and update.client == context.ids[-1]:
                assert torch.equal(resident[name].tensor, value)
    assert executor.worker.checksum() == frozen


class Backwards:
    """Runs the calls of an exchange from the last to the first."""

    def __init__(self, inner):
        self.inner = inner

    def map(self, calls):
        return list(reversed(self.inner.map(list(reversed(calls)))))

    def close(self):
        pass


@pytest.mark.slow
@pytest.mark.steady
def test_the_order_in_which_clients_run_does_not_matter():
    setup = prepared(load_config([*SMALL, "algorithm=fedra_feddyn", "capacity=[12,10,8,6,3]"]))
    results = []
    for wrap in (lambda e: e, Backwards):
        experiment = setup.experiment
        executor = wrap(InlineExecutor(setup.context, setup.weights))
        state = experiment.server.start(setup.start)
        for r in range(2):
            context = make_cohort(experiment, executor, r)
            state = experiment.server.round(replace(state, round=r), context, experiment.local)
        results.append(digest(state.params))
    assert results[0] == results[1]


def test_allsmall_has_a_small_global_model(tmp_path):
    result = run(tmp_path, "small", "algorithm=allsmall", "capacity=[12,10,8,6,3]")
    moved = {block_of(n) for n, v in result.params.items() if n.endswith("lora_B") and v.any()}
    assert moved == {0, 1, 2}
    context = cohort({"a": 5, "b": 3})
    server = AllSmall()
    state = ServerState(round=0, params={}, blocks=(0, 1, 2))
    assert server.allocate(state, context) == {"a": (0, 1, 2), "b": (0, 1, 2)}
    assert state.broadcast().blocks == (0, 1, 2)
    with pytest.raises(ConfigError, match="13 is more than the 12"):
        AllSmall(depth=13).round(ServerState(round=0, params={}), context, None)


@pytest.mark.slow
@pytest.mark.steady
def test_depths_drawn_each_round(tmp_path):
    result = run(tmp_path, "dynamic", "algorithm=fedra", "capacity=dynamic", "server.cover=true")
    rows = pq.read_table(result.path / "allocations.parquet").to_pylist()
    assert all(len(row["blocks"]) == row["capacity"] for row in rows)
    assert len({row["capacity"] for row in rows}) > 2
