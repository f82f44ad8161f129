"""benchmarks/rivals: the arithmetic of the table, what is read of processes, and checks of equal work."""

import ast
import importlib
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.rivals import environments, table
from benchmarks.rivals.__main__ import command_of, compare, main, parsed
from benchmarks.rivals.common_names import common_names, peft_names
from benchmarks.rivals.environments import SIDES
from benchmarks.rivals.equal_work import FAR, differences, digest, distance, final_loss
from benchmarks.rivals.measuring import Program, ProgramError, Round, memory, processor_seconds, tree
from benchmarks.rivals.programs.local_training import train
from benchmarks.rivals.workloads import (
    COHORTS,
    IMAGES,
    LABELS,
    ORDERS,
    START,
    WORK,
    Examples,
    Order,
    arrays,
    lenet,
    network,
    pad,
    small,
    write,
)
from tests.conftest import ROOT


def row(**seconds):
    """A row whose sides have these rounds after two first ones, and twice as many processor seconds."""
    sides = {}
    for side, each in seconds.items():
        rounds = [asdict(Round(s, 2 * s, 1, 1)) for s in (9.0, 8.0, *each)]
        sides[side] = {"rounds": rounds, "peak": 3 << 20, "lines": 7, "apart": 0.0}
    facts = {"steps": 1, "examples": 1, "load": "0.1 to 0.2", "command": "`x`", "commit": "0123abc"}
    return {**facts, "sides": sides}


FACTS = {"commit": "0123abc", "processor": "y", "date": "2026-11-28", "versions": "z"}


def test_shares_are_medians_over_rounds_that_follow_each_other():
    both = row(plain=[1.0, 2.0, 10.0], rayfed=[0.5, 1.8, 8.0])
    assert table.steady(both["sides"]["rayfed"]["rounds"], "seconds") == 1.8
    assert table.of_plain(both, "rayfed", "seconds") == 0.8  # not 1.8 / 2
    assert table.of_plain(both, "rayfed", "processor") == 0.8
    assert table.of_plain(both, "plain", "seconds") == 1
    assert table.of_plain(both, "pfl", "seconds") is None
    assert table.of_plain(row(plain=[], rayfed=[]), "rayfed", "seconds") is None


def test_a_row_says_whether_rayfed_is_first_and_by_how_much(monkeypatch):
    fast = row(plain=[1.0], rayfed=[0.6], pfl=[0.8])
    assert table.standing(fast, "seconds") == ("pfl", pytest.approx(0.75))
    assert table.sentence("vit", fast) == (
        "RayFed takes 0.75 of the wall-clock seconds of pfl and 0.75 of the processor seconds of pfl, "
        "the best of the others."
    )
    slow = row(plain=[1.0], rayfed=[1.1])
    assert table.sentence("vit", slow).endswith("Why it is not first is not known yet.")
    monkeypatch.setitem(table.REASONS, "vit", "It rests.")
    assert table.sentence("vit", slow).endswith("the best of the others. It rests.")
    assert table.sentence("vit", row(plain=[1.0])) == "RayFed or all others are missing."


