"""Input that ended in a traceback, in wrong advice or in silence: each is one line that names the key."""

import json

import pytest
import yaml

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.record.claim import check_own_folder
from rayfed.resume import main as resume
from rayfed.run import main
from rayfed.terminal.arguments import Arguments, refuse_repeated
from rayfed.user_files import DocumentError, parse_json, parse_yaml, read_file
from rayfed.view import main as view
from tests.conftest import SMALL
from tests.rayfed.data.folders import make_folder
from tests.rayfed.malformed import Case, assert_refused

DEEP = "[" * 5000 + "]" * 5000


def written(name, content, before=""):
    """A case's `make`: a file, and the command line that names it."""

    def make(folder):
        (folder / name).write_text(content)
        return (
            [*before.split(), str(folder / name)] if before.startswith("--") else [f"{before}{folder / name}"]
        )

    return make


def unreadable_image(folder):
    root = make_folder(folder / "images")
    image = next(iter(sorted(root.rglob("*.png"))))
    image.write_bytes(b"this is no image")
    return ["data=image_folder", f"data.root={root}", "data.name=mine"]


CASES = [
    Case("a cache that only says it can be written", "data.cache | /proc | cannot write", "data.cache=/proc"),
    Case("a value that its tag refuses", "train.lr | not a YAML value | float", "train.lr=!!float 'x'"),
    Case("a date that does not exist", "train.lr | not a YAML value", "train.lr=2026-99-99"),
    Case("more digits than Python converts", "rounds | not a YAML value", f"rounds={'9' * 5000}"),
    Case("a hexadecimal number of thousands of digits", "seed | thousands of digits", f"seed=0x{'f' * 5000}"),
    Case("an adapter of more than full rank", "tuning.rank: 65 | 1..64 | tuning=full", "tuning.rank=65"),
    Case("an adapter larger than any memory", "tuning.rank: 1000000000", "tuning.rank=1000000000"),
    Case("momentum that never fades", "train.momentum: 1.0 | less than 1", "train.momentum=1.0"),
    Case("an adapter whose size overflows", "tuning.rank", "tuning.rank=1000000000000000000"),
    Case("one class", "data.classes: 1 | choose two or more", "data.classes=1"),
    Case("images larger than any memory", "model.size: 100000 | GB", "model.size=100000"),
    Case("a width larger than any memory", "model.options", "model.options={depth: 1, embed_dim: 40000000}"),
    Case("blocks without end", "model.options.depth | 1000", "model.options={depth: 100000000}"),
    Case(
        "more clients than memory",
        "data.partition.clients_per_domain",
        "data.partition.clients_per_domain=1000000000",
    ),
    Case("more threads than a machine has", "cluster.threads | 1024", "cluster.threads=1000000000"),
    Case("a batch beyond 64 bits", "train.batch_size | 9223372036854775807", f"train.batch_size={10**23}"),
    Case("a mean that is not a number", "model.mean.0 | nan | finite", "model.mean=[.nan, 0.5, 0.5]"),
    Case("a mean without bound", "model.mean.2 | inf | finite", "model.mean=[0.5, 0.5, .inf]"),
    Case("a deep override", "train.lr | nested", f"train.lr={DEEP}"),
    Case("a deep config", "--config | nested", make=written("config.yaml", f"rounds: {DEEP}", "--config")),
    Case(
        "a deep partition",
        "data.partition.file | deep.json | nested",
        make=written("deep.json", DEEP, "data.partition="),
    ),
    Case(
        "a client twice",
        "data.partition.file | 'a' is there twice",
        make=written("twice.json", '{"a": [0, 1], "b": [2], "a": [3]}', "data.partition="),
    ),
    Case("an image without a name", "is corrupt (no image format", make=unreadable_image),
    Case(
        "min_samples without effect",
        "data.partition.min_samples | no effect | dirichlet",
        "data.partition.min_samples=3",
    ),
    Case(
        "order without effect",
        "data.partition.order | no effect | imbalanced",
        "data.partition.order=[plain]",
    ),
    Case("alpha without effect", "data.partition.alpha | no effect", "data.partition.alpha=0.1"),
    Case(
        "clients_per_domain without effect",
        "data.partition.clients_per_domain | no effect",
        "data.partition.scheme=imbalanced | data.partition.clients_per_domain=2",
    ),
    Case("a root that nothing reads", "data.root | digits_five_mini", "data.root=/tmp"),
    Case(
        "a home that does not exist", "data.cache | ~nobody-of-that-name", "data.cache=~nobody-of-that-name/x"
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_line(case, tmp_path, cache, capsys, monkeypatch):
    assert_refused(case, tmp_path, cache, capsys, monkeypatch)


@pytest.mark.parametrize("folder", ["/etc", "/usr", "/proc/mine", "/tmp"])
def test_folders_of_the_system_are_refused_as_any_with_other_files(folder, capsys, cache):
    assert main([*SMALL, "cluster=inline", f"data.cache={cache}", f"output={folder}", "overwrite=true"]) == 2
    assert capsys.readouterr().err.startswith("error: output: ")


@pytest.mark.parametrize("folder", ["/", "~/", ".", ".."])
def test_folders_that_are_no_run_of_anybody(folder, capsys, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    code = main([*SMALL, "cluster=inline", f"data.cache={cache}", f"output={folder}"])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert error.startswith("error: output: "), error
    assert "a run needs its own folder" in error
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]


def test_a_link_to_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="your home folder"):
        check_own_folder(tmp_path / "link")


def test_the_home_folder_is_written_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"name": "vit_mini"},
                "data": {"name": "d", "reader": "digits_five_mini", "partition": "~/p.json"},
                "output": "~/run",
            }
        )
    )
    config = load_config(["data.cache=~/cache", "faults.trace=~/t.csv"], "~/mine.yaml")
    home = str(tmp_path)
    assert config.output == f"{home}/run"
    assert config.data.cache == f"{home}/cache"
    assert config.data.partition.file == f"{home}/p.json"
    assert config.faults.trace == f"{home}/t.csv"
    assert load_config(["output=a~b"]).output == "a~b"


