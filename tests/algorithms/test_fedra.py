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
from rayfed.engine.loop import make_cohort
from rayfed.engine.setup import _block_bytes, prepare
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client, TrainConfig
from rayfed.federation.params import digest
from rayfed.models.build import build_backbone
from rayfed.models.config import ModelConfig
from rayfed.models.sharing import skeleton
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.lora import Lora
from rayfed.types import ServerState, Update, block_of, num_bytes
from tests.algorithms.depth import cohort

SMALL = ["cluster=inline", "data.limit=40", "model.pretrained=false"]


def run(folder, name, *overrides):
    fixed = ["rounds=2", "evaluation.every=2", f"output={folder}/{name}"]
    return simulate([*SMALL, *fixed, *overrides])


def masked_updates():
    values = {"a": {0: [1.0, 2], 1: [3, 4]}, "b": {0: [5, 6], 3: [7, 8]}, "c": {1: [-1, 0.5], 3: [2, -3]}}
    heads, sizes = {"a": [0.2, 0.4], "b": [-0.6, 1.0], "c": [0.5, -0.1]}, {"a": 100, "b": 300, "c": 600}
    return [
        Update(
            client=cid,
            params={
                **{f"blocks.{j}.x": torch.tensor(v, dtype=torch.float64) for j, v in blocks.items()},
                "head.x": torch.tensor(heads[cid], dtype=torch.float64),
            },
            num_examples=sizes[cid],
        )
        for cid, blocks in values.items()
    ]


@pytest.mark.parametrize(
    ("weighting", "layers", "head"),
    [
        (
            "data_size",
            [[4.0, 5.0], [-0.428571, 1.0], [0.3, -0.3], [3.666667, 0.666667]],
            [0.14, 0.28],
        ),
        ("uniform", [[3.0, 4.0], [1.0, 2.25], [0.3, -0.3], [4.5, 2.5]], [0.033333, 0.433333]),
    ],
)
def test_each_block_is_averaged_over_its_holders(weighting, layers, head):
    start = [[0.1, -0.1], [0.2, -0.2], [0.3, -0.3], [0.4, -0.4]]
    params = {f"blocks.{j}.x": torch.tensor(v, dtype=torch.float64) for j, v in enumerate(start)}
    state = ServerState(round=0, params={**params, "head.x": torch.zeros(2, dtype=torch.float64)})
    server, updates = RandomAllocation(weighting=weighting), masked_updates()
    after = server.aggregate(state, cohort({"a": 2, "b": 2, "c": 2}, 4), updates).params
    for j, expected in enumerate(layers):
        assert after[f"blocks.{j}.x"].tolist() == pytest.approx(expected, abs=2e-6)
    assert after["head.x"].tolist() == pytest.approx(head, abs=2e-6)
    assert torch.equal(after["blocks.2.x"], params["blocks.2.x"])  # bit for bit: nobody held it


def test_the_plan_is_recorded_and_depends_on_the_round_only():
    capacity = {"a": 12, "b": 6, "c": 3}
    world = cohort(capacity, round=4)
    state = RandomAllocation().plan(ServerState(round=4, params={}), world)
    again = RandomAllocation().plan(ServerState(round=4, params={}), cohort(capacity, round=4))
    assert state.memory == again.memory
    assert [len(state.memory["plan"][c]["blocks"]) for c in "abc"] == [12, 6, 3]
    rows = world.ledger.tables["allocations"]
    assert [(r["client"], r["capacity"]) for r in rows] == [("a", 12), ("b", 6), ("c", 3)]
    state = RandomAllocation().record_visits(state, world)
    visits = [r["visits"] for r in world.ledger.tables["block_visits"]]
    assert sum(visits) == 21
    assert min(visits) >= 1
    world = cohort(capacity, round=5)
    later = RandomAllocation().plan(state, world)
    held = later.memory["plan"]["a"]["blocks"] + later.memory["plan"]["c"]["blocks"]
    world.ledger.missing.append("b")  # its blocks were not trained
    later = RandomAllocation().record_visits(later, world)
    assert sum(later.memory["visits"]) == 21 + 15
    assert later.memory["last_round"] == [5 if j in held else 4 for j in range(12)]
    assert later.memory["plan"] != state.memory["plan"]


def test_what_cannot_be_covered(caplog):
    world = cohort({"a": 2, "b": 3})
    state = ServerState(round=0, params={})
    held = RandomAllocation(cover=True).allocate(state, world)
    assert not set(held["a"]) & set(held["b"])
    assert "cannot cover 12" in caplog.text
    assert (
        sum(map(len, RandomAllocation(cover=True, on_infeasible="eq3").allocate(state, world).values())) == 5
    )
    with pytest.raises(ConfigError, match="cannot cover 12"):
        RandomAllocation(cover=True, on_infeasible="error").allocate(state, world)
    stale = state.remember(last_round=[5] * 7 + [0] * 5)
    held = RandomAllocation(cover=True, prefer_stale=True).allocate(stale, world)
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
    monkeypatch.setattr(RandomAllocation, "allocate", lambda self, state, world: {"a": next(plans)})
    server, state = RandomAllocation(frozen_cache=cache, cache_blocks=2), ServerState(round=0, params={})
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


