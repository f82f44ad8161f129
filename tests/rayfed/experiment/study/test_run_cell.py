"""What cells of one process have in common."""

from dataclasses import replace

from rayfed.config.schema import load_config
from rayfed.experiment.study.run_cell import CommonParts
from tests.conftest import SMALL


def test_parts_of_the_last_two_pairs_of_data_and_seed_are_kept():
    common, made = CommonParts(), []
    config = load_config([*SMALL])

    def use(seed, what):
        shared = common.of(replace(config, seed=seed))
        return shared.once("model", what, lambda: made.append(what) or what)

    for seed, what in [(0, "a"), (0, "b"), (1, "a"), (0, "b"), (1, "a"), (2, "c")]:
        assert use(seed, what) == what
    assert made == ["a", "b", "c"]
    use(1, "a")  # seed 1 is one of the last two
    use(0, "b")  # seed 0 was not
    assert made == ["a", "b", "c", "b"]
