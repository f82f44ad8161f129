"""A loss or a tensor that is not finite is noted, shown, and null in every file; finite runs do not move."""

import json
import logging
import math

import pyarrow.parquet as pq
import pytest
import torch

from rayfed.engine.record_rounds import _find_nonfinite
from rayfed.errors import ClientError, NonFiniteClientError, NonFiniteError
from rayfed.evaluation.metrics import Evaluation, Round, Score
from rayfed.evaluation.nonfinite import find, sentence
from rayfed.federation.cohort import Answer, Ledger
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Method
from rayfed.federation.server import Server
from rayfed.record.trackers.tracker import scalars
from rayfed.run import main
from rayfed.terminal.console import showing
from rayfed.types import ServerState
from rayfed.user_files import to_json, without_nonfinite
from tests.conftest import SMALL
from tests.rayfed.malformed import last_wins

NAN, INF = math.nan, math.inf


def strict(text):
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_run_whose_loss_is_not_finite(tmp_path, cache, capsys, caplog):
    run = tmp_path / "run"
    place = ("cluster=inline", f"data.cache={cache}", f"output={run}")
    arguments = [*last_wins([*SMALL, "train.lr=1e9", *place]), "--json"]
    with caplog.at_level(logging.WARNING):
        assert main(arguments) == 0
    shown = [strict(line) for line in capsys.readouterr().out.splitlines()]
    rows = [strict(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    bad = [row["round"] for row in rows if row.get("nonfinite")]
    assert bad
    assert all(row["loss"] is None for row in rows if row["round"] in bad)
    assert [row["loss"] for row in shown if "round" in row] == [row["loss"] for row in rows]
    warnings = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(warnings) == len(bad)
    assert "c0-plain" in warnings[0]
    assert "train.lr" in warnings[0]
    events = pq.read_table(run / "events.parquet").to_pylist()
    assert {e["kind"] for e in events} == {"nonfinite"}
    assert {e["round"] for e in events} == set(bad)
    assert {"c0-plain", "c4-fonts"} <= {e["client"] for e in events}
    assert "not finite: " in (run / "report.md").read_text()
    strict((run / "environment.json").read_text())
    losses = [r for r in pq.read_table(run / "clients.parquet").to_pylist() if r["metric"] == "loss"]
    assert any(r["value"] is None for r in losses)


def test_raise_ends_the_run_before_the_round(tmp_path, cache, capsys):
    run = tmp_path / "run"
    place = ("cluster=inline", f"data.cache={cache}", f"output={run}")
    common = [*last_wins([*SMALL, "train.lr=1e9", *place]), "--quiet"]
    assert main([*common, "on_nonfinite=raise"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "round 2: not finite: global loss of c0-plain" in errors[0]
    assert "try a smaller train.lr" in errors[0]
    assert [strict(line)["round"] for line in (run / "rounds.jsonl").read_text().splitlines()] == [1]
    actions = {e["action"] for e in pq.read_table(run / "events.parquet").to_pylist()}
    assert actions == {"raise"}


def test_finite_runs_do_not_move(small):
    first, other = small(), small("on_nonfinite=raise")
    assert first.sha256 == other.sha256
    assert "nonfinite" not in first.history
    assert not (first.path / "events.jsonl").exists()


class NaNLocal(Local):
    def train(self, client, sent):
        update = super().train(client, sent)
        update.params["head.weight"][0, 0] = NAN
        return update


class NaNServer(Server):
    def aggregate(self, state, cohort, updates):
        after = super().aggregate(state, cohort, updates)
        after.params["head.weight"][0, 0] = INF
        return after


BROKEN_CLIENT, BROKEN_SERVER = Method(local=NaNLocal), Method(server=NaNServer)


def test_a_trained_tensor_of_a_client(small, tmp_path):
    with pytest.raises(NonFiniteClientError, match=r"head.weight is not finite.*train.lr"):
        small(f"algorithm={__name__}:BROKEN_CLIENT")
    (run,) = tmp_path.glob("run*")
    (event,) = pq.read_table(run / "events.parquet").to_pylist()
    assert (event["kind"], event["action"], event["client"]) == ("nonfinite", "raise", "c0-plain")
    assert issubclass(NonFiniteClientError, ClientError)


def test_a_global_tensor(small):
    done = small(f"algorithm={__name__}:BROKEN_SERVER", "rounds=1", "evaluation.every=0")
    events = pq.read_table(done.path / "events.parquet").to_pylist()
    assert [(e["exchange"], e["message"]) for e in events] == [("server", "tensor head.weight is not finite")]
    with pytest.raises(NonFiniteError, match=r"round 1: not finite: .*; tensor head\.weight"):
        small(f"algorithm={__name__}:BROKEN_SERVER", "on_nonfinite=raise")


def test_metrics_of_answers_are_looked_at():
    answers = [Answer("fit", "a", {"start/loss": NAN, "n": 1}), Answer("fit", "b", {"start/loss": 1.0})]
    scores = {"global": Evaluation(clients={"c": Score(value=0.5, loss=INF, num=1)}, domains={}, held_out={})}
    found = find(answers, scores, {"w": torch.ones(2)}, {})
    assert [(f.what, f.exchange, f.client) for f in found] == [
        ("start/loss", "fit", "a"),
        ("global loss", "report", "c"),
    ]
    assert sentence(found) == "not finite: start/loss, global loss of a, c"
    assert [f.what for f in find([], {}, {}, {"val_loss": NAN, "round": 1})] == ["val_loss"]
    assert find(answers[1:], {}, {"w": torch.ones(2)}, {"loss": 1.0}) == []
    domain = {"d": Score(value=0.5, loss=NAN, num=1)}
    drawn = Evaluation(clients={}, domains=domain, held_out={}, others={"d": 7})
    assert [(f.what, f.client) for f in find([], {"global": drawn}, {}, {})] == [("global loss", "d")]


def test_a_finite_round_is_passed_on_as_it_is():
    done = Round(state=ServerState(round=0, params={}), row={"round": 1, "loss": 1.0}, ledger=Ledger())
    assert _find_nonfinite(done, "raise", lambda event: pytest.fail(str(event))) == ([], done)


def test_what_readers_of_numbers_see():
    entry = {
        "row": {"round": 1, "loss": None, "accuracy": 0.5},
        "tables": {
            "clients": [
                {
                    "exchange": "report_domains",
                    "client": "a",
                    "model": "global",
                    "metric": "loss",
                    "value": None,
                }
            ]
        },
    }
    assert scalars(entry) == {"accuracy": 0.5}
    assert without_nonfinite({"a": [NAN, 1.5, {"b": -INF}], "c": "nan"}) == {
        "a": [None, 1.5, {"b": None}],
        "c": "nan",
    }
    assert to_json({"a": NAN}) == '{"a": null}'


def test_a_round_is_shown_without_a_loss(capsys):
    row = {
        "round": 1,
        "accuracy": 0.5,
        "worst_domain_accuracy": 0.1,
        "worst_domain": "a",
        "loss": None,
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": 1.0,
    }
    with showing(1) as show:
        show(row)
    assert "loss not finite" in capsys.readouterr().out


def test_a_trial_without_a_score_does_not_poison_the_search():
    from rayfed.experiment.study.trials import is_score
    from tune.mean_rows import check_objectives, mean_of

    rows = [{"round": 2, "loss": 1.0, "accuracy": 0.5}, {"round": 2, "loss": None, "accuracy": 0.5}]
    row = mean_of(rows, ["loss"])
    assert row["loss"] is None
    with pytest.raises(NonFiniteError, match="loss is not finite in round 2"):
        check_objectives(row, ["loss"])
    check_objectives(row, ["accuracy"])
    assert [is_score(v) for v in (None, NAN, INF, 0.5, 1)] == [False, False, False, True, True]