def test_the_page_has_each_row_and_names_what_differs_or_failed(tmp_path):
    some = row(plain=[1.0], rayfed=[0.5], pfl=[2.0])
    some["sides"]["rayfed"] |= {"twice": True, "resumes": False}
    some["sides"]["pfl"]["problems"] = ["[3] steps in a round, not 4"]
    some["sides"]["flower"] = {"rounds": [], "failed": "no room"}
    results = {"facts": FACTS, "rows": {"vit": some, "text": row(plain=[1.0], rayfed=[0.7], pfl=[1.0])}}
    text = table.page(results)
    assert "| rayfed | 9.0 | 0.50 | 0.50 | 1.00 | 0.50 | 3 | 7 | yes | **no** | 0e+00 |" in text
    assert "| plain | 9.0 | 1.00 | 1.00 | 2.00 | 1.00 | 3 | 7 | not tried | not tried | 0e+00 |" in text
    assert "| flower | failed: no room |" in text
    assert "**The work of pfl differs**: [3] steps in a round, not 4." in text
    assert "- Command: `x`" in text
    results["rows"]["vit"]["command"] = "`y`"
    assert "- Command: in each part" in table.page(results)
    assert "`y`, commit 0123abc; load of the machine: 0.1 to 0.2." in table.page(results)
    assert table.summary(results) == (
        "processor seconds of RayFed: 0.50 to 0.70 of plain PyTorch, 0.25 to 0.70 of pfl"
    )
    assert all(line.count("|") == 12 for line in text.splitlines() if line.startswith("|"))
    table.draw(results, tmp_path / "figure.svg")
    first = (tmp_path / "figure.svg").read_bytes()
    table.draw(results, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_bytes() == first


def test_a_command_has_the_options_that_change_what_is_measured():
    assert command_of(parsed([])) == "`python -m benchmarks.rivals`"
    some = parsed(["--rows", "vit", "--steady", "2", "--checks", "--folder", "x", "--record"])
    assert command_of(some) == "`python -m benchmarks.rivals --rows vit --steady 2 --checks`"


def test_lines_of_code_are_counted():
    text = '"""What it is.\n\nMore.\n"""\n\nimport os\n\n\ndef f(\n    a,\n):\n    "It."\n    # why\n'
    text += "    x = 'a'  # of\n    gate = 1  # measurement\n    return '''b\nc'''\n"
    assert table.code_lines(text) == 7
    for side in SIDES.values():
        assert 20 < table.lines_of(side) < 200
    alone = table.code_lines((table.PROGRAMS / "plain.py").read_text())
    assert table.lines_of(SIDES["plain"]) > alone  # with the loop that plain PyTorch shares with others


@pytest.mark.parametrize("side", SIDES.values(), ids=lambda side: side.name)
def test_a_program_compiles_and_what_it_imports_of_this_repository_exists(side):
    path = table.PROGRAMS / f"{side.program}.py"
    made = ast.parse(path.read_text())
    compile(made, path, "exec")
    own = [n for n in ast.walk(made) if isinstance(n, ast.ImportFrom) and "rivals" in (n.module or "")]
    assert own
    for node in own:
        if node.module == "benchmarks.rivals.programs":
            continue  # itself
        there = importlib.import_module(node.module)
        assert [a.name for a in node.names if not hasattr(there, a.name)] == []
    if not side.package:
        importlib.import_module(f"benchmarks.rivals.programs.{side.program}").main  # noqa: B018
    line = environments.command(side, Path("python"), Path("in"), 4, Path("kept"))
    assert line[-6:] == ["-m", f"benchmarks.rivals.programs.{side.program}", "in", "4", "--state", "kept"]


WAITS = """
import subprocess, sys
from benchmarks.rivals.gate import Gate
gate = Gate()
work = "sum(i * i for i in range(3_000_000))"
for round in range(int(sys.argv[1])):
    subprocess.run([sys.executable, "-c", work], check=True)
    if not gate.done(round, 10 * round, lambda: {"a": [round]}):
        break
print("end of it")
"""


def program(tmp_path, text, *args):
    (tmp_path / "it.py").write_text(text)
    line = [sys.executable, str(tmp_path / "it.py"), *args]
    return Program(line, environments.variables(), tmp_path / "log")


def test_a_program_waits_between_rounds_and_its_ended_processes_count(tmp_path):
    made = program(tmp_path, WAITS, "2")
    first, second = made.round(weighs=True), made.round()
    assert made.values() == {"a": [1]}
    made.close()
    assert (first.steps, first.rows, second.steps, second.rows) == (0, 0, 1, 10)
    assert second.processor > 0.02  # of the child, which has ended
    assert second.seconds > 0.02
    assert memory(os.getpid()) > 50 << 20  # this process has torch
    assert tree(made._process.pid) == []


def test_a_program_that_ends_is_named_by_its_last_line(tmp_path):
    made = program(tmp_path, "print('x')\nraise SystemExit('no data')")
    with pytest.raises(ProgramError, match="no data"):
        made.round()
    made.close()
    made = program(tmp_path, WAITS, "1")
    made.round()
    with pytest.raises(ProgramError, match="end of it"):
        made.round()
    made.close()


def test_processor_seconds_are_of_the_process_and_those_it_waited_for():
    one = SimpleNamespace(user=1.0, system=0.5, children_user=2.0, children_system=0.25)
    assert processor_seconds([one, one]) == 7.5
    assert processor_seconds([]) == 0


@pytest.fixture
def inputs(tmp_path):
    """Inputs of a small LeNet, without RayFed: two rounds."""
    work = replace(small(WORK["lenet"]), rounds=2)
    rng = np.random.default_rng(0)
    write(tmp_path, work)
    labels = rng.integers(0, 10, (work.clients, work.examples))
    pictures = rng.integers(0, 256, (10, 32, 32, 3))
    np.save(tmp_path / LABELS, labels)
    np.save(tmp_path / IMAGES, pictures[labels].astype(np.uint8))
    np.save(tmp_path / COHORTS, np.tile(np.arange(work.clients), (2, 1)))
    shape = (2, work.cohort, work.epochs, work.examples)
    np.save(tmp_path / ORDERS, rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=3))
    torch.manual_seed(0)
    np.savez(tmp_path / START, **arrays(lenet()))
    return tmp_path, work


def trained_by(folder, work, skipped=()):
    """Rounds and final values of FedAvg by hand."""
    net, examples, order = network(folder), Examples(folder), Order(folder)
    values, rounds = arrays(net), []
    for i in range(work.rounds):
        found, counts = [], np.zeros(2, int)
        for client in order.cohort(i):
            if client not in skipped:
                counts += train(net, values, work, examples, order, i, client)
                found.append(arrays(net))
        values = {name: np.mean([each[name] for each in found], axis=0) for name in values}
        rounds.append(Round(1.0, 1.0, *map(int, counts)))
    return rounds, values


