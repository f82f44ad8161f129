"""Speed never changes a score: packs, batches, groups and micro-batches against plain torch, scikit-learn.

One round of FedAvg, in which each client takes one step on all of its examples, is done by hand; then the
model is scored on the test set of one client after the other.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import rayfed
from rayfed.errors import ConfigError
from rayfed.evaluation.test_sets import MANY
from tests.conftest import STEADY
from tests.rounding import near

RATE = 0.3
WEIGHTS = torch.tensor([0.1, 1.0, 10.0])


def right(output, y):
    return (output.argmax(1) == y).float()


def contrast(output, y):
    """A loss that compares all rows of a batch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(y)))


def ratio(output, y):
    """A mean of ratios of sums, defined for each batch only."""
    return (output[:, 0] - y).abs().sum() / (y.abs().sum() + 1)


def centred(output, y):
    """One number for each example, which depends on all others."""
    return (output[:, 0] - output[:, 0].mean() - y).square()


def of_sklearn(output, y):
    return roc_auc_score(y, output[:, 0]) if len(set(y.tolist())) > 1 else float("nan")


CLASSES, NUMBERS, LABELS, PAIRS = "classes", "numbers", "labels", "pairs"
OUTPUTS = {CLASSES: 3, NUMBERS: 1, LABELS: 2, PAIRS: 1}

TASKS = {
    "classification": (CLASSES, "classification", F.cross_entropy, True),
    "regression": (NUMBERS, "regression", lambda o, y: F.mse_loss(o[:, 0], y), True),
    "multilabel": (LABELS, "multilabel", lambda o, y: F.binary_cross_entropy_with_logits(o, y.float()), True),
    "rows": (CLASSES, nn.CrossEntropyLoss(reduction="none"), None, True),
    "mean": (CLASSES, nn.CrossEntropyLoss(), None, True),
    "weighted": (CLASSES, nn.CrossEntropyLoss(weight=WEIGHTS), None, False),
    "ignored": (CLASSES, nn.CrossEntropyLoss(ignore_index=1), None, False),
    "sum": (CLASSES, nn.CrossEntropyLoss(reduction="sum"), None, False),
    "contrast": (CLASSES, contrast, None, False),
    "root": (NUMBERS, lambda o, y: F.mse_loss(o[:, 0], y).sqrt(), None, False),
    "ratio": (NUMBERS, ratio, None, False),
    "centred": (NUMBERS, centred, None, False),
    "correlated": (NUMBERS, lambda o, y: F.mse_loss(o[:, 0], y), None, True),
    "ranked": (PAIRS, lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), None, True),
}
"""By name: kind of the targets, task or loss, its loss in plain torch, and whether that is a mean of rows."""

OVER_SET = {
    "correlated": {
        "pearson_own": lambda o, y: float(np.corrcoef(o[:, 0], y)[0, 1]) if len(y) > 1 else float("nan"),
        "rank_own": lambda o, y: float(spearmanr(o[:, 0], y).statistic) if len(y) > 1 else float("nan"),
    },
    "ranked": {"auc_own": of_sklearn},
}


def task_of(name):
    kind, loss, plain, _ = TASKS[name]
    if isinstance(loss, str):
        return loss, plain
    metrics = {"top1": right} if kind == CLASSES else {"gap": lambda o, y: (o[:, 0] - y).abs()}
    own = rayfed.Task(
        loss=loss, metrics=metrics if name not in OVER_SET else {}, over_set=OVER_SET.get(name, {})
    )
    return own, lambda o, y: loss(o, y).mean()


def examples(rng, kind, n, shift):
    x = (rng.normal(size=(n, 4)) + shift).astype("f4")
    if kind == NUMBERS:
        return x, (x.sum(1) - 4 * shift + rng.normal(size=n)).astype("f4")
    if kind == LABELS:
        return x, rng.integers(0, 2, (n, 2))
    return x, rng.integers(0, 2 if kind == PAIRS else 3, n)


def clients_of(seed, kind, sizes):
    rng = np.random.default_rng(seed)
    clients = {}
    for i, n in enumerate(sizes):
        shift = rng.normal()
        train = examples(rng, kind, int(rng.integers(3, 9)), shift)
        test = examples(rng, kind, n, shift)
        for _, y in (train, test) if kind == CLASSES else ():
            y[0] = 0  # so that a loss that ignores a class has a value
        clients[f"k{i:03d}"] = {"train": train, "test": test}
    if kind == CLASSES:  # so that all classes are known
        clients["k000"]["train"] = (clients["k000"]["train"][0][:3], np.arange(3))
    return clients


def start(kind):
    torch.manual_seed(1)
    return nn.Linear(4, OUTPUTS[kind])


