"""Pictures of the page: matplotlib's, with the colours of the page and without ids."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from rayfed.report.page import charts
from rayfed.report.style import MARKERS, PALETTE
from rayfed.terminal.table_formats import Column

SCORE = charts.share_axis("accuracy")


def drawn(*series, x=charts.ROUND, y=SCORE, title="Score"):
    figure = charts.curves(title, series, x, y)
    return figure, ElementTree.fromstring(figure.svg.replace("xlink:", ""))


def group(picture, name, number):
    (found,) = [each for each in picture.iter() if each.get(f"data-{name}") == str(number)]
    return found


def test_a_curve_goes_through_its_points_where_the_script_of_the_page_expects_them():
    figure, picture = drawn(charts.Series(label="a", x=[1, 2, 3], y=[0.0, 0.5, 1.0]))
    line, *markers = group(picture, "series", 0).iter("path")
    places = [float(number) for number in re.findall(r"-?[\d.]+", line.get("d"))]
    low, high, left, right = figure.places["x"]
    assert (low, high, left, right) == (1, 3, 64, 468)
    assert places == pytest.approx([64, 236, 266, 124, 468, 12], abs=0.06)
    assert [m.get("transform") for m in markers] == [
        "translate(64 236)",
        "translate(266 124)",
        "translate(468 12)",
    ]
    assert "var(--c0)" in line.get("style")
    assert figure.legend[0].colour == "var(--c0)"


def test_labels_of_a_narrow_axis_keep_their_decimals():
    """Coordinates are rounded, but not what is written."""
    _, picture = drawn(charts.Series(label="a", x=[1, 2], y=[2.594, 2.598]), y=charts.Axis(name="loss"))
    labels = [each.text for each in picture.iter("text") if re.fullmatch(r"[\d.]+", each.text or "")]
    assert len(set(labels)) == len(labels) > 4


def test_a_curve_has_a_gap_where_there_is_no_number_and_steps_reach_the_end():
    _, picture = drawn(charts.Series(label="a", x=[1, 2, 3, 4], y=[0.1, math.nan, 0.2, 0.3]))
    (line, *_) = group(picture, "series", 0).iter("path")
    assert line.get("d").count("M") == 2
    x = charts.Axis(name="score", low=0.0, high=1.0)
    _, picture = drawn(charts.Series(label="a", x=[0.5], y=[0.5], steps=True), x=x)
    (line, *_) = group(picture, "series", 0).iter("path")
    assert line.get("d").split()[:3] == ["M", "64", "236"]
    assert line.get("d").split()[-2:] == ["468", "124"]


def test_only_a_band_with_some_width_is_drawn():
    flat = charts.Series(label="a", x=[1, 2], y=[0.1, 0.2], low=[0.1, 0.2], high=[0.1, 0.2])
    wide = charts.Series(label="b", x=[1, 2], y=[0.1, 0.2], low=[0.0, 0.1], high=[0.2, 0.4])
    figure, picture = drawn(flat, wide)
    assert [each.get("data-band") for each in picture.iter() if each.get("data-band")] == ["1"]
    assert figure.places["bands"] == [False, True]


def test_colours_are_variables_of_the_page_and_nothing_has_an_id():
    series = [charts.Series(label=str(i), x=[1, 2], y=[0.1, 0.2]) for i in range(len(PALETTE) + 1)]
    figure, picture = drawn(*series)
    assert not re.search(r"#0102|\bid=|url\(|<use|<defs", figure.svg)
    assert {f"var(--c{i})" for i in range(len(PALETTE))} <= set(re.findall(r"var\([^)]*\)", figure.svg))
    assert figure.legend[0].colour == figure.legend[len(PALETTE)].colour
    assert all("var(--ink)" in text.get("style") for text in picture.iter("text"))


def test_rounds_have_ticks_at_whole_numbers():
    _, picture = drawn(charts.Series(label="a", x=[1], y=[0.5]))
    assert "1" in [text.text for text in picture.iter("text")]
    _, picture = drawn(charts.Series(label="a", x=[1, 2, 3], y=[0.5] * 3))
    assert [text.text for text in picture.iter("text")][:4] == ["1", "2", "3", "round"]


def test_small_seconds_and_many_bytes_have_short_ticks():
    time = charts.Axis(name="time", kind="seconds")
    sent = charts.Axis(name="sent", kind="bytes")
    _, picture = drawn(charts.Series(label="a", x=[0, 4e9], y=[0.001, 0.002]), x=sent, y=time)
    texts = [text.text for text in picture.iter("text")]
    assert {"sent, GB", "time, ms", "4.0"} <= set(texts)
    assert max(map(len, texts)) < 10


def test_thinning_keeps_both_ends():
    found = charts.thin(1000, 7)
    assert (found[0], found[-1], len(found)) == (0, 999, 7)
    assert charts.thin(3, 7) == [0, 1, 2]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_of_the_legend_is_about_seven_pixels_wide(marker):
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", charts.marker_path(marker))]
    assert 5 <= max(numbers) - min(numbers) <= 10


@pytest.mark.parametrize("colours", ["range", "zero", "groups"])
def test_a_heat_map_has_a_pixel_for_each_cell_and_none_for_an_empty_one(colours):
    import base64
    import io

    from PIL import Image

    values = np.array([[0.0, 1.0, np.nan], [2.0, 1.0, 0.0]])
    cells = charts.Cells(
        values=values,
        down=["a", "b"],
        across=["1", "2", "3"],
        row="client",
        column="round",
        value=Column("count", "count"),
        colours=colours,
    )
    figure = charts.heat_map("Counts", cells)
    source = re.search(r"base64,([^\"]+)", figure.svg)[1]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))).convert("RGBA"))
    assert pixels.shape == (2, 3, 4)
    assert (pixels[..., 3] > 0).tolist() == np.isfinite(values).tolist()
    assert (pixels[0, 1] == pixels[1, 1]).all()
    first = [int(PALETTE[0][i : i + 2], 16) for i in (1, 3, 5)] if colours == "groups" else [68, 1, 84]
    assert pixels[0, 0, :3].tolist() == first
    assert figure.rows[0] == ["a", 0.0, 1.0, None]


def test_words_are_escaped():
    figure, _ = drawn(charts.Series(label="<b>", x=[1], y=[0.5]), title='say "x" & <i>')
    assert "<i>" not in figure.svg
