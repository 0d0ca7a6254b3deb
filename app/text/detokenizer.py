"""Detokenizes one choice of one request: tokens in, text out.

Tokens are decoded one by one, so the text and the position where it stops do not depend on how many tokens a step
produced: with or without speculation, alone or in a batch, the client reads the same. No code of a model folder runs
here: a token is a fixed string of bytes, and an incremental UTF-8 decoder holds back incomplete characters.

The text process builds the table of those bytes; no other process ever calls a tokenizer to decode.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from app.text.dialect import NO_DIALECT, Dialect
from app.text.spelling import WORDS, best_algorithm


class TokenTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that the worker needs to know about a tokenizer."""

    pieces: list[bytes]
    """Bytes of each token when it follows another token."""
    trims: bool = False
    """Whether one space at the very start of an answer is dropped, as SentencePiece requires."""
    hidden_token_ids: frozenset[int] = frozenset()
    """Tokens that are not text outside of code and arguments: the stops, and special ones except those that mark tool
    calls and reasoning."""
    stop_token_ids: frozenset[int] = frozenset()
    vocabulary_size: int
    """Number of ids that the model has logits for, padding included."""
    dialect: Dialect = NO_DIALECT
    spelling: str = WORDS
    """Algorithm of `ApproximateTokenizer` that is most like the tokenizer's own."""

    def open_stream(self, *, continued: bool = False) -> "TextStream":
        """Open the text of one choice; `continued`: it continues a prompt and keeps its leading space."""
        return TextStream(self, continued=continued)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Return one token as `logprobs` show it: its text (U+FFFD for part of a character) and its bytes."""
        piece = self.pieces[token] if 0 <= token < len(self.pieces) else b""
        return piece.decode("utf-8", "replace"), piece

    def prompt_text(self, tokens: Iterable[int]) -> str:
        """Return the text of prompt tokens, special tokens and leading spaces included."""
        return b"".join(self.token_text(token)[1] for token in tokens).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, exactly as its stream returns it token by token."""
        stream = self.open_stream()
        return "".join(map(stream.feed, tokens)) + stream.finish()


class TextStream:
    """Detokenizes one stream; see `TokenTable.open_stream`."""

    def __init__(self, table: TokenTable, *, continued: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = table.trims and not continued

    def feed(self, token: int, *, quoted: bool = False) -> str:
        """Return the text that one more token completes. `quoted`: a special token is text here."""
        is_hidden = token in self._table.hidden_token_ids and not quoted
        return "" if is_hidden else self._decode(self._table.token_text(token)[1])

    def may_be_quoted(self, token: int) -> bool:
        """Return whether a token is no text, unless the model quotes it: special, but no stop."""
        return token in self._table.hidden_token_ids and token not in self._table.stop_token_ids

    def finish(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._trim:
            self._trim = False
            return text.removeprefix(" ")
        return text


SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that SentencePiece writes for a space."""
PROBE = "Grüße, 你好 👩‍💻 a ,b  isn't\n\tx"
PROBES = (PROBE, f" {PROBE}", f"\n{PROBE} ")
BATCH_TOKENS = 4096

TokenBytes = Callable[[Sequence[int]], list[bytes]]
"""Function from tokens to the bytes of each."""


def build_token_table(
    tokenizer: Any,
    *,
    hidden: frozenset[int],
    stops: frozenset[int],
    vocabulary_size: int,
    dialect: Dialect = NO_DIALECT,
) -> TokenTable:
    """Build the token table of `tokenizer` (from transformers).

    Byte-level BPE and SentencePiece with byte fallback write bytes into the names of their tokens. With any other
    decoder, a token is the text it adds after another. The first strategy that decodes the probes correctly is used.
    """
    probes = [tokenizer.encode(probe, add_special_tokens=False) for probe in PROBES]
    expected = [str(tokenizer.decode(probe, skip_special_tokens=True)) for probe in probes]
    probed = sorted({token for probe in probes for token in probe})
    strategies: tuple[tuple[TokenBytes, bool], ...] = (
        (partial(_bytes_by_name, tokenizer, _byte_level), False),
        (partial(_bytes_by_name, tokenizer, _byte_fallback), False),
        (partial(_bytes_by_name, tokenizer, _byte_fallback), True),
        (partial(_bytes_by_difference, tokenizer, probes[0][:1]), True),
        (partial(_bytes_by_difference, tokenizer, probes[0][:1]), False),
    )
    base_table = TokenTable(
        pieces=[],
        hidden_token_ids=hidden | stops,
        stop_token_ids=stops,
        vocabulary_size=vocabulary_size,
        dialect=dialect,
    )
    for token_bytes, trims in strategies:
        probed_bytes = dict(zip(probed, token_bytes(probed), strict=True))
        pieces = [probed_bytes.get(token, b"") for token in range(max(probed, default=-1) + 1)]
        table = msgspec.structs.replace(base_table, pieces=pieces, trims=trims)
        if [table.decode(probe) for probe in probes] == expected:
            break
    pieces = token_bytes(range(min(len(tokenizer), vocabulary_size)))
    return msgspec.structs.replace(table, pieces=pieces, spelling=best_algorithm(pieces, tokenizer))


def _bytes_by_name(tokenizer: Any, convert: Callable[[str], bytes], tokens: Sequence[int]) -> list[bytes]:
    """Convert tokens by their names in the vocabulary; an id without a name has no bytes."""
    return [convert(name) for name in _token_names(tokenizer, tokens)]


def _token_names(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    return [name if isinstance(name, str) else "" for name in tokenizer.convert_ids_to_tokens(list(tokens))]


def _byte_level(name: str) -> bytes:
    """Map each letter to the byte it stands for; a name with any other letter (an added token) stands for itself."""
    try:
        return name.translate(_BYTE_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode("utf-8", "replace")


def _byte_fallback(name: str) -> bytes:
    if name.startswith("<0x") and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8", "replace")


def _bytes_by_difference(tokenizer: Any, prefix: list[int], tokens: Sequence[int]) -> list[bytes]:
    """Return what the decoder adds for each token after `prefix`; names of single bytes (`<0x…>`) are read as such."""
    start = str(tokenizer.decode(prefix))
    texts: list[str] = []
    for first in range(0, len(tokens), BATCH_TOKENS):
        texts += tokenizer.batch_decode([[*prefix, token] for token in tokens[first : first + BATCH_TOKENS]])
    return [
        _byte_fallback(name) if name.startswith("<0x") else text.removeprefix(start).encode("utf-8", "replace")
        for name, text in zip(_token_names(tokenizer, tokens), texts, strict=True)
    ]


def _byte_letters() -> dict[int, int]:
    """Return GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Letters below U+0100 that stand for no byte are mapped out of Latin-1, so that encoding fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {0x100 + index: byte for index, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFD)


_BYTE_LETTERS = _byte_letters()
