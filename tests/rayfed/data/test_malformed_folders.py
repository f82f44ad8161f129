"""Malformed folders, images and lists of images. Add a case by adding a line."""

import os
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.rayfed.data.folders import make_folder
from tests.rayfed.data.named.test_texts import written
from tests.rayfed.malformed import Case, assert_refused

FOLDER = "data=image_folder"
BAD = Path("sketch") / "dog" / "1.png"
"""The image that cases of images spoil."""


def images(spoil=lambda root: None, **options):
    """A case's `make`: a small image folder, spoilt."""

    def make(folder: Path):
        root = make_folder(folder / "images", **{"count": 4, "side": 8, **options})
        spoil(root)
        return [FOLDER, f"data.root={root}"]

    return make


def image(content):
    """A case's `make`: one image of the folder has this content."""
    return images(lambda root: (root / BAD).write_bytes(content))


def png(width, height):
    """The first bytes of a PNG of any size; its pixels need not be there."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def fifo(root: Path):
    (root / BAD).unlink()
    os.mkfifo(root / BAD)


def deep(root: Path):
    (root / "photo" / "cat" / "/".join(["d"] * 200)).mkdir(parents=True)


def table(kind, **row):
    """A case's `make`: a table of texts with this row at its end."""

    def make(folder: Path):
        rows = [{"text": f"text {n}", "label": "ab"[n % 2], "site": "x"} for n in range(6)]
        file = written(folder, kind, [*rows, {**rows[0], **row}])
        return [f"data={kind}", f"data.root={file}", "data.columns={text: text, label: label, domain: site}"]

    return make


RED, BACKWARDS = "\x1b[31mred", "\u202egod"
"""Names that would change what a terminal or a page shows."""
UNPRINTABLE = "cannot be printed | "
ESCAPED = {RED: r"'\x1b[31mred'", BACKWARDS: r"'\u202egod'"}


def only(*lines: bytes | str):
    """A case's `make`: lists of images as DomainNet has them, with these lines in the one of real/train."""

    def make(folder: Path):
        (folder / "secret.png").write_bytes(b"")
        root = make_folder(folder / "images", domains=("real", "sketch"), count=4, side=8)
        for domain in ("real", "sketch"):
            names = [
                f"{domain}/{name}/{i}.png {n}\n" for n, name in enumerate(("cat", "dog")) for i in range(4)
            ]
            for half in ("train", "test"):
                (root / f"{domain}_{half}.txt").write_text("".join(names[half == "test" :: 2]))
        content = b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines)
        with (root / "real_train.txt").open("ab") as file:
            file.write(content)
        return ["data=domainnet", f"data.root={root}", "data.domains=null", "data.classes=null"]

    return make


