"""Running statistics of BatchNorm: private to each process, averaged or kept with the client."""

from functools import partial

import numpy as np
import pytest
import torch

from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import BUFFERS, Worker
from rayfed.experiment.plan import prepared
from rayfed.federation.client_tasks import fit
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.federation.params import digest
from rayfed.types import Broadcast
from tests.rounding import near

FEW = ("model.size=32", "model.pretrained=false", "tuning=full", "cluster=inline", "compare=[]")
FEW += ("data.limit=6", "data.val=0", "evaluation.every=0")
FEW += ("data.partition.scheme=by_domain", "train.lr=0.001", "rounds=1", "algorithm=fedavg")
TINY = ("model=timm", "model.name=resnet10t")


def setup_of(cache, *overrides):
    return prepared(load_config([*FEW, f"data.cache={cache}", *overrides]))


def shared_arrays(setup):
    """The start tensors as the object store hands them to actors: read-only."""
    arrays = {name: array.copy() for name, array in setup.weights.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def visit(worker, setup, client, store=None):
    sent = Broadcast(round=0, params=setup.start)
    return worker.call(Call(client, partial(fit, local=Local()), "fit", sent), store or {})


def statistics(params):
    return {n for n in params if n.endswith(("running_mean", "running_var"))}


@pytest.mark.slow
@pytest.mark.steady
def test_resnet50_fully_tuned_leaves_the_shared_copy_alone(cache):
    """Two actors on one shared copy: each has its own buffers; the copy stays as it was, bit by bit."""
    setup = setup_of(cache, "model=resnet50")
    arrays = shared_arrays(setup)
    before = digest({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    workers = [Worker(setup.context, arrays) for _ in range(2)]
    first, second = (dict(w.model.named_buffers()) for w in workers)
    places = {array.__array_interface__["data"][0] for array in arrays.values()}
    for name, buffer in first.items():
        assert buffer.data_ptr() not in places, name
        assert buffer.data_ptr() != second[name].data_ptr(), name
    client, *_ = setup.experiment.clients
    update, _ = visit(workers[0], setup, client)
    moved = [n for n, b in first.items() if n.endswith("running_mean") and not np.array_equal(b, arrays[n])]
    assert len(moved) == 53  # every BatchNorm layer of ResNet50
    assert all(np.array_equal(b, arrays[n]) for n, b in second.items())
    after = digest({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    assert after == before
    assert len(statistics(update.params)) == 106


def test_averaged_statistics_travel_and_are_weighted_means(cache):
    setup = setup_of(cache, *TINY, "train.batch_norm=average")
    names = statistics(setup.start)
    assert names
    worker = Worker(setup.context, shared_arrays(setup))
    answers = [visit(worker, setup, client) for client in setup.experiment.clients]
    assert all(BUFFERS not in store for _, store in answers)
    (done,) = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    total = sum(update.num_examples for update, _ in answers)
    for name in names:
        mean = sum(update.params[name] * (update.num_examples / total) for update, _ in answers)
        near(done.state.params[name], mean, len(answers) + 4)
        assert not torch.equal(done.state.params[name], setup.start[name])


def test_local_statistics_stay_with_their_client(cache):
    setup = setup_of(cache, *TINY, "train.batch_norm=local", "rounds=2")
    assert not statistics(setup.start)
    worker = Worker(setup.context, shared_arrays(setup))
    ids = list(setup.experiment.clients)
    stores = {}
    for client in ids:
        update, stores[client] = visit(worker, setup, client)
        assert not statistics(update.params)
    kept = [stores[client][BUFFERS] for client in ids]
    assert kept[0].keys() == kept[1].keys()
    assert any(not torch.equal(kept[0][n], kept[1][n]) for n in kept[0])
    visit(worker, setup, ids[1], stores[ids[1]])  # somebody else in between
    model = worker.model

    def look(client, sent):
        assert all(torch.equal(model.get_buffer(model.module_name(n)), v) for n, v in kept[0].items())
        return client.update(params={})

    worker.call(Call(ids[0], look, "look", Broadcast(round=1, params=setup.start)), stores[ids[0]])


@pytest.mark.parametrize("choice", ["average", "local"])
def test_the_config_says_which(cache, choice):
    config = load_config([*FEW, *TINY, f"data.cache={cache}", f"train.batch_norm={choice}"])
    assert config.train.batch_norm == choice
    assert bool(statistics(prepared(config).start)) == (choice == "average")
    assert load_config([]).train.batch_norm == "average"
