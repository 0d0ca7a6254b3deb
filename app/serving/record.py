"""One generation request, from its arrival to its end: counters while it runs, plain values once it has ended.

`Record.told` is called for every step of every stream: it only counts. Nothing that a person wrote is in a `Past` but
where texts are kept; stop strings and biases are texts, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.core.errors import PacelineError
from app.core.messages import Accepted, Delta, Finished, Generate, LoadProgress
from app.core.past import Past
from app.core.ports import Clock
from app.core.request import SamplingParameters
from app.core.step import MethodStatistics, Statistics
from app.serving.figures import add_usages, speculation_object, timings_object, unavailable_reason

CANCELLED = "cancelled"
MAX_TEXT_CHARACTERS = 200_000
MAX_PROBLEM_CHARACTERS = 300
SAMPLING = ("seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known of a request when it arrives. `created_at` is in Unix seconds."""

    id: str
    endpoint: str
    commands: Sequence[Generate]
    key_name: str = ""
    is_streamed: bool = False
    created_at: float = field(default_factory=time.time)

    @property
    def model_id(self) -> str:
        """The model that all prompts are for."""
        return self.commands[0].model.id

    @property
    def command_ids(self) -> frozenset[str]:
        """The names of its prompts at the worker."""
        return frozenset(command.id for command in self.commands)

    @property
    def choices(self) -> int:
        """How many answers were asked for."""
        return sum(command.n for command in self.commands)

    @property
    def max_tokens(self) -> int | None:
        """How many tokens all of them may have together; None: up to the end of the context."""
        limit = self.commands[0].max_tokens
        return None if limit is None else limit * self.choices


