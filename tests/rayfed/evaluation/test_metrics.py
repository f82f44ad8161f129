"""Scores that are no means over examples."""

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from rayfed.evaluation.metrics import holm, of_classes
from rayfed.objective import TextClassification


def test_scores_of_classes_are_those_of_scikit_learn():
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 5, generator=random)
    truth = torch.randint(4, (60,), generator=random)  # the fifth class has no example
    found = of_classes(TextClassification().by_class(logits, truth).numpy())
    predicted = logits.argmax(1)
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(truth, predicted))


def test_tests_are_corrected_by_holm():
    """Worked out by hand: 4 tests, 0.01 * 4, 0.02 * 3, then 0.025 * 2 is not less; one shows nothing."""
    found = holm({"a": 0.02, "b": 0.01, "c": None, 4: 0.025})
    assert found.pop("c") is None
    assert found == pytest.approx({"a": 0.06, "b": 0.04, 4: 0.06})
