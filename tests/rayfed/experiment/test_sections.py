"""The types of sections name the keys of the config, and travel with the package."""

from importlib.resources import files

import pytest

from docs.generate import sections


def test_the_types_are_those_of_the_config():
    """`python -m docs.generate.sections` writes the file anew."""
    assert sections.FILE.read_text() == sections.text()


def test_a_type_that_is_not_plain_is_refused():
    assert sections.written(dict[str, bool] | None) == "dict[str, bool] | None"
    with pytest.raises(TypeError, match="is not a plain type"):
        sections.written(list[object])


def test_editors_are_told_that_the_package_has_types():
    assert (files("rayfed") / "py.typed").is_file()
