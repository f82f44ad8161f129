"""The README says what is there, and what it shows happens."""

import os
import re
import subprocess
import sys

import pytest

from docs.generate import hook
from docs.generate.hook import EVIDENCE
from rayfed.config.catalog import algorithms, catalog, tunings
from rayfed.config.schema import load_config
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
TRANSCRIPT = (
    (ROOT / EVIDENCE / "default_run.md").read_text().partition("```\n")[2].partition("```")[0].strip("\n")
)


def section(name):
    return README.split(f"<!-- {name} -->", 1)[1].split(f"<!-- /{name} -->", 1)[0].strip()


def test_every_method_is_in_a_family():
    """A variant has the name of its method before its own, such as `fft_gp_clip`."""
    named = set(
        re.findall(r"`(\w+)`", README.partition("## Families of methods")[2].partition("## Where")[0])
    )
    missing = [name for name, _ in algorithms() if not any(f"{name}_".startswith(f"{n}_") for n in named)]
    assert missing == []
    assert named <= {name for name, _ in algorithms()}


def test_the_catalogue_of_the_site_has_every_method_and_tuning():
    text = hook.catalog()
    for name, description in [*algorithms(), *tunings()]:
        assert f"| `{name}` | {description}" in text.replace("\\|", "|")


def test_every_file_it_names_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_target_of_make_is_named():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert set(re.search(r"^\.PHONY: (.*)", makefile, re.MULTILINE)[1].split()) <= named
    assert {"make run", "make test"} <= set(re.findall(r"^make \w+", README, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.steady
def test_its_first_program_runs_as_it_stands_there(tmp_path, monkeypatch, capsys):
    """In its own file, as the class and the network of a user are: neither can be imported."""
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    program = section("first program").removeprefix("```python\n").removesuffix("```")
    names = {"__name__": "first_program"}
    exec(compile(program, "first_program.py", "exec"), names)
    run = names["run"]
    assert float(capsys.readouterr().out.split()[-1]) == run.accuracy
    assert run.accuracy > run.history["accuracy"].iloc[0]
    assert run.path is None
    assert list(run.model().state_dict()) != []


def test_the_transcript_is_of_the_default_run():
    config = load_config([])
    assert (
        f"{config.algorithm} on {config.data.name}, {config.model.name}, {config.tuning['name']}"
        in TRANSCRIPT
    )
    assert f"/{config.rounds} " in TRANSCRIPT


def test_the_readme_shows_lines_of_the_transcript():
    shown = section("transcript").strip("`\n").splitlines()
    assert len(shown) == 6
    assert [line for line in shown if line not in TRANSCRIPT.splitlines()] == []


POINTS, LOSS = 3.0, 0.1
"""By how much scores of a run, in percentage points, and its losses may differ from those of the transcript,
because another kind of processor rounds the last bits differently."""

VARYING = (
    (r"(?<=runs/fedgcr-digits-five-mini-seed0)[-\d]*", ""),  # time and process
    (r"sha256 [0-9a-f]{16}", "sha256 HEX"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\d+(\.\d+)? s\b", "SECONDS"),
    (r"slowest c\d\d-\w+", "slowest CLIENT"),
    (r"(?<=worst domain )\w+|(?<=\()(plain|inverted|blended|street|fonts)(?=\))", "DOMAIN"),
    (r"\(round \d+\)", "(round NUMBER)"),  # the best one
    (r"(?m)^(\w+(?: +\d+){3} +\d+\.\d)(?: +\d+\.\d){2}$", r"\1 WITHOUT"),  # without adapters, without head
)


def parts(text):
    """The words of a transcript, and its numbers of scores and losses with the allowed difference."""
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    limits = [LOSS if key == "loss" else POINTS for key, _ in re.findall(SCORE, text)]
    numbers = [float(value) for _, value in re.findall(SCORE, text)]
    words = [" ".join(line.split()) for line in re.sub(SCORE, r"\1 NUMBER", text).splitlines()]
    return [line for line in words if not line.startswith("preparing ")], numbers, limits


SCORE = re.compile(
    r"(?m)(accuracy|worst|loss|clients|domains|sigma_\w+|DOMAIN|^\w+ +\d+ +\d+ +\d+|code|FedRA's|these \d"
    r"|without_\w+) +(\d+\.\d+)"
)


@pytest.mark.slow
@pytest.mark.ray
def test_the_transcript_is_what_a_run_prints(tmp_path):
    command = [sys.executable, "-m", "rayfed.run", "cluster.num_cpus=2", "cluster.num_gpus=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words, numbers, _ = parts(done.stdout)
    wanted, before, limits = parts(TRANSCRIPT)
    assert words == wanted
    assert len(numbers) == len(before) > 50
    for now, then, limit in zip(numbers, before, limits, strict=True):
        assert abs(now - then) <= limit


def test_a_transcript_with_other_words_or_numbers_would_be_noticed():
    shown = TRANSCRIPT
    words, numbers, _ = parts(shown)
    assert parts(re.sub(r"runs/(\S+):", r"runs/\1-20261122-033411-99:", shown))[0] == words
    assert parts(shown.replace("actors ready", "all ready"))[0] != words
    assert parts(shown.replace("up 1.8 MB", "up 1.9 MB"))[0] != words
    assert parts(shown.replace("  156   17", "  155   17"))[0] != words
    assert parts(re.sub(r"accuracy  35\.9", "accuracy  55.9", shown))[1] != numbers
    assert parts(re.sub(r"code \d\d\.\d", "code 67.0", shown))[1] != numbers
    best = parts(re.sub(r"these 4 \d\d\.\d \(round \d+\)", "these 4 60.0 (round 1)", shown))
    assert best[0] == words
    assert best[1] != numbers


def test_the_catalogue_lists_everything():
    text = catalog()
    assert all(name in text for name, _ in [*algorithms(), *tunings()])
    assert "digits_five_mini" in text
