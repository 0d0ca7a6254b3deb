"""Frames between server and worker: tagged msgpack structs, no pickle, no tensors.

Server → worker: commands. Worker → server: events. A request id comes back in every event about it; each choice of
a request (`n` > 1) is one `index`. Exactly one `Finished` per index, or one `Failed` for the whole request.
"""

from typing import Any

import msgspec

from app.core.errors import PacelineError, error_class
from app.core.host import Pressure
from app.core.reason import NO_REASON, Reason
from app.core.request import WHOLE, Grammar, Notice, Quantisation, SamplingParameters, SpeculationRequest
from app.core.statistics import Statistics

MAX_FRAME_BYTES = 64 * 1024 * 1024
MEASUREMENT = "measurement"
"""Owner of requests that only measure: hundreds of them, logged in detail only at level debug."""
MAX_TEMPLATE_ARGUMENTS = 32
# fmt: off
SERVER_NAMES = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "conversations",
    "cycler", "dict", "documents", "eos_token", "joiner", "loop", "max_length", "messages", "namespace", "pad_token",
    "padding", "raise_exception", "range", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self",
    "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation", "unk_token",
})
# fmt: on
"""Names that the server or the template engine sets in a chat template; arguments of a request must not."""


class DraftSpecification(msgspec.Struct, frozen=True):
    """One drafter of a unit. A multi-token head inside the main model's checkpoint has id and path of that model."""

    id: str
    path: str
    method: str = "draft_model"


NOT_THE_UNITS = frozenset(
    {"policy", "num_draft_tokens", "queue_limit", "draft_unavailable", "context_tokens", "longest_token_bytes"}
)
"""Fields of a specification that an open engine does not depend on; all others belong to the unit."""


class ModelSpecification(msgspec.Struct, frozen=True, kw_only=True):
    """A main model and its drafters: loaded, leased and unloaded as one unit. Paths are local folders."""

    id: str
    path: str
    drafts: tuple[DraftSpecification, ...] = ()
    """At most one per method, best first."""
    draft_unavailable: str = ""
    """Why a chosen drafter is not used; empty when there is nothing to explain."""
    policy: str = "auto"
    acceptance: str = "coupled"
    """`coupled`: accept what the target draws too; `strict`: redo close calls plainly; `rejection`: by min(1, p/q)."""
    methods: tuple[str, ...] = ()
    """Methods that may run; empty: all that can."""
    num_draft_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    """Shortest and longest n-gram, in tokens, that is looked up in earlier text to draft what followed it."""
    ngram_across_requests: bool = False
    """Whether n-grams are looked up in earlier requests of the same owner too."""
    max_rows: int = 8
    prefill_chunk_tokens: int = 2048
    max_context_tokens: int | None = None
    quantisation: Quantisation = WHOLE
    context_tokens: int = 0
    longest_token_bytes: int = 0
    """Both as its files state them, for a first check of a prompt's length; 0: unknown."""
    prefix_cache_bytes: int | None = None
    """Memory for the prefix cache; None: a share of what the models leave."""
    queue_limit: int = 128

    def same_unit(self, other: "ModelSpecification") -> bool:
        """Whether an engine opened for one serves the other: only what the scheduler or the server reads may differ."""
        names = set(self.__struct_fields__) - NOT_THE_UNITS
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def no_drafter(self) -> Reason:
        """Reason why no drafter came with the model; `NO_REASON` where none is stated."""
        return Reason("drafters", {"detail": self.draft_unavailable}) if self.draft_unavailable else NO_REASON


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """How long a model stays in memory; None leaves a value to a less specific `Stay`."""

    pinned: bool | None = None
    """Whether only `UnloadModel` takes it out of memory."""
    idle_seconds: float | None = None
    """Seconds without a request until it is unloaded; 0: after its last answer, negative: never."""

    def over(self, other: "Stay") -> "Stay":
        """Return this stay, with the values of `other` where it has none."""
        return Stay(
            pinned=other.pinned if self.pinned is None else self.pinned,
            idle_seconds=other.idle_seconds if self.idle_seconds is None else self.idle_seconds,
        )

    def seconds_left(self, idle_seconds: float) -> float | None:
        """Return the seconds that a model stays which has been idle for `idle_seconds`; None: for ever."""
        limit = self.idle_seconds
        return None if self.pinned or limit is None or limit < 0 else max(0.0, limit - idle_seconds)


UNSAID = Stay()
USUAL_STAY = Stay(pinned=False, idle_seconds=3600.0)