CASES = [
    # Folders.
    Case("an empty folder", "data.root | no images", make=lambda folder: [FOLDER, f"data.root={folder}"]),
    Case(
        "a file for a folder", "data.root | is a file", make=lambda folder: [FOLDER, f"data.root={__file__}"]
    ),
    Case(
        "images without classes",
        "data.root | in no folder of a class",
        make=lambda folder: [FOLDER, f"data.root={make_folder(folder / 'x') / 'photo' / 'cat'}"],
    ),
    Case("one class only", "data.root | one class | cat", make=images(classes=("cat",))),
    Case(
        "a domain misspelt",
        "data.domains | did you mean 'sketch'",
        "data.domains=[photo, sketsh]",
        make=images(),
    ),
    Case(
        "a class that one domain lacks",
        "'sketch' | dog",
        make=images(lambda root: [file.unlink() for file in (root / "sketch" / "dog").iterdir()]),
    ),
    Case("folders without end", "data.root | nested more than 100 deep", make=images(deep)),
    Case(
        "a name that is not UTF-8",
        "data.root | UTF-8",
        make=images(lambda root: (root / BAD).rename(root / BAD.with_name(os.fsdecode(b"\xff.png")))),
    ),
    Case("a test split that is not there", "data.test | official", "data.test=official", make=images()),
    Case("a cache that is a file", "data.cache", make=lambda folder: [f"data.cache={__file__}"]),
    Case("a cache below a file", "data.cache", make=lambda folder: [f"data.cache={__file__}/cache"]),
    Case(
        "an output below a file", "output | Not a directory", make=lambda folder: [f"output={__file__}/run"]
    ),
    Case("an output that is a file", "output | Not a directory", make=lambda folder: [f"output={__file__}"]),
    Case(
        "somebody else's config in the output folder",
        "output | config.yaml | holds no run",
        make=lambda folder: [(folder / "config.yaml").touch(), f"output={folder}"][1:],
    ),
    *(
        Case(
            f"{what} folder named {ESCAPED[name]}", UNPRINTABLE + ESCAPED[name], make=images(**{whose: names})
        )
        for name in ESCAPED
        for what, whose, names in (
            ("a domain", "domains", ("photo", name)),
            ("a class", "classes", ("cat", name)),
        )
    ),
    # Tables.
    *(
        Case(
            f"a {column} of a {kind} file named {ESCAPED[name]}",
            UNPRINTABLE + ESCAPED[name],
            "model=text_mini | model.options={}",
            make=table(kind, **{column: name}),
        )
        for kind in ("csv", "jsonl", "parquet", "tsv")
        for column, name in (("label", RED), ("site", BACKWARDS))
    ),
    # Images.
    Case("an image without bytes", f"{BAD} | corrupt | on_bad_image", make=image(b"")),
    Case("text as an image", f"{BAD} | corrupt", make=image(b"not an image")),
    Case(
        "half an image",
        f"{BAD} | corrupt",
        make=images(lambda root: (root / BAD).write_bytes((root / BAD).read_bytes()[:60])),
    ),
    Case("a bomb of pixels", f"{BAD} | corrupt | pixels", make=image(png(60_000, 60_000))),
    Case("a small bomb of pixels", f"{BAD} | 10000 x 10000", make=image(png(10_000, 10_000))),
    Case("an image that never ends", f"{BAD} | not a file", make=images(fifo)),
    Case(
        "a link to nothing",
        f"{BAD} | link",
        make=images(lambda root: [(root / BAD).unlink(), (root / BAD).symlink_to("gone")]),
    ),
    Case(
        "a link in a circle",
        f"{BAD}",
        make=images(lambda root: [(root / BAD).unlink(), (root / BAD).symlink_to(BAD.name)]),
    ),
    Case(
        "no image that can be read",
        "none of the 16 images",
        "data.on_bad_image=skip",
        make=images(lambda root: [file.write_bytes(b"") for file in root.rglob("*.*g")]),
    ),
    # Lists of images.
    Case(
        "a list that leaves the folder",
        "real_train.txt | '../secret.png/x' | inside",
        make=only("../secret.png/x 0"),
    ),
    Case(
        "a list that leaves it later", "real_train.txt | inside", make=only("real/cat/../../../secret.png 0")
    ),
    Case(
        "a list with an absolute path", "real_train.txt | '/etc/cat/passwd'", make=only("/etc/cat/passwd 0")
    ),
    Case("a list with backslashes", "real_train.txt | inside", make=only("real/cat\\..\\..\\x/secret.png 0")),
    Case("a list that is not text", "real_train.txt | cannot be read", make=only(b"\xff\xfe\0")),
    Case("a list of something else", "line 5 | real_train.txt", make=only("a,b,c")),
    Case(
        "a list of images that are gone",
        "real/cat/99.png | does not exist any more",
        make=only("real/cat/99.png 0"),
    ),
    Case("a class nobody else has", "empty class | cow", make=only("real/cow/1.png 2")),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as outside of pytest
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case, tmp_path, cache, capsys, monkeypatch):
    assert_refused(case, tmp_path, cache, capsys, monkeypatch)


def test_a_warning_about_images_in_no_class_shows_their_names_escaped(tmp_path, caplog):
    from rayfed.data.readers.image_folder import ImageFolder

    root = make_folder(tmp_path / "images", side=8)
    Image.new("RGB", (8, 8)).save(root / "photo" / f"{RED}.png")
    ImageFolder(name="x", root=str(root)).scan()
    assert [message.isprintable() for message in caplog.messages] == [True]
    assert r"photo/\x1b[31mred.png" in caplog.text


def test_a_folder_that_links_in_a_circle_is_read_once(tmp_path):
    from rayfed.data.readers.image_folder import ImageFolder

    root = make_folder(tmp_path / "images", side=8)
    (root / "photo" / "cat" / "again").symlink_to(root / "photo")
    assert len(ImageFolder(name="x", root=str(root)).scan().keys) == 12


def test_unusual_images_are_read(tmp_path):
    """Palettes, alpha, 16 bits, one bit and animations are legal: they become RGB."""
    from rayfed.data.image_file import read_image

    for mode in ("1", "L", "P", "RGBA", "LA", "I;16", "CMYK"):
        file = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
        Image.new(mode, (9, 7)).save(file)
        assert read_image(file, 8).shape == (8, 8, 3)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "x.webp", save_all=True, append_images=frames[1:], lossless=True)
    assert read_image(tmp_path / "x.webp", 8)[0, 0].tolist() == [255, 0, 0]
