"""A prepared data set is copied to a node in parts, whole or not at all."""

from rayfed.executors.copy_to_nodes import without_room, write_part
from tests.rayfed.executors.test_node_check import node


def test_parts_make_the_file_and_it_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "cache" / "set.arrow"
    content = bytes(range(256)) * 5
    assert write_part(path, "t", 0, content[:500], None) == ""
    assert not path.exists()
    assert write_part(path, "t", 500, content[500:], len(content)) == ""
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == ["set.arrow"]


def test_a_file_with_missing_parts_gets_no_name(tmp_path):
    path = tmp_path / "set.arrow"
    write_part(path, "t", 0, b"abc", None)
    assert write_part(path, "t", 3, b"def", 7) == "parts of it are missing"
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    assert write_part(tmp_path / "file" / "set.arrow", "t", 0, b"abc", 3) == "File exists"


def test_nodes_that_lack_the_data_need_room_for_it(tmp_path):
    path = tmp_path / "set.arrow"
    path.write_bytes(b"x" * 100)
    small, large, there = node("small", disk=99), node("large", disk=100), node("there", disk=1, data=100)
    other = node("other", disk=1, data=50)
    assert [line.split()[1] for line in without_room(path, [small, large, there, other])] == [
        "small",
        "other",
    ]
