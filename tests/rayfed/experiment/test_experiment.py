"""Experiments of names and of objects: the same bits, their records, and one line for what does not fit."""

import json
import re
import traceback
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

import rayfed
from rayfed.config.schema import build_parts
from rayfed.errors import ConfigError, RayFedError, ServerError
from rayfed.federation.method_registry import Method
from rayfed.tuning.lora import Lora
from tests.conftest import STEADY, quickly
from tests.rounding import near

SMALL = {
    "data": {"name": "digits_five_mini", "limit": 24},
    "model": {"name": "vit_mini", "options": {"depth": 2}, "pretrained": False},
    "tuning": {"name": "lora", "rank": 2},
    "rounds": 2,
    "cluster": "inline",
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache, no_figures):
    monkeypatch.setenv("RAYFED_CACHE", str(cache))


class Pull(rayfed.Local):
    mu: float = 0.1

    def loss(self, client, sent, batch):
        far = [(p - sent.params[name]).pow(2).sum() for name, p in client.trainable().items()]
        return super().loss(client, sent, batch) + self.mu / 2 * torch.stack(far).sum()


def clients(count=3, examples=20, seed=0):
    """Rows of six numbers, whose class is the largest of the first three, by client."""
    rng = np.random.default_rng(seed)
    rows = {f"c {i}": rng.normal(0, 1, (examples, 6)).astype(np.float32) for i in range(count)}
    return {name: (x, x[:, :3].argmax(1)) for name, x in rows.items()}


