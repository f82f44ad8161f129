"""Where the page is written, and which files are never replaced."""

import os
import threading

import pytest

from rayfed.errors import ConfigError
from rayfed.report.page.render import command, page_file, write_report
from tests.rayfed.report.page import folders


def test_the_page_is_in_the_folder_of_the_run_or_here(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    assert page_file(runs[:1], None) == tmp_path / "a" / "report.html"
    assert str(page_file(runs, None)) == "report.html"
    assert page_file(runs, tmp_path / "x.html") == tmp_path / "x.html"


@pytest.mark.parametrize("name", ["x.txt", "nosuch/x.html"])
def test_another_file_name_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"--out: .*(does not end in \.html|there is no folder)"):
        page_file([tmp_path], tmp_path / name)


def test_it_replaces_its_own_files_and_no_others(tmp_path, no_pictures):
    folders.write(tmp_path / "run", rounds=1, clients=3)
    page = tmp_path / "run" / "report.html"
    for _ in range(2):
        write_report([tmp_path / "run"], page)
    assert page.read_text().startswith("<!doctype html>")
    for name in ("mine.html", "other.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match="was not written by this command"):
            write_report([tmp_path / "run"], (tmp_path / name).with_suffix(".html"))
        assert (tmp_path / name).read_text() == "mine"


def test_a_pipe_in_place_of_its_file_is_refused(tmp_path):
    folders.write(tmp_path / "run", rounds=1, clients=3)
    os.mkfifo(tmp_path / "run" / "report.json")
    ended = threading.Event()

    def end_the_waiting():
        ended.set()
        os.close(os.open(tmp_path / "run" / "report.json", os.O_RDWR))

    writer = threading.Timer(120, end_the_waiting)
    writer.daemon = True
    writer.start()  # else a command that reads the pipe would wait for ever
    with pytest.raises(ConfigError, match="was not written by this command"):
        write_report([tmp_path / "run"], tmp_path / "run" / "report.html")
    assert not ended.is_set()
    writer.cancel()


def test_the_command_can_be_pasted(tmp_path):
    assert command(tmp_path / "my run").endswith("/my run'")
