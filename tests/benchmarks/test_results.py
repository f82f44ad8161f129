"""benchmarks/results: every file says by which command, commit and processor it was measured, and when."""

import json
import os
import re

import pytest

from docs.generate import results
from docs.generate.hook import EVIDENCE
from tests.conftest import ROOT

FILES = sorted((ROOT / EVIDENCE).rglob("*.md"))
FACTS = {
    "Command": r"in each (row|part)|.*`.+`",
    "Commit": r".*\b[0-9a-f]{7}\b",
    "Processor": r".+",
    "Date": r".*\b\d{4}-\d\d-\d\d\b",
}


LINK = "](../benchmarks/results/"
PAGE = ROOT / "docs" / "results.md"


def missing(text):
    lines = text.splitlines()[1:20]
    return [
        key for key, form in FACTS.items() if not any(re.match(f"- {key}: {form}", line) for line in lines)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_names_its_command_commit_processor_and_date(file):
    text = file.read_text()
    assert text.startswith("# ")
    assert missing(text) == []


def test_a_fact_that_is_missing_is_found():
    text = "# T\n\n- Command: `x`\n- Commit: 0123abc\n- Processor: y\n- Date: 2026-11-22\n"
    assert missing(text) == []
    assert missing(text.replace("0123abc", "the last one")) == ["Commit"]
    assert missing(text.replace("- Date: 2026", "- Date: in")) == ["Date"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_that_are_linked_exist(file):
    for target in re.findall(r"\]\(([^)#:]+)", file.read_text()):
        assert (file.parent / target).exists(), target


def test_the_tables_of_the_page_of_results_are_those_of_the_files():
    """Run `python -m docs.generate.results` where this fails."""
    for page in (PAGE, ROOT / EVIDENCE / "which_method.md"):
        assert results.page(page.read_text()) == page.read_text()


def test_nothing_is_claimed_that_has_no_file():
    """Tables that no program writes have no results, but for that of families, whose rows have links."""
    text = PAGE.read_text()
    families = text.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(families) > 5
    assert [row for row in families if LINK not in row and not row.endswith("| not compared |")] == []
    by_hand = results.BLOCK.sub("", text)
    tables = re.findall(r"^(\|.*)\n\|---", by_hand, re.MULTILINE)
    assert [
        head for head in tables if {"evidence", "measured in", "here"} & {*head.strip("| ").split(" | ")}
    ] == []
    assert {kind for _, kind, _ in results.BLOCK.findall(text)} == {*results.HEADS, "all methods"}


def test_lines_of_files_become_rows_with_links(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "b_c.md").write_text(
        "# B\n\n- Date: x\n- Finding: is it [so](../a.md)? | yes, it\n  is | ../a.md\n"
        "- Speed: fast? | no\n\ntext\n"
    )
    (tmp_path / "a.md").write_text("- Finding: first? | 3\n")
    to = os.path.relpath(tmp_path, results.DOCS)
    assert results.statements("Finding", tmp_path).splitlines() == [
        "| question | answer | evidence |",
        "|---|---|---|",
        f"| first? | 3 | [a]({to}/a.md) |",
        f"| is it [so]({to}/a.md)? | yes, it is | [b c]({to}/claims/b_c.md), [a]({to}/a.md) |",
    ]
    (tmp_path / "a.md").write_text("- Finding: first? | 3 | none.md\n")
    with pytest.raises(FileNotFoundError):
        results.statements("Finding", tmp_path)
    with pytest.raises(KeyError):
        results.page("<!-- results Wishes -->\n<!-- /results -->\n", tmp_path)


def test_a_table_of_methods_has_means_costs_and_corrected_differences(tmp_path):
    """Differences of b are 10, 10 and 10.3 points; d is compared with c, and e is FedAvg."""
    means = {"fedavg": (0.5, 0.6, 0.5), "b": (0.6, 0.7, 0.603), "c": (0.5, 0.58, 0.5), "d": (0.5, 0.6, 0.5)}
    means["e"] = means["fedavg"]
    rows = [
        {"method": name, "seed": seed, "mean": mean, "worst client": mean / 2, "spread": 0.1}
        | {"bytes": 2_000_000, "steps": 40 + seed, "half": mean - 0.05}
        for name, each in means.items()
        for seed, mean in enumerate(each)
    ]
    facts = {"command": "x", "commit": "0123abc", "processor": "y", "date": "z", "seeds": [0, 1, 2]}
    facts |= {"clients": 5, "rounds": 10, "rows": rows, "bases": {"d": "c"}, "unfinished": ["f"]}
    facts["seconds"] = {"fedavg": 1.234, "b": 20.0, "c": 20.0, "d": 20.0}
    (tmp_path / results.METHODS).write_text(json.dumps({"s": facts}))
    resolved = results.methods("s", tmp_path).splitlines()[-3]
    assert resolved.startswith("3 seeds resolve differences of ")
    assert [re.sub(r" \[[^]]*\]", "", line) for line in results.methods("s", tmp_path).splitlines()] == [
        "| method | mean | worst client | spread | - fedavg | 2nd half | MB | seconds a round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| `b` | 63.4 ± 5.7 | 31.7 ± 2.8 | 10.0 ± 0.0 | **+10.1** | +5.0 | 2.0 | 20.00 |",
        "| `fedavg` | 53.3 ± 5.8 | 26.7 ± 2.9 | 10.0 ± 0.0 |  | +5.0 | 2.0 | 1.23 |",
        "| `d`, SGD | 53.3 ± 5.8 | 26.7 ± 2.9 | 10.0 ± 0.0 | +0.7 | +5.0 | 2.0 | 20.00 |",
        "| `e` | 53.3 ± 5.8 | 26.7 ± 2.9 | 10.0 ± 0.0 | same | +5.0 | 2.0 | - |",
        "| `c` | 52.7 ± 4.6 | 26.3 ± 2.3 | 10.0 ± 0.0 | -0.7 | +5.0 | 2.0 | 20.00 |",
        "",
        "Seeds 0, 1, 2, 5 clients, 10 rounds, 41 training batches of all clients. Compared with `fedavg` "
        "better: `b`. The same scores in every seed, not tested: `e`.",
        "",
        "Not run with all seeds: `f`.",
        "",
        resolved,
        "",
        "`x`, commit 0123abc, y, z.",
    ]


def test_the_table_of_all_settings_has_differences_and_relative_cost(tmp_path):
    def runs(**means):
        return [
            {"method": name, "seed": seed, "mean": mean + seed / 10, "worst client": mean, "spread": 0.1}
            | {"bytes": size, "steps": 40}
            for name, (mean, size) in means.items()
            for seed in (0, 1)
        ]

    settings = {"s": runs(fedavg=(0.5, 100), b=(0.4, 300)), "t": runs(c=(0.7, 50), fedavg=(0.6, 100))}
    settings["t"] += runs(b=(0.6, 100))
    seconds = {"s": {"fedavg": 2.0, "b": 1.0}, "t": {"fedavg": 1.0, "b": 2.5}}
    facts = {name: {"rows": rows, "seconds": seconds[name]} for name, rows in settings.items()}
    (tmp_path / results.METHODS).write_text(json.dumps(facts))
    none = "better than FedAvg: none; worse: none; as good, within 1 point: none"
    same = "; `b`: the same scores in every seed, not tested"
    assert results.summary(tmp_path).splitlines() == [
        "| method | s | t | bytes | seconds |",
        "|---|---:|---:|---:|---:|",
        "| `fedavg` | 55.0 ± 7.1 | 65.0 ± 7.1 | 1.0 | 1.0 |",
        "| `b` | -10.0 | same | 2.0 | 1.5 |",
        "| `c` |  | +10.0 | 0.5 | - |",
        "",
        f"- s: {none}; the others are open. With a single seed nothing is tested.",
        f"- t: {none}{same}; the others are open. With a single seed nothing is tested.",
        f"- s, worst client: {none}; the others are open. With a single seed nothing is tested.",
        f"- t, worst client: {none}{same}; the others are open. With a single seed nothing is tested.",
    ]


def test_the_worst_client_is_compared_as_the_mean_is(tmp_path):
    """Means are nearly equal, and worst clients differ by 10, 10 and 10.3 points."""
    worst = {"fedavg": (0.3, 0.4, 0.3), "b": (0.4, 0.5, 0.403)}
    mean = {"fedavg": (0.5, 0.6, 0.7), "b": (0.51, 0.59, 0.705)}
    rows = [
        {"method": name, "seed": seed, "mean": mean[name][seed], "worst client": value, "bytes": 1}
        for name, each in worst.items()
        for seed, value in enumerate(each)
    ]
    (tmp_path / results.METHODS).write_text(json.dumps({"s": {"rows": rows}}))
    lines = results.summary(tmp_path).splitlines()
    none = "worse: none; as good, within 1 point: none; the others are open."
    assert any(line.startswith(f"- s: better than FedAvg: none; {none}") for line in lines)
    assert any(line.startswith(f"- s, worst client: better than FedAvg: `b`; {none}") for line in lines)


def test_every_measurement_is_cited_by_a_page():
    """What nothing cites, nobody finds."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *FILES]
    text = "".join(page.read_text() for page in pages)
    assert [file.name for file in FILES if f"{file.name})" not in text and f"{file.name}#" not in text] == []
