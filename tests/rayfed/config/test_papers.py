"""The tables and figures of the papers: every cell composes, and a method changes the method only."""

import importlib.util
import re
import shlex

import pytest
import yaml

from rayfed.config.compose import choices, folder
from rayfed.config.papers import tables
from rayfed.config.schema import compatible_parts, load_config, to_dict
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import METHODS
from rayfed.report.matrix import matrix_of
from tests.conftest import ROOT, quickly

TABLES = tables(folder())
EVERY = [
    (name, scale) for name, table in TABLES.items() for scale in ("paper", "mini")[: 1 + bool(table.small)]
]
QUICK = ("fedgcr/table1", "fedra/table1", "fedclip/table1", "fft_gp/table2")
QUICK += ("lora_a2/banking77", "lora_fair/feature_skew")
"""One table of each paper, for `make test`; `make test-steady` composes every cell of all."""

METHOD = ("algorithm", "server", "local", "compare")
PUBLISHED = {
    "fedgcr": {*(f"table{n}" for n in range(1, 15)), "figure3"},
    "fedra": {*(f"table{n}" for n in range(1, 7)), "figure4", "figure5"},
    "fedclip": {*(f"table{n}" for n in range(1, 5)), *(f"figure3{c}" for c in "abcd"), "cost"},
    "fft_gp": {*(f"table{n}" for n in range(2, 16)), *(f"figure{n}" for n in (2, 4, 5, 6, 7))},
    "cf_lora": {"glue"},
    "fedsa_lora": {"glue"},
    "ffa_lora": {"glue"},
    "lora_a2": {"banking77", "banking77_ranks"},
    "lora_fair": {"feature_skew", "label_skew"},
}


def cells(table, scale):
    """One cell for every row and setting."""
    return [cell for cell in table.cells(scale) if cell.seed == table.seeds[0]]


def test_every_table_and_figure_is_an_experiment_at_both_scales():
    for paper, names in PUBLISHED.items():
        for name in names:
            assert f"{paper}/{name}" in TABLES
            assert TABLES[f"{paper}/{name}"].small
    assert {*TABLES} <= {*choices("experiment")}
    assert {"fedra/supplement_feddyn", "fedra/supplement_dirichlet", "fedra/supplement_rank"} <= {*TABLES}


@pytest.mark.parametrize("each", quickly(map("-".join, EVERY), [f"{name}-mini" for name in QUICK]))
def test_every_cell_is_a_valid_experiment(each):
    name, _, scale = each.rpartition("-")
    for cell in cells(TABLES[name], scale):
        config = load_config(cell.overrides)
        compatible_parts(config)
        assert config.algorithm == TABLES[name].rows[cell.row]["algorithm"]
        if scale == "mini":
            assert config.data.root is None or config.data.name == "shakespeare"


def test_a_cell_has_changes_of_its_row_and_its_setting_together():
    """LoRA-A2 trains as many components as the rank of a setting, out of 16; other rows have that rank."""
    for rank in (8, 4, 2, 1):
        chosen = [f"setting=rank {rank} alpha 0.1"]
        own = load_config(["experiment=lora_a2/banking77", *chosen, "row=LoRA-A2"])
        assert (own.local["budget"], own.tuning["rank"]) == (rank, 16)
        other = load_config(["experiment=lora_a2/banking77", *chosen, "row=FedIT"])
        assert other.tuning["rank"] == rank
        mini = load_config(["experiment=lora_a2/banking77/mini", *chosen, "row=LoRA-A2"])
        assert mini.local["budget"] == rank


@pytest.mark.parametrize("name", quickly(TABLES, QUICK))
def test_a_row_changes_its_method_and_what_the_table_says(name):
    """Two rows under one setting differ in the sections of the method and in keys that a row names."""
    table = TABLES[name]
    setting = next(iter(table.settings))
    named = {key for row in table.rows.values() for key in row} - {"algorithm"}
    methods = [METHODS.load(row["algorithm"]) for row in table.rows.values()]
    named |= {f"tuning.{key}" for m in methods for half in (m.server, m.local) for key in half.tuning}
    found = [
        to_dict(load_config([f"experiment={name}", f"row={row}", f"setting={setting}"])) for row in table.rows
    ]
    for config in found[1:]:
        changed = {key for key in flat(config) if flat(config)[key] != flat(found[0]).get(key)}
        assert not {key for key in changed if not belongs(key, {*METHOD, *named})}


