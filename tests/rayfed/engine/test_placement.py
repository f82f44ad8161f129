"""Placement never changes results: one process, any pool of actors, an actor per client, a killed actor."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from threadpoolctl import threadpool_limits
from torch import Tensor

from rayfed import Client, Local, Method, Server
from rayfed.config.schema import load_config
from rayfed.executors.actor_pool import RayExecutor
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.params import digest
from tests.conftest import SMALL, STEADY

PARTIAL = (
    "data.domains=[plain,street]",
    "data.partition.clients_per_domain=2",
    "clients_per_round=3",
    "rounds=3",
)
CHANGING = ("data.augment=[crop,flip,jitter,grayscale]", "train.keep_optimizer=true", "train.schedule=cosine")
"""Random changes of images, and settings that depend on the round or are kept between rounds."""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("actors", ["1", "2", "3", "per_client"])
def test_same_tensors_and_tables_wherever_clients_run(actors, small, ray_cluster):
    here = small(*PARTIAL, *CHANGING)
    there = small(*PARTIAL, *CHANGING, "cluster.executor=ray", f"cluster.actors={actors}")
    assert here.sha256 == there.sha256
    assert digest(there.params) == there.sha256
    drop = ["seconds", "seconds_training", "seconds_clients", "seconds_idle"]
    assert here.history.drop(columns=drop).equals(there.history.drop(columns=drop))


@pytest.mark.ray
@pytest.mark.parametrize(
    ("group", "actors"),
    [pytest.param(group, 2 if group == 2 else 1, marks=STEADY) for group in (1, 2, 4, 16)],
)
def test_groups_follow_from_names_and_not_from_actors(group, actors, cache, ray_cluster):
    """In one process as on actors, of which one is killed after the first round."""
    import ray

    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache, "algorithm=fedavg", f"train.group={group}", "rounds=2", "evaluation.every=0")
    *_, here = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    names = [f"{group}-{i}" for i in range(actors)]
    pool = RayExecutor(
        ray.put(setup.context), ray.put(dict(setup.weights)), names, [{"num_cpus": 0}] * actors
    )
    try:
        for done in run_rounds(setup.experiment, pool, setup.start):
            there = done
            ray.kill(pool.lanes[0].actor)
    finally:
        pool.close()
    assert pool.replaced
    assert digest(there.state.params) == digest(here.state.params)


def test_the_seed_decides(small):
    assert small("seed=1").sha256 == small("seed=1").sha256 != small("seed=2").sha256


def test_an_extra_evaluation_changes_nothing(small):
    assert (
        small("evaluation.every=0").sha256 == small("evaluation.every=1", "evaluation.personal=true").sha256
    )


def test_the_saved_config_repeats_the_run(small, tmp_path):
    first = small("algorithm=fedprox", "local.mu=0.3", "seed=4")
    saved = yaml.safe_load((first.path / "config.yaml").read_text())
    again = tmp_path / "again"
    config = load_config([f"output={again}"], first.path / "config.yaml")
    assert (config.algorithm, config.local["mu"], saved["local"]["mu"]) == ("fedprox", 0.3, 0.3)
    import rayfed

    assert rayfed.simulate(config).sha256 == first.sha256


def small_setup(cache, *overrides):
    return prepared(
        load_config([*SMALL, f"data.cache={cache}", "data.partition.clients_per_domain=2", *overrides])
    )


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_a_killed_actor_is_replaced_and_changes_nothing(cache, ray_cluster):
    import ray

    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache, "algorithm=local", "rounds=3")
    whole = [
        done.scores
        for done in run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    ]
    pool = RayExecutor(
        ray.put(setup.context), ray.put(dict(setup.weights)), ["a", "b"], [{"num_cpus": 0}] * 2
    )
    try:
        parts = []
        for done in run_rounds(setup.experiment, pool, setup.start):
            parts.append(done.scores)
            ray.kill(pool.lanes[0].actor)
        assert pool.replaced == 2
    finally:
        pool.close()
    assert parts == whole  # every client's own model, which lives in its store, came through


def layout(value):
    """Offset from 64 bytes and strides of every tensor of a nested value, by its place."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 64, value.stride()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: layout(item) for key, item in items}