def net(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def own(**changes):
    values = {"model": net(), "data": clients(), "tuning": "full", "rounds": 2, "cluster": "inline"}
    return rayfed.Experiment(**{**values, **changes})


METHODS = {
    "fedprox": ("local.mu=0.3", {"mu": 0.3}),
    "fedavg": ("", {}),
    "scaffold": ("train.momentum=0", {}),
    "ditto": ("", {}),
    "fedadam": ("", {}),
}


@pytest.mark.parametrize("name", quickly(METHODS, ["fedavg", "ditto"]))
def test_names_and_objects_give_the_same_digest_as_the_command_line(name, tmp_path):
    from rayfed.federation.method_registry import METHODS as FILES

    override, fields = METHODS[name]
    method = FILES.load(name)
    part = method if not fields else method.local(**fields)
    train = {"momentum": 0} if name == "scaffold" else {}
    tuning = Lora(rank=2)
    by_objects = rayfed.Experiment(**{**SMALL, "method": part, "tuning": tuning, "train": train}).run(
        quiet=True
    )
    given = ["data.limit=24", "model.options={depth: 2}", "model.pretrained=false", "tuning=lora", "rounds=2"]
    texts = [f"algorithm={name}", *given, "tuning.rank=2", "cluster=inline", f"output={tmp_path / 'run'}"]
    by_names = rayfed.simulate([*texts, *([override] if override else []), "figures=false"])
    assert by_objects.sha256 == by_names.sha256


def test_an_experiment_of_overrides_is_that_of_the_command_line_and_can_be_changed(tmp_path):
    texts = [
        "data.limit=24",
        "model.options={depth: 2}",
        "model.pretrained=false",
        "tuning=head",
        "train.epochs=2",
    ]
    texts += ["rounds=1", "cluster=inline"]
    base = rayfed.Experiment.from_overrides(["algorithm=fedavg", *texts])
    changed = base.changed(method="fedprox", **{"local.mu": 0.3})
    chosen = ["algorithm=fedprox", "local.mu=0.3", *texts, "figures=false"]
    by_command = rayfed.simulate([*chosen, f"output={tmp_path / 'run'}"])
    assert by_command.path == tmp_path / "run"
    assert changed.run(quiet=True).sha256 == by_command.sha256 != base.run(quiet=True).sha256
    assert base.config().algorithm == "fedavg"
    with pytest.raises(ConfigError, match="rouds: no such key; did you mean 'rounds'"):
        base.changed(rouds=1).config()


def test_a_class_of_a_user_equals_the_method_of_the_same_formula():
    mine, named = (own(method=method, local={"mu": 0.3}).run(quiet=True) for method in (Pull, "fedprox"))
    assert mine.sha256 == named.sha256


def test_a_run_knows_its_scores_clients_model_and_figures(tmp_path):
    run = own(train={"lr": 0.1}).run(quiet=True)
    assert run.path is None
    assert run.accuracy == run.metrics["accuracy"] == run.history["accuracy"].iloc[-1]
    assert list(run.clients.index) == ["c0-c 0", "c1-c 1", "c2-c 2"]
    assert (run.clients["train"] + run.clients["val"] + run.clients["test"] == 20).all()
    network = run.model()
    assert list(network.state_dict()) == list(net().state_dict())
    assert torch.equal(network[2].weight, run.params["head.weight"])
    assert not torch.equal(network[2].weight, net()[2].weight)
    assert len(run.plot().axes) == 2
    assert f"{100 * run.accuracy:.4g}%" in run._repr_html_()
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(
        AttributeError, match=r"no 'speed'; its score is run\.accuracy, and run\.metrics has: round"
    ):
        _ = run.speed
    with pytest.raises(ConfigError, match="tuning: 'full' has no adapters in PEFT's format"):
        run.adapter(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="merged: tuning=full has no products to merge"):
        run.model(merged=True)


@pytest.mark.parametrize("block", [pytest.param(torch.no_grad, marks=STEADY), torch.inference_mode])
def test_a_run_in_a_block_without_gradients_is_the_same_run(block):
    same = own()
    wanted = same.run(quiet=True).sha256
    with block():
        assert same.run(quiet=True).sha256 == wanted
        assert [row.round for row in same] == [1, 2]
        assert not torch.is_grad_enabled()


def test_a_function_that_would_never_be_called_is_refused_before_anything_runs():
    class Misspelled(rayfed.Local):
        def los(self, client, sent, batch):
            return 0

    class Misplaced(rayfed.Local):
        def aggregate(self, state, cohort, updates):
            return state

    class Server(rayfed.Server):
        def agregate(self, state, cohort, updates):
            return state

    class Helped(rayfed.Server):
        def mixture(self):
            return 0

    for method, words in (
        (Misspelled, r"Misspelled.los \(.*\): a Local has no such hook; did you mean 'loss'\?"),
        (Misplaced, r"Misplaced.aggregate \(.*\): only a Server has this hook, a Local has not"),
        (Server, r"Server.agregate .*did you mean 'aggregate'\? begin the name with _ if it is a helper"),
        ([Helped, Misspelled], "Misspelled.los"),
    ):
        with pytest.raises(ConfigError, match=words):
            own(method=method).config()
    assert own(method=Helped).config().algorithm.startswith("Helped-")


def test_lora_on_any_module_is_written_for_peft(tmp_path):
    run = own(tuning=rayfed.LoRA(rank=2, targets="0")).run(tmp_path / "run", quiet=True)
    assert sorted(run.params) == ["0.lora_A", "0.lora_B", "head.bias", "head.weight"]
    plain, adapted, x = run.model(merged=True), run.model(), torch.from_numpy(clients()["c 0"][0])
    assert type(plain[0]) is nn.Linear
    assert list(plain.state_dict()) == list(net().state_dict())
    near(plain(x), adapted(x), 64)
    assert not torch.equal(plain[0].weight, net()[0].weight)
    folder = run.adapter(tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == "0"


@pytest.mark.parametrize(
    ("given", "tuning"),
    [
        ({}, "full"),
        ({"method": "fedprox"}, "full"),
        ({"model": net}, "full"),
        ({"model": rayfed.Model(net())}, "full"),
        ({"method": "flora"}, "lora"),
        ({"server": {"name": "fedit"}, "method": "fedavg"}, "lora"),
        ({"method": "zero_shot"}, "head"),
        ({"tuning": "bitfit"}, "bitfit"),
        ({"tuning": {"rank": 2}}, "lora"),
        ({"tuning.rank": 2}, "lora"),
        ({"model": "vit_mini"}, "lora"),
        ({"model": {"name": "resnet10t", "pretrained": False}}, "lora"),
    ],
)
def test_a_network_of_a_user_trains_as_a_whole_unless_a_tuning_is_chosen(given, tuning):
    given = {"model": net(), "data": clients(), **given}
    assert rayfed.Experiment(**given).config().tuning["name"] == tuning


def test_the_first_program_of_a_user_learns():
    run = rayfed.Experiment(model=net(), data=clients(examples=100), rounds=5, cluster="inline").run(
        quiet=True
    )
    assert run.accuracy > 0.5
    assert run.params.keys() == {"0.weight", "0.bias", "head.weight", "head.bias"}


def test_the_modules_that_are_trained_are_listed_before_the_run(capsys):
    own(tuning=rayfed.LoRA(rank=2, targets="0")).run(quiet=False)
    shown = capsys.readouterr().out
    assert shown.index("trained in 2 modules: 0, head") < shown.index("round 1/2")


def test_what_stays_at_a_client_is_in_its_personal_model():
    run = own(local={"stays": ["head"]}, train={"lr": 0.1}).run(quiet=True)
    mine, theirs = run.personal("c 0"), run.personal("c1-c 1")
    assert not torch.equal(mine[2].weight, theirs[2].weight)
    assert torch.equal(mine[0].weight, theirs[0].weight)
    with pytest.raises(ConfigError, match="client: 'c 9' does not exist"):
        run.personal("c 9")


def test_a_run_leaves_torch_as_it_was_in_the_process_of_the_user():
    """Threads, kernels and random numbers of a notebook are its own, also after a run with other settings."""

    def threads_of_numpy():
        return {i["filepath"]: i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"}

    experiment = own(cluster={"executor": "inline", "threads": 1}, deterministic=True)
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    try:
        with threadpool_limits(2, user_api="blas"):
            given = threads_of_numpy()
            run = experiment.run()
            run.personal("c 1")
            assert threads_of_numpy().items() >= given.items()
        assert torch.get_num_threads() == threads
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.equal(torch.rand(3), drawn)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)


def test_the_personal_model_of_a_method_that_keeps_nothing_is_the_global_one():
    run = own(train={"lr": 0.1}).run(quiet=True)
    whole, mine = run.model().state_dict(), run.personal("c 0").state_dict()
    assert all(torch.equal(whole[name], mine[name]) for name in whole)


def test_the_personal_model_of_ditto_is_the_one_that_its_client_trains():
    run = own(method="ditto", train={"lr": 0.1}, local={"lam": 0.0}).run(quiet=True)
    mine, theirs, whole = run.personal("c 0"), run.personal("c 1"), run.model()
    assert len({net[2].weight.sum().item() for net in (mine, theirs, whole)}) == 3
    alone = own(method="local", train={"lr": 0.1}).run(quiet=True).personal("c 0")
    assert torch.equal(alone[2].weight, mine[2].weight)  # with lam=0 nothing pulls it to the global model


def test_rounds_can_be_followed_and_left():
    rows = list(own())
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1].accuracy == rows[-1]["accuracy"]
    assert rows[-1].round == 2
    with pytest.raises(AttributeError, match="this round has no 'speed'; it has: round, "):
        _ = rows[-1].speed
    assert rows[-1]["accuracy"] == own().run(quiet=True).accuracy
    for row in own(rounds=50):
        assert row["round"] == 1
        break


def test_an_interrupted_run_is_resumed_to_the_same_bytes(tmp_path):
    whole = own(method=Pull).run(tmp_path / "whole", quiet=True)
    own(method=Pull, rounds=1).run(tmp_path / "part", quiet=True)
    continued = own(method=Pull).resume(tmp_path / "part", quiet=True)
    assert continued.sha256 == whole.sha256
    assert continued.path == tmp_path / "part"


@dataclass(frozen=True)
class HalfStep(rayfed.Server):
    step: float = 0.5


def test_the_halves_of_a_pair_are_imported_one_by_one():
    for method in ((HalfStep(step=0.5), Pull), (Pull, HalfStep), Method(server=HalfStep, local=Pull)):
        config = own(method=method, local={"mu": 0.2}).config()
        assert config.algorithm == f"{__name__}:HalfStep"
        assert config.server["step"] == 0.5
        assert config.local == config.local | {"name": f"{__name__}:Pull", "mu": 0.2}
        halves = build_parts(config)
        assert (type(halves.server).__name__, type(halves.local).__name__) == ("HalfStep", "Pull")


class Interrupting(rayfed.Local):
    def loss(self, client, sent, batch):
        if sent.round == 1:
            raise KeyboardInterrupt
        return super().loss(client, sent, batch)


def test_advice_about_a_run_of_own_objects_names_the_call_that_continues_it(tmp_path):
    run = tmp_path / "run"
    call = f"rayfed.Experiment(...).resume({str(run)!r})"
    with pytest.raises(KeyboardInterrupt) as caught:
        own(method=Interrupting).run(run, quiet=True)
    assert caught.value.__notes__ == [f"finished rounds are kept; continue with: {call}"]
    assert len(traceback.extract_tb(caught.tb)) < 8
    with pytest.raises(ConfigError, match=re.escape(f"set overwrite=true or continue it with {call}")):
        own(method=Interrupting).run(run, quiet=True)


class Seen(nn.Module):
    """A linear classifier that keeps the largest value it was given in training."""

    largest: ClassVar[list[float]] = []

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        if self.training:
            self.largest.append(float(x.max()))
        return self.head(x.flatten(1))


def test_values_of_a_users_images_above_1_reach_the_network_under_random_changes():
    images = {"a": (np.full((8, 1, 8, 8), 5.0, np.float32), np.arange(8) % 2)}
    experiment = own(model=Seen, data=images, rounds=1, **{"data.augment": ["flip"]})
    Seen.largest.clear()
    experiment.run(quiet=True)
    assert Seen.largest[-1] == 5  # of the last batch; before, other inputs are tried


def test_gray_images_of_a_user_are_augmented():
    rng = np.random.default_rng(0)
    images = {
        f"c {i}": (rng.integers(0, 255, (20, 8, 8)).astype(np.uint8), np.arange(20) % 3) for i in range(2)
    }
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    augmented = {"data.augment": ["rotate", "crop"]}
    run = own(model=network, data=images, rounds=1, **augmented).run(quiet=True)
    assert run.sha256 != own(model=network, data=images, rounds=1).run(quiet=True).sha256
    with pytest.raises(ConfigError, match=r"data\.augment: .* the inputs have shape \(6,\)"):
        own(**augmented).run(quiet=True)


def test_a_run_says_what_was_learned_and_which_score_it_has(capsys):
    one_hot = {name: (x, np.eye(3, dtype=int)[y]) for name, (x, y) in clients().items()}
    run = own(data=one_hot).run(quiet=False)
    assert "task: multilabel, scored by auc\n" in capsys.readouterr().out
    with pytest.raises(AttributeError, match=r"no 'accuracy'; its score is run\.auc, and run\.metrics has"):
        _ = run.accuracy
    assert run.auc == run.metrics["auc"]


def test_a_changed_source_of_a_method_is_named(tmp_path):
    namespaces = []
    for factor in (1, 2):
        names = {"rayfed": rayfed, "__name__": "cell"}
        exec(
            f"class Own(rayfed.Server):\n    def base_weights(self, updates):\n        return [{factor} "
            "/ 3] * 3",
            names,
        )
        namespaces.append(names["Own"])
    own(method=namespaces[0], rounds=1).run(tmp_path / "run", quiet=True)
    with pytest.raises(
        ConfigError, match="algorithm: the source or the values of Own changed since the run in"
    ):
        own(method=namespaces[1]).resume(tmp_path / "run", quiet=True)
    with pytest.raises(
        ConfigError, match=r"model.name: .* 'Sequential-.*' would change|the values of Sequential"
    ):
        own(method=namespaces[0], model=nn.Sequential(nn.Linear(6, 3))).resume(tmp_path / "run", quiet=True)


def test_the_record_says_what_the_objects_were(tmp_path):
    own(method=Pull).run(tmp_path / "run", quiet=True)
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())["objects"]
    assert facts["algorithm"]["name"] == f"{Pull.__module__}:Pull"
    assert facts["model"]["name"].startswith("Sequential-")
    assert {len(entry["digest"]) for entry in facts.values()} == {64}


