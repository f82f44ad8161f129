"""What a user's network does besides mapping rows to outputs, against plain PyTorch and by placement."""

import copy
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import rayfed
from rayfed.config.own_network import network_of, register
from rayfed.errors import ConfigError
from rayfed.experiment.kept_session import end_session
from rayfed.models.behaviour import Behaviour
from rayfed.models.examine import examine
from rayfed.models.fit_network import fit
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.full import Full
from tests.conftest import quickly
from tests.rayfed.models.own import Own
from tests.rounding import near

RATE = {"lr": 0.1, "momentum": 0.0, "epochs": 2, "batch_size": 99}


def clients(sizes=(10, 20, 40), width=6, test=8):
    rng = np.random.default_rng(0)

    def part(n, shift):
        return rng.normal(shift, 1 + shift, (n, width)).astype("f4"), rng.integers(0, 3, n)

    return {f"h{i}": {"train": part(n, i), "test": part(test, i)} for i, n in enumerate(sizes)}


def run(net, data=None, rounds=2, cluster="inline", tuning="full", method="fedavg", **train):
    own = {"rounds": rounds, "cluster": cluster, "tuning": tuning, "train": {**RATE, **train}}
    return rayfed.Experiment(method=method, model=net, data=data or clients(), **own).run(quiet=True)


def found(net, tuning=None, x=None):
    """The behaviour of a network, as a run finds it."""
    torch.manual_seed(0)
    x = torch.randn(2, 6) if x is None else x
    model = apply_tuning(fit(network_of(register(net)), x, 0).build(3, 0), tuning or Full(), 0)
    batches = [(x, torch.tensor([0, 1])), (torch.randn(4, *x.shape[1:]) + 1, torch.tensor([0, 1, 2, 0]))]
    return examine(lambda: copy.deepcopy(model), nn.functional.cross_entropy, batches, 0)


class Plain(Own):
    """Nothing besides."""


class Norm(Own):
    def add(self):
        self.n = nn.BatchNorm1d(8)

    def middle(self, h):
        return self.n(h)


class Cumulative(Norm):
    def add(self):
        self.n = nn.BatchNorm1d(8, momentum=None)


class NoAffine(Norm):
    def add(self):
        self.n = nn.BatchNorm1d(8, affine=False)


class NoStatistics(Norm):
    def add(self):
        self.n = nn.BatchNorm1d(8, affine=False, track_running_stats=False)


class Instance(Own):
    def add(self):
        self.n = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def middle(self, h):
        return self.n(h.unflatten(1, (2, 4))).flatten(1)


class Centre(Own):
    def middle(self, h):
        return h - h.mean(0)


class Gated(Own):
    """The rows mix only where the gate is open, and it is closed at the start."""

    def add(self):
        self.gate = nn.Parameter(torch.zeros(()))

    def middle(self, h):
        return h + self.gate * h.mean(0)


class Average(Own):
    """A moving mean of the features, in a buffer that is written to, or replaced."""

    replaces = False

    def add(self):
        self.register_buffer("mean", torch.zeros(8))

    def middle(self, h):
        if self.training:
            with torch.no_grad():
                new = 0.9 * self.mean + 0.1 * h.mean(0)
                if self.replaces:
                    self.mean = new
                else:
                    self.mean.data.copy_(new)  # torch counts no write here
        return h - self.mean


class Replaced(Average):
    replaces = True


class Counts(Own):
    """A counter in a buffer and one in an attribute, both of which change the output."""

    def add(self):
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = 0

    def middle(self, h):
        if self.training:
            self.calls += 1
            self.seen += 1
        return h * (1 + 0.1 * self.calls) + 0.1 * self.seen


class Bank(Own):
    """A list of features of earlier batches."""

    def add(self):
        self.bank = []

    def middle(self, h):
        self.bank = [*self.bank[-3:], h.detach().mean(0)]
        return h - torch.stack(self.bank).mean(0)


class Generator(Own):
    """Noise from a stream of its own."""

    def add(self):
        self.stream = torch.Generator().manual_seed(3)

    def middle(self, h):
        return h + torch.rand(h.shape, generator=self.stream) if self.training else h


