"""One choice of one request as text: tokens in, told text out, stop strings honoured, accepted drafts marked.

Tokens are looked at one by one, so the text and the place where it stops do not depend on how many tokens a step
brought: speculation on or off, alone or in a batch, the client reads the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from app.text.pieces import Detokenizer
from app.text.stops import StopMatcher
from app.text.template import TextModel


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What one call released. `accepted_spans` are (start, end) in `text`, in order, made by accepted drafts."""

    text: str = ""
    tokens_used: int = 0
    """How many of the fed tokens count: all, or up to and including the one that completed a stop string."""
    accepted_spans: tuple[tuple[int, int], ...] = ()
    stopped: bool = False
    """A stop string was met: the text is complete and later tokens are ignored."""


class TextStream:
    """Detokenizes one stream. `after` (prompt tokens) is given when the text continues a prompt, not an answer."""

    def __init__(self, model: TextModel, stop: Sequence[str] = (), *, after: Sequence[int] = ()) -> None:
        self._detokenizer: Detokenizer = model.detokenizer(after)
        self._hidden = model.hidden_token_ids
        self._stops = StopMatcher(stop)
        self._held = ""
        self._marks = bytearray()
        self._stopped = False

    def feed(self, tokens: Sequence[int], accepted: int = 0) -> TextChunk:
        """Add the tokens of one step, the first `accepted` of which came from the drafter."""
        if self._stopped:
            return TextChunk(stopped=True)
        for index, token in enumerate(tokens):
            piece = "" if token in self._hidden else self._detokenizer.add(token)
            if piece and self._hold(piece, accepted=index < accepted):
                return self._release(len(self._held), tokens_used=index + 1)
        return self._release(self._stops.safe_length(self._held), tokens_used=len(tokens))

    def finish(self) -> TextChunk:
        """Release everything: the stream ended by itself. An incomplete character becomes U+FFFD."""
        if self._stopped:
            return TextChunk(stopped=True)
        self._hold(self._detokenizer.finish(), accepted=False)
        return self._release(len(self._held), tokens_used=0)

    def _hold(self, piece: str, *, accepted: bool) -> bool:
        """Append `piece`; at a stop string cut it and what follows away, and say so."""
        self._held += piece
        self._marks += bytes([accepted]) * len(piece)
        start = self._stops.find(self._held)
        if start is not None:
            self._stopped = True
            self._held = self._held[:start]
        return self._stopped

    def _release(self, length: int, *, tokens_used: int) -> TextChunk:
        text, marks = self._held[:length], self._marks[:length]
        self._held, self._marks = self._held[length:], self._marks[length:]
        spans, position = [], 0
        for accepted, run in groupby(marks):
            end = position + len(tuple(run))
            if accepted:
                spans.append((position, end))
            position = end
        return TextChunk(text, tokens_used, tuple(spans), self._stopped)
