"""What TensorBoard reads is what the run wrote down, each step once."""

import json
import struct

import pytest
import torch

from rayfed.resume import main
from tests.rounding import unit


def events(run):
    """Scalars by (tag, step) of the one event file; fails on a step that is there twice."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (run / "tensorboard").iterdir()
    data, found, at = file.read_bytes(), {}, 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16
        for value in event.summary.value:
            assert (value.tag, event.step) not in found
            found[value.tag, event.step] = value.simple_value
    return found


def test_every_number_of_a_round_is_there_once_also_after_a_resume(small):
    run = small("rounds=3", "data.held_out=street").path
    assert {step for _, step in events(run)} == {1, 2, 3}
    assert main([str(run), "rounds=+1", "--quiet"]) == 0
    found = events(run)
    for text in (run / "rounds.jsonl").read_text().splitlines():
        row = json.loads(text)
        for name in ("accuracy", "sigma_type", "loss", "bytes_up", "seconds", "held_out_accuracy"):
            assert found[name, row["round"]] == pytest.approx(row[name], rel=unit(torch.float32))
        worst = row["worst_domain"]
        assert found[f"domain/{worst}/accuracy", row["round"]] == pytest.approx(row["worst_domain_accuracy"])
        assert found["held_out/street/accuracy", row["round"]] == pytest.approx(row["held_out_accuracy"])
    assert {step for _, step in found} == {1, 2, 3, 4}


def test_it_can_be_left_out(small):
    assert not (small("rounds=1", "tensorboard=false").path / "tensorboard").exists()