class Teacher(Own):
    """A frozen layer that follows a trained one."""

    def add(self):
        self.t = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x):
        if self.a.training:
            with torch.no_grad():
                for p, q in zip(self.t.parameters(), self.a.parameters(), strict=True):
                    p.mul_(0.9).add_(0.1 * q)
        return self.o(torch.relu(self.a(x)) + torch.relu(self.t(x)))


class Spectral(Own):
    def add(self):
        self.a = spectral_norm(self.a)


class OwnTrain(Norm):
    def train(self, mode=True):
        super().train(mode)
        self.n.eval()
        return self


STATEFUL = [
    Norm,
    Cumulative,
    NoAffine,
    Instance,
    Average,
    Replaced,
    Counts,
    Bank,
    Generator,
    Teacher,
    Spectral,
]


def names(paths):
    return {path.removeprefix("net.body.") for path in paths}


@pytest.mark.parametrize(
    ("net", "moves", "back", "attributes"),
    [
        (Plain, set(), set(), set()),
        (Norm, {"n.running_mean", "n.running_var"}, {"n.num_batches_tracked"}, set()),
        (Instance, {"n.running_mean", "n.running_var"}, {"n.num_batches_tracked"}, set()),
        (Average, {"mean"}, set(), set()),
        (Replaced, {"mean"}, set(), set()),
        (Counts, set(), {"calls"}, {"seen"}),
        (Bank, set(), set(), {"bank"}),
        (Generator, set(), set(), {"stream"}),
        (Teacher, {"t.weight", "t.bias"}, set(), set()),
        (Spectral, set(), {f"a.parametrizations.weight.0._{leaf}" for leaf in "uv"}, set()),
        (OwnTrain, set(), set(), set()),
    ],
)
def test_what_passes_move_is_found(net, moves, back, attributes):
    seen = found(net)  # a function, because torch cannot write networks with spectral norm
    assert names(seen.moves) == moves
    if net is not Instance:  # of which torch counts the batches, or does not, by version
        assert names(seen.put_back) == back
    assert set(seen.attributes) == attributes


@pytest.mark.parametrize(
    ("net", "training", "evaluation"),
    [
        (Plain, False, False),
        (Norm, True, False),
        (NoStatistics, True, True),
        (Centre, True, True),
        (Gated, True, True),
        (Instance, False, False),
        (OwnTrain, False, False),
    ],
)
def test_rows_that_change_each_others_outputs_are_found(net, training, evaluation):
    seen = found(net())
    assert (seen.mixes_training, seen.mixes_evaluation) == (training, evaluation)


def test_random_passes_vary_and_those_of_an_ordinary_network_do_not():
    class Dropped(Own):
        def add(self):
            self.d = nn.Dropout(0.5)

        def middle(self, h):
            return self.d(h)

    assert found(Dropped()).varies
    assert not found(Plain()).varies
    assert found(Plain()).is_steady


def test_a_buffer_that_grows_is_refused_by_its_name():
    class Grows(Own):
        def add(self):
            self.register_buffer("queue", torch.zeros(1, 8))

        def middle(self, h):
            self.queue = torch.cat([self.queue, h.detach()[:1]])
            return h

    with pytest.raises(
        ConfigError, match=r"^model: queue of 'Grows-\w+' gets another shape or type in training"
    ):
        found(Grows())


def test_a_parameter_that_is_made_in_the_first_pass_is_refused_by_its_name():
    class Late(Own):
        def middle(self, h):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(8))
            return h * self.late

    with pytest.raises(ConfigError, match=r"makes 'late' in its first forward.*; make it in __init__"):
        found(Late())


@pytest.mark.parametrize("net", STATEFUL)
def test_the_final_model_scores_what_the_run_reports(net):
    data = clients()
    done = run(net, data)
    model = done.model()
    losses = []
    for name in data:
        x, y = data[name]["test"]
        with torch.no_grad():  # a copy for each client, as each of them has its own
            own = copy.deepcopy(model)
            losses.append(float(nn.functional.cross_entropy(own(torch.tensor(x)), torch.tensor(y))))
    near(done.loss, np.mean(losses), 100)  # sums of 6 and 8 products, and over 8 examples


