"""One Generate command in progress: its prompt, its choices, and exactly one end for each choice."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import MEASUREMENT, Accepted, Cancel, Delta, Event, Finished, Generate, TokenText, failed_frame
from app.core.reason import NO_REASON
from app.core.request import Notice, Request
from app.core.statistics import Counters, MethodStatistics, Statistics
from app.core.step import FinishReason, TokenEvent, TokenLogprobs
from app.text.answer.calls import call_ids
from app.text.answer.parts import AnswerDelta, ReasoningCount
from app.text.answer.splitter import AnswerSplitter, feed_step
from app.text.dialect import NO_DIALECT
from app.text.grammar.request_grammar import calls_by_grammar, closes_reasoning, grammar_parameter, opens_reasoning
from app.worker.texts import Prompt, PromptFailure, PromptFuture
from app.worker.thread_commands import LoopCommand, Submission, choice_id

_SEEDS = 1 << 64
_NO_LIMIT = (1 << 31) - 1
"""Token limit of a request that sets none: longer than any context, so the answer may fill its context."""
UNFINISHED_CALL = Notice(
    code="unfinished_call",
    message="The last tool call is incomplete: its arguments were cut off or cannot be read. Send the request again.",
)
logger = logging.getLogger("paceline.request")


class Choice:
    """One choice: its text, the counts of sent tokens, and its end.

    Text is sent as soon as it is final. Tokens without text yet are counted in the next delta that has text, or in the
    last one. After a stop string or a cancel, only `Finished` is still sent. It waits for the scheduler's terminal
    event, which alone contains the reason why speculation did not run. Times are in seconds of the monotonic clock.
    """

    def __init__(
        self, command: Generate, index: int, prompt: Prompt, received_at: float, send: Callable[[Event], None]
    ) -> None:
        self.id = choice_id(command.id, index)
        self._command = command
        self._index = index
        self._send = send
        self._prompt = prompt.tokens
        self._notices = command.notices + prompt.notices
        self._table = prompt.table
        self._stream = prompt.table.open_stream(continued=command.messages is None or command.continues)
        dialect = prompt.table.dialect if command.messages is not None else NO_DIALECT
        self._reasoning = ReasoningCount(dialect)
        self._has_reasoning = False
        """Whether any reasoning was sent."""
        self._splitter = AnswerSplitter(
            dialect,
            inside=opens_reasoning(prompt.table.dialect, prompt.end),
            reasoned=closes_reasoning(prompt.table.dialect, prompt.end),
            tools=command.tools or (),
            by_grammar=calls_by_grammar(command, dialect),
            stop=command.stop,
            one_call=not command.parallel_tool_calls,
            used_ids=call_ids(command.messages or ()),
        )
        self._scored = 1
        """Number of prompt tokens whose scores were sent, if requested; starts at 1: the first token has no score."""
        self._received_at = self._last_sent_at = received_at
        self.queued_at = received_at
        """Time at which the scheduler queued the request, and from which the scheduler's statistics count."""
        self._sent = Counters()
        """Counts of sent tokens, up to a stop string: the scheduler, which sees no text, counts beyond it."""
        self._next_delta = Delta(id=command.id, index=index, text="", tokens=0)
        """Delta under construction, to be sent next."""
        self._no_draft_reason = self._sent_no_draft_reason = NO_REASON
        self.early_finish_reason = ""
        """Finish reason, if it is decided before the scheduler ends the request; otherwise empty."""
        self.ended = False
        """Whether its `Finished` was sent."""
        self._embedding: tuple[float, ...] = ()

    def echo(self, text: str, *, scored: bool) -> None:
        """Send the text of the prompt; if `scored`, with its first token, which has no score."""
        first, data = self._table.token_text(self._prompt[0])
        tokens = (TokenText(token=first, token_bytes=tuple(data), logprob=None),) if scored else ()
        self._send(Delta(id=self._command.id, index=self._index, text=text, tokens=0, logprobs=tokens))

    def score_prompt(self, scores: Sequence[TokenLogprobs]) -> None:
        """Send the scores of the prompt's next tokens; their text was sent by `echo`."""
        next_tokens = self._prompt[self._scored : self._scored + len(scores)]
        self._scored += len(scores)
        logprobs = self._token_texts(next_tokens, scores)
        self._send(Delta(id=self._command.id, index=self._index, text="", tokens=0, logprobs=logprobs))

    def close(self, finish_reason: str) -> None:
        """Stop sending deltas; only the end is still sent."""
        self.early_finish_reason = self.early_finish_reason or finish_reason

    def feed(self, event: TokenEvent, at: float) -> None:
        """Process one event; an event with an error may arrive only after `close`."""
        self._embedding = event.embedding or self._embedding
        if not self.early_finish_reason:
            self._stream_step(event, at)
        if event.finish_reason is None:
            return
        if self.early_finish_reason:
            self._finish(self.early_finish_reason, self._sent_usage(event.statistics, at))
            return
        reason = event.finish_reason.value
        self._splitter.feed(self._stream.finish(), final=True, truncated=reason != "stop")
        self._send_deltas()
        if self._splitter.matched_stop or reason == "stop":
            reason = self._natural_finish_reason
        self._finish(reason, self._usage(event.statistics))

    @property
    def _natural_finish_reason(self) -> str:
        return "tool_calls" if self._splitter.complete_calls else "stop"

    def _stream_step(self, event: TokenEvent, at: float) -> None:
        """Count the tokens of one step up to the end of the answer, and send the resulting text."""
        kept_count = feed_step(self._stream, self._splitter, event.tokens, event.accepted)
        if self._splitter.ended:
            self.close(self._natural_finish_reason)
        if event.tokens:
            drafted = event.drafted if kept_count == len(event.tokens) else min(event.drafted, kept_count)
            accepted = min(event.accepted, kept_count) if drafted else 0
            self._sent.count_step(emitted=kept_count, drafted=drafted, accepted=accepted, method=event.method)
            self._next_delta.tokens += kept_count
            self._reasoning.feed(self._table.token_text(token)[1] for token in event.tokens[:kept_count])
            self._next_delta.drafted += drafted
            self._next_delta.accepted += accepted
            self._last_sent_at = at
        if event.logprobs:
            self._next_delta.logprobs += self._token_texts(event.tokens[:kept_count], event.logprobs)
        if event.drafted or not self._next_delta.drafted:  # a plain step may release text drafted earlier
            self._next_delta.method = event.method
        self._no_draft_reason = event.why_not_drafted
        self._send_deltas()

    def _finish(self, finish_reason: str, usage: Statistics) -> None:
        self.ended = True
        if self._next_delta.tokens:
            self._send_delta(AnswerDelta())
        unfinished = self._splitter.unfinished_call
        finished = Finished(
            id=self._command.id,
            index=self._index,
            finish_reason=finish_reason,
            usage=usage,
            stop=self._splitter.matched_stop,
            unfinished_call=unfinished,
            embedding=self._embedding,
            notices=self._notices if unfinished is None else (*self._notices, UNFINISHED_CALL),
        )
        _log(self._command, "%s", describe(self._command.model.id, finished))
        self._send(finished)

    def _send_deltas(self) -> None:
        for answer_delta in self._splitter.take():
            self._has_reasoning |= bool(answer_delta.reasoning)
            self._send_delta(answer_delta)

    def _send_delta(self, answer_delta: AnswerDelta) -> None:
        delta = self._next_delta
        self._next_delta = Delta(id=delta.id, index=delta.index, text="", tokens=0, method=delta.method)
        delta.text, delta.accepted_spans = answer_delta.text, answer_delta.spans
        delta.reasoning, delta.tool_calls = answer_delta.reasoning, tuple(answer_delta.calls)
        if self._no_draft_reason != self._sent_no_draft_reason:
            delta.why_not_drafted = self._sent_no_draft_reason = self._no_draft_reason
        self._send(delta)

    def _token_texts(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[TokenText, ...]:
        texts: list[TokenText] = []
        for token, score in zip(tokens, logprobs, strict=False):
            text, data = self._table.token_text(token)
            top: list[tuple[str, float, tuple[int, ...]]] = []
            for other, logprob in score.top:
                other_text, other_data = self._table.token_text(other)
                top.append((other_text, logprob, tuple(other_data)))
            texts.append(TokenText(token=text, token_bytes=tuple(data), logprob=score.logprob, top=tuple(top)))
        return tuple(texts)

    def _usage(self, statistics: Statistics) -> Statistics:
        """Return the scheduler's statistics plus the time before the request was queued."""
        prompt_seconds = self.queued_at - self._received_at
        first_token_seconds = statistics.first_token_seconds
        return replace(
            statistics,
            prompt_tokens=len(self._prompt),
            reasoning_tokens=self._reasoning.tokens if self._has_reasoning else 0,
            queue_seconds=prompt_seconds + statistics.queue_seconds,
            first_token_seconds=prompt_seconds + first_token_seconds if statistics.completion_tokens else 0.0,
        )

    def _sent_usage(self, statistics: Statistics, ended_at: float) -> Statistics:
        """Return the statistics of the tokens sent, for a choice that ended before the scheduler ended its request."""
        excess_seconds = ended_at - self._last_sent_at if self._sent.by_method else statistics.decode_seconds
        total_usage = self._usage(statistics)
        return replace(
            total_usage,
            completion_tokens=self._sent.generated,
            decode_seconds=max(0.0, total_usage.decode_seconds - excess_seconds),
            by_method=self._sent_methods(total_usage.by_method),
        )

    def _sent_methods(self, totals: tuple[MethodStatistics, ...]) -> tuple[MethodStatistics, ...]:
        """Return the counts of sent tokens by method; scale the scheduler's seconds to the steps that were sent."""
        by_method = {statistics.method: statistics for statistics in totals}
        methods = []
        for sent in self._sent.by_method:
            total = by_method.get(sent.method, sent)
            share = min(1.0, sent.steps / max(1, total.steps))
            methods.append(
                replace(
                    sent,
                    draft_seconds=share * total.draft_seconds,
                    verify_seconds=share * total.verify_seconds,
                    rewind_seconds=share * total.rewind_seconds,
                )
            )
        return tuple(methods)


class Answer:
    """Answer to one command; begins once the prompt is processed. `send` takes events, `post` loop commands."""

    _prompt: Prompt
    """Processed prompt; set once the answer has begun."""

    def __init__(
        self,
        command: Generate,
        prompt: PromptFuture,
        received_at: float,
        *,
        send: Callable[[Event], None],
        post: Callable[[LoopCommand], None],
    ) -> None:
        self._command = command
        self.prompt_future = prompt
        self._received_at = received_at
        self._send = send
        self._post = post
        self._choices: list[Choice] = []
        """Choices by index; empty before the answer begins."""
        self._open_choices = command.n
        self.ended = False
        """Whether the end of every choice, or an error, was sent."""

    @property
    def begun(self) -> bool:
        """Whether its prompt was read and its choices exist."""
        return bool(self._choices)

    def begin(self, prompt: Prompt | PromptFailure) -> None:
        """Submit the request to the loop; fail if `prompt` is a failure. Raises InvalidRequest for invalid tokens."""
        command = self._command
        if isinstance(prompt, PromptFailure):
            self.fail(prompt.error)
            return
        check_tokens(command, prompt)
        self._prompt = prompt
        self._choices = [Choice(command, index, prompt, self._received_at, self._send) for index in range(command.n)]
        for choice in self._choices if command.max_tokens == 0 else ():
            choice.close("length")  # the scheduler draws one token, which is not sent
        self._post(self._submission())

    def _submission(self) -> Submission:
        """Return the requests of all choices; choice i draws with seed + i."""
        command = self._command
        max_tokens = _NO_LIMIT if command.max_tokens is None else max(1, command.max_tokens)
        # A client that requests prompt scores and one token expects this token, even if it is an end token.
        ignore_end = command.ignore_end or (self._scores_prompt and max_tokens == 1)
        requests = tuple(
            Request(
                id=choice_id(command.id, index),
                owner=command.owner,
                prompt_tokens=self._prompt.tokens,
                max_tokens=max_tokens,
                stop_token_ids=frozenset() if ignore_end else self._prompt.table.stop_token_ids,
                sampling=msgspec.structs.replace(command.sampling, seed=(command.sampling.seed + index) % _SEEDS),
                speculation=command.speculation,
                constraint=self._prompt.constraint,
                embeds=command.embeds,
                checkpoints=self._prompt.checkpoints,
                scores_prompt=self._scores_prompt,
            )
            for index in range(command.n)
        )
        return Submission(command.id, command.model, requests, command.stay)

    def queued(self, at: float) -> None:
        """Send `Accepted`: streaming may begin."""
        for choice in self._choices:
            choice.queued_at = at
        self._send(Accepted(id=self._command.id, prompt_tokens=len(self._prompt.tokens)))
        if self._command.echo:
            text = self._prompt_text()
            for choice in self._choices:
                choice.echo(text, scored=self._scores_prompt)

    def feed(self, index: int, event: TokenEvent, at: float) -> None:
        """Pass one event of the scheduler to a choice."""
        choice = self._choices[index]
        if self.ended or choice.ended:
            return
        early_reason_before = choice.early_finish_reason
        if event.prompt_logprobs and early_reason_before != "cancelled":
            choice.score_prompt(event.prompt_logprobs)
            return
        if event.finish_reason in {FinishReason.FAILED, FinishReason.DEAD_END} and early_reason_before in {
            "",
            "length",
        }:
            self.fail(self._error_of(event))
            return
        choice.feed(event, at)
        if choice.ended:
            self._open_choices -= 1
            self.ended = not self._open_choices
        if choice.early_finish_reason and not early_reason_before and not choice.ended:
            self._post(Cancel(id=choice.id))

    def _error_of(self, event: TokenEvent) -> PacelineError:
        """Return the error of a failed event; if a grammar costs too much or dead-ends, the client is at fault."""
        if event.finish_reason is FinishReason.DEAD_END:
            parameter = grammar_parameter(self._command)
            return InvalidRequest(f"The answer stops: {event.error}", parameter=parameter, code="unsupported_grammar")
        if isinstance(event.error, PacelineError):
            return event.error
        return PacelineError(f"The model failed: {event.error}", code="step_failed")

    def fail(self, error: PacelineError) -> None:
        """End all choices with one error."""
        if self.ended:
            return
        self._cancel_work()
        self.ended = True
        if self.begun:  # not logged before that: the error may quote the prompt
            _log(self._command, "%s model=%s failed: %s", self._command.id, self._command.model.id, error.message)
        self._send(failed_frame(self._command.id, error))

    def cancel(self) -> None:
        """End every open choice with the tokens sent so far, because the client left."""
        self._cancel_work()
        for choice in self._choices:
            choice.close("cancelled")
        if not self.begun:
            self.ended = True
            for index in range(self._command.n):
                self._send(Finished(id=self._command.id, index=index, finish_reason="cancelled", usage=Statistics()))

    @property
    def _scores_prompt(self) -> bool:
        return self._command.echo and self._command.sampling.top_logprobs is not None

    def _cancel_work(self) -> None:
        """Cancel the processing of the prompt, and the choices that the scheduler may still be working on."""
        self.prompt_future.cancel()
        for choice in self._choices:
            if not choice.ended:
                self._post(Cancel(id=choice.id))

    def _prompt_text(self) -> str:
        if self._command.text is not None:
            return self._command.text
        return self._prompt.table.prompt_text(self._prompt.tokens)


def _log(command: Generate, message: str, *values: str) -> None:
    """Log at info level; measurement requests at debug level."""
    logger.log(logging.DEBUG if command.owner == MEASUREMENT else logging.INFO, message, *values)


def describe(model_id: str, finished: Finished) -> str:
    """Return one line about the end of a choice: its method, acceptance, speed, and why it did not draft."""
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


def check_tokens(command: Generate, prompt: Prompt) -> None:
    """Raise InvalidRequest for a prompt without tokens, and for tokens that the model does not have."""
    size = prompt.table.vocabulary_size
    unknown = [str(token) for token in sorted(command.sampling.logit_bias) if token >= size]
    if unknown:
        message = f"logit_bias: the model has no token {', '.join(unknown[:8])}; its ids are 0 to {size - 1}."
        raise InvalidRequest(message, parameter="logit_bias")
    if not prompt.tokens:
        raise InvalidRequest("The prompt is empty.", parameter="prompt")
    if not all(0 <= token < size for token in prompt.tokens):
        raise InvalidRequest(f"Token ids must be from 0 to {size - 1}.", parameter="prompt")


def check_command(command: Generate) -> None:
    """Raise InvalidRequest if no model can run the command, or if it does not have exactly one kind of prompt."""
    if command.n < 1:
        raise InvalidRequest("n must be at least 1.", parameter="n")
    if command.max_tokens is not None and command.max_tokens < 0:
        raise InvalidRequest("max_tokens must be at least 0.", parameter="max_tokens")
    if (command.messages, command.text, command.tokens).count(None) != 2:
        raise InvalidRequest("Give exactly one of messages, text and tokens.")