def test_one_pair_of_arrays_and_a_partition():
    x, y = (np.concatenate(parts) for parts in zip(*clients().values(), strict=True))
    partition = rayfed.Partition(scheme="dirichlet", clients_per_domain=2, min_samples=5)
    run = own(data=(x, y), partition=partition).run(quiet=True)
    assert len(run.clients) == 2


def test_splits_of_the_user_are_kept():
    (x, y), *_ = clients(1, 30).values()
    parts = {"train": (x[:20], y[:20]), "val": (x[20:24], y[20:24]), "test": (x[24:], y[24:])}
    run = own(data={"a": parts, "b": parts}).run(quiet=True)
    assert run.clients[["train", "val", "test"]].to_numpy().tolist() == [[20, 4, 6]] * 2


def test_a_dataset_of_torch_equals_its_arrays():
    arrays = clients()
    sets = {
        name: torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        for name, (x, y) in arrays.items()
    }
    assert own(data=sets).run(quiet=True).sha256 == own(data=arrays).run(quiet=True).sha256


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"loss": lambda o, y: (o.squeeze(1) - y) ** 2, "metrics": {"mae": lambda o, y: (o - y).abs()}},
            r"task.metrics\['mae'\] returned shape \(2, 2\) for outputs of shape \(2, 1\)",
        ),
        (
            {
                "loss": lambda o, y: (o.squeeze(1) - y) ** 2,
                "metrics": {"mae": lambda o, y: (o - y).abs().mean()},
            },
            r"task.metrics\['mae'\] returned shape \(\) .* return one number for each example, shape \(2,\)",
        ),
        (
            {"loss": nn.functional.mse_loss, "metrics": {"mae": lambda o, y: (o.squeeze(1) - y).abs()}},
            "task: the loss of 'own_task' cannot be computed .* Using a target size",
        ),
    ],
)
def test_functions_of_a_task_with_wrong_shapes_are_named(task, message):
    data = {name: (x, y.astype(np.float32)) for name, (x, y) in clients().items()}
    with pytest.raises(ConfigError, match=message):
        own(model=net(1), data=data, task=rayfed.Task(**task, smaller=("mae",))).run()


