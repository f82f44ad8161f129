"""Tables over all clients: what a mapping would say, from a few arrays."""

import pickle

import pytest

from rayfed.client_facts import ByClient, ClientInfo, ClientNames, ClientTable

INFOS = {
    "b2-photo": ClientInfo(domain="photo", num_examples=3),
    "a1-photo": ClientInfo(domain="photo", num_examples=1),
    "zäh": ClientInfo(domain="art", num_examples=7),
}


def test_a_table_is_the_mapping_it_was_made_from_in_its_order():
    for table in (ClientTable.of(INFOS), pickle.loads(pickle.dumps(ClientTable.of(INFOS)))):
        assert dict(table) == INFOS
        assert (list(table), len(table), table.domains) == (list(INFOS), 3, ("photo", "art"))
        assert dict(table.domain_of) == {"b2-photo": "photo", "a1-photo": "photo", "zäh": "art"}
        assert table.places_by_domain() == [range(2), range(2, 3)]
        assert table.clients_by_domain() == {"photo": 2, "art": 1}
        assert table.in_order({"zäh", "a1-photo"}) == ["a1-photo", "zäh"]
        assert "a1" not in table
        assert None not in table
        with pytest.raises(KeyError):
            table["a1-photo-longer-than-all-others"]


def test_one_of_a_few_values_for_each_client():
    names = ClientNames(INFOS)
    own = ByClient(names, (0.5, None), [1, 0, 0])
    assert dict(own) == {"b2-photo": None, "a1-photo": 0.5, "zäh": 0.5}
    assert own.different == (0.5, None)
    assert dict(ByClient.same(names, 12)) == dict.fromkeys(INFOS, 12)


def test_processes_share_the_arrays_of_a_table():
    """What is pickled has the same size for any number of clients: the arrays are passed as buffers."""

    def inside(count):
        infos = {f"c{i:06d}": ClientInfo(domain="d", num_examples=i) for i in range(count)}
        buffers = []
        return len(pickle.dumps(ClientTable.of(infos), protocol=5, buffer_callback=buffers.append))

    assert inside(20_000) - inside(2) < 200
