"""The kill table: what it shows of a case."""

from benchmarks.kill_cases import Ending, markdown
from benchmarks.kill_table import Bench


def test_lines_have_no_temporary_paths(tmp_path):
    bench = Bench.__new__(Bench)  # without the run that a bench begins with
    bench.folder = tmp_path
    copy = "/tmp/rayfed-stderr-a_b1.log"
    (tmp_path / "stderr").write_text(
        f"\n\x1b[31merror: lost; continue with: X {tmp_path}/killed ({copy})\x1b[0m\n"
    )
    assert bench.errors() == ["error: lost; continue with: X FOLDER/killed (TMPDIR/rayfed-stderr-NAME.log)"]


def test_a_row_shows_the_whole_line():
    said = "error: " + "a | b " * 40 + "; continue with: python -m rayfed.resume FOLDER/killed"
    table = markdown([Ending("raylet, in a round, quiet", 1, 2.4, [said, "x"], [], True, 3.2)])
    told = said.replace("|", "\\|")
    row = f"| raylet, in a round, quiet | 1 | 2 | {told} (and 1 more) | 0 | the same bytes | 3 |"
    assert row in table.splitlines()


def test_a_failed_run_may_say_that_an_actor_was_lost_and_nothing_else():
    error = "error: Ray's raylet ended; continue with: python -m rayfed.resume FOLDER/killed"
    lost = (
        "(rayfed:driver:killed pid=1) actor rayfed:clients:killed:00 was lost; a new actor repeats its work"
    )
    for more, good in (([], True), ([lost], True), (["Traceback"], False), ([lost, error], False)):
        assert Ending("raylet, in a round, quiet", 1, 2.4, [*more, error], [], True, 3.2).good == good
