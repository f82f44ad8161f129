"""Decodes image files that may be corrupt or hostile, and makes them square."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rayfed.data.data_config import Resize
from rayfed.data.listing import BadImageError
from rayfed.errors import DataError, one_line

MAX_PIXELS = 89_478_485
"""Limit for the pixels of an image, as in Pillow: a file of a few kB may decode to gigabytes."""

MAX_FILE_BYTES = 500_000_000
"""Limit for the size of an image file."""

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `open_bounded` raises an error instead


def read_image(path: Path, size: int, resize: Resize = "squash") -> NDArray[np.uint8]:
    """Read an image file as RGB pixels, uint8, shape (size, size, 3); arguments as of `decode_image`.

    Raises:
        BadImageError: The file is missing or corrupt; `data.on_bad_image=skip` leaves it out.
        DataError: The file system reports an error; such an image is never left out.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadImageError(f"image {path} is not a file; remove it, or set data.on_bad_image=skip")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadImageError(f"image {path} is larger than {MAX_FILE_BYTES // 1_000_000} MB; replace it")
        data = path.read_bytes()
    except FileNotFoundError as err:
        raise BadImageError(f"image {path} does not exist any more, or is a broken link") from err
    except OSError as err:
        # Not skipped: the image may be fine, and a temporary error of the disk must not change the data set.
        raise DataError(
            f"image {path} cannot be read ({err.strerror}); check the disk and the permissions"
        ) from err
    try:
        return decode_image(data, size, resize)
    except MemoryError:
        raise
    except Exception as err:  # Pillow's decoders raise almost anything on corrupt input
        raise corrupt(str(path), err) from err


def corrupt(name: str, err: Exception) -> BadImageError:
    """The error for an image that cannot be decoded.

    Args:
        name: The image, with the file that it is in.
        err: What the decoder raised. Pillow's words for an unknown format are the address of an object.
    """
    why = "no image format that is known" if isinstance(err, UnidentifiedImageError) else one_line(err)
    return BadImageError(f"image {name} is corrupt ({why}); replace it, or set data.on_bad_image=skip")


def decode_image(data: bytes, size: int, resize: Resize = "squash") -> NDArray[np.uint8]:
    """Decode an image and resize it to a square, bicubic with antialiasing.

    Args:
        data: The content of the file.
        size: Side of the result in pixels.
        resize: `squash`: the whole image, whose proportions change; `crop`: the largest centred square of it,
            as if the shorter side were resized and the centre cut out.

    Returns:
        RGB, shape (size, size, 3), as of `to_rgb`; of several frames the first one.

    Raises:
        ValueError: The values of the image have no colours (`to_rgb`), or it has too many pixels.
    """
    with open_bounded(io.BytesIO(data)) as image:
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which is faster. At least twice the target
        # size is kept, so that the result hardly differs from resizing the whole image.
        image.draft("RGB", (2 * size, 2 * size))
        image.load()
        return to_square(image, size, resize)


def to_square(image: Image.Image, size: int, resize: Resize = "squash") -> NDArray[np.uint8]:
    """An image as of `decode_image`. Args: image: it may be of any mode and size. size, resize: as there."""
    rgb = to_rgb(image)
    if rgb.size == (size, size):
        return np.asarray(rgb)
    return np.asarray(rgb.resize((size, size), Image.Resampling.BICUBIC, _part(rgb.size, resize)))


ORIENTATION = 0x0112
"""Number of the EXIF tag that says how a camera was held."""

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn that brings an image upright, by the value of that tag."""

WIDE = ("PNG", "PPM", "JPEG2000")
"""Formats whose images in mode `I` are of 16 bits."""


def to_rgb(image: Image.Image) -> Image.Image:
    """The colours of a decoded image, upright, in mode RGB; every image file goes through this.

    The EXIF orientation is applied. Of 16 bits the upper 8 are kept. Alpha and the transparent colour of a
    palette are dropped, not blended. Floats are from 0 to 1.

    Raises:
        ValueError: Floats are outside of 0 to 1, or values are whole numbers of 32 bits, whose range no file
            says.
    """
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in WIDE):
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255)
        plain = Image.fromarray(grey.astype(np.uint8))
    elif mode == "I":
        raise ValueError("whole numbers of 32 bits, whose range is not known; save it with 8 or 16 bits")
    elif mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # also false for NaN
            raise ValueError("floats outside of 0 to 1; scale them to that, or save it with 8 or 16 bits")
        plain = Image.fromarray(np.rint(values * 255).astype(np.uint8))
    else:
        plain = image.convert("RGBA") if mode == "P" and "transparency" in image.info else image
    rgb = plain if plain.mode == "RGB" else plain.convert("RGB")  # converting RGB to RGB would copy
    turn = TURNS.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation of an image; 1, which is upright, where it has none, or damaged EXIF data."""
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # the pixels are fine, and Pillow's parser raises almost anything
        return 1
    return found if isinstance(found, int) else 1


def _part(whole: tuple[int, int], resize: Resize) -> tuple[float, float, float, float] | None:
    """Left, upper, right and lower edge of the part of an image that is used; None: all of it.

    Args:
        whole: Width and height of the image.
        resize: As of `decode_image`.
    """
    side = min(whole)
    if resize == "squash" or side == max(whole):
        return None
    left, top = ((length - side) / 2 for length in whole)
    return left, top, left + side, top + side


def open_bounded(file: Path | io.BytesIO) -> Image.Image:
    """Open an image without decoding it.

    Raises:
        ValueError: The image has more than MAX_PIXELS pixels.
    """
    image = Image.open(file)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
    return image
