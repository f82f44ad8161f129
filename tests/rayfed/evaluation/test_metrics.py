"""Scores that are no means over examples."""

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from rayfed.evaluation.metrics import of_classes
from rayfed.objective import TextClassification


def test_scores_of_classes_are_those_of_scikit_learn():
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 5, generator=random)
    truth = torch.randint(4, (60,), generator=random)  # the fifth class has no example
    found = of_classes(TextClassification().by_class(logits, truth).numpy())
    predicted = logits.argmax(1)
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(truth, predicted))
