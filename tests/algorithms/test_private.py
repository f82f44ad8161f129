"""Privacy of every method: which tensors move tells nothing, and attacks find no more than epsilon says."""

import math
from dataclasses import replace
from functools import cache as remember
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta

from rayfed.client_facts import ClientTable
from rayfed.config.schema import build_parts, load_config
from rayfed.engine.loop import RoundPlan, close_round
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation import privacy_accountant
from rayfed.federation.cohort import ClientInfo
from rayfed.federation.local import Local
from rayfed.federation.method_registry import METHODS
from rayfed.federation.noise_and_compression import Channel, leave
from rayfed.federation.privacy_accountant import Privacy, check_private
from rayfed.federation.server import Server
from rayfed.federation.train_config import TrainConfig
from rayfed.sampling import poisson
from rayfed.testing import DOMAINS, small_setup
from rayfed.types import RESIDUAL, Update
from tests.cohorts import make_cohort
from tests.conftest import STEADY, quickly

NOISY = (
    *("channel=[{clip: 0.5},{noise: 1.0}]", "sampling=poisson", "clients_per_round=1"),
    *("server.weighting=uniform", "train.batch_norm=local", DOMAINS),
)
QUICK = ("fedavg", "fedra", "rolora")
NEEDED = {"fed_sb": ("tuning.core_start=random",)}
"""What a method needs besides, to be allowed with noise."""
ALLOWED = (
    *(
        "bgp",
        "centralized",
        "ditto",
        "fed_sb",
        "fedadagrad",
        "fedadam",
        "fedavg",
        "fedavgm",
        "fedbn",
        "fedclip",
        "feddpa",
    ),
    *(
        "fedit",
        "fedotp",
        "fedper",
        "fedpgp",
        "fedprox",
        "fedrep",
        "fedsa_lora",
        "fedsam",
        "fedtpg",
        "fedyogi",
    ),
    *("ffa_lora", "moon", "perfedavg", "pfedmma", "promptfl", "rolora"),
)
"""Methods that may be used with noise at the server."""


def noisy(name):
    """Overrides with which a method gets noise."""
    return (f"algorithm={name}", *NOISY, *NEEDED.get(name, ()))


@pytest.mark.parametrize("name", quickly(METHODS.names(), QUICK))
def test_the_tensors_that_move_do_not_depend_on_who_was_drawn(name, cache):
    """Every method with noise is refused, or moves each tensor in each round, also where nobody is drawn."""
    settings = (*noisy(name), f"data.cache={cache}")
    if name not in ALLOWED:
        with pytest.raises(ConfigError):
            small_setup(*settings)
        return
    setup = small_setup(*settings)
    executor = InlineExecutor(setup.context, setup.weights)
    experiment = setup.experiment
    state = experiment.server.start(setup.start)
    for round in range(2):
        for ids in ((), (*experiment.clients,)[:1], (*experiment.clients,)):
            cohort = replace(make_cohort(experiment, executor, round), ids=ids)
            after = advanced(experiment, replace(state, round=round), cohort)
            still = [n for n, v in after.params.items() if torch.equal(v, state.params[n])]
            assert not still, f"round {round + 1} of {ids or 'nobody'} leaves {still[0]} as it was"
        state = after


IN_EXTRA = ("fedkseed", "lora_a2")
"""Methods whose clients send trained values in `extra` of their answers."""


@pytest.mark.parametrize("name", quickly(METHODS.names(), (*QUICK, *IN_EXTRA)))
def test_what_moves_was_in_an_answer_or_the_method_says_where_it_was(name, cache):
    """The channel and attacks change `params` of answers; trained values elsewhere pass as they are."""
    several = "rounds=4"  # after the last round of its first stage SLoRA makes other tensors of those sent
    setup = small_setup(
        f"algorithm={name}", DOMAINS, several, "train.batch_norm=local", f"data.cache={cache}"
    )
    executor = Watched(setup.context, setup.weights)
    experiment, state = setup.experiment, setup.experiment.server.start(setup.start)
    after = experiment.server.round(state, make_cohort(experiment, executor, 0), experiment.local)
    moved = {n for n, v in after.params.items() if n in state.params and not torch.equal(v, state.params[n])}
    hidden = {n for n in moved - executor.seen if not n.endswith(RESIDUAL)}
    assert bool(hidden) == (name in IN_EXTRA) == experiment.local.trained_in_extra, hidden


