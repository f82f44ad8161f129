import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayfed.data.image_file import decode_image
from rayfed.data.readers.image_folder import ImageFolder
from rayfed.data.source import BadImageError
from rayfed.errors import ConfigError, DataError
from tests.rayfed.data.folders import PACS, make_folder, needs_pacs


def folder(root) -> ImageFolder:
    return ImageFolder(name="toy", root=str(root))


def test_listing_is_sorted_and_complete(tmp_path):
    listing = folder(make_folder(tmp_path)).scan()
    assert listing.domains == ("photo", "sketch")
    assert listing.classes == ("cat", "dog")
    assert list(listing.keys[:4]) == [
        "photo/cat/0.jpg",
        "photo/cat/1.jpg",
        "photo/cat/2.jpg",
        "photo/dog/0.jpg",
    ]
    assert listing.labels.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert listing.domain.tolist() == [0] * 6 + [1] * 6
    assert not listing.test.any()


def test_order_of_classes_comes_before_order_of_files(tmp_path):
    # "a b" sorts after "a/..." as text of a path, because a space is before a slash: labels must not mix.
    listing = folder(make_folder(tmp_path, domains=("d",), classes=("a b", "a", "a-b"))).scan()
    assert listing.classes == ("a", "a b", "a-b")
    assert listing.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_suffixes_in_any_case_nested_and_hidden(tmp_path):
    pixels = Image.new("RGB", (8, 8))
    for key in ("d/c/x.JPG", "d/c/deep/er/y.JPEG", "d/c/z.Png", "d/c/w.bmp", "d/c/v.WebP"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        pixels.save(tmp_path / key)
    for key in (
        "d/c/.hidden.png",
        "d/.cache/c.png",
        ".git/c/c.png",
        "d/c/notes.txt",
        "lists/split/train.txt",
    ):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"not an image")
    listing = folder(tmp_path).scan()
    assert sorted(listing.keys) == ["d/c/deep/er/y.JPEG", "d/c/v.WebP", "d/c/w.bmp", "d/c/x.JPG", "d/c/z.Png"]
    assert listing.domains == ("d",)
    assert all(folder(tmp_path).decode(listing, i, 8).shape == (8, 8, 3) for i in range(5))


def test_links_are_followed_but_not_in_circles(tmp_path):
    real = make_folder(tmp_path / "real")
    root = tmp_path / "root"
    root.mkdir()
    (root / "photo").symlink_to(real / "photo")
    (root / "copy").symlink_to(real / "photo")  # the same folder twice is two domains
    (real / "photo" / "cat" / "loop").symlink_to(real / "photo" / "cat")
    assert len(folder(root).scan().keys) == 12


def test_images_outside_of_class_folders_are_named(tmp_path, caplog):
    root = make_folder(tmp_path)
    Image.new("RGB", (4, 4)).save(root / "photo" / "stray.png")
    with caplog.at_level(logging.WARNING):
        assert len(folder(root).scan().keys) == 12
    assert "photo/stray.png" in caplog.text


def test_fingerprint_follows_every_change(tmp_path):
    root = make_folder(tmp_path)
    source = folder(root)
    seen = [source.fingerprint()]
    assert source.fingerprint() == seen[0]
    image = root / "photo" / "cat" / "0.jpg"
    stat = image.stat()
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    seen.append(source.fingerprint())
    image.rename(image.with_name("new.jpg"))
    seen.append(source.fingerprint())
    (root / "sketch" / "dog" / "0.png").unlink()
    seen.append(source.fingerprint())
    (root / "sketch" / "fox").mkdir()
    seen.append(source.fingerprint())
    assert len(set(seen)) == 5


@pytest.mark.parametrize(
    ("root", "words"),
    [
        (None, ["data.root", "not set", "'toy'"]),
        ("nowhere/at/all", ["data.root", "nowhere/at/all does not exist"]),
        (__file__, ["data.root", "is a file"]),
    ],
)
def test_root_that_is_no_folder(root, words):
    with pytest.raises(ConfigError) as error:
        ImageFolder(name="toy", root=root).scan()
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_classes_without_domains_are_one_domain(tmp_path):
    whole = folder(make_folder(tmp_path))
    one = folder(tmp_path / "photo")
    listing = one.scan()
    assert (listing.domains, listing.classes) == (("all",), ("cat", "dog"))
    assert list(listing.keys[:2]) == ["all/cat/0.jpg", "all/cat/1.jpg"]
    assert np.array_equal(one.decode(listing, 4, 8), whole.decode(whole.scan(), 4, 8))


def test_a_domain_may_be_named_as_the_only_one(tmp_path):
    listing = folder(make_folder(tmp_path, domains=("all", "sketch"))).scan()
    assert listing.domains == ("all", "sketch")
    folder(tmp_path).decode(listing, 0, 8)


def test_folder_of_the_wrong_layout(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    layouts = "expected <root>/<domain>/<class>/<image> or <root>/<class>/<image>"
    with pytest.raises(
        DataError, match=rf"images in .* are in no folder of a class; {layouts}: set data.root"
    ):
        folder(tmp_path).scan()
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=rf"no images in .*; {layouts} \(.jpg"):
        folder(tmp_path).scan()


