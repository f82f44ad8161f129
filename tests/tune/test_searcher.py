"""The searcher: what it proposes, what it refuses, what Optuna is told, and what a crash does to it."""

import json

import pytest
from optuna.trial import TrialState
from ray.tune.search import Searcher

from rayfed.errors import ConfigError
from rayfed.experiment.study.study_folder import Manifest
from tests.tune.folders import write_rounds
from tune.checks import check_sweep
from tune.searcher import OptunaSearcher, load_study, open_proposals, unlock
from tune.study import SweepStudy, names_of
from tune.sweep import make_sweep

SPACE = {"local.mu": {"loguniform": [0.001, 1]}, "train.lr": {"loguniform": [0.001, 0.1]}}
PAPER = {"local.mu": 0.01, "train.lr": 0.02}
BASE = ("algorithm=fedprox", "rounds=3")
EIGHT = {"tuning.rank": {"choice": [8]}}


def make(folder, *, space=SPACE, default=PAPER, base=BASE, objective="accuracy", **sweep):
    """The searcher of a sweep in a folder, new or continued."""
    folder.mkdir(exist_ok=True)
    tree = {"space": space, "default": default, "objective": objective, "trials": 10, **sweep}
    search = check_sweep(make_sweep(tree), base, None, folder)
    known = (folder / "study.json").exists()
    manifest = Manifest.read(folder) if known else Manifest(path=folder, names=names_of(search))
    return OptunaSearcher(SweepStudy(search, manifest, open_proposals(search)))


def play(searcher, name, rounds, score=0.5):
    """One trial from proposal to end, with its rows on disk."""
    proposed = searcher.suggest(name)
    rows = [{"round": r, "accuracy": score, "sigma_type": score} for r in range(1, rounds + 1)]
    for folder in proposed["folders"]:
        write_rounds(searcher._study.search.path / folder, rows, rounds == 3)
    for row in rows:
        searcher.on_trial_result(name, row)
    searcher.on_trial_complete(name, rows[-1])
    return proposed


def test_the_papers_values_come_first_and_a_seed_repeats_the_rest(tmp_path):
    def proposals(folder, seed):
        searcher = make(tmp_path / folder, seed=seed, searcher={"name": "tpe", "startup": 2})
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
    searcher._study.fail(2, "too fast")
    trials = load_study(tmp_path).trials
    assert [t.state for t in trials] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert trials[1].intermediate_values == {1: 0.5, 2: 0.5}
    tree = json.loads((tmp_path / "study.json").read_text())
    assert [(bool(c["sha256"]), c["stopped"]) for c in tree["cells"]] == [(True, 0), (False, 2), (False, 0)]
    found = [(t["state"], t["scores"], t["error"]) for t in tree["search"]["trials"]]
    assert found == [
        ("finished", {"accuracy": 0.5}, ""),
        ("stopped early", {}, ""),
        ("failed", {}, "too fast"),
    ]


def test_parts_that_do_not_fit_are_skipped_and_cost_no_trial(tmp_path):
    space = {"tuning": {"choice": ["lora", "gc_prompt"]}, "local.tau": {"uniform": [0.1, 1]}}
    base = ("algorithm=fedgcr", "rounds=3")  # needs the prompts of gc_prompt
    searcher = make(tmp_path, space=space, base=base, default={}, searcher="random", trials=4)
    proposed = [play(searcher, str(i), 3) for i in range(4)]
    assert {p["values"]["tuning"] for p in proposed} == {"gc_prompt"}
    refused = [t for t in load_study(tmp_path).trials if "refused" in t.user_attrs]
    assert refused
    assert all(t.params["tuning"] == "lora" and t.state is TrialState.FAIL for t in refused)
    assert searcher.suggest("more") == Searcher.FINISHED


def test_a_space_without_anything_that_fits_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("tune.searcher.MOST_REFUSED", 3)
    monkeypatch.setattr("tune.searcher.compatible_parts", refuse)
    searcher = make(tmp_path)
    with pytest.raises(ConfigError, match=r"3 proposals in a row are invalid; the last one: never"):
        searcher.suggest("a")


def refuse(config):
    raise ConfigError("never")


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_killed_command_had_proposed_is_proposed_again(tmp_path, ended):
    searcher = make(tmp_path)
    play(searcher, "a", 3)
    lost = searcher.suggest("b")
    searcher.on_trial_result("b", {"round": 1, "accuracy": 0.7})
    if ended:  # its cell ended just before the crash, of which Optuna was not told
        rows = [{"round": r, "accuracy": 0.7} for r in (1, 2, 3)]
        write_rounds(tmp_path / lost["folders"][0], rows, finished=True)
    (tmp_path / "optuna.journal.lock").symlink_to(tmp_path / "optuna.journal")
    unlock(tmp_path)

    again = make(tmp_path)
    if not ended:
        assert again.suggest("c") == lost
        for r in (1, 2, 3):
            again.on_trial_result("c", {"round": r, "accuracy": 0.7})
        again.on_trial_complete("c", {"round": 3, "accuracy": 0.7})
    assert again.suggest("d")["number"] == 2
    trials = load_study(tmp_path).trials[:2]
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 2
    assert trials[1].value == 0.7
    assert trials[1].intermediate_values == {1: 0.7, 2: 0.7, 3: 0.7}


def test_equal_trials_share_their_cells(tmp_path):
    """One with the values of a trial that runs waits for it; then it takes its scores, without a process."""
    searcher = make(
        tmp_path, space=EIGHT, default={}, base=("algorithm=fedavg", "rounds=3"), trials=3, searcher="random"
    )
    first = searcher.suggest("a")
    assert searcher.suggest("b") is None
    write_rounds(tmp_path / first["folders"][0], [{"round": r, "accuracy": 0.5} for r in (1, 2, 3)], True)
    searcher.on_trial_complete("a", {"round": 3, "accuracy": 0.5})
    assert searcher.suggest("b") == Searcher.FINISHED
    assert [(t.number, t.value) for t in load_study(tmp_path).trials] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert len(json.loads((tmp_path / "study.json").read_text())["cells"]) == 1


def test_rounds_that_are_replayed_count_once(tmp_path):
    searcher = make(tmp_path)
    searcher.suggest("a")
    for r, score in ((1, 0.1), (2, 0.2), (1, 0.1), (2, 0.2), (3, 0.3)):
        searcher.on_trial_result("a", {"round": r, "accuracy": score})
    searcher.on_trial_complete("a", {"round": 3, "accuracy": 0.3})
    assert load_study(tmp_path).trials[0].intermediate_values == {1: 0.1, 2: 0.2, 3: 0.3}


def test_several_objectives(tmp_path):
    search = {"name": "nsga2", "population": 2}
    searcher = make(tmp_path, objective=["accuracy", "sigma_type"], searcher=search)
    for i in range(5):
        play(searcher, str(i), 3, score=i / 10)
    study = load_study(tmp_path)
    assert [t.values for t in study.trials][1] == [0.1, 0.1]
    assert len(study.best_trials) == 5  # more accuracy always came with more deviation
