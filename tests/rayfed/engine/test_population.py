"""What a virtual population costs: counted in clients, rows and bytes, not in seconds."""

import json
import pickle

import pytest

from rayfed.data.partition.population import Population
from rayfed.engine.loop import run_rounds
from rayfed.engine.record_rounds import RecordSettings
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.params import digest
from rayfed.testing import small_setup

PLAIN = (
    "algorithm=fedavg",
    "data.domains=[plain,fonts]",
    "data.limit=24",
    "data.val=0.1",
    "clients_per_round=4",
)


@pytest.fixture
def drawn(monkeypatch):
    """The clients whose samples were drawn, in order."""
    places = []
    draw = Population._draw
    monkeypatch.setattr(Population, "_draw", lambda self, place: places.append(place) or draw(self, place))
    return places


def test_only_the_cohort_is_drawn(drawn):
    setup = small_setup(*PLAIN, "data.population={clients: 30000, size: 5}", "evaluation.validation=true")
    assert drawn == []
    done = list(run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start))
    visited = [row["client"] for d in done for row in d.ledger.transfers]
    assert sorted(drawn) == sorted(setup.experiment.clients.names.position(cid) for cid in visited)
    assert len(drawn) == 8
    assert done[-1].scores["global"].others == {"plain": 15000, "fonts": 15000}
    assert done[-1].scores["global"].clients == {}
    assert "val_accuracy" in done[-1].row


def test_files_and_messages_of_a_round_do_not_grow_with_the_population(small):
    """The same cohort size in populations of 100 and of 20,000 clients; ids are longer by two digits."""

    def cost(clients):
        result = small(
            *PLAIN, f"data.population={{clients: {clients}, size: 6, sigma: 0}}", "tensorboard=false"
        )
        files = {f.relative_to(result.path): f.stat().st_size for f in result.path.rglob("*") if f.is_file()}
        rows = (result.path / "rounds.jsonl").read_text().splitlines()
        return files, [json.loads(row)["bytes_down"] for row in rows]

    (few, sent), (many, sent_by_many) = cost(100), cost(20_000)
    assert sent == sent_by_many
    assert {str(f) for f in few} == {str(f) for f in many}
    assert sum(many.values()) < sum(few.values()) + 2000


def test_what_processes_receive_are_arrays_that_they_share():
    """Pickled apart from the arrays, which Ray maps, it has the same size for any number of clients."""

    def inside(clients):
        setup = small_setup(
            *PLAIN, f"data.population={clients}", "capacity={4: 1, 2: 1}", "faults.dropout=0.1", "rounds=1"
        )
        keeping = RecordSettings(path=setup.context.shard, domains=setup.partition.table.domain_of)
        sent = (setup.context, setup.experiment, keeping)
        return len(pickle.dumps(sent, protocol=5, buffer_callback=lambda _: None))

    assert inside(50_000) < inside(50) + 2000


def test_a_result_does_not_depend_on_what_a_process_remembers(monkeypatch):
    def final(kept):
        monkeypatch.setattr("rayfed.data.partition.population.KEPT", kept)
        setup = small_setup(*PLAIN, "data.population={clients: 12, size: 6}")
        *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
        return digest(last.state.params)

    assert final(1) == final(500)
