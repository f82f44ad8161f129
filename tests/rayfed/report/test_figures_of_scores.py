"""Figures of leave_one_out: heights, means, colours, and the order of the domains."""

import json

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from rayfed.record.atomic_files import write_text
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.figures import OF_FOLDS, score_by_fold, score_by_fold_and_round
from rayfed.report.method_runs import MethodRuns
from rayfed.report.style import looks
from tests.rayfed.report.tables import write_run
from tests.rounding import near

FOLDS = ("fonts", "plain", "street")  # not in the order of the data set
IN_ORDER = ("plain", "street", "fonts")


@pytest.fixture
def run(tmp_path):
    folders = {}
    for place, name in enumerate(FOLDS):
        for method, algorithm in enumerate(("fedavg", "afl")):
            folder = folders[algorithm, name] = tmp_path / f"{algorithm}-{name}"
            write_run(folder, rounds=3)
            score = 0.1 * (1 + place) + 0.4 * method
            rows = [
                {"round": r, "val_accuracy": v, "accuracy": score / 2, "held_out_accuracy": score + 0.01 * r}
                for r, v in ((1, 0.2), (2, 0.9), (3, 0.5))
            ]
            write_text(folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return MethodRuns(folders=folders)


def test_bars_are_the_selected_rounds_and_their_mean(run):
    figure = score_by_fold(run).figure
    held_out, own = figure.axes
    heights = np.array([bar.get_height() for bar in held_out.patches]).reshape(2, 4)
    fedavg = [22.0, 32.0, 12.0]  # plain, street, fonts in round 2
    near(heights[0], [*fedavg, np.mean(fedavg)], 3 + 3, 100.0, torch.float64)
    near(heights[1], heights[0] + 40, 3 + 3, 100.0, torch.float64)
    assert own.patches[0].get_height() == pytest.approx(10.0)
    assert [text.get_text() for text in held_out.get_xticklabels()] == [*IN_ORDER, "mean"]
    colours = [to_hex(held_out.patches[i].get_facecolor()) for i in (0, 4)]
    assert colours == [colour.lower() for colour in style.PALETTE[:2]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "afl"]


def test_of_equal_validation_scores_the_bars_are_the_round_that_the_config_says(run):
    for folder in run.folders.values():
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        rows = [{**json.loads(line), "val_accuracy": 0.5} for line in lines]
        write_text(folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        config = (folder / "config.yaml").read_text()
        write_text(folder / "config.yaml", config + "evaluation: {ties: last}\n")
    held_out, _ = score_by_fold(run).figure.axes
    assert [bar.get_height() for bar in held_out.patches][:3] == pytest.approx([23, 33, 13])  # in round 3


def test_curves_have_the_colours_of_the_domains_and_a_mean(run):
    axis = score_by_fold_and_round(run).figure.axes[0]
    domains = looks(RecordedRun(run.folders["fedavg", "plain"]).domains)
    *curves, mean = axis.lines
    assert [to_hex(line.get_color()) for line in curves] == [domains[d].colour.lower() for d in IN_ORDER]
    near(
        mean.get_ydata(), np.mean([line.get_ydata() for line in curves], axis=0), 3 + 3, 100.0, torch.float64
    )


def test_the_figures_fit_their_canvas(run):
    for draw in (score_by_fold, score_by_fold_and_round):
        figure = draw(run).figure
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert box.x0 >= -0.05 and box.y0 >= -0.05  # noqa: PT018
        assert box.x1 <= width + 0.05 and box.y1 <= height + 0.05  # noqa: PT018


def test_other_runs_have_no_such_figure(tmp_path):
    write_run(tmp_path / "run")
    alone = MethodRuns(folders={("fedgcr", ""): tmp_path / "run"})
    assert {draw(alone) for draw in OF_FOLDS.values()} == {None}
