"""Nodes that would compute something else are told apart from those that would not."""

import dataclasses
import hashlib
import sys

import pytest

from rayfed.errors import ConfigError
from rayfed.executors import node_check
from rayfed.executors.node_check import (
    NO_MODULE,
    NodeFacts,
    check_nodes,
    check_same_hardware,
    digest_of_module,
    digest_of_packages,
    facts_here,
    problems_of,
    user_modules,
)


def node(host="h2", **facts):
    known = {"node": f"id-{host}", "address": "10.0.0.2", "code": "c" * 64, "versions": {"torch": "2.9"}}
    return NodeFacts(host=host, **{**known, **facts})


OWN = node("h1", modules={"mine": "d" * 64})
SAME = node(modules={"mine": "d" * 64})


def test_a_node_with_the_same_code_and_versions_is_accepted():
    check_nodes([OWN, SAME], OWN)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"code": "e" * 64},
            "its sources of RayFed differ from those of this command (eeeeeeee, here cccccccc)",
        ),
        ({"modules": {"mine": "e" * 64}}, "its file of your module 'mine' differs from the one here"),
        ({"modules": {"mine": NO_MODULE}}, "it cannot import your module 'mine'"),
        ({"versions": {"torch": "2.8"}}, "other versions (torch 2.8, here 2.9)"),
        ({"versions": {}}, "other versions (torch missing, here 2.9)"),
        ({"versions": {"torch": "2.9", "peft": "0.1"}}, "other versions (peft 0.1, here missing)"),
        ({"problem": "it did not answer within 30 s"}, "node h2 (10.0.0.2): it did not answer within 30 s"),
    ],
)
def test_another_one_is_named_with_what_differs(changed, told):
    other = dataclasses.replace(SAME, **changed)
    (line,) = problems_of([OWN, other], OWN)
    assert line.startswith("node h2 (10.0.0.2): ")
    assert told in line
    with pytest.raises(ConfigError, match="node h2"):
        check_nodes([SAME, other], OWN)


def test_all_nodes_that_differ_are_named_in_one_message():
    nodes = [dataclasses.replace(SAME, host=f"h{i}", code="e" * 64) for i in range(3)]
    with pytest.raises(ConfigError, match=r"node h0 .*; node h1 .*; node h2 .*"):
        check_nodes(nodes, OWN)


def test_kinds_of_hardware_are_compared_where_clients_compute():
    nodes = [node("h1", processor="A", gpu="H100"), node("h2", processor="B", gpu="H100")]
    check_same_hardware(nodes, on_gpu=True)
    with pytest.raises(ConfigError, match=r"several kinds of processors \(A on h1; B on h2\)"):
        check_same_hardware(nodes, on_gpu=False)
    with pytest.raises(ConfigError, match=r"several kinds of GPUs \(H100 on h1, h2; unknown on h3\)"):
        check_same_hardware([*nodes, node("h3")], on_gpu=True)
    check_same_hardware([], on_gpu=True)


def test_the_digest_of_code_changes_with_a_byte_a_name_and_a_file(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [digest_of_packages(["some_package"])]
    (package / "notes.txt").write_text("no code")
    assert digest_of_packages(["some_package"]) == found[0]
    (package / "a.py").write_text("A = 2\n")
    found.append(digest_of_packages(["some_package"]))
    (package / "a.py").rename(package / "b.py")
    found.append(digest_of_packages(["some_package"]))
    (package / "c.py").write_text("")
    found.append(digest_of_packages(["some_package"]))
    assert len(set(found)) == 4


def test_modules_of_a_user_are_found_with_those_that_they_import(tmp_path, monkeypatch):
    (tmp_path / "own_helper.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "own_method.py").write_text(
        "import numpy\nfrom own_helper import double\n\nclass Own:\n    pass\n"
    )
    (tmp_path / "own_other.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_method  # type: ignore[import-not-found]
    import own_other  # type: ignore[import-not-found]  # noqa: F401

    try:
        assert user_modules({"method": own_method.Own}, 3) == ["own_helper", "own_method"]
        assert user_modules([1, 2], pytest) == []
        source = (tmp_path / "own_helper.py").read_bytes()
        assert digest_of_module("own_helper") == hashlib.sha256(source).hexdigest()
        assert digest_of_module("own_missing") == NO_MODULE
        assert digest_of_module("own_missing.part") == NO_MODULE
    finally:
        for name in ("own_method", "own_helper", "own_other"):
            sys.modules.pop(name, None)


def test_this_machine_has_facts(tmp_path):
    data = tmp_path / "folder" / "set.arrow"
    facts = facts_here("id", data, ["rayfed.errors"])
    assert facts.data is None
    assert facts.disk > 0
    assert facts.processor
    assert facts.versions["python"] == sys.version.split()[0]
    assert {"torch", "numpy"} <= facts.versions.keys()
    assert facts.code == digest_of_packages(node_check.SOURCES)
    assert len(facts.modules["rayfed.errors"]) == 64
    data.parent.mkdir()
    data.write_bytes(b"123")
    assert facts_here("id", data).data == 3