class Watched(InlineExecutor):
    """Runs calls in this process; `seen` has the names of all tensors in `params` of answers."""

    def __init__(self, *context):
        super().__init__(*context)
        self.seen = set()

    def map(self, calls):
        answers = super().map(calls)
        self.seen |= {name for answer in answers if answer for name in answer.params}
        return answers


@pytest.mark.parametrize("name", IN_EXTRA)
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("channel=[fp16]",), "channel"),
        (("channel=[{clip: 1.0}]",), "channel"),
        (("channel=[{clip: 1.0},{noise: 1.0}]", "privacy.noise_at=client"), "channel"),
        (("faults.attack=noise",), "faults.attack"),
        (("faults.tiers={a: 1, b: 1}", "faults.attack={a: none, b: sign_flip}"), "faults.attack"),
    ],
)
def test_what_would_not_change_their_answers_is_refused_in_one_line(name, settings, key, cache):
    with pytest.raises(ConfigError, match=f"^{key}: .*in another form; ") as caught:
        small_setup(f"algorithm={name}", *settings, DOMAINS, f"data.cache={cache}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", IN_EXTRA)
def test_wrong_labels_reach_what_they_send(name, cache):
    """An attack on labels is one on training, so that it needs no change of the answers."""
    assert small_setup(f"algorithm={name}", "faults.attack=labels", DOMAINS, f"data.cache={cache}")


def advanced(experiment, state, cohort):
    """The state after a round of these clients."""
    after = experiment.server.round(state, cohort, experiment.local) if cohort.ids else None
    return close_round(experiment, state, cohort, after)


CLIENTS = ClientTable.of({cid: ClientInfo(domain="d", num_examples=1) for cid in ("a", "b", "target")})
WITHOUT = ClientTable.of({cid: CLIENTS[cid] for cid in ("a", "b")})
NAMES = ("l.lora_A", "l.lora_B", "head.weight")
START = {name: torch.zeros(2) for name in NAMES}
TRIALS = 800
DELTA = 0.02
SURE = 1e-4
"""Probability with which a bound on a probability may be wrong."""


class Canaries:
    """An executor whose target answers with a large change of one entry, and whose others change nothing.

    Args:
        channel: Channel of the experiment.
        names: Names of the tensors that a client sends in even and in odd rounds.
    """

    def __init__(self, channel, names):
        self.channel = channel
        self.names = names

    def map(self, calls):
        return [self._answer(call) for call in calls]

    def _answer(self, call):
        held = {name: call.sent.params[name] for name in self.names[call.sent.round % 2]}
        if call.client == "target":
            held["head.weight"] = held["head.weight"] + torch.tensor([100.0, 0.0])
        client = SimpleNamespace(store={}, rng=None, measure=lambda **_: None)
        params, extra = leave(self.channel, client, call.sent, held, {})
        return Update(client=call.client, params=params, num_examples=1, extra=extra)


def traces(server, channel, names, clients, rate, rounds):
    """What an attacker sees in TRIALS runs, shape (TRIALS, 2): the way of the canary, and odd rounds.

    A round is odd if it leaves some tensor as it was.
    """
    seen = np.zeros((TRIALS, 2))
    executor = Canaries(channel, names)
    for trial in range(TRIALS):
        experiment = RoundPlan(
            server=server,
            local=Local(),
            clients=clients,
            sets=(),
            seed=trial,
            rounds=rounds,
            clients_per_round=rate * len(clients),
            sampling=poisson.draw,
            capacity=dict.fromkeys(clients, 0),
            channel=replace(channel, seed=trial),
        )
        executor.channel = experiment.channel
        state = server.start(START)
        for round in range(rounds):
            cohort = make_cohort(experiment, executor, round)
            after = advanced(experiment, replace(state, round=round), cohort)
            moves = {n: after.params[n] - state.params[n] for n in NAMES}
            seen[trial, 0] += float(moves["head.weight"][0])
            seen[trial, 1] += any(not move.any() for move in moves.values())
            state = after
    return seen


