"""Tokenizes a text by the bytes of each token alone: no code of a model folder runs.

The tokens are the model's own for nearly every published tokenizer (byte-pair encoding numbers its tokens in the order
of its merges). Where they are not, only drafts suffer: which tokens are allowed never depends on them.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

WORDS, MERGES, LONGEST = "words", "merges", "longest"
WAYS = (WORDS, MERGES, LONGEST)
PROBES = (
    '{"name": "get_weather", "arguments": {"city_name": "Paris", "days": 3, "is_metric": true}}',
    '<tool_call>\n{"type": "object", "items": [{"id": null}, {"postal-code": "x"}]}\n</tool_call>',
)
_WORD = re.compile(r"(?:[^\r\n\w]|_)?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|.", re.DOTALL)
"""Words into which GPT-4 and later models split a text before they merge."""
_MARK = re.compile(r"(<[^<>\s]{1,64}>)")
"""Mark that may be a token of its own."""


class Speller:
    """Tokenizer by `pieces`, the bytes of each token. `way`: merges within words, merges, or longest token first."""

    def __init__(self, pieces: Sequence[bytes], way: str = WORDS) -> None:
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._ids), default=1)
        self._sorted = sorted(self._ids)
        self.way = way

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of `text`. Bytes that no token spells are left out; `LONGEST` stops at them."""
        if self.way == LONGEST:
            return self._longest_first(text)
        return [token for word in self._words(text) for token in self._merged(word)]

    def beginnings(self, text: bytes) -> list[int]:
        """Return the tokens that `text` may begin with, if anything may follow it."""
        inside = [text[:size] for size in range(1, min(self._longest, len(text) - 1) + 1)]
        later = map(self._sorted.__getitem__, range(bisect_left(self._sorted, text), len(self._sorted)))
        beyond = takewhile(lambda piece: piece.startswith(text), later)
        return [self._ids[piece] for piece in (*inside, *beyond) if piece in self._ids]

    def _words(self, text: bytes) -> Iterator[bytes]:
        for part in _MARK.split(text.decode("utf-8", "surrogateescape")):
            is_whole = self.way == MERGES or part.encode("utf-8", "surrogateescape") in self._ids
            for word in [part] if is_whole else _WORD.findall(part):
                yield word.encode("utf-8", "surrogateescape")

    def _merged(self, word: bytes) -> list[int]:
        if word in self._ids:
            return [self._ids[word]]
        parts = [word[place : place + 1] for place in range(len(word))]
        while len(parts) > 1:
            ranks = [self._ids.get(left + right) for left, right in pairwise(parts)]
            known = [rank for rank in ranks if rank is not None]
            if not known:
                break
            place = ranks.index(min(known))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [self._ids[part] for part in parts if part in self._ids]

    def _longest_first(self, text: bytes) -> list[int]:
        tokens, place = [], 0
        while place < len(text):
            size = next((n for n in range(self._longest, 0, -1) if text[place : place + n] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[text[place : place + size]])
            place += size
        return tokens


def best_way(pieces: Sequence[bytes], tokenizer: Any) -> str:
    """Return the way that spells the probes most like `tokenizer` (from transformers)."""
    speller, right = Speller(pieces), dict.fromkeys(WAYS, 0)
    for probe in PROBES:
        wanted = tokenizer.encode(probe, add_special_tokens=False)
        for way in WAYS:
            speller.way = way
            spelled = speller(probe.encode())
            right[way] += sum(token in wanted for token in spelled) - len(spelled)
    return max(WAYS, key=right.__getitem__)
