"""What cells of one process have in common."""

from dataclasses import replace

from rayfed.config.schema import load_config
from rayfed.engine.session import Session
from rayfed.experiment.runner import Runner
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.cluster_share import ClusterShare
from rayfed.experiment.study.run_cell import CommonParts, StudyCell, run_cell
from tests.conftest import SMALL


def test_parts_of_the_last_two_pairs_of_data_and_seed_are_kept():
    common, made = CommonParts(), []
    config = load_config([*SMALL])

    def use(seed, what):
        shared = common.of(replace(config, seed=seed))
        return shared.get("model", what, lambda: made.append(what) or what)

    for seed, what in [(0, "a"), (0, "b"), (1, "a"), (0, "b"), (1, "a"), (2, "c")]:
        assert use(seed, what) == what
    assert made == ["a", "b", "c"]
    use(1, "a")  # seed 1 is one of the last two
    use(0, "b")  # seed 0 was not
    assert made == ["a", "b", "c", "b"]


def test_a_cell_asks_for_its_part_of_the_cluster_and_for_no_more(tmp_path, cache, monkeypatch):
    """What starts its actors reads the prepared experiment, not the config."""
    config = load_config(
        [*SMALL, f"data.cache={cache}", "cluster=local", f"output={tmp_path / 'cell'}"]
    ).alone()
    given = []
    monkeypatch.setattr(Runner, "run", lambda self, plan, claim: given.append(plan) or "")
    part = ClusterShare(lanes=2, actors=1, cpus=0.5, gpus=0.0)
    run_cell(StudyCell(at={}, config=config), CommonParts(), Show(True), Session(), part)
    (plan,) = given
    asked = plan.setup.design.cluster
    assert (config.cluster.actors, asked.actors, asked.cpus_per_actor) == ("auto", 1, 0.5)
    assert asked == plan.config.cluster
    assert plan.setup.design.described["cluster"]["actors"] == 1