def epsilon_from_below(without, with_target, delta):
    """The largest epsilon that a threshold test proves, which is chosen on one half of the runs.

    Of a mechanism that is (epsilon, delta)-private, P[test | one] <= e^epsilon P[test | other] + delta.
    Clopper-Pearson bounds of both probabilities, each wrong with probability SURE.

    Args:
        without: Values of a statistic in runs without the target, shape (n,).
        with_target: The same in runs with it.
        delta: Delta of the guarantee.
    """
    half = len(without) // 2
    found = []
    for one, other in ((with_target, without), (without, with_target)):
        for sign in (1, -1):
            tests = [
                (level, sign) for level in np.unique(np.quantile(sign * one[:half], np.arange(0, 1, 0.02)))
            ]
            best = max(tests, key=lambda test: _proves(one[:half], other[:half], *test, delta))
            found.append(_proves(one[half:], other[half:], *best, delta))
    return max(found)


def _proves(one, other, level, sign, delta):
    n = len(one)
    hits, errors = int((sign * one >= level).sum()), int((sign * other >= level).sum())
    least = beta.ppf(SURE, hits, n - hits + 1) if hits else 0.0
    most = beta.ppf(1 - SURE, errors + 1, n - errors) if errors < n else 1.0
    return math.log((least - delta) / most) if least > delta else -math.inf


@remember
def attack(server, channel, names, rate, rounds):
    """The largest epsilon that an attack by the canary or by odd rounds proves."""
    tables = (WITHOUT, CLIENTS)
    without, with_target = (traces(server, channel, names, t, rate, rounds) for t in tables)
    return max(epsilon_from_below(without[:, i], with_target[:, i], DELTA) for i in range(2))


def sent_in(name, cache):
    """Which of NAMES a client of a method sends in even and in odd rounds, by a call of the real method."""
    setup = small_setup(*noisy(name), f"data.cache={cache}")
    executor = InlineExecutor(setup.context, setup.weights)
    found = []
    for round in range(2):
        cohort = replace(
            make_cohort(setup.experiment, executor, round),
            ids=(*setup.experiment.clients,)[:1],
            channel=Channel(),
        )
        state = replace(setup.experiment.server.start(setup.start), round=round)
        server = setup.experiment.server
        [answer] = cohort.run(
            server.training_task(setup.experiment.local), server.send(state, cohort), tag="fit"
        )
        absent = {n.rpartition(".")[2] for n in setup.start} - {n.rpartition(".")[2] for n in answer.params}
        found.append(tuple(n for n in NAMES if n.rpartition(".")[2] not in absent))
    return tuple(found)


ONCE, OFTEN = (1.0, 1.0, 1), (1 / 3, 10.0, 8)
"""Share of clients, noise and rounds of an attack."""


@pytest.mark.parametrize(("rate", "noise", "rounds"), [ONCE, pytest.param(*OFTEN, marks=STEADY)])
@pytest.mark.parametrize("name", quickly(ALLOWED, ("rolora",)))
def test_no_attack_finds_more_than_epsilon(name, rate, noise, rounds, cache):
    channel = Channel(clip=0.5, noise=noise, expected=rate * 2)
    claimed = Privacy(noise, rate, DELTA).epsilon(rounds)
    server = build_parts(load_config([*noisy(name)])).server
    assert attack(server, channel, sent_in(name, cache), rate, rounds) <= claimed


def test_the_attack_notices_too_little_noise():
    """Otherwise the test above could not fail. For answers that leave tensors out, RoLoRA shows it."""
    server = Server(weighting="uniform")
    weak = Channel(clip=0.5, noise=0.3, expected=2.0)
    assert attack(server, weak, (NAMES, NAMES), 1.0, 1) > Privacy(1.0, 1.0, DELTA).epsilon(1)


