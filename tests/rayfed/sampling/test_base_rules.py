"""Rules that draw by what is known of the clients: shipped ones, and those of a user."""

import re

import numpy as np
import pytest

import rayfed
from rayfed.client_facts import ClientInfo, ClientTable
from rayfed.config.schema import load_config, to_dict
from rayfed.errors import ConfigError, ServerError
from rayfed.experiment.plan import prepared
from rayfed.sampling.base import SAMPLERS, Candidates, sample, usual_size
from rayfed.sampling.power_of_choice import PowerOfChoice
from tests.conftest import ROOT

SIZES = (10, 20, 30, 40, 0)
TABLE = ClientTable.of(
    {f"c{i}": ClientInfo(domain="ab"[i // 3], num_examples=size) for i, size in enumerate(SIZES)}
)
LOSS = {"c0": 5.0, "c1": 1.0, "c2": 4.0, "c3": 2.0}


def drawn(rule, wanted, rounds=400, **facts):
    candidates = Candidates(TABLE, wanted, **facts)
    return [sample(candidates, rule, 7, r) for r in range(rounds)]


def losses(ids):
    return {one: LOSS[one] for one in ids}


def test_by_size_draws_in_proportion_to_the_numbers_of_examples():
    rule = SAMPLERS.load("by_size")
    counts = dict.fromkeys(TABLE, 0)
    for ids in drawn(rule, 1, 4000):
        counts[ids[0]] += 1
    for one, size in zip(TABLE, SIZES, strict=True):
        share = size / sum(SIZES)
        # five standard deviations of a share of 4,000 draws
        assert abs(counts[one] / 4000 - share) <= 5 * np.sqrt(share * (1 - share) / 4000)
    assert all(len(set(ids)) == 4 and "c4" not in ids for ids in drawn(rule, 5, 20))
    assert drawn(rule, 2, 3, is_open=lambda one: one in ("c1", "c4")) == [("c1",)] * 3
    assert drawn(rule, 2, 2, is_open=lambda one: False) == [(), ()]


def test_power_of_choice_draws_the_highest_losses_of_its_candidates():
    asked = []

    def ask(ids):
        asked.append(tuple(ids))
        return losses(ids)

    assert set(drawn(PowerOfChoice(candidates=4), 1, 50, ask=ask)) == {("c0",)}
    assert {len(ids) for ids in asked} == {4}
    asked.clear()
    two = drawn(SAMPLERS.load("power_of_choice"), 1, 50, ask=ask)
    assert {len(ids) for ids in asked} == {2}
    assert [max(ids, key=LOSS.get) for ids in asked] == [ids[0] for ids in two]
    silent = drawn(PowerOfChoice(candidates=4), 2, 1, ask=lambda ids: {"c3": 1.0})
    assert silent == [("c3",)]  # the others did not answer
    unknown = drawn(PowerOfChoice(candidates=4), 2, 1, ask=lambda ids: {**losses(ids), "c0": float("nan")})
    assert unknown == [("c2", "c3")]
    with pytest.raises(ConfigError, match=r"^sampling: candidates=0\.5 is not a number of at least 1"):
        PowerOfChoice(candidates=0.5)


def test_the_usual_size_is_that_of_the_rule_or_as_many_as_wanted():
    assert usual_size(TABLE, 3, SAMPLERS.load("one_per_domain")) == 2
    assert usual_size(TABLE, 3, SAMPLERS.load("by_size")) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (7, "returned 7; return a list of ids"),
        ("c1", "returned 'c1'; return a list of ids"),
        (["c1", "c9"], "drew 'c9', which is no client"),
        ([1], "drew 1, which is no client"),
        (["c1", "c1"], "drew 'c1' twice"),
        (["c2"], "drew 'c2', which is not available"),
    ],
)
def test_what_a_rule_may_not_draw_is_refused(answer, message):
    candidates = Candidates(TABLE, 2, is_open=lambda one: one != "c2")
    with pytest.raises(ServerError, match=f"^round 4: sampling: own {message}"):
        sample(candidates, lambda round, clients, rng: answer, 0, 3, "own")


def test_an_error_in_a_rule_names_the_round_and_the_place():
    def divides(round, clients, rng):
        return [1 / 0]

    with pytest.raises(ServerError, match=r"^round 1: sampling: own failed: ZeroDivisionError.*base_rules"):
        sample(Candidates(TABLE, 1), divides, 0, 0, "own")


def by_loss(round, clients, rng):
    """The wanted number of clients with the highest losses; it asks all of them."""
    known = clients.losses(clients.available)
    return sorted(known, key=lambda one: (-known[one], one))[: clients.wanted]


def first_ones(round, clients, rng):
    return list(clients)[: clients.wanted]


def small(cache, **given):
    return rayfed.Experiment(
        method="fedavg",
        model="vit_mini",
        tuning="head",
        clients_per_round=2,
        cluster="inline",
        **{"data.limit": 24, "data.cache": str(cache), "train.max_steps": 2, "seed": 3, "rounds": 2, **given},
    )


def test_a_rule_of_a_user_draws_by_losses_and_its_questions_are_traffic(cache, tmp_path):
    run = small(cache, sampling=by_loss).run(tmp_path / "run", quiet=True)
    rows = list(run.recorded.rows("transfers"))
    asked = {(row["round"], row["client"]) for row in rows if row["exchange"] == "draw"}
    clients = list(run.clients.index)
    assert asked == {(r, one) for r in (1, 2) for one in clients}
    assert all(row["down"] > 0 and row["up"] == 0 for row in rows if row["exchange"] == "draw")
    scores = [row for row in run.recorded.rows("clients") if row["exchange"] == "draw" and row["round"] == 1]
    loss = {row["client"]: row["value"] for row in scores if row["metric"] == "loss"}
    trained = {row["client"] for row in rows if row["exchange"] == "fit" and row["round"] == 1}
    assert trained == set(sorted(loss, key=loss.get)[-2:])
    plain = small(cache).run(quiet=True)
    assert run.history["bytes_down"].tolist()[0] > plain.history["bytes_down"].tolist()[0]


def test_a_rule_goes_on_after_a_round_as_if_it_had_not_stopped(cache, tmp_path):
    whole = small(cache, sampling=by_loss).run(quiet=True)
    part = small(cache, sampling=by_loss, rounds=1)
    part.run(tmp_path / "run", quiet=True)
    assert small(cache, sampling=by_loss).resume(tmp_path / "run", quiet=True).sha256 == whole.sha256
    with pytest.raises(ConfigError, match=r"^sampling: '.*:first_ones' would change the result"):
        small(cache, sampling=first_ones).resume(tmp_path / "run", quiet=True)


def test_a_name_an_object_and_a_path_are_the_same_rule(cache):
    path = small(cache, sampling="rayfed.sampling.by_size:draw").run(quiet=True)
    name = small(cache, sampling="by_size").run(quiet=True)
    assert path.sha256 == name.sha256 != small(cache).run(quiet=True).sha256
    every = small(cache, sampling=PowerOfChoice(candidates=1.0)).config().sampling
    assert every != small(cache, sampling=PowerOfChoice(candidates=3.0)).config().sampling
    assert every.startswith("PowerOfChoice-")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("by_sise", "'by_sise' does not exist; did you mean 'by_size'"),
        ("rayfed.sampling.base:MANY", "is not a rule that draws clients, which is a function"),
        ("rayfed.nowhere:draw", "there is no module"),
    ],
)
def test_a_rule_that_is_none_is_refused_before_the_run(value, message):
    with pytest.raises(ConfigError, match=f"^sampling: .*{message}"):
        load_config([f"sampling={value}"])


