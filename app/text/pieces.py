"""From token ids to text, one token at a time, without ever showing half a character.

`ByteDetokenizer` serves byte-level BPE and SentencePiece with byte fallback: a token is a fixed string of bytes, and an
incremental UTF-8 decoder holds back what is not yet a character. `WindowDetokenizer` serves every other decoder by
decoding the last few tokens with and without the new one.
"""

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece writes a space as this sign."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 4
MAX_HELD_TOKENS = 16

TokenBytes = Callable[[int], bytes]


class Detokenizer(Protocol):
    """One stream of tokens; the pieces it returns concatenate to the text of all tokens."""

    def add(self, token: int) -> str:
        """The characters that `token` completes, possibly none."""
        ...

    def finish(self) -> str:
        """What is still held back; an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """Concatenates the bytes of the tokens. `trim` drops one space at the very start, as SentencePiece asks for."""

    def __init__(self, token_bytes: TokenBytes, *, trim: bool) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = trim

    def add(self, token: int) -> str:
        return self._trimmed(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if text and self._trim:
            self._trim = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Decodes a short window twice per token; `after` are tokens that stand before the stream and are not told."""

    def __init__(self, decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(after[-CONTEXT_TOKENS:])
        self._told = decode(self._window) if self._window else ""
        self._held = 0

    def add(self, token: int) -> str:
        self._window.append(token)
        self._held += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._held < MAX_HELD_TOKENS:
            return ""
        return self._tell(text)

    def finish(self) -> str:
        return self._tell(self._decode(self._window)) if self._held else ""

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._told = self._decode(self._window)
        self._held = 0
        return new


def token_bytes_of(tokenizer: Any) -> tuple[TokenBytes, bool] | None:
    """How the tokenizer's ids stand for bytes, and whether it trims the first space; None when they do not.

    Only the decoder's own description is trusted, and `agrees` has to confirm it against the real decoder.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    steps = _steps(json.loads(decoder.__getstate__()))
    if steps == ["ByteLevel"]:
        return _cached(tokenizer, _byte_level), False
    if steps in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _cached(tokenizer, _byte_fallback), steps[-1] == "Strip"
    return None


def _steps(description: dict[str, Any]) -> list[str]:
    if description.get("type") == "Sequence":
        return [step for part in description["decoders"] for step in _steps(part)]
    expected: dict[str, dict[str, Any]] = {
        "Replace": {"pattern": {"String": SPACE}, "content": " "},
        "Strip": {"content": " ", "start": 1, "stop": 0},
    }
    kind = str(description.get("type"))
    wanted = expected.get(kind, {})
    return [kind if all(description.get(key) == value for key, value in wanted.items()) else f"other {kind}"]


def _cached(tokenizer: Any, convert: Callable[[str], bytes]) -> TokenBytes:
    known: dict[int, bytes] = {}

    def token_bytes(token: int) -> bytes:
        if token not in known:
            piece = tokenizer.convert_ids_to_tokens(token) if 0 <= token < 1 << 31 else None
            known[token] = convert(piece) if isinstance(piece, str) else b""
        return known[token]

    return token_bytes


def _byte_level(piece: str) -> bytes:
    """Each letter stands for one byte; a piece with any other letter (an added token) stands for itself."""
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in piece):
        return bytes(alphabet[letter] for letter in piece)
    return piece.encode("utf-8", "replace")


def _byte_fallback(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "replace")


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
