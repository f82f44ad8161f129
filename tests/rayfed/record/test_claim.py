"""Whoever shares a folder with runs loses nothing: only what a run wrote is written over or removed."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.errors import ConfigError, StorageError
from rayfed.record.atomic_files import write_text, write_whole
from rayfed.record.claim import KEPT, claim, claim_again, look
from rayfed.record.ownership import MARKER, NAMES, make_folder, names_of, remove
from tests.rayfed.record.claims import OURS, TREES, fresh, pictured, plant, run_in, without_ours


@settings(max_examples=60, deadline=None)
@given(tree=TREES, overwrite=st.booleans())
def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path_factory, tree, overwrite):
    around = fresh(tmp_path_factory)
    plant(around / "output", tree)
    before = pictured(around.parent)
    if not (around / "output").is_dir() or not any((around / "output").iterdir()):
        return
    with pytest.raises(ConfigError, match=r"^output: "):
        run_in(around / "output", overwrite)
    assert pictured(around.parent) == before


@settings(max_examples=60, deadline=None)
@given(around_it=TREES, inside=TREES, part=TREES)
def test_overwriting_a_run_moves_what_it_wrote_and_nothing_else(tmp_path_factory, around_it, inside, part):
    around = fresh(tmp_path_factory)
    plant(around, {name: kind for name, kind in around_it.items() if not name.startswith("output")})
    output = around / "output"
    run_in(output)
    run_in(output / "compare" / "local", part_of=output)
    plant(output, inside)
    plant(output / "compare" / "local", part)
    before = pictured(around.parent)
    ours = {f"around/output/{name}" for name in OURS} | {
        f"around/output/compare/local/{name}" for name in OURS
    }
    with claim(output, look(output, True), overwrite=True) as own:
        pass
    after = pictured(around.parent)
    assert not ours & set(after)
    kept = {k: after.pop(k) for k in [*after] if k.startswith("around/output.before-1")}
    assert own.earlier == around / "output.before-1"
    for name in ours & set(before):
        moved = name.replace("around/output/", "around/output.before-1/", 1)
        assert before[name] == "folder" or isinstance(before[name], Path) or kept[moved] == before[name]
    foreign = {k: v for k, v in without_ours(before).items() if k not in ours and v != "folder"}
    assert {k: v for k, v in without_ours(after).items() if v != "folder"} == foreign
    assert set(after) <= set(before)


@settings(max_examples=50, deadline=None)
@given(tree=TREES, deep=st.integers(0, 2))
def test_a_refused_run_takes_back_what_it_made(tmp_path_factory, tree, deep):
    around = fresh(tmp_path_factory)
    plant(around, {name: kind for name, kind in tree.items() if not name.startswith("new")})
    before = pictured(around.parent)
    output = around.joinpath("new", *["deeper"] * deep)
    with claim(output, look(output)) as own:
        write_text(output / "config.yaml", "ours")
        make_folder(output / "model")
        own.discard()
    assert pictured(around.parent) == before


def test_each_earlier_run_is_kept_and_can_be_continued(tmp_path):
    run = tmp_path / "run"
    for number in range(3):
        run_in(run, overwrite=True)
        write = (run / "rounds.jsonl").write_text(f"{number}")
        assert write
    assert [(tmp_path / f"run.before-{n}" / "rounds.jsonl").read_text() for n in (1, 2)] == ["0", "1"]
    with claim_again(tmp_path / "run.before-1") as own:
        own.take_over()
        write_text(tmp_path / "run.before-1" / "config.yaml", "its own file")


def test_a_refused_run_puts_the_earlier_one_back(tmp_path):
    run = tmp_path / "run"
    run_in(run)
    run_in(run / "compare" / "local", part_of=run)
    (run / "notes").write_text("mine")
    before = {k: v for k, v in pictured(tmp_path).items() if Path(k).name not in KEPT}
    with claim(run, look(run, True), overwrite=True) as own:
        write_text(run / "config.yaml", "new")
        assert (tmp_path / "run.before-1" / "compare" / "local" / "config.yaml").exists()
        own.discard()
    assert {k: v for k, v in pictured(tmp_path).items() if Path(k).name not in KEPT} == before
    with claim_again(run) as own:
        own.take_over()
        write_text(run / "config.yaml", "its own file")


def test_a_run_without_a_finished_round_is_not_kept(tmp_path):
    with claim(tmp_path / "run", ""):
        write_text(tmp_path / "run" / "config.yaml", "nothing ran")
    run_in(tmp_path / "run")
    assert not (tmp_path / "run.before-1").exists()


@pytest.mark.parametrize("lost", [MARKER, NAMES])
def test_a_run_without_its_marker_or_its_list_is_left_alone(lost, tmp_path):
    run = tmp_path / "run"
    run_in(run)
    (run / lost).unlink()
    before = pictured(tmp_path)
    with pytest.raises(ConfigError), claim_again(run):
        pass
    with pytest.raises(ConfigError):
        run_in(run, overwrite=True)
    after = {k: v for k, v in pictured(tmp_path).items() if Path(k).name not in (".lock", ".writer")}
    assert after == {k: v for k, v in before.items() if Path(k).name not in (".lock", ".writer")}


def test_a_foreign_file_in_the_place_of_ours_is_not_written_over(tmp_path):
    run_in(tmp_path / "run")
    with claim(tmp_path / "run", look(tmp_path / "run", True), overwrite=True):
        (tmp_path / "run" / "report.md").write_text("mine")
        with pytest.raises(StorageError, match=r"report\.md: the file exists"):
            write_text(tmp_path / "run" / "report.md", "ours")
        remove(tmp_path / "run" / "report.md")
    assert (tmp_path / "run" / "report.md").read_text() == "mine"


def test_no_link_is_followed_for_writing_or_removing(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_in(run)
    elsewhere.mkdir()
    (run / "model" / "params.safetensors").rename(elsewhere / "params.safetensors")
    (run / "model").rmdir()
    (run / "model").symlink_to(elsewhere)
    with claim(run, look(run, True), overwrite=True), pytest.raises(StorageError, match="is a symbolic link"):
        write_text(run / "model" / "params.safetensors", "ours")
    assert (elsewhere / "params.safetensors").read_text() == "ours model/params.safetensors"
    assert (run / "model").is_symlink()


def test_a_link_in_place_of_a_folder_is_refused_before_the_run_is_continued(tmp_path):
    run_in(tmp_path / "run")
    with claim_again(tmp_path / "run"):
        pass
    (tmp_path / "run" / "figures").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "figures").symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(ConfigError, match="figures is a link, and a run does not follow links")
    with refused, claim_again(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    "line",
    [
        '+"../precious"',
        '+"/etc/precious"',
        '+"a/../../precious"',
        "+[1]",
        '+"x',
        "+" + "[" * 100_000,
        '+"\\u0000"',
    ],
)
def test_a_list_that_was_tampered_with_names_nothing_outside(line, tmp_path):
    run_in(tmp_path / "run")
    (tmp_path / "precious").write_text("mine")
    with (tmp_path / "run" / NAMES).open("a") as file:
        file.write(f"{line}\n")
    run_in(tmp_path / "run", overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"format": 2}', "[" * 100_000, "\0"])
def test_a_damaged_marker_is_no_permission(content, tmp_path):
    run_in(tmp_path / "run")
    (tmp_path / "run" / MARKER).write_text(content)
    before = pictured(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(MARKER)):
        run_in(tmp_path / "run", overwrite=True)
    assert pictured(tmp_path) == before


def test_a_line_of_the_list_that_was_cut_off_costs_only_itself(tmp_path):
    run_in(tmp_path / "run")
    with (tmp_path / "run" / NAMES).open("a") as file:
        file.write('+"figures/b.p')
    names_of(tmp_path / "run").add("figures/c.png")
    assert "figures/c.png" in names_of(tmp_path / "run").all()
    assert not [name for name in names_of(tmp_path / "run").all() if "b.p" in name]


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_folder_that_does_not_exist_cannot_be_continued(kind, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"), claim_again(tmp_path / "none", kind):
        pass
    assert not (tmp_path / "none").exists()


def test_what_a_killed_process_was_writing_goes_when_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    with claim(run, ""):

        def killed(path):
            path.write_text("half")
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", lambda *args, **options: None)
            write_whole(run / "rounds.jsonl", killed)
    assert list(run.glob(".rayfed-*.tmp"))
    with claim_again(run) as own:
        own.take_over()
    assert not list(run.glob(".rayfed-*.tmp"))