def step_by_hand(kind, loss, clients):
    """The model after a round of FedAvg."""
    net, total = start(kind), sum(len(c["train"][1]) for c in clients.values())
    mean = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    for client in clients.values():
        own = start(kind)
        x, y = (torch.tensor(part) for part in client["train"])
        loss(own(x), y).backward()
        with torch.no_grad():
            for name, value in own.named_parameters():
                mean[name] += (value - RATE * value.grad) * (len(y) / total)
    net.load_state_dict(mean)
    return net


def check(name, seed, sizes, **train):
    kind, *_ = TASKS[name]
    task, loss = task_of(name)
    clients = clients_of(seed, kind, sizes)
    experiment = rayfed.Experiment(
        model=start(kind), tuning="full", data=clients, task=task, rounds=1, cluster="inline",
        train={"lr": RATE, "momentum": 0.0, "batch_size": 99, **train},
    )  # fmt: skip
    if "micro_batch" in train and not TASKS[name][-1]:
        with pytest.raises(ConfigError, match=r"train.micro_batch: .* which is not the mean of the losses"):
            experiment.run(quiet=True)
        return
    run = experiment.run(quiet=True)
    net = step_by_hand(kind, loss, clients)
    for key, value in net.state_dict().items():
        near(run.model().state_dict()[key], value, 300, max(1.0, float(value.abs().max())))
    with torch.no_grad():
        tests = [[torch.tensor(part) for part in client["test"]] for client in clients.values()]
        outputs = [net(x) for x, _ in tests]
        losses = [float(loss(o, y)) for o, (_, y) in zip(outputs, tests, strict=True)]
    within = {"rel": 2e-3, "abs": 2e-4}  # of the step, whose rounding the loss repeats
    assert run.clients["loss"].tolist() == pytest.approx(losses, **within)
    assert run.loss == pytest.approx(np.mean(losses), **within)
    targets = [y for _, y in tests]
    check_metrics(run, name, kind, outputs, targets, within)


def check_metrics(run, name, kind, outputs, targets, within):
    every, truth = torch.cat(outputs).numpy(), torch.cat(targets).numpy()
    metrics = run.metrics
    if name in OVER_SET:
        wanted = {key: of(every, truth) for key, of in OVER_SET[name].items()}
        for key, value in wanted.items():
            if value == value:
                assert metrics[key] == pytest.approx(value, **within)
            else:
                assert key not in metrics
        if name == "correlated" and len(truth) > 2:
            assert metrics["pearson_own"] == pytest.approx(pearsonr(every[:, 0], truth).statistic, **within)
    elif name == "multilabel":
        known = [k for k in (0, 1) if len(set(truth[:, k])) > 1]
        if not known:
            assert "auc" not in metrics
            return
        assert metrics["auc"] == pytest.approx(
            np.mean([roc_auc_score(truth[:, k], every[:, k]) for k in known])
        )
        own = np.mean([((o > 0) == (y > 0)).float().mean() for o, y in zip(outputs, targets, strict=True)])
        assert metrics["label_accuracy"] == pytest.approx(own, **within)
    elif kind == CLASSES:
        own = np.mean([right(o, y).mean() for o, y in zip(outputs, targets, strict=True)])
        assert metrics["top1" if name != "classification" else "accuracy"] == pytest.approx(own, **within)
    else:
        own = np.mean([(o[:, 0] - y).abs().mean() for o, y in zip(outputs, targets, strict=True)])
        assert metrics["gap" if name != "regression" else "mae"] == pytest.approx(own, **within)
    assert metrics["clients_scored"] == metrics["clients_in_all"] == len(outputs)


SIZES = st.one_of(
    st.lists(st.integers(2, 40), min_size=1, max_size=6),
    st.lists(st.integers(2, 9), min_size=MANY + 1, max_size=100),  # packs
    st.lists(st.integers(2, 40), min_size=MANY + 8, max_size=90),  # packs, and sets of their own
)
TRAIN = st.fixed_dictionaries(
    {"eval_batch_size": st.sampled_from([3, 7, 33, 256]), "group": st.sampled_from([1, 3, 32, "auto"])},
    optional={"micro_batch": st.sampled_from([1, 2])},
)
CASES = {"name": st.sampled_from(list(TASKS)), "seed": st.integers(0, 10**6), "sizes": SIZES, "train": TRAIN}
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=4, **QUIET)
@given(**CASES)
def test_speed_never_changes_a_score(name, seed, sizes, train):
    check(name, seed, sizes, **train)


@pytest.mark.slow
@pytest.mark.steady
@settings(max_examples=40, **QUIET)
@given(**CASES)
def test_speed_never_changes_a_score_in_many_ways(name, seed, sizes, train):
    check(name, seed, sizes, **train)


QUICK = ("mean", "weighted", "multilabel", "centred", "correlated")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=STEADY) for name in TASKS if name not in QUICK)]
)
def test_sets_in_packs_have_the_scores_of_each_alone(name):
    check(name, 3, [2, 31, 40, 300, *[5, 8, 3] * 26], eval_batch_size=64)
