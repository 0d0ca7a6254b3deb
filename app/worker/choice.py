"""One choice of a request: token events in, `Delta`s and the one `Finished` out."""

from collections.abc import Sequence

from app.core.messages import Delta, Finished, TokenText, Usage
from app.core.step import FinishReason, TokenEvent, TokenLogprobs
from app.worker.ports import TextChunkPort, TextModelPort, TextStreamPort
from app.worker.tally import Tally


class Choice:
    """Text is told as soon as it is certain; tokens without text yet ride along with the next text, or the end."""

    def __init__(self, request_id: str, index: int, model: TextModelPort, stream: TextStreamPort, tally: Tally) -> None:
        self._request_id = request_id
        self._index = index
        self._model = model
        self._stream = stream
        self.tally = tally
        self._tokens = 0
        self._logprobs: list[TokenText] = []
        self._method = "off"
        self._reason = ""
        self.ended = False
        """Nothing more is told."""
        self.stopped = False
        """A stop string ended it: the scheduler does not know yet."""

    def feed(self, told: TokenEvent, at: float, step_seconds: float) -> list[Delta | Finished]:
        """What the client is told of one event; FAILED events are the caller's."""
        if self.ended:
            return []
        chunk = self._stream.feed(told.tokens, told.accepted)
        self.tally.count(told, chunk.tokens_used, at, step_seconds)
        self._tokens += chunk.tokens_used
        self._logprobs += self._token_texts(told.tokens[: chunk.tokens_used], told.logprobs)
        self._method = told.method
        self._reason = told.statistics.reason or self._reason
        messages = self._delta(chunk)
        if chunk.stopped:
            self.stopped = True
            return [*messages, *self._finish("stop", self.tally.usage_so_far(self._reason))]
        if told.finish_reason is None:
            return messages
        tail = self._stream.finish()
        word = "stop" if tail.stopped else _finish_word(told.finish_reason)
        return [*messages, *self._delta(tail), *self._finish(word, self.tally.usage_of(told.statistics))]

    def cancel(self) -> list[Delta | Finished]:
        """End it at what was told so far."""
        return [] if self.ended else self._finish("cancelled", self.tally.usage_so_far(self._reason))

    def _finish(self, finish_reason: str, usage: Usage) -> list[Delta | Finished]:
        self.ended = True
        messages: list[Delta | Finished] = []
        if self._tokens:
            messages.append(self._take_delta("", ()))
        messages.append(Finished(id=self._request_id, index=self._index, finish_reason=finish_reason, usage=usage))
        return messages

    def _delta(self, chunk: TextChunkPort) -> list[Delta | Finished]:
        return [self._take_delta(chunk.text, chunk.accepted_spans)] if chunk.text else []

    def _take_delta(self, text: str, accepted_spans: Sequence[tuple[int, int]]) -> Delta:
        delta = Delta(
            id=self._request_id,
            index=self._index,
            text=text,
            tokens=self._tokens,
            accepted_spans=tuple(accepted_spans),
            method=self._method,
            logprobs=tuple(self._logprobs),
        )
        self._tokens, self._logprobs = 0, []
        return delta

    def _token_texts(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[TokenText]:
        texts: list[TokenText] = []
        for token, found in zip(tokens, logprobs, strict=False):
            text, data = self._model.token_text(token)
            top: list[tuple[str, float, tuple[int, ...]]] = []
            for other, logprob in found.top:
                other_text, other_data = self._model.token_text(other)
                top.append((other_text, logprob, tuple(other_data)))
            texts.append(TokenText(token=text, token_bytes=tuple(data), logprob=found.logprob, top=tuple(top)))
        return texts


def _finish_word(reason: FinishReason) -> str:
    return {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}.get(reason, "cancelled")
