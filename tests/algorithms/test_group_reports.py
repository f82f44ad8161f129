"""What a run that groups clients leaves behind, and other algorithms beside it."""

import json

import pytest
import yaml

from rayfed.errors import ConfigError
from rayfed.report.method_figures import matched_groups


@pytest.mark.slow
@pytest.mark.steady
def test_figures_and_comparison(short):
    clients = "data.partition.clients_per_domain=2"
    result = short("fedgcr", clients, "compare=[fedavg, afl]", "rounds=2", "figures=true")
    own = result.path / "cells" / "fedgcr-seed0"
    names = {path.name for path in (own / "figures").iterdir()}
    assert {
        "aggregation_weights.png",
        "cluster_flow.png",
        "client_map.png",
        "sample_map.png",
        "accuracy.png",
    } <= names
    report = (result.path / "report.md").read_text()
    assert all(f"| {name} | 2 |" in report for name in ("fedgcr", "fedavg", "afl"))
    assert "figures/comparison.png" in report
    report = (own / "report.md").read_text()
    assert all(f"figures/{name}" in report for name in names)
    for name in ("fedavg", "afl"):
        folder = result.path / "cells" / f"{name}-seed0"
        alone = short(name, clients, "tuning=gc_prompt", "rounds=2")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["algorithm"], config["tuning"]["name"]) == (name, "gc_prompt")
        assert "compare" not in config
        ours, theirs = (
            json.loads((f / "rounds.jsonl").read_text().splitlines()[-1]) for f in (folder, alone.path)
        )
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["loss"] == theirs["loss"]


@pytest.mark.parametrize(
    ("name", "words"), [("fedavgg", "compare.*fedavg"), ("fedgcr", "fedgcr, which needs tuning=gc_prompt")]
)
def test_a_comparison_that_cannot_run_is_found_first(short, tmp_path, name, words):
    with pytest.raises(ConfigError, match=words):
        short("fedavg", f"compare={name}", f"output={tmp_path / 'none'}")
    assert not list(tmp_path.glob("none/*"))


def test_groups_keep_their_numbers_in_pictures():
    rounds = [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 2, 2]]
    rows = [
        {"round": r + 1, "client": str(c), "cluster": group}
        for r, groups in enumerate(rounds)
        for c, group in enumerate(groups)
    ]
    found = matched_groups(rows)
    assert found[2] == found[1]
    assert (found[3]["2"], found[3]["3"]) == (found[1]["2"], found[1]["3"])
