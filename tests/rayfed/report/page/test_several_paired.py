"""Statistics of paired differences, against values worked out by hand."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from rayfed.errors import ConfigError
from rayfed.report.page.render import write_report
from rayfed.report.page.several import page_of, statistics
from tests.rayfed.report.page import folders
from tests.rayfed.report.page.conftest import part_of, table_of


def test_differences_of_one_two_and_three_points():
    assert statistics([0.01, 0.02, 0.03]) == [3, pytest.approx(0.02), pytest.approx(0.01), 3, 0]
    assert statistics([-0.5]) == [1, -0.5, None, 0, 1]
    assert statistics([0.0, 0.0]) == [2, 0, 0, 0, 0]


def test_clients_with_one_test_set_and_one_model_are_one_pair(tmp_path, tables_alone):
    """12 clients of three domains in two seeds: 24 pairs of clients, of which 6 are distinct."""
    paths = {}
    for method in ("fedavg", "afl"):
        for seed in (0, 1):
            path = tmp_path / f"{method}-{seed}"
            paths[path] = folders.write(path, method=method, seed=seed, rounds=1, shared_tests=True)[-1]
    page = page_of(list(paths))
    rows = table_of(page, "Paired comparisons")
    [clients] = [row for row in rows if row["pairs of"] == "clients"]
    first, second = (
        np.concatenate([v[:3] for p, v in paths.items() if p.name[:3] == n]) for n in ("fed", "afl")
    )
    assert clients["pairs"] == 6
    assert clients["mean of A minus B"] == pytest.approx((first - second).mean())
    assert (clients["p"], clients["A is"]) == (None, "")  # clients of a run are no repetitions
    assert (
        "clients with the same test set and the same model count as one"
        in part_of(page, "Paired comparisons").notes[0]
    )
    note = (
        "12 clients share 3 test sets: clients with the same test set have the same score of the global model"
    )
    assert part_of(page, "Distribution of the clients' accuracy").notes[0].startswith(note)
    tested = [row for row in rows if row["pairs of"] == "seeds"]
    assert len(tested) == 3
    assert all(row["low"] <= row["mean of A minus B"] <= row["high"] for row in tested)
    levels = {p: v.mean() for p, v in paths.items()}
    differences = [levels[tmp_path / f"fedavg-{seed}"] - levels[tmp_path / f"afl-{seed}"] for seed in (0, 1)]
    [mean] = [row for row in tested if row["score"] == "mean over clients"]
    assert mean["p"] == pytest.approx(ttest_1samp(differences, 0).pvalue)
    notes = part_of(page, "Paired comparisons").notes[0]
    assert "mean over clients: 2 seeds resolve differences of" in notes


def test_clients_that_keep_tensors_have_models_that_differ(tmp_path, tables_alone):
    import yaml

    paths = [tmp_path / "fedavg", tmp_path / "afl"]
    for path in paths:
        folders.write(path, method=path.name, rounds=1, shared_tests=True)
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["local"]["stays"] = ["head"]
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    page = page_of(paths)
    [clients] = [row for row in table_of(page, "Paired comparisons") if row["pairs of"] == "clients"]
    assert clients["pairs"] == 12
    assert part_of(page, "Distribution of the clients' accuracy").notes == ()


def test_bytes_with_frozen_blocks_are_said_where_scores_are_drawn_over_them(tmp_path, tables_alone):
    paths = [tmp_path / "fedra", tmp_path / "fedavg"]
    for path in paths:
        folders.write(path, method=path.name, rounds=1)
    note = "ytes include the frozen blocks that clients download (server.frozen_cache=none)"
    for runs, others in ((paths, "; other methods take these blocks as installed."), (paths[:1], "")):
        assert note + others in part_of(page_of(runs), "Score over the bytes sent").caption
    assert part_of(page_of(paths[1:]), "Score over the bytes sent").caption == ""


def test_means_over_seeds_are_written_for_latex_too(tmp_path, tables_alone):
    values = [
        folders.write(tmp_path / str(seed), method="fedavg", seed=seed, rounds=1)[-1] for seed in range(3)
    ]
    file = tmp_path / "page.html"
    for _ in range(2):  # its own file is replaced
        write_report([tmp_path / str(seed) for seed in range(3)], file)
    text = file.with_suffix(".tex").read_text()
    means = 100 * np.array([each.mean() for each in values])
    assert f"{means.mean():.1f} $\\pm$ {means.std(ddof=1):.1f}" in text
    assert text.splitlines()[1] == "% Mean over seeds"
    assert "deviation of" not in text
    assert "mean over clients, \\%" in text
    write_report([tmp_path / "0"], tmp_path / "one.html")
    assert not (tmp_path / "one.tex").exists()


def three_methods(folder):
    for method in ("fedavg", "afl", "ditto"):
        for seed in range(2):
            folders.write(folder / f"{method}-{seed}", method=method, seed=seed, rounds=1)
    return [folder / f"{method}-{seed}" for method in ("fedavg", "afl", "ditto") for seed in range(2)]


def test_others_are_compared_with_one_and_within_a_margin(tmp_path, tables_alone):
    paths = three_methods(tmp_path)

    def pairs(**options):
        table = table_of(page_of(paths, **options), "Paired comparisons")
        return {(row["A"], row["B"]) for row in table if row["pairs of"] == "seeds"}

    assert pairs() == {("fedavg", "afl"), ("fedavg", "ditto"), ("afl", "ditto")}
    assert pairs(against="afl") == {("fedavg", "afl"), ("ditto", "afl")}
    caption = part_of(page_of(paths, margin=0.03), "Paired comparisons").notes[0]
    assert "within 3 points of 0" in caption
    with pytest.raises(ConfigError, match="--against: 'fedavgg'"):
        page_of(paths, against="fedavgg")
    with pytest.raises(ConfigError, match="there is one run, and nothing to compare it with"):
        page_of(paths[:1], against="fedavg")


def test_differences_are_written_for_latex_with_their_intervals(tmp_path, tables_alone):
    paths = three_methods(tmp_path)
    write_report(paths, tmp_path / "page.html", against="fedavg")
    text = (tmp_path / "page.tex").read_text()
    rows = [
        row
        for row in table_of(page_of(paths, against="fedavg"), "Paired comparisons")
        if row["pairs of"] == "seeds"
    ]
    assert text.count("% Paired comparisons") == 1
    for row in rows:
        interval = (
            f"{100 * row['mean of A minus B']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        )
        assert interval.replace("+", "") in text.replace("+", "").replace("$-$", "-")