COSTS = {
    ("vit_base_patch16_224", 100): {
        12: (592996, 85647460),
        10: (2.027920e6 / 4, 285.542800e6 / 4),
        8: (1.683856e6 / 4, 228.495760e6 / 4),
        6: (1.339792e6 / 4, 171.448720e6 / 4),
        4: (0.995728e6 / 4, 114.401680e6 / 4),
        3: (205924, 21469540),
    },
    ("mixer_b16_224", 60): {
        12: (470460, 58989804),
        10: (1.598960e6 / 4, 196.663440e6 / 4),
        8: (1.316080e6 / 4, 157.367664e6 / 4),
        6: (1.033200e6 / 4, 118.071888e6 / 4),
        4: (0.750320e6 / 4, 78.776112e6 / 4),
        3: (152220, 14782056),
    },
}


@pytest.mark.parametrize(("name", "classes"), COSTS)
def test_bytes_of_the_papers_backbones(name, classes):
    config = ModelConfig(name=name, pretrained=False)
    model = skeleton(lambda: apply_tuning(build_backbone(config, classes, 0), Lora(), 0))
    params = {n: s.tensor for n, s in model.slots().items() if s.is_trained}
    state, sizes = ServerState(round=0, params=params), _block_bytes(model)
    for depth, (up, down) in COSTS[name, classes].items():
        world = cohort({"a": depth}, block_bytes=sizes)
        server = RandomAllocation()
        sent = server.send(server.plan(state, world), world)["a"]
        assert sent.num_bytes() == 4 * down
        assert sum(num_bytes(v) for n, v in params.items() if sent.holds(n)) == 4 * up
        prefix = BlockServer()
        first = prefix.plan(state, world)
        assert prefix.send(first, world)["a"].num_bytes() == 4 * down
        assert prefix.send(prefix.plan(first, world), world)["a"].num_bytes() == 4 * up
    assert not any("patch_embed" in n for n in params)


def test_a_clipped_momentum_step():
    class Model(torch.nn.Module):
        pass

    p = torch.nn.Parameter(torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64))
    config = TrainConfig(lr=0.01, momentum=0.9, weight_decay=1e-5, clip_norm=10)
    client = Client("a", Model(), None, config, torch.Generator())
    client.trainable = lambda: {"p": p}
    optimizer = client.optimizer()
    steps = [
        ([6.0, -9, 12], [3.713912, -5.570862, 7.427823], [0.462861, -0.194291, 0.925722]),
        ([1.0, 2, -2], [4.342525, -3.013778, 4.685050], [0.419436, -0.164154, 0.878871]),
    ]
    for gradient, buffer, value in steps:
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        client.clip_gradients()
        optimizer.step()
        assert optimizer.state[p]["momentum_buffer"].tolist() == pytest.approx(buffer, abs=2e-6)
        assert p.tolist() == pytest.approx(value, abs=2e-6)


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


def test_three_blocks_a_client_train_all_twelve_and_bytes_add_up(tmp_path):
    result = run(tmp_path, "three", "algorithm=fedra", "capacity=[3,3,3,3,3]", "rounds=6")
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
    setup = prepare(load_config([*SMALL, "algorithm=fedra", "capacity=[3,3,3,3,3]"]))
    executor = InlineExecutor(setup.world, setup.weights)
    world = make_cohort(setup.experiment, executor, 0)
    server, frozen = setup.experiment.server, executor.worker.checksum()
    state = server.plan(server.start(setup.start), world)
    sent = server.send(state, world)
    for update in world.run(server.visit(setup.experiment.local), sent):
        held = set(sent[update.client].blocks)
        assert {block_of(n) for n in update.params} == held | {None}
        resident = executor.worker._model.slots()
        for name, value in setup.start.items():
            outside = block_of(name) is not None and block_of(name) not in held
            if outside and update.client == world.ids[-1]:
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


def test_the_order_in_which_clients_run_does_not_matter():
    setup = prepare(load_config([*SMALL, "algorithm=fedra_feddyn", "capacity=[12,10,8,6,3]"]))
    results = []
    for wrap in (lambda e: e, Backwards):
        experiment, executor = setup.experiment, wrap(InlineExecutor(setup.world, setup.weights))
        state = experiment.server.start(setup.start)
        for r in range(2):
            world = make_cohort(experiment, executor, r)
            state = experiment.server.round(replace(state, round=r), world, experiment.local)
        results.append(digest(state.params))
    assert results[0] == results[1]


def test_allsmall_has_a_small_global_model(tmp_path):
    result = run(tmp_path, "small", "algorithm=allsmall", "capacity=[12,10,8,6,3]")
    moved = {block_of(n) for n, v in result.params.items() if n.endswith("lora_B") and v.any()}
    assert moved == {0, 1, 2}
    world = cohort({"a": 5, "b": 3})
    server, state = AllSmall(), ServerState(round=0, params={}, blocks=(0, 1, 2))
    assert server.allocate(state, world) == {"a": (0, 1, 2), "b": (0, 1, 2)}
    assert state.broadcast().blocks == (0, 1, 2)
    with pytest.raises(ConfigError, match="13 is more than the 12"):
        AllSmall(depth=13).round(ServerState(round=0, params={}), world, None)


def test_depths_drawn_each_round(tmp_path):
    result = run(tmp_path, "dynamic", "algorithm=fedra", "capacity=dynamic", "server.cover=true")
    rows = pq.read_table(result.path / "allocations.parquet").to_pylist()
    assert all(len(row["blocks"]) == row["capacity"] for row in rows)
    assert len({row["capacity"] for row in rows}) > 2