def flat(tree, start=""):
    """Values of nested mappings by their full key."""
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{start}{key}.") if isinstance(value, dict) else {f"{start}{key}": value}
    return out


def belongs(key, sections):
    return any(key == section or key.startswith(f"{section}.") for section in sections)


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "ga", "grace", "perfedavg", "qffl", "ditto", "promptfl", "afl"]
)
@pytest.mark.parametrize(
    "name",
    quickly(
        [n for n in choices("experiment") if n.startswith("fft_gp") and "/mini" not in n], ["fft_gp/table2"]
    ),
)
def test_an_algorithm_of_fft_gps_tables_changes_the_method_only(name, algorithm):
    """Of FFT-GP's experiments no method has its own model, tuning or optimizer."""
    plain, other = (
        to_dict(load_config([f"experiment={name}", *more])) for more in ((), (f"algorithm={algorithm}",))
    )
    assert other["algorithm"] == algorithm
    for config in (plain, other):
        for key in METHOD:
            config.pop(key)
    assert plain == other


def test_a_method_outside_the_table_keeps_the_experiment():
    """And the compared experiment of one's own, which belongs to no paper, does too."""
    own, scaffold = (
        load_config(["experiment=fft_gp/pacs_clip", f"algorithm={n}"]) for n in ("ga", "scaffold")
    )
    assert (own.train, own.tuning, own.model) == (scaffold.train, scaffold.tuning, scaffold.model)
    assert own.train.optimizer == "adam"
    assert own.train.lr == 5e-5


def test_rows_of_fedgcr_have_the_tuning_of_their_method():
    for scale in ("", "/mini"):
        for row, tuning in (("FedAvg", "visual_prompt"), ("FedGR", "visual_prompt"), ("FedGC", "gc_prompt")):
            config = load_config([f"experiment=fedgcr/clean{scale}", f"row={row}"])
            assert config.tuning["name"] == tuning
    config = load_config(["experiment=fedgcr/authors", "algorithm=fedavg"])
    assert (config.tuning["num_prompts"], config.tuning["init"]) == (6, "uniform")
    assert load_config(["experiment=fedgcr/paper"]).server["loss"] == "accumulated"
    for name in ("clean", "paper", "authors"):
        config = load_config([f"experiment=fedgcr/{name}"])
        assert config.model.name.startswith("vit_base_patch16_224")
        assert config.data.name == "digits"
        assert config.train.lr == 0.001


def test_the_centralised_reference_and_promptfl_are_what_their_files_say():
    for more in ((), ("experiment=fedra/pacs",), ("experiment=fft_gp/table2",)):
        assert load_config([*more, "algorithm=centralized"]).data.partition.pooled
    config = load_config(["algorithm=promptfl"])
    assert (config.tuning["name"], config.train.lr, config.model.name) == ("text_prompt", 0.001, "clip_mini")


def test_values_of_the_command_line_win():
    config = load_config(
        ["experiment=fedgcr/table1/mini", "row=q-FFL", "server.q=3", "train.lr=0.5", "rounds=2"]
    )
    assert (config.server["q"], config.train.lr, config.rounds) == (3, 0.5, 2)
    assert load_config(["experiment=fft_gp/table2", "data=vlcs"]).data.name == "vlcs"


def test_the_settings_of_baselines_are_those_of_the_specification():
    q = load_config(["experiment=fft_gp/table3", "algorithm=qffl"]).server
    assert (q["q"], q["norm"]) == (0.1, "l2_sq")
    assert load_config(["experiment=fft_gp/table10", "algorithm=qffl"]).server["q"] == 0.001
    assert load_config(["experiment=fft_gp/table3", "algorithm=afl"]).server["weighting"] == "uniform"
    assert load_config(["experiment=fft_gp/table3", "algorithm=fedprox"]).local["mu"] == 0.1