AT_CLIENT = (
    *("channel=[{clip: 0.5},{noise: 1.0}]", "privacy.noise_at=client", "server.weighting=uniform"),
    *("train.batch_norm=local", DOMAINS),
)
"""Overrides with which a method gets noise at the client."""


class Altered(InlineExecutor):
    """Runs calls in this process, and changes what the noise of the client does not hide in their answers."""

    def map(self, calls):
        changed = []
        for place, answer in enumerate(super().map(calls)):
            metrics = {name: value * (2.0 + place) for name, value in answer.metrics.items()}
            counts = {"num_examples": answer.num_examples * (3 + place), "steps": 7 + place, "rows": place}
            changed.append(replace(answer, metrics=metrics, extra={}, **counts))
        return changed


@pytest.mark.parametrize("name", quickly(METHODS.names(), (*QUICK, "term", "median", "fednova")))
def test_with_noise_at_the_client_nothing_but_noisy_tensors_counts(name, cache):
    """Every method is refused, or has the same model whatever the clients say besides their noisy tensors."""
    settings = (f"algorithm={name}", *AT_CLIENT, *NEEDED.get(name, ()), f"data.cache={cache}")
    if name in REFUSED_AT_CLIENT:
        with pytest.raises(ConfigError) as caught:
            small_setup(*settings)
        assert "\n" not in str(caught.value)
        return
    assert changed_by_the_rest(small_setup(*settings)) == set()


def changed_by_the_rest(setup):
    """Tensors of the model that depend on what clients say besides their noisy tensors."""
    states = []
    for kind in (InlineExecutor, Altered):
        executor = kind(setup.context, setup.weights)
        experiment = setup.experiment
        state = experiment.server.start(setup.start)
        for round in range(2):
            cohort = make_cohort(experiment, executor, round)
            state = experiment.server.round(replace(state, round=round), cohort, experiment.local)
        states.append(state)
    plain, altered = states
    return {n for n, v in plain.params.items() if not torch.equal(v, altered.params[n])}


@pytest.mark.parametrize(
    ("name", "setting"), [("term", "server.t=5"), ("fedavg", "server.weighting=data_size")]
)
def test_what_clients_say_besides_counts_where_the_check_is_switched_off(name, setting, cache, monkeypatch):
    """Otherwise the test above could not fail."""
    settings = (f"algorithm={name}", *AT_CLIENT, setting, f"data.cache={cache}")
    with pytest.raises(ConfigError, match="noise"):
        small_setup(*settings)
    monkeypatch.setattr(privacy_accountant, "_check_answers", lambda server: None)
    assert changed_by_the_rest(small_setup(*settings))


REFUSED_AT_CLIENT = frozenset(
    (
        *("afl", "depthfl", "faa", "fedbuff", "feddyn", "fedgc", "fedgcr", "fedgr", "fedkseed", "fedmix"),
        *("fednova", "fedra_feddyn", "fft_gp", "ga", "grace", "harmofl", "lora_a2", "qffl", "scaffold"),
        *("term", "zero_shot"),
    )
)
"""Methods whose clients send other values than noisy tensors, or whose servers may use them."""


@pytest.mark.parametrize("weighting", ["data_size", "tokens"])
def test_weights_by_numbers_of_the_clients_are_refused_with_noise_at_the_client(weighting):
    channel = Channel(clip=0.5, noise=1.0, at_client=True)
    given = (Local(), channel, "uniform", True, TrainConfig())
    check_private(Server(weighting="uniform"), *given)
    with pytest.raises(ConfigError, match=r"^server\.weighting: .* adds no noise; set .*=uniform$"):
        check_private(Server(weighting=weighting), *given)


def test_a_subclass_of_a_private_rule_has_to_say_itself_that_it_is_private():
    from algorithms.median import MedianServer

    class ByLoss(MedianServer):
        def aggregate(self, state, cohort, updates):
            return super().aggregate(state, cohort, [min(updates, key=lambda u: u.metrics["loss"])])

    assert MedianServer.uses_sent_tensors_only()
    assert not ByLoss.uses_sent_tensors_only()
