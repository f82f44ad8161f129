"""Names and records of objects: an import path where there is one, else a digest of the source."""

from rayfed import user_objects


def function():
    return 1


def test_what_can_be_imported_is_named_by_its_path():
    name = user_objects.register(function)
    assert name == f"{__name__}:function"
    assert user_objects.import_or_none(name) is function
    assert user_objects.find(name).value is function
    assert user_objects.place(function).startswith(" (test_user_objects.py, line ")


def test_what_cannot_is_named_by_the_digest_of_its_source():
    def inner():
        return 1

    def other():
        return 2

    names = [user_objects.register(each) for each in (inner, other)]
    assert all(user_objects.is_own(name) for name in names)
    assert names[0] != names[1]
    assert user_objects.find(names[0]).value is inner
    assert not user_objects.is_own("fedprox")
    assert not user_objects.is_own(3)


def test_without_a_source_the_digest_is_that_of_the_bytecode():
    cells = []
    for number in (1, 1, 2):
        names = {"__name__": "cell"}
        exec(compile(f"class Own:\n    def f(self):\n        return {number}", "<cell>", "exec"), names)
        cells.append(names["Own"])
    digests = [user_objects.source_digest(cell) for cell in cells]
    assert digests[0] == digests[1] != digests[2]


def test_records_leave_out_what_is_part_of_rayfed():
    name = user_objects.register(function)
    found = user_objects.records(
        {"algorithm": name, "model": "vit_mini", "reader": "rayfed.data.named.arrays:Cifar10"}
    )
    assert list(found) == ["algorithm"]
    assert found["algorithm"]["digest"] == user_objects.source_digest(function)
    assert user_objects.import_or_none("no.such.module:NAME") is None
