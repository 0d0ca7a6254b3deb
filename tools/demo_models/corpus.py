"""Pack generated conversations and standard-library text into rows of token ids with loss weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import stdlib_text
from samples import Sample
from tasks import training_samples
from tokenizer import ASSISTANT_START, EMPTY_THINK, render
from tokenizers import Tokenizer

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 20
TEXT_SHARE = 0.16
LATE_TEXT_SHARE = 0.05
PENDING = 96

Piece = tuple[list[int], list[int]]


class Encoder:
    """Turn conversations and plain text into token ids and per-token loss weights."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up the ids that mark where answers begin and end."""
        self.tokenizer = tokenizer
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")
        self.end_of_turn = tokenizer.token_to_id("<|im_end|>")
        self.answer_start = tokenizer.encode(ASSISTANT_START).ids
        self.empty_think = tokenizer.encode(EMPTY_THINK).ids

    def sample(self, sample: Sample) -> Piece:
        """Encode a conversation; answers weigh more than requests."""
        ids = self.tokenizer.encode(render(sample)).ids
        weights = [PROMPT_WEIGHT] * len(ids)
        start, width = self.answer_start, len(self.answer_start)
        inside = False
        for index, token in enumerate(ids):
            if ids[index - width : index] == start and index >= width:
                inside = True
            if inside:
                weights[index] = ANSWER_WEIGHT
            if token == self.end_of_turn:
                inside = False
        for index in range(len(ids) - len(self.empty_think)):
            if ids[index : index + len(self.empty_think)] == self.empty_think:
                weights[index : index + len(self.empty_think)] = [0] * len(self.empty_think)
        return [*ids, self.end_of_text], [*weights, PROMPT_WEIGHT]

    def text(self, text: str, rng: random.Random, longest: int) -> Piece:
        """Encode a window of plain text."""
        ids = self.tokenizer.encode(text).ids
        start = rng.randrange(max(1, len(ids) - longest + 1))
        ids = ids[start : start + longest]
        return [*ids, self.end_of_text], [ANSWER_WEIGHT] * len(ids) + [PROMPT_WEIGHT]


def pieces(encoder: Encoder, seed: int, length: int, *, late: bool) -> Iterator[Piece]:
    """Yield encoded conversations mixed with plain text, none longer than a row."""
    rng = random.Random(f"pieces:{seed}")
    samples = training_samples(seed, late=late)
    share = LATE_TEXT_SHARE if late else TEXT_SHARE
    documents = stdlib_text.documents()
    text_tokens = total_tokens = 0
    while True:
        if text_tokens < share * total_tokens:
            piece = encoder.text(rng.choice(documents), rng, min(length - 1, rng.choice((64, 128, 240, 480))))
            text_tokens += len(piece[0])
        else:
            piece = encoder.sample(next(samples))
        if len(piece[0]) <= length:
            total_tokens += len(piece[0])
            yield piece


def pack(encoder: Encoder, seed: int, rows: int, length: int, *, late: bool) -> tuple[np.ndarray, np.ndarray]:
    """Fill rows with whole pieces, best fit first; what stays empty has no weight."""
    tokens = np.full((rows, length), encoder.end_of_text, dtype=np.uint16)
    weights = np.zeros((rows, length), dtype=np.uint8)
    stream = pieces(encoder, seed, length, late=late)
    pending: list[Piece] = [next(stream) for _ in range(PENDING)]
    for row in range(rows):
        used = 0
        piece: Piece | None = pending.pop(0)
        while piece is not None:
            ids, weight = piece
            tokens[row, used : used + len(ids)] = ids
            weights[row, used : used + len(ids)] = weight
            used += len(ids)
            pending.append(next(stream))
            piece = _best_fit(pending, length - used)
    return tokens, weights


def _best_fit(pending: list[Piece], room: int) -> Piece | None:
    """Take the oldest piece that fits while there is much room, else the largest that fits."""
    fitting = [i for i, (ids, _) in enumerate(pending) if len(ids) <= room]
    if not fitting:
        return None
    chosen = fitting[0] if room > 100 else max(fitting, key=lambda i: len(pending[i][0]))
    return pending.pop(chosen)


def load_rows(
    tokenizer: Path, cache: Path, seed: int, rows: int, length: int, *, late: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return packed rows, kept on disk between runs; a longer run's rows begin with a shorter run's."""
    stem = f"{'late' if late else 'rows'}-{seed}"
    path = cache / f"{stem}-{rows}x{length}.npz"
    for stored in sorted(cache.glob(f"{stem}-*x{length}.npz")):
        if int(stored.stem.split("-")[2].split("x")[0]) >= rows:
            path = stored
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        encoder = Encoder(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
        tokens, weights = pack(encoder, seed, rows, length, late=late)
        temporary = cache / f"partial-{path.name}"
        np.savez(temporary, tokens=tokens, weights=weights)
        temporary.replace(path)
    with np.load(path) as arrays:
        return arrays["tokens"][:rows], arrays["weights"][:rows]
