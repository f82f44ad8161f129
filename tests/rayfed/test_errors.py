"""Messages of errors."""

import json
import pickle
from pathlib import Path

import pytest

import rayfed
from rayfed.errors import ClientError, place_of
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


def test_the_place_of_an_error_is_the_innermost_line_of_own_code(tmp_path, monkeypatch):
    """A folder whose name only begins like that of RayFed is the user's own."""
    own = Path(rayfed.__file__).parent.with_name("rayfed_mine")
    code = compile("\nimport json\njson.loads('{')\n", str(own / "here.py"), "exec")
    with pytest.raises(json.JSONDecodeError) as caught:
        exec(code, {})
    assert place_of(caught.value) == " (here.py, line 3)"
    with pytest.raises(SyntaxError) as broken:
        compile("x = 1\ndef y(:\n", str(own / "there.py"), "exec")
    assert place_of(broken.value) == " (there.py, line 2)"
    assert place_of(ValueError("never raised")) == ""
