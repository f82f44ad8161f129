"""The scores of a cell are those of its run's own tables."""

import json
import re

import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed.config import papers
from rayfed.config.compose import folder
from rayfed.config.schema import load_config
from rayfed.record.readers import read_rows
from rayfed.report.protocols import MEASURES
from rayfed.reproduce.cell_scores import (
    ADDED,
    FINAL,
    HALF,
    SPREAD,
    WITHOUT,
    better,
    read_half,
    read_scores,
    read_without,
    rule_of,
    unit,
)
from tests.conftest import SMALL

LOOKS = ("evaluation.personal=true", "evaluation.without_parts=true")
DOMAINS = "data.domains=[plain,street]"


@pytest.fixture(scope="module")
def folds(tmp_path_factory, cache):
    path = tmp_path_factory.mktemp("folds") / "run"
    overrides = [*SMALL, "data.test=0.2", "data.val=0.2", "protocol=leave_one_out", DOMAINS, "cluster=inline"]
    overrides += [f"data.cache={cache}", f"output={path}", "rounds=2"]
    overrides.append("evaluation.without_parts=true")
    rayfed.simulate(overrides)
    return path, load_config(overrides)


def of_folds(path):
    return {name: next(path.glob(f"cells/*{name}*")) for name in ("plain", "street")}


def test_of_a_run(small):
    run = small(*LOOKS)
    config = load_config([*SMALL, "evaluation.personal=true"])
    wanted = ["accuracy_domain", "sigma_type", "domain 1", "domain 5", "domain 6", "average", "variance"]
    found = read_scores({"": run.path}, config, [*wanted, "worst tenth", "numbers_trained"])
    row = run.metrics
    assert found["accuracy_domain"] == 100 * row["accuracy_domain"]
    assert found["sigma_type"] == 100 * row["sigma_type"]
    assert "domain 6" not in found
    report = (run.path / "report.md").read_text()
    for name, domain in (("domain 1", "plain"), ("domain 5", "fonts")):
        line = next(line for line in report.splitlines() if line.startswith(f"| {domain} |"))
        assert line.split("|")[5].strip() == f"{found[name]:.1f}"
    assert found["average"] == pytest.approx(100 * row["personal_accuracy"])
    assert found["variance"] == pytest.approx((100 * row["personal_sigma_client"]) ** 2)
    assert found["numbers_trained"] > 100
    swapped = read_scores({"": run.path}, config, ["domain 1"], ["fonts", "plain"])
    assert swapped["domain 1"] == found["domain 5"]


def test_over_the_rounds(small):
    """Of all rounds, evaluated or not, that have the columns."""
    overrides = [*SMALL, "algorithm=faa", "server.compare=true", "data.val=0.2", "rounds=3"]
    run = small(*overrides[len(SMALL) :], "evaluation.every=3")
    faa, ga = ([row[f"gap_{name}_variance"] for row in read_rows(run.path)] for name in ("faa", "ga"))
    names = ["geometric mean gap_faa_variance", "rounds gap_faa_variance < gap_ga_variance"]
    found = read_scores({"": run.path}, load_config(overrides), [*names, "geometric mean not_there"])
    assert len(faa) == len(ga) == 3
    assert found == {
        names[0]: pytest.approx((faa[0] * faa[1] * faa[2]) ** (1 / 3)),
        names[1]: pytest.approx(100 * sum(a < b for a, b in zip(faa, ga, strict=True)) / 3),
    }


