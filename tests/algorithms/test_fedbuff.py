"""FedBuff by hand on two and three clients, its reduction to FedAvg, and what the server keeps."""

from dataclasses import replace

import pytest
import torch

from algorithms.fedbuff import FedBuff
from rayfed.client_facts import ByClient, ClientNames, ClientTable
from rayfed.engine.loop import RoundPlan, run_rounds
from rayfed.errors import ConfigError
from rayfed.federation.cohort import ClientInfo
from rayfed.federation.local import Local
from rayfed.heterogeneity.faults import Faults, Profile
from rayfed.record.checkpoint import from_file, to_bytes
from rayfed.testing import small_setup
from rayfed.types import Update, cut_to_rank

STEP = {"a": 1.0, "b": 10.0, "c": 100.0}
SECONDS = {"a": 1, "b": 3, "c": 2}


class Adds:
    """An executor whose clients answer with what they received plus their own number."""

    actors = 0

    def __init__(self):
        self.calls = []

    def map(self, calls):
        self.calls += [(c.client, c.sent.round, float(c.sent.params["w"])) for c in calls]
        return [
            Update(
                client=c.client,
                params={"w": c.sent.params["w"] + STEP[c.client], "n.running_var": torch.tensor([5.0])},
                num_examples=SECONDS[c.client],
            )
            for c in calls
        ]


def played(server, names, rounds, clock=True, state=None, dropout=0.0, together=None):
    """The executor and the rounds of these clients, all in every cohort; an example takes a second."""
    table = ClientTable.of({n: ClientInfo(domain=n, num_examples=SECONDS[n]) for n in names})
    profile = Profile(availability=1.0, dropout=dropout, speed=1.0, bandwidth=None)
    faults = Faults(
        seed=0,
        profiles=ByClient(ClientNames(names), [profile], torch.zeros(len(names), dtype=torch.long).numpy()),
        work=ByClient(ClientNames(names), [SECONDS[n] for n in names], torch.arange(len(names)).numpy()),
        seconds_per_example=1.0 if clock else None,
    )
    experiment = RoundPlan(
        server=server,
        local=Local(),
        clients=table,
        sets=(),
        seed=0,
        rounds=rounds,
        clients_per_round=together or len(names),
        evaluate_every=0,
        capacity=dict.fromkeys(names, 0),
        faults=faults,
    )
    executor = Adds()
    start = {"w": torch.zeros(1), "n.running_var": torch.ones(1)}
    return executor, list(run_rounds(experiment, executor, start, state))


def values(rounds):
    return [float(done.state.params["w"]) for done in rounds]