def test_a_rule_that_forgets_to_return_a_state_is_named():
    class Silent(rayfed.Server):
        def aggregate(self, state, cohort, updates):
            super().aggregate(state, cohort, updates)

    with pytest.raises(ServerError, match=r"Silent.*\.aggregate returned None; return a ServerState"):
        own(method=Silent).run()

    class Mistaken(rayfed.Server):
        def aggregate(self, state, cohort, updates):
            return state.replaced()

    with pytest.raises(
        ServerError, match=r"round 1: the server of Mistaken.* failed: AttributeError: .*test_exp"
    ):
        own(method=Mistaken).run()


class Forgetful(rayfed.Server):
    def aggregate(self, state, cohort, updates):
        return {"beta": state}["alpha"]


class Refusing(rayfed.Server):
    def aggregate(self, state, cohort, updates):
        raise type("Refused", (Exception,), {})("no")


class Absent(rayfed.Local):
    def loss(self, client, sent, batch):
        return {"beta": 0}["alpha"]


@pytest.mark.parametrize(
    ("method", "said"),
    [(Forgetful, "KeyError: 'alpha'"), (Refusing, "Refused: no"), (Absent, "KeyError: 'alpha'")],
)
def test_an_error_of_a_method_in_a_comparison_has_its_type_and_line(method, said):
    with pytest.raises(RayFedError, match=rf"{said} \(test_experiment\.py, line \d+\)"):
        rayfed.compare([own(rounds=1), own(rounds=1, method=method)])


