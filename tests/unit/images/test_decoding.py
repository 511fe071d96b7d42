"""Files of images as Pillow and transformers' `load_image` see them, or a clear error."""

from __future__ import annotations

import base64
import resource
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers.image_utils import load_image

from prefillcli.images import decoding
from prefillcli.images.decoding import check_image, open_image
from prefillcli.images.image import ImageError
from tests.unit.images.files import animated, chunk, images, noise, others, png, riff, saved

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about odd metadata
IMAGES, OTHERS = images(), others()
MOST = 1_000_000


def standard(data: bytes) -> Image.Image | None:
    """What a user of transformers gets, None for an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load_image(base64.b64encode(data).decode())  # type: ignore[no-any-return]
        except Exception:
            return None


def ours(data: bytes) -> Image.Image | None:
    """What a row gets; what is checked can be opened."""
    try:
        found = check_image(data, max_pixels=MOST)
    except ImageError:
        return None
    opened = open_image(data)
    assert (found.width, found.height) == opened.size
    return opened


def require_same(data: bytes) -> None:
    expected, found = standard(data), ours(data)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_seen_as_by_users_of_transformers(name: str) -> None:
    expected = standard(IMAGES[name])
    assert expected is not None
    require_same(IMAGES[name])
    opened = open_image(IMAGES[name])
    assert opened.info == {}
    assert not opened.getexif()


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match=r"^(no PNG, JPEG, WebP or GIF file|a file without content)$"):
        check_image(OTHERS[name], max_pixels=MOST)


CUT = (
    *("png", "jpeg", "progressive jpeg", "cmyk jpeg", "webp", "webp without loss", "gif"),
    *("animated gif", "animated png"),
)


@pytest.mark.parametrize("name", CUT)
def test_a_file_that_is_cut_off_anywhere_is_read_as_by_transformers(name: str) -> None:
    data = IMAGES[name]
    for end in {*range(0, len(data), 1 + len(data) // 400), *range(len(data) - 60, len(data))}:
        require_same(data[:end])
    for end in (len(data) // 4, len(data) // 2):
        assert ours(data[:end]) is None or name.startswith("animated")  # of these the first frame may be whole


@pytest.mark.parametrize("name", ["png", "jpeg", "progressive jpeg", "webp", "gif", "palette png", "jpeg turned 6"])
def test_a_file_with_wrong_bytes_is_read_as_by_transformers_or_refused(name: str) -> None:
    draw = np.random.default_rng(len(name))
    for _ in range(150):
        data = bytearray(IMAGES[name])
        for place in draw.integers(0, len(data) if draw.random() < 0.5 else 60, 3):
            data[place] = draw.integers(256)
        found, expected = ours(bytes(data)), standard(bytes(data))
        if found is not None and expected is not None:
            assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_other_formats_are_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("another plugin was asked")

    Image.init()
    monkeypatch.setattr(Image, "OPEN", dict.fromkeys(Image.OPEN, (fail, fail)))
    for data in OTHERS.values():
        with pytest.raises(ImageError):
            check_image(data, max_pixels=MOST)
    assert check_image(IMAGES["webp"], max_pixels=MOST).width == 40


def _gif(width: int, height: int, *, frame: tuple[int, int] | None = None) -> bytes:
    wide, high = frame or (width, height)
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, wide, high, 0) + b"\x02\x02\x44\x01\x00;"


def _jpeg(width: int, height: int) -> bytes:
    data = bytearray(saved(noise(16, 16), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


BOMBS = {
    "png": png(100_000, 100_000, b""),
    "png of zeros": png(30_000, 30_000, bytes(3_000_000)),
    "jpeg": _jpeg(65_000, 65_000),
    "gif": _gif(65_535, 65_535),
    "gif whose frame is larger than its screen": _gif(1, 1, frame=(65_535, 65_535)),
    "gif whose frame is larger by less": _gif(1, 1, frame=(9_000, 9_000)),
    "webp": riff((b"VP8X", b"\0" * 4 + (9_999).to_bytes(3, "little") * 2), (b"VP8 ", b"")),
    "webp of one frame": riff((b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383) + bytes(20))),
    "webp without loss": riff((b"VP8L", b"\x2f" + struct.pack("<I", 0x3FFF | 0x3FFF << 14) + bytes(20))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_image_with_too_many_pixels_is_refused_by_its_header(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match="pixels"):
        check_image(BOMBS[name], max_pixels=50_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB: none of them is decoded


def test_the_limit_of_pixels_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's would be a warning, or an error at twice as many, for the whole process."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, of_pillow in (("png", 10), ("jpeg", 10), ("webp", 700), ("gif", 10)):
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", of_pillow)  # a WebP file may have twice as many
            assert check_image(IMAGES[name], max_pixels=1320).height == 33
            assert open_image(IMAGES[name]).size == (40, 33)
            with pytest.raises(ImageError, match=r"^40 x 33 pixels; max_image_pixels is 1,319$"):
                check_image(IMAGES[name], max_pixels=1319)


def test_what_a_file_inflates_to_is_bounded() -> None:
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000), 1))
    with pytest.raises(ImageError, match="Decompressed data too large"):
        check_image(png(1, 1, bytes(4), between=text), max_pixels=MOST)


def test_the_key_is_the_content() -> None:
    first, again, other = (check_image(IMAGES[name], max_pixels=MOST) for name in ("png", "png", "webp"))
    assert first == again
    assert first.key != other.key
    assert len({check_image(data, max_pixels=MOST).key for data in IMAGES.values()}) == len({*IMAGES.values()})


def test_an_image_of_many_rows_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(noise(30, 20, seed=77), "PNG")
    first = check_image(data, max_pixels=600)
    monkeypatch.setattr(decoding, "_decoded", None)
    assert check_image(bytes(bytearray(data)), max_pixels=600) == first
    with pytest.raises(ImageError, match=r"^30 x 20 pixels; max_image_pixels is 599$"):
        check_image(data, max_pixels=599)


def test_files_that_are_cut_off_stay_errors_where_a_setting_of_pillow_is_at_its_default() -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    for name in ("png", "jpeg", "webp", "gif"):
        with pytest.raises(ImageError, match="cannot be decoded"):
            check_image(IMAGES[name][:-200], max_pixels=MOST)


def test_odd_metadata_prints_nothing_and_pillow_is_imported_where_it_is_needed() -> None:
    code = (
        "import sys; from prefillcli.images import decoding, reading, fetching, numbers\n"
        "assert 'PIL' not in sys.modules\n"
        "data = sys.stdin.buffer.read(); decoding.check_image(data, max_pixels=1000); decoding.open_image(data)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for name in ("jpeg with broken exif", "palette png with alpha"):
        done = subprocess.run([sys.executable, "-c", code], input=IMAGES[name], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_the_first_frame_of_an_animation_is_the_image() -> None:
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        assert np.array_equal(np.asarray(open_image(animated(kind, **options))), np.asarray(noise(21, 13, seed=0)))