# --- commands -------------------------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate from chat messages, from text, or from token ids: exactly one of the three is set."""

    id: str
    owner: str = ""
    """Identity behind the request; it differs for clients that must not learn of one another."""
    model: ModelSpecification
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    suffix: str | None = None
    """Text that follows the answer, which fills in the middle between `text` and this."""
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    """`auto`, `required` (some call), or `function:NAME` (a call of that tool); enforced by grammar."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    continues: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    grammar: Grammar | None = None
    """Grammar that the text of the answer, after its reasoning, must match."""
    reasoning_tokens: int | None = None
    """Tokens of reasoning after which the block is closed; None: the model decides."""
    template_arguments: dict[str, Any] = {}
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    n: int = 1
    echo: bool = False
    embeds: str = ""
    """`mean`, `last` or `cls`: return an embedding of the prompt, pooled that way, instead of an answer."""
    stay: Stay = UNSAID
    """How long the model stays in memory from now on, as this request says."""
    ignore_end: bool = False
    """Continue past the model's end token, up to `max_tokens`, so that measured answers have the same length."""
    sampling: SamplingParameters = SamplingParameters()
    speculation: SpeculationRequest = SpeculationRequest()
    notices: tuple[Notice, ...] = ()
    """Fields of the request that cannot be honoured; the response lists them as `warnings`."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str


class LoadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `ModelLoaded` or `Failed` with this id, after `LoadProgress` events."""

    id: str
    model: ModelSpecification
    stay: Stay = UNSAID


class KeepModels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set how long models stay in memory where no request has said it since: the settings, whole. Not answered."""

    usual: Stay = USUAL_STAY
    models: dict[str, Stay] = {}
    """Stays by model id, over `usual`."""

    def of(self, model_id: str) -> Stay:
        """Return the stay of a model, without None."""
        return self.models.get(model_id, UNSAID).over(self.usual)


class UnloadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str


class ClearPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clear the prefix cache, in memory and on disk. Not answered."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finish running requests for at most `drain_seconds`, then exit 0."""

    drain_seconds: float = 0.0


class ReadPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tokenize the prompt of a request and generate nothing; answered by `PromptTold` or `Failed`. Loads no model."""

    id: str
    prompt: Generate


Command = ReadPrompt | Generate | Cancel | LoadModel | KeepModels | UnloadModel | ClearPrefixes | Shutdown


# --- events ---------------------------------------------------------------------------------------------------


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """One token as the client sees it in `logprobs`."""

    token: str
    token_bytes: tuple[int, ...] = ()
    logprob: float | None = 0.0
    """None for the first token of a prompt, which has no token before it."""
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one tool call of a choice; the first piece of each call carries its id and name."""

    index: int
    """Index of the call within the choice, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """Next piece of its JSON text; all pieces together are one object."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    process_id: int
    device: str
    versions: dict[str, str] = {}
    memory_ceiling_bytes: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent at least once a second, a few times a second between steps; `pending`: work is waiting for a step."""

    pending: bool
    step_seconds: tuple[float, ...] = ()
    """Duration of each step since the last heartbeat."""
    snapshot: "Snapshot | None" = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt was rendered and tokenized and the request is queued: streaming may begin."""

    id: str
    prompt_tokens: int


class Delta(msgspec.Struct, kw_only=True, tag=True):
    """Text of one step or a few; it grows until it is sent. `accepted_spans`: characters of `text` that came from the
    drafter, (start, end).

    The counts are since the choice's previous delta; over all deltas they add up to its `Statistics`.
    """

    id: str
    index: int
    text: str
    tokens: int
    drafted: int = 0
    accepted: int = 0
    accepted_spans: tuple[tuple[int, int], ...] = ()
    method: str = "off"
    why_not_drafted: Reason | None = None
    """Why its steps draft nothing, or `NO_REASON` if they do; None: unchanged, at first `NO_REASON`."""
    logprobs: tuple[TokenText, ...] = ()
    reasoning: str = ""
    """Reasoning before the answer, not part of `text`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The one terminal event of a choice. `finish_reason` is OpenAI's stop, length or tool_calls, or cancelled."""

    id: str
    index: int
    finish_reason: str
    usage: Statistics
    stop: str = ""
    """The stop string that ended it."""
    unfinished_call: int | None = None
    """The `ToolCallDelta.index` of a call whose arguments were cut off, always the last; None: every call is whole."""
    embedding: tuple[float, ...] = ()
    """Embedding of the prompt, of length 1, if requested."""
    notices: tuple[Notice, ...] = ()
    """Repairs that its prompt needed, and fields of the request that could not be honoured."""


