"""Who is drawn, and who is asked whether they are available."""

import numpy as np

from rayfed.client_facts import ByClient, ClientInfo, ClientTable
from rayfed.heterogeneity.faults import Faults, Profile
from rayfed.sampling import base
from rayfed.sampling.base import SAMPLERS, candidates_of
from rayfed.seeds import generator

COUNT = 3000
TABLE = ClientTable.of(
    {f"c{i:04d}": ClientInfo(domain="abc"[i // 1000], num_examples=1) for i in range(COUNT)}
)


def sample(table, wanted, name, faults, seed, round):
    """Ids that a shipped rule draws."""
    return base.sample(candidates_of(table, wanted, faults, round), SAMPLERS.load(name), seed, round)


class Asked(Faults):
    """Counts the clients that are asked."""

    def is_available(self, round, client):
        asked.append(client)
        return super().is_available(round, client)


asked = []


def faults(availability):
    profile = Profile(availability=availability, dropout=0, speed=1, bandwidth=None)
    everybody = ByClient.same(TABLE.names, profile)
    asked.clear()
    return Asked(seed=3, profiles=everybody, work=ByClient.same(TABLE.names, 1))


def test_without_faults_the_draw_is_that_of_a_list_of_all_clients():
    wanted = generator(5, "sample", 2).choice(list(TABLE), size=20, replace=False)
    assert sample(TABLE, 20, "uniform", None, 5, 2) == tuple(sorted(wanted.tolist()))
    assert sample(TABLE, COUNT, "uniform", None, 5, 2) == tuple(TABLE)
    each = sample(TABLE, 20, "one_per_domain", None, 5, 2)
    assert [TABLE[cid].domain for cid in each] == ["a", "b", "c"]


def test_of_very_many_clients_only_those_that_may_be_drawn_are_asked(monkeypatch):
    full = faults(0.5)
    few = sample(TABLE, 20, "uniform", full, 0, 0)
    assert (len(few), len(asked)) == (20, COUNT)  # few clients: everybody is asked, as ever
    monkeypatch.setattr(base, "MANY", 100)
    there = faults(0.5)
    drawn = sample(TABLE, 20, "uniform", there, 0, 0)
    assert 20 <= len(asked) < 100
    assert len(set(asked)) == len(asked)
    assert (len(drawn), list(drawn)) == (20, sorted(drawn))
    assert all(Faults.is_available(there, 0, cid) for cid in drawn)
    assert drawn == sample(TABLE, 20, "uniform", there, 0, 0) != sample(TABLE, 20, "uniform", there, 0, 1)


def test_of_very_many_clients_of_whom_few_are_there_all_take_part(monkeypatch):
    monkeypatch.setattr(base, "MANY", 100)
    rare = faults(0.003)
    there = tuple(cid for cid in TABLE if Faults.is_available(rare, 7, cid))
    assert 0 < len(there) < 20
    assert sample(TABLE, 20, "uniform", rare, 0, 7) == there
    assert len(set(asked)) == len(asked) == COUNT
    assert sample(TABLE, 5, "uniform", faults(0), 0, 7) == ()


def test_very_many_clients_are_drawn_fairly(monkeypatch):
    monkeypatch.setattr(base, "MANY", 10)
    known = faults(0.9)
    places = [int(cid[1:]) for r in range(60) for cid in sample(TABLE, 50, "uniform", known, 1, r)]
    assert abs(np.mean(places) - (COUNT - 1) / 2) < 60  # standard deviation 16


def test_poisson_asks_only_those_that_it_draws(monkeypatch):
    few = sample(TABLE, 30, "poisson", faults(0.5), 0, 3)
    assert (len(asked), len(few) > 0) == (COUNT, True)
    monkeypatch.setattr(base, "MANY", 10)
    there = faults(0.5)
    drawn = sample(TABLE, 30, "poisson", there, 0, 3)
    assert len(asked) < 60
    assert set(drawn) <= set(asked)
    assert all(Faults.is_available(there, 3, cid) for cid in drawn)
    assert len(sample(TABLE, COUNT, "poisson", None, 0, 3)) == COUNT
