"""The look of figures: what can be read, and what means the same in all figures of a run."""

import itertools
import re

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.figures import FIGURES, compare_runs, comparison, draw_figures
from rayfed.report.method_figures import cluster_flow, matched_groups
from rayfed.report.method_runs import MethodRuns
from tests.conftest import ROOT, quickly
from tests.rayfed.report.tables import DOMAINS, HELD_OUT, write_rounds, write_run
from tests.rounding import near

FEW = {"few": 11, "one": 4, "many": 100}


@pytest.fixture(scope="module", params=quickly(FEW, []))
def drawn(request, tmp_path_factory):
    """All figures of a run of 11 clients, of one round with 4 clients, and of 100 clients."""
    path = tmp_path_factory.mktemp("figures") / "run"
    write_run(path, clients=FEW[request.param], rounds=1 if request.param == "one" else 12)
    run = RecordedRun(path)
    figures = {title: figure(run) for title, figure in FIGURES.items()}
    for drawing in filter(None, figures.values()):
        drawing.figure.draw_without_rendering()  # places everything, once for all tests
    return request.param, figures


def texts(figure):
    """Visible texts of a figure that was drawn, with their boxes, in pixels."""
    found = [
        *figure.texts,
        *(t for legend in figure.legends for t in [*legend.get_texts(), legend.get_title()]),
    ]
    found += [figure._suptitle] if figure._suptitle not in found else []
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [axes.title, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            found += [axis.label, *(label for tick in ticks for label in (tick.label1, tick.label2))]
    return [(t.get_text(), t.get_window_extent()) for t in found if t.get_visible() and t.get_text().strip()]


def test_every_figure_is_drawn_and_titled(drawn):
    _, figures = drawn
    assert all(figures.values()), [title for title, drawing in figures.items() if drawing is None]
    names = [drawing.name for drawing in figures.values()]
    assert len(set(names)) == len(names)
    for title, drawing in figures.items():
        words = drawing.figure._suptitle.get_text()
        assert "digits-five-mini" in words or title.startswith("features"), title
        assert "type" not in " ".join(text for text, _ in texts(drawing.figure)).split()
        if title not in {"labels and domains of the clients", "features of seen and of unseen domains"}:
            assert "round" in words, title


def test_no_text_leaves_the_canvas_or_covers_another(drawn):
    _, figures = drawn
    for title, drawing in figures.items():
        found = texts(drawing.figure)
        width, height = drawing.figure.canvas.get_width_height()
        for text, box in found:
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, f"{title}: {text!r} leaves the figure"
        for (a, one), (b, other) in itertools.combinations(found, 2):
            apart = min(one.x1, other.x1) - max(one.x0, other.x0) < 1.5 or (
                min(one.y1, other.y1) - max(one.y0, other.y0) < 1.5
            )
            assert apart, f"{title}: {a!r} and {b!r} overlap"


def test_legends_and_names_stand_outside_the_panels(drawn):
    _, figures = drawn
    for title, drawing in figures.items():
        figure = drawing.figure
        panels = [axes.get_window_extent() for axes in figure.axes if axes.axison]
        for legend in figure.legends:
            assert not legend.get_window_extent().count_overlaps(panels), title
        assert not any(axes.get_legend() for axes in figure.axes), title
    for axes in figures["aggregation weights"].figure.axes:
        for name in axes.texts:
            assert name.get_window_extent().x0 > axes.get_window_extent().x1


def test_rounds_groups_and_blocks_are_whole_numbers(drawn):
    case, figures = drawn
    for title, drawing in figures.items():
        for axes in drawing.figure.axes:
            if axes.axison and axes.get_xlabel() == "round":
                low, high = axes.get_xlim()
                ticks = [at for at in axes.get_xticks() if low <= at <= high]
                assert ticks == np.round(ticks).tolist(), title
                assert len(ticks) >= 1
                if case == "one":
                    assert ticks == [1]


def test_a_domain_has_one_colour_in_all_figures(drawn):
    """The order of the data set counts, not that of the clients; legends say what is drawn."""
    _, figures = drawn
    expected = dict(zip(DOMAINS, style.PALETTE, strict=False))
    for title, drawing in figures.items():
        for legend in drawing.figure.legends:
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
                domain = text.get_text().removeprefix("client of ").split(" (")[0]
                if domain in expected:
                    colour = (
                        handle.get_facecolor() if hasattr(handle, "get_facecolor") else handle.get_color()
                    )
                    assert to_hex(colour) == expected[domain].lower(), (title, domain)
    for axes in figures["aggregation weights"].figure.axes:
        if axes.axison:
            assert {to_hex(line.get_color()) for line in axes.lines} == {expected[axes.get_title()].lower()}
    held_out = [
        line for line in figures["score by domain"].figure.axes[0].lines if line.get_label() == HELD_OUT
    ]
    assert [line.get_linestyle() for line in held_out] == ["--"]


def test_bars_of_clients_have_the_colours_and_values_of_their_domains(tmp_path):
    own = write_run(tmp_path / "run")
    figure = FIGURES["score by client"](RecordedRun(tmp_path / "run")).figure
    rows = [
        row for row in RecordedRun(tmp_path / "run").rows("clients")
        if (row["round"], row["exchange"], row["metric"]) == (5, "report_clients", "accuracy")
    ]  # fmt: skip
    rows.sort(key=lambda row: row["value"])
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx([100 * row["value"] for row in rows])
    colours = dict(zip(DOMAINS, style.PALETTE, strict=False))
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [colours[own[r["client"]]].lower() for r in rows]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [r["client"] for r in rows]


def test_names_of_a_hundred_clients_are_thinned(tmp_path):
    write_run(tmp_path / "run", clients=100)
    figure = FIGURES["labels and domains of the clients"](RecordedRun(tmp_path / "run")).figure
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name[:3] for name in labels] == [f"c{i:02}" for i in range(0, 100, 10)]
    picture = figure.axes[0].images[0]
    assert picture.get_clim()[1] == pytest.approx(picture.get_array().max())
    near(picture.get_array().sum(axis=1), np.full(100, 100.0), 10 + 3, precision=torch.float64)