def test_what_a_method_measures_at_clients_is_a_table():
    class Measuring(rayfed.Local):
        def loss(self, client, sent, batch):
            client.measure(examples=float(len(batch[1])), ones=1.0)
            return super().loss(client, sent, batch)

    run = own(method=Measuring).run()
    table = run.measured
    assert table[["round", "exchange", "client"]].to_numpy().tolist() == [
        [number, "fit", name] for number in (1, 2) for name in run.clients.index
    ]
    assert (table["domain"] == list(run.clients["domain"]) * 2).all()
    assert (table["ones"] == 1.0).all()
    # Batches are of one size but for the last one, so that their mean is the number of examples over batches.
    assert ((table["examples"] > 0) & (table["examples"] <= run.config.train.batch_size)).all()
    nothing = own(rounds=1).run().measured
    assert list(nothing.columns) == ["round", "exchange", "client", "domain"]
    assert nothing.empty


def test_a_model_is_built_where_gradients_are_off():
    run = own().run()
    x = torch.zeros(2, 6)
    with torch.no_grad():
        assert torch.equal(run.model()(x), run.model()(x))


def test_a_task_of_the_user_is_shown_by_its_own_metric(tmp_path):
    def loss(output, y):
        return nn.functional.cross_entropy(output, y, reduction="none")

    def surprise(output, y):
        return -output.log_softmax(1).gather(1, y[:, None])[:, 0]

    task = rayfed.Task(loss=loss, metrics={"surprise": surprise}, smaller=("surprise",), name="guessing")
    run = own(task=task).run(tmp_path / "run", quiet=True)
    assert run.metric == "surprise"
    assert run.surprise == pytest.approx(run.metrics["loss"])
    assert run.metrics["worst_client_surprise"] == run.clients["surprise"].max()
    assert "surprise" in (tmp_path / "run" / "report.md").read_text()


