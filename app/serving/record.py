"""The record of one generation request: its parameters, its progress and its outcome.

`on_event` runs for every step of every stream, so it only counts; a fault in counting never fails a request. A
`FinishedRequest` has prompt and reply only if texts are stored, and never stop strings or logit biases.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from app.core.errors import PacelineError
from app.core.messages import Accepted, Delta, Finished, Generate, LoadProgress
from app.core.request import OFF, FinishedRequest
from app.core.statistics import MethodStatistics, Statistics
from app.serving.metrics import Metrics
from app.serving.speed import speculation_object, timings_object
from app.supervision.stream import StreamEvent

if TYPE_CHECKING:
    from app.serving.journal import Journal

CANCELLED = "cancelled"
MAX_TEXT_CHARACTERS = 200_000
MAX_PROBLEM_CHARACTERS = 300
SAMPLING = (
    "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Record:
    """One request from arrival to end, with its counters. Called from the event loop only."""

    def __init__(
        self,
        journal: "Journal",
        metrics: Metrics,
        commands: Sequence[Generate],
        *,
        id: str,  # noqa: A002 - the name it has everywhere
        endpoint: str,
        key_name: str = "",
        is_streamed: bool = False,
        created_at: float | None = None,
    ) -> None:
        self.id, self.endpoint, self.commands = id, endpoint, commands
        self.key_name, self.is_streamed = key_name, is_streamed
        self.created_at = time.time() if created_at is None else created_at
        """Unix seconds."""
        self.model_id, self.why_not_drafted = commands[0].model.id, commands[0].model.no_drafter
        self.choices = sum(command.n for command in commands)
        self.prompt_tokens = self.tokens = self.drafted = self.accepted_tokens = 0
        self.method, self.outcome = OFF, ""
        self._journal = journal
        self._counting = journal.counting
        self._metrics = metrics
        self._clock = journal.clock
        self._keeps_texts = journal.keeps_texts
        self._cancel: Callable[[PacelineError], None] = _cannot_cancel
        self._began = self._clock()
        self._load: tuple[float, float] | None = None
        self._accepted_at: dict[str, float] = {}
        """Time at which the worker accepted each prompt, by prompt id."""
        self._first_token_at: float | None = None
        self._ended_at: float | None = None
        self._tokens_at: dict[tuple[str, int], float] = {}
        """Time at which the latest tokens of each choice arrived, by prompt id and index."""
        self._by_method: dict[str, MethodStatistics] = {}
        self._awaited = {(command.id, index) for command in commands for index in range(command.n)}
        """Choices whose statistics the worker has yet to report; `_usages` has the statistics of all others."""
        self._usages: dict[tuple[str, int], Statistics] = {}
        self._problem = ""
        self._replies: dict[tuple[str, int], list[str]] = {}

    # --- its events -------------------------------------------------------------------------------------------

    def begin(self, cancel: Callable[[PacelineError], None]) -> None:
        """Register the request as running; `cancel` ends it with an error."""
        self._cancel = cancel
        with self._counting.guarded():
            self._journal.begun(self)

    def on_event(self, event: StreamEvent | LoadProgress | PacelineError) -> None:
        """Count one event of the request, progress of the load it waits for, or the error that ends it."""
        with self._counting.guarded():
            self._on_event(event)

    def _on_event(self, event: StreamEvent | LoadProgress | PacelineError) -> None:
        match event:
            case Delta():
                self._count(event)
            case Finished():
                self._journal.log_notices(event.notices)
                self.add_usage(event)
            case Accepted():
                self._metrics.accepted(self.model_id, event.prompt_tokens)
                self.prompt_tokens += event.prompt_tokens
                self._accepted_at[event.id] = self._clock()
            case LoadProgress():
                if not self._accepted_at:
                    now = self._clock()
                    self._load = (self._load[0] if self._load else now, now)
            case PacelineError():
                self._problem = event.message[:MAX_PROBLEM_CHARACTERS]
                self._end(event.code)

    def add_usage(self, event: Finished) -> None:
        """Add the usage of a choice that ended; the worker reports it even after a cancel."""
        cached_tokens = event.usage.cached_tokens if event.index == 0 else 0
        self._metrics.finished(self.model_id, event.usage, cached_tokens)
        self._awaited.discard((event.id, event.index))
        self._usages[event.id, event.index] = event.usage
        if self.has_all_usage:
            self._end(event.finish_reason)

    def close(self) -> None:
        """End the request as cancelled, unless it has ended already."""
        with self._counting.guarded():
            self._end(CANCELLED)

    def drop_prompts(self) -> None:
        """Drop the prompts, which may be large, of an ended request that only waits for the worker's statistics."""
        self.commands = [
            Generate(
                id=command.id,
                model=command.model,
                n=command.n,
                max_tokens=command.max_tokens,
                sampling=command.sampling,
                speculation=command.speculation,
            )
            for command in self.commands
        ]

    def cancel(self, error: PacelineError) -> None:
        """End the request with an error, which its client gets."""
        self._cancel(error)

    def _count(self, event: Delta) -> None:
        choice = (event.id, event.index)
        if event.tokens:
            now, before = self._clock(), self._tokens_at.get(choice)
            seconds = now - (self._began if before is None else before)
            self._metrics.emitted(self.model_id, event.tokens, first=before is None, seconds=seconds)
            self._tokens_at[choice] = now
            self._first_token_at = now if self._first_token_at is None else self._first_token_at
        self.tokens += event.tokens
        self.drafted += event.drafted
        self.accepted_tokens += event.accepted
        self.method = event.method
        counted = self._by_method.get(event.method) or MethodStatistics(event.method)
        drafted, accepted = counted.drafted + event.drafted, counted.accepted + event.accepted
        self._by_method[event.method] = MethodStatistics(event.method, drafted=drafted, accepted=accepted)
        if event.why_not_drafted is not None:
            self.why_not_drafted = event.why_not_drafted
        if self._keeps_texts:
            self._replies.setdefault(choice, []).append(event.text)

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self._ended_at = self._clock()
            self._cancel = _cannot_cancel
            # prompts that the worker has not accepted are not waited for: some were never sent
            self._awaited = {choice for choice in self._awaited if choice[0] in self._accepted_at}
            self._journal.ended(self)

    # --- its figures ------------------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int | None:
        """Limit on the tokens of all choices together; None: up to the end of the context."""
        limit = self.commands[0].max_tokens
        return None if limit is None else limit * self.choices

    @property
    def is_accepted(self) -> bool:
        """Whether the worker has accepted a prompt of the request."""
        return bool(self._accepted_at)

    @property
    def has_first_token(self) -> bool:
        """Whether a token has arrived."""
        return self._first_token_at is not None

    def awaits(self, event: Finished) -> bool:
        """Return whether the worker has yet to report this choice."""
        return (event.id, event.index) in self._awaited

    @property
    def awaits_usage(self) -> bool:
        """Whether the worker has yet to report a choice, which it does even after a cancel."""
        return bool(self._awaited)

    @property
    def has_all_usage(self) -> bool:
        """Whether the worker has reported every choice; its statistics then replace the counters."""
        return bool(self._usages) and not self._awaited

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from the request's arrival to its end, or until now."""
        return self._now() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the first token; 0 before it."""
        seconds = 0.0 if self._first_token_at is None else self._now() - self._first_token_at
        return round(self.tokens / seconds, 1) if seconds > 0 else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None if nothing was drafted."""
        return round(self.accepted_tokens / self.drafted, 3) if self.drafted else None

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far."""
        now = self._now()
        load = self._load[1] - self._load[0] if self._load else 0.0
        accepted_at = max(self._accepted_at.values(), default=now)
        first_token_at = now if self._first_token_at is None else self._first_token_at
        waited, prefill, decode = accepted_at - self._began, first_token_at - accepted_at, now - first_token_at
        if self.has_all_usage:
            usage = self.usage()
            waited, prefill, decode = max(waited, usage.queue_seconds), usage.prefill_seconds, usage.decode_seconds
        named = {"queue": waited - load, "load": load, "prefill": prefill, "decode": decode, "total": now - self._began}
        return {name: round(max(0.0, value), 4) for name, value in named.items()}

    def usage(self) -> Statistics:
        """Return the worker's statistics of all choices; until all are reported, the counters of this record."""
        if self.has_all_usage:
            usages = [usage for _, usage in sorted(self._usages.items())]
            return Statistics.combined(usages, choices_per_prompt=self.commands[0].n)
        now = self._now()
        first = now if self._first_token_at is None else self._first_token_at
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            decode_seconds=now - first,
            first_token_seconds=first - self._began if self.has_first_token else 0.0,
            by_method=tuple(self._by_method.values()),
            reason=self.why_not_drafted,
        )

    def past(self) -> FinishedRequest:
        """Return the record of the ended request."""
        return FinishedRequest(
            id=self.id,
            endpoint=self.endpoint,
            model_id=self.model_id,
            key_name=self.key_name,
            created_at=self.created_at,
            outcome=self.outcome,
            figures=self.figures(),
            prompt=_prompt_text(self.commands) if self._keeps_texts else None,
            reply=self._reply() if self._keeps_texts else None,
        )

    def figures(self) -> dict[str, Any]:
        """Return all figures, under the names of the API."""
        command, usage = self.commands[0], self.usage()
        return {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "seconds": self.seconds(),
            "timings": timings_object(usage),
            "speculation": speculation_object(usage, command.model.no_drafter),
            "asked": {
                "choices": self.choices,
                "streamed": self.is_streamed,
                "max_tokens": command.max_tokens,
                "method": command.speculation.method,
                "num_draft_tokens": command.speculation.num_draft_tokens or command.model.live.num_draft_tokens,
                "sampling": {name: getattr(command.sampling, name) for name in SAMPLING},
                "drafters": [drafter.id for drafter in command.model.drafters],
            },
            "problem": self._problem,
        }

    def _now(self) -> float:
        """Return the time at which the request ended; while it runs, the current time."""
        return self._clock() if self._ended_at is None else self._ended_at

    def _reply(self) -> str:
        choices = [(command.id, index) for command in self.commands for index in range(command.n)]
        replies = ["".join(self._replies[choice]) for choice in choices if choice in self._replies]
        return "\n\n".join(replies)[:MAX_TEXT_CHARACTERS]


def _cannot_cancel(_error: PacelineError) -> None:
    """Do nothing: replaces the cancel callback of an ended request, so that its prompt can be freed."""


def _prompt_text(commands: Sequence[Generate]) -> str:
    """Return the prompts as they were sent: text unchanged, messages and token ids as JSON."""
    texts = []
    for command in commands:
        prompt = command.text if command.text is not None else command.messages or command.tokens
        texts.append(prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode())
    return "\n\n".join(texts)[:MAX_TEXT_CHARACTERS]