def test_segmentation_has_no_classes_to_draw(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "environment.json").write_text('{"task": "segmentation"}')
    figure = FIGURES["labels and domains of the clients"](RecordedRun(tmp_path / "run")).figure
    assert [axes.get_xlabel() for axes in figure.axes] == ["training samples"]


def test_groups_have_the_same_numbers_in_both_figures(tmp_path):
    """The lanes of the last round are the numbers of the map, however the method numbered its groups."""
    write_run(tmp_path / "run")
    run = RecordedRun(tmp_path / "run")
    axes = cluster_flow(run).figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    lanes = sorted(names[round(line.get_ydata()[-1])] for line in axes.lines)
    last = matched_groups(run.rows("clusters"))[5]
    assert lanes == sorted(f"group {group}" for group in last.values())
    marks = FIGURES["representations of clients"](run).figure.axes[0].collections
    assert sum(len(points.get_offsets()) for points in marks) == len(last)


def test_a_client_that_missed_a_round_keeps_its_group():
    groups = {1: {"a": 0, "b": 1, "c": 1}, 2: {"a": 0}, 3: {"b": 0, "c": 0, "a": 1}}
    rows = [{"round": r, "client": c, "cluster": g} for r, of in groups.items() for c, g in of.items()]
    assert matched_groups(rows)[3] == {"a": 0, "b": 1, "c": 1}


def test_methods_are_compared_with_a_band_over_seeds(tmp_path):
    folders = {name: [tmp_path / name / str(seed) for seed in range(3)] for name in ("fedavg", "afl")}
    for place, folder in enumerate(itertools.chain.from_iterable(folders.values())):
        folder.mkdir(parents=True)
        write_rounds(folder, 4, np.random.default_rng(place))
    figure = compare_runs(folders).figure
    mean, worst = figure.axes
    values = np.array([[row["accuracy"] for row in RecordedRun(f).rounds] for f in folders["fedavg"]])
    near(mean.lines[0].get_ydata(), 100 * values.mean(0), 3 + 2, 100.0, torch.float64)
    band = mean.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(100 * values.min())
    assert band[:, 1].max() == pytest.approx(100 * values.max())
    assert [to_hex(line.get_color()) for line in worst.lines] == [c.lower() for c in style.PALETTE[:2]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "afl"]
    assert "3 seeds" in figure._suptitle.get_text()


def test_a_method_that_does_not_train_is_a_line_over_all_rounds(tmp_path):
    folders = {(name, ""): tmp_path / name for name in ("fedgcr", "zero_shot")}
    for (name, _), folder in folders.items():
        folder.mkdir()
        write_rounds(folder, 1 if name == "zero_shot" else 5, np.random.default_rng(0))
    figure = comparison(MethodRuns(folders=folders)).figure
    reference = figure.axes[0].lines[1]
    assert reference.get_xdata() == [0, 1]  # the whole width, in coordinates of the panel
    assert to_hex(reference.get_color()) == style.PALETTE[1].lower()


def test_costs_are_sums_over_the_rounds(tmp_path):
    write_run(tmp_path / "run")
    traffic, time = FIGURES["score over traffic and time"](RecordedRun(tmp_path / "run")).figure.axes
    assert traffic.lines[0].get_xdata().tolist() == [4, 8, 12, 16, 20]
    assert "MB" in traffic.get_xlabel()
    assert time.lines[0].get_xdata().tolist() == [2, 4, 6, 8, 10]


def test_a_folder_without_tables_has_no_figures(tmp_path):
    assert draw_figures(RecordedRun(tmp_path)) == {}


def test_labels_are_moved_apart_and_keep_their_order():
    found = style.spread([0.5, 0.5, 0.1, 0.52], 0.1, 0.0, 1.0)
    assert found[2] == pytest.approx(0.1)
    assert np.diff(sorted(found)).min() >= 0.1 - 1e-9
    assert found[0] < found[1] < found[3]
    assert style.spread([0.99, 1.0], 0.2, 0.0, 1.0) == pytest.approx([0.8, 1.0])
    assert style.spread([0.5] * 5, 0.5, 0.0, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1])


DEFICIENT = {
    "protanopia": [
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ],
    "deuteranopia": [
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ],
}
"""What these people see, in linear RGB.

Machado, Oliveira, Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009.
"""


@pytest.mark.parametrize("kind", DEFICIENT)
def test_colours_differ_for_people_with_colour_blindness(kind):
    """Distance between cube roots of linear RGB; matplotlib's default colours are 0.04 apart."""
    rgb = np.array([to_rgb(colour) for colour in style.PALETTE])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.cbrt(np.clip(linear @ np.array(DEFICIENT[kind]).T, 0, 1))
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.15


def luminance(colour):
    """Relative luminance of WCAG 2.1 of a colour #RRGGBB."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_lines_are_seen_on_a_dark_page():
    """Contrast of at least 3 to 1, as WCAG 2.1 asks for graphics, on the background of the report."""
    page = (ROOT / "rayfed" / "report" / "page" / "page.css").read_text()
    dark = luminance(re.search(r'data-theme="dark"\] { --paper: (#\w{6})', page)[1])
    assert len(style.DARK_PALETTE) == len(style.PALETTE) == len(set(style.DARK_PALETTE))
    assert all((luminance(colour) + 0.05) / (dark + 0.05) >= 3 for colour in style.DARK_PALETTE)
