"""Injected faults: who is there, who drops out, how long a round takes, with numbers worked out by hand."""

import re
import shlex
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from rayfed.client_facts import ClientTable
from rayfed.config.schema import load_config
from rayfed.engine.loop import draw_cohort, run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.cohort import ClientInfo
from rayfed.federation.params import digest
from rayfed.federation.train_config import TrainConfig
from rayfed.heterogeneity.faults import FaultsConfig, plan_faults
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import final_table
from rayfed.sampling import one_per_domain
from rayfed.types import Broadcast, ServerState
from tests.conftest import ROOT, SMALL

DOMAINS = {f"c{i}": "ab"[i // 3] for i in range(6)}
CLIENTS = ClientTable.of({cid: ClientInfo(domain=d, num_examples=50) for cid, d in DOMAINS.items()})


def work(examples):
    return 2 * examples


ROUNDS = range(2000)


def plan(seed=0, **config):
    return plan_faults(FaultsConfig(**config), CLIENTS, work, ("a", "b", "elsewhere"), seed)


def setup_of(cache, *overrides):
    small = [o for o in SMALL if not o.startswith("tuning.")]  # a method brings its own scheme
    return prepared(load_config([*small, f"data.cache={cache}", "cluster=inline", *overrides]))


def rounds_of(setup, **changes):
    experiment = replace(setup.experiment, **changes)
    return list(run_rounds(experiment, InlineExecutor(setup.context, setup.weights), setup.start))


def test_nothing_by_default():
    assert plan() is None


def test_frequencies_are_those_of_the_tiers():
    config = {"tiers": {"a": "good", "b": "bad"}, "availability": {"good": 1, "bad": 0.25}, "dropout": 0.1}
    faults = plan(**config)
    there = {cid: sum(faults.is_available(r, cid) for r in ROUNDS) for cid in DOMAINS}
    assert [there[cid] for cid in ("c0", "c1", "c2")] == [2000] * 3
    assert all(420 <= there[cid] <= 580 for cid in ("c3", "c4", "c5"))  # 500 expected, deviation 19
    for cid in DOMAINS:
        assert 145 <= sum(faults.drops_out(r, cid) for r in ROUNDS) <= 255  # 200 expected, deviation 13


def test_draws_depend_on_seed_round_and_client_only():
    one, other = plan(dropout=0.5), plan(dropout={"x": 0.5, "y": 0.5}, tiers={"x": 1, "y": 2})
    seen = [one.drops_out(r, "c1") for r in range(200)]
    assert seen == [other.drops_out(r, "c1") for r in reversed(range(200))][::-1]
    assert seen != [one.drops_out(r, "c2") for r in range(200)]
    assert seen != [plan(seed=1, dropout=0.5).drops_out(r, "c1") for r in range(200)]
    assert not any(plan(dropout=0.0, availability=0.5).drops_out(r, "c1") for r in range(50))
    assert all(plan(dropout=1.0).drops_out(r, "c1") for r in range(50))


def test_tiers_by_share_have_exact_sizes_and_by_name_the_client_wins():
    speeds = [
        plan(seed, tiers={"x": 1, "y": 2}, speed={"x": 3, "y": 1}, seconds_per_example=1) for seed in range(9)
    ]
    found = [tuple(p.speed for p in faults.profiles.values()) for faults in speeds]
    assert all(sorted(f) == [1] * 4 + [3] * 2 for f in found)
    assert len(set(found)) > 1
    named = plan(tiers={"a": "x", "b": "x", "c4": "y", "elsewhere": "x"}, dropout={"x": 0, "y": 1})
    assert [cid for cid in DOMAINS if named.drops_out(0, cid)] == ["c4"]


@pytest.mark.parametrize(
    ("train", "num", "steps", "examples"),
    [
        (TrainConfig(batch_size=4, epochs=3), 10, 9, 30),
        (TrainConfig(batch_size=4, local_steps=7), 10, 7, 2 * 10 + 4),
        (TrainConfig(batch_size=4, epochs=3, max_steps=2), 10, 2, 8),
        (TrainConfig(batch_size=4), 1, 1, 1),
    ],
)
def test_work_is_the_examples_of_all_batches(train, num, steps, examples):
    assert (train.steps(num), train.examples(num)) == (steps, examples)


def test_seconds_of_a_visit():
    """100 examples of 0.1 s, half of the blocks, speed 2: 2.5 s; 80 bytes down, 60 up, 10 a second: 14 s."""
    faults = plan(speed=2, bandwidth=10, seconds_per_example=0.1)
    params = {"head.x": torch.zeros(10), "blocks.0.x": torch.zeros(5), "blocks.3.x": torch.zeros(99)}
    params["blocks.0.q.lora_R"] = torch.zeros(5)  # comes down only
    sent = Broadcast(round=0, params=params, blocks=(0, 1))
    assert sent.num_bytes() == 80
    assert faults.seconds("c0", sent, 0.5, trains=True) == pytest.approx(2.5 + 14)
    assert faults.seconds("c0", sent, 0.5, trains=False) == pytest.approx(8)
    assert plan(dropout=0.5).seconds("c0", sent, 0.5, trains=True) == 0


def test_an_exchange_lasts_until_the_last_answer_or_the_deadline():
    faults, patient = plan(seconds_per_example=1, deadline=5.0), plan(seconds_per_example=1)
    seconds = {"c0": 2.0, "c1": 4.0, "c2": 9.0}
    assert faults.cause(0, "c1", 4.0) == ""
    assert faults.cause(0, "c2", 9.0) == "deadline"
    assert faults.cause(0, "c2", 5.0) == ""
    assert faults.duration(seconds, ["c0", "c1"]) == 5.0  # it waits for c2, in vain
    assert patient.duration(seconds, ["c0", "c1"]) == 4.0
    assert patient.duration(seconds, ["c0", "c1", "c2"]) == 9.0
    assert patient.duration(seconds, []) == 0.0
    assert faults.duration({"c0": 2.0}, ["c0"]) == 2.0


def drawn_in(experiment, round):
    return draw_cohort(experiment, None, ServerState(round=round, params={})).ids


def test_only_those_available_are_drawn(cache):
    setup = setup_of(cache, "clients_per_round=2", "faults.availability=0.5")
    faults, ids = setup.experiment.faults, list(setup.experiment.clients)
    for r in range(60):
        there = [cid for cid in ids if faults.is_available(r, cid)]
        drawn = drawn_in(setup.experiment, r)
        assert set(drawn) <= set(there)
        assert len(drawn) == min(2, len(there))
    one_each = replace(setup.experiment, sampling=one_per_domain.draw)
    assert any(len(drawn_in(one_each, r)) < len(setup.dataset.domains) for r in range(20))
    certain = replace(setup.experiment, faults=plan_faults(FaultsConfig(dropout=0.5), CLIENTS, work, (), 0))
    certain = replace(certain, clients=CLIENTS)
    assert [drawn_in(certain, r) for r in range(9)] == [
        drawn_in(replace(certain, faults=None), r) for r in range(9)
    ]


@pytest.mark.parametrize("fault", ["faults.dropout=1", "faults.availability=0"])
def test_a_round_without_anybody_changes_nothing_but_is_counted(small, fault):
    result = small(fault, "faults.seconds_per_example=0.5", "faults.deadline=100")
    assert result.history["round"].tolist() == [1, 2]
    assert result.history["accuracy"].nunique() == 1
    gone = 5 if "dropout" in fault else 0
    assert result.history["missing"].tolist() == [gone] * 2
    assert result.history["virtual_time"].tolist() == ([100, 200] if gone else [0, 0])
    start = prepared(load_config([], result.path / "config.yaml")).start
    assert result.sha256 == digest(start)


def test_the_virtual_clock_of_a_run(small):
    """One speed by domain: 0.1 s an example, and the slowest client is as late as its examples say."""
    clock = ("faults.seconds_per_example=0.1", "faults.bandwidth=1e6", "data.partition.scheme=by_domain")
    result = small(
        *clock,
        "faults.tiers={fast: 3, slow: 2}",
        "faults.speed={fast: 2, slow: 0.5}",
        "rounds=3",
        "figures=true",
    )
    faults = prepared(load_config([], result.path / "config.yaml")).experiment.faults
    bytes_ = pq.read_table(result.path / "transfers.parquet").to_pandas()
    for _, one in bytes_.groupby("round"):
        visits = [
            0.1 * faults.work[row.client] / faults.profiles[row.client].speed + (row.down + row.up) / 1e6
            for row in one.itertuples()
        ]
        number = one["round"].iloc[0] - 1
        assert result.history["virtual_seconds"][number] == pytest.approx(max(visits))
    assert result.history["virtual_time"].tolist() == result.history["virtual_seconds"].cumsum().tolist()
    assert (result.path / "figures" / "time_to_accuracy.png").exists()
    assert final_table(RecordedRun(result.path)).notes[-1].startswith("virtual time")


def test_the_slow_are_dropped_at_the_deadline_and_the_table_says_so(small):
    common = (
        "faults.seconds_per_example=1",
        "faults.tiers={fast: 3, slow: 2}",
        "faults.speed={fast: 1e6, slow: 1}",
    )
    result = small(*common, "faults.deadline=0.5")
    assert result.history["missing"].tolist() == [2, 2]
    assert result.history["virtual_time"].tolist() == [0.5, 1.0]
    table = final_table(RecordedRun(result.path))
    assert table.notes[-2:] == (
        "missing: 4 client visits over the run, with 10 clients drawn",
        "virtual time 1.0 s",
    )
    gone = pq.read_table(result.path / "missing.parquet").to_pylist()
    assert {row["cause"] for row in gone} == {"deadline"}
    assert len(gone) == 4


def test_the_table_says_that_nobody_ever_answered(small):
    table = final_table(RecordedRun(small("faults.dropout=1").path))
    assert any(
        note.endswith("no client answered in any round, so nothing was trained") for note in table.notes
    )


def test_it_goes_on_from_a_state_as_if_it_had_never_stopped(cache):
    overrides = (
        "faults.dropout=0.3",
        "faults.availability=0.8",
        "faults.seconds_per_example=0.07",
        "rounds=4",
    )
    setup = setup_of(cache, *overrides, "evaluation.every=0")
    whole = rounds_of(setup)
    executor = InlineExecutor(setup.context, setup.weights)
    rest = list(run_rounds(setup.experiment, executor, setup.start, state=whole[1].state))
    assert digest(rest[-1].state.params) == digest(whole[-1].state.params)
    same = ("missing", "virtual_seconds", "virtual_time", "clients")
    assert [[d.row[k] for k in same] for d in rest] == [[d.row[k] for k in same] for d in whole[2:]]


@pytest.mark.ray
def test_the_same_on_actors(cache, pool_of_two):
    faults = ("faults.dropout=0.3", "faults.availability=0.8", "faults.seconds_per_example=0.07")
    setup = setup_of(cache, *faults, "faults.bandwidth=1e5", "rounds=3")
    here = rounds_of(setup)
    there = list(run_rounds(setup.experiment, pool_of_two(setup), setup.start))
    for a, b in zip(here, there, strict=True):
        assert digest(a.state.params) == digest(b.state.params)
        assert a.ledger == b.ledger
    assert sum(done.row["missing"] for done in here)


BAD = {
    "faults.dropout=1.5": ["faults.dropout", "1.5"],
    "faults.availability=-0.1": ["faults.availability", "-0.1"],
    "faults.dropout={slow: 0.5}": ["faults.dropout", "faults.tiers"],
    "faults.tiers={fast: 1} faults.dropout={slow: 0.5}": ["faults.dropout", "'slow' does not exist"],
    "faults.tiers={fast: 1, slow: 1} faults.dropout={slow: 0.5}": ["faults.dropout", "'fast' is missing"],
    "faults.tiers={fast: -1, slow: 2}": ["faults.tiers", "not negative"],
    "faults.tiers={a: fast}": ["faults.tiers", "'c3' has no tier"],
    "faults.tiers={nowhere: fast}": ["faults.tiers", "'nowhere' does not exist"],
    "faults.speed=2": ["faults.speed", "faults.seconds_per_example"],
    "faults.deadline=2": ["faults.deadline", "faults.seconds_per_example"],
    "faults.deadline=.inf faults.seconds_per_example=1": ["faults.deadline", "a finite number"],
    "faults.speed=.inf faults.seconds_per_example=1": ["faults.speed", "a finite number"],
    "faults.speed=0 faults.seconds_per_example=1": ["faults.speed", "greater than 0"],
    "faults.drop=0.1": ["faults.drop", "did you mean 'dropout'"],
    "faults=0.1": ["faults", "0.1"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_name_key_and_value(case):
    overrides = [f"faults{part}" for part in case.split("faults") if part]
    overrides = [text.strip() for text in overrides]
    with pytest.raises(ConfigError) as caught:
        plan_faults(load_config(["algorithm=fedavg", *overrides]).faults, CLIENTS, work, ("a", "b"), 0)
    for word in BAD[case]:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_commands_of_the_documentation_inject_faults():
    text = (ROOT / "docs" / "realism.md").read_text().partition("## Clients that hold")[0]
    commands = re.findall(r"(?:-m rayfed\.|rayfed )run (.*)", re.sub(r"\\\n\s*", "", text))
    assert len(commands) > 4
    for line in commands:
        assert load_config(shlex.split(line, comments=True)).faults != FaultsConfig()
