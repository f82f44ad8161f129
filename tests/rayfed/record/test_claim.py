"""Whoever shares a folder with runs loses nothing: only what a run wrote is written over or removed."""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.errors import ConfigError, StorageError
from rayfed.record.claim import KEPT, claim, claim_again, look
from rayfed.record.files import write_text
from rayfed.record.lock import COMMAND, WRITER, is_locked, locked
from rayfed.record.marker import MARKER
from rayfed.record.ownership import NAMES, make_folder, names_of, remove

OURS = ("config.yaml", "result.json", "model/params.safetensors", "figures/a.png", "history/000001.json.gz")
NAME = st.sampled_from(
    [
        "model",
        "figures",
        "checkpoints",
        "history",
        "wandb",
        "compare",
        "config.yaml",
        "a.parquet",
        "report.md",
        ".lock",
        "x",
    ]
)
PATHS = st.lists(NAME, min_size=1, max_size=3).map("/".join)
TREES = st.dictionaries(PATHS, st.sampled_from(["file", "folder", "link"]), max_size=6)


def plant(root, tree):
    """Make files, folders and links to a folder outside; one within a file is left out."""
    outside = root.parent / "outside"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "precious").write_text("outside")
    for name, kind in tree.items():
        with suppress(OSError):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(outside)
            elif not path.exists():
                path.write_text(f"foreign {name}")