@dataclass(frozen=True)
class KeepsViews(Server):
    """Sends and keeps views of tensors, and sees how answers lie in memory."""

    def start(self, params):
        return super().start(params).share(turned=torch.rand(5, 3).T, large=torch.rand(200, 300)[:, 1:])

    def aggregate(self, state, cohort, updates):
        seen = [update.extra["seen"] for update in updates]
        answers = [layout((update.params, {"views": update.extra["views"]})) for update in updates]
        state = super().aggregate(state, cohort, updates)
        first = next(iter(state.params.values()))
        return state.remember(seen=str((seen, answers)), late=first.reshape(-1)[1:])


@dataclass(frozen=True)
class SendsViews(Local):
    """Keeps and sends views of tensors, and says how what it gets lies in memory."""

    def train(self, client: Client, sent):
        x, y = next(iter(client.batches(shuffle=False)))
        seen = str(layout((sent.params, sent.shared, client.store, (x, y))))
        first = next(iter(client.params().values()))
        client.store["views"] = [first.T, first.reshape(-1)[1:], first[:, :1], first[:1, None].mT]
        update = super().train(client, sent)
        params = {name: value.mT.contiguous().mT for name, value in update.params.items() if value.ndim > 1}
        rest = {**update.params, **params}
        return replace(update, params=rest, extra={"seen": seen, "views": (first.T, first.reshape(-1)[3:])})


VIEWS = Method(server=KeepsViews, local=SendsViews)


@pytest.mark.ray
def test_every_tensor_lies_in_memory_alike_wherever_clients_run(cache, pool_of_two):
    """How a product or a sum rounds may depend on it: on strides always, on addresses with some of MKL."""
    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache, f"algorithm={__name__}:VIEWS")
    runs = {}
    for where, executor in {
        "here": InlineExecutor(setup.context, setup.weights),
        "there": pool_of_two(setup),
    }.items():
        *_, last = run_rounds(setup.experiment, executor, setup.start)
        runs[where] = last.state
    here, there = runs["here"], runs["there"]
    assert here.memory["seen"] == there.memory["seen"]
    assert "views" in here.memory["seen"]
    for state in (here, there):
        for value in (*state.params.values(), *state.shared.values(), state.memory["late"]):
            assert layout(value) == layout(torch.empty(value.shape))


@dataclass(frozen=True)
class SendsToEach(Server):
    """Sends each client a message of its own, in which all but the head is the same for all."""

    def send(self, state, cohort):
        own = {name: value.clone() for name, value in state.params.items() if name.startswith("head.")}
        return {cid: state.broadcast({**state.params, **own}) for cid in cohort.ids}


@dataclass(frozen=True)
class HasTeacher(Server):
    """Sends all clients the same values of another model, in parts of `shared` that are small or large."""

    def start(self, params):
        small = {name: value + 0.1 for name, value in params.items() if value.numel() < 1000}
        large = {name: value * 1.1 for name, value in params.items() if name not in small}
        return super().start(params).share(small=small, large=large, room=torch.zeros(30_000))


@dataclass(frozen=True)
class LearnsFromTeacher(Local):
    """Comes nearer to the outputs of a model that all clients have."""

    grouped: ClassVar[bool] = True

    def loss(self, client: Client, sent, batch):
        wanted = client.reference({**sent.shared["small"], **sent.shared["large"]}, batch[0])
        return super().loss(client, sent, batch) + (client.model(batch[0]) - wanted).pow(2).mean()


EACH = Method(server=SendsToEach)
TEACHER = Method(server=HasTeacher, local=LearnsFromTeacher)