def test_a_root_one_folder_too_high_is_warned_about_once(tmp_path, caplog):
    make_folder(tmp_path / "above" / "PACS")
    source = folder(tmp_path / "above")
    assert source.scan().classes == ("photo", "sketch")
    source.fingerprint()
    (message,) = caplog.messages
    assert message.endswith(
        f"has the folders cat, dog; if those are the classes, set data.root={tmp_path / 'above' / 'PACS'}"
    )
    (tmp_path / "above" / "PACS" / "photo" / "dog").rename(tmp_path / "above" / "PACS" / "photo" / "cow")
    folder(tmp_path / "above").scan()  # the folders below differ, so they may be anything
    assert len(caplog.messages) == 1


def huge_png() -> bytes:
    """A valid header that promises 60,000 x 60,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def truncated(name: str) -> bytes:
    path = Path(name)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "kind", ["truncated.jpg", "truncated.png", "truncated.webp", "text", "empty", "bomb"]
)
def test_bad_images_name_their_path(tmp_path, kind):
    root = make_folder(tmp_path / "data", domains=("d",), classes=("c",), count=1)
    bad = root / "d" / "c" / "0.png"
    content = {"text": b"hello", "empty": b"", "bomb": huge_png()}
    bad.write_bytes(content[kind] if kind in content else truncated(str(tmp_path / kind)))
    listing = folder(root).scan()
    with pytest.raises(BadImageError, match=r"d/c/0\.png is corrupt") as error:
        folder(root).decode(listing, 0, 16)
    assert "\n" not in str(error.value)


def test_link_to_nothing_is_a_bad_image(tmp_path):
    root = make_folder(tmp_path, domains=("d",), classes=("c",), count=1)
    (root / "d" / "c" / "1.png").symlink_to(root / "gone.png")
    listing = folder(root).scan()
    with pytest.raises(BadImageError, match=r"1\.png does not exist any more"):
        folder(root).decode(listing, 1, 16)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new(mode, (10, 6)).save(path)
    pixels = decode_image(path.read_bytes(), 8)
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8


def test_palette_with_transparency_does_not_warn(tmp_path):
    image = Image.new("P", (4, 4))
    image.save(tmp_path / "x.png", transparency=b"\x00\x80")
    assert decode_image((tmp_path / "x.png").read_bytes(), 4).shape == (4, 4, 3)


def test_large_jpegs_are_decoded_small_but_look_the_same(tmp_path):
    ramp = np.linspace(0, 255, 1024).astype(np.uint8)
    pixels = np.stack(
        [np.tile(ramp, (1024, 1)), np.tile(ramp[:, None], (1, 1024)), np.full((1024, 1024), 90)], -1
    )
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "x.jpg", quality=95)
    whole = Image.open(tmp_path / "x.jpg").resize((32, 32), Image.Resampling.BICUBIC)
    ours = decode_image((tmp_path / "x.jpg").read_bytes(), 32)
    assert np.abs(ours.astype(int) - np.asarray(whole).astype(int)).max() <= 2


@needs_pacs
def test_pacs_as_released():
    source = ImageFolder(name="pacs", root=str(PACS))
    listing = source.scan()
    assert listing.domains == ("art_painting", "cartoon", "photo", "sketch")
    assert listing.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    counts = np.zeros((4, 7), dtype=int)
    np.add.at(counts, (listing.domain, listing.labels), 1)
    assert (
        counts == counts[0, 0]
    ).all() or counts.sum() == 9991  # the sample has equal cells, the release has not
    assert counts.min() > 0
    for index in (0, 500, 900, len(listing.keys) - 1):  # .jpg and .png
        with Image.open(PACS / listing.keys[index]) as image:
            plain = image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
        assert np.array_equal(source.decode(listing, index, 224), np.asarray(plain))


@pytest.mark.parametrize("layout", ["{c}", "d/{c}"])
def test_what_pillow_can_read_is_read_and_what_is_left_out_is_counted(tmp_path, caplog, layout):
    kinds = ("png", "tif", "TIFF", "gif", "ppm", "tga", "jfif", "jp2")
    for c in "ab":
        place = tmp_path / layout.format(c=c)
        place.mkdir(parents=True)
        for number, kind in enumerate(kinds):
            Image.new("RGB", (8, 8), (number * 30, 0, 0)).save(place / f"{number}.{kind}")
        (place / "scan.dcm").write_bytes(b"")
        (place / "notes").write_bytes(b"")
        (place / "Thumbs.db").write_bytes(b"")
    (tmp_path / "README.md").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        listing = folder(tmp_path).scan()
    assert len(listing.keys) == 2 * len(kinds)
    assert all(
        folder(tmp_path).decode(listing, i, 8)[0, 0, 0] in range(i % 8 * 30 - 9, i % 8 * 30 + 9)
        for i in (0, 1)
    )
    assert caplog.text.count("not used: 4 files") == 1
    assert ".dcm, no suffix" in caplog.text
    assert "README" not in caplog.text
