"""The page about several runs: seeds as bands, the table of all runs, differences, and what differs."""

import json
import shlex

import numpy as np
import pytest
import yaml

from rayfed.errors import ConfigError
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.page.several import find, over_seeds, page_of
from rayfed.report.page.single import summary
from tests.rayfed.report.page import folders
from tests.rayfed.report.page.conftest import part_of, table_of

pytestmark = pytest.mark.xdist_group("page")  # with test_render.py, so that `methods_page` is made once


def by_domain(values):
    """Mean over the domains of the scores of 12 clients, which are dealt to three domains in turn."""
    return np.mean([values[i::3].mean() for i in range(3)])


def levels(methods, name):
    return [by_domain(values) for path, values in methods.items() if path.name.startswith(name)]


def test_means_and_deviations_over_seeds(methods_page, methods):
    rows = {row["method"]: row for row in table_of(methods_page, "Mean over seeds")}
    for name in ("fedgcr", "fedavg"):
        found = levels(methods, name)
        assert rows[name]["mean over domains"] == pytest.approx(np.mean(found))
        assert rows[name]["deviation of mean over domains"] == pytest.approx(np.std(found, ddof=1))
        assert rows[name]["runs"] == 3


def test_seeds_are_bands(methods_page, methods):
    last = table_of(methods_page, "Score, mean over domains")[-1]
    found = levels(methods, "fedavg")
    assert last["fedavg"] == pytest.approx(np.mean(found))
    assert last["fedavg, lowest"] == pytest.approx(min(found))
    assert last["fedavg, highest"] == pytest.approx(max(found))
    svg = part_of(methods_page, "Score, mean over domains").svg
    assert svg.count("fill-opacity") == 2
    assert ">accuracy, %<" in svg  # in percent, as in the tables


def test_the_table_of_all_runs_has_a_row_for_each_run_and_domain(methods_page, methods):
    section = next(s for s in methods_page.sections if s.name == "All runs")
    (runs,) = section.parts
    rows = [dict(zip([c.name for c in runs.columns], row, strict=True)) for row in runs.rows]
    assert len(rows) == 6 * (1 + 3)
    assert runs.filters == {"method": "", "seed": "", "domain": "mean over domains"}
    means = [row["score"] for row in rows if row["domain"] == "mean over domains"]
    assert means == pytest.approx([by_domain(values) for values in methods.values()])
    street = [row["score"] for row in rows if row["domain"] == "street"]
    assert street == pytest.approx([values[::3].mean() for values in methods.values()])


def test_methods_are_compared_in_pairs_of_seeds_and_of_clients(methods_page, methods):
    rows = {(row["score"], row["pairs of"]): row for row in table_of(methods_page, "Paired comparisons")}
    gcr, avg = (
        np.array([v for p, v in methods.items() if p.name.startswith(n)]) for n in ("fedgcr", "fedavg")
    )
    mean = rows["mean over domains", "seeds"]
    differences = np.array(levels(methods, "fedgcr")) - np.array(levels(methods, "fedavg"))
    assert (mean["A"], mean["B"], mean["pairs"]) == ("fedgcr", "fedavg", 3)
    assert mean["mean of A minus B"] == pytest.approx(differences.mean())
    assert (mean["A higher"], mean["B higher"]) == ((differences > 0).sum(), (differences < 0).sum())
    clients = rows["score of a client", "clients"]
    assert clients["pairs"] == 36
    assert clients["mean of A minus B"] == pytest.approx((gcr - avg).mean())


def test_settings_that_differ_are_marked_and_the_others_are_apart(methods_page):
    grid = part_of(methods_page, "Settings that differ")
    assert {"algorithm", "seed"} <= {row[0] for row in grid.rows}
    assert grid.marked == frozenset(range(len(grid.rows)))
    shared = {row[0] for row in part_of(methods_page, "Settings that all runs share").rows}
    assert "rounds" in shared
    assert not shared & {row[0] for row in grid.rows}