def problems(folder, work, rounds, values, expected):
    start = dict(np.load(folder / START))
    losses = [final_loss(folder, each) for each in (values, expected)]
    return differences(work, rounds, distance(values, expected, start), *losses)


def test_work_that_differs_is_found(inputs):
    folder, work = inputs
    rounds, values = trained_by(folder, work)
    assert problems(folder, work, rounds, values, values) == []
    nearly = {name: value * np.float32(1 + 1e-6) for name, value in values.items()}
    assert problems(folder, work, rounds, nearly, values) == []
    assert digest(nearly) != digest(values) == digest(dict(reversed(values.items())))

    fewer, other = trained_by(folder, work, skipped=(1,))
    found = problems(folder, work, fewer, other, values)
    assert [text.split()[1] for text in found[:2]] == ["steps", "examples"]
    assert any("of the way of training away" in text for text in found)

    faster, other = trained_by(folder, replace(work, lr=2 * work.lr))
    assert any(
        "of the way of training away" in text for text in problems(folder, work, faster, other, values)
    )
    assert differences(work, rounds, 0.0, 2.0, 1.0) == ["final loss 2.0000, not 1.0000"]
    assert len(differences(work, rounds, float("nan"), float("nan"), 1.0)) == 2
    with pytest.raises(ValueError, match="a"):
        distance({"a": np.zeros(2)}, {}, {})


def test_another_order_of_the_examples_is_found(inputs):
    folder, work = inputs
    _, values = trained_by(folder, work)
    orders = np.load(folder / ORDERS)
    np.save(folder / ORDERS, orders[:, :, :, ::-1])
    rounds, other = trained_by(folder, work)
    assert distance(other, values, dict(np.load(folder / START))) > FAR
    found = {side: {"rounds": [asdict(each) for each in rounds]} for side in ("plain", "pfl")}
    compare(folder, work, found, {"plain": values, "pfl": other})
    assert found["plain"]["problems"] == []
    assert found["plain"]["apart"] == 0
    assert len(found["pfl"]["problems"]) >= 1


def test_names_of_rayfed_become_those_of_the_others_and_back():
    names = ["blocks.0.attn.proj.lora_A", "blocks.0.attn.proj.lora_B", "head.weight", "head.bias"]
    start = {name: np.full(1, i) for i, name in enumerate(names)}
    for work, head in ((WORK["vit"], "head"), (WORK["text"], "classifier")):
        theirs = peft_names(work, start)
        assert list(theirs)[-2:] == [f"{head}.weight", f"{head}.bias"]
        assert next(iter(theirs)).endswith("0.attn.proj.lora_A.default.weight")
        back = common_names(SimpleNamespace(params=start), theirs)
        assert {k: int(v[0]) for k, v in back.items()} == {k: i for i, k in enumerate(theirs)}


def test_batches_are_the_handed_orders_and_texts_are_padded(inputs):
    folder, work = inputs
    order = Order(folder)
    batches = order.batches(1, 2)
    assert [len(rows) for rows in batches] == [50, 10, 50, 10]
    assert np.concatenate(batches[:2]).tolist() == np.load(folder / ORDERS)[1, 2, 0].tolist()
    assert work.steps == work.cohort * len(batches)
    assert work.rows == work.cohort * 120
    padded = pad([[5, 6, 7], [8]])
    assert padded["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_the_readme_quotes_the_page():
    readme = (ROOT / "README.md").read_text()
    line = readme[: readme.index("(benchmarks/results/rivals.md)")].rpartition("LoRA on ViT-Ti/16 takes")[2]
    by_name = dict(re.findall(r"(plain|pfl|BlazeFL|Flower)? ?(?:takes )?(\d\.\d\d)", line))
    by_name["rayfed"] = by_name.pop("")
    rows = (ROOT / "benchmarks" / "results" / "rivals.md").read_text().partition("## LoRA on ViT-Ti/16")[2]
    cells = [row.strip("| ").split(" | ") for row in rows.partition("## ")[0].splitlines() if "|" in row]
    assert {row[0]: row[5] for row in cells[2:] if row[0] != "plain"} == {
        name.lower(): share for name, share in by_name.items()
    }


@pytest.mark.slow
@pytest.mark.ray
def test_rayfed_and_plain_pytorch_do_the_same_work(tmp_path, capsys):
    sides = ["--rivals", "plain", "rayfed", "--rows", "lenet", "--checks", "lenet"]
    main([*sides, "--small", "--steady", "1", "--folder", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "differs" not in shown
    assert "failed" not in shown
    lines = [line for line in shown.splitlines() if line.startswith(("| plain", "| rayfed"))]
    assert [line.split("|")[9:11] for line in lines] == [[" yes ", " yes "]] * 2
    assert (tmp_path / "results.json").exists()