def test_of_held_out_domains(folds):
    path, config = folds
    wanted = ["generalization", "generalization 1", "generalization 2", "comprehensive 1", "generalization 3"]
    found = read_scores(of_folds(path), config, wanted)
    report = (path / "report.md").read_text()
    line = next(line for line in report.splitlines() if line.startswith("| generalization |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == [
        f"{found[name]:.2f}" for name in ("generalization 1", "generalization 2", "generalization")
    ]
    assert "generalization 3" not in found
    swapped = read_scores(of_folds(path), config, ["generalization 1"], ["street", "plain"])
    assert swapped["generalization 1"] == found["generalization 2"]
    assert "validation" in rule_of(config)


def test_of_held_out_domains_without_what_was_trained(folds):
    path, config = folds
    found = read_without(of_folds(path))
    each = [json.loads((folder / "without.json").read_text()) for folder in of_folds(path).values()]
    for name, kind in WITHOUT.items():
        scores = [one[kind]["by_domain"][fold] for one, fold in zip(each, ("plain", "street"), strict=True)]
        assert found[name] == pytest.approx(100 * sum(scores) / 2)
    last = read_scores(of_folds(path), config, ["last_generalization"])["last_generalization"]
    assert found[FINAL] == pytest.approx(last)
    assert found[ADDED] == pytest.approx(last - found["without adapters"])
    street = of_folds(path)["street"]
    (street / "without.json").rename(street / "aside")
    assert read_without(of_folds(path)) == {}
    (street / "aside").rename(street / "without.json")


def test_share_of_the_last_score_after_half_of_the_rounds(small, folds):
    run = small("rounds=4")
    scores = [row["accuracy_domain"] for row in read_rows(run.path)]
    assert read_half({"": run.path}) == {HALF: pytest.approx(100 * scores[1] / scores[3])}
    assert read_half({"": small("rounds=4", "evaluation.every=4").path}) == {}
    path, _ = folds
    tables = [pq.read_table(folder / "clients.parquet").to_pylist() for folder in of_folds(path).values()]
    found = [
        sum(
            row["value"]
            for rows in tables
            for row in rows
            if (row["round"], row["exchange"], row["metric"]) == (number, "report_held_out", "accuracy")
        )
        for number in (1, 2)
    ]
    assert read_half(of_folds(path)) == {HALF: pytest.approx(100 * found[0] / found[1])}


def test_of_a_final_model_without_what_was_trained(small):
    run = small(*LOOKS)
    found = read_without({"": run.path})
    kinds = json.loads((run.path / "without.json").read_text())
    assert found["without head"] == 100 * kinds["head"]["domains"]
    assert found[FINAL] == 100 * run.metrics["accuracy_domain"]
    whole = run.metrics.get("global_accuracy_domain", run.metrics["accuracy_domain"])
    assert found[ADDED] == pytest.approx(100 * (whole - kinds["adapters"]["domains"]))


def test_directions_and_units():
    assert [better(name) for name in ("accuracy_domain", "sigma_type", "variance")] == [
        "higher",
        "lower",
        "lower",
    ]
    names = ("personal", "variance", "numbers_trained", "geometric mean gap_variance")
    assert [unit(name) for name in names] == ["percent", "percent squared", "numbers", "as in the column"]
    assert [better(name) for name in ("geometric mean gap_variance", "rounds gap_variance < x_variance")] == [
        "lower",
        "higher",
    ]


def test_every_measure_of_every_table_can_be_read_or_is_known_not_to_be():
    columns = {
        "accuracy",
        "accuracy_domain",
        "sigma_type",
        "sigma_client",
        "cluster_accuracy",
        "numbers_trained",
        "worst_domain_accuracy",
    }
    unread = set()
    for table in papers.tables(folder()).values():
        for measure in table.measures:
            score = table.scores.get(measure, "")
            name, _, place = score.rpartition(" ")
            known = score in {*columns, *SPREAD, *MEASURES, *WITHOUT} or (
                place.isdecimal() and name in {"domain", *MEASURES}
            )
            known = known or re.fullmatch(
                r"(geometric mean|rounds \w+ <) gap_(faa|ga|fedavg)_variance", score
            )
            assert known or not score, (table.name, measure)
            unread |= set() if score else {(table.name, measure)}
    assert unread == {("fft_gp/table15", "extra cost")}