def test_each_of_a_few_runs_is_also_shown_in_detail(methods_page):
    assert [chapter.name for chapter in methods_page.chapters][:2] == ["fedgcr, seed 0", "fedgcr, seed 1"]
    assert {"Curves", "Fairness"} <= {section.name for section in methods_page.chapters[0].sections}


def test_folds_report_the_selected_round_and_the_mean_over_held_out_domains(tmp_path, tables_alone):
    page = page_of([folders.write_folds(tmp_path / "folds")])
    assert page.title == "fft_gp, fedavg on digits-five-mini, each domain held out in turn"
    rows = {row["method"]: row for row in table_of(page, "Mean over settings and seeds")}
    assert set(rows) == {"fft_gp", "fedavg"}
    assert rows["fft_gp"]["held-out domain"] == pytest.approx(0.42)  # round 2 has the best validation score
    results = {(r["method"], r["setting"]) for r in table_of(page, "Results")}
    assert ("fedavg", "plain held out") in results
    held_out = [r for r in table_of(page, "Paired comparisons") if r["score"] == "held-out domain"]
    assert [(r["pairs"], r["mean of A minus B"], r["p"]) for r in held_out] == [(1, 0, None)]


def test_few_shots_are_settings_that_report_the_last_round(tmp_path, no_pictures):
    parts = ("shots-1", "shots-2")
    folders.write_study(tmp_path / "few", "few_shot", ["fedgcr"], parts, rounds=lambda part: 3)
    page = page_of([tmp_path / "few"])
    assert [row["setting"] for row in table_of(page, "Results")] == ["shots-1", "shots-2"]
    assert {chapter.name for chapter in page.chapters} == {
        "fedgcr, shots-1, seed 0",
        "fedgcr, shots-2, seed 0",
    }
    reported = {member.run.reported["round"] for member in find(tmp_path / "few").members}
    assert reported == {3}  # not round 2, whose validation score is the best


@pytest.mark.slow
@pytest.mark.steady
def test_no_mean_mixes_base_and_new_classes(tmp_path, tables_alone):
    places = []
    for seed in range(2):
        place = folders.write_study(
            tmp_path / f"seed-{seed}",
            "base_to_new",
            ["fedavg", "fedgcr"],
            ["base", "new"],
            seed,
            rounds=lambda part: 1,
            clients=lambda part: 3 if part == "base" else 4,
        )
        places.append(place)
    page = page_of(places)
    titles = [part.title for section in page.sections for part in section.parts if hasattr(part, "title")]
    assert "Mean over settings and seeds" not in titles
    mean = next(title for title in titles if title.endswith("base and new classes, mean over seeds"))
    tables = [[*page_of([place]).sections] for place in places]
    singles = [next(p for s in sections if s.name == "The protocol" for p in s.parts) for sections in tables]
    column = [one.name for one in singles[0].columns].index("harmonic mean")
    for number, row in enumerate(table_of(page, mean)):
        values = [single.rows[number][column] for single in singles]
        assert row["method"] == ("fedavg", "fedgcr")[number]
        assert row["harmonic mean"] == pytest.approx(np.mean(values))
        assert row["deviation of harmonic mean"] == pytest.approx(np.std(values, ddof=1))
        assert row["runs"] == 2
    assert len({*singles[0].rows[0][2:]}) > 1  # else the test could not tell the columns apart
    again = [*singles, singles[0]]
    assert over_seeds(again) == []  # two runs with one seed: no telling which of them belongs to the mean
    found = {(row["method"], row["setting"], row["runs"]) for row in table_of(page, "Mean over seeds")}
    assert found == {(m, f"{name} classes", 2) for m in ("fedavg", "fedgcr") for name in ("base", "new")}
    pairs = {(row["setting"], row["pairs of"], row["pairs"]) for row in table_of(page, "Paired comparisons")}
    assert pairs == {  # of two seeds, with 3 and 4 clients
        ("base classes", "seeds", 2),
        ("base classes", "clients", 6),
        ("new classes", "seeds", 2),
        ("new classes", "clients", 8),
    }


