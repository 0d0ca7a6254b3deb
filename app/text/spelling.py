"""Tokenizes a text by the bytes of each token alone: no code of a model folder runs.

The tokens are the model's own for nearly every published tokenizer (byte-pair encoding numbers its tokens in the order
of its merges). Where they are not, only drafting suffers: which tokens are allowed never depends on them.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

WORDS, MERGES, LONGEST = "words", "merges", "longest"
ALGORITHMS = (WORDS, MERGES, LONGEST)
PROBES = (
    '{"name": "get_weather", "arguments": {"city_name": "Paris", "days": 3, "is_metric": true}}',
    '<tool_call>\n{"type": "object", "items": [{"id": null}, {"postal-code": "x"}]}\n</tool_call>',
)
_WORD = re.compile(r"(?:[^\r\n\w]|_)?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|.", re.DOTALL)
"""Pattern of the words into which tokenizers of GPT-4 and later models split a text before they merge."""
_MARK = re.compile(r"(<[^<>\s]{1,64}>)")
"""Marker that may be a token of its own."""


class ApproximateTokenizer:
    """Tokenizer by the bytes of each token (`pieces`). `algorithm`: merge in words, merge all, or longest match."""

    def __init__(self, pieces: Sequence[bytes], algorithm: str = WORDS) -> None:
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._ids), default=1)
        self._sorted = sorted(self._ids)
        self.algorithm = algorithm

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize `text`. Bytes that no token contains are skipped; `LONGEST` stops at them."""
        if self.algorithm == LONGEST:
            return self._match_longest(text)
        return [token for word in self._split_words(text) for token in self._merge_pairs(word)]

    def first_tokens(self, text: bytes) -> list[int]:
        """Return every token that a text with the prefix `text` may begin with."""
        shorter = [text[:size] for size in range(1, min(self._longest, len(text) - 1) + 1)]
        following = map(self._sorted.__getitem__, range(bisect_left(self._sorted, text), len(self._sorted)))
        longer = takewhile(lambda piece: piece.startswith(text), following)
        return [self._ids[piece] for piece in (*shorter, *longer) if piece in self._ids]

    def _split_words(self, text: bytes) -> Iterator[bytes]:
        for part in _MARK.split(text.decode("utf-8", "surrogateescape")):
            is_whole = self.algorithm == MERGES or part.encode("utf-8", "surrogateescape") in self._ids
            for word in [part] if is_whole else _WORD.findall(part):
                yield word.encode("utf-8", "surrogateescape")

    def _merge_pairs(self, word: bytes) -> list[int]:
        if word in self._ids:
            return [self._ids[word]]
        parts = [word[position : position + 1] for position in range(len(word))]
        while len(parts) > 1:
            ranks = [self._ids.get(left + right) for left, right in pairwise(parts)]
            mergeable = [rank for rank in ranks if rank is not None]
            if not mergeable:
                break
            position = ranks.index(min(mergeable))
            parts[position : position + 2] = [parts[position] + parts[position + 1]]
        return [self._ids[part] for part in parts if part in self._ids]

    def _match_longest(self, text: bytes) -> list[int]:
        tokens, position = [], 0
        while position < len(text):
            size = next((n for n in range(self._longest, 0, -1) if text[position : position + n] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[text[position : position + size]])
            position += size
        return tokens


def best_algorithm(pieces: Sequence[bytes], tokenizer: Any) -> str:
    """Return the algorithm that tokenizes the probes most like `tokenizer` (from transformers)."""
    approximate, scores = ApproximateTokenizer(pieces), dict.fromkeys(ALGORITHMS, 0)
    for probe in PROBES:
        expected = tokenizer.encode(probe, add_special_tokens=False)
        for algorithm in ALGORITHMS:
            approximate.algorithm = algorithm
            tokens = approximate(probe.encode())
            scores[algorithm] += sum(token in expected for token in tokens) - len(tokens)
    return max(ALGORITHMS, key=scores.__getitem__)
