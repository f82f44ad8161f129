"""Traces from files: what they replace, and what is wrong with them in one line."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.errors import ConfigError
from rayfed.heterogeneity.traces import read_trace
from rayfed.run import main
from rayfed.types import Broadcast
from tests.rayfed.heterogeneity.test_faults import DOMAINS, plan


def test_a_trace_replaces_what_the_tiers_say(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("round,client,available,dropout,speed\n1,c0,0,,\n2,c1,1,true,\n3,c2,,FALSE,0.5\n")
    faults = plan(trace=str(file), dropout=0.5, seconds_per_example=1.0)
    assert not faults.is_available(0, "c0")
    assert faults.is_available(1, "c1")
    assert faults.drops_out(1, "c1")
    assert not faults.drops_out(2, "c2")
    sent = [Broadcast(round=r, params={}) for r in (1, 2)]
    assert [faults.seconds("c2", s, 1.0, trains=True) for s in sent] == [100, 200]
    plain = plan(dropout=0.5)
    assert all(faults.drops_out(r, "c5") == plain.drops_out(r, "c5") for r in range(50))
    table = pa.table(
        {"round": [1, 2, 3], "client": ["c0", "c1", "c2"], "available": [False, True, None]}
        | {"dropout": [None, True, False], "speed": [None, None, 0.5]}
    )
    pq.write_table(table, tmp_path / "trace.parquet")
    assert read_trace(str(tmp_path / "trace.parquet"), DOMAINS) == faults.trace


def test_a_trace_with_speeds_needs_the_clock(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("round,client,speed\n1,c0,2\n")
    with pytest.raises(ConfigError, match=r"faults\.trace: .* speeds, .* faults\.seconds_per_example"):
        plan(trace=str(file))


TRACES = {
    "round,client\n1,c0\n": "needs one or more of the columns available, dropout, speed",
    "client,dropout\nc0,1\n": "has no column 'round'",
    "round,client,drop\n1,c0,1\n": "did you mean 'dropout'",
    "round,client,dropout\n1,c0,1\n0,c1,1\n": "line 3: round '0' is not a whole number from 1 on",
    "round,client,dropout\n1.5,c0,1\n": "line 2: round '1.5'",
    "round,client,dropout\n1,c9,1\n": "line 2: client 'c9' does not exist; the clients are c0 to c5",
    "round,client,dropout\n1,c0,maybe\n": "line 2: dropout 'maybe' is not allowed: write 1, 0, true or false",
    "round,client,speed\n1,c0,0\n": "line 2: speed '0' is not a finite number above 0",
    "round,client,speed\n1,c0,inf\n": "line 2: speed 'inf'",
    "round,client,dropout\n1,c0,1\n1,c0,0\n": "line 3: round 1 of client 'c0' is there twice",
    "round,client,dropout\n1,c0\n": "line 2: there must be 3 values",
    "": "has no column 'round'",
}


@pytest.mark.parametrize("text", TRACES)
def test_wrong_traces_name_file_line_and_value(tmp_path, text):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(str(file), list(DOMAINS))
    message = str(caught.value)
    assert TRACES[text] in message
    assert message.startswith(f"faults.trace: {str(file)!r}")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", ["trace.csv", "trace.parquet", "nothing.csv", "trace.txt", "folder.csv"])
def test_files_that_are_no_trace(tmp_path, name):
    for file in ("trace.csv", "trace.parquet", "trace.txt"):
        (tmp_path / file).write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"^faults.trace: .*") as caught:
        read_trace(str(tmp_path / name), list(DOMAINS))
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_with_a_wrong_trace_leaves_nothing(tmp_path, cache, capsys):
    (tmp_path / "trace.csv").write_text("round,client,dropout\n1,nobody,1\n")
    fixed = [f"data.cache={cache}", "cluster=inline", "algorithm=fedavg", "data.limit=24"]
    code = main([*fixed, f"faults.trace={tmp_path / 'trace.csv'}", f"output={tmp_path / 'run'}"])
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
