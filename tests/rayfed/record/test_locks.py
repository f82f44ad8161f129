"""One command at a time has a folder, and a driver writes only under the command that started it."""

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.errors import ConfigError
from rayfed.record.atomic_files import write_text
from rayfed.record.claim import KEPT, claim, claim_again, look
from rayfed.record.folder import RunFolder
from rayfed.record.locks import COMMAND, WRITER, hold_lock, is_locked
from tests.rayfed.record.claims import OURS, fresh, pictured, run_in


@pytest.mark.parametrize("name", [COMMAND, WRITER])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_being_written_is_not_touched(name, overwrite, tmp_path):
    run_in(tmp_path / "run")
    with hold_lock(tmp_path / "run", name):
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
    run_in(run / "cells" / "local")
    before = pictured(tmp_path)
    with hold_lock(run / "cells" / "local", COMMAND), pytest.raises(ConfigError, match="another process"):
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
            self.gate.wait(120)
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
        assert {path.name for path in run.iterdir()} <= {*KEPT, *(Path(name).parts[0] for name in OURS)}
    if not refused and (all(overwrites) or not there):
        assert len(race.winners) == 1
        assert race.refused == len(overwrites) - 1


def test_a_driver_that_outlives_its_command_does_not_write_under_the_next_one(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with claim(run, "") as first:
        pass
    with claim_again(run) as second:
        second.take_over()
        with (
            pytest.raises(ConfigError, match="another command"),
            RunFolder(run, {}, claim=first.token).lock(),
        ):
            pass
        with RunFolder(run, {}, claim=second.token).lock():
            pass


def test_a_driver_keeps_the_folder_when_its_command_has_ended(tmp_path):
    run = tmp_path / "run"
    with claim(run, "") as own:
        driver = RunFolder(run, {}, claim=own.token).lock()
        driver.__enter__()
    assert is_locked(run)
    with pytest.raises(ConfigError, match="another process"):
        run_in(run, overwrite=True)
    driver.__exit__(None, None, None)
    assert not is_locked(run)
