"""Messages of errors."""

import pickle

import pytest

from rayfed.errors import ClientError
from tests.algorithms.conftest import SHORT


def test_a_clients_error_counts_rounds_from_one_as_files_do():
    error = ClientError("c1", 0, "fit", "boom", "trace")
    assert str(error) == "client 'c1' failed in round 1 while running 'fit': boom"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_client_that_fails_in_the_first_round_is_reported_for_round_1(tmp_path, cache, monkeypatch):
    import rayfed
    from rayfed.federation.client import Client

    def broken(self, *args):
        raise ValueError("no optimizer today")

    monkeypatch.setattr(Client, "optimizer", broken)
    places = (f"data.cache={cache}", f"output={tmp_path / 'run'}", "rounds=1", "data.limit=8")
    with pytest.raises(ClientError, match=r"failed in round 1 while running 'fit': .*no optimizer today"):
        rayfed.simulate(["algorithm=fedavg", *SHORT, *places])
