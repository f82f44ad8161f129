"""The table of all methods of a comparison."""

import pytest

from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.comparison import table_of_methods
from rayfed.report.final_table import final_table
from rayfed.report.method_runs import runs_in


def numbers(table, row):
    """The scores of a row of the table of methods, by column."""
    return dict(zip(table.columns, row, strict=True))


def runs_of(study):
    """Folders of the runs of a study, in its order."""
    return [folder for _, _, folder in runs_in(study).seeds[0].each()]


@pytest.fixture
def compared(small):
    """Folders of FedAvg, which deploys the global model, and Ditto, which deploys the personal ones."""

    def run(*overrides):
        path = small("compare=ditto", "rounds=1", "train.lr=0.5", "evaluation.personal=true", *overrides).path
        return runs_of(path)

    return run


def test_every_scored_model_has_a_row_with_its_own_numbers(compared):
    folders = compared("data.limit=48")
    table = table_of_methods([*map(RecordedRun, folders)])
    assert [row[0] for row in table.rows] == [
        "fedavg",
        "fedavg, personal models",
        "ditto, global model",
        "ditto, personal models",
    ]
    for place, folder in enumerate(folders):
        own = final_table(RecordedRun(folder))
        [row] = read_rows(folder)
        sent = f"{(row['bytes_up'] + row['bytes_down']) / 1e6:,.1f}"
        trained = (f"{row['local_steps']:,}", f"{row['local_examples']:,}")
        cost = (*trained, sent, f"{row['flops'] / 1e9:,.1f}", f"{row['trained_params']:,}")
        assert table.rows[2 * place][-5:] == cost
        assert f"trained: {trained[0]} local steps of all clients, on {trained[1]} examples" in own.notes
        assert row["flops"] > 1e8
        shared, personal = (numbers(table, row) for row in table.rows[2 * place : 2 * place + 2])
        assert shared != {**personal, "method": shared["method"]}  # else this test could not tell them apart
        for row in own.rows:
            by_column = dict(zip(own.columns, row, strict=True))
            assert shared[row[0]] == by_column["global accuracy %"]
            assert personal[row[0]] == by_column["personal accuracy %"]
        for found in (shared, personal):
            sentence = (
                f"mean over clients {found['mean over clients']}, over domains {found['mean over domains']}; "
            )
            sentence += f"sigma_type {found['sigma_type']}, sigma_client {found['sigma_client']}; "
            sentence += f"worst domain {found['worst domain']}"
            assert any(sentence in note for note in own.notes), (sentence, own.notes)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ((), False),  # the clients of a domain share its test images, all of which are scored
        (("data.test=0.2", "data.partition.clients_per_domain=2"), True),
    ],
)
def test_a_sample_of_clients_is_said_where_there_is_one(compared, also, said):
    folders = compared("evaluation.clients=3", *also)
    note = "models scored on 3 clients (evaluation.clients), the same for all methods"
    assert (note in table_of_methods([*map(RecordedRun, folders)]).notes) is said
    assert (note in final_table(RecordedRun(folders[0])).notes) is said


def test_a_method_that_trains_another_tuning_than_its_own_is_said_below_the_table(small):
    path = small("algorithm=fedavg", "compare=promptfl", "model=clip_mini", "tuning=lora", "rounds=1").path
    note = "promptfl trains tuning=lora here, not its own tuning=text_prompt"
    assert note in table_of_methods([*map(RecordedRun, runs_of(path))]).notes
    assert note in (path / "report.md").read_text()


def test_frozen_blocks_in_the_bytes_are_said(small):
    path = small(
        "algorithm=fedra", "compare=inclusivefl", "tuning=lora", "capacity=1", "rounds=1", "data.limit=24"
    ).path
    notes = table_of_methods([*map(RecordedRun, runs_of(path))]).notes
    said = "bytes include the frozen blocks that clients download (server.frozen_cache={})"
    assert f"fedra: {said.format('none')}" in notes
    assert f"inclusivefl: {said.format('all')}" in notes


def test_settings_in_which_the_methods_differ_are_said_below_the_table(small):
    path = small("algorithm=fedavg", "compare=scaffold", "rounds=1", "data.limit=24").path
    note = "settings of the methods differ: server.weighting is data_size with fedavg, uniform with scaffold"
    assert note in table_of_methods([*map(RecordedRun, runs_of(path))]).notes
    assert note in (path / "report.md").read_text()
