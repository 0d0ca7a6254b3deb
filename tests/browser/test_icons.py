"""The icons of app and menu bar: drawn from one source, complete, and told apart at a glance."""

import base64
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from tests.browser.icons import ARGB_PIXELS, FOLDER, MENU_BAR_POINTS, MOST_BYTES, PNG_PIXELS, STATES, draw
from tests.browser.picture import READ_PIXELS

FAINTEST = 0.04
"""Least mean difference in ink (0 to 1) per pixel between the 324-pixel images of two states."""


@pytest.fixture(scope="module")
def desk(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def pixels(desk: Page, picture: bytes) -> Any:
    """Return a PNG's rows of red, green, blue and alpha, as the browser reads them."""
    image = desk.evaluate(READ_PIXELS, base64.b64encode(picture).decode())
    return np.frombuffer(base64.b64decode(image["pixels"]), np.uint8).reshape(image["height"], image["width"], 4)


def elements(container: bytes) -> dict[str, bytes]:
    """Return the elements of an .icns by type, parsed as the format is documented."""
    assert container[:4] == b"icns"
    assert struct.unpack(">I", container[4:8]) == (len(container),)
    by_kind, place = {}, 8
    while place < len(container):
        kind, length = container[place : place + 4].decode(), struct.unpack(">I", container[place + 4 : place + 8])[0]
        by_kind[kind] = container[place + 8 : place + length]
        place += length
    assert place == len(container)
    return by_kind


def unpacked(content: bytes) -> bytes:
    """Unpack the channels of an ARGB element; return them one after another."""
    out, place = bytearray(), 0
    while place < len(content):
        lead = content[place]
        if lead < 128:
            out += content[place + 1 : place + 2 + lead]
            place += lead + 2
        else:
            out += content[place + 1 : place + 2] * (lead - 125)
            place += 2
    return bytes(out)


def test_the_app_icon_holds_every_size_that_macos_asks_for_in_the_form_that_it_reads(desk: Page) -> None:
    images = elements((FOLDER / "paceline.icns").read_bytes())
    assert set(images) == {*PNG_PIXELS, *ARGB_PIXELS}
    for kind, size in PNG_PIXELS.items():
        assert pixels(desk, images[kind]).shape == (size, size, 4), kind
    for kind, size in ARGB_PIXELS.items():
        assert images[kind].startswith(b"ARGB")
        assert len(unpacked(images[kind][4:])) == 4 * size * size, kind
    alpha, red, green, blue = np.frombuffer(unpacked(images["ic05"][4:]), np.uint8).reshape(4, 32, 32)
    assert (np.stack([red, green, blue, alpha], axis=2) == pixels(desk, images["ic11"])).all()


def test_the_images_of_the_menu_bar_are_black_ink_of_both_sizes(desk: Page) -> None:
    for state, (suffix, scale) in itertools.product(STATES, (("", 1), ("@2x", 2))):
        image = pixels(desk, (FOLDER / f"{state}{suffix}.png").read_bytes())
        assert image.shape[:2] == (MENU_BAR_POINTS * scale, MENU_BAR_POINTS * scale)
        assert (image[:, :, :3] == 0).all()
        assert image[:, :, 3].max() == 255


def test_no_two_states_look_alike(desk: Page) -> None:
    ink = {state: pixels(desk, (FOLDER / f"{state}.png").read_bytes())[:, :, 3] / 255 for state in STATES}
    for first, other in itertools.combinations(STATES, 2):
        assert abs(ink[first] - ink[other]).mean() > FAINTEST, (first, other)


def test_what_is_committed_is_what_the_source_draws_and_small(desk: Page) -> None:
    files = draw(desk)
    assert {file.name for file in FOLDER.iterdir()} == {*files, "icons.svg"}
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES
    for name in (file for file in files if file.endswith(".png")):
        there, drawn = (pixels(desk, picture).astype(int) for picture in ((FOLDER / name).read_bytes(), files[name]))
        assert abs(there - drawn).mean() < 1, name