class Record:
    """The life of one request; `ended` is called once, with what is left of it. Called from the event loop only."""

    def __init__(
        self,
        asked: Asked,
        *,
        clock: Clock,
        keeps_texts: bool,
        begun: Callable[["Record"], None],
        ended: Callable[["Record"], None],
    ) -> None:
        self.asked = asked
        self.prompt_tokens = self.tokens = self.drafted = self.accepted_tokens = 0
        self.method = "off"
        self.why_not_drafted = unavailable_reason(asked.commands[0].model.draft_unavailable)
        self.outcome = ""
        self.keeps_texts = keeps_texts
        self._clock = clock
        self._begun, self._ended = begun, ended
        self._cancel: Callable[[PacelineError], None] = _nothing
        self._began = clock()
        self._load: tuple[float, float] | None = None
        self._accepted_at: float | None = None
        self._first_told_at: float | None = None
        self._ended_at: float | None = None
        self._by_method: dict[str, MethodStatistics] = {}
        self._usages: dict[tuple[str, int], Statistics] = {}
        """What the worker told at the end of each choice: by prompt and index."""
        self._problem = ""
        self._replies: dict[tuple[str, int], list[str]] = {}

    # --- what happens to it -----------------------------------------------------------------------------------

    def begin(self, cancel: Callable[[PacelineError], None]) -> None:
        """The prompts go to the worker; `cancel` would end it with an error."""
        self._cancel = cancel
        self._begun(self)

    def loading(self, _progress: LoadProgress) -> None:
        """Its model made progress with its load."""
        if self._accepted_at is None:
            now = self._clock()
            self._load = (self._load[0] if self._load else now, now)

    def accepted(self, event: Accepted) -> None:
        """The worker took a prompt."""
        self.prompt_tokens += event.prompt_tokens
        self._accepted_at = self._clock()

    def told(self, event: Delta) -> None:
        """One step of one choice. Nothing here may cost more than counting."""
        if self._first_told_at is None and event.tokens:
            self._first_told_at = self._clock()
        self.tokens += event.tokens
        self.drafted += event.drafted
        self.accepted_tokens += event.accepted
        self.method = event.method
        known = self._by_method.get(event.method) or MethodStatistics(event.method)
        drafted, accepted = known.drafted + event.drafted, known.accepted + event.accepted
        self._by_method[event.method] = MethodStatistics(event.method, drafted=drafted, accepted=accepted)
        if event.why_not_drafted is not None:
            self.why_not_drafted = event.why_not_drafted
        if self.keeps_texts:
            self._replies.setdefault((event.id, event.index), []).append(event.text)

    def finished(self, event: Finished) -> None:
        """One choice ended; after a cancel, the worker still tells what it had come to."""
        self._usages[event.id, event.index] = event.usage
        if self.is_accounted:
            self._end(event.finish_reason)

    def failed(self, error: PacelineError) -> None:
        """All of it ended with an error."""
        self._problem = error.message[:MAX_PROBLEM_CHARACTERS]
        self._end(error.code)

    def close(self) -> None:
        """Nobody waits for it any more; what had not ended is cancelled."""
        self._end(CANCELLED)

    def cancel(self, error: PacelineError) -> None:
        """End it with an error that its client gets."""
        self._cancel(error)

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self._ended_at = self._clock()
            self._cancel = _nothing
            self._ended(self)

    # --- what is known of it ----------------------------------------------------------------------------------

    @property
    def is_accepted(self) -> bool:
        """Whether the worker took a prompt of it."""
        return self._accepted_at is not None

    @property
    def writes(self) -> bool:
        """Whether a token of it was told."""
        return self._first_told_at is not None

    @property
    def is_accounted(self) -> bool:
        """Whether the worker told the figures of every choice: from then on they are the only ones."""
        return len(self._usages) == self.asked.choices

    @property
    def elapsed_seconds(self) -> float:
        """How long it has run, or ran."""
        return (self._clock() if self._ended_at is None else self._ended_at) - self._began

    @property
    def tokens_per_second(self) -> float:
        """Over its decoding so far; 0 before the first token."""
        if self._first_told_at is None:
            return 0.0
        seconds = (self._clock() if self._ended_at is None else self._ended_at) - self._first_told_at
        return round(self.tokens / seconds, 1) if seconds > 0 else 0.0

    @property
    def acceptance(self) -> float | None:
        """The share of drafts that stayed; None where nothing was drafted."""
        return round(self.accepted_tokens / self.drafted, 3) if self.drafted else None

    def seconds(self) -> dict[str, float]:
        """The seconds of its phases so far, one after another."""
        now = self._clock() if self._ended_at is None else self._ended_at
        load = self._load[1] - self._load[0] if self._load else 0.0
        accepted_at = now if self._accepted_at is None else self._accepted_at
        first_told_at = now if self._first_told_at is None else self._first_told_at
        usage = self.usage()
        waited = max(accepted_at - self._began, usage.queue_seconds if self.is_accounted else 0.0)
        prefill = usage.prefill_seconds if self.is_accounted else max(0.0, first_told_at - accepted_at)
        decode = usage.decode_seconds if self.is_accounted else max(0.0, now - first_told_at)
        named = {"queue": max(0.0, waited - load), "load": load, "prefill": prefill, "decode": decode}
        total = now - self._began
        return {name: round(value, 4) for name, value in {**named, "total": total}.items()}

    def usage(self) -> Statistics:
        """What the worker told of all choices; until it has, what was counted here."""
        if self.is_accounted:
            usages = [usage for _, usage in sorted(self._usages.items())]
            return add_usages(usages, choices_per_prompt=self.asked.commands[0].n)
        now = self._clock() if self._ended_at is None else self._ended_at
        first = now if self._first_told_at is None else self._first_told_at
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            decode_seconds=now - first,
            first_token_seconds=first - self._began if self.writes else 0.0,
            by_method=tuple(self._by_method.values()),
            reason=self.why_not_drafted,
        )

    def past(self) -> Past:
        """What is left of it, once it has ended."""
        asked = self.asked
        return Past(
            id=asked.id,
            endpoint=asked.endpoint,
            model_id=asked.model_id,
            key_name=asked.key_name,
            created_at=asked.created_at,
            outcome=self.outcome,
            figures=self.figures(),
            prompt=_prompt_text(asked.commands) if self.keeps_texts else None,
            reply=self._reply() if self.keeps_texts else None,
        )

    def figures(self) -> dict[str, Any]:
        """Every number, by the names of the API."""
        asked, usage = self.asked, self.usage()
        command = asked.commands[0]
        return {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "seconds": self.seconds(),
            "timings": timings_object(usage),
            "speculation": speculation_object(usage, command.model.draft_unavailable),
            "asked": {
                "choices": asked.choices,
                "streamed": asked.is_streamed,
                "max_tokens": command.max_tokens,
                "method": command.speculation.method,
                "num_draft_tokens": command.speculation.num_draft_tokens or command.model.num_draft_tokens,
                "sampling": sampling_object(command.sampling),
                "drafters": [draft.id for draft in command.model.drafts],
            },
            "problem": self._problem,
        }

    def _reply(self) -> str:
        choices = [(command.id, index) for command in self.asked.commands for index in range(command.n)]
        replies = ["".join(self._replies[choice]) for choice in choices if choice in self._replies]
        return "\n\n".join(replies)[:MAX_TEXT_CHARACTERS]


def _nothing(_error: PacelineError) -> None:
    """There is nothing to cancel; whoever could be cancelled is not kept, nor its prompt."""


def sampling_object(sampling: SamplingParameters) -> dict[str, Any]:
    """The numbers of the sampling."""
    return {name: getattr(sampling, name) for name in SAMPLING}


def _prompt_text(commands: Sequence[Generate]) -> str:
    """The prompts as they were sent: text as it is, messages and token ids as JSON."""
    texts = []
    for command in commands:
        given = command.text if command.text is not None else command.messages or command.tokens
        texts.append(given if isinstance(given, str) else msgspec.json.encode(given).decode())
    return "\n\n".join(texts)[:MAX_TEXT_CHARACTERS]
