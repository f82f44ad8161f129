"""Runs with a channel: bits, bytes, noise from the seed, epsilon, Poisson sampling, and resume."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from algorithms.fedadam import FedAdam
from algorithms.fedavgm import FedAvgM
from rayfed.engine.loop import close_round
from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.federation.method_registry import Method
from rayfed.federation.noise_and_compression import Channel
from rayfed.federation.privacy_accountant import Privacy
from rayfed.federation.server import STEP, Server
from rayfed.record.readers import read_yaml
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.comparison import table_of_methods
from rayfed.report.final_table import privacy_notes
from rayfed.testing import play
from rayfed.types import Broadcast, ServerState, Update
from tests.cohorts import make_cohort
from tests.rayfed.engine.test_loop import CLIENTS, experiment, sample
from tests.rounding import near

SHORT = [
    *("algorithm=fedavg", "tuning=head", "server.weighting=uniform", "rounds=2", "data.limit=8"),
    *("tensorboard=false", "data.name=digits_five_mini"),
]


def run(path, *more):
    done = play([*SHORT, *more, f"output={path}"])
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return done.sha256, rows[-1]


def test_a_channel_that_changes_nothing_is_fedavg_to_the_bit_and_noise_is_drawn_from_the_seed(tmp_path):
    plain, row = run(tmp_path / "plain")
    assert run(tmp_path / "open", "channel=[{clip: inf},{noise: 0}]")[0] == plain
    noisy = "channel=[{clip: 0.1},{noise: 0.5}]"
    first, private = run(tmp_path / "noisy", noisy)
    assert first != plain
    assert private["epsilon"] > 0
    assert private["delta"] == 0.02
    assert not {"epsilon", "delta"} & row.keys()
    target = ("channel=[{clip: 0.1}]", f"privacy.epsilon={private['epsilon']!r}")
    assert run(tmp_path / "again", *target, "sampling=poisson")[0] == first  # everyone takes part
    half = run(tmp_path / "half", "channel=[fp16]")[1]
    assert half["bytes_up"] == row["bytes_up"] / 2
    assert half["bytes_down"] == row["bytes_down"]


def test_clients_that_share_their_passes_are_clipped_and_made_noisy_each_for_itself(small):
    """The noise of 1.0 is that of its epsilon."""
    epsilon = f"privacy.epsilon={Privacy(0.5, 1.0, 1e-5).epsilon(1)!r}"
    channel = ("channel=[{clip: 0.001}]", "privacy.noise_at=client", "server.weighting=uniform", epsilon)
    alone, together = (small(*channel, "rounds=1", f"train.group={n}") for n in (1, 3))
    # The changes are so small that what counts is that values are rounded: by 5 clients, and in their mean.
    for name, value in alone.params.items():
        near(together.params[name], value, 5 + 4)
    assert json.loads((alone.path / "environment.json").read_text())["noise"] == 1.0
    rows = pd.read_parquet(alone.path / "clients.parquet")
    norms = rows[rows["metric"] == "change_norm"]["value"]
    assert len(norms) == 5
    assert (norms > 0.001).all()
    [note] = privacy_notes(read_yaml(alone.path / "config.yaml"), alone.history.to_dict("records"))
    assert (
        "at delta 1e-05 (privacy.delta=auto: 1e-5) after round 1; of one that takes part in every round"
        in note
    )
    assert f"{note}  \n" in (alone.path / "report.md").read_text()
    assert f"fedavg: {note}" in table_of_methods([RecordedRun(alone.path)]).notes


def test_a_run_is_continued_with_what_top_k_did_not_send(tmp_path):
    sparse = "channel=[{top_k: 0.1},int8]"
    whole = run(tmp_path / "whole", sparse)[0]
    play([*SHORT, sparse, "rounds=1", f"output={tmp_path / 'part'}"])
    assert play([*SHORT, sparse, f"output={tmp_path / 'part'}"], resume=True).sha256 == whole


class Diverged(Local):
    def train(self, client, sent):
        update = super().train(client, sent)
        if client.id == "c0-plain":
            update.params["head.weight"][0, 0] = math.nan
        return update


DIVERGED = Method(local=Diverged)


def test_a_client_that_diverges_is_counted_and_changes_nothing_else(small):
    done = small(
        *(f"algorithm={__name__}:DIVERGED", "server.weighting=uniform", "rounds=1"),
        "channel=[{clip: 0.5},{noise: 1.0}]",
    )
    assert all(torch.isfinite(value).all() for value in done.params.values())
    [event] = pd.read_parquet(done.path / "events.parquet").to_dict("records")
    assert (event["kind"], event["client"]) == ("nonfinite", "c0-plain")
    assert event["message"] == "change_norm is not finite"
    assert done.history["nonfinite"].tolist() == [1]


@pytest.mark.parametrize("server", [Server, FedAvgM, FedAdam])
def test_a_round_without_answers_is_one_in_which_the_mean_did_not_move(server):
    """The noise goes the way of the mean: otherwise the parameters would tell that nobody was drawn."""
    channel = Channel(clip=1.0, noise=0.5, expected=2.0, seed=4)
    one = replace(experiment(), server=server(weighting="uniform"), channel=channel)
    params = {"w": torch.ones(3)}
    state = ServerState(round=2, params=params)
    cohort = replace(make_cohort(replace(one, capacity={}), None, 2), ids=())
    after = close_round(one, state, cohort, None)
    still = {"c0": Update(client="c0", params=params)}
    answers = channel.with_noise({"c0": Broadcast(round=2, params=params)}, still)
    wanted = one.server.aggregate(state, cohort.for_reporting(), list(answers.values()))
    assert after.params["w"].tolist() == wanted.params["w"].tolist() != params["w"].tolist()
    kept, expected = (
        {name: values["w"].tolist() for name, values in found.memory.get(STEP, {}).items()}
        for found in (after, wanted)
    )
    assert kept == expected
    assert bool(kept) == (server is not Server)
    assert cohort.ledger.tables == {}
    assert close_round(replace(one, channel=Channel()), state, cohort, None).params is params


def test_poisson_draws_each_client_with_the_same_probability():
    seen = [sample(experiment(per_round=2, sampling="poisson"), r) for r in range(600)]
    sizes = [len(ids) for ids in seen]
    assert sum(sizes) / 600 == pytest.approx(2, abs=0.2)
    assert min(sizes) == 0
    assert max(sizes) >= 5
    counts = {cid: sum(cid in ids for ids in seen) for cid in CLIENTS}
    assert all(150 <= n <= 250 for n in counts.values())  # 200 expected, standard deviation 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["channel=[int4]"], "'int4' is not a stage; the stages are"),
        (["channel=[{mean: 1}]"], "'mean' is not a stage"),
        (["channel=[{top_k: 2}]"], r"^channel\.0\.top_k: 2 is not allowed; it must be at most 1$"),
        (["channel={fp16: 1}"], r"^channel: {'fp16': 1} is not a list; write channel=\[{'fp16': 1}\]$"),
        (["channel=[{clip: 1},{noise: 1}]", "clients_per_round=2"], "clients_per_round=all"),
        (["channel=[{clip: 1},{noise: 1}]", "sampling=one_per_domain"], "sampling: with one_per_domain"),
        (
            ["channel=[{clip: 1},{noise: 1}]", "train.local_steps=min_over_clients_plus_one"],
            "train.local_steps: with min_over",
        ),
        (
            ["channel=[{clip: 1},{noise: 0.001}]", "privacy.accountant=prv"],
            "privacy.accountant: prv cannot count",
        ),
        (["privacy.delta=0.01"], "privacy: delta has no effect without noise"),
        (
            ["channel=[{clip: 1}]", "privacy.accountant=prv"],
            "privacy: accountant has no effect without noise",
        ),
    ],
)
def test_a_wrong_channel_is_one_line(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        play([*SHORT, *settings, f"output={tmp_path}"])
    assert "\n" not in str(caught.value)
