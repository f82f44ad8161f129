"""Images become squares as a whole, or by their centre."""

import io

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from rayfed.data import load
from rayfed.data.data_config import DataConfig
from rayfed.data.formats.image_file import decode_image
from rayfed.data.shards import open_dataset
from rayfed.engine.setup import prepare as prepare_run
from rayfed.errors import ConfigError
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
    setup = prepare_run(load_config([*common, *data, *model]))
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
