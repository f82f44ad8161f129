"""Learning rates over the rounds, and the number of batches of a pass."""

import math

import pytest

from rayfed.federation.train_config import TrainConfig
from rayfed.resume import main as resume
from rayfed.testing import small_setup
from tests.conftest import refused
from tests.rounding import near


def rates(rounds, **options):
    return [TrainConfig(lr=0.4, **options).rate(r, rounds) for r in range(rounds)]


def test_a_constant_rate():
    assert rates(3) == [0.4] * 3
    assert not TrainConfig().varies


def test_cosine_from_the_full_rate_towards_zero():
    # 0.4 (1 + cos(pi r / 4)) / 2: cos of 0, 45, 90 and 135 degrees
    half = math.sqrt(0.5)
    expected = [0.4, 0.2 * (1 + half), 0.2, 0.2 * (1 - half)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)
    config = TrainConfig(schedule="cosine")
    assert config.rate(4, 4) == config.rate(3, 4) > 0  # the round that analyses of a finished run train


def test_a_step_at_eighty_percent_or_elsewhere():
    assert rates(10, schedule="step") == pytest.approx([0.4] * 8 + [0.04] * 2)
    assert rates(4, schedule="step", step_at=0.5, step_factor=0.5) == pytest.approx([0.4, 0.4, 0.2, 0.2])
    # 0.7 * 10 is 7.000000000000001 or less: seven rounds before the step all the same
    assert rates(10, schedule="step", step_at=0.7) == pytest.approx([0.4] * 7 + [0.04] * 3)


def test_warm_up_comes_before_the_schedule():
    assert rates(4, warmup_rounds=3) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates(3, warmup_rounds=1, schedule="cosine") == pytest.approx([0.2, 0.4, 0.2])
    assert rates(2, warmup_rounds=5, schedule="cosine") == pytest.approx([0.4 / 6, 0.8 / 6])


def test_the_last_batch_can_be_dropped():
    keep, drop = TrainConfig(batch_size=4), TrainConfig(batch_size=4, drop_last=True)
    assert [keep.batches(n) for n in (1, 4, 5, 8, 11)] == [1, 1, 2, 2, 3]
    assert [drop.batches(n) for n in (1, 4, 5, 8, 11)] == [1, 1, 1, 2, 2]
    assert [drop.examples(n) for n in (0, 3, 4, 5, 11)] == [0, 3, 4, 4, 8]
    assert TrainConfig(batch_size=4, drop_last=True, epochs=3, max_steps=5).examples(11) == 20


def small_clients(monkeypatch, *overrides):
    """Numbers of examples of the batches that a client trains on."""
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.inline import InlineExecutor
    from rayfed.federation.client import Client

    sizes = []
    batches = Client._pass

    def note(client, split, order, size, augmented=False):
        for x, y in batches(client, split, order, size, augmented):
            if order is not None:  # not a pass in order, for scores
                sizes.append(len(x))
            yield x, y

    monkeypatch.setattr(Client, "_pass", note)
    setup = small_setup(
        "algorithm=fedavg", "data.domains=[plain]", "rounds=1", "evaluation.every=0", *overrides
    )
    for _ in run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start):
        pass
    return sizes


def test_batches_are_complete_and_every_pass_is_shuffled_anew(monkeypatch):
    two = ("train.epochs=2", "train.batch_size=3")  # of 8 images
    assert small_clients(monkeypatch, *two) == [3, 3, 2] * 2
    assert small_clients(monkeypatch, *two, "train.drop_last=true") == [3, 3] * 2
    assert small_clients(monkeypatch, "train.batch_size=16", "train.drop_last=true") == [8]


def test_the_rate_of_each_round_is_used_and_recorded(small):
    options = ("rounds=3", "algorithm=fedprox", "train.momentum=0")
    run = small(*options, "train.schedule=step", "train.step_at=0.3", "train.step_factor=1e-9")
    assert run.history.lr.tolist() == pytest.approx([0.02, 0.02e-9, 0.02e-9])
    first = small("rounds=1", *options[1:])
    for name, value in first.params.items():
        near(run.params[name], value, 2 * (5 + 4))  # later rounds did nothing but average equal values
    assert "lr" not in small("rounds=1").history


def test_rates_that_a_method_sets_itself_follow_the_schedule():
    from rayfed.engine.loop import run_rounds
    from rayfed.executors.inline import InlineExecutor

    options = ("train.schedule=step", "train.step_at=0", "train.step_factor=1e-9", "rounds=1")
    setup = small_setup("algorithm=fedgcr", "local.optimizer=authors", "data.domains=[plain]", *options)
    executor = InlineExecutor(setup.context, setup.weights)
    *_, last = run_rounds(setup.experiment, executor, setup.start)
    for name, value in setup.start.items():
        near(last.state.params[name], value, 4)


def test_a_run_with_a_schedule_continues_to_the_same_bytes_and_gets_no_longer(small, capsys):
    options = ("rounds=3", "train.schedule=cosine", "train.warmup_rounds=1", "train.keep_optimizer=true")
    whole, run = small(*options), small(*options)
    (run.path / "model" / "params.safetensors").unlink()
    last = run.path / "checkpoints" / "round-000003" / "state.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    assert resume([str(run.path), "--quiet"]) == 0
    tensors = ("model", "params.safetensors")
    assert run.path.joinpath(*tensors).read_bytes() == whole.path.joinpath(*tensors).read_bytes()
    capsys.readouterr()
    assert resume([str(run.path), "rounds=+1"]) == 2
    error = capsys.readouterr().err
    assert "rounds: 4 would change the learning rates of the 3 rounds" in error
    assert "train.schedule=cosine" in error
    edited = run.path / "config.yaml"
    edited.write_text(edited.read_text().replace("rounds: 3\n", "rounds: 5\n"))
    assert resume([str(run.path)]) == 2
    assert "rounds in config.yaml was 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.schedule=linear", "train.schedule: 'linear' is not 'constant', 'cosine' or 'step'"),
        ("train.step_at=1.5", "train.step_at: 1.5 is not allowed; it must be at most 1"),
        ("train.step_factor=0", "train.step_factor: 0"),
        ("train.warmup_rounds=-1", "train.warmup_rounds: -1"),
        ("train.drop_last=3", "train.drop_last"),
        ("train.micro_batch=0", "train.micro_batch: 0"),
    ],
)
def test_wrong_values_are_named(override, words):
    assert words in refused("algorithm=fedavg", override)
