"""Measures how often the tests of a family err, and which differences they find.

    python -m benchmarks.power_of_tests            Markdown for benchmarks/results/power_of_tests.md
    python -m benchmarks.power_of_tests --families 200

Scores are those of twenty names of one method (`NAMES`), or with a planted difference in some. A score is
what is hard about its seed, the same for all names, and what a name adds to it, as in `which_method.json`:
deviations of 1.8 and 1.2 points, on 300 test images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.evaluation.family_tests import run_family_tests

Array: TypeAlias = npt.NDArray[np.float64]

NAMES = 20
"""Rows of a family; the others are compared with the first one."""
SEEDS = (2, 3, 5, 10, 15)
FAMILIES = 400
HARD, OWN = 0.018, 0.012
"""Deviations of what a seed has in common for all names, and of what a name adds."""
IMAGES = 300
"""Test images: a score is a multiple of one of these."""
PLANTED = 4
"""Rows with a difference in a family of the measurement of power."""
EFFECTS = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0)
"""Planted differences, in deviations of a difference over the seeds."""


def _equal(rng: np.random.Generator, names: int, seeds: int) -> Array:
    return OWN * rng.normal(size=(names, seeds))


def _unequal(rng: np.random.Generator, names: int, seeds: int) -> Array:
    return np.exp(rng.normal(0, 0.6, (names, 1))) * _equal(rng, names, seeds)


def _wild(rng: np.random.Generator, names: int, seeds: int) -> Array:
    scale = np.exp(rng.normal(0, 0.6, (names, 1)))
    return scale * OWN * rng.standard_t(5, (names, seeds)) / np.sqrt(5 / 3)


Model: TypeAlias = Callable[[np.random.Generator, int, int], Array]

MODELS: Mapping[str, Model] = {
    "equal deviations": _equal,
    "deviations a factor of 1.8 apart": _unequal,
    "the same, with outliers (t, 5 degrees of freedom)": _wild,
}
"""Models of what names add to the scores of a seed."""


def scores(rng: np.random.Generator, model: Model, seeds: int, names: int = NAMES) -> Array:
    """Scores of one method under several names, shape (names, seeds)."""
    exact = 0.7 + HARD * rng.normal(size=seeds) + model(rng, names, seeds)
    return np.asarray(np.round(exact * IMAGES) / IMAGES)


def errs(values: Array) -> bool:
    """Whether a name of one method is called better or worse. Args: values: scores of a family."""
    tests = run_family_tests(list(values[1:] - values[0])).tests
    return any(each.verdict in ("better", "worse") for each in tests)


def family_error(model: Model, seeds: int, families: int = FAMILIES) -> float:
    """Share of families of one method in which a name is called better or worse."""
    rng = np.random.default_rng(seeds)
    return float(np.mean([errs(scores(rng, model, seeds)) for _ in range(families)]))


def found_share(model: Model, seeds: int, effect: float, families: int = FAMILIES) -> float:
    """Share of planted differences that are found in their direction.

    Args:
        effect: The planted difference, in deviations of this difference.
    """
    rng = np.random.default_rng(seeds)
    found = []
    for _ in range(families):
        own = model(rng, NAMES, seeds)
        own[1 : 1 + PLANTED] += effect * OWN * np.sqrt(2)
        values = np.round((0.7 + HARD * rng.normal(size=seeds) + own) * IMAGES) / IMAGES
        tests = run_family_tests(list(values[1:] - values[0])).tests[:PLANTED]
        found += [each.verdict == "better" for each in tests]
    return float(np.mean(found))


def tables(families: int) -> Iterator[str]:
    """The lines of both tables."""
    yield "| one method under twenty names | " + " | ".join(f"{seeds} seeds" for seeds in SEEDS) + " |"
    yield "|---|" + "---:|" * len(SEEDS)
    for name, model in MODELS.items():
        shares = (f"{family_error(model, seeds, families):.1%}" for seeds in SEEDS)
        yield f"| {name} | {' | '.join(shares)} |"
    yield ""
    yield "| planted difference, in deviations | " + " | ".join(f"{seeds} seeds" for seeds in SEEDS) + " |"
    yield "|---|" + "---:|" * len(SEEDS)
    for effect in EFFECTS:
        shares = (f"{found_share(_equal, seeds, effect, families // 4):.0%}" for seeds in SEEDS)
        yield f"| {effect:g} | {' | '.join(shares)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", type=int, default=FAMILIES, help="number of families in each case")
    for line in tables(parser.parse_args().families):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
