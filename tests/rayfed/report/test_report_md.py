"""report.md: what was run and how, what its words mean, and which files the folder holds."""

import json
import re
import shlex

import pytest

from rayfed import resume, run
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.report_md import FILES, harness_command
from tests.conftest import SMALL
from tests.rayfed.malformed import last_wins

HOW = "## How it was run"


def test_the_command_of_the_harness_is_for_language_models_whose_paths_it_can_read(tmp_path):
    def of(name, base, task):
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        about = {"base_model_name_or_path": base, "task_type": task}
        (folder / "model" / "adapter_config.json").write_text(json.dumps(about))
        return folder, shlex.split(harness_command(RecordedRun(folder)))

    run, found = of("a run", "org/base", "CAUSAL_LM")
    assert found[:4] == ["lm_eval", "--model", "hf", "--model_args"]
    assert found[4:6] == [f"pretrained=org/base,peft={run}/model", "--tasks"]
    for name, base, task in (
        ("b", "org/base", "SEQ_CLS"),
        ("c", "a,b", "CAUSAL_LM"),
        ("lr=1", "a", "CAUSAL_LM"),
    ):
        assert of(name, base, task)[1] == []
    assert harness_command(RecordedRun(tmp_path)) == ""


@pytest.fixture
def reported(tmp_path, cache):
    def make(name):
        path = tmp_path / name
        place = ("cluster=inline", f"data.cache={cache}", f"output={path}")
        command = last_wins([*SMALL, "train.lr=0.015", *place])
        assert run.main([*command, "--quiet"]) == 0
        return path, (path / "report.md").read_text()

    return make


def test_it_says_the_settings_the_words_the_command_and_the_files(reported):
    path, text = reported("a run")
    assert "| `train.lr` | 0.015 |" in text
    assert "| `tuning.rank` | 2 |" in text
    assert "`data.partition.alpha`" not in text  # nothing is drawn from a Dirichlet distribution
    words = re.findall(r"^- `([^`]+)`: ", text.split(HOW)[0], re.MULTILINE)
    assert {"sigma_type", "sigma_client", "worst domain", "mean over clients"} <= set(words)
    assert "    python -m rayfed.run algorithm=fedavg " in text
    assert f"--config '{path}/config.yaml' output=NEW" in text
    assert re.search(r"^2 rounds in \d+ s", text, re.MULTILINE)
    listed = re.findall(r"^- `([^`]+)`: ", text.split(HOW)[1], re.MULTILINE)
    there = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    assert set(listed) == there - {"report.md"}
    assert set(listed) <= set(FILES)


def test_only_the_last_part_differs_between_repetitions(reported):
    assert reported("a")[1].split(HOW)[0] == reported("b")[1].split(HOW)[0]


def test_a_continued_run_has_both_commands(reported):
    path, _ = reported("run")
    assert resume.main([str(path), "rounds=+1", "--quiet"]) == 0
    commands = re.findall(r"^    (python.*)$", (path / "report.md").read_text(), re.MULTILINE)
    assert [command.split()[2] for command in commands] == ["rayfed.run", "rayfed.resume"]


def test_a_call_from_python_has_no_command(reported, small):
    reported("run")
    assert "    python" not in (small().path / "report.md").read_text()
