"""Choosing clients, depths and statistics: pure parts of the loop, with numbers worked out by hand."""

import pytest

from rayfed.client_facts import ClientTable
from rayfed.engine.loop import RoundPlan, headline, is_due
from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import evaluation, of_deployed, pool, summary
from rayfed.evaluation.test_sets import EvaluationSet
from rayfed.federation.cohort import Answer, ClientInfo
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.heterogeneity.capacity import assign, draw_capacities
from rayfed.sampling.base import SAMPLERS, candidates_of
from rayfed.sampling.base import sample as draw
from rayfed.types import Update

CLIENTS = ClientTable.of({f"c{i}": ClientInfo(domain="ab"[i // 3], num_examples=10) for i in range(6)})


def experiment(per_round=6, sampling="uniform", seed=0, clients=CLIENTS):
    return RoundPlan(
        server=Server(),
        local=Local(),
        clients=clients,
        sets=(),
        seed=seed,
        rounds=3,
        clients_per_round=per_round,
        sampling=SAMPLERS.load(sampling),
    )


def sample(experiment, round):
    e = experiment
    candidates = candidates_of(e.clients, e.clients_per_round, e.faults, round)
    return draw(candidates, e.sampling, e.seed, round)


def test_full_participation_is_everybody_in_order():
    assert sample(experiment(), 0) == tuple(CLIENTS)


def test_partial_participation_is_fair_and_depends_on_seed_and_round_only():
    seen = [sample(experiment(per_round=2), r) for r in range(300)]
    assert all(len(ids) == 2 and list(ids) == sorted(ids) for ids in seen)
    counts = {cid: sum(cid in ids for ids in seen) for cid in CLIENTS}
    assert all(70 <= n <= 130 for n in counts.values())  # 100 expected, standard deviation 8
    assert seen[5] == sample(experiment(per_round=2), 5)
    assert seen != [sample(experiment(per_round=2, seed=1), r) for r in range(300)]


def test_one_per_domain():
    seen = [sample(experiment(sampling="one_per_domain"), r) for r in range(100)]
    assert all([CLIENTS[c].domain for c in ids] == ["a", "b"] for ids in seen)
    assert {c for ids in seen for c in ids} == set(CLIENTS)


def test_the_last_round_is_always_due():
    assert [is_due(2, r, last=r == 4) for r in range(5)] == [False, True, False, True, True]
    assert not any(is_due(0, r, last=r == 4) for r in range(5))


def answer(accuracy, loss, num):
    return Update(client="x", num_examples=num, metrics={"accuracy": accuracy, "loss": loss, "num": num})


def scored(sets, *answers):
    return evaluation(sets, dict(zip((s.id for s in sets), answers, strict=True)))


def unit(cid, domain, clients):
    return EvaluationSet(id=cid, domain=domain, clients=clients)


def test_statistics_over_clients_and_domains():
    """Domain a pools 0.5 of 10 and 1.0 of 30 to 35/40; b is 0.25; sigma over (0.875, 0.25) is 0.3125."""
    sets = (unit("c0", "a", ("c0",)), unit("c1", "a", ("c1",)), unit("c2", "b", ("c2",)), unit("h", "c", ()))
    found = scored(sets, answer(0.5, 1, 10), answer(1.0, 2, 30), answer(0.25, 3, 4), answer(0.1, 9, 5))
    row = summary(found)
    assert row["accuracy"] == pytest.approx((0.5 + 1 + 0.25) / 3)
    assert row["accuracy_domain"] == pytest.approx((0.875 + 0.25) / 2)
    assert row["sigma_type"] == pytest.approx(0.3125)
    assert row["sigma_client"] == pytest.approx(0.3118048)  # of 0.5, 1, 0.25 with ddof 0
    assert (row["worst_domain"], row["worst_domain_accuracy"]) == ("b", 0.25)
    assert row["worst_client_accuracy"] == 0.25
    assert row["held_out_accuracy"] == 0.1
    assert row["loss"] == 2


def test_clients_that_share_a_test_set_share_its_score_and_weigh_as_clients():
    sets = (unit("domain:a", "a", ("c0", "c1", "c2")), unit("domain:b", "b", ("c3",)))
    row = summary(scored(sets, answer(0.8, 1, 10), answer(0.4, 1, 10)))
    assert row["accuracy"] == pytest.approx(0.7)
    assert row["accuracy_domain"] == pytest.approx(0.6)


def test_empty_test_sets_are_left_out():
    empty = Update(client="c0", num_examples=0)
    found = scored((unit("c0", "a", ("c0",)), unit("c1", "b", ("c1",))), empty, answer(0.5, 1, 2))
    assert list(found.clients) == ["c1"]
    assert list(found.domains) == ["b"]


def test_sets_that_did_not_answer_are_left_out_and_the_others_keep_their_own_score():
    sets = (unit("c0", "a", ("c0",)), unit("c1", "a", ("c1",)), unit("c2", "b", ("c2",)))
    found = evaluation(sets, {"c1": answer(0.25, 1, 2)})
    assert {c: s.value for c, s in found.clients.items()} == {"c1": 0.25}
    assert list(found.domains) == ["a"]
    assert summary(evaluation(sets, {})) == {}


def test_scores_of_deployed_models_are_those_of_the_last_answer_by_their_name():
    def own(client, accuracy):
        metrics = {"personal/accuracy": accuracy, "personal/loss": 1.0, "personal/num": 10, "start/loss": 3.0}
        return Answer("fit", client, metrics, {"personal/by_class": accuracy, "validated/by_class": 9.0})

    found = of_deployed([own("c0", 0.2), own("c3", 0.6), own("c0", 0.4)], "personal")
    assert {c: one.metrics["accuracy"] for c, one in found.items()} == {"c0": 0.4, "c3": 0.6}
    assert {c: one.scored for c, one in found.items()} == {"c0": {"by_class": 0.4}, "c3": {"by_class": 0.6}}
    assert found["c0"].num_examples == 10
    assert of_deployed([Answer("fit", "c1", {"start/loss": 1.0})], "personal") == {}


def test_the_headline_is_that_of_the_deployed_model():
    sets = (unit("c0", "a", ("c0",)),)
    scores = {
        "global": scored(sets, answer(0.1, 1, 1)),
        "personal": scored(sets, answer(0.9, 1, 1)),
    }
    assert headline(scores, "global")["accuracy"] == 0.1
    assert headline(scores, "personal")["accuracy"] == 0.9
    assert headline(scores, "personal")["global_accuracy"] == 0.1


def test_clients_that_are_not_listed_count_as_often_as_there_are_of_them():
    """A population of 30 and 9 clients has the statistics of 39 clients that are listed."""
    drawn = (
        EvaluationSet(id="x", domain="a", clients=(), others=30),
        EvaluationSet(id="y", domain="b", clients=(), others=9),
        unit("h", "c", ()),
    )
    listed = (
        unit("x", "a", tuple(f"a{i}" for i in range(30))),
        unit("y", "b", tuple(f"b{i}" for i in range(9))),
        unit("h", "c", ()),
    )
    answers = (answer(0.5, 1, 10), answer(0.3, 2, 30), answer(0.1, 9, 5))
    found = scored(drawn, *answers)
    assert (found.clients, found.others) == ({}, {"a": 30, "b": 9})
    assert summary(found) == pytest.approx(summary(scored(listed, *answers)))
    assert summary(found)["worst_tenth_accuracy"] == pytest.approx(0.3)
    assert summary(found)["accuracy"] == pytest.approx((30 * 0.5 + 9 * 0.3) / 39)
    assert found.held_out["c"].value == 0.1


def test_pool():
    assert pool([scored((unit("c", "a", ("c",)),), answer(0.5, 2, 4)).clients["c"]]).num == 4


def table(domains):
    return ClientTable.of({cid: ClientInfo(domain=d, num_examples=9) for cid, d in domains.items()})


DOMAINS = table({"c0": "a", "c1": "a", "c2": "b", "c3": "b"})


@pytest.mark.parametrize(
    ("config", "depths"),
    [
        (None, [12, 12, 12, 12]),
        (6, [6, 6, 6, 6]),
        ([12, 3], [12, 12, 3, 3]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_capacities(config, depths):
    assert list(assign(config, DOMAINS, 12, 0).values()) == depths


def test_tiers_have_exact_sizes_and_are_drawn_by_the_seed():
    domains = table({f"c{i}": "a" for i in range(7)})
    found = [assign({12: 1, 3: 2}, domains, 12, seed) for seed in range(20)]
    # 7/3 = 2.33 and 14/3 = 4.67: the larger remainder gets the client that is left
    assert all(sorted(f.values()) == [3] * 5 + [12] * 2 for f in found)
    assert len({tuple(f.values()) for f in found}) > 1
    assert found[3] == assign({12: 1, 3: 2}, domains, 12, 3)


@pytest.mark.parametrize("config", [0, 13, [12, 0], [1, 2, 3], {13: 1.0}, {3: -1.0, 4: 2.0}, {3: 0.0}])
def test_impossible_capacities(config):
    with pytest.raises(ConfigError, match="capacity"):
        assign(config, DOMAINS, 12, 0)


def test_a_backbone_without_blocks_has_no_capacities():
    assert assign(None, DOMAINS, 0, 0) == dict.fromkeys(DOMAINS, 0)
    with pytest.raises(ConfigError, match="no uniform blocks"):
        assign(3, DOMAINS, 0, 0)


def test_dynamic_depths_are_uniform_from_1_to_all():
    assert assign("dynamic", DOMAINS, 12, 0) is None
    drawn = [d for r in range(600) for d in draw_capacities(("c0", "c1"), 12, 0, r).values()]
    counts = [drawn.count(d) for d in range(1, 13)]
    assert sum(counts) == 1200
    assert all(60 <= n <= 140 for n in counts)  # 100 expected, standard deviation 9.6
    assert draw_capacities(("c0",), 12, 0, 5)["c0"] == draw_capacities(("c1", "c0"), 12, 0, 5)["c0"]
