"""Traces of devices, with numbers worked out by hand."""

import datetime
import pickle

import pytest

from rayfed.client_facts import ClientInfo, ClientTable
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.heterogeneity.faults import FaultsConfig, plan_faults
from rayfed.heterogeneity.traces import read_devices, read_sessions
from rayfed.testing import DOMAINS, small_setup
from rayfed.types import Broadcast

TABLE = ClientTable.of({cid: ClientInfo(domain="d", num_examples=10) for cid in ("ann", "bob", "cem")})
SPEEDS = {1: {"computation": 20.0, "communication": 8.0}, 2: {"computation": 80.0, "communication": 16.0},
          7: {"computation": 40.0, "communication": 80.0}}  # fmt: skip
TIMES = {"a": {"active": [10, 50], "inactive": [20, 60], "finish_time": 100, "duration": 20, "model": "x"},
         "b": {"active": [90], "inactive": [95], "finish_time": 100}}  # fmt: skip


def saved(path, content):
    path.write_bytes(pickle.dumps(content))
    return str(path)


def test_devices_of_fedscale_are_dealt_by_the_seed(tmp_path):
    file = saved(tmp_path / "client_device_capacity", SPEEDS)
    devices = read_devices(file, TABLE, 0)
    assert devices.speed.tolist() == [2.0, 0.5, 1.0]  # the median device takes 40 ms
    assert devices.bandwidth.tolist() == [1000.0, 2000.0, 10_000.0]  # 8 kilobits are 1,000 bytes
    dealt = [[read_devices(file, TABLE, seed).of(cid) for cid in TABLE] for seed in range(20)]
    assert dealt[3] == [read_devices(file, TABLE, 3).of(cid) for cid in TABLE]
    assert {pair for own in dealt for pair in own} == {(2.0, 1000.0), (0.5, 2000.0), (1.0, 10_000.0)}


def test_a_table_may_name_the_clients(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("client,computation,communication\nbob,10,8\nann,20,8\ncem,40,16\n")
    devices = read_devices(str(file), TABLE, 0)
    assert [devices.of(cid)[0] for cid in ("ann", "bob", "cem")] == [1.0, 2.0, 0.5]
    file.write_text("client,computation,communication\nbob,10,8\nann,20,8\n")
    with pytest.raises(ConfigError, match="not 'cem'"):
        read_devices(str(file), TABLE, 0)


def test_speed_and_bandwidth_of_a_device_decide_the_time_of_a_visit(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("client,computation,communication\nbob,10,8\nann,20,8\ncem,40,16\n")
    config = FaultsConfig(devices=str(file), seconds_per_example=3.0)
    faults = plan_faults(config, TABLE, lambda n: 2 * n, (), 0)
    sent = Broadcast(round=0, params={}, frozen_bytes=500)
    assert faults.seconds("bob", sent, 1.0, True) == 20 * 3.0 / 2 + 500 / 1000
    assert faults.seconds("cem", sent, 0.5, True) == 20 * 0.5 * 3.0 / 0.5 + 500 / 2000
    assert faults.seconds("cem", sent, 0.5, False) == 500 / 2000


def test_sessions_repeat_and_the_next_one_is_waited_for(tmp_path):
    table = ClientTable.of({"a": TABLE["ann"], "b": TABLE["ann"]})
    sessions = read_sessions(saved(tmp_path / "behave", TIMES), table, 0)
    there = [t for t in range(0, 300, 5) if sessions.is_open("a", t)]
    assert there == [o + t for o in (0, 100, 200) for t in (10, 15, 20, 50, 55, 60)]
    assert [sessions.is_open("b", t) for t in (89, 92, 192, 196)] == [False, True, True, False]
    assert [sessions.wait(t) for t in (0, 30, 61, 195)] == [10, 20, 29, 15]


def test_a_table_of_sessions_has_one_in_a_row(tmp_path):
    file = tmp_path / "sessions.csv"
    file.write_text("client,active,inactive,finish_time\na,10,20,100\nb,90,95,100\na,50,60,100\n")
    table = ClientTable.of({"a": TABLE["ann"], "b": TABLE["ann"]})
    sessions = read_sessions(str(file), table, 0)
    assert [t for t in range(0, 100, 10) if sessions.is_open("a", t)] == [10, 20, 50, 60]
    assert sessions.is_open("b", 390)


def test_time_goes_on_in_a_round_without_clients(tmp_path):
    """Nobody before second 40, all until 45: visits of the slowest client, then a wait for the next 40."""
    trace = {f"d{i}": {"active": [40], "inactive": [45], "finish_time": 100} for i in range(2)}
    setup = small_setup(
        "algorithm=fedavg", DOMAINS, "rounds=6", "evaluation.every=0", "faults.seconds_per_example=0.25",
        "data.test=0", f"faults.sessions={saved(tmp_path / 'behave', trace)}",
    )  # fmt: skip
    work = max(setup.experiment.faults.work.different)
    done = list(run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start))
    visit = work * 0.25
    times, clients = [40.0], [0]
    while len(times) < 6:
        now = times[-1] % 100
        there = 40 <= now <= 45
        clients.append(3 if there else 0)
        times.append(times[-1] + (visit if there else (40 - now) % 100))
    assert [d.state.virtual_time for d in done] == pytest.approx(times)
    assert [d.row["clients"] for d in done] == clients
    assert clients.count(0) > 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({1: {"computation": 0, "communication": 3}}, "not above 0"),
        ({1: {"computation": 1}}, "has no 'communication'"),
        ({1: {"computation": "fast", "communication": 3}}, "no number"),
        ({}, "is empty"),
        ([1, 2], "not a trace"),
        ({1: {"computation": datetime.date(2020, 1, 1), "communication": 3}}, "datetime.date"),
    ],
)
def test_wrong_traces_are_refused(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words):
        read_devices(saved(tmp_path / "devices", content), TABLE, 0)


def test_wrong_sessions_and_keys_are_refused(tmp_path):
    file = saved(tmp_path / "behave", {1: {"active": [5], "inactive": [4], "finish_time": 9}})
    with pytest.raises(ConfigError, match="ends before it begins"):
        read_sessions(file, TABLE, 0)
    file = saved(tmp_path / "behave", {1: {"active": [5, 8], "inactive": [7], "finish_time": 9}})
    with pytest.raises(ConfigError, match="2 values of active and 1 of inactive for '1'"):
        read_sessions(file, TABLE, 0)
    with pytest.raises(ConfigError, match="cannot read"):
        read_sessions(str(tmp_path / "nothing"), TABLE, 0)
    for config, words in (
        ({"sessions": file}, "needs the virtual clock"),
        ({"devices": file, "speed": 2.0, "seconds_per_example": 1.0}, "cannot be used with faults.devices"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_faults(FaultsConfig(**config), TABLE, lambda n: n, (), 0)
