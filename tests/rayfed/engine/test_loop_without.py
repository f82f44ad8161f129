"""The final model is scored again with the trained tensors of each kind put back to their start values."""

import json
from dataclasses import replace

import pytest
import torch

import rayfed
from rayfed.engine.loop import run_rounds, score_global, score_without
from rayfed.executors.inline import InlineExecutor
from rayfed.record.readers import WITHOUT
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.comparison import table_of_methods
from rayfed.report.final_table import final_table
from rayfed.resume import main
from rayfed.testing import small_setup
from tests.cohorts import make_cohort
from tests.conftest import SMALL

ON = ("evaluation.without_parts=true", "train.optimizer=adamw", "train.lr=0.05", "rounds=2")


def played(*overrides):
    """The setup, the state after its rounds, the executor after them, and the scores without each kind."""
    setup = small_setup(*ON, *overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    state = list(run_rounds(setup.experiment, executor, setup.start))[-1].state
    return setup, state, score_without(setup.experiment, executor, state)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("tuning=lora",), {"adapters", "head"}),
        (("tuning=ia3",), {"adapters", "head"}),
        (("tuning=adapter",), {"adapters", "head"}),
        (("tuning=bitfit",), {"adapters", "head"}),
        (("tuning=ssf",), {"adapters", "head"}),
        (("tuning=visual_prompt",), {"adapters", "head"}),
        (("tuning=head",), {"head"}),
        (("tuning=full",), set()),
        (("tuning=bitfit", "tuning.train_head=false"), {"adapters"}),
        (("tuning=text_prompt", "model=clip_mini"), {"adapters"}),
    ],
)
def test_the_kinds_of_every_tuning_share_its_tensors_among_them(overrides, expected):
    parts = small_setup("algorithm=fedavg", *ON, *overrides)
    found = parts.experiment.parts
    assert set(found) == expected
    names = [name for own in found.values() for name in own]
    assert sorted(names) == sorted(parts.start if expected else ())
    for own in found.values():
        assert all(torch.equal(value, parts.start[name]) for name, value in own.items())
    assert all(name.startswith("head.") for name in found.get("head", ()))
    assert not any(name.startswith("head.") for name in found.get("adapters", ()))


def test_each_score_is_that_of_the_final_model_with_these_tensors_exchanged():
    setup, state, found = played("algorithm=fedavg", "tuning=lora")
    for kind in ("adapters", "head"):
        back = {n: v for n, v in setup.start.items() if n.startswith("head.") == (kind == "head")}
        executor = InlineExecutor(setup.context, setup.weights)
        cohort = make_cohort(setup.experiment, executor, state.round)
        scores = score_global(setup.experiment, cohort, replace(state, params={**state.params, **back}))
        assert found[kind]["by_domain"] == {name: one.value for name, one in scores.domains.items()}
    assert found["adapters"]["by_domain"] != found["head"]["by_domain"]


def test_what_stays_at_the_clients_is_put_back_there_and_kept():
    setup, state, found = played("algorithm=fedavg", "local.stays=[head]", "tuning=lora")
    assert not any(name.startswith("head.") for name in state.params)
    assert set(found) == {"adapters", "head"}
    executor = InlineExecutor(setup.context, setup.weights)
    last = list(run_rounds(setup.experiment, executor, setup.start))[-1]
    fresh = InlineExecutor(setup.context, setup.weights)  # its clients have kept no head
    again = score_without(setup.experiment, fresh, last.state)
    assert score_without(setup.experiment, executor, last.state) == found
    assert again["head"] == found["head"]
    assert again["adapters"] != found["adapters"]
    assert score_without(setup.experiment, executor, last.state) == found  # the first time changed nothing


def test_a_run_is_scored_again_only_where_this_is_cheap_unless_asked_for():
    assert small_setup("algorithm=fedavg", "rounds=1").experiment.parts is None
    assert small_setup("algorithm=fedavg", "rounds=200").experiment.parts is not None
    assert (
        small_setup("algorithm=fedavg", "rounds=200", "evaluation.without_parts=false").experiment.parts
        is None
    )
    assert small_setup("algorithm=fedavg", *ON, "evaluation.every=0").experiment.parts is None


def test_columns_are_the_same_after_resume_and_change_no_tensor(small):
    options = ("algorithm=fedavg", *ON)
    whole, run, plain = (
        small(*options),
        small(*options, "rounds=1"),
        small(*options, "evaluation.without_parts=false"),
    )
    first = (run.path / WITHOUT).read_bytes()
    assert main([str(run.path), "rounds=+1", "--quiet"]) == 0
    assert (run.path / WITHOUT).read_bytes() == (whole.path / WITHOUT).read_bytes() != first
    assert not (plain.path / WITHOUT).exists()
    assert plain.sha256 == whole.sha256
    table = final_table(RecordedRun(whole.path))
    assert table.columns[-2:] == ("without_adapters", "without_head")
    assert final_table(RecordedRun(run.path)).rows == table.rows
    assert final_table(RecordedRun(plain.path)).columns == table.columns[:-2]
    found = json.loads((whole.path / WITHOUT).read_text())
    shown = {row[0]: row[-2:] for row in table.rows}
    for domain, value in found["adapters"]["by_domain"].items():
        assert shown[domain][0] == f"{100 * value:.1f}"
    (whole.path / "model" / "params.safetensors").unlink()
    (whole.path / WITHOUT).unlink()
    assert main([str(whole.path), "--quiet"]) == 0
    assert json.loads((whole.path / WITHOUT).read_text()) == found
    assert RecordedRun.opened(whole.path).without == {kind: one["domains"] for kind, one in found.items()}


def test_all_of_a_network_has_no_columns_and_a_note_says_why(cache, tmp_path):
    options = [o for o in SMALL if not o.startswith("tuning.")]
    path = tmp_path / "run"
    rayfed.simulate([*options, *ON, "tuning=full", "cluster=inline", f"data.cache={cache}", f"output={path}"])
    table = final_table(RecordedRun(path))
    assert "without_adapters" not in table.columns
    why = "empty, because the whole network is what is trained"
    assert f"without_adapters, without_head: {why}" in table.notes


def test_a_comparison_says_what_the_adapters_add_and_that_one_seed_tells_nothing(small):
    scores, added = (0.70, 0.72), 0.05
    path = small("algorithm=fedavg", "compare=fedprox", *ON).path
    folders = [path / "cells" / f"{name}-seed0" for name in ("fedavg", "fedprox")]
    for folder, score in zip(folders, scores, strict=True):
        history = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        history[-1]["accuracy_domain"] = score
        (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
        found = json.loads((folder / WITHOUT).read_text())
        found["adapters"]["domains"] = score - added
        (folder / WITHOUT).write_text(json.dumps(found))
    table = table_of_methods([*map(RecordedRun, folders)])
    place = table.columns.index("without_adapters")
    assert table.columns[place + 1] == "without_head"
    assert [row[place] for row in table.rows] == [f"{100 * (score - added):.1f}" for score in scores]
    words = "the adapters add 5.0 ± 0.0 points (mean and deviation over the rows)"
    apart = "; the rows differ by up to 2.0 points, without adapters by up to 2.0"
    assert words + apart in table.notes
    assert any(note.startswith("one seed: no difference between methods") for note in table.notes)
