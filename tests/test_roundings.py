"""An imitation of another processor takes effect, in the threads that it asks for."""

from pathlib import Path

import pytest

from tests.conftest import NUMERIC, ROOT
from tests.roundings import IMITATIONS, dispatch, main, surroundings, why_not


@pytest.mark.slow
@pytest.mark.steady
def test_an_imitation_reaches_torch_and_its_threads(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")  # of the user; an imitation sets its own or none
    wanted = {**IMITATIONS["torch-default"], **IMITATIONS["2-threads"]}
    seen = dispatch(wanted)
    assert (seen["torch"], seen["threads"]) == ("DEFAULT", "2")
    assert why_not(wanted, seen, seen) == ""
    assert why_not(IMITATIONS["torch-avx2"], seen, seen) == "torch uses DEFAULT"
    assert why_not({}, seen, seen) == "torch uses 2 threads"
    assert why_not({"MKL_CBWR": "AVX"}, {**seen, "threads": "1"}, seen).startswith("MKL's mode stays")
    assert "MKL_CBWR" not in surroundings({})
    assert surroundings({})["OMP_NUM_THREADS"] == "1"


def test_unknown_imitations_are_refused_and_all_can_be_listed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-one"])
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.count("MKL_CBWR=") > 3


@pytest.mark.parametrize("name", NUMERIC)
def test_numeric_files_exist(name):
    assert Path(ROOT / "tests" / name).is_file()
