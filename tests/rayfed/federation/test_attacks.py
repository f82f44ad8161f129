"""Attackers: what they send, worked out by hand, and what aggregation that tolerates them makes of it."""

from dataclasses import replace

import pytest
import torch

from rayfed.data.examples import ClientData
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.attacks import with_attack
from rayfed.federation.cohort import TRAINING
from rayfed.federation.params import digest
from rayfed.federation.tensors_that_stay import keep_own
from rayfed.heterogeneity.faults import FaultsConfig, check_attack
from rayfed.testing import small_setup
from rayfed.types import Broadcast, Update
from tests.rounding import limit, near

CLIENTS = "data.partition.clients_per_domain=2"
TIERS = ("faults.tiers={honest: 2, attacker: 1}", "faults.attack={honest: none, attacker: sign_flip}")


class Answers(InlineExecutor):
    """Remembers the answers of the training exchange."""

    def __init__(self, setup):
        super().__init__(setup.context, setup.weights, None)
        self.seen = {}

    def map(self, calls):
        answers = super().map(calls)
        for call, update in zip(calls, answers, strict=True):
            if call.tag == TRAINING:
                self.seen[call.sent.round, call.client] = call.sent.params, update.params
        return answers


def played(*overrides, group=1, rounds=1):
    """Answers by round and client, the last round's row, and the digest of the final tensors."""
    setup = small_setup("algorithm=fedavg", CLIENTS, *overrides)
    executor = Answers(setup)
    experiment = replace(setup.experiment, rounds=rounds, group=group, evaluate_every=0)
    *_, last = run_rounds(experiment, executor, setup.start)
    return executor.seen, last.ledger, digest(last.state.params), setup


class FakeClient:
    """What an attack uses of a client."""

    def __init__(self, rank=None):
        self.rank = rank
        self.rng = torch.Generator().manual_seed(3)
        self.stays = frozenset()
        self.store = {}

    def to_device(self, value):
        return value


def answer(attack, scale, rank=None):
    """What an attacker sends that received 1 and 5 and would send 3 and 4, with statistics of BatchNorm."""
    sent = Broadcast(
        round=0, params={"a.lora_A": torch.full((2, 3), 1.0), "b": torch.tensor([5.0])}, rank=rank
    )
    trained = {"a.lora_A": torch.full((2, 3), 3.0), "b": torch.tensor([4.0])}
    trained["n.running_mean"] = torch.tensor([7.0])

    def task(client, sent):
        return Update(client="c", params=trained, num_examples=1, extra={"x": torch.ones(1)})

    same, (attacked,) = with_attack(task, attack, scale)
    assert same is task
    client = FakeClient(rank)
    update = task(client, sent)
    params, extra = attacked(client, sent, keep_own(update.params, client), update.extra)
    return replace(update, params=params, extra=extra)


def test_a_flipped_sign_is_the_negative_change():
    update = answer("sign_flip", 2.0)
    assert update.params["a.lora_A"].tolist() == [[-3.0] * 3] * 2  # 1 - 2 x (3 - 1)
    assert update.params["b"].tolist() == [7.0]  # 5 - 2 x (4 - 5)
    assert update.params["n.running_mean"].tolist() == [7.0]
    assert update.extra["x"].tolist() == [1.0]


def test_noise_is_added_to_what_was_received_and_stays_within_the_rank():
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 3, generator=rng), torch.randn(1, generator=rng)
    update = answer("noise", 0.5)
    assert torch.equal(update.params["a.lora_A"], 1 + noise[0] * 0.5)
    assert torch.equal(update.params["b"], 5 + noise[1] * 0.5)
    assert update.params["n.running_mean"].tolist() == [7.0]
    cut = answer("noise", 0.5, rank=1).params["a.lora_A"]
    assert torch.equal(cut, torch.stack([1 + noise[0][0] * 0.5, torch.ones(3)]))


def test_an_honest_client_runs_the_task_itself():
    def task(client, sent):
        raise NotImplementedError

    assert with_attack(task, "none", 1.0) == (task, ())


