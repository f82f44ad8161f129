"""A key of another section, or of another program, is answered with the key to write."""

import pickle

import pytest

from rayfed.config.check_keys import UnknownKeyError
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from tests.conftest import refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=0.1", "lr: no such key; did you mean train.lr?"),
        ("local.lr=0.1", "local.lr: no such key; did you mean train.lr?"),
        ("local.epochs=2", "local.epochs: no such key; did you mean train.epochs?"),
        ("train.rounds=2", "train.rounds: no such key; did you mean rounds?"),
        ("learning_rate=1", "learning_rate: no such key; did you mean train.lr?"),
        ("mu=1", "mu: no such key; did you mean local.mu?"),
        ("partition=dirichlet", "partition: no such key; did you mean data.partition.scheme?"),
        (
            "alpha=1",
            "alpha: no such key; did you mean data.population.alpha or data.partition.alpha or tuning.alpha?",
        ),
    ],
)
def test_the_key_is_found_in_the_whole_config(override, message):
    assert refused("algorithm=fedprox", "tuning=lora", override) == message


def test_a_device_is_answered_with_a_sentence():
    message = refused("device=cuda")
    assert message.startswith("device: no such key; GPUs are used when present (cluster.gpus_per")


@pytest.mark.parametrize(
    ("override", "advice"),
    [("row=FedRA", "write experiment=PAPER/TABLE too"), ("config=mine.yaml", "write --config FILE")],
)
def test_what_is_no_key_but_a_choice_or_an_option_is_answered_with_it(override, advice):
    assert advice in refused(override)


def test_a_list_of_methods_without_brackets_is_answered_with_the_list():
    message = refused("compare=fedavg,fedprox")
    assert message == "compare: 'fedavg,fedprox' is not a list; write compare=[fedavg,fedprox]"


def test_a_key_that_is_nowhere_names_those_of_its_section():
    message = refused("train.lrr=1")
    assert message.startswith("train.lrr: no such key; did you mean 'lr'? Keys here: ")
    assert "momentum" in message


def test_the_error_can_be_sent_between_processes():
    again = pickle.loads(pickle.dumps(UnknownKeyError("lr: no such key", "lr")))
    assert (str(again), again.key) == ("lr: no such key", "lr")


@pytest.mark.parametrize("key", ["local.mu", "mu"])
def test_a_hyperparameter_of_other_methods_names_these(key):
    message = refused("algorithm=fedgcr", f"{key}=1")
    assert message.startswith(
        f"{key}: no such key with algorithm=fedgcr; local.mu is a key of algorithm=fedclip|"
    )
    assert "fedprox" in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("key", "whose"),
    [
        ("local.muu", "Keys of algorithm=fedgcr: first_loss"),
        ("server.muu", "Keys of algorithm=fedgcr: "),
        ("tuning.muu", "Keys of tuning=gc_prompt: "),
        ("train.muu", "Keys here: "),
    ],
)
def test_the_keys_that_are_listed_are_said_to_be_of_what_was_chosen(key, whose):
    assert whose in refused("algorithm=fedgcr", f"{key}=1")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("algorithm: fedprox\nrounds: 2\n", "the section model is missing"),
        ("model: vit_mini\n", "model is 'vit_mini'"),
    ],
)
def test_a_file_with_a_few_keys_is_no_config_and_says_what_to_write(text, what, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config([], file)
    assert str(caught.value).startswith(
        f"--config: '{file}' is no whole config: {what}; write its values as over"
    )
