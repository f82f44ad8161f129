"""What all tables of scores say of their methods."""

import json

import pytest

from rayfed.record.recorded_run import RecordedRun
from rayfed.report.comparison import table_of_methods
from rayfed.report.final_table import final_table
from rayfed.report.method_runs import MethodRuns
from rayfed.report.page.several import Member, results
from rayfed.report.page.single import summary
from rayfed.report.protocols import TABLES
from tests.rayfed.report.page import folders

HEADS = "head: personal with fedper; shared with fedavg"
ROUND = "scored: the last evaluated round"
SPLIT = "the test split is the split validation of the data set"
CUT = "cut at model.size=128 tokens, of 9 texts: the answer of 1; a larger model.size cuts fewer"
LINE = "fedper: clients are scored with the tensors that stay at them, all else with initial values of these"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of FedPer, beside that of FedAvg; one domain is held out."""
    path = tmp_path_factory.mktemp("run") / "street"
    folders.write(path, method="fedper", rounds=2, held_out="street")
    folders.write(path.parent / "fedavg", method="fedavg", rounds=2, held_out="street")
    for own, head in ((path, "personal"), (path.parent / "fedavg", "shared")):
        file = own / "environment.json"
        about = {"head": head, "test_split": "validation", "texts_cut": CUT, "examples": "texts"}
        facts = {**json.loads(file.read_text()), **about}
        file.write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("protocol", TABLES)
def test_the_table_of_every_protocol_names_its_methods_and_says_whose_tensors_are_scored(protocol, runs):
    every = {("fedper", "street"): runs, ("fedavg", "street"): runs.parent / "fedavg"}
    table, *_ = TABLES[protocol](MethodRuns(folders=every)).parts
    rule = [] if protocol == "leave_one_out" else [ROUND]
    cut = [] if protocol == "base_to_new" else [CUT]  # for CLIP models
    assert table.notes[-2 - len(cut) :] == (*cut, "; ".join((HEADS, *rule, SPLIT)), LINE)
    assert table.title.startswith("fedper, fedavg on ")
    place = table.columns.index("method")
    assert [row[place] for row in table.rows[:2]] == ["fedper", "fedavg"]


def test_the_tables_of_a_run_of_compared_methods_and_of_the_page_say_so(runs):
    other = runs.parent / "fedavg"
    assert LINE in table_of_methods([RecordedRun(other), RecordedRun(runs)]).notes
    compared = f"head: shared with fedavg; personal with fedper; {ROUND}; {SPLIT}"
    assert compared in table_of_methods([RecordedRun(other), RecordedRun(runs)]).notes
    assert CUT in table_of_methods([RecordedRun(other), RecordedRun(runs)]).notes
    notes = table_of_methods([RecordedRun(other), RecordedRun(runs)]).notes
    assert notes[0] == "accuracy on the test texts in percent, after the last scored round"
    assert {f"head: personal; {ROUND}; {SPLIT}", CUT} < {*final_table(RecordedRun(runs)).notes}
    assert f"Head: shared; {SPLIT}." in summary(RecordedRun.opened(other)).parts[1].sentences
    table = results([Member(run=RecordedRun.opened(path), method=path.name) for path in (other, runs)]).parts[
        0
    ]
    place = [column.name for column in table.columns].index("head")
    assert {row[0]: row[place] for row in table.rows} == {"fedavg": "shared", "street": "personal"}
    assert LINE in final_table(RecordedRun(runs)).notes
    assert f"{LINE}." in summary(RecordedRun.opened(runs)).parts[1].sentences
    assert "stay at them" not in str(
        (final_table(RecordedRun(other)).notes, summary(RecordedRun.opened(other)).parts[1].sentences)
    )


@pytest.mark.parametrize("rounds", [2, 6])
def test_a_table_says_once_which_round_it_reports(rounds, tmp_path):
    path = tmp_path / "run"
    folders.write(path, method="fedavg", rounds=rounds)
    file = path / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "head": "shared"}))
    notes = final_table(RecordedRun(path)).notes
    assert sum("last evaluated round" in note for note in notes) == 1
    assert any(note.startswith("head: shared") for note in notes)