@pytest.mark.parametrize("net", [Norm, Cumulative, Instance, Average, Teacher, NoAffine, OwnTrain])
def test_one_client_and_one_round_are_plain_training(net):
    data = clients(sizes=(40,))
    x, y = (torch.tensor(part) for part in data["h0"]["train"])
    plain = net().train()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    ours = run(net(), data, rounds=1).model().state_dict()
    for name, value in plain.state_dict().items():
        if value.is_floating_point():  # counters are put back
            near(ours[name], value, 200, max(1.0, float(value.abs().max())))  # sums over 40 examples, twice


@pytest.mark.parametrize("net", quickly(STATEFUL, (Average, Counts)))
@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_nothing_of_one_client_reaches_another(net, batch_norm):
    """With a rate of nearly nothing each client answers as if it were alone, whoever was called before it."""
    data = clients()
    still = {"lr": 1e-30, "batch_norm": batch_norm}
    together = run(net, data, rounds=1, **still).clients.loss
    for place, name in enumerate(data):
        alone = run(net, {name: data[name]}, rounds=1, **still)
        if batch_norm == "local":  # with its own statistics it scores what it would score alone
            near(together.iloc[place], alone.loss, 20)
    order = dict(reversed(data.items()))
    backwards = run(net, order, rounds=1, **still).clients.loss
    near(sorted(backwards), sorted(together), 20)  # the order of three summands


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("net", STATEFUL)
def test_placement_changes_nothing_where_passes_move_something(net, ray_cluster):
    here = run(net, rounds=3)
    try:
        there = run(net, rounds=3, cluster={"actors": 3, "num_gpus": 0})
        assert there.sha256 == here.sha256
        assert there.clients.loss.tolist() == here.clients.loss.tolist()
    finally:
        end_session()  # otherwise its actors stay, and tests after this one have no CPUs


@pytest.mark.parametrize("net", STATEFUL)
def test_after_each_call_everything_but_what_travels_is_as_before(net):
    from rayfed.executors.inline import InlineExecutor
    from rayfed.experiment.plan import prepared
    from tests.cohorts import make_cohort

    own = {"rounds": 2, "cluster": "inline", "tuning": "full", "train": RATE}
    setup = prepared(rayfed.Experiment(method="fedavg", model=net, data=clients(), **own).config())
    executor, experiment = InlineExecutor(setup.context, setup.weights), setup.experiment
    before, state = executor.worker.checksum(), experiment.server.start(setup.start)
    attributes = [dict(vars(module)) for module in executor.worker.model.net.modules()]
    for round in range(2):
        state = experiment.server.round(state, make_cohort(experiment, executor, round), experiment.local)
        assert executor.worker.checksum() == before
    for held, module in zip(attributes, executor.worker.model.net.modules(), strict=True):
        assert all(vars(module)[name] is value for name, value in held.items() if name != "training")


@pytest.mark.parametrize("net", [Teacher, Average, Counts, Bank, Norm, Plain])
def test_the_network_of_the_user_stays_as_it_is_and_runs_repeat(net):
    own = net()
    before, attributes = copy.deepcopy(own.state_dict()), {k: copy.deepcopy(v) for k, v in vars(own).items()}
    experiment = rayfed.Experiment(
        method="fedavg", tuning="full", model=own, data=clients(), rounds=2, cluster="inline", train=RATE
    )
    digests = set()
    for _ in range(2):
        done = experiment.run(quiet=True)
        digests.add(done.sha256)
        with torch.no_grad():
            for parameter in done.model().parameters():
                parameter.zero_()
    assert len(digests) == 1
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in before.items())
    assert attributes.keys() == vars(own).keys()


