"""The limits of comparisons refuse what is no rounding, and let pass what is."""

import json

import pytest
import torch

from rayfed.testing import play
from tests.conftest import SMALL
from tests.rounding import FILE, equally_near, exact_play, limit, near, printed


@pytest.fixture(autouse=True)
def _not_recorded(monkeypatch):
    """Comparisons here are wrong on purpose, and do not belong in the table of all comparisons."""
    monkeypatch.delenv(FILE, raising=False)


def sums(terms):
    """Two ways to add the same numbers, and the size of what is rounded."""
    values = torch.randn(2000, terms, generator=torch.Generator().manual_seed(0))
    return values.sum(1), sum(values.unbind(1)), float(values.abs().sum(1).max())


def test_two_orders_of_a_sum_are_near_and_a_missing_term_is_not():
    one, other, size = sums(30)
    assert not torch.equal(one, other)
    near(one, other, 30, size)
    with pytest.raises(AssertionError, match="is more than"):
        near(one - 0.01, other, 30, size)
    with pytest.raises(AssertionError, match=r"\(2000,\)"):
        near(one[:5], other, 30, size)
    with pytest.raises(AssertionError, match="nan is more than"):
        near(one * float("nan"), other, 30, size)


def test_the_limit_is_that_of_the_precision():
    assert limit(3) == 2 * 3 * 2**-24
    assert limit(3, size=10, precision=torch.float64) == 2 * 3 * 2**-53 * 10
    assert printed(4) == pytest.approx(0.00005)


def test_two_ways_are_equally_near_to_float64_unless_one_is_wrong_by_a_percent():
    a, b = torch.randn(40, 500), torch.randn(500, 30)
    one, exact = a @ b, a.double() @ b.double()
    other = sum(x[:, None] * y for x, y in zip(a.unbind(1), b.unbind(0), strict=True))
    equally_near([one], [other], [exact])
    equally_near({"w": one}, {"w": other}, {"w": exact})
    with pytest.raises(AssertionError, match=r"w: .* is more than"):
        equally_near({"w": one}, {"w": other * 1.01}, {"w": exact})
    with pytest.raises(AssertionError, match="is more than"):
        equally_near([one], [other * float("nan")], [exact])
    with pytest.raises(AssertionError):
        equally_near({"w": one}, {"v": other}, {"w": exact})
    with pytest.raises(AssertionError, match="float32"):
        equally_near([one], [other], [one])


def test_zeros_of_exact_arithmetic_may_be_roundings_of_the_other_tensors():
    large, exact = torch.ones(100), torch.ones(100).double()
    noise = torch.full((3,), 1e-7)
    equally_near([large, 0 * noise], [large, noise], [exact, torch.zeros(3).double()])
    with pytest.raises(AssertionError):
        equally_near([large, 0 * noise], [large, 1000 * noise], [exact, torch.zeros(3).double()])


def test_a_comparison_writes_its_share_of_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(FILE, str(tmp_path / "shares"))
    near(1.0, 1 + limit(4) / 4, 4)
    (line,) = (tmp_path / "shares").read_text().splitlines()
    row = json.loads(line)
    assert row["test"].endswith("::test_a_comparison_writes_its_share_of_the_limit")
    assert 0.2 < row["share"] < 0.3


def test_an_experiment_can_be_played_in_float64(tmp_path, cache):
    settings = [*SMALL, "rounds=1", f"data.cache={cache}"]
    usual = play([*settings, f"output={tmp_path / 'usual'}"]).params
    with exact_play():
        exact = play([*settings, f"output={tmp_path / 'exact'}"]).params
    assert {value.dtype for value in exact.values()} == {torch.float64}
    equally_near(usual, usual, exact)  # fails where the judge is of another case
    assert any(not torch.equal(exact[n].float(), v) for n, v in usual.items())
