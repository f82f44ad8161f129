"""Tensors that stay at the client: which ones, what is sent, and what the client continues from."""

import pytest
import torch

from rayfed.config.schema import load_config, with_method
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.client import Client
from rayfed.federation.tensors_that_stay import STAYS, add_own, head_of, keep_own, names_that_stay
from rayfed.testing import small_setup
from rayfed.types import Broadcast
from tests.conftest import SMALL
from tests.rounding import equally_near, exactly_trained

NAMES = ("blocks.0.attn.proj.lora_A", "blocks.0.attn.proj.lora_B", "head.weight")


def numbers(*values):
    return {name: torch.tensor(value) for name, value in zip(NAMES, values, strict=True)}


@pytest.fixture(scope="module")
def setup(cache):
    return small_setup(
        "algorithm=fedavg", f"data.cache={cache}", "data.domains=[plain,fonts]", "local.stays=[head]"
    )


def test_words_and_expressions(setup):
    model = setup.context.skeleton()
    assert names_that_stay(model, ()) == frozenset()
    assert names_that_stay(model, ["head"]) == {"head.weight", "head.bias"}
    assert {name.rsplit(".", 1)[1] for name in names_that_stay(model, ["lora_A", "lora_B"])} == {
        "lora_A",
        "lora_B",
    }
    assert all(n.startswith("blocks.1.") for n in names_that_stay(model, [r"blocks\.1\..*"]))
    for rule, what in (("norm", "no tensor"), ("hea", "no tensor"), ("(", "not a regular expression")):
        with pytest.raises(ConfigError, match=rf"^local\.stays: .*{what}"):
            names_that_stay(model, ["head", rule])


def test_one_key_is_the_same_switch_for_every_method():
    for method, stays in (("fedavg", ["head"]), ("fedsa_lora", ["lora_B", "head"]), ("fedper", ["head"])):
        config = load_config([f"algorithm={method}", "head=personal"])
        assert config.local["stays"] == with_method(config, method).local["stays"] == stays
    assert load_config(["head=frozen", "tuning=lora"]).tuning["train_head"] is False
    assert load_config(["head=shared", "algorithm=fedsa_lora"]).local["stays"] == ["lora_B"]


@pytest.mark.slow
@pytest.mark.steady
def test_what_happens_to_the_head_is_what_the_key_asks_for(cache):
    def of(*overrides):
        return small_setup(f"data.cache={cache}", "data.domains=[plain]", "rounds=1", *overrides)

    for method in ("fedavg", "fedsa_lora", "fedper"):
        own = of(f"algorithm={method}", "head=personal")
        assert own.head == "personal"
        assert not [name for name in own.start if name.startswith("head.")]
    shared = of("algorithm=fedsa_lora")
    assert shared.head == of("algorithm=fedsa_lora", "head=shared").head == "shared"
    frozen = of("algorithm=fedavg", "tuning=lora", "head=frozen")
    assert frozen.head == "frozen"
    assert not [name for name in frozen.start if name.startswith("head.")]
    assert head_of(frozen.context.skeleton(), ["lora_A"]) == "frozen"
    assert of("algorithm=fedavg", "tuning=exits", "head=shared").head == "shared"
    for settings, why in (
        (["head=frozen", "tuning=head"], "'frozen' is not possible: tuning=head trains it"),
        (["head=shared", "local.stays=[head]"], "'shared' is not possible: it stays at the clients"),
        (["head=personal", "tuning=lora", "tuning.train_head=false"], "tuning=lora trains no head"),
    ):
        with pytest.raises(ConfigError, match=f"^head: .*{why}"):
            of("algorithm=fedavg", *settings)


def test_a_message_is_completed_and_an_answer_divided():
    sent = Broadcast(round=0, params={NAMES[0]: torch.tensor(1.0)}, blocks=(1,))
    completed = add_own(sent, NAMES[1:], numbers(5.0, 6.0, 7.0))
    assert completed.params == {NAMES[0]: 1.0, NAMES[2]: 7.0}  # the client does not hold block 0
    assert sent.params == {NAMES[0]: 1.0}
    store = {STAYS: {NAMES[2]: torch.tensor(0.0), "other": torch.tensor(4.0)}}
    client = Client("a", None, None, None, None, store, stays=frozenset(NAMES[1:]))
    answer = keep_own(numbers(1.0, 2.0, 3.0), client)
    assert answer == {NAMES[0]: 1.0}
    assert store[STAYS] == {NAMES[1]: 2.0, NAMES[2]: 3.0, "other": 4.0}
    assert keep_own(answer, client) == answer


def test_each_client_continues_from_its_own_head_and_is_scored_with_it(setup):
    executor = InlineExecutor(setup.context, setup.weights)
    rounds = list(run_rounds(setup.experiment, executor, setup.start))
    assert not {"head.weight", "head.bias"} & set(rounds[-1].state.params)
    stores = {cid: executor.stores()[cid].value[STAYS] for cid in setup.experiment.clients}
    heads = [store["head.weight"] for store in stores.values()]
    assert not torch.equal(heads[0], heads[1])
    assert [s.id for s in setup.experiment.sets] == list(setup.experiment.clients)


def test_what_stays_is_not_counted_as_traffic(small):
    plain, run = small("rounds=1"), small("rounds=1", "local.stays=[head]")
    size = 5 * 4 * sum(plain.params[name].numel() for name in ("head.weight", "head.bias"))
    for way in ("bytes_up", "bytes_down"):
        assert run.history[way].tolist() == [plain.history[way].tolist()[0] - size]


def test_where_everything_stays_clients_train_alone(small):
    run, alone = small("local.stays=['.*']"), small("algorithm=local")
    assert run.params == {}
    assert run.history["accuracy"].tolist() == alone.history["accuracy"].tolist()


def test_a_group_keeps_what_stays_for_each_client(small, cache):
    runs = [small("local.stays=[lora_B]", f"train.group={n}") for n in (1, 3)]
    judge = prepared(load_config([*SMALL, f"data.cache={cache}", "local.stays=[lora_B]"]))
    equally_near(runs[0].params, runs[1].params, exactly_trained(judge))
    assert runs[0].history["accuracy"].tolist() == runs[1].history["accuracy"].tolist()


def test_methods_with_values_for_each_tensor_leave_out_what_stays(small):
    for method in ("scaffold", "feddyn"):
        run = small(f"algorithm={method}", "local.stays=[head]")
        assert "head.weight" not in run.params
        assert all(torch.isfinite(value).all() for value in run.params.values())


@pytest.mark.parametrize("channel", ["[{clip: 1.0e-9}]", "[int8]"])
def test_a_channel_neither_changes_nor_sends_what_stays(small, channel):
    """With the smallest clip nothing that is sent moves; the client's own tensors move all the same."""
    plain = small("rounds=1", "local.stays=[lora_B,head]", "tuning.freeze_a=true", "evaluation.every=1")
    run = small("rounds=1", "local.stays=[lora_B,head]", "tuning.freeze_a=true", f"channel={channel}")
    assert run.params == plain.params == {}
    assert run.history["bytes_up"].tolist() == [0]
    assert run.history["accuracy"].tolist() == plain.history["accuracy"].tolist()


def test_a_run_whose_head_stayed_cannot_be_analysed(small):
    from rayfed.report.reopen import reopen

    run = small("rounds=1", "local.stays=[head]")
    with pytest.raises(ConfigError, match=r"^local\.stays: head stay"):
        reopen(run.path)
