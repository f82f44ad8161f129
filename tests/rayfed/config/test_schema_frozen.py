"""The keys of a config are a promise: a new one is a decision, and a former one is missed by users."""

from rayfed.config.check_keys import keys_of
from rayfed.config.schema import Config
from tests.conftest import ROOT

FROZEN = ROOT / "tests" / "rayfed" / "config" / "keys.txt"


def test_the_keys_of_a_config_are_those_that_were_decided():
    """A key of every section that depends on no method; add or remove it in keys.txt, and in CHANGELOG.md."""
    assert sorted(keys_of(Config)) == FROZEN.read_text().split()
