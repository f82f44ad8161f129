"""Segmentation and text from config to table, with every method of the papers' tables."""

import numpy as np
import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import spread
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import client_table, final_table
from tests.conftest import quickly
from tests.rayfed.data.readers.test_shakespeare import script

METHODS = ("fedavg", "qffl", "afl", "ga", "perfedavg", "ditto", "grace", "fft_gp")
VOLUMES = (
    *("experiment=fft_gp/prostate_mini", "protocol=single", "cluster=inline", "model.size=32"),
    "figures=false",
    *("model.options={width: 2}", "data.limit=3", "data.val=1", "data.test=1", "rounds=2"),
)
ROLES = ("BOTTOM", "HAMLET", "ROMEO")


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plays")
    (folder / "input.txt").write_text(script(ROLES))
    return folder


@pytest.fixture
def text(plays, cache, tmp_path):
    return (
        *("experiment=fft_gp/shakespeare", f"data.root={plays}", f"data.cache={cache}", "cluster=inline"),
        "figures=false",
        *("model.size=16", "model.options={hidden: 8}", "data.limit=40", "rounds=2", "evaluation.every=1"),
        f"output={tmp_path / 'text'}",
    )


@pytest.fixture
def volumes(cache, tmp_path):
    return (*VOLUMES, f"data.cache={cache}", f"output={tmp_path / 'volumes'}")


@pytest.mark.parametrize("method", quickly(METHODS, METHODS[:3]))
def test_every_method_segments(volumes, method):
    result = rayfed.simulate([*volumes, f"algorithm={method}", "data.domains=[RUNMC, UCL, HK]"])
    rows = read_rows(result.path)
    assert all(0 < row["dice"] <= row["dice_mean2"] < 1 for row in rows)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert not any("accuracy" in name for row in rows for name in row)


@pytest.mark.parametrize("method", ["fedavg", "qffl", "ditto", "fft_gp"])
def test_methods_read(text, method):
    result = rayfed.simulate([*text, f"algorithm={method}"])
    rows = read_rows(result.path)
    assert rows[1]["loss"] < rows[0]["loss"] < np.log(80)
    table = final_table(RecordedRun(result.path))
    assert table.columns == (
        "accuracy %",
        "clients",
        "average",
        "worst 10%",
        "best 10%",
        "variance",
        "over examples",
    )
    assert [row[:2] for row in table.rows] == [(f"{method}, global", "3"), (f"{method}, personal", "3")]
    own = pq.read_table(result.path / "clients.parquet").to_pylist()
    own = [
        100 * row["value"]
        for row in own
        if (row["round"], row["exchange"], row["model"], row["metric"])
        == (2, "report_clients", "personal", "accuracy")
    ]
    expected = (np.mean(own), min(own), max(own), np.var(own), np.mean(own))  # test splits of one size
    assert table.rows[1][2:] == tuple(f"{number:.1f}" for number in expected)


def test_a_table_of_dice_says_dice(volumes):
    result = rayfed.simulate(
        [*volumes, "data.held_out=HK", "data.domains=[RUNMC, UCL, HK]", "rounds=1", "figures=true"]
    )
    table = final_table(RecordedRun(result.path))
    assert table.columns[2:] == ("train slices", "test slices", "global dice %", "personal dice %")
    assert table.rows[-1][0] == "HK (held out)"
    assert "accuracy" not in (result.path / "report.md").read_text()
    assert (result.path / "figures" / "dice.png").exists()
    row = result.metrics
    assert {"dice", "dice_domain", "worst_domain_dice", "worst_client_dice", "held_out_dice"} <= row.keys()


def test_each_site_held_out_in_turn(volumes):
    result = rayfed.simulate([*volumes, "protocol=leave_one_out", "data.domains=[RUNMC, HK]", "rounds=1"])
    report = (result.path / "report.md").read_text()
    assert "dice in percent" in report
    assert "| RUNMC | fft_gp | 1 |" in report
    assert "| mean |" in report


def test_others_come_as_rows(text):
    result = rayfed.simulate(
        [*text, "algorithm=fedavg", "compare=ga", "rounds=1", "evaluation.personal=false"]
    )
    lines = (result.path / "report.md").read_text().splitlines()
    rows = [line.split(",")[0] for line in lines if "global" in line]
    assert rows == ["| fedavg", "| ga"]


def test_columns_of_the_papers_table():
    values = [float(n) for n in range(1, 32)]
    found = spread(values)
    assert (found.average, found.worst, found.best) == (16, 2, 30)
    scores = [
        {"exchange": "report_clients", "client": f"c{n}", "model": "global", "value": n / 100}
        for n in range(1, 32)
    ]
    counts = {f"c{n}": int(n == 31) for n in range(1, 32)}
    table = client_table("t", "ga", "accuracy", scores, counts)
    assert table.rows == (("ga, global", "31", "16.0", "2.0", "30.0", "80.0", "31.0"),)


def digest_of(setup, executor):
    rounds = list(run_rounds(setup.experiment, executor, setup.start))
    return rounds[-1].state.params, rounds[-1].scores


def test_text_on_actors_is_text_inline(text, pool_of_two):
    setup = prepared(load_config(text))
    params, scores = digest_of(setup, InlineExecutor(setup.context, setup.weights))
    again, others = digest_of(setup, pool_of_two(setup))
    assert all((params[name] == again[name]).all() for name in params)
    assert scores == others


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["model=vit_mini", "model.options={}"],
            "the model is for classification, the data set 'prostate-mini' for segmentation; set model=unet",
        ),
        (
            ["data=digits_five_mini"],
            "the model is for segmentation, the data set 'digits-five-mini' for class",
        ),
        (["tuning=head"], "tuning.name: 'head' adapts a pretrained image classifier"),
        (["algorithm=fedmix"], "algorithm: MeanAugmented is for classification, and the data set is for seg"),
        (
            ["server.name=fedgr"],
            "is for classification, next_character and text_classification, and the data set is for seg",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(volumes, more, message):
    with pytest.raises(ConfigError, match=message):
        rayfed.simulate([*volumes, *more])


def test_images_are_not_made_of_text(text):
    with pytest.raises(
        ConfigError, match=r"Harmonized is for classification and segmentation, and the data set"
    ):
        rayfed.simulate([*text, "algorithm=harmofl"])
