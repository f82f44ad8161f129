"""The searcher: what it proposes, what it refuses, what Optuna is told, and what a crash does to it."""

import pickle

import pytest
from optuna.trial import TrialState

from rayfed.errors import ConfigError
from tune.experiment import Base
from tune.searcher import RoundAwareOptuna, load_study, make_sampler, unlock
from tune.space import read_space
from tune.sweep import SearcherConfig

SPACE = {"local.mu": {"loguniform": [0.001, 1]}, "train.lr": {"loguniform": [0.001, 0.1]}}
PAPER = {"local.mu": 0.01, "train.lr": 0.02}
BASE = Base(("algorithm=fedprox", "rounds=3"))


def make(folder, seed=0, space=SPACE, base=BASE, points=(PAPER,), objectives=None, **search):
    sampler = make_sampler(SearcherConfig(**search), seed)
    folder.mkdir(exist_ok=True)
    return RoundAwareOptuna(
        read_space(space), base, objectives or {"accuracy": "max"}, folder, points, sampler
    )


def play(searcher, name, rounds, score=0.5):
    """One trial from proposal to end."""
    proposed = searcher.suggest(name)
    for r in range(1, rounds + 1):
        row = {"round": r, "accuracy": score, "sigma_type": score}
        searcher.on_trial_result(name, row)
    searcher.on_trial_complete(name, row)
    return proposed


def test_the_papers_values_come_first_and_a_seed_repeats_the_rest(tmp_path):
    def proposals(folder, seed):
        searcher = make(tmp_path / folder, seed, startup=2)
        return [play(searcher, str(i), 3, score=i / 10)["values"] for i in range(5)]

    first = proposals("a", 1)
    assert first[0] == PAPER
    assert proposals("b", 1) == first  # the fourth and fifth follow from results
    assert proposals("c", 2)[1:] != first[1:]


def test_a_trial_that_was_stopped_early_is_pruned_and_a_failed_one_failed(tmp_path):
    searcher = make(tmp_path)
    play(searcher, "whole", 3)
    play(searcher, "early", 2)
    searcher.suggest("broken")
    searcher.on_trial_complete("broken", {"round": 2, "accuracy": 0.5}, error=True)
    trials = load_study(tmp_path).trials
    assert [t.state for t in trials] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert trials[1].intermediate_values == {1: 0.5, 2: 0.5}


def test_parts_that_do_not_fit_are_skipped_and_cost_no_trial(tmp_path):
    space = {"tuning": {"choice": ["lora", "gc_prompt"]}, "local.tau": {"uniform": [0.1, 1]}}
    base = Base(("algorithm=fedgcr", "rounds=3"))  # needs the prompts of gc_prompt
    searcher = make(tmp_path, space=space, base=base, points=(), name="random")
    proposed = [play(searcher, str(i), 3) for i in range(4)]
    assert {p["values"]["tuning"] for p in proposed} == {"gc_prompt"}
    refused = [t for t in load_study(tmp_path).trials if "refused" in t.user_attrs]
    assert refused
    assert all(t.params["tuning"] == "lora" and t.state is TrialState.FAIL for t in refused)


def test_a_space_without_anything_that_fits_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("tune.searcher.MOST_REFUSED", 3)
    searcher = make(
        tmp_path, space={"tuning": {"choice": ["lora"]}}, base=Base(("algorithm=fedgcr",)), points=()
    )
    with pytest.raises(
        ConfigError, match=r"3 proposals in a row are invalid; the last one: .*needs tuning=gc_prompt"
    ):
        searcher.suggest("a")


@pytest.mark.parametrize("told", [False, True])
def test_what_was_proposed_after_rays_snapshot_is_proposed_again(tmp_path, told):
    searcher = make(tmp_path)
    play(searcher, "a", 3)
    snapshot = pickle.dumps(vars(searcher))
    lost = searcher.suggest("b")
    if told:  # it even ended before the crash
        searcher.on_trial_complete("b", {"round": 3, "accuracy": 0.7})
    (tmp_path / "optuna.journal.lock").symlink_to(tmp_path / "optuna.journal")
    unlock(tmp_path)

    again = make(tmp_path)
    vars(again).update(pickle.loads(snapshot))
    assert again.suggest("c") == lost
    again.on_trial_result("c", {"round": 1, "accuracy": 0.7})
    again.on_trial_complete("c", {"round": 3, "accuracy": 0.7})
    trials = load_study(tmp_path).trials
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 2
    assert trials[1].value == 0.7
    assert again.suggest("d")["number"] == 2


def test_rounds_that_are_replayed_count_once(tmp_path):
    searcher = make(tmp_path)
    searcher.suggest("a")
    for r, score in ((1, 0.1), (2, 0.2), (1, 0.1), (2, 0.2), (3, 0.3)):
        searcher.on_trial_result("a", {"round": r, "accuracy": score})
    searcher.on_trial_complete("a", {"round": 3, "accuracy": 0.3})
    assert load_study(tmp_path).trials[0].intermediate_values == {1: 0.1, 2: 0.2, 3: 0.3}


def test_several_objectives(tmp_path):
    searcher = make(tmp_path, objectives={"accuracy": "max", "sigma_type": "min"}, name="nsga2", population=2)
    for i in range(5):
        play(searcher, str(i), 3, score=i / 10)
    study = load_study(tmp_path)
    assert [t.values for t in study.trials][1] == [0.1, 0.1]
    assert len(study.best_trials) == 5  # more accuracy always came with more deviation
