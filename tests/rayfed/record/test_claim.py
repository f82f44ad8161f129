"""Nothing outside the folder of a run is touched, and a folder that is replaced is renamed as it is."""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.errors import ConfigError
from rayfed.record.atomic_files import write_text, write_whole
from rayfed.record.claim import claim, claim_again, look
from rayfed.record.locks import MARKER
from tests.rayfed.record.claims import TREES, fresh, pictured, plant, run_in, without_kept


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
def test_overwriting_a_run_renames_its_folder_and_touches_nothing_else(
    tmp_path_factory, around_it, inside, part
):
    around = fresh(tmp_path_factory)
    plant(around, {name: kind for name, kind in around_it.items() if not name.startswith("output")})
    output = around / "output"
    run_in(output)
    run_in(output / "cells" / "local")
    plant(output, inside)
    plant(output / "cells" / "local", part)
    mine = pictured(output)
    others = {k: v for k, v in pictured(around.parent).items() if not k.startswith("around/output")}
    with claim(output, look(output, True), overwrite=True) as own:
        pass
    assert own.earlier == around / "output.before-1"
    assert pictured(own.earlier) == mine
    assert without_kept(pictured(output)) == {}
    after = pictured(around.parent)
    assert {k: v for k, v in after.items() if not k.startswith("around/output")} == others


@settings(max_examples=50, deadline=None)
@given(tree=TREES, deep=st.integers(0, 2))
def test_a_refused_run_takes_back_what_it_made(tmp_path_factory, tree, deep):
    around = fresh(tmp_path_factory)
    plant(around, {name: kind for name, kind in tree.items() if not name.startswith("new")})
    before = pictured(around.parent)
    output = around.joinpath("new", *["deeper"] * deep)
    with claim(output, look(output)) as own:
        write_text(output / "config.yaml", "ours")
        write_text(output / "tensorboard" / "events.out.tfevents.1", "ours")
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
    run_in(run / "cells" / "local")
    (run / "notes").write_text("mine")
    before = pictured(tmp_path)
    with claim(run, look(run, True), overwrite=True) as own:
        write_text(run / "config.yaml", "new")
        assert (tmp_path / "run.before-1" / "cells" / "local" / "config.yaml").exists()
        own.discard()
    assert pictured(tmp_path) == before
    with claim_again(run) as own:
        own.take_over()
        write_text(run / "config.yaml", "its own file")


def test_a_run_without_a_finished_round_is_kept_only_with_something_else(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "run.before-1"
    with claim(run, ""):
        write_text(run / "config.yaml", "nothing ran")
        write_text(run / "tensorboard" / "events.out.tfevents.1", "nothing ran")
    run_in(run)
    assert not kept.exists()
    (run / "rounds.jsonl").unlink()
    for name in ("history", "model", "figures"):
        shutil.rmtree(run / name)
    (run / "notes").write_text("mine")
    run_in(run)
    assert (kept / "notes").read_text() == "mine"


def test_a_folder_without_a_marker_is_left_alone(tmp_path):
    run = tmp_path / "run"
    run_in(run)
    (run / MARKER).unlink()
    before = without_kept(pictured(tmp_path))
    with pytest.raises(ConfigError), claim_again(run):
        pass
    with pytest.raises(ConfigError):
        run_in(run, overwrite=True)
    assert without_kept(pictured(tmp_path)) == before


def test_an_earlier_run_that_cannot_be_renamed_stays(tmp_path, monkeypatch):
    run_in(tmp_path / "run")
    before = pictured(tmp_path)

    def refuse(*args):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError, match=r"cannot be renamed to 'run.before-1': Device or resource busy"):
        run_in(tmp_path / "run", overwrite=True)
    assert pictured(tmp_path) == before


def test_where_a_link_is_in_place_of_the_folder_the_link_stays(tmp_path):
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "mine")
    run_in(tmp_path / "run")
    run_in(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run").is_symlink()
    for name in ("mine", "mine.before-1"):
        assert (tmp_path / "disk" / name / "config.yaml").read_text() == "ours config.yaml"


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"format": 2}', "[" * 100_000, "\0"])
def test_a_damaged_marker_is_no_permission(content, tmp_path):
    run_in(tmp_path / "run")
    (tmp_path / "run" / MARKER).write_text(content)
    before = pictured(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(MARKER)):
        run_in(tmp_path / "run", overwrite=True)
    assert pictured(tmp_path) == before


@pytest.mark.parametrize("kind", ["run", "study"])
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