@pytest.mark.parametrize("value", [3, PowerOfChoice, lambda round, clients: []])
def test_an_object_that_is_no_rule_is_refused_before_the_run(cache, value):
    with pytest.raises(ConfigError, match=r"^sampling: .* is not a rule that draws clients"):
        small(cache, sampling=value).config()


@pytest.mark.parametrize("at", ["server", "client"])
def test_noise_refuses_a_rule_of_which_it_knows_nothing(cache, at):
    noise = ["channel=[{clip: 1},{noise: 1}]", "server.weighting=uniform", f"privacy.noise_at={at}"]
    config = load_config([*noise, "sampling=by_size", f"data.cache={cache}", "data.limit=24", "tuning=head"])
    with pytest.raises(ConfigError, match=r"^sampling: by_size may draw clients by what they send"):
        prepared(config.alone())


def test_the_rule_of_the_page_draws_as_it_says(cache):
    (program,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "realism.md").read_text(), re.DOTALL)
        if "sampling=" in code
    ]
    made = {}
    exec(program.partition("rayfed.Experiment(")[0], made)
    rule = made["explore_and_exploit"]
    for ids in drawn(rule, 2, 20, is_open=lambda one: one != "c4", ask=losses):
        assert len(ids) == 2
        assert "c2" in ids  # the highest product of loss and size
    run = small(cache, sampling=rule).run(quiet=True)
    assert (run.recorded.reported["clients"], run.history["bytes_down"].min() > 0) == (2, True)


def test_the_config_of_a_run_names_the_rule(cache):
    assert to_dict(small(cache, sampling="by_size").config())["sampling"] == "by_size"