@pytest.mark.parametrize(
    ("wrong", "words"), [("row=FedAwg", "row: 'FedAwg' does not exist"), ("setting=dif2", "setting: 'dif2'")]
)
def test_a_cell_that_is_not_there_is_named(wrong, words):
    with pytest.raises(ConfigError, match=words):
        load_config(["experiment=fedgcr/table1", wrong])


def test_published_numbers_belong_to_cells():
    for name, table in TABLES.items():
        for setting, by_row in table.numbers.items():
            assert setting in table.settings, name
            for row, numbers in by_row.items():
                assert row in table.rows, (name, row)
                if isinstance(numbers, list):
                    assert len(numbers) == len(table.measures), (name, row)
        assert table.where
        assert table.selection
        assert table.data


def test_every_figure_names_the_command_that_draws_it():
    figures = {name: table for name, table in TABLES.items() if table.where.startswith("Figure")}
    assert len(figures) >= 12
    for name, table in figures.items():
        modules = re.findall(r"python -m (rayfed\.[a-z_.]+)", table.figure)
        assert len(modules) == 1, name
        assert importlib.util.find_spec(modules[0]), name


def test_the_matrix_says_what_each_cell_trains_with_and_on():
    text = matrix_of(["experiment=fft_gp/table15"])
    for words in (
        "Table 15",
        "FAA 1/20",
        "server.every 20",
        "sgd 0.001 momentum 0.9",
        "terra_incognita",
        "5 61.54",
    ):
        assert words in text
    assert "each domain held out" in text
    assert "our choice: " in text
    one = matrix_of(["experiment=fedgcr/table1/mini", "row=FedGCR", "setting=dif5"])
    assert "ships with RayFed" in one
    assert "85.11 (0.09)" in one
    assert "FedSAM" not in one
    assert "our choice at the scale of the paper: " in one
    assert "\nour choice: " not in one


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            "fedgcr/table7 row=FedGCR setting=pacs",
            "first: art_painting photo sketch cartoon, flip rotate",
        ),
        ("fedgcr/table1 row=FedGCR setting=dif1", "0.8 of 1859, test images split"),
        ("fft_gp/table3 row=GA setting=pacs", "decay 0.0005 step kept, batch 16, 5 epochs, 40 rounds"),
        ("fft_gp/table3 row=GA setting=pacs", "crop flip jitter grayscale, each domain held out"),
        ("fft_gp/table3/mini row=GA", "at most 150 of a domain, each domain held out"),
        ("fedra/table2 row=FedRA setting='nico vit'", "100 rounds (one_per_domain)"),
    ],
)
def test_the_matrix_says_what_a_cell_alone_has(cell, words):
    assert words in matrix_of(shlex.split(f"experiment={cell}"))


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("fft_gp/table")])
def test_the_choices_of_fft_gps_tables_are_those_of_their_experiment(name):
    config = load_config([f"experiment={name}"])
    said = " ".join(TABLES[name].choices)
    assert ("as in DomainBed" in said) == ((config.data.val, config.data.test) == (0.2, 0.0))
    assert ("scored on the validation" in said) == (config.evaluation.personal_split == "val")
    assert ("without weight decay" in said) == (config.tuning["name"] == "residual_adapter")
    assert ("weight decay 5e-4" in said) == (config.train.weight_decay == 5e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedgcr/authors", "the code normalizes the digits only"),
        ("fedgcr/table1", "section 4.1 says the mean over all clients"),
        ("fedra/figure4", "a subset of NICO++ that it does not name"),
        ("fedra/authors", "the code resizes without it"),
    ],
)
def test_choices_say_what_differs_from_the_paper_or_the_code(name, said):
    assert said in " ".join(TABLES[name].choices)


def test_files_name_each_key_once_and_hold_nothing_else():
    known = {"where", "title", "data", "measures", "rows", "settings", "mini", "numbers", "also", "choices"}
    known |= {"figure", "selection", "seeds", "common", "like", "scores", "columns", "reference", "special"}
    for file in (ROOT / "configs" / "papers").glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        assert content.keys() == {"reference", "defaults", "tables"}
        for entry in content["tables"].values():
            assert entry.keys() <= known