def test_of_equal_validation_scores_the_config_says_which_is_reported(tmp_path):
    path = tmp_path / "run"
    folders.write(path, rounds=3, clients=3)
    rows = [
        json.loads(line) | {"val_accuracy": 0.5} for line in (path / "rounds.jsonl").read_text().splitlines()
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for ties, number in (("first", 1), ("last", 3)):
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["evaluation"]["ties"] = ties
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        run = RecordedRun.opened(path, "validation")
        assert run.reported["round"] == number
        (words, *_) = summary(run).parts[1].sentences
        assert words.endswith(f"after round {number}, the {ties} with the best validation score.")


def test_commands_can_be_pasted_where_a_folder_has_a_blank(tmp_path, tables_alone):
    folders.write(tmp_path / "my run", rounds=1, clients=3)
    page = page_of([tmp_path / "my run"])
    code = next(p for s in page.sections for p in s.parts if getattr(p, "title", "") == "One command").code
    for command in (*code, page.facts[0]["repeat"], find(tmp_path / "my run").repeat):
        assert shlex.split(command)[4] == str(tmp_path / "my run" / "config.yaml")


def test_a_sweep_has_its_trials_and_their_seeds(tmp_path, tables_alone):
    page = page_of([folders.write_sweep(tmp_path / "sweep")])
    assert page.title == "Sweep q"
    trials = table_of(page, "Trials")
    assert [(t["trial"], t["state"], t["server.q"]) for t in trials][1] == (1, "finished", 1.1)
    assert [row["setting"] for row in table_of(page, "Mean over seeds")] == ["trial 0", "trial 1", "trial 2"]
    (_, *values) = next(row for row in part_of(page, "Settings that differ").rows if row[0] == "server.q")
    assert values == ["0.1", "0.1", "1.1", "1.1", "2.1", "2.1"]


def test_a_reproduced_table_has_the_papers_numbers_and_verdicts(tmp_path, tables_alone):
    job = tmp_path / "job"
    for row in ("FedGCR", "FedAvg"):
        folders.write(job / "cells" / row, method=row.lower(), rounds=2)
    cells = [("FedGCR", "usps", 0, "cells/FedGCR"), ("FedAvg", "usps", 0, "cells/FedAvg")]
    page = page_of([folders.write_job(job, [*cells, ("FedAvg", "mnist", 0, "cells/waiting")])])
    values = table_of(page, "Ours and the paper's numbers")
    assert (values[0]["row"], values[0]["ours"], values[0]["paper"], values[0]["difference"]) == (
        *("FedGCR", 51.25, 50.0),
        1.25,
    )
    (claim,) = table_of(page, "Orderings of the paper")
    assert (claim["better"], claim["worse"], claim["verdict"]) == ("FedGCR", "FedAvg", "not decided")
    assert [row["method"] for row in table_of(page, "Results")] == ["FedGCR", "FedAvg"]
    assert find(job).repeat == "python -m rayfed.reproduce fedgcr/table5 --scale mini"


def test_runs_of_one_method_and_seed_are_told_apart_by_their_settings(tmp_path, tables_alone):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folders.write(tmp_path / name, rounds=1)
        file = tmp_path / name / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["train"]["lr"] = rate
        file.write_text(yaml.safe_dump(config))
    page = page_of([tmp_path / "a", tmp_path / "b"])
    assert [row["setting"] for row in table_of(page, "Results")] == ["train.lr=0.1", "train.lr=0.2"]
    twice = page_of([tmp_path / "a", tmp_path / "a"])
    assert twice.title == "fedgcr on digits-five-mini, seed 0"  # the same folder is one run


def test_foreign_folders_are_refused(tmp_path):
    for content in (
        {},
        {"study.json": "{}"},
        {"reproduction.json": "{}"},
        {"config.yaml": "protocol: leave_one_out"},
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            page_of([folder])
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
