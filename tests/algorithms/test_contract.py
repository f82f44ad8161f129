"""What every file of algorithms/ promises. A new file is tested without writing a test."""

from contextlib import nullcontext

import pytest

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS
from rayfed.testing import (
    DOMAINS,
    METHOD_CHECKS,
    ONE_EXAMPLE,
    leaves_messages_and_frozen_weights_alone,
    repeats_itself_after_an_interruption,
    same_tensors_on_actors,
    says_what_it_is,
    small_setup,
    survives_a_client_with_one_example,
)
from tests.conftest import ROOT, quickly

NAMES = METHODS.names()


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    says_what_it_is(name)


@pytest.mark.parametrize("name", quickly(NAMES))
def test_leaves_messages_and_frozen_weights_alone(name, cache):
    leaves_messages_and_frozen_weights_alone(name, [f"data.cache={cache}"])


def test_no_check_is_forgotten_here():
    """`check_method` runs these four; each has a test in this file."""
    assert (
        says_what_it_is,
        leaves_messages_and_frozen_weights_alone,
        survives_a_client_with_one_example,
        repeats_itself_after_an_interruption,
    ) == METHOD_CHECKS


@pytest.mark.parametrize("name", quickly(NAMES))
def test_survives_a_client_with_one_example(name, cache):
    survives_a_client_with_one_example(name, [f"data.cache={cache}"])


@pytest.mark.parametrize("name", quickly(NAMES))
def test_repeats_itself_after_an_interruption_with_missing_clients(name, cache):
    *rounds, _ = repeats_itself_after_an_interruption(name, [f"data.cache={cache}"])
    assert 0 <= rounds[-1]["accuracy"] <= 1
    clients = 1 if name == "centralized" else 3
    if clients > 1 and name != "zero_shot":  # it calls nobody
        missing = [row["missing"] for row in rounds]
        assert 0 < missing[0] < clients
        assert missing[1:] == [clients, 1]


def test_one_client_of_the_contract_has_one_example(cache):
    setup = small_setup("algorithm=fedavg", DOMAINS, *ONE_EXAMPLE, f"data.cache={cache}")
    assert min(info.num_examples for info in setup.experiment.clients.values()) == 1


LOSSES, CHANNEL = "faults.dropout=0.3", "channel=[{clip: 1.0},{top_k: 0.5},int8]"
BLOCKS, RANKS = "capacity.blocks=[1,2,4]", "capacity.rank=[1,2,4]"


@pytest.mark.parametrize(
    "name", quickly([name for name in NAMES if name != "centralized"], ("fedex_lora", "scaffold"))
)
def test_it_composes_with_capacities_lost_answers_and_a_channel(name, cache):
    """Every method; with ranks where it trains LoRA adapters, with a channel where that is not refused."""
    lora = load_config([f"algorithm={name}"]).tuning["name"] == "lora"
    settings = [LOSSES, BLOCKS, *([RANKS] if lora else [])]
    if METHODS.load(name).local.trained_in_extra:
        with pytest.raises(ConfigError, match=r"^channel: it changes trained values"):
            small_setup(f"algorithm={name}", CHANNEL, f"data.cache={cache}")
    else:
        settings.append(CHANNEL)
    leaves_messages_and_frozen_weights_alone(name, [*settings, f"data.cache={cache}"])


@pytest.mark.ray
@pytest.mark.parametrize("name", quickly(NAMES, ("fedgcr", "scaffold")))
def test_same_tensors_on_actors(name, cache, pool_of_two):
    same_tensors_on_actors(name, [f"data.cache={cache}"], lambda setup: nullcontext(pool_of_two(setup)))


def test_fedprox_is_short_and_touches_no_engine_file():
    lines = (ROOT / "algorithms" / "fedprox.py").read_text().split('"""', 2)[2].splitlines()
    code = [
        line
        for line in lines
        if line.strip() and not line.lstrip().startswith(("#", "from", "import", '"""'))
    ]
    assert len(code) < 20
