"""Short runs of any method and tuning."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rayfed
from rayfed.experiment.simulate import Result

SHORT = (
    *("data.partition.scheme=by_domain", "train.optimizer=sgd", "train.lr=0.02"),
    *("train.weight_decay=0", "train.batch_size=32"),
    "data.limit=40",
    "rounds=3",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "figures=false",
    "cluster=inline",
)


@pytest.fixture
def short(tmp_path: Path, cache: Path) -> Callable[..., Result]:
    """Run a method by name for three rounds on a few images; later overrides win."""
    made = iter(range(1000))

    def run(algorithm: str, *overrides: str) -> Result:
        places = (f"data.cache={cache}", f"output={tmp_path / f'short{next(made)}'}")
        return rayfed.simulate([f"algorithm={algorithm}", *SHORT, *places, *overrides])

    return run
