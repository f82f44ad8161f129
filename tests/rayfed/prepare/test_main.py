"""python -m rayfed.prepare: what it says about a download, and what it exits with."""

import fcntl
import json
import logging
import re
import shutil
import sys

import pytest
from PIL import Image

from rayfed.data.published import PUBLISHED
from rayfed.prepare.__main__ import main
from rayfed.terminal.console import CLEAR
from tests.rayfed.data.folders import PACS, make_folder, needs_pacs
from tests.rayfed.data.test_load_dataset import CONFIGS, from_yaml
from tests.rayfed.prepare.conftest import CLASSES, DOMAINS


def test_all_well(run, root, tmp_path):
    code, out, err = run("pacs", "--root", str(root))
    assert (code, err) == (0, "")
    assert re.search(r"art_painting +7 +14 +2,048", out)
    assert "sample: 56 of 9,991 images" in out
    assert "preparing pacs, images decoded: 56 of 56" in out
    (shard,) = (tmp_path / "cache").glob("*.arrow")
    assert f"{shard} (" in out
    code, out, _ = run("pacs", "--root", str(root))
    assert code == 0
    assert "prepared before" in out
    assert "preparing" not in out


@needs_pacs
def test_the_pacs_sample(run):
    code, out, err = run("pacs", "--root", str(PACS))
    assert (code, err) == (0, "")
    if "sample" in out:  # the full data set is just as well
        assert "sample: 1,680 of 9,991 images" in out
        assert re.search(r"sketch +7 +420 +3,929", out)


def test_one_image_truncated(run, root, tmp_path):
    bad = root / "photo" / "horse" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    code, _, err = run("pacs", "--root", str(root))
    assert code == 2
    lines = err.splitlines()
    assert lines[0] == "problem: 1 unreadable file"
    assert re.fullmatch(r"(?i)  photo/horse/1\.jpg \(.*truncated.*\)", lines[1])
    assert lines[2].startswith("the whole data set: the authors' project page")
    assert len(lines) == 3
    assert not list((tmp_path / "cache").glob("*.arrow"))
    code, out, _ = run("pacs", "--root", str(root), "data.on_bad_image=skip")
    assert code == 0
    assert "left out: 1 unreadable file\n  photo/horse/1.jpg (" in out


def test_many_unreadable_files(run, root):
    for domain in ("photo", "sketch"):
        for path in (root / domain).rglob("*.*g"):
            path.write_bytes(b"")
    code, _, err = run("pacs", "--root", str(root))
    assert code == 2
    assert "problem: 28 unreadable files" in err
    assert len(re.findall(r"^  \w+/\w+/\d\.\w+ \(", err, re.MULTILINE)) == 10
    assert "  ... and 18 more" in err


def test_one_class_folder_removed(run, root):
    shutil.rmtree(root / "cartoon" / "guitar")
    code, out, err = run("pacs", "--root", str(root))
    assert code == 2
    assert err.splitlines()[0] == "problem: class cartoon/guitar is missing"
    assert len(err.splitlines()) == 2
    assert "preparing" not in out


def test_one_class_misspelt(run, root):
    (root / "cartoon" / "guitar").rename(root / "cartoon" / "gitar")
    code, _, err = run("pacs", "--root", str(root))
    assert code == 2
    assert err.splitlines()[0] == (
        "problem: class cartoon/guitar is missing; 'gitar' is there: rename it to 'guitar'"
    )
    assert len(err.splitlines()) == 2


def test_one_domain_misspelt(run, root):
    (root / "art_painting").rename(root / "art_paintings")
    code, out, err = run("pacs", "--root", str(root))
    assert code == 2
    assert err.splitlines()[0] == (
        "problem: domain 'art_painting' is missing; 'art_paintings' is there: rename it to 'art_painting'"
    )
    assert len(err.splitlines()) == 2
    assert "'art_paintings' is not a domain of this data set and is ignored" in out


def test_one_domain_missing(run, root):
    shutil.rmtree(root / "sketch")
    code, _, err = run("pacs", "--root", str(root))
    assert code == 2
    assert err.splitlines()[0] == "problem: domain 'sketch' is missing"


def test_a_stranger_among_the_classes(run, root):
    Image.new("RGB", (4, 4)).save(next((root / "photo" / "dog").iterdir()))
    shutil.copytree(root / "photo" / "dog", root / "photo" / "zebra")
    code, _, err = run("pacs", "--root", str(root))
    assert code == 2
    assert "problem: class photo/zebra is not a class of this data set; remove it" in err


def test_the_folder_above_and_no_folder(run, root, tmp_path):
    code, _, err = run("pacs", "--root", str(tmp_path))
    assert code == 2
    assert f"use --root {root}" in err
    assert len(err.splitlines()) == 1
    for argv in (("--root", "no/such"), ()):
        code, _, err = run("pacs", *argv)
        assert code == 2
        assert err.startswith("error: data.root: ")
        assert "Get it from the authors' project page" in err
        assert len(err.splitlines()) == 1


def test_json(run, root):
    (root / "photo" / "dog" / "0.jpg").write_bytes(b"bad")
    code, out, err = run("pacs", "--root", str(root), "--json")
    content = json.loads(out)
    assert (code, err, content["ok"]) == (2, "", False)
    assert content["domains"][0] == {
        "domain": "photo",
        "classes": 7,
        "images": 14,
        "test": 0,
        "published": 1670,
    }
    assert content["unreadable"][0].startswith("photo/dog/0.jpg (")
    assert content["notes"] == ["sample: 56 of 9,991 images"]
    assert content["shard"] is None


