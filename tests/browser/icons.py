"""`make icons`: draw `app/desktop/icons/icons.svg` as the icons of app and menu bar, and as `docs/menubar.png`."""

import base64
import struct
import sys
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import CHROMIUM, MISSING
from tests.browser.picture import READ_PIXELS

FOLDER = Path(__file__).resolve().parents[2] / "app" / "desktop" / "icons"
SHEET_FILE, SHEET = FOLDER.parents[2] / "docs" / "menubar.png", {"width": 784, "height": 92}
STATES = ("stopped", "starting", "ready", "busy", "trouble")
MENU_BAR_POINTS = 18
WINDOW_PIXELS = 256
PNG_PIXELS = {
    "ic07": 128,
    "ic08": 256,
    "ic09": 512,
    "ic10": 1024,
    "ic11": 32,
    "ic12": 64,
    "ic13": 256,
    "ic14": 512,
}
"""Width in pixels of each PNG in an .icns, by type; ic10 to ic14 are 512, 16, 32, 128 and 256 points at 2x."""
ARGB_PIXELS = {"ic04": 16, "ic05": 32}
"""Width in pixels of the images of 16 and 32 points at 1x, which macOS reads as packed ARGB channels, not as PNG."""
MOST_BYTES = 300_000
HIDDEN = '<div style="position:absolute;width:0;height:0;overflow:hidden">{}</div>'
"""Wrapper that hides the source without `display: none`, which would disable its gradients too."""
LONGEST_LITERAL, LONGEST_RUN, SHORTEST_RUN = 128, 130, 3


def drawn(page: Page, symbol: str, pixels: int) -> bytes:
    """Return one symbol of the source as a square PNG, `pixels` wide, with a transparent background."""
    source = (FOLDER / "icons.svg").read_text(encoding="utf-8")
    picture = f'<svg width="{pixels}" height="{pixels}" style="display:block"><use href="#{symbol}"/></svg>'
    page.set_viewport_size({"width": pixels, "height": pixels})
    page.set_content(f'<body style="margin:0;background:none">{picture}{HIDDEN.format(source)}</body>')
    return page.screenshot(omit_background=True)


def argb(page: Page, picture: bytes) -> bytes:
    """Return a PNG's four channels as an .icns stores them, each packed."""
    image = page.evaluate(READ_PIXELS, base64.b64encode(picture).decode())
    red, green, blue, alpha = np.frombuffer(base64.b64decode(image["pixels"]), np.uint8).reshape(-1, 4).T
    return b"ARGB" + b"".join(packed(channel.tobytes()) for channel in (alpha, red, green, blue))


def packed(channel: bytes) -> bytes:
    """Pack a channel: n - 1 and n literal bytes (1 to 128), or n + 125 and a byte to repeat n times (3 to 130)."""
    out, literal, place = bytearray(), bytearray(), 0

    def flush() -> None:
        for begin in range(0, len(literal), LONGEST_LITERAL):
            part = literal[begin : begin + LONGEST_LITERAL]
            out.extend((len(part) - 1, *part))
        literal.clear()

    while place < len(channel):
        value = channel[place]
        length = 1
        while length < LONGEST_RUN and channel[place + length : place + length + 1] == bytes([value]):
            length += 1
        if length >= SHORTEST_RUN:
            flush()
            out.extend((length + 125, value))
        else:
            literal.extend(channel[place : place + length])
        place += length
    flush()
    return bytes(out)


def icns(images: dict[str, bytes]) -> bytes:
    """Return the container: it and each image begin with a four-letter type and a length that counts this header."""
    body = b"".join(_element(kind, image) for kind, image in images.items())
    return _element("icns", body)


def _element(kind: str, content: bytes) -> bytes:
    return kind.encode() + struct.pack(">I", len(content) + 8) + content


def draw(page: Page) -> dict[str, bytes]:
    """Return the content of each generated file in the source's folder, by file name."""
    sizes = {pixels: drawn(page, "app", pixels) for pixels in {*PNG_PIXELS.values(), *ARGB_PIXELS.values()}}
    images = {kind: argb(page, sizes[pixels]) for kind, pixels in ARGB_PIXELS.items()}
    images |= {kind: sizes[pixels] for kind, pixels in PNG_PIXELS.items()}
    files = {"paceline.icns": icns(images), "paceline.png": sizes[WINDOW_PIXELS]}
    for state in STATES:
        files[f"{state}.png"] = drawn(page, state, MENU_BAR_POINTS)
        files[f"{state}@2x.png"] = drawn(page, state, 2 * MENU_BAR_POINTS)
    return files


def sheet(page: Page) -> bytes:
    """Return a PNG for the documents: the images of the menu bar with their states, on a light and a dark bar."""
    source = (FOLDER / "icons.svg").read_text(encoding="utf-8")
    bars = []
    for ground, ink in (("#ececec", "none"), ("#262626", "invert(1)")):
        images = "".join(
            f'<figure><svg width="36" height="36"><use href="#{state}"/></svg><figcaption>{state}</figcaption></figure>'
            for state in STATES
        )
        bars.append(f'<div style="background:{ground}"><section style="filter:{ink}">{images}</section></div>')
    style = (
        "body{margin:0;font:13px sans-serif;display:grid;grid-template-columns:1fr 1fr}"
        "section{display:flex;padding:14px 8px}figure{margin:0;width:74px;text-align:center}svg{display:inline}"
    )
    page.set_viewport_size(SHEET)
    page.set_content(f"<style>{style}</style>{''.join(bars)}{HIDDEN.format(source)}")
    return page.screenshot()


def main() -> None:
    if not CHROMIUM.exists():
        sys.exit(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        files = draw(browser.new_page())
        SHEET_FILE.write_bytes(sheet(browser.new_page(device_scale_factor=2)))
        browser.close()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    size = sum(len(content) for content in files.values())
    print(f"{len(files)} files, {size / 1e3:.0f} kB, in {FOLDER}")
    assert size < MOST_BYTES


if __name__ == "__main__":
    main()