@pytest.mark.parametrize("group", [1, 3])
def test_attackers_of_a_tier_send_the_opposite_and_the_others_are_as_before(group):
    honest = played(group=group)[0]
    seen, ledger, _, setup = played(*TIERS, group=group)
    attackers = [c for c in setup.experiment.clients if setup.experiment.faults.profiles[c].attack != "none"]
    assert len(attackers) == ledger.metrics["attackers"] == len(honest) // 3 > 0
    for (round, client), (sent, params) in seen.items():
        for name, value in params.items():
            change = honest[round, client][1][name] - sent[name]
            expected = -change if client in attackers else change
            near(value - sent[name], expected, 4, size=float(sent[name].abs().max() + change.abs().max()))


def test_labels_are_changed_in_training_only(monkeypatch):
    seen = {"train": {}, "val": {}}
    batches = ClientData.batches

    def noted(data, split, *args):
        for x, y in batches(data, split, *args):
            seen[split].setdefault(data.client, []).extend(y.tolist())
            yield x, y

    monkeypatch.setattr(ClientData, "batches", noted)
    # GA scores its model on the validation images before and after the client trains, in the same visit.
    setup = small_setup("algorithm=ga", CLIENTS, "data.val=0.4", "train.epochs=1", "faults.attack=labels")
    experiment = replace(setup.experiment, rounds=1, evaluate_every=0)
    list(run_rounds(experiment, InlineExecutor(setup.context, setup.weights, None), setup.start))
    targets = setup.dataset.targets
    for client in setup.experiment.clients:
        rows = setup.context.splits[client]
        last = setup.context.num_classes - 1
        assert sorted(seen["train"][client]) == sorted(last - int(targets[r]) for r in rows["train"])
        assert sorted(seen["val"][client]) == sorted(2 * [int(targets[r]) for r in rows["val"]])


def test_a_strong_attack_spoils_the_mean_and_not_the_median():
    attack = (*TIERS[:1], "faults.attack={honest: none, attacker: noise}", "faults.attack_scale=50")
    reach = {}
    for server in ("fedavg", "median"):
        params = {}
        for name, faults in (("honest", ()), ("attacked", attack)):
            setup = small_setup("algorithm=fedavg", CLIENTS, f"server.name={server}", *faults)
            *_, last = run_rounds(replace(setup.experiment, rounds=1), Answers(setup), setup.start)
            params[name] = last.state.params
        change = [(params["attacked"][n] - params["honest"][n]).abs().max() for n in params["honest"]]
        reach[server] = float(max(change))
    assert reach["fedavg"] > 10 > 1 > reach["median"]


def test_the_channel_bounds_what_an_attacker_changes():
    seen, *_ = played(*TIERS, "faults.attack_scale=1.0e+6", "channel=[{clip: 0.5}]")
    for sent, params in seen.values():
        change = torch.cat([(v - sent[n]).flatten() for n, v in params.items()])
        size = torch.cat([v.flatten() for v in params.values()]).norm()  # each value is rounded twice
        assert change.norm() <= 0.5 + limit(1, float(size)) + limit(len(change), 0.5, torch.float64)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["faults.attack=flip"], ["faults.attack", "'flip'", "sign_flip"]),
        (["faults.attack=sign_flip", "faults.attack_scale=0"], ["faults.attack_scale", "greater than 0"]),
        (["faults.attack={attacker: noise}"], ["faults.attack", "faults.tiers"]),
        ([TIERS[0], "faults.attack={attacker: noise}"], ["faults.attack", "'honest' is missing"]),
        (["faults.attack_scale=3"], ["faults.attack_scale", "set faults.attack"]),
    ],
)
def test_bad_values_name_key_and_value(overrides, words):
    with pytest.raises(ConfigError) as caught:
        small_setup("algorithm=fedavg", *overrides)
    for word in words:
        assert word in str(caught.value)


def test_labels_need_labels():
    with pytest.raises(ConfigError, match=r"faults\.attack: 'labels' changes the labels .* sign_flip"):
        check_attack(FaultsConfig(attack="labels"), has_labels=False)
    check_attack(FaultsConfig(attack="labels"), has_labels=True)
