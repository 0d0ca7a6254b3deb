"""One Generate command on its way: its prompt, its choices, and the one end that each of them gets."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import MEASUREMENT, Accepted, Delta, Event, Finished, Generate, TokenText
from app.core.reason import NO_REASON
from app.core.request import Request
from app.core.step import FinishReason, Statistics, TokenEvent, TokenLogprobs
from app.text.detokenizer import TextChunk, TextStream, TokenTable
from app.worker.failure import failed_frame
from app.worker.mail import StepEvents, Submission, choice_id, choice_of
from app.worker.tally import Tally
from app.worker.texts import Prompt

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


_SEEDS = 1 << 64
_NO_LIMIT = (1 << 31) - 1
"""Asks the scheduler for everything up to the end of the context."""
_logger = logging.getLogger("paceline.request")


class Reaction(NamedTuple):
    """What follows from one delivery: events for the client, and choices whose end the scheduler must be told."""

    events: Sequence[Event] = ()
    withdrawn: tuple[str, ...] = ()


class Answer:
    """Pure: what to do comes out as a `Reaction`; the speaker does it. Raises InvalidRequest when it cannot begin."""

    def __init__(self, command: Generate, prompt: Prompt, received_at: float) -> None:
        self._command = command
        self._prompt = prompt.tokens
        self._table = table = prompt.table
        _check_biases(command, table)
        if not self._prompt:
            raise InvalidRequest("The prompt is empty.", parameter="prompt")
        if not all(0 <= token < table.vocabulary_size for token in self._prompt):
            raise InvalidRequest(f"Token ids must be from 0 to {table.vocabulary_size - 1}.", parameter="prompt")
        self._choices = [
            Choice(
                command.id,
                index,
                self._prompt,
                table,
                table.open_stream(command.stop, continued=command.messages is None),
                Tally(prompt_tokens=len(self._prompt), received_at=received_at),
            )
            for index in range(command.n)
        ]
        self._level = logging.DEBUG if command.owner == MEASUREMENT else logging.INFO
        for choice in self._choices if command.max_tokens == 0 else ():
            choice.close("length")  # the one token that is drawn is told to nobody
        self._failed = False

    @property
    def _scores_prompt(self) -> bool:
        return self._command.echo and self._command.sampling.top_logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether the client has been told the end of everything."""
        return self._failed or all(choice.ended for choice in self._choices)

    @property
    def _open_choice_ids(self) -> tuple[str, ...]:
        """The choices that the scheduler may still be working on for us."""
        return tuple(
            choice_id(self._command.id, index) for index, choice in enumerate(self._choices) if not choice.ended
        )

    def submission(self) -> Submission:
        """What the loop is asked for: choice i draws with seed + i."""
        command = self._command
        most = _NO_LIMIT if command.max_tokens is None else max(1, command.max_tokens)
        # Who asks for the scores of a prompt and of one token counts on that token, even if it ends the text.
        ignore_end = command.ignore_end or (self._scores_prompt and most == 1)
        requests = tuple(
            Request(
                id=choice_id(command.id, index),
                owner=command.owner,
                prompt_tokens=self._prompt,
                max_tokens=most,
                stop_token_ids=frozenset() if ignore_end else self._table.stop_token_ids,
                sampling=msgspec.structs.replace(command.sampling, seed=(command.sampling.seed + index) % _SEEDS),
                speculation=command.speculation,
                scores_prompt=self._scores_prompt,
            )
            for index in range(command.n)
        )
        return Submission(command.id, command.model, requests)

    def queued(self, at: float) -> Reaction:
        """The request is accepted: from here on the client streams."""
        for choice in self._choices:
            choice.queued(at)
        accepted = Accepted(id=self._command.id, prompt_tokens=len(self._prompt))
        if not self._command.echo:
            return Reaction([accepted])
        text = self._prompt_text()
        return Reaction([accepted, *(choice.echo(text, scored=self._scores_prompt) for choice in self._choices)])

    def feed(self, event: TokenEvent, told: StepEvents) -> Reaction:
        """Tokens, or the end, of one choice."""
        if self.ended:
            return Reaction()
        choice = self._choices[choice_of(event.request_id)[1]]
        was_closing = choice.closing
        if event.prompt_logprobs and was_closing != "cancelled":
            return Reaction([choice.score_prompt(event.prompt_logprobs)])
        if event.finish_reason is FinishReason.FAILED and was_closing in {"", "length"}:
            return self.fail(PacelineError(f"The model failed: {event.error}", code="step_failed"))
        messages = choice.feed(event, told.at)
        for message in messages:
            if isinstance(message, Finished):
                _logger.log(self._level, "%s", describe(self._command.model.id, message))
        stopped = choice.closing and not was_closing and not choice.ended
        return Reaction(messages, (event.request_id,) if stopped else ())

    def fail(self, error: PacelineError) -> Reaction:
        """End everything with one error."""
        if self.ended:
            return Reaction()
        withdrawn = self._open_choice_ids
        self._failed = True
        _logger.log(self._level, "%s model=%s failed: %s", self._command.id, self._command.model.id, error.message)
        return Reaction([failed_frame(self._command.id, error)], withdrawn)

    def cancel(self) -> Reaction:
        """The client left: every open choice ends at what was told."""
        for choice in self._choices:
            choice.close("cancelled")
        return Reaction(withdrawn=self._open_choice_ids)

    def _prompt_text(self) -> str:
        if self._command.text is not None:
            return self._command.text
        return b"".join(self._table.token_text(token)[1] for token in self._prompt).decode("utf-8", "replace")


def describe(model_id: str, finished: Finished) -> str:
    """One line about the end of a choice: what ran, how well it drafted, how fast, and why not."""
    usage: Statistics = finished.usage
    rate = usage.accepted / usage.drafted if usage.drafted else 0.0
    per_cycle = 1 + usage.accepted / usage.cycles if usage.cycles else 1.0
    speed = usage.completion_tokens / usage.decode_seconds if usage.decode_seconds else 0.0
    return (
        f"{finished.id}#{finished.index} model={model_id} finish={finished.finish_reason}"
        f" method={'+'.join(usage.methods) or 'none'} prompt={usage.prompt_tokens} cached={usage.cached_tokens}"
        f" completion={usage.completion_tokens} drafted={usage.drafted} accepted={usage.accepted} rate={rate:.2f}"
        f" tokens_per_cycle={per_cycle:.3f} tokens_per_second={speed:.3f}"
        f" first_token_seconds={usage.first_token_seconds:.3f} queue_seconds={usage.queue_seconds:.3f}"
        f" reason={str(usage.reason)!r}"
    )


def _check_biases(command: Generate, table: TokenTable) -> None:
    """Raises InvalidRequest where `logit_bias` names tokens that the model does not have."""
    strange = [str(token) for token in sorted(command.sampling.logit_bias) if token >= table.vocabulary_size]
    if strange:
        last = table.vocabulary_size - 1
        message = f"logit_bias: the model has no token {', '.join(strange[:8])}; its ids are 0 to {last}."
        raise InvalidRequest(message, parameter="logit_bias")


def check_command(command: Generate) -> None:
    """Raises InvalidRequest for what no model can run; of the three kinds of prompt exactly one must be there."""
    if command.n < 1:
        raise InvalidRequest("n must be at least 1.", parameter="n")
    if command.max_tokens is not None and command.max_tokens < (0 if command.echo else 1):
        raise InvalidRequest("max_tokens must be at least 1.", parameter="max_tokens")
    given = [command.messages is not None, command.text is not None, command.tokens is not None]
    if sum(given) != 1:
        raise InvalidRequest("Give exactly one of messages, text and tokens.")