@pytest.mark.ray
@pytest.mark.parametrize(
    "method", [("algorithm=moon", f"server.name={__name__}:EACH"), (f"algorithm={__name__}:TEACHER",)]
)
def test_a_group_knows_what_all_its_clients_have_wherever_it_runs(method, cache, pool_of_two):
    """A pass with a tensor that all clients have rounds otherwise than one with equal tensors."""
    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache, *method, "train.group=4", "train.batch_size=8")
    found = set()
    for executor in (InlineExecutor(setup.context, setup.weights), pool_of_two(setup)):
        *_, last = run_rounds(setup.experiment, executor, setup.start)
        found.add(digest(last.state.params))
    assert len(found) == 1


@dataclass(frozen=True)
class MultipliesInNumpy(Server):
    """Weighs clients by products of NumPy, as a half may on the server and at a client."""

    def aggregate(self, state, cohort, updates):
        sums = [products_of_numpy(), *(update.extra["sums"] for update in updates)]
        return super().aggregate(state, cohort, updates).remember(sums=sums)


@dataclass(frozen=True)
class MultipliesThereToo(Local):
    """Sends products of NumPy."""

    def train(self, client: Client, sent):
        return replace(super().train(client, sent), extra={"sums": products_of_numpy()})


NUMPY = Method(server=MultipliesInNumpy, local=MultipliesThereToo)


def products_of_numpy():
    """Sums of products of vectors so long that OpenBLAS shares them out among its threads."""
    rows = np.random.default_rng(0).standard_normal((20, 30_001))
    return [float(row @ row) for row in rows]


@pytest.fixture
def threads_of_numpy():
    """Two threads, as on a machine with two CPUs where OMP_NUM_THREADS is not set."""
    with threadpool_limits(2, user_api="blas"):
        yield


@pytest.mark.ray
def test_numpy_has_as_many_threads_wherever_clients_run(cache, pool_of_two, threads_of_numpy):
    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache, f"algorithm={__name__}:NUMPY", "rounds=1")
    pool = pool_of_two(setup)
    sums = [
        last.state.memory["sums"]
        for executor in (InlineExecutor(setup.context, setup.weights), pool)
        for last in run_rounds(setup.experiment, executor, setup.start)
    ]
    assert len({str(own) for each in sums for own in each}) == 1


@pytest.mark.ray
def test_frozen_weights_are_one_copy_that_nobody_changes(cache, pool_of_two):
    import ray

    from rayfed.engine.loop import run_rounds

    setup = small_setup(cache)
    alone = InlineExecutor(setup.context, setup.weights)
    before = alone.worker.checksum()
    pool = pool_of_two(setup)
    for _ in run_rounds(setup.experiment, pool, setup.start):
        pass
    asked = [lane.actor.__ray_call__.remote(lambda self: self.worker.checksum()) for lane in pool.lanes]
    assert ray.get(asked) == [before, before]


def test_rows_have_the_promised_columns(small):
    result = small("data.partition.clients_per_domain=2")
    rows = [json.loads(line) for line in (result.path / "rounds.jsonl").read_text().splitlines()]
    promised = {
        "round",
        "accuracy",
        "accuracy_domain",
        "sigma_type",
        "sigma_client",
        "seconds",
        "bytes_up",
        "bytes_down",
    }
    assert [row["round"] for row in rows] == [1, 2]
    assert all(promised <= row.keys() for row in rows)
    sent = sum(v.numel() * v.element_size() for v in result.params.values())
    assert {row["bytes_up"] for row in rows} == {row["bytes_down"] for row in rows} == {10 * sent}
    assert all(torch.isfinite(v).all() for v in result.params.values())
    for name in ("rounds", "clients", "transfers", "partition"):
        assert (result.path / f"{name}.parquet").stat().st_size > 0
    assert {"environment.json", "report.md"} <= {p.name for p in result.path.iterdir()}