class Raising(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        if index == 17:
            raise OSError("the file is gone")
        return torch.zeros(6), index % 3


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


@dataclass
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)

    __hash__ = nn.Module.__hash__


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.hook = (lambda: (yield))()  # a generator cannot be pickled

    def forward(self, x):
        return self.layer(x)


def bad(change):
    """The data of three clients, of which the second one is changed."""
    found = clients()
    x, y = found["c 1"]
    found["c 1"] = change(x.copy(), y.copy())
    return found


def nan(x, y):
    x[4, 2] = np.nan
    return x, y


MISFITS = {
    "data: ": [
        ({"data": {}}, ""),
        ({"data": bad(nan)}, "data['c 1']: the inputs of example 4 hold NaN or infinity"),
        ({"data": bad(lambda x, y: (x[:0], y[:0]))}, "data['c 1']: the client has no examples"),
        ({"data": bad(lambda x, y: (x[:5], y))}, "data['c 1']: there are 5 inputs and 20 targets"),
        ({"data": bad(lambda x, y: (x[:, :4], y))}, "data['c 1']: the inputs are float32 of shape (4,)"),
        ({"data": bad(lambda x, y: (x, y - 1))}, "data['c 1']: the target of example"),
        (
            {"data": bad(lambda x, y: Raising())},
            "item 17 of Raising raised OSError: the file is gone (test_exp",
        ),
        ({"data": bad(lambda x, y: Endless())}, "can only be iterated"),
        ({"data": bad(lambda x, y: 3)}, "data['c 1']: 3 is neither a pair (inputs, targets)"),
        (
            {"data": {"a": (np.zeros((30, 6)), np.arange(30)[:, None] % 10)}, "model": net(1)},
            "targets have shape (30, 1) with values 0 to 9; for classes give shape (30,), e.g. y.ravel()",
        ),
        (
            {"data": {"a": (np.zeros((4, 6)), np.arange(12).reshape(4, 3))}},
            "data['a']: targets have shape (4, 3) with values 0 to 11; several labels are 0 or 1",
        ),
        (
            {"data": {"a": (np.zeros((4, 6)), np.float32([[0, 1, 2.5]] * 4))}, "task": "multilabel"},
            "targets have shape (4, 3) with values 0 to 2.5",
        ),
    ],
    "model: ": [
        ({"model": net(2)}, "has 2 outputs, and the targets have 3 classes"),
        (
            {"model": nn.Linear(4, 3)},
            "does not take inputs of shape (6,), float32: RuntimeError: ",
        ),
        ({"model": Unused()}, "unused.weight and 1 others of"),
        ({"model": Locked()}, "Locked cannot be sent to other processes"),
        ({"model": nn.Linear(6, 3, device="meta")}, "weight of Linear has no values"),
        ({"model": rayfed.Model(net(), head="9")}, "model: head: '9' does not exist"),
        ({"model": rayfed.Model(net(), blocks="0")}, "is no list of blocks of one type"),
        ({"model": lambda: 3}, "returned 3, no nn.Module"),
        ({"model": nn.Flatten()}, "model: Flatten has no parameters"),
        ({"model": lambda: nn.Flatten()}, "model: Flatten has no parameters"),
    ],
    "tuning": [
        ({"tuning": rayfed.LoRA(targets="nothing")}, "tuning.targets: 'nothing' matches no layer"),
    ],
    "task": [
        (
            {"task": "regression"},
            "task: the loss of 'regression' cannot be computed from outputs of shape (2, 3)",
        ),
        ({"task": "guess"}, "task: 'guess' does not exist"),
        (
            {"data": {"a": (np.zeros((30, 6)), np.arange(30) % 3.0)}},
            "targets are floats, so 'regression' was assumed; for classes use y.astype(int)",
        ),
    ],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [pair for pairs in MISFITS.values() for pair in pairs],
    ids=[f"{where}{number}" for where, pairs in MISFITS.items() for number in range(len(pairs))],
)
def test_a_misfit_is_one_line_and_nothing_is_started(changes, message, monkeypatch):
    monkeypatch.setattr("rayfed.engine.session.launch", lambda *a, **k: pytest.fail("the run was started"))
    with pytest.raises(ConfigError) as caught:
        own(**changes).run(quiet=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["roundz", "local.nu", "train.lrr"])
