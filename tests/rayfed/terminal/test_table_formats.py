"""One table in each of its forms, written out by hand."""

import csv
import io

from rayfed.terminal.table_formats import Table

TABLE = Table(
    "Scores & more",
    ("method", "acc_1", "note"),
    (("fedavg", "61.0 ± 2", "a|b <c>"), ("{fedgcr}", "64.0", "")),
    notes=("one sentence",),
    left=frozenset({0, 2}),
    ranks={(1, 1): 1, (0, 1): 2},
)


def test_text_is_aligned_by_column():
    assert TABLE.text().split("\n") == [
        "Scores & more",
        "---------------------------",
        "method       acc_1  note",
        "---------------------------",
        "fedavg    61.0 ± 2  a|b <c>",
        "{fedgcr}      64.0",
        "---------------------------",
        "one sentence",
    ]


def test_markdown_marks_the_best_and_keeps_bars_in_cells():
    assert TABLE.markdown("##", lead="Read it.").split("\n") == [
        "## Scores & more",
        "",
        "Read it.",
        "",
        "| method | acc_1 | note |",
        "| --- | ---: | --- |",
        r"| fedavg | <u>61.0 ± 2</u> | a\|b <c> |",
        "| {fedgcr} | **64.0** |  |",
        "",
        "one sentence  ",
        "",
    ]


def test_html_escapes_and_heads_each_row():
    assert TABLE.html() == (
        '<div class="wide"><table><caption>Scores &amp; more</caption><thead><tr><th scope="col">method</th>'
        '<th scope="col">acc_1</th><th scope="col">note</th></tr></thead><tbody>'
        '<tr><th scope="row">fedavg</th><td><u>61.0 ± 2</u></td><td class="text">a|b &lt;c&gt;</td></tr>'
        '<tr><th scope="row">{fedgcr}</th><td><b>64.0</b></td><td class="text"></td></tr>'
        "</tbody></table></div>"
    )


def test_latex_escapes_and_marks():
    assert TABLE.latex().split("\n") == [
        "% Scores & more",
        r"\begin{tabular}{lrl}",
        r"\toprule",
        r"method & acc\_1 & note \\",
        r"\midrule",
        r"fedavg & \underline{61.0 $\pm$ 2} & a|b <c> \\",
        r"\{fedgcr\} & \textbf{64.0} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]


def test_csv_has_the_cells_as_they_are():
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [list(TABLE.columns), *map(list, TABLE.rows)]
