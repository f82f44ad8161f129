"""Every command that README and docs show is accepted; what needs no download is prepared or run."""

import re
import shlex

import pytest

from rayfed.config.schema import compatible_parts, load_config
from rayfed.experiment.plan import prepared
from tests.conftest import ROOT

PAGES = ["README.md", "SECURITY.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:python -m (rayfed(?:\.\w+)*|tune\.run)|(?:^|/)rayfed (\w+))\b(.*)")
LEFT_OUT = ("--follow", "--json")
READERS_FILES = ("faults.devices=", "faults.sessions=")
"""Overrides that name files which only the reader has."""


def commands():
    """Page, module and arguments of every command in a block of code."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text())
        blocks = re.findall(r"^```bash\n(.*?)^```|((?:^    \S.*\n)+)", text, re.MULTILINE | re.DOTALL)
        for line in "\n".join(fenced or indented for fenced, indented in blocks).splitlines():
            if found := COMMAND.search(line):
                module, verb, rest = found.groups()
                words = shlex.split(re.split(r"\s2?>|\s+#", rest.replace("[RUN]", ""))[0])
                yield page, module or f"rayfed.{verb}", words


ALL = list({(module, *words): (page, module, words) for page, module, words in commands()}.values())
"""What several pages show is tested once."""
ORDERED = "docs/tutorial.md"
"""A page whose commands need those before them; tests/test_tutorial.py runs them."""
SINGLE = [command for command in ALL if command[0] != ORDERED]
RUNS = ("rayfed.run", "rayfed.doctor")
EXPERIMENTS = [(page, words) for page, module, words in SINGLE if module in RUNS]
OTHERS = [(page, module, words) for page, module, words in SINGLE if module not in RUNS]


def named(cases):
    return [f"{page}: {' '.join(words)}" for page, *_, words in cases]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from rayfed.config.schema import to_yaml

    file = tmp_path_factory.mktemp("saved") / "config.yaml"
    file.write_text(to_yaml(load_config([])))
    return file


def test_there_are_commands_of_every_kind():
    modules = {module for _, module, _ in ALL}
    wanted = {"run", "resume", "view", "report", "prepare", "doctor", "list", "reproduce", "replay"}
    wanted |= {f"report.{name}" for name in ("landscape", "feature_map", "slopes", "measures")}
    assert modules == {f"rayfed.{name}" for name in wanted} | {"tune.run"}
    assert len(EXPERIMENTS) > 30


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(("page", "words"), EXPERIMENTS, ids=named(EXPERIMENTS))
def test_an_experiment_that_is_shown_can_be_run(page, words, saved, cache):
    overrides = [word for word in words if "=" in word and not word.startswith(READERS_FILES)]
    config = load_config(overrides, saved if "--config" in words else None)
    compatible_parts(config)
    needs_nothing = not config.data.root and not config.trackers and not config.cluster.address
    if needs_nothing and config.protocol == "single" and not config.model.name.startswith("vit_base"):
        prepared(load_config([*overrides, f"data.cache={cache}", "model.pretrained=false"]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    import rayfed
    from tests.conftest import SMALL

    output = tmp_path_factory.mktemp("shown") / "run"
    place = [f"output={output}", f"data.cache={cache}", "cluster=inline", "data.held_out=street"]
    return rayfed.simulate([*SMALL, "rounds=1", *place]).path


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(("page", "module", "words"), OTHERS, ids=named(OTHERS))
def test_what_else_is_shown_does_what_it_says(page, module, words, finished, capsys, tmp_path, monkeypatch):
    if module == "tune.run":
        from tune.sweep import load_sweep

        if not words[0].startswith("resume="):
            assert load_sweep(words)
        return
    if module == "rayfed.reproduce":
        from rayfed.reproduce.__main__ import parser, table_of

        assert table_of(parser().parse_args(words)).configs
        return
    if module == "rayfed.prepare":
        from rayfed.prepare.__main__ import _parser

        assert _parser().parse_args(words)
        return
    homes = {"rayfed.list": "rayfed.config.catalog", "rayfed.report": "rayfed.report.__main__"}
    importable = homes.get(module, module)
    command = __import__(importable, fromlist=["main"]).main
    monkeypatch.chdir(tmp_path)
    here = [
        re.sub(r"^(runs/(NAME|mine)|RUN)$", str(finished), word) for word in words if word not in LEFT_OUT
    ]
    few = {
        "rayfed.report.landscape": ["--points", "2", "--images", "2"],
        "rayfed.report.feature_map": ["--images", "60"],
        "rayfed.report.slopes": ["--points", "3"],
    }
    assert command([*(re.sub(r"\+20", "+1", word) for word in here), *few.get(module, [])]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "tuning",
    [
        *("lora", "head", "full", "bitfit", "adapter", "ssf", "ia3"),
        *("visual_prompt", "attention_adapter", "exits"),
    ],
)
def test_a_tuning_alone_is_enough(tuning, caplog):
    config = load_config([f"tuning={tuning}"])
    compatible_parts(config)
    assert (config.algorithm, config.tuning["name"]) == ("fedavg", tuning)
    assert "algorithm=fedavg is used" in caplog.text


def test_the_default_algorithm_stays_where_it_fits(caplog):
    assert load_config(["tuning=gc_prompt"]).algorithm == load_config([]).algorithm == "fedgcr"
    assert not caplog.text


def test_a_method_that_is_named_keeps_its_needs(capsys):
    from rayfed.run import main

    assert main(["algorithm=fedgcr", "tuning=lora"]) == 2
    assert capsys.readouterr().err == (
        "error: tuning: 'lora' cannot be used with algorithm=fedgcr, which needs tuning=gc_prompt; "
        "keep that, or choose another algorithm, for example algorithm=fedavg tuning=lora\n"
    )
