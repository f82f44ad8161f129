"""When schedulers decide, and what they know of the trials of earlier commands."""

import pytest
from ray.tune.schedulers import TrialScheduler

from tests.tune.test_searcher import make, play
from tune.sweep import make_sweep
from tune.tuner import _scheduler, pauses_of


@pytest.mark.parametrize(
    ("scheduler", "every", "found"),
    [
        ("none", 1, ()),
        ({"name": "asha", "grace": 1, "reduction": 3}, 1, (1, 3, 9)),
        ({"name": "asha", "grace": 2, "reduction": 2}, 3, (3, 6, 9)),  # at 2, 4 and 8 nothing is scored
        ({"name": "median", "grace": 8}, 1, (8, 9)),
    ],
)
def test_trials_of_several_seeds_pause_where_the_scheduler_decides(scheduler, every, found):
    sweep = make_sweep({"space": {"train.lr": {"uniform": [0.1, 1]}}, "scheduler": scheduler})
    assert pauses_of(sweep, 10, every) == found


@pytest.mark.parametrize("name", ["asha", "median"])
def test_a_continued_sweep_stops_what_falls_behind_trials_of_before(name, tmp_path):
    options = {"scheduler": {"name": name, "grace": 1, "least": 2, "reduction": 2}}
    searcher = make(tmp_path, **options)
    for number, score in enumerate((0.5, 0.6)):
        play(searcher, str(number), 3, score=score)

    class New:
        trial_id = "new"
        get_live_trials = list

    for score, decision in ((0.9, TrialScheduler.CONTINUE), (0.1, TrialScheduler.STOP)):
        scheduler = _scheduler(make(tmp_path, **options)._study)
        new = New()
        scheduler.on_trial_add(new, new)
        assert scheduler.on_trial_result(new, new, {"round": 1, "accuracy": score}) == decision
