"""One Generate command on its way: its prompt, its choices, and the one end that each of them gets."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import MEASUREMENT, Accepted, Event, Finished, Generate
from app.core.request import Request
from app.core.step import FinishReason, Statistics, TokenEvent
from app.text.detokenizer import TokenTable
from app.worker.choice import Choice
from app.worker.failure import failed_frame
from app.worker.mail import StepEvents, Submission, choice_id, choice_of
from app.worker.tally import Tally
from app.worker.texts import Prompt

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
