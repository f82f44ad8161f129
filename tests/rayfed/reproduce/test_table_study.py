"""A table as a study: its cells, seeds and folder, and what is refused."""

import pytest

from rayfed.errors import ConfigError
from rayfed.reproduce.table_study import table_study


def cells(**options):
    return list(table_study("fedra/table3", "mini", **options).configs)


def test_cells_are_the_rows_settings_and_seeds_that_are_chosen():
    assert len(cells(seeds=1)) == 8
    mixed = "10-10-6-6-4-4"
    assert cells(seeds=2, chosen=[f"@{mixed}"]) == [
        ("FedRA", mixed, 0),
        ("InclusiveFL", mixed, 0),
        ("FedRA", mixed, 1),
        ("InclusiveFL", mixed, 1),
    ]
    assert cells(seeds=1, chosen=[f"FedRA@{mixed}", f"FedRA@{mixed}"]) == [("FedRA", mixed, 0)]
    assert {row for row, *_ in cells(seeds=1, chosen=["InclusiveFL"])} == {"InclusiveFL"}
    assert {seed for *_, seed in cells(seeds=5, chosen=["FedRA@6-6-6-6-6-6"])} == {0, 1, 2, 3, 4}


def test_a_cell_is_the_experiment_of_its_row_alone():
    asked = table_study("fedgcr/table5", "mini", 1, overrides=["rounds=3", "train.lr=0.5"])
    by_row = {cell.row: config for cell, config in asked.configs.items()}
    assert by_row["FedGR"].tuning["name"] == "visual_prompt"
    assert by_row["FedGC"].algorithm == "fedgc"
    for config in by_row.values():
        assert (config.rounds, config.train.lr, config.compare) == (3, 0.5, ())
    assert list(asked.study.cells) == [(row, "dif10", 0) for row in asked.rows]
    assert asked.study.names == ("method", "setting", "seed")
    clip = table_study("fedclip/table1", "mini", 1, ["FedCLIP"])
    assert clip.first.compare == ()  # zero-shot is no row of this table


def test_cells_run_side_by_side_on_ray_unless_another_number_is_given():
    def at_once(*overrides):
        return table_study("fedgcr/table5", "mini", 1, ["none"], overrides).at_once

    assert at_once() == "auto"
    assert at_once("cluster=inline") == 1
    assert at_once("cluster=inline", "at_once=auto") == "auto"
    assert at_once("at_once=3") == 3
    for wrong in ("0", "many"):
        with pytest.raises(
            ConfigError, match=f"^at_once: '{wrong}' is neither a number of 1 or more nor auto"
        ):
            at_once(f"at_once={wrong}")


def test_the_folder_depends_on_what_changes_results():
    def path(*overrides):
        return str(table_study("fedra/table3", "mini", 1, ["FedRA@6-6-6-6-6-6"], overrides).path)

    plain = path()
    assert plain == "runs/reproduce-fedra-table3-mini"
    assert path("cluster=inline", "cluster.actors=3", "data.root=/x") == plain
    assert path("rounds=2") != plain
    assert path("cluster.threads=2") != plain  # sums of floats depend on it
    assert path("rounds=2", "train.lr=0.1") == path("train.lr=0.1", "rounds=2") != path("rounds=2")
    assert path("output=elsewhere") == "elsewhere"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fedgcr/table55",), "table: 'fedgcr/table55' does not exist; did you mean 'fedgcr/table5'"),
        (("fedgcr/table5/mini",), "write fedgcr/table5 --scale mini"),
        (("fedgcr/table5", "mini", 0), "--seeds: 0 is not a number of seeds"),
        (("fedgcr/table5", "mini", 1, ["FedAwg"]), "--cells: 'FedAwg' does not exist"),
        (("fedgcr/table5", "mini", 1, ["@dif9"]), "--cells: '@dif9' does not exist; did you mean '@dif10'"),
        (("fedgcr/table5", "mini", 1, [], ["seed=3"]), "seed: a table sets it for each of its cells"),
        (("fedgcr/table5", "mini", 1, [], ["compare=[afl]"]), "compare: a table sets it"),
        (("fedgcr/table5", "mini", 1, [], ["overwrite=true"]), "overwrite: a table"),
        (("fedgcr/table5", "mini", 1, [], ["stop=3"]), "stop: a table sets it .* write rounds=N for shorter"),
        (("fedgcr/table5", "mini", 1, [], ["FedGR"]), "'FedGR' is not an override"),
        (("fedgcr/table5", "mini", 1, [], ["round=2"]), "round"),
        (
            ("fedgcr/table5", "mini", 1, [], ["protocol=few_shot"]),
            "protocol: 'few_shot' has its own table",
        ),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(arguments, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        table_study(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": ["algorithm=fedavg"]}, "^algorithm: row 'FedRA' of fedra/table3 sets its method"),
        ({"overrides": ["server.name=median"]}, r"^server\.name: row 'FedRA'"),
        ({"overrides": ["local={name: fedprox}"]}, "^local: row 'FedRA'"),
        ({"seeds": 99_999_999_999}, "^--seeds: 99999999999 is more than 1000 seeds"),
        ({"chosen": [""]}, "^--cells: '' names no cell; write ROW, @SETTING or ROW@SETTING"),
        ({"chosen": ["@"]}, "^--cells: '@' names no cell"),
    ],
)
def test_what_would_fill_a_table_with_something_else_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        table_study("fedra/table3", "mini", **options)


def test_an_option_that_rows_set_is_theirs_and_others_may_be_set():
    with pytest.raises(ConfigError, match=r"^local\.lambda_mode: row 'FedGCR'"):
        table_study("fedgcr/authors", "paper", 1, overrides=["local.lambda_mode=paper"])
    assert table_study("fedra/table3", "mini", 1, overrides=["server.weighting=uniform"]).configs


EQUALLY = ("equal=steps", "cluster=inline", "data.limit=24", "data.domains=[plain,fonts]")


def test_rows_that_train_less_run_more_rounds(cache):
    """FFT-GP takes two batches for a step, and zero-shot trains nothing."""
    chosen = ["FFT-GP", "FedCLIP", "Zero-shot"]
    place = f"data.cache={cache}"
    asked = table_study("fft_gp/table5", "mini", 2, chosen, [*EQUALLY, place])
    plain = table_study("fft_gp/table5", "mini", 2, chosen, [*EQUALLY[1:], place, "equal=null"])
    rounds = {cell: config.rounds for cell, config in plain.configs.items()}
    longer = {cell: n * (2 if cell.row == "FedCLIP" else 1) for cell, n in rounds.items()}
    assert {cell: config.rounds for cell, config in asked.configs.items()} == longer
    assert "equal=steps" in asked.overrides
    assert plain.path != asked.path
    with pytest.raises(ConfigError, match=r"^equal: 'often'"):
        table_study("fft_gp/table5", "mini", 1, chosen, ["equal=often"])