def test_more_images_than_published_are_noted(run, tmp_path):
    root = make_folder(tmp_path / "PACS", DOMAINS, CLASSES, count=1)
    for number in range(90):
        shutil.copy(root / "sketch" / "house" / "0.png", root / "sketch" / "house" / f"copy{number}.png")
    code, out, _ = run("pacs", "--root", str(root))
    assert code == 0
    assert "class sketch/house has 91 images, more than the 80 published" in out


def test_a_folder_that_nobody_published(run, tmp_path):
    root = make_folder(tmp_path / "mine")
    code, out, err = run("image_folder", "--root", str(root))
    assert (code, err) == (0, "")
    assert re.search(r"photo +2 +6 +-", out)
    shutil.rmtree(root / "sketch" / "dog")
    assert run("image_folder", "--root", str(root))[::2] == (2, "problem: class sketch/dog is missing\n")


def test_digits_may_be_incomplete(run, shared, tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "USPS").symlink_to((shared / "data" / "digits" / "USPS").resolve())
    code, out, err = run("digits", "--root", str(tmp_path / "digits"))
    assert (code, err) == (0, "")
    assert "domain 'svhn' is missing" in out
    assert "ufldl.stanford.edu/housenumbers" in out
    assert re.search(r"usps +10 +2,500 +500 +9,298", out)


def test_clean(run, root, tmp_path, capsys):
    cache = tmp_path / "cache"
    run("pacs", "--root", str(root))
    (root / "photo" / "dog" / "0.jpg").unlink()
    code, out, _ = run("pacs", "--root", str(root), "--clean")  # what was prepared before the change goes
    assert code == 0
    assert "removed 1 prepared file" in out
    (left,) = cache.glob("*.arrow")
    (cache / f"{left.stem}.123.tmp").touch()
    with left.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody is preparing it
        assert main(["--clean", "--cache", str(cache)]) == 0
        assert left.exists()
    assert main(["--clean", "--cache", str(cache)]) == 0
    assert "removed 2 prepared files" in capsys.readouterr().out
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["NAME: missing", "rayfed list data shows all"]),
        (["data=pacs"], ["'data=pacs' is an override", "write the name of a data set first"]),
        (["pecs"], ["did you mean 'pacs'?"]),
        (["pacs", "data.limt=3"], ["data.limt", "did you mean 'limit'"]),
        (["pacs", "data.limit=2.5"], ["data.limit", "2.5", "fraction in (0, 1]"]),
    ],
)
def test_bad_input(argv, words, capsys, tmp_path):
    root = make_folder(tmp_path / "PACS", DOMAINS, CLASSES, count=1)
    argv = [*argv, *(["--root", str(root), "--plot", str(tmp_path / "x.png")] if argv else [])]
    assert main([*argv, "--cache", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert len(err.splitlines()) == 1
    assert main(["pacs", "--image-size", "0"]) == 2


def test_a_folder_as_a_name_and_a_root_too_high_say_what_to_type(tmp_path, capsys, caplog, monkeypatch):
    make_folder(tmp_path / "above" / "mine", count=1)
    monkeypatch.chdir(tmp_path)
    cache = ["--cache", str(tmp_path / "cache")]
    assert main(["above/mine", *cache]) == 2
    assert capsys.readouterr().err.endswith("write python -m rayfed.prepare image_folder --root above/mine\n")
    assert main(["../nowhere", *cache]) == 2
    assert "write data=image_folder data.root=../nowhere with the layout" in capsys.readouterr().err
    assert main(["image_folder", "--root", "above", *cache]) == 0
    assert caplog.messages[0].endswith(f"set data.root={tmp_path / 'above' / 'mine'}")


def test_a_bar_on_a_terminal(run, root, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run("pacs", "--root", str(root))
    assert code == 0
    assert f"{CLEAR}preparing pacs, images decoded: 56 of 56{CLEAR}" in out


def test_images_are_prepared_in_the_size_that_a_run_will_ask_for(root, tmp_path, capsys):
    from rayfed.config.look_up import design_of
    from rayfed.config.schema import load_config
    from rayfed.data.load_dataset import load
    from rayfed.engine.setup import without_values

    place = [f"data.root={root}", f"data.cache={tmp_path / 'cache'}"]
    assert main(["pacs", *place]) == 0
    assert "for model=vit_mini, with inputs of size 32; for another model, add model=NAME" in (
        capsys.readouterr().out
    )
    config = load_config(["data=pacs", *place])
    load(config.data, without_values(design_of(config)).size)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    assert main(["pacs", *place, "model=vit_base_patch16_224"]) == 0
    vit = load_config(["data=pacs", *place, "model=vit_base_patch16_224"])
    model = without_values(design_of(vit))
    assert model.resize == "crop"  # as its own transform does; the prepared file is another one
    load(vit.data, model.size, resize=model.resize)
    assert len(list((tmp_path / "cache").glob("pacs-224-*.arrow"))) == 1


def test_everything_published_has_a_config():
    for name, published in PUBLISHED.items():
        assert (CONFIGS / f"{name}.yaml").is_file()
        assert set(from_yaml(name).domains or published.domains) == set(published.domains)
        for domain, cells in published.cells.items():
            assert sum(cells) == published.domains[domain]
    assert sum(PUBLISHED["pacs"].domains.values()) == 9991
    assert sum(PUBLISHED["vlcs"].domains.values()) == 10729
    assert sum(PUBLISHED["office_home"].domains.values()) == 15588
    assert sum(PUBLISHED["terra_incognita"].domains.values()) == 24330
    assert sum(PUBLISHED["domainnet345"].domains.values()) == 586575


def test_later_commands_of_the_process_warn_again(tmp_path, capsys):
    before = logging.getLogger("rayfed.data").level
    assert main(["pacs", "--root", str(tmp_path)]) == 2
    assert logging.getLogger("rayfed.data").level == before