def test_an_unknown_key_is_the_line_of_the_command_line(key):
    with pytest.raises(ConfigError, match=re.escape(f"{key}: no such key")):
        own(**{key: 3}).config()


MODULE = """
import os
import signal

import numpy as np
from torch import nn

import rayfed

RNG = np.random.default_rng(0)
ROWS = {f"c{i}": RNG.normal(0, 1, (20, 6)).astype(np.float32) for i in range(3)}
CLIENTS = {name: (x, x[:, :3].argmax(1)) for name, x in ROWS.items()}


def make():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Dying(rayfed.Local):
    def loss(self, client, sent, batch):
        if sent.round == 1 and os.environ.get("DIES"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(client, sent, batch)


def experiment():
    keys = {"tuning": "full", "rounds": 3, "cluster": "inline"}
    return rayfed.Experiment(method=Dying, model=make, data=CLIENTS, **keys)
"""


@pytest.mark.slow
@pytest.mark.steady
def test_a_killed_run_goes_on_from_python_and_from_the_command_line(tmp_path, cache):
    """What can be imported is resumed by the command; the digests are those of a run that was not killed."""
    import os
    import subprocess
    import sys

    from tests.conftest import ROOT

    (tmp_path / "mine.py").write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "RAYFED_CACHE": str(cache)}

    def python(*arguments, **more):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env={**env, **more}, capture_output=True, text=True)

    names = [
        "algorithm=mine:Dying",
        "model=mine:make",
        "data=mine:CLIENTS",
        "tuning=full",
        "rounds=3",
        "cluster=inline",
    ]
    killed = "import mine; mine.experiment().run('{}', quiet=True)"
    whole = python("-c", "import mine; print(mine.experiment().run(quiet=True).sha256)")
    digest = whole.stdout.strip()
    assert len(digest) == 64, whole.stderr
    assert python("-c", killed.format("a"), DIES="1").returncode == -9
    again = python("-c", "import mine; print(mine.experiment().resume('a', quiet=True).sha256)")
    assert again.stdout.strip() == digest, again.stderr
    assert python("-m", "rayfed.run", *names, "output=b", DIES="1").returncode != 0
    resumed = python("-m", "rayfed.resume", "b")
    assert f"tensors sha256 {digest[:16]}" in resumed.stdout, resumed.stderr
    (tmp_path / "mine.py").write_text(MODULE.replace("sent.round == 1", "sent.round == 9"))
    changed = python("-m", "rayfed.resume", "b", "rounds=+1")
    assert changed.returncode == 2
    assert "algorithm: the source of the method changed since" in changed.stderr


def test_a_finished_run_is_opened_from_its_folder(small, tmp_path):
    run = small("algorithm=fedavg", "rounds=1", "data.limit=24", "evaluation.personal=true")
    again = rayfed.load(str(run.path))
    assert (again.sha256, again.metrics, again.path) == (run.sha256, run.metrics, run.path)
    assert again.config == run.config
    with pytest.raises(ConfigError, match="there is no such folder"):
        rayfed.load(tmp_path / "none")
    (run.path / "model" / "params.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^load: the run in .* is not finished; .*continue with"):
        rayfed.load(run.path)