def pictured(root):
    """Every file, folder and link below a folder, with its content."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            what = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
            found[str(path.relative_to(root))] = what
    return found


def without_ours(tree):
    return {
        k: v for k, v in tree.items() if Path(k).name not in KEPT or (Path(k).name == ".lock" and v != b"")
    }


def run_in(path, overwrite=False, part_of=None):
    """What a run does to a folder; what it could not write is left out."""
    with claim(path, look(path, overwrite), overwrite, part_of):
        for name in OURS:
            with suppress(StorageError):
                write_text(path / name, f"ours {name}")


def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case") / "around"
    folder.mkdir()
    return folder


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(around_it=TREES, inside=TREES, part=TREES)
def test_overwriting_a_run_removes_what_it_wrote_and_nothing_else(tmp_path_factory, around_it, inside, part):
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
    with claim(output, look(output, True), overwrite=True):
        pass
    after = pictured(around.parent)
    assert not ours & set(after)
    foreign = {k: v for k, v in without_ours(before).items() if k not in ours and v != "folder"}
    assert {k: v for k, v in without_ours(after).items() if v != "folder"} == foreign
    assert set(after) <= set(before)


@settings(max_examples=100, deadline=None)
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


def test_a_foreign_file_in_the_place_of_ours_is_not_written_over(tmp_path):
    run_in(tmp_path / "run")
    with claim(tmp_path / "run", look(tmp_path / "run", True), overwrite=True):
        (tmp_path / "run" / "report.md").write_text("mine")
        with pytest.raises(StorageError, match=r"report\.md: it was there before"):
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
    with claim(run, look(run, True), overwrite=True), pytest.raises(StorageError, match="is a link"):
        write_text(run / "model" / "params.safetensors", "ours")
    assert (elsewhere / "params.safetensors").read_text() == "ours model/params.safetensors"
    assert (run / "model").is_symlink()


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


def test_what_a_killed_process_was_writing_goes_when_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    with claim(run, ""):

        def killed(path):
            path.write_text("half")
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", lambda *args, **options: None)
            from rayfed.record.files import write_whole

            write_whole(run / "result.json", killed)
    assert list(run.glob(".rayfed-*.tmp"))
    with claim_again(run) as own:
        own.take_over()
    assert not list(run.glob(".rayfed-*.tmp"))


@pytest.mark.parametrize("name", [COMMAND, WRITER])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_being_written_is_not_touched(name, overwrite, tmp_path):
    run_in(tmp_path / "run")
    with locked(tmp_path / "run", name):
        assert is_locked(tmp_path / "run")
        before = pictured(tmp_path)
        with pytest.raises(ConfigError):
            run_in(tmp_path / "run", overwrite)
        with pytest.raises(ConfigError, match="another process"), claim_again(tmp_path / "run", patience=0.1):
            pass
        assert pictured(tmp_path) == before
    assert not is_locked(tmp_path / "run")


def test_a_part_that_is_being_written_protects_the_whole(tmp_path):
    run = tmp_path / "run"
    run_in(run)
    run_in(run / "compare" / "local", part_of=run)
    before = pictured(tmp_path)
    with locked(run / "compare" / "local", COMMAND), pytest.raises(ConfigError, match="another process"):
        run_in(run, overwrite=True)
    assert pictured(tmp_path) == before


def test_only_the_run_that_was_seen_is_overwritten(tmp_path):
    run = tmp_path / "run"
    run_in(run)
    seen = look(run, True)
    run_in(run, overwrite=True)
    before = pictured(run)
    with pytest.raises(ConfigError, match="since this one was started"), claim(run, seen, overwrite=True):
        pass
    assert pictured(run) == before


class Race:
    """Commands that look at once; all but the first to lock the folder shall be refused."""

    def __init__(self, run, count, discards):
        self.run, self.discards = run, discards
        self.gate = threading.Barrier(count)
        self.inside, self.most, self.winners, self.refused = 0, [], [], 0

    def command(self, number, overwrite):
        try:
            seen = look(self.run, overwrite)
            self.gate.wait(5)
            with claim(self.run, seen, overwrite) as own:
                self.write(number, own)
        except (ConfigError, threading.BrokenBarrierError):
            self.gate.abort()
            self.refused += 1

    def write(self, number, own):
        self.inside += 1
        self.most.append(self.inside)
        write_text(self.run / "config.yaml", f"{number}")
        if self.discards and number == 0:
            own.discard()
        else:
            self.winners.append(number)
        self.inside -= 1


@settings(max_examples=40, deadline=None)
@given(
    there=st.booleans(),
    overwrites=st.lists(st.booleans(), min_size=2, max_size=4),
    refused=st.booleans(),
)
def test_of_commands_at_once_one_at_most_has_the_folder(tmp_path_factory, there, overwrites, refused):
    run = fresh(tmp_path_factory) / "run"
    if there:
        run_in(run)
    race = Race(run, len(overwrites), refused)

    threads = [threading.Thread(target=race.command, args=each) for each in enumerate(overwrites)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(race.most, default=0) <= 1
    assert len(race.winners) <= 1
    if race.winners:
        assert (run / "config.yaml").read_text() == f"{race.winners[0]}"
        assert len(names_of(run).all()) == 2  # the file, and where it was written first
    if not refused and (all(overwrites) or not there):
        assert len(race.winners) == 1
        assert race.refused == len(overwrites) - 1


def test_a_driver_that_outlives_its_command_does_not_write_under_the_next_one(tmp_path, monkeypatch):
    from rayfed.record.folder import RunFolder

    run = tmp_path / "run"
    with claim(run, "") as first:
        pass
    with claim_again(run) as second:
        second.take_over()
        with (
            pytest.raises(ConfigError, match="another command"),
            RunFolder(run, {}, claim=first.token).locked(),
        ):
            pass
        with RunFolder(run, {}, claim=second.token).locked():
            pass


def test_a_driver_keeps_the_folder_when_its_command_has_ended(tmp_path):
    from rayfed.record.folder import RunFolder

    run = tmp_path / "run"
    with claim(run, "") as own:
        driver = RunFolder(run, {}, claim=own.token).locked()
        driver.__enter__()
    assert is_locked(run)
    with pytest.raises(ConfigError, match="another process"):
        run_in(run, overwrite=True)
    driver.__exit__(None, None, None)
    assert not is_locked(run)