def test_a_function_that_returns_the_network_of_the_user_changes_nothing_in_it():
    own = Plain()
    before = copy.deepcopy(own.state_dict())
    for make in (lambda: own, lambda: nn.Sequential(own, nn.Linear(3, 3))):
        done = run(make)
        with torch.no_grad():
            for parameter in done.model().parameters():
                parameter.zero_()
        assert all(torch.equal(value, own.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("net", [NoStatistics, Centre, Gated])
@pytest.mark.parametrize("tuning", [rayfed.LoRA(rank=2, targets=["a"]), "bitfit"])
def test_clients_whose_rows_would_mix_are_run_one_by_one(net, tuning):
    data = clients(sizes=(12,) * 16)
    few = {"batch_size": 4, "optimizer": "sgd", "lr": 0.001}
    one, auto = (run(net(), data, tuning=tuning, group=group, **few) for group in (1, "auto"))
    assert one.sha256 == auto.sha256
    assert one.clients.loss.tolist() == auto.clients.loss.tolist()


def test_parts_of_a_batch_are_refused_where_rows_mix_or_tensors_move():
    for net, why in ((Centre, "layers that look at all rows"), (Counts, "tensors that each pass moves")):
        with pytest.raises(ConfigError, match=f"train.micro_batch: 2 cannot be used with {why}"):
            run(net(), micro_batch=2)


def test_a_batch_of_one_example_is_refused_where_the_network_cannot_train_with_it():
    data = clients(sizes=(10, 33))
    with pytest.raises(ConfigError, match=r"batch of one example to client 'c1-h1', which has 33.*drop_last"):
        run(Norm(), data, batch_size=32)
    run(Norm(), data, batch_size=32, drop_last=True)
    run(Plain(), data, batch_size=32)


def test_threads_of_a_process_do_not_share_random_numbers():
    class Dropped(Own):
        def middle(self, h):
            return nn.functional.dropout(h, 0.5, self.training)

    nets = [Dropped() for _ in range(4)]  # here, because a constructor draws from the stream of the process
    alone = run(nets[0], rounds=6, batch_size=8).sha256
    others: list[str] = []
    threads = [
        threading.Thread(target=lambda net=net: others.append(run(net, rounds=6, batch_size=8).sha256))
        for net in nets[1:]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert others == [alone] * 3


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    layers=st.lists(
        st.sampled_from(
            ["linear", "norm", "no_affine", "cumulative", "dropout", "relu_", "average", "frozen"]
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_drawn_networks_with_one_client_train_as_in_plain_pytorch(layers, seed):
    """One client, one batch, one round: the random numbers of a call are those of its name."""
    made = {
        "linear": lambda: nn.Linear(6, 6),
        "norm": lambda: nn.BatchNorm1d(6),
        "no_affine": lambda: nn.BatchNorm1d(6, affine=False),
        "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
        "dropout": lambda: nn.Dropout(0.5),
        "relu_": lambda: nn.LeakyReLU(0.5, inplace=True),
        "average": lambda: _MovingMean(6),
        "frozen": lambda: nn.Linear(6, 6).requires_grad_(False),
    }
    torch.manual_seed(seed)
    net = nn.Sequential(*(made[layer]() for layer in layers), nn.Linear(6, 3))
    data = clients(sizes=(24,))
    x, y = (torch.tensor(part) for part in data["h0"]["train"])
    plain = copy.deepcopy(net).train()
    live = [p for p in plain.parameters() if p.requires_grad]
    with rayfed.seeds.use_seed(rayfed.seeds.derive(0, "fit", 0, "c0-h0")) as generator:
        for _ in range(2):
            order = torch.randperm(24, generator=generator)
            loss = nn.functional.cross_entropy(plain(x[order].clone()), y[order])
            for parameter, gradient in zip(live, torch.autograd.grad(loss, live), strict=True):
                parameter.data -= 0.1 * gradient
    done = run(net, data, rounds=1)
    ours = done.model().state_dict()
    for name, value in plain.state_dict().items():
        if value.is_floating_point():
            near(ours[name], value, 500, max(1.0, float(value.abs().max())))


class _MovingMean(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


def test_a_network_of_which_nothing_is_known_keeps_the_rules_of_libraries():
    model = apply_tuning(fit(network_of(register(Norm())), torch.randn(2, 6), 0).build(3, 0), Full(), 0)
    assert model.behaviour is None
    assert model.tensors()["n.running_mean"].is_trained
    assert not model.note(Behaviour()).tensors()["n.running_mean"].is_trained
