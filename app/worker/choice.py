"""One choice of a request: token events in, `Delta`s and the one `Finished` out."""

from collections.abc import Sequence

from app.core.messages import Delta, Finished, TokenText
from app.core.reason import NO_REASON
from app.core.step import FinishReason, Statistics, TokenEvent, TokenLogprobs
from app.text.detokenizer import TextChunk, TextStream, TokenTable
from app.worker.tally import Tally

Message = Delta | Finished

_FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}


class Choice:
    """Text is told as soon as it is certain; tokens without text yet ride along with the next text, or the end.

    After a stop string or a cancel nothing more is told; the end waits for the scheduler's terminal event, because
    only that one knows why speculation did not run.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Sequence[int],
        table: TokenTable,
        stream: TextStream,
        tally: Tally,
    ) -> None:
        self._request_id = request_id
        self._index = index
        self._prompt = prompt
        self._scored = 1
        """Tokens of the prompt whose scores were told, if they are wanted; the first has none."""
        self._table = table
        self._stream = stream
        self._tally = tally
        self._tokens = self._drafted = self._accepted = 0
        self._logprobs: list[TokenText] = []
        self._method = "off"
        self._why = self._told_why = NO_REASON
        self.closing = ""
        """The finish reason that is decided already, while the scheduler does not know yet."""
        self.ended = False
        """Its `Finished` has been told."""

    def queued(self, at: float) -> None:
        """The scheduler has it."""
        self._tally.queued(at)

    def echo(self, text: str, *, scored: bool) -> Delta:
        """The prompt, as the client gave it; with the token that nothing stands before when scores are to follow."""
        first, data = self._table.token_text(self._prompt[0])
        tokens = (TokenText(token=first, token_bytes=tuple(data), logprob=None),) if scored else ()
        return Delta(id=self._request_id, index=self._index, text=text, tokens=0, logprobs=tokens)

    def score_prompt(self, scores: Sequence[TokenLogprobs]) -> Delta:
        """The scores of the prompt's next tokens; their text was told."""
        behind = self._prompt[self._scored : self._scored + len(scores)]
        self._scored += len(scores)
        logprobs = tuple(self._token_texts(behind, scores))
        return Delta(id=self._request_id, index=self._index, text="", tokens=0, logprobs=logprobs)

    def close(self, finish_reason: str) -> None:
        """Tell nothing more but the end."""
        self.closing = self.closing or finish_reason

    def feed(self, told: TokenEvent, at: float) -> list[Message]:
        """What the client is told of one event; a FAILED one only after `close`."""
        if self.ended:
            return []
        messages = [] if self.closing else self._feed_tokens(told, at)
        if told.finish_reason is None:
            return messages
        if self.closing:
            return [*messages, *self._finish(self.closing, self._tally.usage_as_told(told.statistics, at))]
        tail = self._stream.finish()
        word = "stop" if tail.stopped else _FINISH_WORDS[told.finish_reason]
        return [*messages, *self._delta(tail), *self._finish(word, self._tally.usage(told.statistics))]

    def _feed_tokens(self, told: TokenEvent, at: float) -> list[Message]:
        chunk = self._stream.feed(told.tokens, told.accepted)
        drafted, accepted = self._tally.count(told, chunk.tokens_used, at)
        self._tokens += chunk.tokens_used
        self._drafted += drafted
        self._accepted += accepted
        self._logprobs += self._token_texts(told.tokens[: chunk.tokens_used], told.logprobs)
        self._method = told.method
        self._why = told.why_not_drafted
        if chunk.stopped:
            self.close("stop")
        return self._delta(chunk)

    def _finish(self, finish_reason: str, usage: Statistics) -> list[Message]:
        self.ended = True
        messages: list[Message] = [self._take_delta("", ())] if self._tokens else []
        messages.append(Finished(id=self._request_id, index=self._index, finish_reason=finish_reason, usage=usage))
        return messages

    def _delta(self, chunk: TextChunk) -> list[Message]:
        return [self._take_delta(chunk.text, chunk.accepted_spans)] if chunk.text else []

    def _take_delta(self, text: str, accepted_spans: Sequence[tuple[int, int]]) -> Delta:
        delta = Delta(
            id=self._request_id,
            index=self._index,
            text=text,
            tokens=self._tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            accepted_spans=tuple(accepted_spans),
            method=self._method,
            why_not_drafted=self._why if self._why != self._told_why else None,
            logprobs=tuple(self._logprobs),
        )
        self._tokens = self._drafted = self._accepted = 0
        self._logprobs = []
        self._told_why = self._why
        return delta

    def _token_texts(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[TokenText]:
        texts: list[TokenText] = []
        for token, found in zip(tokens, logprobs, strict=False):
            text, data = self._table.token_text(token)
            top: list[tuple[str, float, tuple[int, ...]]] = []
            for other, logprob in found.top:
                other_text, other_data = self._table.token_text(other)
                top.append((other_text, logprob, tuple(other_data)))
            texts.append(TokenText(token=text, token_bytes=tuple(data), logprob=found.logprob, top=tuple(top)))
        return texts
