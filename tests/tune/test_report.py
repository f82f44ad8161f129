"""The table of a sweep: its best trials, which of them tie, and a warning when scores say nothing."""

from dataclasses import replace

import pytest

from tune.experiment import Base
from tune.report import table
from tune.results import Outcome, Outcomes
from tune.sweep import make_sweep


@pytest.fixture
def swept(tmp_path):
    def make(*scores, rounds=1, objective="accuracy"):
        space = {"train.lr": {"loguniform": [0.001, 0.1]}}
        trials = tuple(
            Outcome(
                number=i,
                state="finished",
                values={"train.lr": 0.01},
                scores={"accuracy": score, "sigma_type": 0.1, "dice": 0.5},
                row={"round": rounds, "accuracy": score, "sigma_type": 0.1},
            )
            for i, score in enumerate(scores)
        )
        sweep = make_sweep({"objective": objective, "space": space})
        return Outcomes(path=tmp_path, sweep=sweep, base=Base(()), seeds=(0,), trials=trials)

    return make


def test_the_default_is_a_papers_in_a_sweep_of_ours_only(swept):
    outcomes = swept(0.1, 0.3)
    assert table(outcomes).columns[2] == "trial 0 (default)"
    papers = replace(outcomes, sweep=replace(outcomes.sweep, name="fedgcr"))
    assert table(papers).columns[2] == "trial 0 (paper's default)"


def test_the_five_best_trials_are_shown_and_the_default(swept):
    shown = table(swept(0.1, 0.3, 0.7, 0.2, 0.6, 0.5, 0.4, rounds=5))
    heads = [f"trial {n}" for n in (4, 5, 6, 1)]
    assert shown.columns == ("", "trial 2 (best)", *heads, "trial 0 (default)")
    assert shown.rows[0] == ("accuracy", "0.7", "0.6", "0.5", "0.4", "0.3", "0.1")
    assert not any("the same" in note or "warning" in note for note in shown.notes)


def test_scores_of_another_metric_are_shown_as_those_of_accuracies_are(swept):
    outcomes = swept(0.1, 0.2, objective="dice")
    row = {"round": 1, "dice": 0.5, "worst_domain_dice": 0.25, "held_out_dice": 0.75, "loss": 1.0}
    outcomes = replace(outcomes, trials=tuple(replace(trial, row=row) for trial in outcomes.trials))
    shown = [name for name, *_ in table(outcomes).rows]
    assert shown == ["dice", "worst_domain_dice", "held_out_dice", "train.lr"]


def test_trials_with_the_same_score_are_named(swept):
    shown = table(swept(0.1, 0.7, 0.1, 0.7, 0.7, 0.2, 0.3, 0.4, rounds=5))
    assert shown.columns[1:4] == ("trial 1 (best)", "trial 3", "trial 4")
    ties = [note for note in shown.notes if "the same" in note]
    assert ties == ["trials 1, 3 and 4 have the same accuracy, 0.7; the earliest of them comes first"]
    assert not any("warning" in note for note in shown.notes)


@pytest.mark.parametrize(
    ("scores", "rounds", "warned"), [((0.5, 0.5), 1, True), ((0.5, 0.5), 2, False), ((0.5, 0.4), 1, False)]
)
def test_one_round_that_cannot_tell_the_best_apart_is_warned_about(swept, scores, rounds, warned):
    notes = table(swept(*scores, rounds=rounds)).notes
    assert any("one round cannot tell the best trials apart" in note for note in notes) is warned


def test_several_objectives_show_the_front(swept):
    shown = table(swept(0.5, 0.4, 0.5, objective=["accuracy", "sigma_type"]))
    assert [column.split(" (")[0] for column in shown.columns[1:]] == ["trial 0", "trial 2"]


@pytest.mark.parametrize(
    ("lr", "end"),
    [(0.1, "0.1"), (0.085, "0.1"), (0.001, "0.001"), (0.05, None), (0.0012, "0.001"), (0.002, None)],
)
def test_a_best_value_at_an_end_of_its_range_is_said(swept, lr, end):
    """The range is logarithmic, from 0.001 to 0.1: 5 % of it are a factor of 10 ** 0.1 = 1.26."""
    outcomes = swept(0.1, 0.3, rounds=5)
    trials = (outcomes.trials[0], replace(outcomes.trials[1], values={"train.lr": lr}))
    notes = [note for note in table(replace(outcomes, trials=trials)).notes if "range" in note]
    said = f"the best train.lr, {lr:.4g}, is at the end {end} of its range, so better "
    assert notes == (
        [] if end is None else [said + "values may lie beyond: search a wider one with space.train.lr"]
    )
