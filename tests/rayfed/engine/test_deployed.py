"""Scores of the models that methods deploy: of all clients, in each scored round, on test and validation."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from torch import nn

import rayfed
import rayfed.report.final_table
from rayfed import Broadcast, Client, Local, Method, Update
from rayfed.data.shards import open_dataset
from rayfed.errors import ConfigError
from rayfed.experiment.single_run import classes_in_words
from rayfed.record.recorded_run import RecordedRun
from tests.conftest import STEADY
from tests.rounding import near

CLIENTS = 5


def part(rng, n, classes, shift):
    y = rng.choice(classes, n)
    return (rng.normal(size=(n, 4)) + 3 * np.eye(4)[y % 4] + shift).astype("f4"), y


def skewed(clients=CLIENTS, sizes=(12, 6, 5)):
    """Clients with two of four classes each, and test examples of these."""
    rng = np.random.default_rng(0)
    found = {}
    for i in range(clients):
        own = [i % 4, (i + 1) % 4]
        shift = rng.normal(size=4)
        splits = zip(("train", "test", "val"), sizes, strict=True)
        found[f"k{i}"] = {split: part(rng, n, own, shift) for split, n in splits}
    return found


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def run_of(method, every=1, per_round=2, rounds=4, **changes):
    own = {
        "model": net(),
        "tuning": "full",
        "data": skewed(),
        "cluster": "inline",
        "train": {"lr": 0.1, "batch_size": 4},
    }
    evaluation = {"every": every, **changes.pop("evaluation", {})}
    experiment = rayfed.Experiment(
        method=method, rounds=rounds, clients_per_round=per_round, evaluation=evaluation, **{**own, **changes}
    )
    return experiment.run(quiet=True)


class Kept(Local):
    """A half that keeps half of its step for itself, as a user may write it."""

    deploys = "personal"

    def train(self, client: Client, sent: Broadcast) -> Update:
        client.load(client.store.get("mine", {}))
        update = super().train(client, sent)
        client.store["mine"] = {
            name: (value + sent.params[name]) / 2 for name, value in update.params.items()
        }
        return update

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        client.load(client.store.get("mine", {}))


METHODS = ("local", "ditto", Method(local=Kept))


def deployed(run, method, name):
    """The model that a client deploys; one that never trained deploys what it would receive."""
    if method == "fedavg":
        return run.model()
    try:
        return run.personal(name)
    except ConfigError:
        return run.model()  # of local: the start values, because the server's never change


@pytest.mark.parametrize("method", METHODS, ids=("local", "ditto", "own"))
def test_the_accuracy_of_one_training_does_not_depend_on_how_often_it_is_scored(method):
    runs = [run_of(method, every) for every in (1, 2, 4)]
    assert len({run.accuracy for run in runs}) == len({run.sha256 for run in runs}) == 1
    tables = [run.clients["accuracy"] for run in runs]
    assert all(table.notna().all() and table.equals(tables[0]) for table in tables)
    assert runs[0].history["accuracy"].notna().all()
    assert runs[1].history["accuracy"].notna().tolist() == [False, True, False, True]
    assert runs[2].metrics["clients_scored"] == runs[2].metrics["clients_in_all"] == CLIENTS


@pytest.mark.parametrize("method", METHODS, ids=("local", "ditto", "own"))
def test_each_client_has_the_score_of_the_model_that_it_would_deploy(method):
    run = run_of(method, 4)
    for i, (name, own) in enumerate(skewed().items()):
        x, y = (torch.tensor(values) for values in own["test"])
        right = float((deployed(run, method, name)(x).argmax(1) == y).float().mean())
        assert run.clients["accuracy"].iloc[i] == pytest.approx(right)


def test_personal_scores_of_a_method_with_a_global_model_are_of_all_clients():
    run = run_of("fedavg", 4, evaluation={"personal": True})
    assert run.metrics["personal_clients_scored"] == CLIENTS
    assert run.clients["personal_accuracy"].notna().all()
    assert run.history["personal_accuracy"].notna().tolist() == [False, False, False, True]


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_scores_follow_the_choice_of_clients_and_say_of_how_many_they_are(method, tmp_path):
    changes = {"model": net(), "tuning": "full", "data": skewed(), "rounds": 1, "cluster": "inline"}
    run = rayfed.Experiment(method=method, evaluation={"clients": 3}, **changes).run(
        tmp_path / "run", quiet=True
    )
    assert (run.metrics["clients_scored"], run.metrics["clients_in_all"]) == (3, CLIENTS)
    assert run.clients["accuracy"].notna().sum() == 3
    assert "mean over 3 of 5 clients" in (tmp_path / "run" / "report.md").read_text()
    assert (
        rayfed.report.final_table.final_table(RecordedRun(tmp_path / "run"))
        .notes[0]
        .startswith("mean over 3 of 5 clients")
    )


def test_clients_that_hold_some_blocks_are_scored_with_these(small):
    common = ("algorithm=ditto", "clients_per_round=2", "rounds=3", "capacity=dynamic")
    scores = [small(*common, f"evaluation.every={n}").history["accuracy"].iloc[-1] for n in (1, 3)]
    assert scores[0] == scores[1]


def test_validation_is_of_the_model_that_the_method_deploys():
    for method in ("local", "ditto"):
        run = run_of(method, 4, evaluation={"validation": True})
        known = []
        for name, own in skewed().items():
            x, y = (torch.tensor(values) for values in own["val"])
            model = deployed(run, method, name)
            known.append(float((model(x).argmax(1) == y).float().mean()))
        assert run.metrics["val_accuracy"] == pytest.approx(np.mean(known))
        assert run.metrics["val_clients"] == CLIENTS
        whole = run.model()
        shared = [
            float((whole(torch.tensor(own["val"][0])).argmax(1).numpy() == own["val"][1]).mean())
            for own in skewed().values()
        ]
        assert run.metrics["global_val_accuracy"] == pytest.approx(np.mean(shared))


def test_a_sweep_of_a_personal_method_chooses_the_rate_of_the_best_personal_models():
    data = skewed(sizes=(40, 30, 30))
    experiment = rayfed.Experiment(
        method="local",
        model=net(),
        tuning="full",
        data=data,
        rounds=2,
        cluster="inline",
        train={"batch_size": 4},
    )
    found = rayfed.sweep(experiment, {"train.lr": [0.00001, 0.1]})
    assert (found.best_params, found.score) == ({"train.lr": 0.1}, "val_accuracy")
    assert found.trials["val_accuracy"].nunique() == 2
    by_loss = rayfed.sweep(experiment, {"train.lr": [0.00001, 0.1]}, objective="val_loss")
    assert by_loss.best_params == {"train.lr": 0.1}
    worst = rayfed.sweep(experiment, {"train.lr": [0.00001, 0.1]}, objective="worst_client_accuracy")
    assert worst.score == "worst_client_accuracy"
    with pytest.raises(ConfigError, match=r"sweep: objective: 'val_acuracy'.*val_accuracy"):
        rayfed.sweep(experiment, {"train.lr": [0.1]}, objective="val_acuracy")


def ranked(shift, n, rng):
    x = rng.normal(size=(n, 1)).astype("f4") + shift
    return x.astype("f4"), (x[:, 0] > np.median(x)).astype(int)[:, None]


def test_metrics_over_sets_are_over_the_examples_of_all_clients_and_of_each_domain():
    rng = np.random.default_rng(0)
    sizes = {"a": (0, 80), "b": (5, 120), "c": (-2, 30)}
    data = {name: {"train": ranked(s, 8, rng), "test": ranked(s, n, rng)} for name, (s, n) in sizes.items()}
    model = nn.Linear(1, 1)
    run = rayfed.Experiment(
        model=model,
        tuning="full",
        data=data,
        task="multilabel",
        rounds=1,
        cluster="inline",
        train={"lr": 1e-4},
    ).run(quiet=True)
    net = run.model()
    with torch.no_grad():
        scores = [net(torch.tensor(own["test"][0])).numpy() for own in data.values()]
    truth = [own["test"][1] for own in data.values()]
    whole = roc_auc_score(np.concatenate(truth), np.concatenate(scores))
    assert run.metrics["auc"] == pytest.approx(whole)
    assert run.metrics["worst_client_auc"] == pytest.approx(min(map(roc_auc_score, truth, scores)))
    assert 0.02 < abs(whole - 0.5) < 0.4


@pytest.mark.parametrize("clients", [3, pytest.param(80, marks=STEADY)])
def test_a_client_whose_metric_is_undefined_keeps_its_loss_and_its_other_metrics(clients):
    rng = np.random.default_rng(0)
    data = {}
    for i in range(clients):
        y = rng.integers(0, 2, (12, 2)) if i == 0 else np.full((12, 2), i % 2)
        x = rng.normal(size=(32, 4)).astype("f4")
        data[f"k{i:02d}"] = {"train": (x[:20], rng.integers(0, 2, (20, 2))), "test": (x[20:], y)}
    run = rayfed.Experiment(
        model=nn.Linear(4, 2), tuning="full", data=data, task="multilabel", rounds=1, cluster="inline"
    ).run(quiet=True)
    net, losses, shares = run.model(), [], []
    for own in data.values():
        x, y = torch.tensor(own["test"][0]), torch.tensor(own["test"][1])
        with torch.no_grad():
            losses.append(float(nn.functional.binary_cross_entropy_with_logits(net(x), y.float())))
            shares.append(float(((net(x) > 0) == (y > 0)).float().mean()))
    # Sums over a handful of inputs, hidden units, labels and examples, before and after a few steps.
    near(run.loss, np.mean(losses), 100)
    near(run.clients["loss"].tolist(), losses, 100)
    assert run.clients["label_accuracy"].tolist() == pytest.approx(shares)
    assert run.metrics["label_accuracy"] == pytest.approx(np.mean(shares))
    assert run.clients["auc"].notna().sum() == run.metrics["clients_defined"] == 1
    assert run.metrics["clients_scored"] == clients


@pytest.mark.parametrize("method", ["fedavg", pytest.param("local", marks=STEADY)])
def test_scores_of_classes_count_the_texts_of_all_clients(method, tmp_path):
    """82 clients, of which 80 have small test sets, which share their batches."""
    rng = np.random.default_rng(0)
    names = ["alarm", "bank", "card", "date"]
    rows = []
    for user, n in enumerate([*[6] * 80, 60, 60]):
        for _ in range(n):
            label = rng.choice(4, p=[0.7, 0.1, 0.1, 0.1] if n < 50 else [0.1, 0.1, 0.1, 0.7])
            word = names[label] if rng.random() < 0.6 else "hello"
            rows.append((f"u{user:03d}", f"{word} {rng.integers(99)}", names[label]))
    table = pd.DataFrame(rows, columns=["user", "text", "label"])
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    data = {"name": "jsonl", "root": str(tmp_path / "a.jsonl"), "cache": str(tmp_path), "test": 0.4, "val": 0}
    run = rayfed.Experiment(
        method=method, model="text_mini", tuning="head", rounds=1, cluster="inline", clients_per_round=2,
        data={**data, "columns": {"client": "user"}}, train={"lr": 0.05},
        partition={"scheme": "natural", "min_samples": 1},
    ).run(tmp_path / "run", quiet=True)  # fmt: skip
    parts = pd.read_parquet(tmp_path / "run" / "partition.parquet")
    parts = parts[parts.split == "test"]
    texts = open_dataset(run._setup.context.shard)
    predicted, models = [], {}
    for client, index in zip(parts.client, parts["index"], strict=True):
        key = client if method == "local" else ""
        net = models[key] if key in models else models.setdefault(key, deployed(run, method, client))
        with torch.no_grad():
            predicted.append(
                int(net(torch.as_tensor(texts.images[np.array([int(index)])]).long())[0].argmax())
            )
    truth = parts.label.to_numpy()
    assert run.metrics["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert run.metrics["mcc"] == pytest.approx(matthews_corrcoef(truth, predicted))


SKEWED = tuple(
    f"data.{text}"
    for text in (
        *("partition.scheme=dirichlet", "partition.alpha=0.1", "partition.min_samples=1"),
        *("partition.clients_per_domain=3", "limit=80", "val=0.2"),
    )
)


def test_a_run_says_where_clients_are_tested_on_classes_that_they_do_not_have(small, capsys):
    for validation, words in {
        "true": "; validation follows the clients' classes (evaluation.validation=domains",
        "domains": "; validation has the classes of all clients of a domain",
        "false": "",
    }.items():
        run = small(*SKEWED, "rounds=1", f"evaluation.validation={validation}")
        text = classes_in_words(run._setup)
        assert re.fullmatch(r"clients have \d+ to \d+ of 10 classes and are tested on all 10(;.*)?", text)
        assert words in text
    assert classes_in_words(small("rounds=1")._setup) == ""


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper"])
def test_validation_of_domains_is_on_the_examples_of_all_their_clients(method, small):
    """What is tested is put in place of what is validated: then both scores are the same."""
    run = small(*SKEWED, f"algorithm={method}", "rounds=1", "evaluation.validation=domains")
    setup = run._setup
    own = {client.id: client for client in setup.partition.clients}
    whole = {
        domain: np.unique(np.concatenate([c.val for c in own.values() if c.domain == domain]))
        for domain in setup.partition.table.domains
    }
    alone = method != "fedavg"
    for unit in setup.experiment.validate_personal or setup.experiment.validate:
        assert setup.context.splits[unit.id]["val_of_domain"].tolist() == whole[unit.domain].tolist()
        assert (unit.id in own) == alone
    assert run.metrics["val_clients"] == len(own)


def test_validation_of_domains_and_models_of_the_clients_of_a_population_are_refused(small):
    with pytest.raises(
        ConfigError, match=r"evaluation.validation: domains cannot be used with data.population"
    ):
        small("algorithm=ditto", "data.population={clients: 50, size: 5}", "evaluation.validation=domains")


def test_personal_models_of_a_population_are_validated_for_the_chosen_clients(small):
    population = ("data.population={clients: 50, size: 5}", "clients_per_round=3", "rounds=1")
    for method in ("ditto", "fedper"):
        run = small(
            *population,
            f"algorithm={method}",
            "evaluation.clients=8",
            "evaluation.validation=true",
        )
        assert run.metrics["val_clients"] == 8
        assert run.metrics["clients_in_all"] == 50


def numbers_of(shift, n, rng):
    """Examples whose target falls with the input inside of a client and rises from client to client."""
    x = rng.normal(size=(n, 1)) + shift
    return x.astype("f4"), (2 * shift - x[:, 0] + 0.3 * rng.normal(size=n)).astype("f4")


OVER_DOMAINS = {
    "pearson": lambda o, y: float(np.corrcoef(o[:, 0], y)[0, 1]),
    "rank": lambda o, y: float(spearmanr(o[:, 0], y).statistic),
    "auc": lambda o, y: roc_auc_score(y > 0, o[:, 0]) if len(set((y > 0).tolist())) > 1 else float("nan"),
}
"""Metrics of a user, over all examples of a set."""


@pytest.mark.parametrize("first", OVER_DOMAINS)
@pytest.mark.parametrize("method", ["fedavg", pytest.param("local", marks=STEADY)])
def test_metrics_over_sets_of_a_domain_are_over_the_examples_of_its_clients(first, method):
    """Two clients in each domain; inside of a client the correlation has another sign than over all."""
    rng = np.random.default_rng(1)
    shifts = {"a": (-6, 40, "one"), "b": (6, 25, "one"), "c": (-3, 30, "two"), "d": (3, 11, "two")}
    data = {
        name: {"train": numbers_of(s, 8, rng), "test": numbers_of(s, n, rng), "domain": domain}
        for name, (s, n, domain) in shifts.items()
    }
    task = rayfed.Task(
        loss=lambda o, y: (o[:, 0] - y) ** 2,
        over_set={name: OVER_DOMAINS[name] for name in sorted(OVER_DOMAINS, key=lambda name: name != first)},
    )
    run = run_of(
        method, per_round="all", rounds=1, data=data, task=task, model=nn.Linear(1, 1), train={"lr": 1e-3}
    )
    outputs, truth, losses = {}, {}, {}
    for name, own in data.items():
        x, y = (torch.tensor(values) for values in own["test"])
        with torch.no_grad():
            outputs[name], truth[name] = deployed(run, method, name)(x), y
        losses[name] = float(((outputs[name][:, 0] - y) ** 2).mean())
    model = "personal" if method == "local" else "global"
    scores = pd.DataFrame(run.recorded.scores_at(1))
    scores = scores[(scores["model"] == model) & (scores["exchange"] == "report_domains")]
    found = scores.set_index(["client", "metric"])["value"]
    groups = {"one": ("a", "b"), "two": ("c", "d"), None: (*data,)}
    for domain, names in groups.items():
        together = (torch.cat([values[name] for name in names]).numpy() for values in (outputs, truth))
        o, y = together
        for metric, of in OVER_DOMAINS.items():
            value = run.metrics[metric] if domain is None else found[domain, metric]
            assert value == pytest.approx(of(o, y))
        if domain:
            counts = [len(truth[name]) for name in names]
            wanted = np.average([losses[name] for name in names], weights=counts)
            near(found[domain, "loss"], wanted, 100)  # as of the losses above
    inside = [OVER_DOMAINS["pearson"](outputs[name].numpy(), truth[name].numpy()) for name in data]
    over = OVER_DOMAINS["pearson"](*(torch.cat([*each.values()]).numpy() for each in (outputs, truth)))
    assert all(each * over < 0 for each in inside)