class PromptTold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `ReadPrompt`: the tokens, and their text."""

    id: str
    tokens: list[int]
    text: str
    notices: tuple[Notice, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The one terminal event of a request that failed; `error` names a class of `core.errors`."""

    id: str
    error: str
    message: str
    code: str
    parameter: str | None = None
    retry_after_seconds: int | None = None


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model_id: str
    phase: str
    fraction: float


class ModelLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str
    seconds: float


class ModelUnloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """State of one model in the pool, as `ps`, `/v1/models` and `/metrics` show it."""

    unit: ModelSpecification
    """What it is in memory as."""
    state: str
    """loading, ready or unloading."""
    stay: Stay = USUAL_STAY
    """How long it stays in memory, without None."""
    last_used: float = 0.0
    """Monotonic seconds, which all processes of a computer share, of the last begin or end of a request."""
    weights_bytes: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    prefix_disk_bytes: int = 0
    prefix_found_tokens: dict[str, int] = {}
    """Prompt tokens restored from the prefix cache since it was loaded, by tier: `memory` or `disk`."""
    prefix_trouble: str = ""
    """Why nothing is written to disk at present."""
    cache_families: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    unavailable: dict[str, Reason] = {}
    longest_drafts: dict[str, int] = {}
    """Method -> most drafts that it ever proposes; methods without a limit are absent."""
    max_context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    reading: dict[str, int] = {}
    """Choice (`request id#index`) in prefill -> tokens of its prompt that are in the cache."""
    leases: int = 0

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.unit.id

    @property
    def draft_ids(self) -> tuple[str, ...]:
        """Ids of its drafters."""
        return tuple(draft.id for draft in self.unit.drafts)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds without a request up to `now`, in monotonic seconds."""
        return 0.0 if self.leases else max(0.0, now - self.last_used)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds that it stays in memory without further requests; None: for ever."""
        return self.stay.seconds_left(self.idle_seconds(now))

    @property
    def unavailable_words(self) -> dict[str, str]:
        """Method -> why it cannot run, as text for programs."""
        return {method: str(why) for method, why in self.unavailable.items()}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's state, sent with a heartbeat about once a second while anything changes."""

    models: tuple[LoadedModel, ...] = ()
    active_bytes: int = 0
    cached_bytes: int = 0
    peak_bytes: int = 0
    memory_pressure: Pressure = "normal"
    """Memory pressure of the whole computer."""


class TextWork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Busy seconds of the text side since its last report: load, render, tokenize, stopped (in vain), stream."""

    seconds: dict[str, float]


Event = (
    TextWork
    | Ready
    | Heartbeat
    | Accepted
    | Delta
    | Finished
    | PromptTold
    | Failed
    | LoadProgress
    | ModelLoaded
    | ModelUnloaded
)


# --- between the worker and the process that reads a model's prompts ---------------------------------------------


class PromptRead(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, or the error for its client."""

    tokens: list[int] = []
    checkpoints: tuple[int, ...] = ()
    """Positions in it, ascending, where later prompts will probably diverge from it."""
    grammar: str = ""
    """Grammar of the answer in llguidance's format, as JSON; empty: none."""
    error: Failed | None = None
    seconds: dict[str, float] = {}
    """Seconds by stage, including the load for the first prompt."""
    notices: tuple[Notice, ...] = ()
    """Repairs that the template needed."""


# --- an error as a frame and back: the class by its name, nothing of the traceback ----------------------------

_LONGEST_MESSAGE = 600


def failed_frame(request_id: str, error: PacelineError) -> Failed:
    """Return the terminal frame of a request that ended with `error`."""
    return Failed(
        id=request_id,
        error=type(error).__name__,
        message=_encodable(error.message),
        code=error.code,
        parameter=error.parameter,
        retry_after_seconds=error.retry_after_seconds,
    )


def error_of(failed: Failed) -> PacelineError:
    """Return the error that a frame carries."""
    return error_class(failed.error)(
        failed.message,
        code=failed.code,
        parameter=failed.parameter,
        retry_after_seconds=failed.retry_after_seconds,
    )


def short_text(error: BaseException) -> str:
    """Describe an unexpected exception in one line; the traceback belongs in the log."""
    first_line = next(iter(str(error).splitlines()), "")
    return _encodable(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)


def _encodable(text: str) -> str:
    return text[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode("utf-8")
