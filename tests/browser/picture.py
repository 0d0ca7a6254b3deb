"""Screenshots as small PNG files: 256 colours are enough for pages and take a third of the bytes."""

import base64
import struct
import zlib
from typing import Any

import numpy as np
from playwright.sync_api import Page

COLOURS = 256
FREQUENT = 160
"""Number of palette entries for the most frequent colours; the rest are colours that differ in their `KEPT_BITS`."""
KEPT_BITS = 0xF0
READ_PIXELS = """async (encoded) => {
  const bytes = Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const { data } = pen.getImageData(0, 0, picture.width, picture.height);
  let text = "";
  for (let at = 0; at < data.length; at += 32768) text += String.fromCharCode(...data.subarray(at, at + 32768));
  return { width: picture.width, height: picture.height, pixels: btoa(text) };
}"""


def smaller(picture: bytes, desk: Page) -> bytes:
    """Return the same picture as a PNG with a palette; `desk` is an empty page whose browser reads the pixels."""
    image = desk.evaluate(READ_PIXELS, base64.b64encode(picture).decode())
    pixels = np.frombuffer(base64.b64decode(image["pixels"]), np.uint8).reshape(image["height"], image["width"], 4)
    return encode(*with_palette(pixels[:, :, :3]))


def with_palette(pixels: Any) -> tuple[Any, Any]:
    """Return each pixel's palette index, and the palette: the most frequent colours, and one of each other kind."""
    flat = pixels.reshape(-1, 3).astype(np.uint32)
    codes = flat[:, 0] << 16 | flat[:, 1] << 8 | flat[:, 2]
    colours, which, counts = np.unique(codes, return_inverse=True, return_counts=True)
    if len(colours) > COLOURS:
        order = np.argsort(-counts)
        channels = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.int32)
        _, first = np.unique(channels[order] & KEPT_BITS, axis=0, return_index=True)
        ranked = np.concatenate([order[:FREQUENT], order[np.sort(first)]])
        kept = ranked[np.sort(np.unique(ranked, return_index=True)[1])][:COLOURS]
        distances = ((channels[:, None, :] - channels[kept][None, :, :]) ** 2).sum(axis=2)
        which, colours = distances.argmin(axis=1)[which], colours[kept]
    palette = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8)
    return which.reshape(pixels.shape[:2]).astype(np.uint8), palette


def encode(which: Any, palette: Any) -> bytes:
    """Return a PNG file from the pixels' palette indices and the palette."""
    height, width = which.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), which], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