def test_a_key_given_twice(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["seed=1", "rounds=2", "seed=2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: seed: given twice, as '1' and as '2'; keep one\n"
    with pytest.raises(ConfigError, match=r"train: .* would replace train.lr=1"):
        refuse_repeated(["train.lr=1", "train={epochs: 2}"])
    refuse_repeated(["seed=1", "seed=1", "model.size=32", "model=vit_mini"])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_options_between_overrides(position, tmp_path, cache, capsys):
    overrides = [*SMALL, "cluster=inline", f"data.cache={cache}", "rounds=1", f"output={tmp_path / 'run'}"]
    overrides.remove("rounds=2")
    overrides.insert((0, 3, len(overrides))[position], "--quiet")
    assert main(overrides) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "arguments", "advice"),
    [
        (main, ["--qiet", "seed=1"], "--qiet: there is no such option; did you mean --quiet?"),
        (main, ["--rounds", "5"], "--rounds: there is no such option; a config key has no dashes: "
         "write rounds=VALUE"),
        (main, ["--train.lr=1"], "--train.lr=1: there is no such option; a config key has no dashes: write "
         "train.lr=1"),
        (view, ["run", "--rounds=5"], "--rounds=5: there is no such option; --help lists the arguments"),
        (view, ["run", "more"], "more: one argument too many; write python -m rayfed.view RUN [--follow] "
         "[--json] [--debug]"),
        (view, [], "run: missing; write python -m rayfed.view RUN [--follow] [--json] [--debug]; --help "
         "lists the arguments"),
        (resume, [], "run: missing; write python -m rayfed.resume DIR [rounds=+N] [overrides] [--quiet] "
         "[--json] [--debug]; --help lists the arguments"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line_that_says_what_to_write(command, arguments, advice, capsys):
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {advice}"]


def test_options_may_stand_before_a_folder(tmp_path, capsys):
    assert view(["--debug", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    parser = Arguments("x")
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--quiet", action="store_true")
    found = parser.parse_args(["dir", "a=1", "--quiet", "b=2"])
    assert (found.run, found.overrides, found.quiet) == ("dir", ["a=1", "b=2"], True)


def test_a_server_whose_arithmetic_overflows(small):
    from rayfed.errors import ServerError

    with pytest.raises(ServerError, match=r"round 1: .*OverflowError.*server.q=1000000"):
        small("algorithm=qffl", "server.q=1e6")


@pytest.mark.parametrize("text", ["!!int x", "!!timestamp x", "!!binary x", "{[]: 1}", "\ud800"])
def test_no_yaml_raises_anything_else(text):
    with pytest.raises(DocumentError) as caught:
        parse_yaml(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"# Title\n\nSome words: and more: words\n", "a colon, an indent, a bracket or a quotation mark"),
        (b"\x89PNG\r\n\x1a\n", "it is not a text in UTF-8"),
        (b"a: 1\x07", "a character that YAML does not allow"),
        (b"a: !!python/name:os.system", "a key or a tag (!!...) that stands for no plain value in line 1"),
        (b"a: !!float x", "a number or a date cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_our_words_with_what_to_give(content, words, tmp_path):
    file = tmp_path / "README.md"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_file(file, "--config")
    assert words in str(caught.value)
    assert str(caught.value).endswith("; give the config.yaml of a run, or what --print-config writes")


def test_a_run_in_place_of_its_config_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("rounds: 1\n")
    with pytest.raises(ConfigError, match=f"is a directory; write {tmp_path}/config.yaml$"):
        read_file(tmp_path, "--config")


def test_values_of_a_json_that_is_right():
    assert parse_json(json.dumps({"a": [1, {"b": None}]})) == {"a": [1, {"b": None}]}
    for text in ("{", '{"a": 1, "a": 2}', DEEP, b"\xff", "1" * 5000):
        with pytest.raises(DocumentError):
            parse_json(text)