def test_two_clients_one_of_them_late_by_hand():
    """K = 1. Client a takes 1 s and adds 1, b takes 3 s and adds 10, and both begin with 0. The answers of a
    arrive at 1 s, 2 s and 3 s; at 3 s that of b, who began first, is taken before. By then there were two
    updates, so its change counts 1 / sqrt(3): 2 + 10 / sqrt(3), then a is one late: + 1 / sqrt(2)."""
    executor, rounds = played(FedBuff(buffer=1), ["a", "b"], 4)
    late = 2 + 10 / 3**0.5
    assert values(rounds) == pytest.approx([1, 2, late, late + 1 / 2**0.5])
    assert executor.calls == [("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 0.0), ("a", 2, 2.0)]
    assert [done.state.virtual_time for done in rounds] == [1, 2, 3, 3]
    assert [done.row["staleness_max"] for done in rounds] == [0, 0, 2, 1]
    assert rounds[2].ledger.tables["staleness"] == [{"client": "b", "version": 0, "staleness": 2}]


def test_a_buffer_of_two_with_step_size_and_no_weights():
    """K = 2, three clients: a (1 s) and c (2 s), then b (3 s, one late, full weight) and a (2 + 1 s)."""
    server = FedBuff(buffer=2, lr=0.5, staleness_power=0.0)
    executor, rounds = played(server, ["a", "b", "c"], 2)
    first = 0.5 * (1 + 100) / 2
    assert values(rounds) == pytest.approx([first, first + 0.5 * (10 + 1) / 2])
    assert [call[:2] for call in executor.calls] == [("a", 0), ("c", 0), ("a", 1), ("b", 0)]
    assert [done.row["virtual_seconds"] for done in rounds] == [2, 1]
    assert float(rounds[1].state.params["n.running_var"]) == 5.0  # a statistic is a mean, not a step


def test_the_server_keeps_the_models_that_clients_began_with_and_no_others():
    _, rounds = played(FedBuff(buffer=1), ["a", "b", "c"], 12)
    for done in rounds:
        memory = done.state.memory
        assert set(memory["versions"]) == {v["version"] for v in memory["training"]}
        assert len(memory["versions"]) == done.row["versions"] <= done.row["training"] <= 2
    assert max(done.row["versions"] for done in rounds) == 2


def test_without_a_clock_answers_arrive_in_the_order_in_which_clients_began():
    executor, rounds = played(FedBuff(buffer=1), ["a", "b"], 4, clock=False)
    names = [call[0] for call in executor.calls]
    assert sorted(names[:2]) == ["a", "b"]
    assert names[:2] == names[2:]
    assert [done.row["staleness"] for done in rounds] == [0, 1, 1, 1]


def test_a_saved_state_goes_on_to_the_same_values(tmp_path):
    _, whole = played(FedBuff(buffer=1), ["a", "b", "c"], 9)
    state = whole[4].state
    (tmp_path / "state").write_bytes(to_bytes({"params": state.params, "memory": state.memory}, "state"))
    saved = replace(state, **from_file(tmp_path / "state"))
    _, rest = played(FedBuff(buffer=1), ["a", "b", "c"], 9, state=saved)
    assert values(rest) == values(whole[5:])


def test_lost_answers_count_as_arrived_and_clients_begin_anew():
    executor, rounds = played(FedBuff(buffer=1), ["a", "b"], 3, dropout=1.0)
    assert executor.calls == []
    assert values(rounds) == [0, 0, 0]
    assert [done.row["missing"] for done in rounds] == [1, 1, 1]
    assert [done.state.virtual_time for done in rounds] == [1, 2, 3]
    assert [v["client"] for v in rounds[1].state.memory["training"]] == ["b"]


def test_fewer_clients_train_at_once_than_there_are():
    executor, rounds = played(FedBuff(buffer=1), ["a", "b", "c"], 20, together=2)
    assert all(done.row["training"] <= 1 for done in rounds)
    assert {call[0] for call in executor.calls} == {"a", "b", "c"}


def test_what_lies_beyond_the_rank_of_a_late_client_stays_zero():
    """Rank 1 of 2: the second row of A is zero at the client; the first moves by 4 / sqrt(2)."""
    state = played(FedBuff(buffer=1), ["a"], 1)[1][0].state
    now = {"x.lora_A": torch.tensor([[2.0], [7.0]])}
    sent = state.broadcast(params={"x.lora_A": torch.tensor([[1.0], [3.0]])})
    answer = Update(client="a", params=cut_to_rank({"x.lora_A": torch.tensor([[5.0], [0.0]])}, 1), rank=1)
    moved = FedBuff().rebase(replace(state, round=1, params=now), sent, answer)
    assert moved.params["x.lora_A"].flatten().tolist() == pytest.approx([2 + 4 / 2**0.5, 0])


@pytest.mark.parametrize("clock", [(), ("faults.seconds_per_example=null",)])
def test_with_a_buffer_as_large_as_the_cohort_it_is_fedavg_to_the_bit(short, clock):
    same = ("clients_per_round=3", "server.weighting=data_size", "capacity=dynamic")
    whole = short("fedbuff", "server.buffer=3", *same, *clock)
    assert whole.sha256 == short("fedavg", *same).sha256
    assert whole.history["staleness"].tolist() == [0, 0, 0]


def test_a_buffer_for_which_nobody_can_be_late_is_said_before_the_run(caplog, cache):
    """Of the five clients of the small experiment, three train at the same time."""
    small = ("algorithm=fedbuff", f"data.cache={cache}")
    small_setup(*small, "clients_per_round=3", "server.buffer=2")
    FedBuff(buffer=1).check(1)
    assert not caplog.records
    small_setup(*small, "clients_per_round=3", "server.buffer=3", "server.weighting=data_size")
    small_setup(*small)
    first, default = (record.getMessage() for record in caplog.records)
    assert first.startswith("server.buffer=3 is not below the 3 clients of a round: no answer is late")
    assert "FedAvg with server.weighting=data_size; set a smaller one, such as server.buffer=2" in first
    assert default.startswith("server.buffer=10 is not below the 5 clients")
    assert default.endswith("server.weighting=uniform; set a smaller one, such as server.buffer=3")


def test_another_rule_for_lora_factors_is_refused():
    with pytest.raises(ConfigError, match=r"server.lora_agg: 'product_svd' has no effect"):
        FedBuff(lora_agg="product_svd")
