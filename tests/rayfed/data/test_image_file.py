"""Images become squares as a whole, or by their centre."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageOps
from torchvision.transforms import v2

from rayfed.data.data_config import DataConfig
from rayfed.data.image_file import decode_image
from rayfed.data.load_dataset import load
from rayfed.data.preparation import prepare
from rayfed.data.shards import open_dataset
from rayfed.data.user_data import own_data
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from rayfed.prepare.examination import examine
from tests.rayfed.data.folders import make_folder


def config(root, cache, reader="image_folder", **options):
    return DataConfig(name="toy", reader=reader, root=root and str(root), cache=str(cache), **options)


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def smooth(height, width):
    y, x = np.mgrid[0:height, 0:width]
    return np.stack((255 * x / width, 255 * y / height, 127 + 0 * x), axis=2).astype(np.uint8)


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64)])
def test_a_crop_is_the_shorter_side_then_the_centre(shape):
    pixels = smooth(*shape)
    mine = decode_image(encoded(pixels), 32, "crop").astype(int)
    wanted = v2.CenterCrop(32)(v2.Resize(32, v2.InterpolationMode.BICUBIC)(Image.fromarray(pixels)))
    assert np.abs(mine - np.asarray(wanted).astype(int)).max() <= 2  # the cut is at fractions of a pixel


def test_a_squashed_image_keeps_its_edges_and_a_cropped_one_does_not():
    pixels = smooth(20, 100)
    squashed, cropped = (decode_image(encoded(pixels), 20, how)[:, :, 0] for how in ("squash", "crop"))
    assert squashed.min() < 10
    assert squashed.max() > 245
    assert cropped.min() > 95
    assert cropped.max() < 160


def test_a_very_long_image_needs_no_memory_for_its_length():
    pixels = np.zeros((2, 60_000, 3), dtype=np.uint8)
    assert decode_image(encoded(pixels), 64, "crop").shape == (64, 64, 3)


@pytest.fixture
def wide(tmp_path):
    """A folder of images of 20 x 60 pixels."""
    root = make_folder(tmp_path / "images")
    for path in root.rglob("*.*"):
        Image.fromarray(smooth(20, 60)).save(path)
    return root


def test_the_choice_is_part_of_the_name_of_the_prepared_file(wide, tmp_path):
    name = {"root": wide, "cache": tmp_path / "cache"}
    squash, crop = (load(config(**name, resize=how), 16) for how in ("squash", "crop"))
    assert squash.path != crop.path
    assert squash.digest != crop.digest
    assert load(config(**name), 16).path == squash.path  # as before there was a choice
    assert load(config(**name), 16, resize="crop").path == crop.path
    assert not np.array_equal(open_dataset(squash.path).images[0], open_dataset(crop.path).images[0])


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (("model=resnet10t",), "crop"),
        (("model=vit_mini",), "squash"),
        (("model=resnet10t", "data.resize=squash"), "squash"),
        (("model=vit_mini", "data.resize=crop"), "crop"),
    ],
)
def test_the_default_is_what_the_own_transform_of_the_model_does(wide, tmp_path, model, how):
    from rayfed.config.schema import load_config

    common = (
        "algorithm=fedavg",
        "tuning=head",
        "data=image_folder",
        "model.pretrained=false",
        "model.size=32",
    )
    data = (f"data.root={wide}", f"data.cache={tmp_path}", "data.val=0", "data.test=1")
    setup = prepared(load_config([*common, *data, *model]))
    wanted = load(config(root=wide, cache=tmp_path, resize=how), 32)
    assert np.array_equal(setup.dataset.images[0], wanted.images[0])


def test_the_command_that_prepares_makes_the_file_that_a_run_uses(wide, tmp_path):
    settings = config(root=wide, cache=tmp_path)
    for how in ("crop", "squash"):
        found = examine("image_folder", settings, 16, how)
        assert str(found.shard) == str(load(settings, 16, resize=how).path)


def test_a_reader_without_image_files_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match=r"data.resize: 'crop' has no effect: the reader 'digits_five"):
        load(config(None, tmp_path, "digits_five_mini", resize="crop"), 16)


RAMP = np.linspace(0, 255, 32).astype(np.uint8)[None].repeat(32, 0)


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("PNG", "u2"), ("TIFF", "u2"), ("TIFF", ">u2"), ("JPEG2000", "u2"), ("PPM", "i4")],
)
def test_of_16_bits_the_upper_8_are_kept(kind, dtype):
    data = saved(Image.fromarray((RAMP.astype(np.uint32) * 257).astype(dtype)), kind)
    assert Image.open(io.BytesIO(data)).mode in ("I;16", "I;16B", "I")
    assert np.array_equal(decode_image(data, 32), np.stack([RAMP] * 3, -1))


def test_floats_are_from_0_to_1_and_whole_numbers_of_32_bits_are_refused():
    unit = saved(Image.fromarray(RAMP.astype(np.float32) / 255), "TIFF")
    assert np.array_equal(decode_image(unit, 32)[..., 1], RAMP)
    for values, words in (
        (RAMP.astype(np.float32), "floats outside of 0 to 1"),
        (RAMP.astype(np.float32) / 255 - 0.5, "floats outside of 0 to 1"),
        (np.full((8, 8), np.nan, np.float32), "floats outside of 0 to 1"),
        (RAMP.astype(np.int32) * 257, "whole numbers of 32 bits"),
    ):
        with pytest.raises(ValueError, match=words):
            decode_image(saved(Image.fromarray(values), "TIFF"), 32)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("how", range(1, 9))
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_the_orientation_of_a_camera_is_applied(kind, how, resize):
    exif = Image.Exif()
    exif[0x0112] = how
    lossy = {"quality": 100} if kind in ("JPEG", "WEBP") else {}
    data = saved(Image.fromarray(smooth(48, 32)), kind, exif=exif, **lossy)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    wanted = decode_image(saved(upright, "PNG"), 16, resize)
    assert np.abs(decode_image(data, 16, resize).astype(int) - wanted).max() <= 8  # a JPEG is decoded smaller
    if how in (3, 6, 8):
        plain = decode_image(saved(Image.fromarray(smooth(48, 32)), "PNG"), 16, resize)
        assert np.abs(plain.astype(int) - wanted).max() > 50


def test_damaged_exif_data_is_no_damaged_image():
    data = saved(Image.fromarray(smooth(32, 32)), "PNG", exif=b"Exif\x00\x00nothing of EXIF")
    assert decode_image(data, 32).shape == (32, 32, 3)


def test_alpha_is_dropped_and_not_blended():
    pixels = np.dstack([smooth(16, 16), np.zeros((16, 16), np.uint8)])
    assert np.array_equal(decode_image(saved(Image.fromarray(pixels), "PNG"), 16), smooth(16, 16))


def test_every_route_decodes_with_one_function(tmp_path):
    """A folder, a table of paths, bytes in a table, and the library datasets give the same pixels."""
    datasets = pytest.importorskip("datasets")
    data = saved(Image.fromarray(RAMP.astype(np.uint16) * 257), "PNG")
    paths = [tmp_path / "images" / name / "x.png" for name in "ab"]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    images = datasets.Dataset.from_dict({"image": [data, data], "label": [0, 1]})
    images = images.cast_column("image", datasets.Image())
    images.to_parquet(tmp_path / "images.parquet")
    table = {"image": [str(path) for path in paths], "label": [0, 1]}
    own = (pd.DataFrame(table), pd.DataFrame({**table, "image": [data, data]}), images)
    named = (
        config(tmp_path / "images", tmp_path / "cache"),
        config(
            tmp_path / "images.parquet",
            tmp_path / "cache",
            "hf",
            columns={"image": "image", "label": "label"},
        ),
    )
    found = [open_dataset(prepare(own_data(each), 32, tmp_path)).images for each in own]
    found += [load(each, 32).images for each in named]
    for images in found:
        assert np.array_equal(images[1], np.stack([RAMP] * 3, -1))


def test_another_decoding_is_another_file(tmp_path, monkeypatch):
    from rayfed.data import preparation

    own = own_data({"a": (np.zeros((2, 3), np.float32), np.array([0, 1]))})
    monkeypatch.setattr(preparation, "FORMAT", 1)  # of the version that cut 16 bits off at 255
    before = prepare(own, 8, tmp_path)
    monkeypatch.undo()
    assert prepare(own, 8, tmp_path) != before
