"""The documentation site: its menu is complete, its generated pages say what the code says, and it builds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rayfed
from docs.generate import api, bibliography, commands, hook, keys, measured, methods, papers, tunings
from rayfed.__main__ import VERBS
from rayfed.config import check_keys
from rayfed.config.catalog import choices_of
from rayfed.config.compose import folder
from rayfed.config.papers import tables
from rayfed.config.schema import Request
from tests.conftest import ROOT

MENU = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
WRITTEN = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def paths(entries):
    for entry in entries:
        content = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from paths(content) if isinstance(content, list) else [content]


def test_the_menu_names_pages_that_exist_and_takes_in_new_ones():
    made = {"catalog.md", api.PAGE, bibliography.PAGE, keys.PAGE, tunings.PAGE, commands.PAGE}
    pages = {*WRITTEN, *hook.MOVED.values(), *made}
    named = {path for path in paths(MENU) if not path.endswith("*")}
    assert named <= pages
    full = list(paths(hook.menu(MENU, sorted({*pages, "new.md", "methods/fedavg.md", "methods/index.md"}))))
    assert "new.md" in full
    assert full.index("methods/index.md") > 0
    assert sorted(full) == sorted({*pages, "new.md", "methods/fedavg.md", "methods/index.md"})
    assert not any("More" in entry for entry in hook.menu(MENU, sorted(named)))


def test_two_clicks_lead_to_a_papers_table_a_method_of_ones_own_and_four_gpus():
    """The first click is a link of the tutorial's last table; what it leads to shows the command."""
    start = (ROOT / "docs" / "tutorial.md").read_text()
    assert "](many_runs.md#a-papers-table)" in start
    assert (
        "](../configs/papers)"
        in (ROOT / "docs" / "many_runs.md").read_text().partition("## A paper's table")[2]
    )
    assert "](fedra.md)" in papers.pages()["papers/index.md"]
    assert "](../CONTRIBUTING.md#write-your-own-method-tuning-scheme-reader-or-executor)" in start
    assert (
        "\n## Write your own method, tuning scheme, reader or executor\n"
        in (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert "](cluster.md#one-machine-with-gpus)" in start
    cluster = (ROOT / "docs" / "cluster.md").read_text().partition("\n### One machine with GPUs\n")[2]
    assert re.search(r"cluster\.gpus_per_actor=1 +# four GPUs", cluster.partition("\n## ")[0])


def test_the_page_of_keys_has_every_key_its_type_default_and_meaning():
    text = keys.page()
    rows = dict(re.findall(r"^\| `([\w.]+)` (\|.*\|)$", text, re.MULTILINE))
    assert set(check_keys.keys_of(Request)) <= {*rows}
    assert rows["rounds"] == "| whole number ≥ 1 | `10` | Number of rounds. |"
    assert rows["cluster.actors"].startswith(
        "| `auto`, `per_client` or whole number ≥ 1 | `auto` | Number of "
    )
    assert rows["train.betas"].startswith("| list of number ≥ 0 < 1 | `[0.9, 0.999]` |")
    assert "[realism](realism.md)" in rows["channel"]
    jitter = [f"data.augment.jitter.{name}" for name in ("brightness", "contrast", "saturation")]
    assert [name for name, row in rows.items() if row.endswith("|  |") and name not in jitter] == []


def test_the_page_of_tunings_has_every_scheme_with_its_keys():
    text = tunings.page()
    for choice in choices_of("tuning"):
        assert f"\n## {choice.name}\n" in text
    assert "| `tuning.rank` | `8` |" in text
    assert "houlsby2019adapter" in text
    assert "It trains with `train.optimizer=adamw`, `train.lr=0.003`. The rate of the released code" in text
    assert text.count("It trains with the default") == 2  # head and full


def test_the_page_of_the_api_has_every_public_name_once():
    named = re.findall(r"^::: ([\w.]+)$", api.page(), re.MULTILINE)
    assert len(named) == len(set(named))
    modules = [name for name in named if name.rpartition(".")[2][0].islower()]
    for name in rayfed.__all__:
        if home := rayfed._HOME.get(name):
            assert f"{home}.{name}" in named or home in modules


def test_the_page_of_commands_shows_the_help_of_each():
    text = commands.page()
    assert {*re.findall(r"^## (\w+)$", text, re.MULTILINE)} == {*VERBS}
    assert "rayfed run algorithm=fedprox local.mu=0.1 rounds=5" in text.partition("## run")[2]
    assert "usage: rayfed report RUN..." in text


@pytest.mark.parametrize("name", ["fedgcr", "fedprox", "fedsa_lora"])
def test_the_page_of_a_method_has_its_keys_values_papers_and_references(name):
    (choice,) = [each for each in choices_of("algorithm") if each.name == name]
    text = methods.page(choice)
    assert f"python -m rayfed.run algorithm={name}" in text
    assert "::: algorithms." in text
    if name == "fedprox":
        assert "| `local.mu` | `0.01` | Weight of the proximal term; 0 gives FedAvg. |" in text
        assert "Eq. 2" in text
        assert "Heterogeneous Networks" in text.partition("## References")[2]
    elif name == "fedsa_lora":
        assert "(../results.md#methods-for-lora-adapters-compared)" in text
        assert "each client has its own B |" in text
        assert "| sent by all clients | 376,440 | 0.72 |" in text
    else:
        assert "`tuning=gc_prompt`" in text
        assert "(../papers/fedgcr.md#table1)" in text
        assert "From [FedGCR: ablation and fairness methods](../results/fedgcr_ablation.md)" in text
        assert "| FedGCR (both) |" in text
    keys = re.findall(r"^\| `(?:server|local)\.\w+` \| `[^`]*` \| (.*) \|$", text, re.MULTILINE)
    assert len(keys) > 2
    assert all(keys), "a hyperparameter has no line in its docstring"


def test_attributes_of_a_class_win_over_those_of_its_base():
    class Base:
        """One.

        Attributes:
            a: Of the base.
            b: In two
                lines.
        """

    class Own(Base):
        """Two.

        Attributes:
            a: Of its own.
        """

    assert methods.attributes(Own) == {"a": "Of its own.", "b": "In two lines."}


def test_the_page_of_a_paper_has_its_numbers_and_commands():
    pages = papers.pages()
    table = tables(folder())["fedra/table1"]
    text = pages["papers/fedra.md"]
    assert f"## Table 1: {table.title} {{#table1}}" in text
    assert "python -m rayfed.reproduce fedra/table1 --scale mini\n" in text
    assert "python -m rayfed.run experiment=fedra/table1/mini row=" in text
    assert "| FedRA | 91.92 | 88.19 | 90.19 | 84.3 | 87.17 | 77.12 | 86.48 |" in text
    assert "68.19 ± 0.26" in pages["papers/fedgcr.md"]
    with_numbers = {name.partition("/")[0] for name, table in tables(folder()).items() if table.small}
    assert {f"papers/{name}.md" for name in with_numbers} == {*pages} - {"papers/index.md"}


def test_citations_outside_of_code_are_links():
    text = "a [su2024fedra], `[su2024fedra]` [other2024x]\n```\n[su2024fedra]\n```\n"
    link = "[\\[su2024fedra\\]](../references.md#su2024fedra)"
    assert bibliography.linked(text, 1) == text.replace("a [su2024fedra]", f"a {link}")
    assert "Agüera" in bibliography.page()
    assert not re.search(r"[{}\\]", bibliography.citation("zhang2024fftgp"))


def test_pages_that_code_and_configs_name_exist():
    generated = {f"docs/{page}" for page in (api.PAGE, commands.PAGE, keys.PAGE, tunings.PAGE)}
    files = [
        file
        for folder in ("rayfed", "algorithms", "tune", "benchmarks", "configs", "notebooks")
        for kind in ("py", "pyi", "yaml", "ipynb")
        for file in (ROOT / folder).rglob(f"*.{kind}")
    ]
    named = {
        (page, file.name) for file in files for page in re.findall(r"docs/[a-z_]+\.md", file.read_text())
    }
    assert len(named) > 10
    assert [pair for pair in named if pair[0] not in generated and not (ROOT / pair[0]).exists()] == []


def test_links_to_files_outside_the_folder_lead_to_pages():
    assert hook.inside("[a](docs/data.md#x) [b](CONTRIBUTING.md#y)") == "[a](data.md#x) [b](extending.md#y)"
    assert hook.inside("[a](benchmarks/results/speed.md)") == "[a](results/speed.md)"
    assert hook.inside("[a](notebooks/x.py) [b](LICENSE)") == "a (`notebooks/x.py`) b (`LICENSE`)"


def test_measurements_are_pages_of_the_site():
    found = hook.measurements()
    files = (ROOT / hook.EVIDENCE).rglob("*.md")
    assert {f"results/{file.relative_to(ROOT / hook.EVIDENCE)}" for file in files} == {*found}
    assert not [path for path, text in found.items() if re.search(r"\]\([./]*docs/", text)]
    assert "](../../many_runs.md#verdicts)" in found["results/claims/text_lora.md"]


def test_the_cost_of_a_method_is_that_of_the_table(tmp_path, monkeypatch):
    rows = ["algorithm,model,tuning,base,bytes_up,bytes_down", "b,m,t,b,100,200", "x,m,t,b,250,200"]
    (tmp_path / "method_cost.csv").write_text("\n".join(rows))
    monkeypatch.setattr(measured, "DOCS", tmp_path)
    assert "| sent by all clients | 250 | 2.50 |" in measured.cost("x")
    assert "| received by all clients | 200 | 1.00 |" in measured.cost("x")
    assert measured.cost("y") == ""


def test_a_row_of_a_table_is_found_with_its_heading(tmp_path, monkeypatch):
    rows = ["| m | v |", "|---|---|", "| `x` | 1 |", "| y | 2 |", "| x (all) | 3 |"]
    files = {tmp_path / "a.md": "results.md", tmp_path / "b.md": "results/b.md"}
    (tmp_path / "a.md").write_text("\n".join(["## A b", "", *rows]))
    (tmp_path / "b.md").write_text("\n".join(["# T", "", *rows[:3]]))
    monkeypatch.setattr(measured, "pages", files.items)
    first = "From [A b](../results.md#a-b):\n\n| m | v |\n|---|---|\n| `x` | 1 |\n| x (all) | 3 |"
    assert (
        measured.rows({"x"}) == f"{first}\n\nFrom [T](../results/b.md):\n\n| m | v |\n|---|---|\n| `x` | 1 |"
    )
    assert measured.rows({"z"}) == ""


@pytest.mark.slow
@pytest.mark.steady
def test_the_site_builds_without_a_warning_and_without_a_request_to_other_hosts(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for choice in choices_of("algorithm"):
        assert (tmp_path / "site" / "methods" / f"{choice.name}.html").is_file()
    loaded = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(?:https?:)?//")
    for page in Path(tmp_path / "site").rglob("*.html"):
        assert not loaded.search(page.read_text()), page


def test_links_of_pages_work_in_a_clone():
    """What is generated for the site has a source in the clone to which the page links."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in hook.MOVED)]
    links = [(page, target) for page in pages for target in LINK.findall(page.read_text())]
    inside = [(page, target) for page, target in links if "://" not in target and "mailto:" not in target]
    assert len(inside) > 100
    assert not [f"{page.name}: {target}" for page, target in inside if not (page.parent / target).exists()]


LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
