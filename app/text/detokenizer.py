"""One choice of one request as text: tokens in, text out.

Tokens are looked at one by one, so the text and the place where it stops do not depend on how many tokens a step
brought: speculation on or off, alone or in a batch, the client reads the same. Nothing here runs anything of a model
folder: a token is a fixed string of bytes, and an incremental UTF-8 decoder holds back what is not yet a character.

The text process makes the table of those bytes, so that nobody but it ever asks a tokenizer to decode.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from app.text.dialect import NO_DIALECT, Dialect
from app.text.spelling import WORDS, best_way


class TokenTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that the worker knows of a tokenizer."""

    pieces: list[bytes]
    """The bytes of each token, as it stands behind another one."""
    trims: bool = False
    """Whether an answer loses one space at its very start, as SentencePiece asks for."""
    hidden_token_ids: frozenset[int] = frozenset()
    """Tokens that are no text: special ones, except those that mark tool calls and reasoning, and the stops."""
    stop_token_ids: frozenset[int] = frozenset()
    vocabulary_size: int
    """How many ids the model has logits for, padding included."""
    dialect: Dialect = NO_DIALECT
    spelling: str = WORDS
    """Which way of `Speller` is most like the tokenizer's own."""

    def open_stream(self, *, continued: bool = False) -> "TextStream":
        """The text of one choice; `continued`: it goes on behind a prompt and keeps its leading space."""
        return TextStream(self, continued=continued)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token alone as `logprobs` show it: text (U+FFFD for part of a character) and its bytes."""
        found = self.pieces[token] if 0 <= token < len(self.pieces) else b""
        return found.decode("utf-8", "replace"), found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer; exactly what its stream tells piece by piece."""
        stream = self.open_stream()
        return "".join(map(stream.feed, tokens)) + stream.finish()


class TextStream:
    """Detokenizes one stream; see `TokenTable.open_stream`."""

    def __init__(self, table: TokenTable, *, continued: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = table.trims and not continued

    def feed(self, token: int) -> str:
        """The text that one more token makes certain."""
        return "" if token in self._table.hidden_token_ids else self._decode(self._table.token_text(token)[1])

    def finish(self) -> str:
        """The rest: an incomplete character becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._trim:
            self._trim = False
            return text.removeprefix(" ")
        return text


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece writes a space as this sign."""
PROBE = "Grüße, 你好 👩‍💻 a ,b  isn't\n\tx"
PROBES = (PROBE, f" {PROBE}", f"\n{PROBE} ")
BATCH_TOKENS = 4096

Spell = Callable[[Sequence[int]], list[bytes]]
"""The bytes of these tokens."""


def token_table(
    tokenizer: Any,
    *,
    hidden: frozenset[int],
    stops: frozenset[int],
    vocabulary_size: int,
    dialect: Dialect = NO_DIALECT,
) -> TokenTable:
    """What the worker needs of `tokenizer`, one of transformers.

    Byte-level BPE and SentencePiece with byte fallback write bytes into the names of their tokens. Every other decoder
    is asked what each token adds behind another one. The first way that spells the probes as the tokenizer does counts.
    """
    probes = [tokenizer.encode(probe, add_special_tokens=False) for probe in PROBES]
    expected = [str(tokenizer.decode(probe, skip_special_tokens=True)) for probe in probes]
    probed = sorted({token for probe in probes for token in probe})
    ways: tuple[tuple[Spell, bool], ...] = (
        (partial(_named, tokenizer, _byte_level), False),
        (partial(_named, tokenizer, _byte_fallback), False),
        (partial(_named, tokenizer, _byte_fallback), True),
        (partial(_differences, tokenizer, probes[0][:1]), True),
        (partial(_differences, tokenizer, probes[0][:1]), False),
    )
    empty = TokenTable(
        pieces=[],
        hidden_token_ids=hidden | stops,
        stop_token_ids=stops,
        vocabulary_size=vocabulary_size,
        dialect=dialect,
    )
    for spell, trims in ways:
        spelled = dict(zip(probed, spell(probed), strict=True))
        pieces = [spelled.get(token, b"") for token in range(max(probed, default=-1) + 1)]
        tried = msgspec.structs.replace(empty, pieces=pieces, trims=trims)
        if [tried.decode(probe) for probe in probes] == expected:
            break
    pieces = spell(range(min(len(tokenizer), vocabulary_size)))
    return msgspec.structs.replace(tried, pieces=pieces, spelling=best_way(pieces, tokenizer))


def _named(tokenizer: Any, convert: Callable[[str], bytes], tokens: Sequence[int]) -> list[bytes]:
    """From the names that the vocabulary gives them; an id without a name is no text."""
    return [convert(name) for name in _names(tokenizer, tokens)]


def _names(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    return [name if isinstance(name, str) else "" for name in tokenizer.convert_ids_to_tokens(list(tokens))]


def _byte_level(name: str) -> bytes:
    """Each letter stands for one byte; a name with any other letter (an added token) stands for itself."""
    try:
        return name.translate(_BYTE_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode("utf-8", "replace")


def _byte_fallback(name: str) -> bytes:
    if name.startswith("<0x") and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE, " ").encode("utf-8", "replace")


def _differences(tokenizer: Any, before: list[int], tokens: Sequence[int]) -> list[bytes]:
    """What the decoder adds for each token behind those `before` it; bytes that are written as such stay."""
    start = str(tokenizer.decode(before))
    texts: list[str] = []
    for first in range(0, len(tokens), BATCH_TOKENS):
        texts += tokenizer.batch_decode([[*before, token] for token in tokens[first : first + BATCH_TOKENS]])
    return [
        _byte_fallback(name) if name.startswith("<0x") else text.removeprefix(start).encode("utf-8", "replace")
        for name, text in zip(_names(tokenizer, tokens), texts, strict=True)
    ]


def _byte_letters() -> dict[int, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Letters below that stand for none lead out of Latin-1, so that encoding fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {0x100 + index: byte for index, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFD)


_BYTE_LETTERS = _byte_letters()
