"""Parsing of a request's bytes: cheap with any framing, and never ambiguous.

h11 makes an event of each chunk: 100 KB in one-byte chunks blocked the event loop for a second, even without a key.
h11 also accepts a bare LF as a line end, and folded lines, which a proxy in front may read differently.
"""

import re

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

from app.serving.errors import Rejected
from app.serving.gate import headers_too_large

MAX_HEADER_COUNT = 100
MAX_ADDRESS_BYTES = 8 * 1024
"""Maximum bytes of a request's first line: 16,000 parameters took 12 ms to parse before the key was checked."""
MAX_INCOMPLETE_BYTES = 64 * 1024
"""Maximum bytes of a head, or of one line of a body, that may be buffered without its end."""
FREE_FRAMING_BYTES = 16 * 1024
"""Bytes of chunk sizes, extensions and line ends that any body may have, however small its chunks are."""
PAYLOAD_BY_FRAMING = 8
"""Payload bytes that allow one more byte of framing: chunks of 48 bytes and more are never too small."""
SIZE_LINE = re.compile(rb"\r\n([0-9A-Fa-f]{1,16})(?:;[^\r\n]*|[ \t]*)\r\n")
"""The end of one chunk and the size of the next."""
CONTROLS = bytes({*range(32), 127} - {9})
"""Bytes that no line may contain: h11 takes time quadratic in the number of spaces before such a byte."""
TRAILERS = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n")


class Connection(h11.Connection):
    """h11's connection with `ChunkReader` for chunked bodies; `next_event` also raises `Rejected`."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; all buffered chunks become one event."""
        if self.their_state is h11.IDLE:
            check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(self._reader, ChunkedReader):
            self._reader = ChunkReader()
        return event


def check_head(raw: bytes) -> None:
    """Refuse, before parsing, too many headers and lines that another parser could read differently."""
    end = raw.find(b"\r\n\r\n")
    head = raw.removesuffix(b"\r") if end < 0 else raw[:end]
    if len(head) > MAX_ADDRESS_BYTES and b"\r\n" not in head[:MAX_ADDRESS_BYTES]:
        raise Rejected(414, "The address is longer than 8 KiB.", "address_too_long", close=True)
    if head.count(b"\r\n") > MAX_HEADER_COUNT:
        raise headers_too_large()
    text = head.replace(b"\r\n", b"")
    if len(text.translate(None, CONTROLS)) < len(text) or b"\r\n " in head or b"\r\n\t" in head:
        advice = "Header lines must end with CRLF, contain no other control characters, and not be folded."
        raise Rejected(400, advice, "invalid_http", close=True)


class ChunkReader:
    """An h11 reader for one chunked body; trailers are dropped."""

    def __init__(self) -> None:
        self._prefix = b"\r\n"  # so that the first chunk begins like the others
        self._remaining_bytes = 0
        self._is_last = False
        self._credit_bytes = FREE_FRAMING_BYTES * PAYLOAD_BY_FRAMING

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """Return buffered payload, the end, or None (more is needed); the rest stays in `buffer`. Raises `Rejected`."""
        raw = self._prefix + (buffer.maybe_extract_at_most(len(buffer)) or b"")
        self._prefix = b""
        payload, end = self._parse(raw)
        trailers = TRAILERS.match(raw, end) if self._is_last and not payload else None
        buffer += raw[end if trailers is None else trailers.end() :]
        if payload:
            return h11.Data(data=payload)
        return None if trailers is None else h11.EndOfMessage()

    def _parse(self, raw: bytes) -> tuple[bytes, int]:
        """Return the payload of all chunks at the start of `raw`, and where they end."""
        payload, position, remaining = bytearray(), 0, self._remaining_bytes
        while not self._is_last:
            chunk = raw[position : position + remaining]
            payload += chunk
            position += len(chunk)
            remaining -= len(chunk)
            size_line = None if remaining else SIZE_LINE.match(raw, position)
            if size_line is None and raw.find(b"\n", position + 2) >= 0:
                raise Rejected(400, "A chunk of the body has no valid size or end.", "invalid_http", close=True)
            if size_line is None:
                break
            remaining = int(size_line[1], 16)
            self._credit_bytes += remaining - PAYLOAD_BY_FRAMING * (size_line.end() - position)
            if self._credit_bytes < 0:
                advice = "The chunks of the body are too small: send larger ones, or a Content-Length."
                raise Rejected(400, advice, "invalid_http", close=True)
            position = size_line.end()
            self._is_last = remaining == 0
        self._remaining_bytes = remaining
        return bytes(payload), position
